"""Plan one layer's kernels, and compare the bytes that they move with the least that is possible.

    python -m benchmarks.layer_kernels --output docs/measurements/layer_kernels.md

The operators of a step are traced on the simulated device, with the memory that each reads and
writes, and timed by the rates of data sheets. Those that are bound by memory are fused on paper,
by `kernel_chains.py`. No GPU is needed.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernel_chains import Kernel, KernelGraph, View, fuse_kernels, link_kernels
from benchmarks.tables import format_markdown_table
from recipe_lib.plan.hardware import Hardware, find_hardware
from recipe_lib.plan.simulated_world.shape_only_model import limit_layers
from recipe_lib.plan.streams.operator_accesses import find_accesses
from recipe_lib.plan.timing.cost import (
    KERNEL_SECONDS,
    compute_least_op_seconds,
    compute_op_seconds,
)
from recipe_lib.plan.tracing.trace import OP, Op
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from recipe_lib.plan.tracing.tracer import Tracer
from tests.plan.apart import build_settings, call_in_fork

METHODS = {"LoRA": "llama3/8B_lora", "full": "llama3/8B_full"}  # method -> shipped config
SEQUENCE_LENGTH = 2048  # tokens of a sequence
BATCH_SIZE = 2
TOKENS = BATCH_SIZE * SEQUENCE_LENGTH  # of a micro-batch
OVERRIDES = (
    "data.source=examples/demo/train.jsonl",
    f"max_seq_len={SEQUENCE_LENGTH}",
    f"batch_size={BATCH_SIZE}",
    "gradient_accumulation_steps=1",
    "memory.activation_checkpointing=none",
)
CARDS = ("rtx3090", "rtx4090", "h200")  # as `tune plan --device` takes them
NUM_LAYERS = 5  # of the traced model: the middle one has two neighbors on each side that are alike
MIDDLE = 2  # the layer of the page
PASSES = ("forward", "backward")
MEMORY = "memory"
COMPUTE = "compute"
MAX_RATIO = 1.3  # the goal: bytes of memory-bound kernels over the least
TEXT = """# The kernels of one layer, and the least bytes that they have to move

For whoever wants to know which kernels of a layer move more bytes than they must.

    python -m benchmarks.layer_kernels --output docs/measurements/layer_kernels.md

Nothing here was measured on a GPU. It is a decoder layer of Llama 3 8B in the middle of a steady \
step, as planned with torch {torch}, by rates of data sheets, uncalibrated. Configs are {configs} \
on one rank, with `{overrides}`: {tokens:,} tokens. The model has {layers} layers instead of 32, \
which are alike; whether it fits on a card does not matter here. LoRA's config packs its sequences, \
so that attention is the varlen kernel. Attention of rows that are not packed is traced as flash \
attention, and has cuDNN's time on the H200.

## Bytes beyond the least

| term | meaning |
|---|---|
| bound by memory | moving the kernel's bytes takes longer than its arithmetic, at the rate of a \
very large matmul. The narrow matmuls of adapters are bound by memory |
| chain | kernels bound by memory that could be one. Two are, if they share a tensor and no kernel \
bound by compute has to run between them. Pairs are joined one after the other, the one that saves \
most bytes first |
| least | bytes of a chain: each tensor that is made outside of it is read once; of its results \
those are written, once, that something outside of it reads: a matmul, attention, another chain, \
backward, the optimizer. Results that only the chain reads are free |
| beyond | bytes that a kernel moves beyond its part of the least |
| bytes | of all {tokens:,} tokens, divided by their number; with weights and their gradients |

Kernels may run in another order than they are issued in now, as long as each has what it reads. A \
chain may hold the end of a layer and the begin of the next one: a table begins behind that. What \
is computed again in backward stands with the module whose gradients need it.

The bytes of kernels bound by memory over the least should be {max_ratio} at most. They are \
{verdict}.

{sum_table}

| column | meaning |
|---|---|
| kernels, chains | of a layer, forward and backward: those bound by memory, and what they would be \
fused |
| moved, least | bytes a token |
| µs, µs of the least | time of the kernels bound by memory, and of a kernel for each chain that \
moves its least bytes |
| share | of the time of all of the layer's kernels that those bound by memory take |

## The kernels that move the rest

All bytes beyond the least, by operator{cards_note}. Of kernels that read the same tensor, it is the \
later ones that read it beyond the least.

{rest_table}
{method_sections}"""
METHOD_TEXT = """
## {title}

### Kernels

Times are microseconds of all kernels of a line; a kernel takes {kernel_microseconds:.0f} at least. \
Bytes are a token's. Kernels bound by compute are in no chain.

{kernel_table}

### Chains

{chain_table}
"""


def find_bound(op: Op, hardware: Hardware) -> str:
    """Return what bounds an operator on a card: `memory` or `compute`."""
    moving = compute_op_seconds(Op(name="", bytes=op.bytes), hardware)
    # The rate of a very large matmul: a narrow one that is fused into another kernel need not fill
    # the tiles of cuBLAS's.
    return COMPUTE if compute_least_op_seconds(op, hardware) > moving else MEMORY


def trace_method(method: str) -> KernelGraph:
    """Trace a method, and return the kernels of a steady step."""
    accesses: dict[int, tuple[tuple[View, ...], tuple[View, ...]]] = {}
    note_operator = Tracer.note_operator

    def note_accesses(
        self: Tracer, func: Any, *, args: Any, kwargs: Any, result: Any, cost: Any
    ) -> None:
        note_operator(self, func, args=args, kwargs=kwargs, result=result, cost=cost)
        if not cost.is_view:
            read, written = find_accesses(func, args, kwargs, result)
            accesses[len(self.trace.ops) - 1] = (
                _describe_views(self, read),
                _describe_views(self, written),
            )

    recipe, cfg, settings = build_settings(METHODS[method], 1, *OVERRIDES)
    with mock.patch.object(Tracer, "note_operator", note_accesses):
        trace = simulate(
            recipe,
            limit_layers(cfg, NUM_LAYERS),
            sequence=settings.sequence,
            # Set-up and steps alone, without loading, validation and saving.
            phases=(),
        ).trace
    indices = [index for kind, index in trace.iterate_events(STEADY) if kind == OP]
    # What records are repeated for has no accesses, and belongs to no layer.
    return link_kernels(
        [Kernel(trace.ops[index], *accesses.get(index, ((), ()))) for index in indices],
        {index: storage.bytes for index, storage in enumerate(trace.storages)},
    )


def _describe_views(tracer: Tracer, tensors: Sequence[Tensor]) -> tuple[View, ...]:
    views = set()
    for tensor in tensors:
        storage = tracer.find_storage_index(tensor)
        if storage < 0:
            continue
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride else 1
        geometry = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        views.add(View(storage, elements * tensor.element_size(), geometry))
    return tuple(views)


@dataclass
class LayerChain:
    """A chain of the middle layer."""

    number: int  # counts from 1, forward first
    part: str  # `forward` or `backward`
    # Its kernels, and each one's part of the least bytes.
    kernels: list[tuple[Kernel, int]]

    @property
    def moved(self) -> int:
        return sum(kernel.op.bytes for kernel, _ in self.kernels)

    @property
    def least(self) -> int:
        return sum(part for _, part in self.kernels)


@dataclass(frozen=True)
class LayerLine:
    """Kernels of one module, operator and chain."""

    part: str  # `forward` or `backward`
    module: str  # within the layer, such as `mlp`
    operator: str
    chain: int  # its number; 0: bound by compute
    kernels: list[Kernel]
    beyond: int  # bytes beyond the least


@dataclass(frozen=True)
class LayerReport:
    """The kernels of the middle layer on one card."""

    chains: list[LayerChain]
    lines: list[LayerLine]

    @property
    def moved(self) -> int:
        return sum(chain.moved for chain in self.chains)

    @property
    def least(self) -> int:
        return sum(chain.least for chain in self.chains)

    @property
    def ratio(self) -> float:
        return self.moved / self.least


def report_layer(graph: KernelGraph, hardware: Hardware) -> LayerReport:
    """Return the kernels and chains of the middle layer on a card."""
    kernels = graph.kernels
    chains: list[LayerChain] = []
    lines: list[LayerLine] = []
    for part in PASSES:
        # With its neighbors: chains begin in one layer and end in the next.
        near = [
            index
            for index, kernel in enumerate(kernels)
            if kernel.op.part == part and abs(_read_layer(kernel.op) - MIDDLE) <= 1
        ]
        window = range(near[0], near[-1] + 1)
        bounds = {index: find_bound(kernels[index].op, hardware) for index in window}
        fusible = {index for index in near if bounds[index] == MEMORY}
        chain_numbers: dict[int, int] = {}  # of kernels
        least_parts: dict[int, int] = {}
        for chain in fuse_kernels(graph, window, fusible):
            if _read_layer(kernels[min(chain)].op) != MIDDLE:
                continue
            parts = graph.share_least_bytes(chain)
            chains.append(
                LayerChain(
                    number=len(chains) + 1,
                    part=part,
                    kernels=[(kernels[index], least) for index, least in parts.items()],
                )
            )
            chain_numbers |= dict.fromkeys(chain, len(chains))
            least_parts |= parts
        chain_numbers |= {
            index: 0
            for index in near
            if bounds[index] == COMPUTE and _read_layer(kernels[index].op) == MIDDLE
        }
        rows: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for index, chain_number in sorted(chain_numbers.items()):
            op = kernels[index].op
            rows[_read_module(op), op.name.partition("::")[2], chain_number].append(index)
        for (module, operator, chain_number), indices in rows.items():
            moved = sum(kernels[index].op.bytes for index in indices)
            least = sum(least_parts.get(index, kernels[index].op.bytes) for index in indices)
            lines.append(
                LayerLine(
                    part=part,
                    module=module,
                    operator=operator,
                    chain=chain_number,
                    kernels=[kernels[index] for index in indices],
                    beyond=moved - least,
                )
            )
    return LayerReport(chains, lines)


def _read_layer(op: Op) -> int:
    """Return the number of the layer that an operator belongs to; one that is far away if none."""
    match = re.search(r"\blayers\.(\d+)", op.module)
    return int(match[1]) if match else -NUM_LAYERS


def _read_module(op: Op) -> str:
    """Return an operator's module within its layer, such as `self_attn.q_proj`."""
    return re.sub(r".*\blayers\.\d+\.?", "", op.module) or "(layer)"


def report_method(method: str) -> dict[str, LayerReport]:
    """Return card -> the middle layer's report, of a method."""
    graph = trace_method(method)
    return {card: report_layer(graph, find_hardware(card)) for card in CARDS}


# The page's tables.


def format_sum_table(reports: dict[str, dict[str, LayerReport]]) -> str:
    """Return the table of the sums. reports: method -> card -> its report."""
    head = (
        "method | card | kernels | chains | moved | least | moved / least | µs | µs of the least"
        " | share"
    ).split(" | ")
    rows = []
    for method, card, report in _iterate_reports(reports):
        hardware = find_hardware(card)
        layer_seconds = sum(_sum_seconds(line.kernels, hardware) for line in report.lines)
        seconds = sum(_sum_seconds(line.kernels, hardware) for line in report.lines if line.chain)
        least_seconds = sum(
            compute_op_seconds(Op(name="", bytes=chain.least), hardware) for chain in report.chains
        )
        rows.append(
            [
                method,
                card,
                str(sum(len(chain.kernels) for chain in report.chains)),
                str(len(report.chains)),
                _format_bytes_per_token(report.moved),
                _format_bytes_per_token(report.least),
                f"{report.ratio:.2f}",
                f"{seconds * 1e6:,.0f}",
                f"{least_seconds * 1e6:,.0f}",
                f"{seconds / layer_seconds:.0%}",
            ]
        )
    return format_markdown_table(head, rows)


def format_rest_table(reports: dict[str, dict[str, LayerReport]]) -> str:
    """Return the table of the bytes beyond the least by operator, on the first card."""
    head = ["method", "pass", "operator", "modules", "kernels", "beyond", "share"]
    rows = []
    for method, by_card in reports.items():
        report = by_card[CARDS[0]]
        by_operator: dict[tuple[str, str], list[LayerLine]] = defaultdict(list)
        for line in report.lines:
            if line.beyond:
                by_operator[line.part, line.operator].append(line)
        sums = {key: sum(line.beyond for line in lines) for key, lines in by_operator.items()}
        for key in sorted(sums, key=lambda key: -sums[key]):
            modules = dict.fromkeys(line.module for line in by_operator[key])
            rows.append(
                [
                    method,
                    key[0],
                    f"`{key[1]}`",
                    ", ".join(modules),
                    str(sum(len(line.kernels) for line in by_operator[key])),
                    _format_bytes_per_token(sums[key]),
                    f"{sums[key] / (report.moved - report.least):.0%}",
                ]
            )
    return format_markdown_table(head, rows)


def format_kernel_table(by_card: dict[str, LayerReport]) -> str:
    """Return the table of all kernels of a method's layer. by_card: card -> its report."""
    head = ["pass", "module", "operator", "kernels", "bytes", "bound by", "chain", "beyond"]
    report = by_card[CARDS[0]]
    rows = []
    for line in report.lines:
        bounds = [find_bound(line.kernels[0].op, find_hardware(card)) for card in CARDS]
        rows.append(
            [
                *_format_line_names(line),
                str(len(line.kernels)),
                _format_bytes_per_token(sum(kernel.op.bytes for kernel in line.kernels)),
                bounds[0] if len(set(bounds)) == 1 else ", ".join(bounds),
                str(line.chain or ""),
                _format_bytes_per_token(line.beyond) if line.chain else "",
                *(
                    f"{_sum_seconds(line.kernels, find_hardware(card)) * 1e6:,.0f}"
                    for card in CARDS
                ),
            ]
        )
    return format_markdown_table([*head, *(f"{card}, µs" for card in CARDS)], rows)


def format_chain_table(report: LayerReport) -> str:
    """Return the table of the chains of a method's layer."""
    head = ["chain", "pass", "kernels", "moved", "least", "moved / least"]
    rows = []
    for chain in report.chains:
        names = [
            f"{_read_module(kernel.op)} {kernel.op.name.partition('::')[2]}"
            for kernel, _ in chain.kernels
        ]
        rows.append(
            [
                str(chain.number),
                chain.part,
                "; ".join(
                    f"{name}{f' x {count}' if count > 1 else ''}"
                    for name, count in ((name, names.count(name)) for name in dict.fromkeys(names))
                ),
                _format_bytes_per_token(chain.moved),
                _format_bytes_per_token(chain.least),
                f"{chain.moved / chain.least:.2f}" if chain.least else "",
            ]
        )
    return format_markdown_table(head, rows)


def _describe_ratios(by_card: dict[str, LayerReport]) -> str:
    """Return a method's ratios in words. by_card: card -> its report."""
    ratios = {card: f"{report.ratio:.2f}" for card, report in by_card.items()}
    verdict = "met" if max(report.ratio for report in by_card.values()) <= MAX_RATIO else "missed"
    if len(set(ratios.values())) == 1:
        return f"{ratios[CARDS[0]]} on all cards ({verdict})"
    return f"{' and '.join(f'{ratio} on {card}' for card, ratio in ratios.items())} ({verdict})"


def _iterate_reports(
    reports: dict[str, dict[str, LayerReport]],
) -> Iterator[tuple[str, str, LayerReport]]:
    for method, by_card in reports.items():
        for card, report in by_card.items():
            yield method, card, report


def _format_line_names(line: LayerLine) -> list[str]:
    return [line.part, f"`{line.module}`", f"`{line.operator}`"]


def _sum_seconds(kernels: Sequence[Kernel], hardware: Hardware) -> float:
    return sum(compute_op_seconds(kernel.op, hardware) for kernel in kernels)


def _format_bytes_per_token(num_bytes: int) -> str:
    return f"{num_bytes / TOKENS:,.0f}"


def format_page(reports: dict[str, dict[str, LayerReport]]) -> str:
    """Return the page. reports: method -> card -> its report."""
    verdict = ", ".join(
        f"{method} {_describe_ratios(by_card)}" for method, by_card in reports.items()
    )
    # Chains are those of the first card; they are the same on others where the bounds are.
    alike = all(
        [line.chain for line in report.lines] == [line.chain for line in by_card[CARDS[0]].lines]
        for by_card in reports.values()
        for report in by_card.values()
    )
    cards_note = "; they are the same on all cards" if alike else f", on {CARDS[0]}"
    sections = [
        METHOD_TEXT.format(
            title="LoRA" if method == "LoRA" else "Full fine-tuning",
            kernel_microseconds=KERNEL_SECONDS * 1e6,
            kernel_table=format_kernel_table(by_card),
            chain_table=format_chain_table(by_card[CARDS[0]]),
        )
        for method, by_card in reports.items()
    ]
    return TEXT.format(
        torch=torch.__version__,
        configs=" and ".join(f"`{config}`" for config in METHODS.values()),
        overrides=" ".join(OVERRIDES),
        tokens=TOKENS,
        layers=NUM_LAYERS,
        max_ratio=MAX_RATIO,
        verdict=verdict,
        sum_table=format_sum_table(reports),
        cards_note=cards_note,
        rest_table=format_rest_table(reports),
        method_sections="".join(sections),
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Plan one layer's kernels and their least bytes.")
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    # In a fork, as the simulated device cannot be removed from a process again.
    reports = {method: call_in_fork(report_method, method) for method in METHODS}
    output.write_text(format_page(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
