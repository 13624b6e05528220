"""What a few simulated micro-batches are counted as is what all of them would be."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config import load_config
from recipe_lib.plan.tracing import simulated_micro_batches
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.plan.own_recipes import derive_recipe, run_as_shipped, run_from_a_list
from tests.plan.test_real_runs import BASE, TIED
from tests.recipes.runs import FULL, PLAIN, get_recipe_class, import_recipe_module

SHAPE = SimpleNamespace(tokens=64, documents=1)


def config(count: int, *overrides: str) -> Any:
    words = [*BASE, f"model.preset={TIED}", f"gradient_accumulation_steps={count}", *overrides]
    return load_config(PLAIN, words, import_recipe_module(FULL).Config)


def count_operators(trace: Trace) -> Counter[tuple[Any, ...]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for op in trace.iterate_ops(STEADY):
        counts[op.name, op.part, op.module, op.bytes, op.transfer, op.on_host] += op.repeats
    return counts


def of_listed_micro_batches() -> list[tuple[int, bool, bool]]:
    """(micro-batches simulated, whether that is called an estimate, whether operators are the
    shipped recipe's).
    """
    listed = derive_recipe(run_from_a_list)
    shipped = derive_recipe(run_as_shipped)
    listed.treats_all_alike = shipped.treats_all_alike = True
    expected = count_operators(simulate(shipped, config(8), SHAPE, phases=()).trace)
    found = []
    for most_events in (simulated_micro_batches.MAX_EVENTS, 1):
        simulated_micro_batches.MAX_EVENTS = most_events
        one = simulate(listed, config(8), SHAPE, phases=())
        found.append((one.traced, bool(one.estimate), count_operators(one.trace) == expected))
    return found


def test_micro_batches_that_are_listed_before_the_first_are_counted():
    assert run_ranks(of_listed_micro_batches, 1, process_group=False)[0] == [
        (8, False, True),
        (2, True, True),
    ]


def of_a_lever(*overrides: str) -> tuple[int, dict[tuple[Any, ...], int]]:
    """(micro-batches simulated of five, operators that are counted otherwise than with all of
    them).
    """
    recipe = get_recipe_class(import_recipe_module(FULL))
    few = simulate(recipe, config(5, *overrides), SHAPE, ranks=2, phases=())
    counts = count_operators(few.trace)
    counts.subtract(
        count_operators(
            simulate(recipe, config(5, *overrides), SHAPE, ranks=2, phases=(), traced=5).trace
        )
    )
    return few.traced, {key: count for key, count in counts.items() if count}


@pytest.mark.parametrize(
    ("overrides", "traced"),
    [
        (("device=cuda", "memory.cpu_offload=true"), 2),
        pytest.param(("parallel.reduce_gradients=step",), 3, marks=pytest.mark.slow),
        (
            ("parallel.accumulate_grad_in_fp32=true", "dtype=bf16"),
            2,
        ),  # gradients are added behind each backward
    ],
)
def test_operators_are_counted_as_often_as_all_micro_batches_have_them(
    overrides: tuple[str, ...], traced: int
):
    assert run_ranks(of_a_lever, 1, *overrides, process_group=False)[0] == (traced, {})
