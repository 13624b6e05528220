"""Run the checks of `tune plan --check-streams`.

`check_streams` simulates a recipe under a `StreamChecker`, to find races between streams and waits
of the host for the device on the traced ranks, and compares the collectives of all ranks.
`render_check` formats the result as text. Traced is what is simulated: some ranks and micro-batches
of a run. A unit is a module that FSDP gathers as one.
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
from recipe_lib.plan.streams.code_lines import format_line
from recipe_lib.plan.streams.collective_order import CollectiveCall, list_order_faults
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.summary.step_time import list_first_ranks
from recipe_lib.units import pluralize

MOST_RANKS = 64  # ranks whose collectives are compared, at most
_MICRO_BATCHES = 4  # micro-batches of a step that are followed for each pipeline stage, at most
# Files whose waits are needed, where the host sums gradients and steps the optimizer: one wait for
# each micro-batch, and one for each FSDP unit that has sums.
_FOR_GRADIENTS = ("torch/distributed/fsdp/", "ops/host_copies.py")


@dataclass
class RankCheck:
    """The faults and waits of one rank's steps."""

    rank: int
    faults: list[str]  # races and the like, a sentence each
    # Waits of the host in the last step: `how at file:line` -> how often, the most frequent first.
    waits: dict[str, int]

    @property
    def unneeded(self) -> int:
        """Return the number of waits beyond those for gradients and one for the logged numbers."""
        num_waits = sum(
            times
            for words, times in self.waits.items()
            if not any(file in words for file in _FOR_GRADIENTS)
        )
        return max(0, num_waits - 1)


@dataclass
class StreamCheck:
    """The faults of a recipe's steps on all ranks."""

    ranks: list[RankCheck]  # one for each rank whose streams were followed
    faults: list[str]  # of the collectives of all ranks, a sentence each
    compared: str  # a phrase on how many collectives were compared; "": none were
    followed: str  # a sentence on how many micro-batches were followed; "": all of a step

    @property
    def is_clean(self) -> bool:
        return not self.faults and not any(rank.faults or rank.unneeded for rank in self.ranks)


def check_streams(
    recipe_class: type, cfg: Any, settings: PlanSettings, *, compares: bool = True
) -> StreamCheck:
    """Follow two steps of each traced rank, and compare the collectives of up to MOST_RANKS ranks.

    cfg: a config that can be simulated (`make_plannable`). compares: True to compare collectives.
    Raises UserErrors of the recipe, and ConfigError where a step needs values of tensors.
    """
    cfg = replace(cfg, compile=False)  # operators are followed one by one
    settings = replace(settings, phases=())  # without loading, validation and saving
    _, num_micro_batches = compute_micro_batches(cfg)
    traced = min(num_micro_batches, _MICRO_BATCHES * count_stages(cfg.parallel))

    def follow(rank: int) -> RankCheck:
        checker = StreamChecker(NAME)
        simulate_rank(
            recipe_class, cfg=cfg, settings=settings, rank=rank, traced=traced, checker=checker
        )
        waits = Counter(f"{how} at {format_line(line)}" for how, line in checker.waits)
        return RankCheck(rank, checker.list_faults(), dict(waits.most_common()))

    ranks = settings.traced_ranks or list_first_ranks(cfg.parallel, settings.ranks)
    check = StreamCheck(
        ranks=run_in_processes(follow, list(ranks), "following streams", unit="ranks"),
        faults=[],
        compared="",
        followed=f"{traced} of a step's {num_micro_batches} micro-batches are followed"
        if traced < num_micro_batches
        else "",
    )
    if settings.ranks > 1 and compares:
        # With few layers, to save time: all ranks are simulated here, not one of each stage.
        small_cfg, num_layers = _limit_layers(cfg)

        def list_calls(rank: int) -> list[CollectiveCall]:
            checker = StreamChecker(NAME)
            simulate_rank(
                recipe_class,
                cfg=small_cfg,
                settings=settings,
                rank=rank,
                traced=traced,
                checker=checker,
            )
            return checker.calls

        compared_ranks = list(range(min(settings.ranks, MOST_RANKS)))
        calls = run_in_processes(list_calls, compared_ranks, "comparing collectives", unit="ranks")
        check.faults = list_order_faults(dict(zip(compared_ranks, calls, strict=True)))
        check.compared = (
            f"collectives: {sum(map(len, calls)):,} calls of {len(compared_ranks)} ranks (a model"
            f" of {num_layers} layers)"
        )
    return check


def _limit_layers(cfg: Any) -> tuple[Any, int]:
    """Return (the config with few layers, how many it has), with every kind of layer on each stage.

    It is the same config if the model is small, or a setting names layers that a smaller one lacks.
    """
    num_layers = count_layers(cfg)
    # Layers that come before the pattern, and the number of layers after which it repeats itself.
    lead, period = find_layer_pattern(cfg)
    few_layers = lead + 2 * max(
        period, count_stages(cfg.parallel), cfg.memory.activation_offload_prefetch_layers
    )
    if few_layers >= num_layers or not isinstance(cfg.parallel.fsdp_wrap_policy, str):
        return cfg, num_layers
    try:
        return limit_layers(cfg, few_layers), few_layers
    except ConfigError:
        return cfg, num_layers


def render_check(check: StreamCheck) -> str:
    """Return the report: for each rank its streams and waits of the host, then collectives."""
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
        num_times = pluralize(sum(rank.waits.values()), "time")
        lines.append(f"rank {rank.rank}: the host waits for the device {num_times} a step{verdict}")
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
    """Return a line with the number of faults, and a line for each.

    good, bad: what the first line says without and with faults.
    """
    if not faults:
        return [f"{title}: {good}"]
    return [f"{title}: {len(faults)} {bad}", *(f"  {fault}" for fault in faults)]
