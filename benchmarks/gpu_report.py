"""Write the report of `python benchmarks/gpu_check.py`, which calls `write_report` after each case.

A report is a dict of device, versions and `cases`. An entry of these has `case`, the fields of
`gpu_cases.Case`, and `result`, which `gpu_check.run_steps` returns: figures, or `failed` or
`out_of_memory` with the reason in their place. JSON has all of it, Markdown has tables.
"""

from pathlib import Path
from typing import Any

from benchmarks.gpu_plan_report import name_device, write_pair
from recipe_lib.units import GIB

HOW = """Memory: the recipe's model, optimizer and training step as rank 0 of N through torch's \
fake process group, random weights, bf16 parameters and gradients, AdamW (fused), activation \
checkpointing `full`, the loss in 8 chunks, batch 1. `lora`, `qlora`: adapters of rank 16 on all \
linears of the layers, beside a base in bf16 or NF4; gradients of the adapters alone. Peaks are \
those of steps 2 and 3 (the optimizer states exist), in GiB (1024^3), of torch's allocator; NCCL's \
buffers and the CUDA context are not in them. Capped: the allocator may take {cap} GiB, what a 24 \
GB card leaves it. Losses under the fake group mean nothing and are not shown.

Time: one process on the whole GPU, random weights, random tokens, the same batch each step. \
Tokens a second over the second half of the steps. MFU: the model's own FLOP (6 a parameter in a \
matmul and token, 4 if it is frozen, 6 s h e a layer and token for causal attention; nothing for \
recomputation or dequantizing) over a bf16 matmul rate."""


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write gpu-check-DEVICE.json and .md into the folder and return their paths."""
    stem = folder / f"gpu-check-{name_device(report['device'])}"
    return write_pair(stem, report, format_page(report))


def format_page(report: dict[str, Any]) -> str:
    """Return the Markdown page: tables of memory and speed, and losses step by step."""
    device = report["device"]
    versions = report["versions"]
    lines = [
        f"# {report['kind']}: {device.get('name', 'unknown device')}",
        "",
        f"- {report['date']}, `{report['command']}`, {report.get('seconds', 0)} s",
        f"- torch {versions['torch']}, Python {versions['python']}, {versions['system']}",
    ]
    dry_run = device.get("type") != "cuda"
    if not dry_run:
        lines.append(
            f"- {device['memory_gib']} GiB, driver {device['driver']}, CUDA {device['cuda']}, "
            f"power limit {device['power_limit']}"
        )
    else:
        lines.append(
            "- dry run, CPU: a tiny model, to check the code; its numbers say nothing about any GPU"
        )
    lines += ["", HOW.format(cap=report["cap_gib"])]
    # Entries by kind of case. A report is written after each case, so any kind may be missing.
    memory = [entry for entry in report["cases"] if entry["case"]["kind"] == "memory"]
    speed = [entry for entry in report["cases"] if entry["case"]["kind"] == "speed"]
    if memory:
        lines += ["", "## Memory", ""]
        lines += _format_memory(memory, "not applied" if dry_run else report["cap_gib"])
    if speed:
        # Empty if the run was cut before the matmul's case, or that failed.
        matmul: dict[str, Any] = next(
            (entry["result"] for entry in report["cases"] if entry["case"]["kind"] == "matmul"), {}
        )
        lines += ["", "## Time", ""]
        lines += _format_speeds(
            speed, measured=matmul.get("flop_per_second"), datasheet=device.get("datasheet_rate")
        )
        lines += _format_curves(speed)
    return "\n".join(lines) + "\n"


def _format_memory(entries: list[dict[str, Any]], cap: float | str) -> list[str]:
    """Return the table of peaks.

    cap: GiB that capped cases may take, or a text in its place.
    """
    rows = [
        (
            "| model | method | ranks | tokens | wrapping | cap, GiB | active | allocated |"
            " reserved | active, first step | retries |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in sorted(entries, key=_get_memory_order):
        case = entry["case"]
        result = entry["result"]
        # A reason takes the first of the three cells of peaks.
        if "failed" in result:
            peaks = [f"failed: {result['failed']}", "", ""]
        elif "out_of_memory" in result:
            peaks = [f"out of memory, {result['out_of_memory']}", "", ""]
        else:
            later_peaks = result["later_steps"]
            peaks = [
                f"{later_peaks[kind] / GIB:.2f}" for kind in ("active", "allocated", "reserved")
            ]
        first_peaks = result.get("first_step")  # measured even if a later step ran out
        first_peak = f"{first_peaks['active'] / GIB:.2f}" if first_peaks else ""
        rows.append(
            f"| {case['preset']} | {case['method']} | {case['ranks']} | {case['sequence']} |"
            f" {case['wrapping']} | {cap if case['capped'] else 'none'} | {' | '.join(peaks)} |"
            f" {first_peak} | {result.get('alloc_retries', '')} |"
        )
    return rows


def _get_memory_order(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return the sort key of a memory case: many ranks first, a capped run before one without."""
    case = entry["case"]
    return (
        case["method"],
        case["preset"],
        -case["ranks"],
        case["sequence"],
        case["wrapping"],
        -case["capped"],
    )


def _format_speeds(
    entries: list[dict[str, Any]], *, measured: float | None, datasheet: float | None
) -> list[str]:
    """Return the table of speeds.

    measured, datasheet: bf16 matmul rates, FLOP/s; None where not known.
    """
    rows = [
        (
            f"bf16 matmul rate: measured {_format_rate(measured)},"
            f" datasheet {_format_rate(datasheet)}."
        ),
        "",
        (
            "| model | method | batch | tokens | checkpointing | compiled | tokens/s | model"
            " TFLOP/s | MFU, measured rate | MFU, datasheet | peak active, GiB |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in entries:
        case = entry["case"]
        result = entry["result"]
        settings = (
            f"| {case['preset']} | {case['method']} | {case['batch_size']} | {case['sequence']} "
            f"| {case['activation_checkpointing']} | {'yes' if case['compile'] else 'no'} "
        )
        if "tokens_per_second" not in result:
            why = result.get("failed") or f"out of memory, {result.get('out_of_memory')}"
            rows.append(f"{settings}| {why} | | | | |")  # in place of the five figures
            continue
        rate = result["flop_per_second"]
        rows.append(
            f"{settings}| {result['tokens_per_second']:.0f} | {rate / 1e12:.3g} |"
            f" {_format_share(rate, measured)} | {_format_share(rate, datasheet)} |"
            f" {result['later_steps']['active'] / GIB:.2f} |"
        )
    return rows


def _format_curves(entries: list[dict[str, Any]]) -> list[str]:
    """Return losses, gradient norms and seconds of each run, as Markdown lists."""
    lines = []
    for entry in entries:
        case = entry["case"]
        result = entry["result"]
        if result.get("losses"):
            compiled = ", compiled" if case["compile"] else ""
            lines += [
                "",
                (
                    f"{case['method']}, batch {case['batch_size']},"
                    f" {case['activation_checkpointing']}{compiled}, step by step:"
                ),
                "",
                "- loss " + ", ".join(f"{loss:.4f}" for loss in result["losses"]),
                "- grad norm " + ", ".join(f"{norm:.4f}" for norm in result["grad_norms"]),
                "- seconds " + ", ".join(f"{seconds:.2f}" for seconds in result["seconds"]),
            ]
    return lines


def _format_rate(rate: float | None) -> str:
    """Return FLOP/s as TFLOP/s; `unknown` for None."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate else "unknown"


def _format_share(rate: float, reference_rate: float | None) -> str:
    """Return a rate as a percentage of another; `unknown` if that is None."""
    return f"{rate / reference_rate:.1%}" if reference_rate else "unknown"
