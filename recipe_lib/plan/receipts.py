"""Receipts: what a run was planned to take and what it took, a line of JSON a run, in one file of this machine.

The file is `$XDG_STATE_HOME/tune-recipes/receipts.jsonl` (https://specifications.freedesktop.org/basedir-spec/); only
`tune plan` reads it, and nothing sends it anywhere. No torch in here.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recipe_lib.config.describe import harmless_overrides, levers_of
from recipe_lib.config.mesh import mesh_shape, with_context
from recipe_lib.errors import ConfigError
from recipe_lib.files import open_to_append
from recipe_lib.plan.result import NearestReceipt, Receipt, ReceiptFigures, ReceiptRun, read_typed
from recipe_lib.reading import parse_json, read_end
from recipe_lib.redaction import redact_values
from recipe_lib.report.planned import KINDS
from recipe_lib.units import GIB, format_bytes, format_count

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

VARIABLE = "TUNE_RECEIPTS"  # `off`: none is written, and no plan quotes one
FORMAT = 2  # of a line; raised when a key changes its meaning or goes away
_SOFTWARE = ("tune-recipes", "torch", "cuda")
_NEWEST_BYTES = 2**23  # that are read of the file: some 3,000 runs


def is_off() -> bool:
    """Return whether the environment says that there are to be none."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0", "no")


def receipts_file() -> Path:
    """Return the path of the file; by the specification a relative XDG_STATE_HOME counts for none."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~"), ".local", "state")
    return folder / "tune-recipes" / "receipts.jsonl"


def make_receipt(
    figures: Mapping[str, Any], summary: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]
) -> Receipt | None:
    """Return the receipt of a run on the GPU that its plan was for.

    None for any other run, and where a peak is missing. figures: of the plan, as `tune run` has them written. summary:
    of summary.json. steps: of metrics.jsonl.
    """
    if summary.get("memory_kind") != "device" or not figures.get("own_device") or not figures.get("run"):
        return None
    planned = {**figures, **(figures.get("first") or {}), "step_seconds": figures.get("seconds")}
    measured: dict[str, float | None] = {
        kind: round((summary.get(f"peak_memory_{kind}_gib") or 0.0) * GIB) or None for kind in KINDS
    }
    if not all(peaks.get(kind) for peaks in (planned, measured) for kind in ("active", "reserved")):
        return None
    # The first step makes optimizer states and compiles kernels.
    lines = [line for line in steps if "loss" in line][1:]
    for name, logged in (("step_seconds", "seconds"), ("tokens_per_second", "tokens_per_second")):
        values = [line[logged] for line in lines if isinstance(line.get(logged), (int, float))]
        measured[name] = median(values) if values else None
    versions = summary.get("versions") or {}
    return Receipt(
        time=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={name: str(versions[name]) for name in _SOFTWARE if name in versions},
        run=read_typed(ReceiptRun, figures["run"], "run"),
        planned=read_typed(ReceiptFigures, planned, "planned"),
        measured=read_typed(ReceiptFigures, measured, "measured"),
        expandable=bool(figures.get("expandable")),
    )


def append_receipt(path: Path, receipt: Receipt) -> bool:
    """Add a line, readable by this user alone; return whether the file is new. OSError where it cannot be written."""
    if not path.is_absolute():
        raise OSError(errno.ENOENT, "no home folder", str(path))
    line = json.dumps({"format": FORMAT, **redact_values(asdict(receipt))}, allow_nan=False) + "\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_to_append(path, 0o600) as file:
        size = os.fstat(file.fileno()).st_size
        # A line that a full disk has cut off before is ended first.
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        data = (f"\n{line}" if torn else line).encode()
        # One write: runs that end at the same time do not mix their lines.
        if os.write(file.fileno(), data) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return size == 0


def read_receipts(path: Path) -> tuple[list[Receipt], int]:
    """Return the newest receipts of a file, oldest first, and how many lines of it cannot be read.

    Those are the lines that were cut off, and those of another version. No file: none. OSError for one that cannot be
    read.
    """
    try:
        content = read_end(path, _NEWEST_BYTES)
    except FileNotFoundError:
        return [], 0
    lines = content.split(b"\n")
    if len(content) == _NEWEST_BYTES:  # begins inside of a line
        del lines[0]
    lines = [line for line in lines if line.strip()]
    receipts = []
    for line in lines:
        with suppress(ConfigError, ValueError, OverflowError):
            receipts.append(_read(line))
    # By the moment, not by the clock on the wall of two time zones.
    receipts.sort(key=lambda receipt: datetime.fromisoformat(receipt.time).timestamp())
    return receipts, len(lines) - len(receipts)


def _read(line: bytes) -> Receipt:
    """Return the receipt of a line. ConfigError, ValueError or OverflowError for what is none."""
    data = parse_json(line)
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError("another version's")
    receipt = read_typed(Receipt, data, "receipt")
    datetime.fromisoformat(receipt.time).timestamp()
    if min(receipt.run.card_memory, receipt.run.ranks, receipt.planned.reserved, receipt.measured.reserved) < 1:
        raise ValueError("a size that no run has")
    return receipt


# The receipt that a plan quotes: of the run on the same card that had the fewest settings otherwise.


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
