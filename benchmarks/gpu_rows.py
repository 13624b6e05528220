"""Type the reports of `gpu_check.py plan` and `ladder` as their JSON files have them.

`gpu_plan.py` and `gpu_ladder.py` fill them, `gpu_plan_report.py` and `gpu_ladder_report.py` read
them. A phase is `setup`, `first step` or `step`; a figure is one of `gpu_plan_report.METRICS`, or in
plans `reserved_expandable`: `reserved` with expandable segments.
"""

from typing import Any, TypedDict


class Measured(TypedDict, total=False):
    """Figures of a run, of `gpu_plan.measure`; a trace on the CPU has `peaks` alone."""

    peaks: dict[str, dict[str, int]]  # phase -> figure -> bytes; of later steps the most
    seconds: list[float]  # of each step
    out_of_memory: str  # phase in which the run ran out; not there if it did not
    retries: int  # times the allocator gave all back to find room
    outside: int  # bytes that context and kernels take
    total: int  # bytes of the device
    pinned: int  # peak bytes of pinned host memory
    figures: dict[str, int]  # of a recorded run: figure -> peak bytes, and `retries`
    tokens_per_second: float  # of the median step after the first; in the ladder alone


class ComparedRow(TypedDict, total=False):
    """What the rows of both reports may have. In place of figures one of the reasons is there."""

    # Phase -> figure -> bytes; of `gpu_plan.py` also `pinned`: the most bytes of pinned host memory
    # (reports before it have none). In the ladder also figures of all steps, see `gpu_ladder.plan_line`;
    # or `failed` or `refused` -> why there is no plan.
    planned: dict[str, Any]
    measured: Measured
    expandable: bool  # segments of the allocator
    failed: str  # why the run gave nothing
    skipped: str  # why there was no run


class PlanRow(ComparedRow, total=False):
    """A job of `gpu_plan.py`."""

    kind: str  # `peaks`, `threshold` or `events`
    case: dict[str, Any]  # fields of the `PlanCase`
    # Of a `threshold`, and `cap` of `events`:
    cap: int  # bytes the allocator may take; 0: all
    said: str  # the plan's verdict, `fits` or `does not fit`
    found: str  # the run's outcome, `ran` or `ran out`
    result: Measured
    # Of `events`, a recording of the allocator and its replay:
    file: str  # name of the recording
    size: int  # its bytes
    figures: dict[str, int]  # as measured: figure -> peak bytes, and `retries`
    events: int  # number of events
    first_difference: int | None  # index of the first segment that differs; None: none does
    different: dict[str, int]  # the replay's values of the figures that are not as measured


class LadderRow(ComparedRow, total=False):
    """A rung of the ladder, see `gpu_ladder_cases.Rung`."""

    method: str  # `full`, `lora` or `qlora`
    config: str  # path of the config
    overrides: list[str]  # of the config, `key=value`
    basis: str  # what the lever is added to or removed from: key of `gpu_ladder_report.BASES`
    words: list[str]  # overrides that differ from the basis; empty: the basis itself
    removed: bool  # the words take a lever from the basis
    rounds: bool  # the lever changes results
    exact: bool  # on a CPU, planned bytes are those of the run
    against: list[Any]  # method, basis and words of the row to compare with
    rows: int  # sequences of a step
    row_tokens: int  # tokens of each
