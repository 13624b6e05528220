"""Plan where a step's time goes, for an 8B on four kinds of GPUs, with and without fused kernels.

    python -m benchmarks.step_time --output docs/measurements/step_time.md

A case is a method, a micro-batch's tokens and a card. Its operators are traced on the simulated
device, and timed for each card by the rates of its data sheet. No GPU is needed.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import torch

from recipe_lib.plan.hardware import Hardware, find_hardware
from recipe_lib.plan.timing.cost import compute_op_seconds
from recipe_lib.plan.timing.stream_schedule import (
    ATTENTION,
    KINDS,
    MATMULS,
    MEMORY_BOUND,
    classify_op,
    count_launched_operators,
    schedule,
    sum_time_by_kind,
)
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.plan.apart import build_settings, call_in_fork

# Method -> (shipped config, ranks).
METHODS = {
    "full": ("llama3/8B_full", 4),
    "LoRA": ("llama3/8B_lora", 1),
    "QLoRA": ("llama3/8B_qlora", 1),
}
ROW = 2048  # tokens of a sequence
TOKENS = (2048, 8192)  # of a micro-batch: one sequence, and four
OVERRIDES = (
    "data.source=examples/demo/train.jsonl",
    f"max_seq_len={ROW}",
    "gradient_accumulation_steps=1",
)
CARDS = ("rtx3090", "rtx4090", "a100-80gb", "h100")  # as `tune plan --device` takes them
# Name in the table -> override: chains of small operators, one kernel each or fused.
FUSED = {"one by one": "fused_kernels=false", "fused": "fused_kernels=true"}
SHARE = 0.03  # of the seconds of a step's kernels: modules with less are not listed
AIM = 1.25  # largest time of all kernels over that of matmuls and attention
# (module, method or "" for any, why its memory-bound kernels take more than SHARE).
_NF4_REASON = (
    "the weight's numbers of 4 bits, forward, again and backward, a kernel each; the adapter's part"
    " is added to each result"
)
REASONS = (
    ("model.layers.*.mlp", "", "one kernel forward, one backward"),
    (
        "model.layers.*",
        "full",
        "FSDP's copies, a kernel each: shards into and out of the buffer of a gather, gradients"
        " into that of a reduction; every micro-batch makes them, however long",
    ),
    ("model.layers.*.mlp.gate_proj", "QLoRA", _NF4_REASON),
    ("model.layers.*.mlp.up_proj", "QLoRA", _NF4_REASON),
    ("model.layers.*.mlp.down_proj", "QLoRA", _NF4_REASON),
)
TEXT = """# Where a planned step's time goes

By `python -m benchmarks.step_time --output docs/measurements/step_time.md`, torch {torch}: the steady step of rank 0,
planned, layers not compiled, with `{overrides}` and `batch_size` for the micro-batch's tokens; full fine-tuning on 4
ranks, the others on one, checkpointed as their configs are. Rates of data sheets, uncalibrated: how far such plans are
off published speeds is in [planned_times.md](planned_times.md).
Nothing here was measured on a GPU. The time of all kernels over that of matmuls and attention should be {aim}
at most: {verdict}.

`fused`: rotary embedding, gated activation, the loss, and in QLoRA the dequantized weights are a kernel or
few each (`fused_kernels`, the default); `one by one`: `fused_kernels=false`. That both train alike is what
`tests/recipes/test_fused_runs.py` shows; [fused_kernels.md](fused_kernels.md) has the kernels. Layers that are compiled
as a whole (`compile=true`) have no row here.

## By kind

Seconds of each kind alone, and when all of it is scheduled: `exposed`, while a collective or a copy runs and no kernel
does; `idle`, while nothing does: the host launches, or a stream waits. `kernels / useful` is the time of all kernels
over that of matmuls and attention.

{kinds}

## Memory-bound kernels

By module, with fused kernels, those of {share:.0%} of a card's kernels or more; numbers of layers are `*`.

{modules}
"""


def trace_method(method: str, *overrides: str, tokens: int = ROW) -> Trace:
    """Trace a method's first rank. tokens: of a micro-batch, a multiple of ROW."""
    config, ranks = METHODS[method]
    recipe, cfg, settings = build_settings(
        config, ranks, *OVERRIDES, f"batch_size={tokens // ROW}", *overrides
    )
    return simulate(recipe, cfg, settings.sequence, ranks=ranks, phases=()).trace


def measure_rows(method: str, tokens: int) -> tuple[list[str], list[str], list[str]]:
    """Plan a method on all cards; return the lines of both tables, and the cases beyond AIM."""
    traces = {
        name: trace_method(method, override, tokens=tokens) for name, override in FUSED.items()
    }
    kind_lines = []
    module_lines = []
    beyond = []
    for card in CARDS:
        hardware = find_hardware(card)
        case = f"{method} | {tokens} | {card}"
        for name, trace in traces.items():
            kind_lines.append(f"| {case} | {name} | {' | '.join(_build_kinds(trace, hardware))} |")
        fused = traces["fused"]
        times = sum_time_by_kind(fused, STEADY, hardware)
        ratio = _sum_kernels(times) / _sum_useful(times)
        if ratio > AIM:
            beyond.append(f"{method}, {tokens} tokens, {card}: {ratio:.2f}")
        for cells in _build_modules(fused, hardware, method):
            module_lines.append(f"| {case} | {' | '.join(cells)} |")
    return kind_lines, module_lines, beyond


def _sum_kernels(times: dict[str, float]) -> float:
    """Return the seconds of all kernels. times: seconds by kind."""
    return sum(times[kind] for kind in KINDS[:3])  # matmuls, attention, memory-bound


def _sum_useful(times: dict[str, float]) -> float:
    """Return the seconds of matmuls and attention. times: seconds by kind."""
    return times[MATMULS] + times[ATTENTION]


def _build_kinds(trace: Trace, hardware: Hardware) -> list[str]:
    """Return the cells of the table by kind: seconds of each, and of the whole step."""
    times = sum_time_by_kind(trace, STEADY, hardware)
    timing = schedule(trace, STEADY, hardware)
    # Seconds in which a collective or a copy runs and no kernel, and in which nothing runs.
    exposed = timing.exposed + timing.copies_exposed
    idle = timing.step - timing.compute - timing.exposed - timing.copies_exposed
    return [
        *(f"{times[kind]:.3f}" for kind in KINDS if kind != "copies"),
        f"{exposed:.3f}",
        f"{max(0.0, idle):.3f}",
        f"{timing.step:.3f}",
        f"{count_launched_operators(trace, STEADY):,}",
        f"{_sum_kernels(times) / _sum_useful(times):.2f}",
    ]


def _build_modules(trace: Trace, hardware: Hardware, method: str) -> list[list[str]]:
    """Return the rows of memory-bound kernels by module, the slowest first, then their sum."""
    times = sum_time_by_kind(trace, STEADY, hardware)
    kernels = _sum_kernels(times)
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for op in trace.iterate_ops(STEADY):
        if classify_op(op) == MEMORY_BOUND:
            # All layers are one module, `model.layers.*`; "" is outside of any, such as the loss.
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", op.module) or f"({op.part})"
            counts[module] += op.repeats
            seconds[module] += op.repeats * compute_op_seconds(op, hardware)
    rows = []
    for module, module_seconds in seconds.most_common():
        if module_seconds >= SHARE * kernels:
            share = f"{module_seconds / kernels:.1%}"
            reason = _find_reason(module, method)
            rows.append(
                [f"`{module}`", f"{counts[module]:,}", f"{module_seconds:.3f}", share, reason]
            )
    share = f"{times[MEMORY_BOUND] / kernels:.1%}"
    rows.append(["all together", "", f"{times[MEMORY_BOUND]:.3f}", share, ""])
    return rows


def _find_reason(module: str, method: str) -> str:
    """Return the reason of REASONS for a module; empty if it has none."""
    for reason_module, reason_method, reason in REASONS:
        if module == reason_module and reason_method in ("", method):
            return reason
    return ""


def main() -> None:
    """Print the tables' lines as they come, and write the page."""
    parser = argparse.ArgumentParser(description="Plan where a step's time goes, for an 8B.")
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    heads = [
        "method",
        "tokens",
        "card",
        "chains",
        *(kind for kind in KINDS if kind != "copies"),
        "exposed",
        "idle",
        "step",
        "operators",
        "kernels / useful",
    ]
    kinds = ["| " + " | ".join(heads) + " |", "|---|---:|---|---|" + "---:|" * (len(heads) - 4)]
    modules = [
        "| method | tokens | card | module | kernels | seconds | share | why |",
        "|---|---:|---|---|---:|---:|---:|---|",
    ]
    missed: list[str] = []
    for method in METHODS:
        for tokens in TOKENS:
            kind_lines, module_lines, beyond = call_in_fork(measure_rows, method, tokens)
            kinds += kind_lines
            modules += module_lines
            missed += beyond
            print("\n".join([*kind_lines, *module_lines]), flush=True)
    num_cases = len(METHODS) * len(TOKENS) * len(CARDS)
    verdict = f"so it is in {num_cases - len(missed)} of {num_cases} cases with fused kernels"
    if missed:
        verdict += f", and not in {'; '.join(missed)}"
    text = TEXT.format(
        torch=torch.__version__,
        overrides=" ".join(OVERRIDES),
        share=SHARE,
        kinds="\n".join(kinds),
        aim=AIM,
        modules="\n".join(modules),
        verdict=verdict,
    )
    output.write_text(text)


if __name__ == "__main__":
    main()
