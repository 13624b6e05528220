"""What `tune plan --check-streams` finds: a recipe's streams, waits of the host, and collectives of all ranks."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from recipe_lib.config.mesh import micro_batches, stage_count
from recipe_lib.errors import ConfigError
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.rank_plans import first_of_each_place
from recipe_lib.plan.search.trials import in_processes
from recipe_lib.plan.streams.code_line import text_of
from recipe_lib.plan.streams.collective_order import CollectiveCall, order_faults
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.trace import HOST, OP, WAIT
from recipe_lib.plan.tracing.simulate import FIRST, STEADY, Simulated
from recipe_lib.plan.world.shape_only_model import find_layer_pattern, layer_count, with_layers
from recipe_lib.plan.world.simulated_device import NAME
from recipe_lib.units import counted

MOST_RANKS = 64  # whose collectives are compared
_MICRO_BATCHES = 4  # of each stage, at most
_FOR_GRADIENTS = ("torch/distributed/fsdp/", "ops/host_copies.py")
_MOST_WAITS = 12  # lines of code shown


@dataclass
class RankCheck:
    """One rank's steps. faults: in words. waits: of the host in a step, `what at file:line` -> how often; first_waits:
    the same of the first step. operators, streams, stream_waits: how many there were in a step."""

    rank: int
    faults: list[str]
    waits: dict[str, int]
    first_waits: dict[str, int]
    operators: int
    streams: int
    stream_waits: int


@dataclass
class StreamCheck:
    """ranks: those whose streams were followed. faults: of the collectives of all ranks, in words. calls: of
    collectives compared, of `compared` ranks; layers: of the model that they were compared with."""

    ranks: list[RankCheck]
    faults: list[str] = field(default_factory=list)
    calls: int = 0
    compared: int = 0
    layers: int = 0
    micro_batches: int = 0
    of_micro_batches: int = 0

    @property
    def is_clean(self) -> bool:
        """No race, no collective that does not meet, and no wait of the recipe's in a step but for the logged one."""
        too_many = any(unneeded(rank.waits) for rank in self.ranks)
        return not self.faults and not too_many and not any(rank.faults for rank in self.ranks)


def unneeded(waits: dict[str, int]) -> int:
    """Waits beyond the one for the numbers that are logged, and those for gradients that the host adds up and steps:
    one a micro-batch, and one for each unit that has sums."""
    others = sum(count for words, count in waits.items() if not any(each in words for each in _FOR_GRADIENTS))
    return max(0, others - 1)


def check_streams(recipe_class: type, cfg: Any, settings: PlanSettings, *, compares: bool = True) -> StreamCheck:
    """Follows two steps of each traced rank, and the collectives of all ranks in those of a smaller model.

    cfg: plannable. compares: whether collectives are compared. Raises UserErrors of the recipe, and ConfigError where a
    step needs values of tensors.
    """
    cfg = replace(cfg, compile=False)  # operators are followed one by one
    followed = settings.traced_ranks or first_of_each_place(cfg.parallel, settings.ranks)
    count = micro_batches(cfg)[1]
    traced = min(count, _MICRO_BATCHES * stage_count(cfg.parallel))

    def follow(rank: int) -> RankCheck:
        checker, found = _simulated(recipe_class, cfg, settings, rank, traced)
        return _rank_check(rank, checker, found)

    ranks = in_processes(follow, list(followed), "following streams", unit="ranks")
    result = StreamCheck(ranks, micro_batches=traced, of_micro_batches=count)
    if settings.ranks > 1 and compares:
        small, result.layers = _smaller(cfg)

        def calls_of(rank: int) -> list[CollectiveCall]:
            return _simulated(recipe_class, small, settings, rank, traced)[0].calls

        compared = list(range(min(settings.ranks, MOST_RANKS)))
        made = in_processes(calls_of, compared, "comparing collectives", unit="ranks")
        calls = dict(zip(compared, made, strict=True))
        result.faults = order_faults(calls)
        result.calls, result.compared = sum(map(len, calls.values())), len(compared)
    return result


def _simulated(
    recipe_class: type, cfg: Any, settings: PlanSettings, rank: int, traced: int
) -> tuple[StreamChecker, Simulated]:
    checker = StreamChecker(NAME)
    return checker, simulate_rank(recipe_class, cfg, replace(settings, phases=()), rank, traced=traced, checker=checker)


def _rank_check(rank: int, checker: StreamChecker, found: Simulated) -> RankCheck:
    trace = found.trace
    events = list(trace.phase_events(STEADY))
    ops = [trace.ops[number] for kind, number in events if kind == OP]
    return RankCheck(
        rank=rank,
        faults=checker.faults(),
        waits=_counted(checker, STEADY),
        first_waits=_counted(checker, FIRST),
        operators=len(ops),
        streams=len({op.stream for op in ops}),
        stream_waits=sum(kind == WAIT and trace.syncs[number].stream != HOST for kind, number in events),
    )


def _counted(checker: StreamChecker, phase: str) -> dict[str, int]:
    found = Counter(f"{wait.what} at {text_of(wait.place)}" for wait in checker.waits if wait.phase == phase)
    return dict(found.most_common())


def _smaller(cfg: Any) -> tuple[Any, int]:
    """The config with as few layers as have every kind of them on each stage, and how many those are; the whole model
    where one of its settings names layers that there would not be."""
    own = layer_count(cfg)
    lead, period = find_layer_pattern(cfg)
    wanted = lead + 2 * max(period, stage_count(cfg.parallel), cfg.memory.activation_offload_prefetch_layers)
    if wanted >= own or not isinstance(cfg.parallel.fsdp_wrap_policy, str):
        return cfg, own
    try:
        return with_layers(cfg, wanted), wanted
    except ConfigError:
        return cfg, own


def render_check(check: StreamCheck) -> str:
    """One part for streams, one for waits of the host, one for collectives."""
    lines = []
    if check.micro_batches < check.of_micro_batches:
        lines.append(f"{check.micro_batches} of a step's {check.of_micro_batches} micro-batches are followed")
    for rank in check.ranks:
        lines += _streams(rank) + _waits(rank)
    return "\n".join([*lines, *_collectives(check)]) + "\n"


def _streams(rank: RankCheck) -> list[str]:
    where = (
        f"rank {rank.rank}: {rank.operators:,} operators of a step on "
        f"{counted(rank.streams, 'stream')} with {rank.stream_waits:,} waits between them"
    )
    if not rank.faults:
        return [f"{where}: in order"]
    return [f"{where}: {len(rank.faults)} out of order", *(f"  {fault}" for fault in rank.faults)]


def _waits(rank: RankCheck) -> list[str]:
    """Each line of code that makes the host wait, the most frequent first."""
    count = sum(rank.waits.values())
    more = unneeded(rank.waits)
    verdict = ", for gradients that it adds up and steps" if count > 1 else ""
    if more:
        verdict = f", {more} more than the one for the numbers that are logged"
    lines = [f"rank {rank.rank}: the host waits for the device {counted(count, 'time')} a step{verdict}"]
    lines += [f"  {times:,} x {words}" for words, times in list(rank.waits.items())[:_MOST_WAITS]]
    if len(rank.waits) > _MOST_WAITS:
        lines.append(f"  and at {len(rank.waits) - _MOST_WAITS} lines more")
    once = {words: times for words, times in rank.first_waits.items() if words not in rank.waits}
    return lines + [f"  in the first step also {times:,} x {words}" for words, times in once.items()]


def _collectives(check: StreamCheck) -> list[str]:
    if not check.compared:
        return []
    what = f"collectives: {check.calls:,} calls of {check.compared} ranks (a model of {check.layers} layers)"
    if not check.faults:
        return [f"{what} meet, without a circle of waits"]
    return [f"{what}: {len(check.faults)} do not meet", *(f"  {fault}" for fault in check.faults)]
