"""Estimates, which are of one exact step, against whole plans."""

import pytest

from tests.plan.apart import build_settings, call_in_fork

SMALL = ("max_seq_len=256", "memory.loss_chunks=8")
NAMES = {"full": "qwen2_5/0.5B_full", "lora": "qwen2_5/0.5B_lora", "qlora": "qwen2_5/0.5B_qlora"}
IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "clip_grad_norm=null",
    "gradient_accumulation_steps=1",
)
OFFLOAD = "memory.optimizer_offload=true"
MIXTURE = ("~model.path", "tokenizer.path=unread", "model.preset=qwen3_moe/30B")
STAGES = ("parallel.pipeline=2", "gradient_accumulation_steps=6")
LAYERS = 4
# Config, ranks, layers, overrides. 16 layers are planned from few.
CASES = {
    "mixture": ("full", 2, LAYERS, MIXTURE),
    "states in host memory, stepped in backward": ("full", 1, LAYERS, (OFFLOAD, *IN_BACKWARD)),
    "streamed layers": ("qlora", 1, LAYERS, ("memory.stream_layers=true",)),
    "deep": ("full", 2, 16, ("gradient_accumulation_steps=4",)),
    "pipeline that cuts backward": ("lora", 2, LAYERS, (*STAGES, "parallel.pipeline_schedule=zbv")),
}


def measure(name: str) -> tuple[dict[str, float], dict[str, float]]:
    """(what `estimate_run` says, what the whole plan has)."""
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.search.trials import estimate_run
    from recipe_lib.plan.simulated_world.shape_only_model import limit_layers

    kind, ranks, layers, overrides = CASES[name]
    recipe_class, cfg, wanted = build_settings(NAMES[kind], ranks, *SMALL, *overrides)
    cfg = limit_layers(cfg, layers)
    estimate = estimate_run(recipe_class, cfg, wanted)
    plan = make_plan(recipe_class, cfg, wanted)[0]
    assert plan.time is not None
    planned = {
        "active": plan.heaviest.peak.active,
        "seconds": plan.time.step,
        "tokens": plan.time.tokens_per_step,
        "host": max(rank.host for rank in plan.rank_plans),
        "reserved": plan.heaviest.reserved,
        "expandable": plan.heaviest.reserved_expandable,
    }
    return {
        "active": estimate.active,
        "seconds": estimate.seconds,
        "tokens": estimate.tokens,
        "host": estimate.host,
        "reserved": estimate.reserved,
        "expandable": estimate.reserved_expandable,
    }, planned


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_step_says_what_the_whole_plan_does(name: str):
    found, planned = call_in_fork(measure, name)
    print({key: f"{found[key]} / {planned[key]}" for key in found})
    # What the allocator leaves of a block without splitting it depends on what was there before.
    assert found["active"] == pytest.approx(planned["active"], rel=0.005)
    # Tables that the first step makes are made in the only one.
    assert found["seconds"] == pytest.approx(planned["seconds"], rel=1e-3)
    assert found["tokens"] == planned["tokens"]
    assert found["host"] == pytest.approx(planned["host"], rel=0.005)
    assert found["reserved"] == pytest.approx(planned["reserved"], rel=0.1)
    assert found["expandable"] == pytest.approx(planned["expandable"], rel=0.1)
