"""Judge the runs of `gpu_check.py peers`, and write their report as JSON and as a page.

`gpu_peers.py` runs every case (a training in no tool's words) with every side (ours, and each peer
program), and calls `judge` and `write_peers_report`. `results.py` defines the report's parts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.gpu_cases import Case
from benchmarks.gpu_check import measure_speed
from benchmarks.peers.cases import ALPHA, OURS, RANK, SIDES, PeerCase, choose_tolerances
from benchmarks.peers.results import (
    CaseEntry,
    PeersReport,
    SideComparison,
    SideFigures,
    SideResult,
    read_peers_report,
)
from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import LoraConfig
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.units import GIB

# The goals that the page says are met or missed.
SHARE_OF_MATMUL = 0.5  # of the measured bf16 matmul rate, in full fine-tuning
LORA_TOKENS = 12_200  # a second, in the case lora-4096
OVER_PEERS = 1.1  # times the speed of the fastest peer
MIB = 2**20


def compute_relative_difference(ours: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference at any step.

    It is infinite if a step is missing or not a number, or if there are none.
    """
    if len(ours) != len(other) or not ours:
        return math.inf
    return max(_compute_difference(a, b) for a, b in zip(other, ours, strict=True))


def _compute_difference(other: float, ours: float) -> float:
    """Return the difference of two numbers, relative to ours; infinite for NaN."""
    if other == ours:
        return 0.0
    relative = abs(other - ours) / abs(ours) if ours else math.inf
    return math.inf if math.isnan(relative) else relative


def compare(
    results: Mapping[str, SideResult], case: PeerCase, dtype: str
) -> dict[str, SideComparison]:
    """Compare all runs of each side with our first run, within the tolerances of case and dtype.

    results: by side. A side without a good run is left out.
    """
    our_run = next(iter(results.get(OURS, SideResult()).list_good_runs()), None)
    loss_limit, norm_limit = choose_tolerances(case, dtype)
    comparison: dict[str, SideComparison] = {}
    for name, result in results.items():
        runs = result.list_good_runs()
        if not runs:
            continue
        if our_run is None:
            comparison[name] = SideComparison(loss=None, grad_norm=None, equal=None)
            continue
        loss = max(compute_relative_difference(our_run.losses, run.losses) for run in runs)
        norm = max(compute_relative_difference(our_run.grad_norms, run.grad_norms) for run in runs)
        comparison[name] = SideComparison(
            loss=_drop_infinite(loss),
            grad_norm=_drop_infinite(norm),
            equal=loss <= loss_limit and norm <= norm_limit,
        )
    return comparison


def _drop_infinite(value: float) -> float | None:
    """Return the value, or None if it is not finite: JSON has no such number."""
    return value if math.isfinite(value) else None


def compute_seconds_per_step(result: SideResult, case: PeerCase) -> float | None:
    """Return the median over the runs of each run's median seconds of a step.

    A step's time is from mark to mark. None: no run has two marks behind the warm-up.
    """
    medians = []
    for run in result.list_good_runs():
        marks = run.marks[case.warmup :]
        steps = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        medians += [median(steps)] if steps else []
    return median(medians) if medians else None


def compute_figures(
    case: PeerCase, result: SideResult, model: str, matmul: float | None
) -> SideFigures | None:
    """Return the figures of a side on a GPU; None if no step was timed.

    model: folder with its config.json. matmul: measured rate of bf16 matmuls, FLOP a second; None:
    not measured.
    """
    seconds = compute_seconds_per_step(result, case)
    if seconds is None:
        return None
    spec = build_spec(read_config(Path(model)), model)
    import torch

    shape = build_meta(spec, torch.bfloat16)
    if case.method != "full":
        add_adapters(shape, LoraConfig(rank=RANK, alpha=ALPHA), torch.bfloat16)
    settings = Case("speed", "", case.sequence, batch_size=case.batch_size)
    speed = measure_speed(settings, spec=spec, model=shape, seconds=[seconds])
    runs = result.list_good_runs()
    return SideFigures(
        seconds=seconds,
        tokens_per_second=speed["tokens_per_second"],
        flop_per_second=speed["flop_per_second"],
        share=speed["flop_per_second"] / matmul if matmul else None,
        allocated=max(run.allocated or 0 for run in runs),
        reserved=max(run.reserved or 0 for run in runs),
    )


def format_goals(entries: Sequence[CaseEntry]) -> list[str]:
    """Return a line for each goal and case. Only peers of equal work count."""
    lines = []
    for entry in entries:
        case = entry.case
        ours = {}
        peers = {}  # of equal work
        for name, figures in entry.figures.items():
            if figures is None:
                continue
            if name.startswith(OURS):  # `ours`, and ours with other settings
                ours[name] = figures
            elif name in entry.comparison and entry.comparison[name].equal:
                peers[name] = figures
        if not ours:
            lines.append(f"{case.name}: not measured")
            continue
        best = max(ours, key=lambda name: ours[name].tokens_per_second)
        speed = ours[best].tokens_per_second
        if case.method == "full":
            share = ours[best].share or 0.0
            lines.append(
                f"{case.name}: at least {SHARE_OF_MATMUL:.0%} of the matmul rate: {share:.1%}"
                f" ({best}), {_format_met(share >= SHARE_OF_MATMUL)}"
            )
        if case.name == "lora-4096":
            lines.append(
                f"{case.name}: at least {LORA_TOKENS} tokens/s: {speed:.0f} ({best}),"
                f" {_format_met(speed >= LORA_TOKENS)}"
            )
        lines.append(f"{case.name}: {_format_goal_over_peers(ours, peers)}")
    return lines


def _format_goal_over_peers(
    ours: Mapping[str, SideFigures], peers: Mapping[str, SideFigures]
) -> str:
    """Return the line of the goal over the peers, which holds for every case.

    One side of ours has to meet both parts, speed and memory. ours, peers: figures by side.
    """
    goal = f"at least {OVER_PEERS} times the fastest peer of equal work, in no more memory"
    if not peers:
        return f"{goal}: not measured, no peer did equal work"
    fastest = max(peers, key=lambda name: peers[name].tokens_per_second)
    peer = peers[fastest]
    candidates = []
    for name, figures in ours.items():
        ratio = figures.tokens_per_second / peer.tokens_per_second
        is_no_larger = figures.reserved <= peer.reserved
        candidates.append((ratio >= OVER_PEERS and is_no_larger, ratio, is_no_larger, name))
    # A side that meets the goal goes before a faster one that does not.
    is_met, ratio, is_no_larger, name = max(candidates, key=lambda candidate: candidate[:2])
    memory = "no more" if is_no_larger else "more"
    return f"{goal}: {ratio:.2f} times {fastest} in {memory} memory ({name}), {_format_met(is_met)}"


def _format_met(is_met: bool) -> str:
    """Return the page's word for a goal that is met or missed."""
    return "met" if is_met else "MISSED"


def format_file_name(device: Mapping[str, object], suffix: str) -> str:
    """Return the name of the report's file. device: the report's. suffix: such as `.json`."""
    name = "dry-run-cpu"
    if device.get("type") == "cuda":
        name = "-".join(str(device["name"]).lower().split())
    return f"peers-{name}{suffix}"


def read_earlier_cases(path: Path, names: Sequence[str]) -> list[CaseEntry]:
    """Return the entries of an earlier report, without those of these names.

    [] if there is no report.
    """
    if not path.exists():
        return []
    return [entry for entry in read_peers_report(path).cases if entry.case.name not in names]


def write_peers_report(report: PeersReport, folder: Path) -> list[Path]:
    """Write the report as .json and .md, named after the device, and return their paths.

    Without a GPU no step's time is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / format_file_name(report.device, suffix) for suffix in (".json", ".md")]
    content = json.dumps(report.to_json(), indent=1, allow_nan=False)
    texts = (f"{content}\n", format_page(report))
    for path, text in zip(paths, texts, strict=True):
        # Renamed when complete: it is written after each case, and a run may be killed.
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return paths


def format_page(report: PeersReport) -> str:
    """Return the text of the page."""
    lines = [*_format_head(report), "", "## Sides", "", *_format_sides(report)]
    for entry in report.cases:
        lines += [
            "",
            f"## {entry.case.name}",
            "",
            f"{entry.model}: {_describe_case(entry.case, report.dtype)}",
            "",
        ]
        lines += _format_table(entry, report.on_gpu)
        lines += _format_curves(entry.results)
    lines += ["", "## Goals", "", *(f"- {line}" for line in format_goals(report.cases))]
    return "\n".join(lines) + "\n"


def _format_head(report: PeersReport) -> list[str]:
    """Return the page's title and what holds for all cases."""
    device = report.device
    commit = "" if report.commit is None else f", commit {report.commit}"
    lines = [
        f"# {report.kind}: {device['name']}",
        "",
        f"- {report.date}{commit}, `{report.command}`, {report.seconds} s",
        (
            f"- {report.dtype}; runs of each side: {report.repeats}, in turns, each in a"
            " process of its own"
        ),
        f"- {_summarize(report)}",
    ]
    if not report.on_gpu:
        return [
            *lines,
            (
                "- dry run, CPU: it shows that all sides do the same work; its times say nothing"
                " about any GPU and are not kept, and most of what a process holds are its"
                " libraries"
            ),
        ]
    rate = report.matmul
    matmul_rate = f"{rate / 1e12:.3g} TFLOP/s" if rate else "not measured"
    return [
        *lines,
        (
            f"- {device['memory_gib']} GiB, driver {device['driver']}, CUDA {device['cuda']}, power"
            f" limit {device['power_limit']}; bf16 matmul rate, measured: {matmul_rate}"
        ),
    ]


def _summarize(report: PeersReport) -> str:
    """Return how many peers did equal work, and which did not."""
    num_peers = 0
    unequal = []
    for entry in report.cases:
        for name, compared in entry.comparison.items():
            if not name.startswith(OURS):
                num_peers += 1
                if not compared.equal:
                    unequal.append(f"{name} in {entry.case.name}")
    line = f"equal work: {num_peers - len(unequal)} of {num_peers} runs of peers"
    return f"{line}; not shown for {', '.join(unequal)}" if unequal else line


def find_fastest(report: PeersReport) -> str:
    """Return each case's tokens a second and reserved GiB, ours and the fastest equal peer's.

    Called by `gpu_pages.py`.
    """
    sentences = []
    for entry in report.cases:
        sides = {name: figures for name, figures in entry.figures.items() if figures is not None}
        equal_sides = {
            name for name in sides if name in entry.comparison and entry.comparison[name].equal
        }
        peers = sorted(equal_sides - {OURS}, key=lambda name: -sides[name].tokens_per_second)
        parts = []
        for name in (OURS, *peers[:1]):
            if name in sides:
                speed = sides[name].tokens_per_second
                reserved = sides[name].reserved / GIB
                parts.append(f"{name} {speed:,.0f} tokens/s in {reserved:.2f} GiB")
        sentence = f"{entry.case.name}: {'; '.join(parts)}"
        missing_sides = sorted(set(entry.figures) - set(sides))
        if missing_sides:
            sentence += f"; did not come to run: {', '.join(missing_sides)}"
        sentences.append(sentence)
    return " ".join(sentences)


def _format_sides(report: PeersReport) -> list[str]:
    """Return a line for each side: what it is, and its packages with their versions."""
    descriptions = {side.name: side.told for side in SIDES}
    lines = []
    for name, versions in report.versions.items():
        packages = ", ".join(f"{package} {version}" for package, version in versions.items())
        lines.append(f"- {name}: {descriptions[name]}; {packages or 'no environment'}")
    return lines


def _describe_case(case: PeerCase, dtype: str) -> str:
    """Return the settings of a case, and what equal work means for it."""
    loss, norm = choose_tolerances(case, dtype)
    adapters = (
        "" if case.method == "full" else f"adapters of rank {RANK} on all linears of the layers, "
    )
    base = ", base in NF4" if case.method == "qlora" else ""
    return (
        f"{case.batch_size} rows of {case.sequence} tokens a step, {case.steps} steps,"
        f" {adapters}AdamW, constant learning rate {case.lr:g}, clipping at 1.0, activation"
        f" checkpointing `{case.checkpointing}`{base}. Equal means: at every step the loss within"
        f" {loss:g} of ours, the norm of the gradient within {norm:g}."
    )


def _format_table(entry: CaseEntry, gpu: bool) -> list[str]:
    """Return the table of a case, a line for each side."""
    columns = [
        "side",
        "first loss",
        "last loss",
        "loss differs by",
        "norm differs by",
        "equal work",
    ]
    if gpu:
        columns += ["s/step", "tokens/s", "MFU", "allocated, GiB", "reserved, GiB"]
    else:
        columns.append("resident, MiB")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, result in entry.results.items():
        runs = result.list_good_runs()
        if not runs:
            reason = result.absent or result.runs[-1].failed
            lines.append(f"| {name} | {reason} |{' |' * (len(columns) - 2)}")
            continue
        side = name
        if len(runs) != len(result.runs):
            side = f"{name}, {len(runs)} of {len(result.runs)} runs"
        cells = [side, f"{runs[0].losses[0]:.5f}", f"{runs[0].losses[-1]:.5f}"]
        cells += _format_differences(entry.comparison[name])
        if gpu:
            cells += _format_figures(entry.figures.get(name))
        else:
            cells.append(_format_cell(max(run.resident or 0 for run in runs), MIB, ".0f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format_differences(compared: SideComparison) -> list[str]:
    """Return the cells of a side's differences."""
    if compared.equal is None:
        return ["", "", "not compared"]
    return [
        _format_cell(compared.loss, 1, ".1e"),
        _format_cell(compared.grad_norm, 1, ".1e"),
        "yes" if compared.equal else "NO",
    ]


def _format_figures(figures: SideFigures | None) -> list[str]:
    """Return the cells of a side's speed and memory, empty ones for None."""
    if figures is None:
        return [""] * 5
    return [
        _format_cell(figures.seconds, 1, ".3f"),
        _format_cell(figures.tokens_per_second, 1, ".0f"),
        _format_cell(figures.share, 1, ".1%"),
        _format_cell(figures.allocated, GIB, ".2f"),
        _format_cell(figures.reserved, GIB, ".2f"),
    ]


def _format_cell(value: float | None, unit: float, form: str) -> str:
    """Return a value in a unit; empty for None. form: a format specification."""
    return "" if value is None else format(value / unit, form)


def _format_curves(results: Mapping[str, SideResult]) -> list[str]:
    """Return a line for each side with losses and gradient norms of its first good run."""
    lines = [""]
    for name, result in results.items():
        for run in result.list_good_runs()[:1]:
            losses = ", ".join(f"{loss:.5f}" for loss in run.losses)
            norms = ", ".join(f"{norm:.4f}" for norm in run.grad_norms)
            lines.append(f"- {name}: loss {losses}; grad norm {norms}")
    return lines


def judge(entry: CaseEntry, model: str, report: PeersReport) -> None:
    """Set `comparison` and, with a GPU, `figures` of an entry, from its `results`.

    model: folder of the model that was trained. report: `dtype`, `device` and `matmul` are read.
    """
    entry.comparison = compare(entry.results, case=entry.case, dtype=report.dtype)
    if report.on_gpu:
        for name, result in entry.results.items():
            entry.figures[name] = compute_figures(
                entry.case, result=result, model=model, matmul=report.matmul
            )
