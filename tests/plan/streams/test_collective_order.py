"""Collectives that do not meet are found, by made-up calls and by recipes with a planted fault;
those shipped meet.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe_lib.plan.simulated_world.shape_only_model import limit_layers
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.streams.collective_order import (
    CollectiveCall,
    find_circles,
    find_mismatches,
    list_order_faults,
)
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.trace_rank import simulate
from tests.plan.apart import build_settings, call_in_fork


def call(
    operation: str, ranks: tuple[int, ...], *after: int, size: int = 8, pair: bool = False
) -> CollectiveCall:
    return CollectiveCall(
        operation, ("" if pair else "x", ranks, pair), size, "fp32", "a.py:1", after
    )


def test_sends_meet_receives() -> None:
    pair = (0, 1)
    good = {0: [call("send", pair, pair=True)], 1: [call("recv", pair, pair=True)]}
    bad = {0: [call("send", pair, pair=True)], 1: [call("send", pair, pair=True)]}
    assert list_order_faults(good) == []
    assert len(find_mismatches(bad)) == 1


def test_sizes_types_and_counts_are_compared() -> None:
    ranks = (0, 1)
    assert (
        "rank 1 makes no such call"
        in find_mismatches({0: [call("all_gather", ranks)] * 2, 1: [call("all_gather", ranks)]})[0]
    )
    fault = find_mismatches(
        {0: [call("all_gather", ranks)], 1: [call("all_gather", ranks, size=16)]}
    )[0]
    assert "8 bytes" in fault and "16 bytes" in fault and "a.py:1" in fault


def test_a_circle_over_three_ranks_is_found() -> None:
    """Each rank's second collective comes after its first, on one stream."""
    a, b, c = (0, 1), (1, 2), (0, 2)
    calls = {
        0: [call("all_reduce", a), call("all_reduce", c, 0)],
        1: [call("all_reduce", b), call("all_reduce", a, 0)],
        2: [call("all_reduce", c), call("all_reduce", b, 0)],
    }
    assert find_mismatches(calls) == []
    assert find_circles(calls)[0].startswith("a circle of waits: ")
    unordered = {
        rank: [calls[rank][0], call("all_reduce", calls[rank][1].group[1])] for rank in calls
    }
    # Even so each rank's host waits in the first contact until the others are there.
    assert find_circles(unordered)[0].count("communicator") >= 2


def with_step(recipe: type, step: Callable[[Any], None]) -> type:
    class Own(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            step(self)
            return super().train_step(batches)

    return Own


def one_rank_more(recipe: Any) -> None:
    if recipe.world.rank == 3:
        dist.all_reduce(
            torch.ones(4, device=recipe.device), group=recipe.world.mesh.get_group("data_shard")
        )


def round_a_square(recipe: Any) -> None:
    """Ranks 0 1 / 2 3: each begins with the next one on the way round."""
    data, tensor = (recipe.world.mesh.get_group(name) for name in ("data_shard", "tensor"))
    order = (data, tensor) if recipe.world.rank in (1, 2) else (tensor, data)
    for group in order:
        dist.all_reduce(torch.ones(4, device=recipe.device), group=group)


def none(recipe: Any) -> None:
    pass


def faults_of(
    overrides: tuple[str, ...], ranks: int, step: Callable[[Any], None] = none, *, layers: int = 4
) -> list[str]:
    recipe, cfg, wanted = build_settings("demo/full", ranks, *overrides)
    cfg = limit_layers(cfg, layers)
    calls = {}
    for rank in range(ranks):
        checker = StreamChecker(NAME)
        own = with_step(recipe, step)
        simulate(
            own, cfg, wanted.sequence, rank=rank, ranks=ranks, phases=(), checker=checker, traced=4
        )
        assert not checker.list_faults()
        calls[rank] = checker.calls
        assert len(checker.calls) >= 4
    return list_order_faults(calls)


@pytest.mark.slow
def test_shipped_recipes_meet() -> None:
    zbv = ("parallel.pipeline=2", "parallel.pipeline_schedule=zbv", "gradient_accumulation_steps=4")
    assert call_in_fork(faults_of, zbv, 2) == []


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    mismatch = call_in_fork(lambda: faults_of((), 4, one_rank_more, layers=1))
    assert (
        len(mismatch) == 1 and "rank 3" in mismatch[0] and "test_collective_order.py" in mismatch[0]
    )
    circle = call_in_fork(lambda: faults_of(("parallel.tensor=2",), 4, round_a_square, layers=1))
    assert (
        len(circle) == 1
        and circle[0].startswith("a circle of waits")
        and "test_collective_order.py" in circle[0]
    )
