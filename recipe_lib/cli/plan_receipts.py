"""Receipts on the command line: a run adds one at its end, a plan quotes the nearest, `tune plan --receipts` lists all.

Whatever is wrong with the file is one line at most, and nothing to a run or a plan.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import put_json
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.logs import get_logger
from recipe_lib.plan.receipts import (
    VARIABLE,
    append_receipt,
    describe_run,
    find_nearest,
    is_off,
    make_receipt,
    read_receipts,
    receipts_file,
)
from recipe_lib.plan.result import Receipt
from recipe_lib.report.terminal import Table, open_console, put, put_table, terminal_width, text_of
from recipe_lib.units import counted, format_bytes

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.result import NearestReceipt

# Figure -> what it is called below the table.
_JUDGED = {"reserved": "reserved memory", "tokens_per_second": "tokens per second"}


def keep_receipt(figures: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Add the receipt of a run that has ended, if it ran on the GPU that was planned.

    figures: of its plan. summary: of its summary.json.
    """
    if is_off() or summary.get("memory_kind") != "device":
        return
    from recipe_lib.training.metrics import read_metrics  # torch, which the launcher has imported by now

    path = receipts_file()
    try:
        receipt = make_receipt(figures, summary, read_metrics(Path(figures["output_dir"])))
        is_new = receipt is not None and append_receipt(path, receipt)
    except (OSError, ValueError, ConfigError) as error:
        where, said = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or str(error)
        get_logger().warning(f"warning: {where}: {said}; the run has no receipt, and with {VARIABLE}=off none is tried")
        return
    if is_new:
        get_logger().info(
            f"receipts: what runs were planned to take and took is kept in {path}, on this machine alone; "
            f"`tune plan --receipts` lists it, {VARIABLE}=off ends it"
        )


def quote_receipt(cfg: Any, shaped: Any, settings: "PlanSettings") -> "NearestReceipt | None":
    """Return the receipt nearest to a plan; None if there is none of its card and recipe. shaped: what is planned."""
    if is_off():
        return None
    try:
        receipts, _ = read_receipts(receipts_file())
    except OSError:  # `tune plan --receipts` says what is wrong
        return None
    return find_nearest(receipts, describe_run(cfg, shaped, settings))


def list_receipts(arguments: argparse.Namespace) -> str:
    """Return what `--receipts` prints; with --json the same for programs. ConfigError for a file that is none."""
    path = receipts_file()
    try:
        receipts, unreadable = read_receipts(path)
    except OSError as error:
        raise ConfigError(
            f"--receipts: {show(str(path))}: {error.strerror}; make it a readable file, or move it away"
        ) from error
    if arguments.json:
        put_json(arguments.json, describe_receipts(receipts, unreadable, path))
        if arguments.json == "-":
            return ""
    return render_receipts(receipts, unreadable, path)


def describe_receipts(receipts: Sequence[Receipt], unreadable: int, path: Path) -> dict[str, Any]:
    """Return the receipts and how far off the plans were, as plain dicts and lists: bytes, seconds, shares.

    unreadable: lines of the file that were passed over.
    """
    errors = {}
    for name in _JUDGED:
        values = [receipt.errors[name] for receipt in receipts if name in receipt.errors]
        if values:
            mean = sum(map(abs, values)) / len(values)
            errors[name] = {"count": len(values), "mean_absolute": mean, "worst": max(values, key=abs)}
    listed = [asdict(receipt) for receipt in receipts]
    return {"file": str(path), "unreadable": unreadable, "errors": errors, "receipts": listed}


def render_receipts(receipts: Sequence[Receipt], unreadable: int, path: Path, *, width: int | None = None) -> str:
    """Return the table, the newest last, and how far off the plans were; of none a line that says how they come about.

    width: columns, by default those of the terminal.
    """
    console = open_console(width or terminal_width())
    passed = f"; {counted(unreadable, 'line')} of it cannot be read" if unreadable else ""
    off = f"; {VARIABLE}=off is set, so none is added" if is_off() else ""
    if not receipts:
        how = "each `tune run` on a GPU that shows its plan adds one at its end"
        return f"no receipts in {path}: {how}{off}{passed}\n"
    rows = []
    for receipt in receipts:
        run, rate = receipt.run, receipt.errors.get("tokens_per_second")
        sizes = map(format_bytes, (receipt.planned.reserved, receipt.measured.reserved))
        errors = [f"{receipt.errors['reserved']:+.1%}", "" if rate is None else f"{rate:+.0%}"]
        rows.append([receipt.time[:10], run.card, str(run.ranks), run.config, run.recipe, *sizes, *errors])
    header = ["date", "card", "ranks", "config", "recipe", "planned", "measured", "error", "tokens/s"]
    left, optional = ("date", "card", "config", "recipe"), ("recipe", "tokens/s")
    put_table(console, Table("reserved memory of runs", header, rows, left, optional))
    console.print()
    judged = [
        f"error of {_JUDGED[name]}: {error['mean_absolute']:.1%} mean absolute, {error['worst']:+.1%} worst"
        for name, error in describe_receipts(receipts, unreadable, path)["errors"].items()
    ]
    put(console, "; ".join([counted(len(receipts), "receipt"), *judged]))
    put(console, f"in {path}, on this machine alone{off}{passed}")
    return text_of(console)
