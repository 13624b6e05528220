"""What a verdict rests on, and what to do about it. No torch in here."""

from recipe_lib.plan.result import DOES_NOT_FIT, FITS, Plan
from recipe_lib.units import format_bytes

HOST_ALLOWS = "memory.host_memory_limit_gib allows"  # how an assumption begins that says whether it is enough


def reason_text(plan: Plan) -> str:
    """Why the verdict is not that it fits; empty where it is."""
    heaviest = plan.heaviest
    if plan.verdict == FITS:
        return ""
    if plan.verdict == DOES_NOT_FIT and plan.margin >= 0:
        return next((line for line in plan.assumptions if line.startswith(HOST_ALLOWS)), "")
    if plan.estimate:
        return "what was not simulated is estimated, and counts"
    if plan.margin >= 0:
        return "the margin is below the error of a plan"
    if plan.verdict == DOES_NOT_FIT and _requested(plan) <= plan.device.usable:
        return "its tensors would fit, but not in the blocks that the allocator makes of what it has, nor with retries"
    if plan.verdict == DOES_NOT_FIT:
        alone = format_bytes(_requested(plan))
        return f"the tensors alone take {alone} of the {format_bytes(plan.device.usable)} that torch can have"
    if heaviest.reserved_expandable <= plan.device.usable:
        reserved = format_bytes(heaviest.reserved_expandable)
        return f"needs PYTORCH_ALLOC_CONF=expandable_segments:True, with which {reserved} are reserved"
    return "fits only after retries of the allocator, which gives unused memory back and takes time"


def _requested(plan: Plan) -> int:
    return max(peak.requested for peak in plan.heaviest.peaks)


def next_step(plan: Plan) -> str:
    """What to change next, and where to find more."""
    ways = [] if plan.advice else ["--advice says what each lever gains"]
    if plan.verdict != FITS:
        ways.append("--search looks for the fastest settings that fit")
    return "; ".join(filter(None, [_tried(plan) or plan.next_lever, *ways]))


def _tried(plan: Plan) -> str:
    """The best of the levers that were tried: what makes the run fit, or where it does, what makes it faster."""
    rows = [row for row in plan.advice if row.fits]
    if plan.verdict == FITS:
        rows = [row for row in rows if row.seconds is not None and row.seconds < 0]
    elif plan.verdict == DOES_NOT_FIT or not rows:
        rows = rows or plan.advice
    if not rows:
        return ""
    row = rows[0]
    change = f"{format_bytes(abs(row.bytes))} {'less' if row.bytes <= 0 else 'more'} at the peak"
    if row.seconds:
        change += f", a step {abs(row.seconds):.3g} s {'shorter' if row.seconds < 0 else 'longer'}"
    return f"{row.override}: {change}, {'fits' if row.fits else 'does not fit yet'}"
