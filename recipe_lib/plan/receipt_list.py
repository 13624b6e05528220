"""All receipts of this machine, as `tune plan --receipts` lists them. No torch in here."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipe_lib.plan.receipts import VARIABLE, Receipt, is_off
from recipe_lib.report.terminal import Table, open_console, put, put_table, terminal_width, text_of
from recipe_lib.units import counted, format_bytes

# Figure -> what it is called below the table.
_JUDGED = {"reserved": "reserved memory", "tokens_per_second": "tokens per second"}


def render_list(receipts: Sequence[Receipt], unreadable: int, path: Path, *, width: int | None = None) -> str:
    """The table, the newest last, and how far off the plans were; of none a line that says how they come about.

    Of a long file, these are the newest.
    unreadable: lines of the file that were passed over. width: columns, by default those of the terminal.
    """
    console = open_console(width or terminal_width())
    passed = f"; {counted(unreadable, 'line')} of it cannot be read" if unreadable else ""
    off = f"; {VARIABLE}=off is set, so none is added" if is_off() else ""
    if not receipts:
        how = "each `tune run` on a GPU that shows its plan adds one at its end"
        return f"no receipts in {path}: {how}{off}{passed}\n"
    put_table(console, _table(receipts))
    console.print()
    put(console, f"{counted(len(receipts), 'receipt')}; {_errors_text(receipts)}")
    put(console, f"in {path}, on this machine alone{off}{passed}")
    return text_of(console)


def list_as_json(receipts: Sequence[Receipt], unreadable: int, path: Path) -> dict[str, Any]:
    """The same as plain dicts and lists: bytes, seconds, errors as shares."""
    return {
        "file": str(path),
        "unreadable": unreadable,
        "errors": {
            name: {"count": len(found), "mean_absolute": _mean(found), "worst": max(found, key=abs)}
            for name in _JUDGED if (found := _errors(receipts, name))
        },
        "receipts": [asdict(receipt) for receipt in receipts],
    }  # fmt: skip


def _table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    for receipt in receipts:
        run, rate = receipt.run, receipt.errors.get("tokens_per_second")
        sizes = map(format_bytes, (receipt.planned.reserved, receipt.measured.reserved))
        rows.append([
            receipt.date, run.card, str(run.ranks), run.config, run.recipe, *sizes,
            f"{receipt.errors['reserved']:+.1%}", "" if rate is None else f"{rate:+.0%}",
        ])  # fmt: skip
    header = ["date", "card", "ranks", "config", "recipe", "planned", "measured", "error", "tokens/s"]
    return Table("reserved memory of runs", header, rows, ("date", "card", "config", "recipe"), ("recipe", "tokens/s"))


def _errors_text(receipts: Sequence[Receipt]) -> str:
    """`error of reserved memory: 1.9% mean absolute, -5.2% worst; ...`."""
    parts = []
    for name, title in _JUDGED.items():
        if found := _errors(receipts, name):
            parts.append(f"error of {title}: {_mean(found):.1%} mean absolute, {max(found, key=abs):+.1%} worst")
    return "; ".join(parts)


def _errors(receipts: Sequence[Receipt], name: str) -> list[float]:
    return [receipt.errors[name] for receipt in receipts if name in receipt.errors]


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)
