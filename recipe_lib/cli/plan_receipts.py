"""Receipts on the command line: a run adds one at its end, a plan quotes the nearest, `tune plan --receipts` lists all.

Whatever is wrong with the file is one line at most, and nothing to a run or a plan.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.logs import get_logger
from recipe_lib.plan.nearest_receipt import comparable, nearest
from recipe_lib.plan.receipt_list import list_as_json, render_list
from recipe_lib.plan.receipts import VARIABLE, append_receipt, is_off, read_receipts, receipt_of, receipts_file

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.receipts import NearestReceipt


def keep_receipt(figures: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Adds the receipt of a run that has ended, if it ran on the GPU that was planned.

    figures: of its plan. summary: of its summary.json.
    """
    if is_off() or summary.get("memory_kind") != "device":
        return
    from recipe_lib.training.records.metrics import read_metrics  # torch, which the launcher has imported by now

    path = receipts_file()
    try:
        receipt = receipt_of(figures, summary, read_metrics(Path(figures["output_dir"])))
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


def quoted_receipt(cfg: Any, shaped: Any, settings: "PlanSettings") -> "NearestReceipt | None":
    """The receipt nearest to a plan; None if there is none of its card and recipe. shaped: what is planned of cfg."""
    if is_off():
        return None
    try:
        alike = comparable(read_receipts(receipts_file())[0], settings)
    except OSError:  # `tune plan --receipts` says what is wrong
        return None
    if not alike:
        return None
    from recipe_lib.plan.receipt_facts import run_of

    return nearest(alike, run_of(cfg, shaped, settings))


def list_receipts(arguments: argparse.Namespace) -> str:
    """What `--receipts` prints; with --json the same for programs. ConfigError for a file that cannot be read."""
    path = receipts_file()
    try:
        receipts, unreadable = read_receipts(path)
    except OSError as error:
        raise ConfigError(
            f"--receipts: {show(str(path))}: {error.strerror}; make it a readable file, or move it away"
        ) from error
    text = render_list(receipts, unreadable, path)
    if arguments.json:
        content = json.dumps(list_as_json(receipts, unreadable, path), indent=2) + "\n"
        if arguments.json == "-":
            return content
        from recipe_lib.files import replace_text

        replace_text(Path(arguments.json), content)
    return text
