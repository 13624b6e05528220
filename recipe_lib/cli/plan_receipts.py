"""Receipts on the command line: a run adds one at its end, a plan quotes the nearest, `tune plan
--receipts` lists all.

Whatever is wrong with the file is one line at most, and nothing to a run or a plan.
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
    from recipe_lib.training.metrics import (
        read_metrics,
    )  # torch, which the launcher has imported by now

    path = get_receipts_file()
    try:
        receipt = make_receipt(figures, summary, read_metrics(Path(figures["output_dir"])))
        if "reserved" not in receipt.errors:  # by which receipts are compared
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
    """Return the receipt nearest to a plan in a line; empty if there is none. shaped: what is
    planned of the config.
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
    """Return what `--receipts` prints; with --json the same for programs. ConfigError for a file
    that is none.
    """
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
    """Return the table, the newest last, and how far off the plans were; of none a line that says
    how they come about.

    unreadable: lines of the file that were passed over. width: columns, by default those of the
    terminal.
    """
    passed = f"; {pluralize(unreadable, 'line')} of it cannot be read" if unreadable else ""
    if not receipts:
        how = (
            "each `tune run` on a GPU that shows its plan adds one at its end, unless"
            f" {VARIABLE}=off is set"
        )
        return f"no receipts in {path}: {how}{passed}\n"
    rows = []
    for receipt in receipts:
        run, rate = receipt.run, receipt.errors.get("tokens_per_second")
        sizes = [
            format_bytes(figures["reserved"]) for figures in (receipt.planned, receipt.measured)
        ]
        off = [f"{receipt.errors['reserved']:+.1%}", "" if rate is None else f"{rate:+.0%}"]
        rows.append(
            [receipt.time[:10], run.card, str(run.ranks), run.config, run.recipe, *sizes, *off]
        )
    console = open_console(width or get_terminal_width())
    header = [
        "date",
        "card",
        "ranks",
        "config",
        "recipe",
        "planned",
        "measured",
        "error",
        "tokens/s",
    ]
    left, optional = ("date", "card", "config", "recipe"), ("recipe", "tokens/s")
    put_table(console, Table("reserved memory of runs", header, rows, left, optional))
    console.print()
    errors = [receipt.errors["reserved"] for receipt in receipts]
    put(
        console,
        f"{pluralize(len(receipts), 'receipt')}; error of reserved memory:"
        f" {fmean(map(abs, errors)):.1%} mean absolute, {max(errors, key=abs):+.1%} worst",
    )
    put(console, f"in {path}, on this machine alone{passed}")
    return read_console(console)
