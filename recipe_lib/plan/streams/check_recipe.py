"""What `tune plan --check-streams` finds: a recipe's streams, waits of the host, and collectives of
all ranks.
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
from recipe_lib.plan.streams.code_line import format_line
from recipe_lib.plan.streams.collective_order import CollectiveCall, list_order_faults
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.summary.rank_memory import list_first_ranks
from recipe_lib.units import pluralize

MOST_RANKS = 64  # whose collectives are compared
_MICRO_BATCHES = 4  # of each stage, at most
_FOR_GRADIENTS = ("torch/distributed/fsdp/", "ops/host_copies.py")


@dataclass
class RankCheck:
    """One rank's steps. faults: in words. waits: of the host in a step, `what at file:line` -> how
    often, the most frequent first.
    """

    rank: int
    faults: list[str]
    waits: dict[str, int]

    @property
    def unneeded(self) -> int:
        """Waits beyond the one for the numbers that are logged, and those for gradients that the
        host adds up and steps: one a micro-batch, and one for each unit that has sums.
        """
        others = [
            count
            for words, count in self.waits.items()
            if not any(each in words for each in _FOR_GRADIENTS)
        ]
        return max(0, sum(others) - 1)


@dataclass
class StreamCheck:
    """ranks: those whose streams were followed. faults: of the collectives of all ranks, in words.
    compared: which collectives those are. followed: micro-batches, where they are not all of a
    step's.
    """

    ranks: list[RankCheck]
    faults: list[str]
    compared: str
    followed: str

    @property
    def is_clean(self) -> bool:
        """No race, no collective that does not meet, and no wait of the recipe's in a step but for
        the logged one.
        """
        return not self.faults and not any(rank.faults or rank.unneeded for rank in self.ranks)


def check_streams(
    recipe_class: type, cfg: Any, settings: PlanSettings, *, compares: bool = True
) -> StreamCheck:
    """Follows two steps of each traced rank, and the collectives of all ranks in those of a smaller
    model.

    cfg: plannable. compares: whether collectives are compared. Raises UserErrors of the recipe, and
    ConfigError where a step needs values of tensors.
    """
    cfg = replace(cfg, compile=False)  # operators are followed one by one
    settings = replace(settings, phases=())
    count = compute_micro_batches(cfg)[1]
    traced = min(count, _MICRO_BATCHES * count_stages(cfg.parallel))

    def follow(rank: int) -> RankCheck:
        checker = StreamChecker(NAME)
        simulate_rank(recipe_class, cfg, settings, rank, traced=traced, checker=checker)
        waits = Counter(f"{what} at {format_line(line)}" for what, line in checker.waits)
        return RankCheck(rank, checker.faults(), dict(waits.most_common()))

    ranks = settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks)
    result = StreamCheck(
        run_in_processes(follow, list(ranks), "following streams", unit="ranks"), [], "", ""
    )
    if traced < count:
        result.followed = f"{traced} of a step's {count} micro-batches are followed"
    if settings.ranks > 1 and compares:
        small, layers = _limit_layers(cfg)

        def calls_of(rank: int) -> list[CollectiveCall]:
            checker = StreamChecker(NAME)
            simulate_rank(recipe_class, small, settings, rank, traced=traced, checker=checker)
            return checker.calls

        compared = list(range(min(settings.ranks, MOST_RANKS)))
        calls = run_in_processes(calls_of, compared, "comparing collectives", unit="ranks")
        result.faults = list_order_faults(dict(zip(compared, calls, strict=True)))
        made = (
            f"{sum(map(len, calls)):,} calls of {len(compared)} ranks (a model of {layers} layers)"
        )
        result.compared = f"collectives: {made}"
    return result


def _limit_layers(cfg: Any) -> tuple[Any, int]:
    """The config with as few layers as have every kind of them on each stage, and how many those
    are; the whole model where one of its settings names layers that there would not be.
    """
    own = count_layers(cfg)
    lead, period = find_layer_pattern(cfg)
    wanted = lead + 2 * max(
        period, count_stages(cfg.parallel), cfg.memory.activation_offload_prefetch_layers
    )
    if wanted >= own or not isinstance(cfg.parallel.fsdp_wrap_policy, str):
        return cfg, own
    try:
        return limit_layers(cfg, wanted), wanted
    except ConfigError:
        return cfg, own


def render_check(check: StreamCheck) -> str:
    """One part for streams, one for waits of the host, one for collectives."""
    lines = [check.followed] if check.followed else []
    for rank in check.ranks:
        lines += _list_faults(
            f"rank {rank.rank}: uses of memory by streams", "in order", "out of order", rank.faults
        )
        verdict = (
            f", {rank.unneeded} more than the one for the numbers that are logged"
            if rank.unneeded
            else ""
        )
        count = sum(rank.waits.values())
        lines.append(
            f"rank {rank.rank}: the host waits for the device {pluralize(count, 'time')} a"
            f" step{verdict}"
        )
        lines += [f"  {times:,} x {words}" for words, times in rank.waits.items()]
    if check.compared:
        lines += _list_faults(
            check.compared, "meet, without a circle of waits", "do not meet", check.faults
        )
    return "\n".join(lines) + "\n"


def _list_faults(what: str, good: str, bad: str, faults: list[str]) -> list[str]:
    """Return a line that says how many faults there are, and a line for each."""
    if not faults:
        return [f"{what}: {good}"]
    return [f"{what}: {len(faults)} {bad}", *(f"  {fault}" for fault in faults)]
