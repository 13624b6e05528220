"""Levers: what they are said to do is what two plans differ by."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, Advice
from recipe_lib.units import GIB
from tests.plan.apart import build_settings, call_in_fork
from tests.plan.configs import load
from tests.plan.mixtures import write_mixture
from tests.plan.plans import build_example_plan

CONFIG = (
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "parallel.fsdp_wrap_policy=layers",
    "device=auto",
    "max_seq_len=64",
)


def advice(*typed: str) -> tuple[str, list[Advice], dict[str, int]]:
    """(verdict, advice, active bytes of whole plans with the overrides `typed` and with none)."""
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.search import advice as module
    from recipe_lib.plan.search.trials import format_overrides
    from recipe_lib.plan.simulated_world.shape_only_model import limit_layers

    active: dict[str, int] = {}
    for words in (*typed, ""):
        recipe_class, cfg, wanted = build_settings("demo/full", 2, *CONFIG, *words.split())
        cfg = limit_layers(cfg, 2)
        plan, _ = make_plan(recipe_class, cfg, wanted)
        active[words] = plan.heaviest.peak.active
    # Those and a few more are enough for this process, which is to be short.
    kept = {*typed, "parallel.reshard_after_forward=false"}
    every = module.list_levers(cfg, wanted)
    module.list_levers = lambda cfg, wanted: [
        lever for lever in every if format_overrides(lever.changes) in kept
    ]
    return plan.verdict, module.advise(plan, *module.try_levers(recipe_class, cfg, wanted)), active


@pytest.mark.slow
def test_bytes_are_the_difference_of_two_plans():
    """Within 0.5 % of the peak; where the run fits, what makes it faster comes first."""
    typed = ["batch_size=2 gradient_accumulation_steps=4", "optimizer.name=sgd"]
    verdict, found, active = call_in_fork(advice, *typed)
    by_override = {row.override: row for row in found}
    assert verdict == FITS
    for words in typed:
        assert by_override[words].bytes == pytest.approx(
            active[words] - active[""], abs=0.005 * active[""]
        )
        assert by_override[words].fits
    assert found[0].override == "parallel.reshard_after_forward=false"
    assert found[0].seconds is not None
    assert found[0].seconds < 0 < found[0].bytes


def test_what_makes_it_fit_comes_first():
    """Of levers that were tried: by bytes within those that make it fit and those that do not; none
    without effect.
    """
    from recipe_lib.plan.search.advice import advise
    from recipe_lib.plan.search.lever_table import Lever
    from recipe_lib.plan.search.trials import Estimate

    plan = build_example_plan()
    plan.device.usable = plan.heaviest.reserved_expandable - GIB
    plan.verdict = DOES_NOT_FIT

    def run(gained: int) -> Estimate:
        size = plan.heaviest.peak.active - gained
        return Estimate(size, size, size, 0, 1.0, 1, 0, 0, 0, "", usable=plan.device.usable)

    gains = {"little": GIB // 2, "enough": GIB, "most": 2 * GIB, "none": 0, "worse": -GIB}
    tried = [(Lever({name: 1}), run(gained)) for name, gained in gains.items()]
    found = advise(plan, run(0), tried)
    assert [(row.override, row.bytes, row.fits) for row in found] == [
        ("most=1", -2 * GIB, True),
        ("enough=1", -GIB, True),
        ("PYTORCH_ALLOC_CONF=expandable_segments:True", -2 * GIB // 3, False),
        ("little=1", -GIB // 2, False),
    ]


def test_levers_that_the_table_refuses_are_left_out():
    from recipe_lib.plan.search.trials import apply_changes, format_overrides

    cfg = load("demo/full", "optimizer.betas=[0.8,0.9]", "lr_scheduler.warmup_steps=0")
    assert apply_changes(cfg, {"optimizer.name": "sgd"}) is None
    assert apply_changes(cfg, {"memory.cpu_offload": True}) is None  # demo/full names the CPU
    assert apply_changes(cfg, {"lora.rank": 4}) is None
    other: Any = apply_changes(cfg, {"batch_size": 2, "memory.loss_chunks": 4})
    assert (other.batch_size, other.memory.loss_chunks, cfg.batch_size) == (2, 4, 32)
    wanted = dataclasses.make_dataclass("Wanted", ["ranks", "sequence"])
    from recipe_lib.plan.search.lever_table import list_levers
    from recipe_lib.plan.simulated_world.planned_data import PlannedSequence

    offered = {
        format_overrides(lever.changes)
        for lever in list_levers(cfg, wanted(4, PlannedSequence(100, "")))
    }
    assert {
        "batch_size=16 gradient_accumulation_steps=2",
        "dtype=bf16",
        "parallel.data_replicate=2",
    } <= offered


def test_reducing_once_a_step_is_offered_where_a_step_has_several_micro_batches():
    from recipe_lib.plan.search.lever_table import list_levers
    from recipe_lib.plan.search.trials import apply_changes, format_overrides
    from recipe_lib.plan.simulated_world.planned_data import PlannedSequence

    wanted = dataclasses.make_dataclass("Wanted", ["ranks", "sequence"])(
        4, PlannedSequence(100, "")
    )
    once = "parallel.reduce_gradients=step"
    both = f"{once} parallel.reshard_after_forward=false"
    for accumulation, fits in ((1, False), (4, True)):
        cfg = load("demo/full", f"gradient_accumulation_steps={accumulation}")
        offered = {
            format_overrides(lever.changes): lever.changes for lever in list_levers(cfg, wanted)
        }
        assert [apply_changes(cfg, offered[text]) is not None for text in (once, both)] == [
            fits,
            fits,
        ]
    back = {
        format_overrides(lever.changes)
        for lever in list_levers(apply_changes(cfg, offered[both]), wanted)
    }
    assert {"parallel.reduce_gradients=micro_batch", "parallel.reshard_after_forward=true"} <= back


def test_a_teacher_in_memory_is_rounded_or_streamed_and_one_on_the_disk_is_not() -> None:
    from recipe_lib.plan.search.lever_table import list_levers
    from recipe_lib.plan.search.trials import apply_changes, format_overrides
    from recipe_lib.plan.simulated_world.planned_data import PlannedSequence

    wanted = dataclasses.make_dataclass("Wanted", ["ranks", "sequence"])(
        1, PlannedSequence(100, "")
    )
    of_teachers = {
        f"distill.{text}"
        for text in ("quantize_teacher=nf4", "quantize_teacher=int8", "stream_teacher=true")
    }

    def offered(*overrides: str) -> set[str]:
        cfg = load("llama3_2/1B_distill", *overrides)
        assert all(
            apply_changes(cfg, lever.changes)
            for lever in list_levers(cfg, wanted)
            if "teacher" in str(lever.changes)
        )
        return {format_overrides(lever.changes) for lever in list_levers(cfg, wanted)} & of_teachers

    assert offered("distill.quantize_teacher=none") == of_teachers
    assert offered() == of_teachers - {"distill.quantize_teacher=nf4"}
    assert offered("distill.stream_teacher=true") == {"distill.quantize_teacher=int8"}
    whole = load("llama3_2/1B_distill", "distill.quantize_teacher=none")
    first = next(lever for lever in list_levers(whole, wanted) if "parameters" in lever.lowers)
    assert first.changes == {"distill.quantize_teacher": "nf4"}


def test_a_search_rounds_a_teacher_or_sends_it_to_the_host_and_states_only_of_what_is_trained() -> (
    None
):
    from recipe_lib.plan.search.trial_order import list_groups
    from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
    from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

    wanted = dataclasses.make_dataclass("Wanted", ["ranks", "sequence"])(
        1, PlannedSequence(100, "")
    )

    def groups(cfg: Any, fixed: tuple[str, ...] = ()) -> list[list[dict[str, Any]]]:
        return list(list_groups(cfg, wanted, fixed))

    cfg = load("llama3_2/1B_distill", "distill.quantize_teacher=none", "distill.trainable=all")
    stays = {"memory.cpu_offload": False}
    teacher = [
        {"distill.stream_teacher": True},
        {"distill.quantize_teacher": "int8"},
        {"distill.quantize_teacher": "nf4"},
    ]
    first, second, third, *_ = groups(cfg)
    assert (first, second) == ([stays], [stays | one for one in teacher])
    # Every parameter has states; the teacher has its fewest bits by then.
    assert stays | teacher[2] | {"optimizer.state_bits": 8} in third
    every = [one for group in groups(cfg) for one in group]
    assert not any("lora.quantize_base" in one for one in every)
    assert groups(cfg, ("distill.stream_teacher",))[1] == [stays | one for one in teacher[1:]]
    kept = [one for group in groups(cfg, ("memory.cpu_offload",)) for one in group]
    assert not any("memory.cpu_offload" in one or "memory.optimizer_offload" in one for one in kept)
    adapters, _ = make_plannable(
        load("llama3_2/1B_distill", "distill.trainable=adapters")
    )  # a teacher in NF4 already
    assert groups(adapters)[1] == [stays | teacher[0]]
    assert any("lora.quantize_base" in one for group in groups(adapters) for one in group)


def test_overrides_are_typed_as_they_stand():
    from recipe_lib.config import load_config
    from recipe_lib.plan.search.trials import format_overrides

    changes = {
        "memory.cpu_offload": False,
        "parallel.reduce_dtype": None,
        "optimizer.betas": [0.5, 0.9],
        "batch_size": 3,
    }
    cfg = load_config("demo/full", format_overrides(changes).split())
    assert (cfg.memory.cpu_offload, cfg.parallel.reduce_dtype, cfg.optimizer.betas, cfg.batch_size) == (
        False, None, [0.5, 0.9], 3,
    )  # fmt: skip


def mixture_config(folder: Path, *typed: str) -> Any:
    """Of adapters of a tiny mixture, plannable."""
    model = write_mixture(folder, "mixtral")
    return build_settings(
        "llama3/8B_lora", 1, *typed, "~model.path", "tokenizer.path=x", f"model.preset={model}"
    )[1]


def test_adapters_of_attention_are_weighed_against_those_of_all_experts(tmp_path: Path) -> None:
    """Whichever the config has, the other is tried."""
    from recipe_lib.plan.search.lever_table import list_levers
    from recipe_lib.plan.simulated_world.planned_data import PlannedSequence

    wanted = dataclasses.make_dataclass("Wanted", ["ranks", "sequence"])(
        1, PlannedSequence(100, "")
    )
    cfg = mixture_config(tmp_path, "lora.rank=4", "lora.quantize_base=nf4")
    (lever,) = [one for one in list_levers(cfg, wanted) if one.is_always_shown]
    assert (
        lever.changes == {"lora.target_modules": ["all-linear", "experts"]}
        and "with those" in lever.note
    )
    cfg.lora.target_modules = ["q", "experts"]
    (lever,) = [one for one in list_levers(cfg, wanted) if one.is_always_shown]
    assert lever.changes == {"lora.target_modules": ["q"]} and "without those" in lever.note
    dense = build_settings("llama3/8B_lora", 1)[1]
    assert not [one for one in list_levers(dense, wanted) if one.is_always_shown]


def test_what_is_weighed_is_shown_where_it_takes_more() -> None:
    from recipe_lib.plan.search.advice import advise
    from recipe_lib.plan.search.lever_table import Lever
    from recipe_lib.plan.search.trials import Estimate

    plan = build_example_plan()
    size = plan.heaviest.peak.active
    sizes = size + GIB, size + GIB, size + GIB
    more = Estimate(*sizes, 0, 2.0, 1, 0, 0, 0, "", usable=plan.device.usable)
    base = dataclasses.replace(more, active=size, seconds=1.0)
    tried = [
        (Lever({name: 1}, is_always_shown=name == "weighed"), more) for name in ("a", "weighed")
    ]
    shown = {row.override: row.bytes for row in advise(plan, base, tried)}
    assert shown.get("weighed=1") == GIB and "a=1" not in shown


def test_streaming_comes_with_what_trained_layers_need() -> None:
    from recipe_lib.plan.search.trials import apply_changes, stream_layers

    adapters, whole = (
        load("llama3/8B_qlora"),
        load("llama3/8B_full", "optimizer.name=sgd", "~optimizer.betas"),
    )
    assert stream_layers(adapters) == {"memory.stream_layers": True}
    stepped = {
        "memory.optimizer_in_backward": True,
        "clip_grad_norm": None,
        "gradient_accumulation_steps": 1,
    }
    assert (
        stream_layers(whole)
        == {
            "memory.stream_layers": True,
            "memory.optimizer_offload": True,
        }
        | stepped
    )
    assert apply_changes(load("llama3/8B_full"), stream_layers(load("llama3/8B_full"))) is not None
