"""The receipt that says the most about a plan: the nearest run on the same card, and what else that run had."""

from collections.abc import Iterable
from math import log
from typing import TYPE_CHECKING

from recipe_lib.plan.receipts import NearestReceipt, Receipt, ReceiptRun
from recipe_lib.units import format_bytes, format_count

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

_SAME_MEMORY = 1.1  # a slice of a card has its name, and less memory
_FAR = 2  # from so many times the tokens in a micro-batch on, a quote says so
_MOST_SAID = 3  # differences; the JSON has all of them


def comparable(receipts: Iterable[Receipt], settings: "PlanSettings") -> list[Receipt]:
    """Those of the card and the recipe that are planned."""
    name, memory = settings.hardware.name, settings.hardware.memory
    return [
        receipt for receipt in receipts
        if receipt.run.card == name and _times(receipt.run.card_memory, memory) <= _SAME_MEMORY
        and receipt.run.recipe == settings.recipe
    ]  # fmt: skip


def nearest(receipts: Iterable[Receipt], here: ReceiptRun) -> NearestReceipt:
    """Of these, oldest first and at least one, that with the fewest differences in model, settings and ranks; of equal
    ones the closest in parameters, tokens of a micro-batch and layers; then in micro-batches; then the last."""

    def distance(receipt: Receipt) -> tuple[int, float, float]:
        there = receipt.run
        pairs = ((there.parameters, here.parameters), (there.tokens, here.tokens), (there.layers, here.layers))
        steps = abs(log(max(1, there.gradient_accumulation_steps) / max(1, here.gradient_accumulation_steps)))
        return len(_differences(there, here)), sum(log(_times(*pair)) for pair in pairs), steps

    best = min(reversed(list(receipts)), key=distance)
    return NearestReceipt(best, [*_differences(best.run, here), *_far_sizes(best.run, here)])


def quote_line(found: NearestReceipt) -> str:
    """`2026-11-20, rtx4090, lora_finetune_distributed llama3/8B_lora: planned 15.21 GiB reserved, measured 15.43 GiB
    (-1.4%); ...`, with what that run had otherwise."""
    receipt = found.receipt
    planned, measured = receipt.planned, receipt.measured
    about = "about " if planned.allocated is None else ""  # extrapolated from few layers
    what = "reserved (expandable segments)" if receipt.expandable else "reserved"
    parts = [
        f"{receipt.date}, {receipt.run.card}, {receipt.run.recipe} {receipt.run.config}: planned {about}"
        f"{format_bytes(planned.reserved)} {what}, measured {format_bytes(measured.reserved)} "
        f"({receipt.errors['reserved']:+.1%})"
    ]
    if planned.tokens_per_second and measured.tokens_per_second:
        rates = format_count(planned.tokens_per_second), format_count(measured.tokens_per_second)
        parts.append(f"{rates[0]} tokens/s planned, {rates[1]} measured")
    parts += found.differences[:_MOST_SAID]
    if (more := len(found.differences) - _MOST_SAID) > 0:
        parts.append(f"{more} more difference{'s' if more > 1 else ''}")
    return "; ".join(parts)


def _differences(there: ReceiptRun, here: ReceiptRun) -> list[str]:
    """Model, ranks and settings that are not the same, in words."""
    found = []
    if (there.layers, there.width, there.parameters) != (here.layers, here.width, here.parameters):
        sizes = [f"{format_count(run.parameters)} parameters in {run.layers} layers" for run in (there, here)]
        found.append(f"of another model: {there.model}, {sizes[0]}, here {sizes[1]}")
    if there.ranks != here.ranks:
        found.append(f"on {there.ranks} rank{'s' if there.ranks > 1 else ''}, here {here.ranks}")
    elif there.mesh != here.mesh:
        found.append(f"{_mesh_text(there)}, here {_mesh_text(here)}")
    settings = [run.levers | {"dtype": run.dtype} for run in (there, here)]
    for key in sorted({*settings[0], *settings[1]}):
        value, own = (levers.get(key) for levers in settings)
        if value is None:
            found.append(f"without {key}={own}")
        elif value != own:
            found.append(f"with {key}={value}" + (f", here {own}" if own is not None else ""))
    return found


def _mesh_text(run: ReceiptRun) -> str:
    return " x ".join(f"{dim} {size}" for dim, size in run.mesh.items() if size > 1)


def _far_sizes(there: ReceiptRun, here: ReceiptRun) -> list[str]:
    if _times(there.tokens, here.tokens) < _FAR:
        return []
    return [f"{there.tokens:,} tokens in a micro-batch, here {here.tokens:,}"]


def _times(first: int, second: int) -> float:
    """How many times the smaller number the larger is."""
    return max(first, second) / max(1, min(first, second))
