"""The figures of one rank as torch counts them, and what a verdict says of steps that were not
simulated whole.
"""

from typing import Any

from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, RISKY
from recipe_lib.plan.summary.rank_memory import (
    NotSimulated,
    build_rank_plan,
    estimate_not_simulated,
    lower_verdict,
)
from recipe_lib.plan.tracing.trace import ALLOC, PHASE, Storage, Trace
from recipe_lib.plan.tracing.trace_rank import Simulated
from recipe_lib.plan.views.report import render
from recipe_lib.units import GIB
from tests.plan.apart import build_settings, call_in_fork
from tests.plan.plans import build_example_plan


def test_active_and_allocated_are_whole_blocks_and_requested_is_not():
    """torch hands out multiples of 512 bytes, and takes 2 MiB at a time for blocks of up to 1
    MiB.
    """
    trace = Trace(storages=[Storage(100), Storage(700), Storage(3, device=False)], phases=["step"])
    trace.events = [(PHASE, 0), (ALLOC, 0), (ALLOC, 1), (ALLOC, 2)]
    (peak,) = build_rank_plan(0, Simulated(trace, [], {}, {}, 1, True)).peaks
    assert (peak.requested, peak.active, peak.allocated, peak.reserved, peak.host) == (
        800,
        1536,
        1536,
        2 * 2**20,
        3,
    )


def test_an_estimate_is_called_one_in_the_first_line():
    said = "2 of a step's 8 micro-batches are simulated; the others are taken to be like them"
    first = " ".join(
        render(build_example_plan(estimate=said, verdict=RISKY), width=120).split("\n\n")[0].split()
    )
    assert first.startswith("RISKY") and first.endswith(f"; an estimate: {said}")
    assert "an estimate" not in render(build_example_plan(), width=120)


def test_growth_that_is_not_simulated_never_fits():
    rank = build_example_plan().heaviest
    room = 10**6 + max(peak.requested for peak in rank.peaks)
    assert [lower_verdict(FITS, more, rank, room) for more in (0, 1, 10**6, 10**6 + 1)] == [
        FITS,
        RISKY,
        RISKY,
        DOES_NOT_FIT,
    ]
    one = Simulated(
        Trace(), [], {}, {}, 1, False, step_growth=5, untraced_bytes=7, estimate="2 of 8"
    )
    later = "the second step left 5 B more than the first, and so are the later ones taken to do"
    assert estimate_not_simulated(one, 12) == (7 + 10 * 5, f"2 of 8; {later}")
    assert estimate_not_simulated(one, None) == (7, f"2 of 8; {later}")


def left_over() -> tuple[int, int, str]:
    """Of a plan in which a GiB is not simulated: margin, usable bytes that are not reserved,
    verdict.
    """
    from recipe_lib.plan import build_plan

    build_plan.estimate_not_simulated = lambda found, steps: NotSimulated(GIB, "a GiB is left out")
    plan: Any = build_plan.make_plan(*build_settings("demo/full", 1, "device=auto"))[0]
    return plan.margin, plan.device.usable - plan.heaviest.reserved, plan.verdict


def test_what_is_not_simulated_is_taken_off_the_margin():
    margin, left, verdict = call_in_fork(left_over)
    assert (margin, verdict) == (left - GIB, RISKY)
