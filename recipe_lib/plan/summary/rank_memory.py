"""Compute the memory of one rank: its peaks by phase, what is live there, and whether it fits.

`build_plan.py` calls these functions. A trace is the allocations and operators of a simulated rank,
in order; `build_rank_plan` replays it through a model of torch's caching allocator. A verdict is
FITS, RISKY or DOES_NOT_FIT; it is of the heaviest rank, which reserves the most. A place is a
coordinate in a pipeline.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import (
    DOES_NOT_FIT,
    FITS,
    HOST_ALLOWS,
    RISKY,
    Alive,
    LayerRow,
    PhasePeak,
    RankPlan,
)
from recipe_lib.plan.summary.module_paths import split_number
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, STORAGE_KINDS, Storage, Trace
from recipe_lib.plan.tracing.trace_rank import MAKING_STATES, STEADY, Simulated
from recipe_lib.units import GIB, format_bytes

# A plan that leaves less than this share of the device's memory is called risky: its own error is
# as large.
RISKY_SHARE = 0.03


def build_rank_plan(rank: int, simulated: Simulated) -> RankPlan:
    """Return the memory of a simulated rank: what the allocator takes in each phase."""
    trace = simulated.trace
    host = trace.find_active_peaks(device=False)
    # MAKING_STATES: without a first step the optimizer makes its states from whole gradients, which
    # no run does. What that leaves unused in the allocator is given back to the device.
    default = replay(trace, emptied_after=MAKING_STATES)
    expandable = replay(trace, AllocatorSettings(expandable=True), MAKING_STATES)
    peaks = []
    for phase, (requested, event) in trace.find_peaks().items():
        if phase == MAKING_STATES:
            continue
        # The allocation that made the peak tells what was running; without one (event < 0) the most
        # was live as the phase began.
        storage = trace.storages[trace.events[event][1]] if event >= 0 else Storage(0)
        peaks.append(
            PhasePeak(
                phase,
                active=default.phases[phase].active,
                allocated=default.phases[phase].allocated,
                reserved=default.phases[phase].reserved,
                reserved_expandable=expandable.phases[phase].reserved,
                host=host.get(phase, 0),
                part=storage.part,
                module=storage.module,
                requested=requested,
            )
        )
    return RankPlan(
        rank,
        simulated.coordinates,
        peaks,
        alive=_list_alive(trace, max(peaks, key=lambda peak: peak.active).phase),
        events=default.events,
        most=find_most_by_kind(trace, STEADY),
    )


def find_most_by_kind(trace: Trace, phase: str) -> dict[str, int]:
    """Return kind of memory -> the most bytes on the device that it takes at a time in a phase.

    Return {} for a phase that was not traced.
    """
    live_bytes: dict[str, int] = defaultdict(int)
    most: dict[str, int] = {}
    for _, kind, index, current, *_ in trace.walk():
        if kind == PHASE and current == phase:  # with what is live as it begins
            most |= live_bytes
        elif kind in (ALLOC, FREE) and trace.storages[index].device:
            storage = trace.storages[index]
            live_bytes[storage.kind] += storage.bytes if kind == ALLOC else -storage.bytes
            if current == phase:
                most[storage.kind] = max(most.get(storage.kind, 0), live_bytes[storage.kind])
    return {kind: size for kind in STORAGE_KINDS if (size := most.get(kind, 0))}


def _list_alive(trace: Trace, phase: str) -> list[Alive]:
    """Return what is live at the peak of a phase, by kind, module and parameter, largest first."""
    # (kind, module, parameter) -> bytes of each storage.
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for index in trace.list_alive_at_peak(phase):
        storage = trace.storages[index]
        if storage.bytes:
            # A parameter is its module's, whichever module was running when it was made.
            module = storage.label.rpartition(".")[0] if storage.label else storage.module
            groups[storage.kind, module, storage.label].append(storage.bytes)
    rows = [Alive(*key, bytes=sum(sizes), count=len(sizes)) for key, sizes in groups.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.module, row.label))


def build_layer_rows(simulated: Simulated) -> list[LayerRow]:
    """Return the table of modules with the activation bytes that each and its submodules keep."""
    kept: dict[str, int] = defaultdict(int)  # module -> bytes
    for module, size in _sum_kept_activations(simulated.trace).items():
        segments = module.split(".")
        for cut in range(1, len(segments) + 1):
            kept[".".join(segments[:cut])] += size
    return [replace(row, kept=kept.get(row.module, 0)) for row in simulated.modules]


def _sum_kept_activations(trace: Trace) -> dict[str, int]:
    """Return module -> bytes of activations that are live when a backward of the step begins.

    It is the backward with the most such bytes, of equal ones the last.
    """
    part_before = ""  # of the model's last operator: `forward` or `backward`
    most: dict[str, int] = {}  # those of the backward with the most so far
    for _, kind, index, phase, _, alive in trace.walk():
        if kind != OP or phase != STEADY:
            continue
        part = trace.ops[index].part
        if part == "backward" and part_before == "forward":
            kept: dict[str, int] = defaultdict(int)
            for storage in alive.values():
                if storage.kind == "activations":
                    kept[storage.module] += storage.bytes
            most = kept if sum(kept.values()) >= sum(most.values()) else most
        part_before = part if part in ("forward", "backward") else part_before
    return most


def merge_layer_rows(places: Sequence[list[LayerRow]]) -> list[LayerRow]:
    """Return the table of modules of a whole model from those of its places in a pipeline.

    Each module is in it once, in the model's order; the root module's row is the last place's.
    """
    # Module -> (sort key, row). Sort key: (0 before the layers, 1 in them, 2 after them; number of
    # the layer; index of the row).
    entries: dict[str, tuple[tuple[int, int, int], LayerRow]] = {}
    for rows in places:
        seen_layer = False
        for index, row in enumerate(rows):
            number = split_number(row.module)[1]
            seen_layer = seen_layer or number is not None
            if number is not None:
                order = (1, number, index)
            else:
                order = (2 if seen_layer else 0, 0, index)
            if row.module not in entries or not row.module:
                entries[row.module] = (order, row)
    return [row for _, row in sorted(entries.values(), key=lambda entry: entry[0])]


# Whether it fits.


def has_room(reserved: int, usable: int, hardware: Hardware) -> bool:
    """Return True if `usable` bytes leave room for a plan's own error beside those reserved."""
    return reserved <= usable - RISKY_SHARE * hardware.memory


def decide_verdict(trace: Trace, heaviest: RankPlan, usable: int, hardware: Hardware) -> str:
    """Return whether the heaviest rank fits into `usable` bytes: FITS, RISKY or DOES_NOT_FIT.

    It is risky if it needs expandable segments, retries of the allocator, or the last few percent
    of the device. trace: of that rank.
    """
    if has_room(heaviest.reserved, usable, hardware):
        return FITS
    if heaviest.reserved <= usable or heaviest.reserved_expandable <= usable:
        return RISKY
    if max(peak.requested for peak in heaviest.peaks) > usable:
        return DOES_NOT_FIT
    # The tensors alone would fit: an allocator that runs into its limit gives unused blocks back
    # and tries again, which only a replay with that limit can tell.
    survives = any(
        replay(trace, AllocatorSettings(expandable=expandable, cap=usable)).survived
        for expandable in (True, False)
    )
    return RISKY if survives else DOES_NOT_FIT


class NotSimulated(NamedTuple):
    """What a run may take beyond what was simulated."""

    bytes: int
    reason: str  # empty: nothing is left out


def estimate_not_simulated(simulated: Simulated, steps: int | None) -> NotSimulated:
    """Return what a run may take beyond what was simulated. steps: of the run; None: not known."""
    extra_bytes = simulated.untraced_bytes
    reasons = [simulated.estimate] if simulated.estimate else []
    if simulated.step_growth:
        # Two steps are simulated; each later one is taken to leave as much as the second.
        extra_bytes += simulated.step_growth * max(0, (steps or 0) - 2)
        growth = f"the second step left {format_bytes(simulated.step_growth)} more than the first"
        reasons.append(f"{growth}, and so are the later ones taken to do")
    return NotSimulated(extra_bytes, "; ".join(reasons))


def lower_verdict(verdict: str, more: int, heaviest: RankPlan, usable: int) -> str:
    """Return the verdict with `more` bytes that were not simulated: the same one, or a worse."""
    if more > usable - max(peak.requested for peak in heaviest.peaks):
        return DOES_NOT_FIT
    # By an estimate no plan is sure to fit.
    return RISKY if more and verdict == FITS else verdict


@dataclass(frozen=True)
class HostVerdict:
    """Whether a config's limit of host memory is enough."""

    is_enough: bool
    sentence: str


def judge_host(cfg: Any, hardware: Hardware, trace: Trace) -> HostVerdict | None:
    """Return whether the config's limit of host memory is enough; None where there is no limit.

    The limit is for all ranks of a machine. trace: of the heaviest rank, as which all others are
    taken to be.
    """
    allowed = cfg.memory.host_memory_limit_gib
    if allowed is None:
        return None
    ranks = hardware.ranks_here
    most = ranks * max(trace.find_active_peaks(device=False).values(), default=0)
    is_enough = most <= allowed * GIB
    return HostVerdict(
        is_enough,
        f"{HOST_ALLOWS} {allowed:g} GiB for {ranks} rank{'s' if ranks > 1 else ''} of a machine,"
        f" which take {format_bytes(most)}:"
        f" {'enough' if is_enough else 'too little, a run is refused'}",
    )
