"""Measure the seconds of a training step on this machine's GPU, and compare with planned ones.

`python benchmarks/gpu_check.py times` calls `main`; `python -m benchmarks.gpu_times --plan` plans
the committed report's rows again. A case is a config. A row is its entry in the report, planned by
two sources of rates: the GPU's data sheet, and a calibration, measured on the same GPU. Without a
GPU, tiny models on the CPU check the program.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_check import REPOSITORY, describe_device, run_apart
from benchmarks.gpu_plan import CASE_SECONDS, begin_report, look_up_hardware, measure
from benchmarks.gpu_plan_cases import TINY, PlanCase, describe
from benchmarks.gpu_plan_report import format_head, name_device, write_pair
from recipe_lib.parallel import start_world
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.measured.measure_rates import calibrate
from recipe_lib.plan.measured.rates_file import LARGE_MATMUL, read_calibration
from recipe_lib.plan.simulated_world.planned_data import PlannedData
from recipe_lib.plan.timing.stream_schedule import ATTENTION, KINDS, schedule, sum_time_by_kind
from recipe_lib.plan.tracing.trace_rank import STEADY
from tests.plan.apart import call_in_fork

FOLDER = REPOSITORY / "docs" / "measurements"
COMMITTED = FOLDER / "gpu-times-nvidia-h200.json"
MINUTES = 9.0  # default limit of all cases together
STEADY_STEPS = 5  # after the first one
# Sources of rates that a step is planned by, as the report calls them.
SHEET = "data sheet"
CALIBRATED = "calibration"
NOW = "now"  # default label of plans; a row keeps those of earlier versions of the planner
HOW = """The recipe's model, optimizer and training step on one process, random weights and random \
tokens, alone on the GPU. Measured: the median of the steps after the first. Planned: by the data \
sheet, and by the rates that `tune doctor` measured on the same GPU ([{rates}]({rates})). Error: \
planned over measured, less one."""
# Of the committed report alone: no run writes the rates `doctor_cold_matmul` and `matmul` into one.
WHY = """## Why calibrated times were further off, and what was mended

- **Attention.** torch took cuDNN's kernel: the recorded events hold its workspace once a layer \
and step (`tests/plan/test_event_fixtures.py`). The same tokens in rows of 2048 take \
{measured:.3f} s less than in rows of 4096; cuDNN's rates make that {cudnn:.3f} s, those of \
FlashAttention 2 {flash:.3f} s. Plans by data sheet took the latter, so they were near the \
measured times by two errors that cancel; the calibration had measured cuDNN's and showed the \
other error. Now both plan cuDNN's kernel where torch takes it, and a measured rate is of the \
kernel that was measured.
- **Fused AdamW** does not reach the memory's rate. Its own is now planned, from a published time \
on an H100; `tune doctor` measures it.
- **Bursts.** Each product was measured for a fifth of a second, between others. The first step \
after the warm-up is {least:.1%} to {most:.1%} shorter than those after it. Rates of a burst are \
now taken down as those of data sheets are, to 0.90 on cards of 700 W; `tune doctor` measures what \
products reach in steps, and plans take that share instead.
- **The host.** The smallest product, 512 x 2048 x 2048, took 13 us, as long as the host takes to \
issue it: that is no rate of the GPU's, and is left out. Adapters' small products were planned by \
it.

Not known: how much of the 0.90 is heat and how much the layouts of backward's products. `tune \
doctor` had {cold:.1f} TFLOP/s of the product 4096 x 14336 x 4096 at its start; an 8192 cube \
reached {cube:.0f} between the steps above. No file with `step_share` or `optimizer` has been \
measured yet."""
DRY_HOW = """Nothing was measured on a GPU: tiny models on a CPU, to check the program."""


def list_cases(gpu: bool) -> list[PlanCase]:
    """Return the cases, the most telling first, in case time runs out.

    gpu: False for the dry run's.
    """
    if not gpu:
        return [
            PlanCase("full", model=TINY, ranks=1, sequence=64),
            PlanCase("lora", model=TINY, ranks=1, sequence=64, checkpointing="none"),
        ]
    big, compiled = "llama3/8B", ("compile=true",)
    return [
        PlanCase(
            "lora", model=big, ranks=1, sequence=4096, checkpointing="none", batch_size=2, chunks=16
        ),
        PlanCase(
            "lora",
            model=big,
            ranks=1,
            sequence=4096,
            checkpointing="none",
            batch_size=2,
            chunks=16,
            levers=compiled,
        ),
        PlanCase("qlora", model=big, ranks=1, sequence=4096, batch_size=2, chunks=16),
        PlanCase("full", model=big, ranks=1, sequence=4096, batch_size=2, chunks=16),
        PlanCase(
            "full",
            model=big,
            ranks=1,
            sequence=4096,
            checkpointing="selective",
            chunks=16,
            levers=compiled,
        ),
        PlanCase(
            "full", model="llama3_2/1B", ranks=1, sequence=8192, checkpointing="none", chunks=16
        ),
        PlanCase("qlora", model="qwen3_moe/30B", ranks=1, sequence=2048, chunks=16),
        PlanCase("full", model="gemma2/2B", ranks=1, sequence=8192, chunks=16),
        PlanCase("lora", model=big, ranks=1, sequence=8192, documents=12, chunks=16),
    ]


def main(argv: list[str]) -> int:
    """Measure, plan, and write the report after each case; or plan the rows of a report again.

    Return 1 if a case failed.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.py times",
        description="Measure the seconds of a training step, and compare with planned ones.",
    )
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the report")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all of it")
    parser.add_argument(
        "--plan",
        type=Path,
        nargs="?",
        const=COMMITTED,
        help="a report whose rows are planned again",
    )
    parser.add_argument("--label", default=NOW, help="what the plans are called in the report")
    options = parser.parse_args(argv)
    if options.plan:
        _plan_again(options.plan, options.label)
        return 0
    return _measure_all(options, argv)


def _plan_again(file: Path, label: str) -> None:
    """Plan the measured rows of a report, add the plans under this label, and write its page."""
    report = json.loads(file.read_text(encoding="utf-8"))
    rates = file.with_name(report["rates"])
    for row in report["rows"]:
        if "seconds" in row:
            plans = row.setdefault("planned", {})
            # In a fork, since a simulated device cannot be removed from a process.
            plans[label] = call_in_fork(plan_row, row, report, rates)
    paths = write_pair(file.with_suffix(""), report, format_page(report))
    print("\n".join(map(str, paths)))


def _measure_all(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure rates and cases and write the report after each case.

    A row has `case`, what `gpu_plan.measure` returns (`seconds` of each step, and more), and
    `planned`: label -> what `plan_row` returns. Or `failed` or `skipped` with the reason. Return 1
    if a case failed.
    """
    started = time.monotonic()
    device = run_apart(describe_device, CASE_SECONDS)
    gpu = device.get("type") == "cuda"
    report = begin_report("times", argv, device=device, hardware=look_up_hardware(device))
    stem = options.output / f"gpu-times-{name_device(device)}"
    rates = stem.with_name(f"{stem.name}-rates.json")
    options.output.mkdir(parents=True, exist_ok=True)
    measured_rates = run_apart(functools.partial(calibrate, "cuda" if gpu else "cpu"), CASE_SECONDS)
    rates.write_text(json.dumps(measured_rates, indent=2) + "\n", encoding="utf-8")
    report["rates"] = rates.name
    for case in list_cases(gpu):
        # A list, as JSON makes it, so that `find_case` reads rows of now and of a file alike.
        row: dict[str, Any] = {"case": vars(case) | {"levers": list(case.levers)}}
        seconds_left = options.minutes * 60 - (time.monotonic() - started)
        measure_case = (
            functools.partial(measure, case, steady=STEADY_STEPS)
            if gpu
            else functools.partial(run_on_cpu, case)
        )
        if seconds_left > 0:
            row |= run_apart(measure_case, min(CASE_SECONDS, seconds_left))
        else:
            row["skipped"] = "no time left"
        if "seconds" in row:
            row["planned"] = {NOW: call_in_fork(plan_row, row, report, rates)}
        report["rows"].append(row)
        report["seconds"] = round(time.monotonic() - started)
        print(f"{report['seconds']:5d} s  {describe(case)}", flush=True)
        paths = write_pair(stem, report, format_page(report))
    print("\n".join(map(str, paths)))
    return 1 if any("failed" in row for row in report["rows"]) else 0


def run_on_cpu(case: PlanCase) -> dict[str, Any]:
    """Run a case's steps on the CPU and return {"seconds": of each step}."""
    recipe_class, cfg = case.load()
    cfg.device = "cpu"
    seconds = []
    with start_world(cfg) as world:
        recipe: Any = recipe_class(cfg, world)
        recipe.setup_model()
        recipe.setup_optimizer()
        recipe.data = PlannedData(cfg, world, case.rows)
        for _ in range(1 + STEADY_STEPS):
            batches = next(recipe.data.batches())
            began = time.perf_counter()
            recipe.train_step(batches)
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


def plan_row(
    row: Mapping[str, Any], report: Mapping[str, Any], rates: Path
) -> dict[str, dict[str, float]]:
    """Plan a later step by SHEET and by CALIBRATED.

    rates: file of the measured ones. Returns source -> {`seconds`: of the step, with streams that
    overlap; each of KINDS: seconds of its operators alone}.
    """
    case = find_case(row)
    hardware = look_up_hardware(report["device"])
    recipe_class, cfg = case.load()
    cfg.device = "cpu" if hardware.architecture == "cpu" else "auto"
    settings = PlanSettings(
        hardware, case.rows, case.ranks, traced_ranks=(case.rank,), phases=(), timed=False
    )
    _, trace = make_plan(recipe_class, cfg, settings)
    calibrations = {SHEET: None, CALIBRATED: read_calibration(rates, hardware)}
    planned = {}
    for source, calibration in calibrations.items():
        step_seconds = schedule(
            trace, phase=STEADY, hardware=hardware, calibration=calibration
        ).step
        kind_seconds = sum_time_by_kind(
            trace, phase=STEADY, hardware=hardware, calibration=calibration
        )
        planned[source] = {"seconds": step_seconds, **kind_seconds}
    return planned


def find_case(row: Mapping[str, Any]) -> PlanCase:
    """Rebuild the case of a report's row, where JSON has made a list of the levers."""
    return PlanCase(**row["case"] | {"levers": tuple(row["case"]["levers"])})


def compute_measured_seconds(row: Mapping[str, Any]) -> float:
    """Return the median seconds of a row's steps after the first."""
    return median(row["seconds"][1:])


def summarize(report: Mapping[str, Any]) -> str:
    """Return the range of the newest plans' errors by each source, in a line."""
    rows = [row for row in report["rows"] if row.get("planned")]
    ranges = []
    for source in (SHEET, CALIBRATED):
        errors = []
        for row in rows:
            newest_plan = list(row["planned"].values())[-1]  # labels are added at the end
            errors.append(_compute_error(row, newest_plan, source))
        ranges.append(f"by {source} {min(errors):+.1%} to {max(errors):+.1%}")
    return f"{len(rows)} steps, planned {', '.join(ranges)}"


def _compute_error(row: Mapping[str, Any], plan: Mapping[str, Any], source: str) -> float:
    """Return planned seconds of a step over measured ones, less one."""
    return plan[source]["seconds"] / compute_measured_seconds(row) - 1


def describe_rates(report: Mapping[str, Any], folder: Path) -> str:
    """Return the rates that were measured, in a line.

    folder: of the report, whose `rates` names a file in it.
    """
    rates = json.loads((folder / report["rates"]).read_text(encoding="utf-8"))
    product = next(
        point["rate"] for point in rates["matmul"]["bf16"] if tuple(point["shape"]) == LARGE_MATMUL
    )
    return (
        f"bf16 product of {' x '.join(map(str, LARGE_MATMUL))}:"
        f" {report['doctor_cold_matmul'] / 1e12:.1f} TFLOP/s cold, {product / 1e12:.1f} loaded;"
        f" memory {rates['bandwidth'] / 1e12:.2f} TB/s; to the GPU"
        f" {rates['copy_to_device'] / 1e9:.1f} GB/s, from it {rates['copy_to_host'] / 1e9:.1f}"
    )


def format_page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report.

    Optional key of the report: `notes`, paragraphs on its rows.
    """
    gpu = report["device"].get("type") == "cuda"
    timed = [row for row in report["rows"] if row.get("planned")]
    lines = [f"# Seconds of a step: {report['kind']}", "", *format_head(dict(report)), ""]
    lines += [HOW.format(rates=report["rates"]) if gpu else DRY_HOW, ""]
    for label in _list_labels(timed):
        lines += [f"## Planned {label}", "", *_format_planned(timed, label), ""]
    missing = [row for row in report["rows"] if not row.get("planned")]
    if missing:
        lines += ["## Not reached", ""]
        lines += [
            f"- {describe(find_case(row))}: {row.get('failed') or row.get('skipped')}"
            for row in missing
        ]
        lines.append("")
    notes = [f"{note}\n" for note in report.get("notes", ())]
    return "\n".join([*lines, *notes, *_describe_causes(report, timed)]).rstrip() + "\n"


def _list_labels(rows: list[dict[str, Any]]) -> list[str]:
    """Return the labels under which rows are planned, the oldest first."""
    labels: dict[str, None] = {}
    for row in rows:
        labels |= dict.fromkeys(row["planned"])
    return list(labels)


def _describe_causes(report: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the text WHY with a report's figures, as a list of one.

    Empty unless its rows are planned under two labels and it has the product's rate when cold.
    """
    labels = _list_labels(rows)
    if len(labels) < 2 or "doctor_cold_matmul" not in report:
        return []
    # The same tokens in rows of 4096 and of 2048, so that attention alone differs.
    # Of the committed report; `list_cases` has no case of batch size 4 any more.
    long_row = _find_row(rows, batch_size=2)
    short_row = _find_row(rows, batch_size=4)
    attention_saved = {}
    for label in labels:
        long_plan = long_row["planned"][label][SHEET]
        short_plan = short_row["planned"][label][SHEET]
        attention_saved[label] = long_plan[ATTENTION] - short_plan[ATTENTION]
    # Of steps beside the second one: the first makes the optimizer's states.
    slowdowns = [median(row["seconds"][2:]) / row["seconds"][1] - 1 for row in rows]
    text = WHY.format(
        measured=compute_measured_seconds(long_row) - compute_measured_seconds(short_row),
        flash=attention_saved[labels[0]],
        cudnn=attention_saved[labels[-1]],
        least=min(slowdowns),
        most=max(slowdowns),
        cold=report["doctor_cold_matmul"] / 1e12,
        cube=report["matmul"]["flop_per_second"] / 1e12,
    )
    return [text]


def _find_row(rows: list[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    """Return the first row of this batch size without levers."""
    return next(
        row for row in rows if row["case"]["batch_size"] == batch_size and not row["case"]["levers"]
    )


def _format_planned(rows: list[dict[str, Any]], label: str) -> list[str]:
    """Return the table of the plans under a label, and the worst error of each source."""
    kinds = [
        kind for kind in KINDS if any(row["planned"][label][CALIBRATED].get(kind) for row in rows)
    ]
    heads = ["step", "measured, s"]
    for source in (SHEET, CALIBRATED):
        heads += [f"{source}, s", f"{source}: error"]
    heads += [f"{kind}, {SHEET} / {CALIBRATED}, s" for kind in kinds]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        plan = row["planned"][label]
        cells = [describe(find_case(row)), f"{compute_measured_seconds(row):.3f}"]
        for source in (SHEET, CALIBRATED):
            error = _compute_error(row, plan, source)
            cells += [f"{plan[source]['seconds']:.3f}", f"{error:+.1%}"]
        cells += [f"{plan[SHEET][kind]:.3f} / {plan[CALIBRATED][kind]:.3f}" for kind in kinds]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for source in (SHEET, CALIBRATED):
        errors = [_compute_error(row, row["planned"][label], source) for row in rows]
        lines.append(f"- {source}: worst {max(errors, key=abs):+.1%}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
