"""The estimate from two short simulations against the whole one."""

import pytest

from tests.plan.apart import apart, settings

SMALL = ("max_seq_len=256", "memory.loss_chunks=8")
NAMES = {"full": "qwen2_5/0.5B_full", "lora": "qwen2_5/0.5B_lora", "qlora": "qwen2_5/0.5B_qlora"}


def measure(name: str, ranks: int, *overrides: str) -> dict[str, float]:
    """What `quick` says of the first six layers, over what their whole trace does."""
    from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
    from recipe_lib.plan.allocation.replay import replay
    from recipe_lib.plan.build_plan import simulate_rank
    from recipe_lib.plan.search.estimate import quick
    from recipe_lib.plan.timing.stream_schedule import schedule
    from recipe_lib.plan.tracing.simulate import STEADY
    from recipe_lib.plan.world.shape_only_model import with_layers

    recipe_class, cfg, wanted = settings(name, ranks, *overrides)
    cfg = with_layers(cfg, 6)
    found = quick(recipe_class, cfg, wanted)
    whole = simulate_rank(recipe_class, cfg, wanted, 0)
    peaks = whole.trace.active_peaks()
    return {
        "active": found.active / max(peaks.values()),
        "phase": float(peaks[found.phase] == max(peaks.values())),
        "seconds": found.seconds / schedule(whole.trace, STEADY, wanted.hardware).step,
        "tokens": found.tokens - whole.tokens,
        "reserved": found.reserved / replay(whole.trace).reserved,
        "expandable": found.reserved_expandable / replay(whole.trace, AllocatorSettings(expandable=True)).reserved,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "checkpointing", "turns", "more"),
    [
        ("full", 2, "none", 3, ()),
        ("full", 2, "full", 4, ("parallel.reduce_gradients=step", "parallel.reshard_after_forward=false")),
        ("lora", 1, "selective", 1, ()),
        ("qlora", 2, "full", 1, ()),
        ("full", 2, "none", 1, ("~model.path", "tokenizer.path=unread", "model.preset=qwen3_moe/30B")),
    ],
)
def test_the_whole_depth(kind: str, ranks: int, checkpointing: str, turns: int, more: tuple[str, ...]):
    """Six layers from three and four: active bytes, time, and what is reserved."""
    typed = (*SMALL, f"memory.activation_checkpointing={checkpointing}", f"gradient_accumulation_steps={turns}", *more)
    found = apart(measure, NAMES[kind], ranks, *typed)
    assert found["active"] == pytest.approx(1, abs=0.005)
    assert found["phase"] == 1
    assert found["seconds"] == pytest.approx(1, abs=0.03)
    assert found["tokens"] == 0
    assert found["reserved"] == pytest.approx(1, abs=0.1)
    assert found["expandable"] == pytest.approx(1, abs=0.1)


def test_the_peak_moves_with_depth():
    """With few layers the most is there while logits are, with many while gradients are complete."""
    from recipe_lib.plan.search.estimate import _continue, _Short

    early, late = ("step", "backward", "lm_head", "mm"), ("step", "optimizer", "", "add")
    runs = [
        _Short(depth, {early: 100 + depth, late: 10 * depth}, {"step": 5}, (4, 2), 1.0 + depth, 8, depth, depth, 0)
        for depth in (3, 4)
    ]
    assert all(max(run.peaks, key=lambda key: run.peaks[key]) == early for run in runs)
    found = _continue(*runs, 32)
    assert (found.active, found.part, found.reserved, found.held) == (320, "optimizer", 324, 32)
    assert found.seconds == pytest.approx(33.0)


@pytest.mark.parametrize(
    ("layers", "period", "depths"), [(32, 1, (3, 4)), (26, 2, (4, 6)), (34, 6, (4, 10)), (62, 6, (8, 14))]
)
def test_short_depths_miss_whole_periods(layers: int, period: int, depths: tuple[int, int]):
    from recipe_lib.plan.search.estimate import short_depths

    assert short_depths(layers, period) == depths
    assert all((layers - depth) % period == 0 for depth in depths)


def test_numbers_of_layers_become_places():
    from recipe_lib.plan.search.estimate import place_of

    assert [place_of(f"model.layers.{number}.mlp", 4).split(".")[2] for number in range(4)] == [
        "first",
        "*",
        "*",
        "last",
    ]
    assert place_of("lm_head", 4) == "lm_head"


def untimed_over_timed(*changes: tuple[str, ...]) -> list[float]:
    """Active bytes of a steady step alone, over those with the first step before it."""
    from dataclasses import replace

    from recipe_lib.plan.search.estimate import quick

    found = []
    for overrides in changes:
        recipe_class, cfg, wanted = settings(NAMES["full"], 1, *SMALL, *overrides)
        both = [quick(recipe_class, cfg, replace(wanted, timed=timed)).active for timed in (False, True)]
        found.append(both[0] / both[1])
    return found


@pytest.mark.slow
def test_a_steady_step_alone_has_states_where_they_wait():
    """No step has all gradients beside the states, or states on the device that are to wait on the host."""
    offload = ("memory.optimizer_offload=true",)
    in_backward = ("memory.optimizer_in_backward=true", "clip_grad_norm=null", "gradient_accumulation_steps=1")
    assert apart(untimed_over_timed, offload, in_backward + offload) == pytest.approx([1, 1], abs=0.005)
