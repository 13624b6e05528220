"""One rank of a plan: its peaks by phase, what is live at the largest of them, and whether it all fits."""

from collections import defaultdict
from dataclasses import replace

from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.result import DOES_NOT_FIT, FITS, RISKY, Alive, LayerRow, PhasePeak, RankPlan
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, STORAGE_KINDS, Storage, Trace
from recipe_lib.plan.tracing.simulate import MAKING_STATES, STEADY, Simulated
from recipe_lib.units import format_bytes

# A plan that leaves less than this share of the device's memory is called risky: its own error is as large.
RISKY_SHARE = 0.03


def has_room(reserved: int, usable: int, hardware: Hardware) -> bool:
    """Whether more is left of what the allocator may take than a plan's own error."""
    return reserved <= usable - RISKY_SHARE * hardware.memory


def verdict_of(trace: Trace, heaviest: RankPlan, usable: int, hardware: Hardware) -> str:
    """Fits with room to spare; risky: it needs expandable segments, retries, or the last few percent of the device."""
    if has_room(heaviest.reserved, usable, hardware):
        return FITS
    if heaviest.reserved <= usable or heaviest.reserved_expandable <= usable:
        return RISKY
    if max(peak.requested for peak in heaviest.peaks) > usable:
        return DOES_NOT_FIT
    settings = (AllocatorSettings(expandable=expandable, cap=usable) for expandable in (True, False))
    return RISKY if any(replay(trace, held).survived for held in settings) else DOES_NOT_FIT


def not_simulated(found: Simulated, steps: int | None) -> tuple[int, str]:
    """(bytes that may come to those that were simulated, why they may); (0, "") where nothing is left out.

    steps: of the run, if known.
    """
    more, said = found.untraced, [found.estimate] if found.estimate else []
    if found.grows:
        more += found.grows * max(0, (steps or 0) - 2)
        left = f"the second step left {format_bytes(found.grows)} more than the first"
        said.append(f"{left}, and so are the later ones taken to do")
    return more, "; ".join(said)


def lowered(verdict: str, more: int, heaviest: RankPlan, usable: int) -> str:
    """The verdict with `more` bytes that were not simulated; it never says that an estimate of growth fits."""
    if more > usable - max(peak.requested for peak in heaviest.peaks):
        return DOES_NOT_FIT
    return RISKY if more and verdict == FITS else verdict


def rank_plan(rank: int, found: Simulated) -> RankPlan:
    """Of a simulated rank."""
    trace = found.trace
    device, host = trace.peaks(), trace.active_peaks(device=False)
    default = replay(trace, emptied_after=MAKING_STATES)
    expandable = replay(trace, AllocatorSettings(expandable=True), MAKING_STATES)
    peaks = []
    for phase, (requested, at) in device.items():
        if phase == MAKING_STATES:
            continue
        place = trace.storages[trace.events[at][1]] if at >= 0 else Storage(0)
        peaks.append(
            PhasePeak(
                phase,
                active=default.phases[phase].active,
                allocated=default.phases[phase].allocated,
                reserved=default.phases[phase].reserved,
                reserved_expandable=expandable.phases[phase].reserved,
                host=host.get(phase, 0),
                part=place.part,
                module=place.module,
                requested=requested,
            )
        )
    highest = max(peaks, key=lambda peak: peak.active).phase
    most = most_of_each_kind(trace, STEADY)
    return RankPlan(rank, found.coordinates, peaks, _alive(trace, highest), events=default.events, most=most)


def most_of_each_kind(trace: Trace, phase: str) -> dict[str, int]:
    """Kind of memory to the most bytes on the device that it takes at a time in a phase; none for a phase that was not
    traced."""
    held: dict[str, int] = defaultdict(int)
    most: dict[str, int] = {}
    current = ""
    for kind, number in trace.events:
        if kind == PHASE:
            current = trace.phases[number]
            most |= held if current == phase else {}
        elif kind in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            held[storage.kind] += storage.bytes if kind == ALLOC else -storage.bytes
            if current == phase:
                most[storage.kind] = max(most.get(storage.kind, 0), held[storage.kind])
    return {kind: size for kind in STORAGE_KINDS if (size := most.get(kind, 0))}


def _alive(trace: Trace, phase: str) -> list[Alive]:
    """What is live at the peak of a phase, by kind and place."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number in trace.alive_at_peak(phase):
        storage = trace.storages[number]
        if storage.bytes:
            module = storage.label.rpartition(".")[0] if storage.label else storage.module
            groups[storage.kind, module, storage.label].append(storage.bytes)
    rows = [Alive(*place, bytes=sum(sizes), count=len(sizes)) for place, sizes in groups.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.module, row.label))


def layer_rows(found: Simulated) -> list[LayerRow]:
    """The table of modules; what they keep is what is there when the last backward of the steady step begins."""
    kept: dict[str, int] = defaultdict(int)
    for module, size in _kept_for_backward(found.trace).items():
        pieces = module.split(".")
        for cut in range(1, len(pieces) + 1):
            kept[".".join(pieces[:cut])] += size
    return [replace(row, kept=kept.get(row.module, 0)) for row in found.modules]


def _kept_for_backward(trace: Trace) -> dict[str, int]:
    """By module the bytes of activations that are live when a backward of the steady step begins, where the most are;
    of equal ones the last."""
    alive: dict[int, None] = {}
    before = ""
    found: dict[str, int] = {}
    current = ""
    for kind, number in trace.events:
        if kind == PHASE:
            current = trace.phases[number]
        elif kind == ALLOC:
            alive[number] = None
        elif kind == FREE:
            alive.pop(number, None)
        elif kind == OP and current == STEADY:
            part = trace.ops[number].part
            if part == "backward" and before == "forward":
                kept: dict[str, int] = defaultdict(int)
                for storage in map(trace.storages.__getitem__, alive):
                    if storage.kind == "activations" and storage.device:
                        kept[storage.module] += storage.bytes
                found = kept if sum(kept.values()) >= sum(found.values()) else found
            before = part if part in ("forward", "backward") else before
    return found
