"""Plans of mixtures of experts: what the router changes in them, and which operations count."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.plan.plan_schema import Plan
from tests.plan.apart import build_settings, call_in_fork
from tests.plan.mixtures import CHOICES, EXPERTS, write_mixture

TOKENS = 64
ROWS = 2
LAYERS = 2
WIDTH = 32
INNER = 32
TYPED = (
    f"max_seq_len={TOKENS}",
    f"batch_size={ROWS}",
    "dtype=bf16",
    "device=auto",
    "~validation.source",
)


def planned(
    folder: Path, *more: str, device: str = "rtx4090", ranks: int = 1, **changed: Any
) -> tuple[Plan, int]:
    """A plan of full fine-tuning, and the model's operations in a step. changed: keys of the
    model's config.json.
    """

    def work() -> tuple[Plan, int]:
        from recipe_lib.plan.build_plan import make_plan
        from recipe_lib.plan.timing.cost import count_model_flops
        from recipe_lib.plan.tracing.trace_rank import STEADY

        model = write_mixture(folder, "qwen3_moe", **changed)
        typed = (*TYPED, f"model.preset={model}", *(more or ("gradient_accumulation_steps=1",)))
        recipe, cfg, wanted = build_settings("demo/full", ranks, *typed, device=device)
        plan, trace = make_plan(recipe, cfg, wanted)
        return plan, count_model_flops(trace, STEADY)

    found: tuple[Plan, int] = call_in_fork(work)
    return found


@pytest.mark.slow
def test_operations_are_those_of_the_experts_that_compute_a_token(tmp_path: Path) -> None:
    """Twice as many experts are more work for the router alone; twice as many choices are two more
    experts a token. Forward once, backward twice.
    """
    plan, flops = planned(tmp_path)
    more_experts, of_more = planned(tmp_path, num_experts=2 * EXPERTS)
    more_choices, of_choices = planned(tmp_path, num_experts_per_tok=2 * CHOICES)
    router = 3 * LAYERS * ROWS * TOKENS * 2 * WIDTH * EXPERTS
    assert of_more - flops == router
    assert of_choices - flops == 3 * LAYERS * ROWS * TOKENS * CHOICES * 2 * (3 * WIDTH * INNER)
    assert more_experts.layers[-1].parameters == plan.layers[-1].parameters
    assert (
        plan.time is not None
        and more_choices.time is not None
        and plan.time.mfu < more_choices.time.mfu
    )


def lines_of(plan: Plan) -> list[str]:
    return [line for line in plan.assumptions if "router" in line]


@pytest.mark.slow
def test_a_plan_says_what_the_router_changes(tmp_path: Path) -> None:
    plan, _ = planned(
        tmp_path, "parallel.pipeline=2", "gradient_accumulation_steps=2", device="h100", ranks=2
    )
    (line,) = lines_of(plan)
    assert line.startswith(
        f"each token is computed by {CHOICES} of {EXPERTS} experts and none is dropped: all bytes"
    )
    assert "times are those of even loads" in line and f"go to the same {CHOICES}" in line
    time = plan.time
    assert time is not None and time.same_experts is not None
    assert 0 < time.same_experts <= time.step
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).time == time


@pytest.mark.slow
def test_weights_of_experts_without_rows_are_not_read(tmp_path: Path) -> None:
    """Of many large experts and few tokens, reading the weights is what takes time; gradients of
    all are written. With what is computed again, the host's launches would be in the way.
    """
    large = {"num_experts": 64, "moe_intermediate_size": 16384}
    plan, _ = planned(
        tmp_path,
        "memory.recompute_cheap=false",
        "gradient_accumulation_steps=1",
        device="h100",
        **large,
    )
    assert plan.time is not None and plan.time.same_experts is not None
    assert plan.time.same_experts < plan.time.step


def test_of_all_experts_there_is_one_choice(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, num_experts_per_tok=EXPERTS)
    assert plan.time is not None and plan.time.same_experts == pytest.approx(plan.time.step)


def test_a_plan_without_a_mixture_says_nothing_of_routers(tmp_path: Path) -> None:
    def work() -> Plan:
        from recipe_lib.plan.build_plan import make_plan

        return make_plan(*build_settings("demo/full", 1, *TYPED))[0]

    plan = call_in_fork(work)
    assert not lines_of(plan) and plan.time.same_experts is None
