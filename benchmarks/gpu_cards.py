"""`gpu_check.py cards`: what docs/fit.md says to type with cards of 24 GB, run as rank 0 of N under
such a card's cap.

    python benchmarks/gpu_check.py cards                       on this machine's GPU; a dry run without one
    python benchmarks/gpu_check.py cards --lines docs/fit.json --minutes 25

Each line of docs/fit.json, and each for cards of 24 GB of docs/longest.json next to it, is run in a
process of its own under a time limit. The fake process group moves nothing, so values mean nothing,
but every tensor is allocated where a real rank allocates it; the allocator may take what a card of
24 GB leaves it, with the context, NCCL and the reserve that plans count with taken off. It is
memory alone that is measured: what runs out there would run out on the card. Beside it is the plan
for this device, whose kernels take other scratch than the card's, and what docs/fit.json says.

A line that runs out with torch's default allocator is run once more with expandable segments.
Without a GPU tiny configs are planned for the CPU and compared with a trace of a real run there:
nothing is measured.
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
from benchmarks.gpu_ladder import is_wrong, plan_line, run_or_tell
from benchmarks.gpu_ladder_cases import TINY, ConfigCase
from benchmarks.gpu_plan_report import (
    DRY_HOW,
    compute_errors,
    format_head,
    name_device,
    share_below,
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

MINUTES = 25.0
CASE_SECONDS = 240  # steps of the longest rows take long
CARD = "24GB"
# What matters most, in case time runs out: (models, methods, cards, whether it is the longest row).
FIRST = (
    (("8B",), ("full", "lora", "qlora"), CARDS, False),
    (("70B",), ("qlora",), (2,), False),
    (("8B",), ("qlora",), CARDS, True),
    (("70B",), ("qlora",), CARDS, False),
    (("8B",), ("full", "lora"), CARDS, True),
)
DRY = [
    Line("demo", "full", 2, [*TINY, "batch_size=2"], verdict="fits"),
    Line(
        "demo", "qlora", 1, [*TINY, "lora.quantize_base=nf4", "data.packing=false"], verdict="fits"
    ),
]
LONG_ROWS = ("batch_size=1", "gradient_accumulation_steps=1", "max_seq_len=96")
DRY_LONGEST = [
    Longest("demo", "full", 2, 24, 96, (*TINY, *LONG_ROWS, "parallel.context=2")),
    Longest(
        "demo",
        "qlora",
        1,
        24,
        96,
        (*TINY, *LONG_ROWS, "lora.quantize_base=nf4", "data.packing=false"),
    ),
]


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of a line. tokens: of a longest row; 0 of others. host: bytes that its rank takes on
    the host. said: the page's verdict. active, reserved: bytes that it says, 0 where it does not.
    """

    model: str
    method: str
    cards: int
    settings: tuple[str, ...]
    tokens: int = 0
    host: int = 0
    said: str = ""
    active: int = 0
    reserved: int = 0

    @property
    def case(self) -> ConfigCase:
        """What is run."""
        config = "demo/full" if self.method == "full" else "demo/lora"
        if self.model in MODELS:
            config = f"{MODELS[self.model]}_{self.method}"
        return ConfigCase(config, self.settings, self.cards)


def main(words: list[str]) -> int:
    """Runs all lines and writes the report after each; 1 if one failed, or ran out of memory."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py cards",
        description=__doc__,
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
    started = time.monotonic()
    device = run_apart(describe_device, CASE_SECONDS)
    gpu = device.get("type") == "cuda"
    hardware = gpu_plan.look_up_hardware(device)
    report = gpu_plan.begin_report("cards", words, device, hardware)
    known = (
        list_jobs(read_lines(options.lines), read_longest(options.lines))
        if gpu
        else list_jobs(DRY, DRY_LONGEST)
    )
    todo = [job for job in known if options.only in job.case.config]
    if not todo:
        configs = ", ".join(sorted({job.case.config for job in known}))
        raise ConfigError(
            f"--only {options.only}: found in no line, expected a part of one of {configs}"
        )
    name = "-".join(
        [
            "gpu-cards",
            name_device(device),
            *([options.only.replace("/", "-")] if options.only else []),
        ]
    )
    paths: list[Path] = []
    with gpu_plan.plan_in_processes([job.case for job in todo], hardware, plan_line) as planned:
        for job in todo:
            left = options.minutes * 60 - (time.monotonic() - started)
            row = build_row(job)
            if left < 5:
                row |= {"skipped": "no time left"}
            else:
                row |= measure_job(job, gpu, row["cap"], min(CASE_SECONDS, left))
                row |= {"planned": planned(job.case, max(left, 5))}
            report["rows"].append(row)
            report["seconds"] = round(time.monotonic() - started)
            print(f"{report['seconds']:5d} s  {describe_line(row)}", flush=True)
            paths = write_pair(options.output / name, report, format_page(report))
    print("\n".join([*summarize(report), *map(str, paths)]))
    return 1 if any(is_wrong(row, gpu) or was_wrong(row) for row in report["rows"]) else 0


def read_lines(file: Path) -> list[Line]:
    """The lines of docs/fit.json. ConfigError for a file that has none."""
    try:
        return [Line(**fields) for _, fields in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--lines {file}: found {str(error).splitlines()[0]}, expected planned lines; "
            "`python -m benchmarks.fit --output docs/fit.md` writes docs/fit.json"
        ) from None


def read_longest(file: Path) -> list[Longest]:
    """The longest sequences on such cards, of the file next to the lines; none where there is
    none.
    """
    beside = file.with_name("longest.json")
    return (
        [line for line in read_longest_sequences(beside) if f"{line.size}GB" == CARD]
        if beside.is_file()
        else []
    )


def list_jobs(lines: Iterable[Line], longest: Iterable[Longest]) -> list[Job]:
    """What to run: each line that fits and each longest row, in the order of FIRST, then small
    models before large ones.
    """
    found = []
    for line in lines:
        if line.settings is None:
            continue
        job = Job(
            line.model, line.method, line.cards, tuple(line.settings), 0, line.host, line.verdict
        )
        found.append(dataclasses.replace(job, active=line.active, reserved=line.reserved))
    for far in longest:
        if far.tokens:
            of_rank = far.host // far.cards, FITS, far.active, far.reserved
            found.append(
                Job(far.model, far.method, far.cards, tuple(far.settings), far.tokens, *of_rank)
            )
    return sorted(found, key=_place)


def _place(job: Job) -> tuple[int, int, bool, int, int]:
    """Where a job comes; among equals, settings before the longest row, few cards before many."""
    wanted = (
        job.model in models
        and job.method in ways
        and job.cards in cards
        and bool(job.tokens) == longest
        for models, ways, cards, longest in FIRST
    )
    place = next((number for number, found in enumerate(wanted) if found), len(FIRST))
    sizes, methods = [*MODELS], [*METHODS]
    size = sizes.index(job.model) if job.model in sizes else 0
    return place, size, bool(job.tokens), methods.index(job.method), job.cards


def build_row(job: Job) -> dict[str, Any]:
    """A row of the report, without what is measured. cap: bytes that torch may take on such a
    card.
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


def measure_job(job: Job, gpu: bool, cap: int, seconds: float) -> dict[str, Any]:
    """{"measured": ...}, {"failed": why} or {"skipped": why}; expandable: it took such segments to
    go through.
    """
    if not gpu:
        result = run_apart(functools.partial(run_or_tell, gpu_plan.trace_on_cpu, job.case), seconds)
        return result if "failed" in result else {"measured": result}
    free, _ = find_free_host_memory()
    if job.host > free:
        return {
            "skipped": f"host memory: found {format_bytes(free)}, expected {format_bytes(job.host)}"
        }
    found: dict[str, Any] = {}
    for expandable in (False, True):
        result = run_apart(
            functools.partial(run_or_tell, gpu_plan.measure, job.case, expandable, cap, steady=1),
            seconds,
        )
        if "failed" in result:
            return found or result
        found = {"measured": result, "expandable": expandable}
        if "out_of_memory" not in result:
            break
    return found


def was_wrong(row: dict[str, Any]) -> bool:
    """The page lists it, and it ran out of memory, with expandable segments too."""
    return "out_of_memory" in row.get("measured", {})


def describe_outcome(row: dict[str, Any]) -> str:
    """What came of it: `ran`, `ran, expandable segments`, `ran out`, or why it was not run."""
    if "measured" not in row:
        return str(row.get("failed") or row.get("skipped") or "not measured")
    if "out_of_memory" in row["measured"]:
        return f"ran out, {row['measured']['out_of_memory']}"
    return "ran, expandable segments" if row["expandable"] else "ran"


def describe_line(row: dict[str, Any]) -> str:
    """A line and what came of it, in a few words."""
    rows = f"a row of {row['tokens']}" if row["tokens"] else "as it is"
    text = f"{row['model']} {row['method']}, {row['cards']} cards, {rows}: {describe_outcome(row)}"
    peaks = row.get("measured", {}).get("peaks")
    name = "active" if _has(peaks or {}, "active") else "requested"
    return f"{text}, {format_bytes(_find_most(peaks, name))} {name}" if peaks else text


def summarize(report: dict[str, Any]) -> list[str]:
    """What ran of what was said to fit, and how far off the plans are, a line each."""
    rows = report["rows"]
    counts = Counter(
        (row["said"], describe_outcome(row).split(",")[0]) for row in rows if "measured" in row
    )
    lines = [f"said {said}, {found}: {count}" for (said, found), count in sorted(counts.items())]
    # Under a cap the allocator gives back what it would have kept, so that reserved bytes cannot be
    # compared.
    errors = [
        error for row in rows if "active" in row.get("planned", {}) for error in compute_errors(row)
    ]
    metric = (
        "requested" if report["device"].get("type") == "cpu" else "active"
    )  # a CPU has no blocks
    found = [error for _, name, error in errors if name == metric]
    if found:
        lines.append(f"planned against measured, {metric}: {len(found)} figures, 95 % within "
                     f"{share_below(found, 0.95):.2%}, worst {max(found, key=abs):+.2%}")  # fmt: skip
    for word in ("failed", "skipped"):
        count = sum(word in row or word in row.get("planned", {}) for row in rows)
        lines += [f"{word}: {count} of {len(rows)} runs"] if count else []
    return lines


HOW = f"""Memory alone: the recipe's model, optimizer and training step as rank 0 of N through torch's fake process \
group, random weights, torch's allocator held to the cap, which is what a card of {CARD} leaves it. Active: in \
blocks handed out or still in use; reserved: taken from the device; the most of any step. Page: what docs/fit.md says \
for such a card. Planned: for this device, steps alone. NCCL's own memory is in the cap, at the planner's \
figure, and is not measured."""
HOW_DRY = f"""{DRY_HOW} Cards are played as ranks of a fake process group."""
HEADS = ("config", "cards", "settings", "rows of", "cap", "page says", "page: active", "reserved", "planned: active",
         "reserved", "measured: active", "reserved", "retries", "found")  # fmt: skip


def format_page(report: dict[str, Any]) -> str:
    """The report."""
    dry = report["device"].get("type") != "cuda"
    lines = [
        f"# Cards of {CARD}: {report['kind']}",
        "",
        *format_head(report),
        "",
        HOW_DRY if dry else HOW,
        "",
    ]
    lines += [
        *(f"- {line}" for line in summarize(report)),
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    return (
        "\n".join([*lines, *(f"| {' | '.join(_build_cells(row))} |" for row in report["rows"])])
        + "\n"
    )


def _build_cells(row: dict[str, Any]) -> list[str]:
    planned, found = row.get("planned", {}), row.get("measured", {})
    peaks = found.get("peaks") or {}
    words = f"`{' '.join(row['overrides'])}`" if row["overrides"] else "nothing"
    cells = [
        row["config"],
        str(row["cards"]),
        words,
        str(row["row_tokens"]),
        format_bytes(row["cap"]),
        row["said"],
    ]
    cells += [format_bytes(row[name]) if row[name] else "" for name in ("active", "reserved")]
    cells += [
        format_bytes(planned[name]) if name in planned else "" for name in ("active", "reserved")
    ]
    cells += [
        format_bytes(_find_most(peaks, name)) if _has(peaks, name) else ""
        for name in ("active", "reserved")
    ]
    return [*cells, str(found.get("retries", "")), describe_outcome(row)]


def _has(peaks: dict[str, dict[str, int]], name: str) -> bool:
    return bool(peaks) and all(name in phase for phase in peaks.values())


def _find_most(peaks: dict[str, dict[str, int]], name: str) -> int:
    """The most of any phase."""
    return max(phase[name] for phase in peaks.values())
