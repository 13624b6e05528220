"""The receipt that a plan quotes: the run on the same card that had the fewest settings otherwise. No torch in here."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from recipe_lib.config.levers import harmless_overrides, levers_of
from recipe_lib.config.mesh import mesh_shape, with_context
from recipe_lib.plan.receipts import NearestReceipt, Receipt, ReceiptRun
from recipe_lib.units import format_bytes, format_count

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

_SAME_MEMORY = 0.1  # share; a slice of a card has its name, and less memory
_STRATEGY = "parallel.strategy"
_MOST_SAID = 3  # differences; the JSON has all of them


def describe_run(cfg: Any, shaped: Any, settings: "PlanSettings") -> ReceiptRun:
    """Return the run of a config. shaped: what is planned of it, with its strategy chosen."""
    mesh = with_context(shaped.parallel, mesh_shape(shaped.parallel, settings.ranks))
    levers = levers_of(cfg)
    levers.pop(_STRATEGY, None)
    if settings.ranks > 1 and _STRATEGY in (chosen := levers_of(shaped)):  # one rank shards nothing
        levers[_STRATEGY] = chosen[_STRATEGY]
    described = {
        "model": str(cfg.model.preset or cfg.model.path),
        "mesh": " x ".join(f"{dim} {size}" for dim, size in mesh.items() if size > 1) or "one rank",
        "sequence": str(settings.sequence.tokens),
        "batch_size": str(cfg.batch_size),
        "gradient_accumulation_steps": str(cfg.gradient_accumulation_steps),
        "dtype": cfg.dtype,
    }
    return ReceiptRun(
        recipe=settings.recipe,
        config=settings.config,
        overrides=harmless_overrides(settings.overrides),
        card=settings.hardware.name,
        card_memory=settings.hardware.memory,
        ranks=settings.ranks,
        settings=described | levers,
    )


def find_nearest(receipts: Iterable[Receipt], planned: ReceiptRun) -> NearestReceipt | None:
    """Return the receipt of the planned card and recipe with the fewest differences, of equal ones the newest.

    receipts: oldest first. None if there is none of that card and recipe.
    """
    nearest = None
    for receipt in receipts:
        run = receipt.run
        if (run.card, run.recipe) != (planned.card, planned.recipe):
            continue
        if abs(run.card_memory / planned.card_memory - 1) > _SAME_MEMORY:
            continue
        differences = []
        for name in dict.fromkeys([*run.settings, *planned.settings]):
            before, now = (settings.get(name, "the default") for settings in (run.settings, planned.settings))
            if before != now:
                differences.append(f"{name}={before}, here {now}")
        if nearest is None or len(differences) <= len(nearest.differences):
            nearest = NearestReceipt(receipt, differences)
    return nearest


def quote_line(nearest: NearestReceipt) -> str:
    """Return the receipt in a line.

    `2026-11-20, rtx4090, lora_finetune_distributed llama3/8B_lora: planned 15.21 GiB reserved, measured 15.43 GiB
    (-1.4%); ...`, with what that run had otherwise.
    """
    receipt = nearest.receipt
    planned, measured = receipt.planned, receipt.measured
    about = "about " if planned.allocated is None else ""  # extrapolated from few layers
    what = "reserved (expandable segments)" if receipt.expandable else "reserved"
    parts = [
        f"{receipt.time[:10]}, {receipt.run.card}, {receipt.run.recipe} {receipt.run.config}: planned {about}"
        f"{format_bytes(planned.reserved)} {what}, measured {format_bytes(measured.reserved)} "
        f"({receipt.errors['reserved']:+.1%})"
    ]
    if planned.tokens_per_second and measured.tokens_per_second:
        rates = [format_count(rate) for rate in (planned.tokens_per_second, measured.tokens_per_second)]
        parts.append(f"{rates[0]} tokens/s planned, {rates[1]} measured")
    parts += nearest.differences[:_MOST_SAID]
    if (more := len(nearest.differences) - _MOST_SAID) > 0:
        parts.append(f"{more} more difference{'s' if more > 1 else ''}")
    return "; ".join(parts)
