"""The checks of `tune plan --check-streams`.

`check_streams` follows a recipe's streams and waits of the host on the traced ranks, and compares
the collectives of all ranks; `render_check` writes what it found as text.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.mesh import compute_micro_batches, count_stages
from recipe_lib.errors import ConfigError
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.search.trials import run_in_processes
from recipe_lib.plan.simulated_world.shape_only_model import (
    count_layers,
    find_layer_pattern,
    limit_layers,
)
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.streams.collective_order import CollectiveCall, list_order_faults
from recipe_lib.plan.streams.stream_checker import StreamChecker, format_line
from recipe_lib.plan.summary.step_time import list_first_ranks
from recipe_lib.units import pluralize

MOST_RANKS = 64  # whose collectives are compared
_MICRO_BATCHES = 4  # that are followed for each stage, at most
# Files whose waits are for gradients that the host adds up and steps: one a micro-batch, and one
# for each unit that has sums.
_FOR_GRADIENTS = ("torch/distributed/fsdp/", "ops/host_copies.py")


@dataclass
class RankCheck:
    """The faults and waits of one rank's steps."""

    rank: int
    faults: list[str]  # in words
    # Waits of the host in a step, `what at file:line` -> how often, the most frequent first.
    waits: dict[str, int]

    @property
    def unneeded(self) -> int:
        """Return the waits beyond those for gradients and the one for the logged numbers."""
        count = sum(
            times
            for words, times in self.waits.items()
            if not any(file in words for file in _FOR_GRADIENTS)
        )
        return max(0, count - 1)


@dataclass
class StreamCheck:
    """The faults of a recipe's steps on all ranks."""

    ranks: list[RankCheck]  # those whose streams were followed
    faults: list[str]  # of the collectives of all ranks, in words
    compared: str  # which collectives those are; "" if none
    followed: str  # how many micro-batches; "" if all of a step's

    @property
    def is_clean(self) -> bool:
        """Return True if there is no race, no unneeded wait, and all collectives meet."""
        return not self.faults and not any(rank.faults or rank.unneeded for rank in self.ranks)


def check_streams(
    recipe_class: type, cfg: Any, settings: PlanSettings, *, compares: bool = True
) -> StreamCheck:
    """Follow two steps of each traced rank, and compare the collectives of all ranks.

    cfg: plannable. compares: whether collectives are compared. Raises UserErrors of the recipe, and
    ConfigError where a step needs values of tensors.
    """
    cfg = replace(cfg, compile=False)  # operators are followed one by one
    settings = replace(settings, phases=())
    count = compute_micro_batches(cfg)[1]
    traced = min(count, _MICRO_BATCHES * count_stages(cfg.parallel))

    def follow(rank: int) -> RankCheck:
        checker = StreamChecker(NAME)
        simulate_rank(
            recipe_class, cfg=cfg, settings=settings, rank=rank, traced=traced, checker=checker
        )
        waits = Counter(f"{what} at {format_line(line)}" for what, line in checker.waits)
        return RankCheck(rank, checker.list_faults(), dict(waits.most_common()))

    ranks = settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks)
    check = StreamCheck(
        ranks=run_in_processes(follow, list(ranks), "following streams", unit="ranks"),
        faults=[],
        compared="",
        followed=f"{traced} of a step's {count} micro-batches are followed"
        if traced < count
        else "",
    )
    if settings.ranks > 1 and compares:
        # Of a smaller model: here all ranks are simulated, not one of each stage.
        small, layers = _limit_layers(cfg)

        def list_calls(rank: int) -> list[CollectiveCall]:
            checker = StreamChecker(NAME)
            simulate_rank(
                recipe_class,
                cfg=small,
                settings=settings,
                rank=rank,
                traced=traced,
                checker=checker,
            )
            return checker.calls

        compared = list(range(min(settings.ranks, MOST_RANKS)))
        calls = run_in_processes(list_calls, compared, "comparing collectives", unit="ranks")
        check.faults = list_order_faults(dict(zip(compared, calls, strict=True)))
        check.compared = (
            f"collectives: {sum(map(len, calls)):,} calls of {len(compared)} ranks (a model of"
            f" {layers} layers)"
        )
    return check


def _limit_layers(cfg: Any) -> tuple[Any, int]:
    """Return the config with as few layers as have every kind of them on each stage, and how many.

    It is the whole model where one of its settings names layers that there would not be.
    """
    num_layers = count_layers(cfg)
    lead, period = find_layer_pattern(cfg)
    few = lead + 2 * max(
        period, count_stages(cfg.parallel), cfg.memory.activation_offload_prefetch_layers
    )
    if few >= num_layers or not isinstance(cfg.parallel.fsdp_wrap_policy, str):
        return cfg, num_layers
    try:
        return limit_layers(cfg, few), few
    except ConfigError:
        return cfg, num_layers


def render_check(check: StreamCheck) -> str:
    """Return a report: a part for streams, one for waits of the host, one for collectives."""
    lines = [check.followed] if check.followed else []
    for rank in check.ranks:
        lines += _list_faults(
            f"rank {rank.rank}: uses of memory by streams",
            good="in order",
            bad="out of order",
            faults=rank.faults,
        )
        verdict = (
            f", {rank.unneeded} more than the one for the numbers that are logged"
            if rank.unneeded
            else ""
        )
        count = pluralize(sum(rank.waits.values()), "time")
        lines.append(f"rank {rank.rank}: the host waits for the device {count} a step{verdict}")
        lines += [f"  {times:,} x {words}" for words, times in rank.waits.items()]
    if check.compared:
        lines += _list_faults(
            check.compared,
            good="meet, without a circle of waits",
            bad="do not meet",
            faults=check.faults,
        )
    return "\n".join(lines) + "\n"


def _list_faults(title: str, *, good: str, bad: str, faults: list[str]) -> list[str]:
    """Return a line that says how many faults there are, and a line for each."""
    if not faults:
        return [f"{title}: {good}"]
    return [f"{title}: {len(faults)} {bad}", *(f"  {fault}" for fault in faults)]
