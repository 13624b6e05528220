"""Decide whether a plan fits: by device memory, what was not simulated, and host memory.

`decide_verdict` judges the simulated memory of the heaviest rank, `lower_verdict` what may come to
it, and `judge_host` the host memory that a config allows. `views/verdict_text.py` words it all.
"""

from typing import TYPE_CHECKING, Any

from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.hardware import Hardware
from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, HOST_ALLOWS, RISKY, RankPlan
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import Simulated
from recipe_lib.units import GIB, format_bytes

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

# A plan that leaves less than this share of the device's memory is called risky: its own error is
# as large.
RISKY_SHARE = 0.03


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
    for expandable in (True, False):
        if replay(trace, AllocatorSettings(expandable=expandable, cap=usable)).survived:
            return RISKY
    return DOES_NOT_FIT


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


def judge_host(cfg: Any, settings: "PlanSettings", trace: Trace) -> tuple[bool, list[str]]:
    """Return whether a config allows the ranks of a machine their host memory, and that in words.

    Nothing is said where it allows everything.
    """
    allowed = cfg.memory.host_memory_limit_gib
    if allowed is None:
        return True, []
    ranks = min(settings.ranks, settings.hardware.ranks_per_node)
    most = ranks * max(trace.find_active_peaks(device=False).values(), default=0)
    is_enough = most <= allowed * GIB
    verdict = "enough" if is_enough else "too little, a run is refused"
    return is_enough, [
        f"{HOST_ALLOWS} {allowed:g} GiB for {ranks} rank{'s' if ranks > 1 else ''} of a machine,"
        f" which take {format_bytes(most)}: {verdict}"
    ]
