"""Keep receipts of planned and measured runs: a run adds one, a plan quotes the nearest, and
`tune plan --receipts` lists all.

Whatever is wrong with the file is one line at most, and stops neither a run nor a plan.
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import write_json
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.logs import get_logger
from recipe_lib.plan.measured.receipts import (
    VARIABLE,
    Receipt,
    append_receipt,
    describe_run,
    find_nearest,
    get_receipts_file,
    is_off,
    make_receipt,
    quote_line,
    read_receipts,
)
from recipe_lib.report.terminal import (
    Table,
    get_terminal_width,
    open_console,
    put,
    put_table,
    read_console,
)
from recipe_lib.units import format_bytes, pluralize

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings


def append_run_receipt(figures: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Add the receipt of a run that has ended, if it ran on the GPU that was planned.

    figures: of its plan. summary: of its summary.json.
    """
    if is_off() or summary.get("memory_kind") != "device" or not figures.get("own_device"):
        return
    # Imports torch, which the launcher has imported by now.
    from recipe_lib.training.records import read_metrics

    path = get_receipts_file()
    try:
        receipt = make_receipt(figures, summary, read_metrics(Path(figures["output_dir"])))
        # Receipts are compared by their error of reserved memory.
        if "reserved" not in receipt.errors:
            return
        is_new = append_receipt(path, receipt)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        get_logger().warning(
            f"warning: {path}: {error}; the run has no receipt, and with {VARIABLE}=off none is"
            " tried"
        )
        return
    if is_new:
        get_logger().info(
            f"receipts: what runs were planned to take and took is kept in {path}, on this machine"
            f" alone; `tune plan --receipts` lists it, {VARIABLE}=off ends it"
        )


def quote_receipt(cfg: Any, shaped: Any, settings: "PlanSettings") -> str:
    """Return the receipt nearest to a plan as a line; empty if there is none.

    shaped: the config as it is planned.
    """
    if is_off():
        return ""
    try:
        receipts, _ = read_receipts(get_receipts_file())
    except OSError:  # `tune plan --receipts` says what is wrong
        return ""
    nearest = find_nearest(receipts, describe_run(cfg, shaped, settings))
    return "" if nearest is None else quote_line(nearest)


def list_receipts(arguments: argparse.Namespace) -> str:
    """Return what `--receipts` prints, and write its JSON. Raises ConfigError."""
    path = get_receipts_file()
    try:
        receipts, unreadable = read_receipts(path)
    except OSError as error:
        raise ConfigError(
            f"--receipts: {show(str(path))}: {error.strerror}; make it a readable file, or move it"
            " away"
        ) from error
    if arguments.json:
        listed = [asdict(receipt) for receipt in receipts]
        write_json(
            arguments.json, {"file": str(path), "unreadable": unreadable, "receipts": listed}
        )
    return "" if arguments.json == "-" else render_receipts(receipts, unreadable, path)


def render_receipts(
    receipts: list[Receipt], unreadable: int, path: Path, *, width: int | None = None
) -> str:
    """Return a table of the receipts, the newest last, and how far off the plans were.

    unreadable: number of lines of the file that were passed over. width: columns, by default those
    of the terminal.
    """
    passed = f"; {pluralize(unreadable, 'line')} of it cannot be read" if unreadable else ""
    if not receipts:
        return (
            f"no receipts in {path}: each `tune run` on a GPU that shows its plan adds one at its"
            f" end, unless {VARIABLE}=off is set{passed}\n"
        )
    rows = []
    for receipt in receipts:
        run = receipt.run
        rate_error = receipt.errors.get("tokens_per_second")
        row = {
            "date": receipt.time[:10],
            "card": run.card,
            "ranks": str(run.ranks),
            "config": run.config,
            "recipe": run.recipe,
            "planned": format_bytes(receipt.planned["reserved"]),
            "measured": format_bytes(receipt.measured["reserved"]),
            "error": f"{receipt.errors['reserved']:+.1%}",
            "tokens/s": "" if rate_error is None else f"{rate_error:+.0%}",
        }
        rows.append(list(row.values()))
    console = open_console(width or get_terminal_width())
    table = Table(
        "reserved memory of runs",
        list(row),
        rows,
        left=("date", "card", "config", "recipe"),
        optional=("recipe", "tokens/s"),  # left out first on a narrow terminal
    )
    put_table(console, table)
    console.print()
    errors = [receipt.errors["reserved"] for receipt in receipts]
    put(
        console,
        f"{pluralize(len(receipts), 'receipt')}; error of reserved memory:"
        f" {fmean(map(abs, errors)):.1%} mean absolute, {max(errors, key=abs):+.1%} worst",
    )
    put(console, f"in {path}, on this machine alone{passed}")
    return read_console(console)
