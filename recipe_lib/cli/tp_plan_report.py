"""What `tune tp-plan` prints."""

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipe_lib.errors import visible
from recipe_lib.foreign.tensor_plan.plan import TensorPlan
from recipe_lib.foreign.tensor_plan.summary import (
    BYTES,
    boundary_groups,
    cut_share,
    exchanges,
    held_elements,
    layers_of,
    parameter_groups,
    pattern_of,
    ranges,
    sent_bytes,
    step_bytes,
    why_not,
)
from recipe_lib.units import format_bytes, format_count

WIDTH = 160  # columns where there is no terminal to ask
FORMULA = "an all-reduce of N tokens x w numbers in bf16: each rank sends 2 (t - 1) / t x 2 N w bytes (ring)"


def report(
    model: str,
    tokens: int,
    whole: TensorPlan,
    plans: dict[int, TensorPlan],
    illegal: dict[int, str],
    proofs: list[dict[str, Any]],
) -> None:
    """Prints plans, numbers, refusals and proofs; sizes with the same plan share its text. whole: of every axis."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    unlike = {plan.hash(): plan for plan in plans.values()}
    for name, plan in unlike.items():
        sizes = [size for size, other in plans.items() if other.hash() == name]
        _line(console, f"{model}: plan {name} for {_some(sizes)} ranks", "bold")
        _parameters(console, plan)
        _whole(console, plan)
        _boundaries(console, plan)
        _rewrites(console, plan)
        _collectives(console, plan, sizes, tokens)
        _held(console, plan, sizes)
        _line(console, "")
        for reason in dict.fromkeys(map(pattern_of, plan.refused)):
            _line(console, f"note: {reason}")
        if set(sizes) <= set(whole.legal_sizes):
            _line(console, f"legal sizes: {_few(plan.legal_sizes)}\n")
        else:  # made for this size alone, around what its ranks cannot share
            _line(console, f"kept whole for {_some(sizes)} ranks: {why_not(whole, sizes[0])}\n", "yellow")
    for size, why in illegal.items():
        _line(console, f"not legal: {size}: {why}", "yellow")
    for proof in proofs:
        _proof(console, proof)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text, keep="\n"), style), soft_wrap=True)


def _table(
    console: Console, title: str, header: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0
) -> None:
    """A table of which the last `numbers` columns are numbers; nothing where there is no row."""
    names, lines = list(header), [list(row) for row in rows]
    if not lines:
        return
    _line(console, f"\n{title}", "bold")
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place >= len(names) - numbers else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(visible(cell)) for cell in line))
    console.print(table)


def _parameters(console: Console, plan: TensorPlan) -> None:
    """What is cut."""
    rows = []
    groups = [group for group in parameter_groups(plan) if group.plan.dim >= 0]
    shared = [group.pattern for group in groups]
    for group in groups:
        each = group.plan
        segments = " + ".join(map(str, each.segments)) if len(each.segments) > 1 else ""
        layers = f" (layers {ranges(layers_of(group.names))})" if shared.count(group.pattern) > 1 else ""
        shape = " x ".join(map(str, each.shape))
        rows.append(
            [group.pattern + layers, str(len(group.names)), shape, each.role, str(each.dim), segments, str(each.unit)]
        )
    _table(console, "cut", ["parameters", "count", "shape", "role", "dim", "segments", "unit"], rows)


def _whole(console: Console, plan: TensorPlan) -> None:
    """What every rank has, and why; partial: gradients are summed over ranks once a step."""
    rows = []
    for group in parameter_groups(plan):
        each = group.plan
        if each.dim < 0:
            added = ", added after the sum" if each.after_reduction else ""
            shape = " x ".join(map(str, each.shape))
            rows.append([group.pattern, str(len(group.names)), shape, each.gradient + added, each.reason])
    _table(console, "whole on every rank", ["parameters", "count", "shape", "gradient", "why"], rows)


def _boundaries(console: Console, plan: TensorPlan) -> None:
    rows = []
    for group in boundary_groups(plan):
        each = group.boundary
        cut = f", dim {each.dim}" if each.kind in ("leave", "cut") else ""
        bias = f", {each.bias} added after" if each.bias else ""
        what = f"{each.function} {each.place}{cut}{bias}"
        rows.append([each.kind, group.pattern or "the model itself", str(len(group.names)), what, each.source])
    _table(console, "boundaries", ["kind", "module", "count", "call", "source"], rows)


def _rewrites(console: Console, plan: TensorPlan) -> None:
    counts: dict[tuple[str, str, int], int] = {}
    for each in plan.rewrites:
        key = (pattern_of(each.module) or "the model itself", each.attribute, each.value)
        counts[key] = counts.get(key, 0) + 1
    rows = [[module, name, f"{value} / t", str(count)] for (module, name, value), count in counts.items()]
    _table(console, "attributes that are divided", ["module", "attribute", "value", "count"], rows)


def _collectives(console: Console, plan: TensorPlan, sizes: list[int], tokens: int) -> None:
    """Bytes that a rank sends: by part of the model, and for a step of one micro-batch."""
    rows = []
    for each in exchanges(plan):
        where = f"each of {len(each.layers)} {each.place}" if each.layers else "outside the layers"
        for phase, count, width in zip(
            ("forward", "backward"), (each.forward, each.backward), each.widths, strict=True
        ):
            if count:
                sent = [format_bytes(sent_bytes(BYTES * tokens * width, size)) for size in sizes]
                rows.append([where, phase, f"{count} all-reduce{'s' * (count > 1)}", str(width), *sent])
    for what in ("forward", "backward", "loss", "gradients"):
        whole = [step_bytes(plan, size, tokens)[what] for size in sizes]
        if any(whole):
            rows.append(["all of it", _PHASES[what], "", "", *map(format_bytes, whole)])
    header = ["where", "when", "what", "numbers a token", *(f"t={size}" for size in sizes)]
    _table(console, f"sent by each rank, {tokens} tokens", header, rows, len(sizes) + 1)
    _line(console, f"{FORMULA}; activation checkpointing repeats the forward's")


_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "loss": "loss (fp32 sums of cut logits)",
    "gradients": "once a step (fp32 partial gradients)",
}


def _held(console: Console, plan: TensorPlan, sizes: list[int]) -> None:
    whole = held_elements(plan, 1)
    rows = [["1", format_count(whole), format_bytes(BYTES * whole)]]
    for size in sizes:
        held = held_elements(plan, size)
        rows.append([str(size), format_count(held), format_bytes(BYTES * held)])
    title = f"parameters of a rank; {cut_share(plan):.2%} of the elements are cut"
    _table(console, title, ["t", "parameters", "bf16"], rows, 3)


def _proof(console: Console, proof: dict[str, Any]) -> None:
    what = f"certificate, {proof['size']} ranks"
    if proof["failures"]:
        _line(console, f"{what}: NOT PASSED", "bold red")
        for failure in proof["failures"]:
            _line(console, f"  {failure}")
    else:
        shared = f", by {proof['ranks']} ranks" if proof["ranks"] != proof["size"] else ""
        said = f"passed, {proof['checked']} comparisons of forward and gradients on a small model{shared}"
        _line(console, f"{what}: {said}", "green")


def _few(sizes: tuple[int, ...], most: int = 12) -> str:
    return ", ".join(map(str, sizes[:most])) + (" ..." if len(sizes) > most else "")


def _some(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + (" and " if len(sizes) > 1 else "") + str(sizes[-1])
