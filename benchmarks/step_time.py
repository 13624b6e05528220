"""Plan where a step's time goes, for an 8B on four kinds of GPUs, with and without fused kernels.

    python -m benchmarks.step_time --output docs/measurements/step_time.md

A case is a method, a micro-batch's tokens and a card. Its operators are traced on the simulated
device, and timed for each card by the rates of its data sheet. No GPU is needed.
"""

import argparse
import re
from collections import Counter
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Method:
    """A way to fine-tune."""

    config: str  # a shipped one
    ranks: int


@dataclass(frozen=True)
class Reason:
    """Why a module's memory-bound kernels take more than MIN_LISTED_SHARE."""

    module: str  # path, with `*` for the number of a layer
    method: str  # a key of METHODS; empty: any
    text: str


@dataclass(frozen=True)
class MethodTables:
    """The planned steps of one method and number of tokens, on all cards."""

    kind_lines: list[str]  # of the table by kind
    module_lines: list[str]  # of the table of memory-bound kernels
    missed_cases: list[str]  # in words, those beyond MAX_KERNEL_RATIO


METHODS = {
    "full": Method("llama3/8B_full", ranks=4),
    "LoRA": Method("llama3/8B_lora", ranks=1),
    "QLoRA": Method("llama3/8B_qlora", ranks=1),
}
SEQUENCE_LENGTH = 2048  # tokens of a sequence
TOKENS = (2048, 8192)  # of a micro-batch: one sequence, and four
OVERRIDES = (
    "data.source=examples/demo/train.jsonl",
    f"max_seq_len={SEQUENCE_LENGTH}",
    "gradient_accumulation_steps=1",
)
CARDS = ("rtx3090", "rtx4090", "a100-80gb", "h100")  # as `tune plan --device` takes them
# Name in the table -> override: chains of small operators, one kernel each or fused.
KERNEL_OVERRIDES = {"one by one": "fused_kernels=false", "fused": "fused_kernels=true"}
MIN_LISTED_SHARE = 0.03  # of the seconds of a step's kernels: modules with less are not listed
MAX_KERNEL_RATIO = 1.25  # largest time of all kernels over that of matmuls and attention
_NF4_REASON = (
    "the weight's numbers of 4 bits, forward, again and backward, a kernel each; the adapter's part"
    " is added to each result"
)
REASONS = (
    Reason("model.layers.*.mlp", method="", text="one kernel forward, one backward"),
    Reason(
        "model.layers.*",
        method="full",
        text="FSDP's copies, a kernel each: shards into and out of the buffer of a gather, gradients"
        " into that of a reduction; every micro-batch makes them, however long",
    ),
    Reason("model.layers.*.mlp.gate_proj", method="QLoRA", text=_NF4_REASON),
    Reason("model.layers.*.mlp.up_proj", method="QLoRA", text=_NF4_REASON),
    Reason("model.layers.*.mlp.down_proj", method="QLoRA", text=_NF4_REASON),
)
TEXT = """# Where a planned step's time goes

For whoever wants to know what bounds a step of an 8B: matmuls, memory, communication or the host.

    python -m benchmarks.step_time --output docs/measurements/step_time.md

Nothing here was measured on a GPU. It is the steady step of rank 0 as planned with torch {torch},
by rates of data sheets, uncalibrated. [planned_times.md](planned_times.md) has how far such plans
are off published speeds. Full fine-tuning is on 4 ranks, the others on one, checkpointed as their
configs are. The settings are `{overrides}`,
and `batch_size` for the micro-batch's tokens. Layers that are compiled as a whole (`compile=true`)
have no row here.

The time of all kernels over that of matmuls and attention should be {max_ratio} at most: {verdict}.

| chains | meaning |
|---|---|
| fused | `fused_kernels`, the default: rotary embedding, gated activation, the loss, and in QLoRA \
the dequantized weights are a kernel or few each |
| one by one | `fused_kernels=false` |

`tests/recipes/test_fused_runs.py` shows that both train alike. [fused_kernels.md](fused_kernels.md)
has the kernels.

## By kind

| column | meaning |
|---|---|
| matmuls, attention, memory-bound kernels, communication | seconds of each kind alone |
| exposed | seconds of the schedule while a collective or a copy runs and no kernel does |
| idle | seconds of the schedule while nothing runs: the host launches, or a stream waits |
| step | seconds of the whole schedule |
| operators | number that the host launches |
| kernels / useful | time of all kernels over that of matmuls and attention |

{kind_table}

## Memory-bound kernels

By module, with fused kernels, those of {share:.0%} of a card's kernels or more. Numbers of layers
are `*`.

{module_table}
"""


def trace_method(method: str, *overrides: str, tokens: int = SEQUENCE_LENGTH) -> Trace:
    """Trace a method's first rank. tokens: of a micro-batch, a multiple of SEQUENCE_LENGTH."""
    config = METHODS[method].config
    ranks = METHODS[method].ranks
    # The tests' helper gives what a plan of a shipped config needs, without weights.
    recipe, cfg, settings = build_settings(
        config, ranks, *OVERRIDES, f"batch_size={tokens // SEQUENCE_LENGTH}", *overrides
    )
    # No phases: set-up and steps alone, without loading, validation and saving.
    return simulate(recipe, cfg, sequence=settings.sequence, ranks=ranks, phases=()).trace


def plan_method(method: str, tokens: int) -> MethodTables:
    """Plan a method's step on all cards. tokens: of a micro-batch."""
    traces = {
        name: trace_method(method, override, tokens=tokens)
        for name, override in KERNEL_OVERRIDES.items()
    }
    kind_lines = []
    module_lines = []
    missed_cases = []
    for card in CARDS:
        hardware = find_hardware(card)
        case = f"{method} | {tokens} | {card}"
        for name, trace in traces.items():
            kind_lines.append(
                f"| {case} | {name} | {' | '.join(_format_kind_cells(trace, hardware))} |"
            )
        fused = traces["fused"]
        times = sum_time_by_kind(fused, STEADY, hardware)
        ratio = _sum_kernels(times) / _sum_useful(times)
        if ratio > MAX_KERNEL_RATIO:
            missed_cases.append(f"{method}, {tokens} tokens, {card}: {ratio:.2f}")
        for cells in _format_module_rows(fused, hardware, method):
            module_lines.append(f"| {case} | {' | '.join(cells)} |")
    return MethodTables(kind_lines, module_lines=module_lines, missed_cases=missed_cases)


def _sum_kernels(times: dict[str, float]) -> float:
    """Return the seconds of all kernels. times: seconds by kind."""
    return sum(times[kind] for kind in KINDS[:3])  # matmuls, attention, memory-bound


def _sum_useful(times: dict[str, float]) -> float:
    """Return the seconds of matmuls and attention. times: seconds by kind."""
    return times[MATMULS] + times[ATTENTION]


def _format_kind_cells(trace: Trace, hardware: Hardware) -> list[str]:
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


def _format_module_rows(trace: Trace, hardware: Hardware, method: str) -> list[list[str]]:
    """Return the rows of memory-bound kernels by module, the slowest first, then their sum."""
    times = sum_time_by_kind(trace, STEADY, hardware)
    kernel_seconds = _sum_kernels(times)
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
        if module_seconds >= MIN_LISTED_SHARE * kernel_seconds:
            share = f"{module_seconds / kernel_seconds:.1%}"
            reason = _find_reason(module, method)
            rows.append(
                [f"`{module}`", f"{counts[module]:,}", f"{module_seconds:.3f}", share, reason]
            )
    share = f"{times[MEMORY_BOUND] / kernel_seconds:.1%}"
    rows.append(["all together", "", f"{times[MEMORY_BOUND]:.3f}", share, ""])
    return rows


def _find_reason(module: str, method: str) -> str:
    """Return the text of REASONS for a module; empty if it has none."""
    for reason in REASONS:
        if module == reason.module and reason.method in ("", method):
            return reason.text
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
    kind_table = [
        "| " + " | ".join(heads) + " |",
        "|---|---:|---|---|" + "---:|" * (len(heads) - 4),
    ]
    module_table = [
        "| method | tokens | card | module | kernels | seconds | share | why |",
        "|---|---:|---|---|---:|---:|---:|---|",
    ]
    missed_cases: list[str] = []
    for method in METHODS:
        for tokens in TOKENS:
            # In a fork, as the simulated device cannot be removed from a process again.
            tables: MethodTables = call_in_fork(plan_method, method, tokens)
            kind_table += tables.kind_lines
            module_table += tables.module_lines
            missed_cases += tables.missed_cases
            print("\n".join([*tables.kind_lines, *tables.module_lines]), flush=True)
    num_cases = len(METHODS) * len(TOKENS) * len(CARDS)
    verdict = f"so it is in {num_cases - len(missed_cases)} of {num_cases} cases with fused kernels"
    if missed_cases:
        verdict += f", and not in {'; '.join(missed_cases)}"
    text = TEXT.format(
        torch=torch.__version__,
        overrides=" ".join(OVERRIDES),
        share=MIN_LISTED_SHARE,
        kind_table="\n".join(kind_table),
        max_ratio=MAX_KERNEL_RATIO,
        module_table="\n".join(module_table),
        verdict=verdict,
    )
    output.write_text(text)


if __name__ == "__main__":
    main()
