"""Check that the settings of docs/fit.md fit a card of 24 GB, as rank 0 of N under such a cap.

`python benchmarks/gpu_check.py cards` calls `main`. A line is an entry of docs/fit.json or of
docs/longest.json beside it: a config, overrides, and the page's verdict. A job is a line's run; a
row is its entry in the report. Only memory is measured. Without a GPU, tiny configs are planned for
the CPU and compared with a trace of a real run there.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import gpu_plan
from benchmarks.fit import CARDS, METHODS, MODELS, Line
from benchmarks.gpu_check import REPOSITORY, describe_device, parse_minutes, run_apart
from benchmarks.gpu_ladder import has_failed_or_differs, plan_line, run_or_return_error
from benchmarks.gpu_ladder_cases import TINY, ConfigCase
from benchmarks.gpu_plan_report import (
    DRY_HOW,
    compute_errors,
    compute_quantile,
    format_head,
    name_device,
    write_pair,
)
from benchmarks.longest import Longest, read_longest_sequences
from recipe_lib.errors import ConfigError, run_for_exit_code
from recipe_lib.memory.peaks import find_free_host_memory
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.plan_schema import FITS
from recipe_lib.plan.search.trials import compute_usable_bytes
from recipe_lib.units import format_bytes

MINUTES = 25.0  # default limit of all lines together
CASE_SECONDS = 240  # steps of the longest sequences take long
CARD = "24GB"  # as `find_hardware` takes it
# What is run first, in case time runs out: (models, methods, numbers of cards, True for lines of
# docs/longest.json).
PRIORITIES = (
    (("8B",), ("full", "lora", "qlora"), CARDS, False),
    (("70B",), ("qlora",), (2,), False),
    (("8B",), ("qlora",), CARDS, True),
    (("70B",), ("qlora",), CARDS, False),
    (("8B",), ("full", "lora"), CARDS, True),
)
# Lines of the dry run. The verdict is what the page would say.
DRY = [
    Line("demo", method="full", cards=2, settings=[*TINY, "batch_size=2"], verdict="fits"),
    Line(
        "demo",
        method="qlora",
        cards=1,
        settings=[*TINY, "lora.quantize_base=nf4", "data.packing=false"],
        verdict="fits",
    ),
]
# As those of docs/longest.json: one sequence a step.
LONG_ROWS = ("batch_size=1", "gradient_accumulation_steps=1", "max_seq_len=96")
DRY_LONGEST = [
    Longest(
        model="demo",
        method="full",
        cards=2,
        size=24,
        tokens=96,
        settings=(*TINY, *LONG_ROWS, "parallel.context=2"),
    ),
    Longest(
        model="demo",
        method="qlora",
        cards=1,
        size=24,
        tokens=96,
        settings=(*TINY, *LONG_ROWS, "lora.quantize_base=nf4", "data.packing=false"),
    ),
]


@dataclasses.dataclass(frozen=True)
class Job:
    """Hold a run of a line. The fields are keys of its row in the report."""

    model: str  # of `fit.MODELS` or `longest.MODELS`, such as `8B`; or `demo`
    method: str  # `full`, `lora` or `qlora`
    cards: int
    settings: tuple[str, ...]  # overrides that the page says to type
    tokens: int = 0  # of a sequence, for a line of docs/longest.json; 0: one of docs/fit.json
    host: int = 0  # bytes that its rank takes in host memory
    said: str = ""  # the page's verdict: `fits`, `risky` or empty
    active: int = 0  # bytes that the page says; 0 where it does not
    reserved: int = 0  # bytes that the page says; 0 where it does not

    @property
    def case(self) -> ConfigCase:
        """Return the config, overrides and number of ranks that are run."""
        config = "demo/full" if self.method == "full" else "demo/lora"
        if self.model in MODELS:
            config = f"{MODELS[self.model]}_{self.method}"
        return ConfigCase(config, self.settings, self.cards)


def main(words: list[str]) -> int:
    """Run all lines and write the report after each.

    Return 1 if one failed or ran out of memory, or if a dry run's bytes are not the planned ones.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.py cards",
        description="Check that the settings of docs/fit.md fit a card of 24 GB.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    docs = REPOSITORY / "docs"
    parser.add_argument(
        "--output", type=Path, default=docs / "measurements", help="folder of the report"
    )
    parser.add_argument(
        "--lines", type=Path, default=docs / "fit.json", help="what benchmarks/fit.py has planned"
    )
    parser.add_argument(
        "--only", default="", help="lines whose config has this in it, such as 8B_full"
    )
    parser.add_argument("--minutes", type=parse_minutes, default=MINUTES, help="time for all of it")
    options = parser.parse_args(words)
    return run_for_exit_code(lambda: _run(options, words))


def _run(options: argparse.Namespace, words: list[str]) -> int:
    """Run the lines that the options name and return the exit code."""
    started = time.monotonic()
    device = run_apart(describe_device, CASE_SECONDS)
    gpu = device.get("type") == "cuda"
    hardware = gpu_plan.look_up_hardware(device)
    report = gpu_plan.begin_report("cards", words, device=device, hardware=hardware)
    jobs = _select_jobs(options, gpu)
    cases = [job.case for job in jobs]
    name = f"gpu-cards-{name_device(device)}"
    if options.only:
        name += f"-{options.only.replace('/', '-')}"
    paths: list[Path] = []
    with gpu_plan.plan_in_processes(cases, hardware, plan_line) as wait_for_plan:
        for job in jobs:
            seconds_left = options.minutes * 60 - (time.monotonic() - started)
            row = build_row(job)
            if seconds_left < 5:  # a process cannot start and measure in less
                row["skipped"] = "no time left"
            else:
                row |= measure_job(
                    job, gpu=gpu, cap=row["cap"], seconds=min(CASE_SECONDS, seconds_left)
                )
                # For this device, whose kernels take other scratch memory than the card's.
                row["planned"] = wait_for_plan(job.case, max(seconds_left, 5))
            report["rows"].append(row)
            report["seconds"] = round(time.monotonic() - started)
            print(f"{report['seconds']:5d} s  {describe_line(row)}", flush=True)
            paths = write_pair(options.output / name, report, format_page(report))
    print("\n".join([*summarize(report), *map(str, paths)]))
    for row in report["rows"]:
        if has_failed_or_differs(row, gpu) or has_run_out(row):
            return 1
    return 0


def _select_jobs(options: argparse.Namespace, gpu: bool) -> list[Job]:
    """Return the jobs whose config has `--only` in it. Raises ConfigError if none has."""
    if gpu:
        jobs = list_jobs(read_lines(options.lines), read_longest(options.lines))
    else:
        jobs = list_jobs(DRY, DRY_LONGEST)
    selected_jobs = [job for job in jobs if options.only in job.case.config]
    if not selected_jobs:
        configs = ", ".join(sorted({job.case.config for job in jobs}))
        raise ConfigError(
            f"--only {options.only}: found in no line, expected a part of one of {configs}"
        )
    return selected_jobs


def read_lines(file: Path) -> list[Line]:
    """Read the lines of docs/fit.json.

    Raises ConfigError if the file cannot be read or has no such lines.
    """
    try:
        # Each entry is [(model, method, cards), the line's fields].
        return [Line(**fields) for _, fields in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--lines {file}: found {str(error).splitlines()[0]}, expected planned lines; "
            "`python -m benchmarks.fit --output docs/fit.md` writes docs/fit.json"
        ) from None


def read_longest(file: Path) -> list[Longest]:
    """Read the longest sequences on cards of 24 GB from longest.json beside the file of lines.

    Empty if there is no such file.
    """
    longest_file = file.with_name("longest.json")
    if not longest_file.is_file():
        return []
    return [line for line in read_longest_sequences(longest_file) if f"{line.size}GB" == CARD]


def list_jobs(lines: Iterable[Line], longest: Iterable[Longest]) -> list[Job]:
    """List a job for each line that fits, in the order of PRIORITIES, then small models first."""
    jobs = []
    for line in lines:
        if line.settings is None:  # nothing fits
            continue
        job = Job(
            model=line.model,
            method=line.method,
            cards=line.cards,
            settings=tuple(line.settings),
            host=line.host,
            said=line.verdict,
            active=line.active,
            reserved=line.reserved,
        )
        jobs.append(job)
    for line in longest:
        if not line.tokens:  # nothing fits
            continue
        job = Job(
            model=line.model,
            method=line.method,
            cards=line.cards,
            settings=tuple(line.settings),
            tokens=line.tokens,
            host=line.host // line.cards,  # that file counts all ranks' together
            said=FITS,
            active=line.active,
            reserved=line.reserved,
        )
        jobs.append(job)
    return sorted(jobs, key=_get_order)


def _get_order(job: Job) -> tuple[int, int, bool, int, int]:
    """Return a job's sort key: its priority, then size, docs/fit.json first, method, cards."""
    priority = len(PRIORITIES)
    for index, (models, methods, cards, is_longest) in enumerate(PRIORITIES):
        if (
            job.model in models
            and job.method in methods
            and job.cards in cards
            and bool(job.tokens) == is_longest
        ):
            priority = index
            break
    sizes = list(MODELS)
    size = sizes.index(job.model) if job.model in sizes else 0
    return priority, size, bool(job.tokens), list(METHODS).index(job.method), job.cards


def build_row(job: Job) -> dict[str, Any]:
    """Build a job's row of the report, without what is measured and planned.

    Its `cap` is the bytes that torch's allocator may take on a card of 24 GB: what the planner
    counts for the context, NCCL and a reserve is taken off.
    """
    _, cfg = job.case.load()
    settings = PlanSettings(find_hardware(CARD), job.case.rows, job.cards)
    return dataclasses.asdict(job) | {
        "config": job.case.config,
        "overrides": list(job.case.overrides),
        "row_tokens": cfg.max_seq_len,
        "cap": compute_usable_bytes(cfg, settings),
        "expandable": False,
    }


def measure_job(job: Job, *, gpu: bool, cap: int, seconds: float) -> dict[str, Any]:
    """Measure a job; return {"measured": ...}, {"failed": why} or {"skipped": why}.

    What runs out of memory with the default allocator runs once more with expandable segments; the
    result's `expandable` tells which one it is of. cap: bytes of the allocator.
    """
    # `run_or_return_error` makes {"failed": message} of an error that a user would be told.
    if not gpu:
        result = run_apart(
            functools.partial(run_or_return_error, gpu_plan.trace_on_cpu, job.case), seconds
        )
        return result if "failed" in result else {"measured": result}
    free, _ = find_free_host_memory()
    if job.host > free:
        return {
            "skipped": f"host memory: found {format_bytes(free)}, expected {format_bytes(job.host)}"
        }
    outcome: dict[str, Any] = {}
    for expandable in (False, True):
        # One step after the first, in which the optimizer makes its states.
        measure = functools.partial(
            gpu_plan.measure, job.case, expandable=expandable, cap=cap, steady=1
        )
        result = run_apart(functools.partial(run_or_return_error, measure), seconds)
        if "failed" in result:
            # If the second try fails, the first one's result stands: it ran out.
            return outcome or result
        outcome = {"measured": result, "expandable": expandable}
        if "out_of_memory" not in result:
            break
    return outcome


def has_run_out(row: dict[str, Any]) -> bool:
    """Return True if a line of the page ran out of memory, with expandable segments too."""
    return "out_of_memory" in row.get("measured", {})


def describe_outcome(row: dict[str, Any]) -> str:
    """Return `ran`, `ran, expandable segments`, `ran out, PHASE`, or why a row has not run."""
    if "measured" not in row:
        return str(row.get("failed") or row.get("skipped") or "not measured")
    if "out_of_memory" in row["measured"]:
        return f"ran out, {row['measured']['out_of_memory']}"
    return "ran, expandable segments" if row["expandable"] else "ran"


def describe_line(row: dict[str, Any]) -> str:
    """Describe a row and its outcome in a few words, for the log."""
    length = f"a row of {row['tokens']}" if row["tokens"] else "as it is"
    text = (
        f"{row['model']} {row['method']}, {row['cards']} cards, {length}: {describe_outcome(row)}"
    )
    peaks = row.get("measured", {}).get("peaks")
    if not peaks:
        return text
    name = "active" if _has_figure(peaks, "active") else "requested"
    return f"{text}, {format_bytes(_find_most(peaks, name))} {name}"


def summarize(report: dict[str, Any]) -> list[str]:
    """Return lines: numbers of rows by the page's verdict and outcome, and errors of the plans."""
    rows = report["rows"]
    outcome_counts = Counter(
        (row["said"], describe_outcome(row).split(",")[0]) for row in rows if "measured" in row
    )
    lines = [
        f"said {said}, {outcome}: {count}"
        for (said, outcome), count in sorted(outcome_counts.items())
    ]
    # Active bytes alone: under a cap the allocator gives back what it would have kept, so that
    # reserved bytes cannot be compared. A CPU has no caching allocator: requested bytes.
    compared_metric = "requested" if report["device"].get("type") == "cpu" else "active"
    errors = []
    for row in rows:
        if "active" in row.get("planned", {}):
            errors += [
                error for _, metric, error in compute_errors(row) if metric == compared_metric
            ]
    if errors:
        lines.append(
            f"planned against measured, {compared_metric}: {len(errors)} figures, 95 % within "
            f"{compute_quantile(errors, 0.95):.2%}, worst {max(errors, key=abs):+.2%}"
        )
    for word in ("failed", "skipped"):
        count = sum(word in row or word in row.get("planned", {}) for row in rows)
        if count:
            lines.append(f"{word}: {count} of {len(rows)} runs")
    return lines


HOW = f"""Memory alone: the recipe's model, optimizer and training step as rank 0 of N through \
torch's fake process group, random weights, torch's allocator held to the cap, which is what a \
card of {CARD} leaves it. Active: in blocks handed out or still in use; reserved: taken from the \
device; the most of any step. Page: what docs/fit.md says for such a card. Planned: for this \
device, steps alone. NCCL's own memory is in the cap, at the planner's figure, and is not \
measured."""
HOW_DRY = f"""{DRY_HOW} Cards are played as ranks of a fake process group."""
# Heads of the table, in the order of `_format_cells`.
HEADS = (
    "config",
    "cards",
    "settings",
    "rows of",
    "cap",
    "page says",
    "page: active",
    "reserved",
    "planned: active",
    "reserved",
    "measured: active",
    "reserved",
    "retries",
    "found",
)


def format_page(report: dict[str, Any]) -> str:
    """Return the Markdown page of a report."""
    dry = report["device"].get("type") != "cuda"
    lines = [f"# Cards of {CARD}: {report['kind']}", "", *format_head(report), ""]
    lines += [HOW_DRY if dry else HOW, "", *(f"- {line}" for line in summarize(report)), ""]
    lines += [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    lines += [f"| {' | '.join(_format_cells(row))} |" for row in report["rows"]]
    return "\n".join(lines) + "\n"


def _format_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row, which HEADS names."""
    planned = row.get("planned", {})
    measured = row.get("measured", {})
    peaks = measured.get("peaks") or {}
    cells = [
        row["config"],
        str(row["cards"]),
        f"`{' '.join(row['overrides'])}`" if row["overrides"] else "nothing",
        str(row["row_tokens"]),
        format_bytes(row["cap"]),
        row["said"],
    ]
    for name in ("active", "reserved"):
        cells.append(format_bytes(row[name]) if row[name] else "")
    for name in ("active", "reserved"):
        cells.append(format_bytes(planned[name]) if name in planned else "")
    for name in ("active", "reserved"):
        cells.append(format_bytes(_find_most(peaks, name)) if _has_figure(peaks, name) else "")
    return [*cells, str(measured.get("retries", "")), describe_outcome(row)]


def _has_figure(peaks: dict[str, dict[str, int]], name: str) -> bool:
    """Return True if every phase has this figure, and there is a phase.

    peaks: phase -> figure -> bytes.
    """
    return bool(peaks) and all(name in phase for phase in peaks.values())


def _find_most(peaks: dict[str, dict[str, int]], name: str) -> int:
    """Return the largest value of a figure over the phases, bytes."""
    return max(phase[name] for phase in peaks.values())
