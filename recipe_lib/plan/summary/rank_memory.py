"""The memory of one rank: its peaks by phase, what is live at the largest, and whether it fits.

`build_rank_plan` replays a simulated rank's trace through the allocator; `build_layer_rows` sums up
what its modules keep for backward, and `merge_layer_rows` those rows over a pipeline.
`decide_verdict` judges the memory of the heaviest rank, `lower_verdict` what may come to it, and
`judge_host` the host memory that a config allows. `views/verdict_text.py` words the verdict.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
    # Making all states at once stands for a run's first step: what it frees is given back, as a run
    # has freed nothing in its place.
    default = replay(trace, emptied_after=MAKING_STATES)
    expandable = replay(trace, AllocatorSettings(expandable=True), MAKING_STATES)
    peaks = []
    for phase, (requested, event) in trace.find_peaks().items():
        if phase == MAKING_STATES:
            continue
        # The storage whose allocation led there; none where the peak was before the phase.
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
    """Return by kind of memory the most bytes on the device that it takes at a time in a phase.

    It is empty for a phase that was not traced.
    """
    live_bytes: dict[str, int] = defaultdict(int)
    most: dict[str, int] = {}
    for _, kind, number, current, *_ in trace.walk():
        if kind == PHASE and current == phase:
            most |= live_bytes
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            live_bytes[storage.kind] += storage.bytes if kind == ALLOC else -storage.bytes
            if current == phase:
                most[storage.kind] = max(most.get(storage.kind, 0), live_bytes[storage.kind])
    return {kind: size for kind in STORAGE_KINDS if (size := most.get(kind, 0))}


def _list_alive(trace: Trace, phase: str) -> list[Alive]:
    """Return what is live at the peak of a phase, by kind and module."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number in trace.list_alive_at_peak(phase):
        storage = trace.storages[number]
        if storage.bytes:
            # A parameter is its module's, whichever module was running when it was made.
            module = storage.label.rpartition(".")[0] if storage.label else storage.module
            groups[storage.kind, module, storage.label].append(storage.bytes)
    rows = [Alive(*key, bytes=sum(sizes), count=len(sizes)) for key, sizes in groups.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.module, row.label))


def build_layer_rows(simulated: Simulated) -> list[LayerRow]:
    """Return the table of modules with the activation bytes that each keeps, modules in it too."""
    kept: dict[str, int] = defaultdict(int)
    for module, size in _sum_kept_activations(simulated.trace).items():
        segments = module.split(".")
        for cut in range(1, len(segments) + 1):
            kept[".".join(segments[:cut])] += size
    return [replace(row, kept=kept.get(row.module, 0)) for row in simulated.modules]


def _sum_kept_activations(trace: Trace) -> dict[str, int]:
    """Return by module the bytes of activations that are live when a backward begins.

    Of the backwards of the steady step it is the one where they are the most, of equal ones the
    last.
    """
    part_before = ""
    most: dict[str, int] = {}
    for _, kind, number, phase, _, alive in trace.walk():
        if kind != OP or phase != STEADY:
            continue
        part = trace.ops[number].part
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

    Each module is in it once, in the model's order.
    """
    # By module the key that rows are sorted by: (before, in or after the layers; layer; row).
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
    """Return True if more is left of what the allocator may take than a plan's own error."""
    return reserved <= usable - RISKY_SHARE * hardware.memory


def decide_verdict(trace: Trace, heaviest: RankPlan, usable: int, hardware: Hardware) -> str:
    """Return whether the heaviest rank fits into `usable` bytes: FITS, RISKY or DOES_NOT_FIT.

    It is risky where it needs expandable segments, retries, or the last few percent of the device.
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


def estimate_not_simulated(simulated: Simulated, steps: int | None) -> tuple[int, str]:
    """Return (bytes that may come to those that were simulated, why they may).

    It is (0, "") where nothing is left out. steps: of the run, if known.
    """
    more = simulated.untraced_bytes
    reasons = [simulated.estimate] if simulated.estimate else []
    if simulated.step_growth:
        # Two steps are simulated; each later one is taken to leave as much as the second.
        more += simulated.step_growth * max(0, (steps or 0) - 2)
        left = f"the second step left {format_bytes(simulated.step_growth)} more than the first"
        reasons.append(f"{left}, and so are the later ones taken to do")
    return more, "; ".join(reasons)


def lower_verdict(verdict: str, more: int, heaviest: RankPlan, usable: int) -> str:
    """Return the verdict with `more` bytes that were not simulated."""
    if more > usable - max(peak.requested for peak in heaviest.peaks):
        return DOES_NOT_FIT
    # An estimate of growth never makes a plan that fits.
    return RISKY if more and verdict == FITS else verdict


def judge_host(cfg: Any, hardware: Hardware, trace: Trace) -> tuple[bool, list[str]]:
    """Return whether a config allows the ranks of a machine their host memory, and that in words.

    Nothing is said where it allows everything.
    """
    allowed = cfg.memory.host_memory_limit_gib
    if allowed is None:
        return True, []
    ranks = hardware.ranks_here
    most = ranks * max(trace.find_active_peaks(device=False).values(), default=0)
    is_enough = most <= allowed * GIB
    return is_enough, [
        f"{HOST_ALLOWS} {allowed:g} GiB for {ranks} rank{'s' if ranks > 1 else ''} of a machine,"
        f" which take {format_bytes(most)}:"
        f" {'enough' if is_enough else 'too little, a run is refused'}"
    ]
