"""Write and read receipts: the planned and the measured memory and time of earlier runs.

`tune run` adds one as a line of JSON (`make_receipt`, `append_receipt`) to a file of this machine,
`$XDG_STATE_HOME/tune-recipes/receipts.jsonl`. `tune plan` shows the one of the run that is most
like its own (`read_receipts`, `find_nearest`, `format_receipt`). Nothing sends the file anywhere. A
lever is a config key that changes memory. Imports no torch, so that a plan starts fast.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recipe_lib.config.describe import list_changed_levers
from recipe_lib.config.mesh import add_context_dim, compute_mesh_shape
from recipe_lib.errors import ConfigError
from recipe_lib.files import open_to_append
from recipe_lib.plan.plan_schema import read_typed
from recipe_lib.reading import parse_json, read_end
from recipe_lib.redaction import redact_values
from recipe_lib.report.planned import MEMORY_KINDS
from recipe_lib.units import GIB, format_bytes, format_count

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

# Environment variable; "off", "0" or "no": no receipt is written, and no plan shows one.
VARIABLE = "TUNE_RECEIPTS"
FORMAT = 3  # version of a line; raised when a key changes its meaning or goes away
_SOFTWARE = ("tune-recipes", "torch", "cuda")  # keys of summary.json's `versions` that are kept
_TIMES = ("seconds", "tokens_per_second")  # metrics of a step that are planned and measured
_NEWEST_BYTES = 2**23  # read from the end of the file: some 3,000 runs
# Relative difference of memory up to which cards of one name are the same: a MIG slice has its
# card's name, but less memory.
_MEMORY_TOLERANCE = 0.1


@dataclass
class ReceiptRun:
    """A run, described by all that decides its memory and its time."""

    recipe: str  # name, such as lora_finetune_distributed
    config: str  # name, such as llama3/8B_lora
    card: str  # the GPU's name in the planner's table, such as rtx4090
    card_memory: int  # bytes of one GPU
    ranks: int  # processes, one for each GPU
    # By name: model, mesh, batch, and the config keys that change memory, if not at their default.
    settings: dict[str, str]


@dataclass
class Receipt:
    """The planned and the measured memory and time of a run, for its rank 0.

    Keys of `planned`, `measured` and `errors`: "active", "allocated" and "reserved", the peaks of
    memory in bytes as torch counts them; "seconds" and "tokens_per_second" of a step. A figure that
    is not known has no key.
    """

    format: int  # FORMAT when it was written
    time: str  # when the run ended, ISO 8601 with the time zone
    versions: dict[str, str]  # by the names of _SOFTWARE
    run: ReceiptRun
    planned: dict[str, float]
    measured: dict[str, float]  # times: the median of all steps but the first
    errors: dict[str, float] = field(default_factory=dict)  # planned / measured - 1

    def __post_init__(self) -> None:
        # Anew, so that the errors of a line that was read fit its figures.
        self.errors = {
            name: planned / self.measured[name] - 1
            for name, planned in self.planned.items()
            if self.measured.get(name, 0) > 0
        }


def has_disabled_receipts() -> bool:
    """Return True if the user has turned receipts off, by the environment (VARIABLE)."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0", "no")


def get_receipts_file() -> Path:
    """Return the path of this user's file of receipts, which need not exist."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    # https://specifications.freedesktop.org/basedir-spec/: a relative path is to be ignored, as if
    # the variable were not set.
    folder = (
        Path(state_home)
        if os.path.isabs(state_home)
        else Path(os.path.expanduser("~"), ".local", "state")
    )
    return folder / "tune-recipes" / "receipts.jsonl"


def make_receipt(
    figures: Mapping[str, Any], summary: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]
) -> Receipt:
    """Return the receipt of a run on the GPU that its plan was for.

    Args:
        figures: planned ones by name, as `tune run` wrote them before the run. "run" is the dict of
            a ReceiptRun; "first" has the peaks of rank 0 where another rank is heaviest.
        summary: the content of the run's summary.json.
        steps: the lines of its metrics.jsonl.

    Raises ConfigError if "run" lacks a field, and KeyError if "run" or the summary's "versions" is
    missing.
    """
    # Rank 0 writes the summary. So its planned peaks, under "first", replace the heaviest rank's.
    figures = {**figures, **(figures.get("first") or {})}
    peaks = {kind: summary.get(f"peak_memory_{kind}_gib") for kind in MEMORY_KINDS}
    measured: dict[str, float] = {kind: round(peak * GIB) for kind, peak in peaks.items() if peak}
    # Lines without a loss are those of validations. The first step is left out, as it makes
    # optimizer states and compiles kernels.
    later_steps = [line for line in steps if "loss" in line][1:]
    for name in _TIMES:
        if values := [line[name] for line in later_steps if line.get(name)]:
            measured[name] = median(values)
    return Receipt(
        format=FORMAT,
        time=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={
            name: summary["versions"][name] for name in _SOFTWARE if name in summary["versions"]
        },
        run=read_typed(ReceiptRun, figures["run"], "run"),
        planned={name: figures[name] for name in (*MEMORY_KINDS, *_TIMES) if figures.get(name)},
        measured=measured,
    )


def append_receipt(path: Path, receipt: Receipt) -> bool:
    """Add a receipt to a file, readable by this user alone. Return True if the file is new.

    Raises OSError if it cannot be written.
    """
    if not path.is_absolute():  # `expanduser` leaves "~" where no home folder is known
        raise OSError(errno.ENOENT, "no home folder", str(path))
    line = json.dumps(redact_values(asdict(receipt)), allow_nan=False)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_to_append(path, 0o600) as file:
        is_new = os.fstat(file.fileno()).st_size == 0
        # One write, so that runs which end at the same time do not mix their lines. The empty line
        # before it ends one that a full disk has cut off.
        data = f"\n{line}\n".encode()
        if os.write(file.fileno(), data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return is_new


def read_receipts(path: Path) -> tuple[list[Receipt], int]:
    """Return the newest receipts of a file, oldest first, and the number of lines left out.

    Left out are lines that cannot be read, of another FORMAT, or without reserved memory. A file
    that does not exist has no lines. Raises OSError if the file cannot be read.
    """
    try:
        content = read_end(path, _NEWEST_BYTES)
    except FileNotFoundError:
        return [], 0
    lines = content.split(b"\n")
    if len(content) == _NEWEST_BYTES:  # the first line has probably lost its beginning
        del lines[0]
    lines = [line for line in lines if line.strip()]
    timed: list[tuple[float, Receipt]] = []  # (seconds since 1970 at the end of the run, receipt)
    for line in lines:
        # A full disk may have cut a line off, and a newer version of the program have written it.
        with suppress(ConfigError, ValueError, OverflowError):
            receipt = read_typed(Receipt, parse_json(line), "receipt")
            # Runs may have ended in different time zones: their texts would sort by the local time.
            moment = datetime.fromisoformat(receipt.time).timestamp()
            # Receipts are compared, and shown, by their error of reserved memory.
            if receipt.format == FORMAT and "reserved" in receipt.errors:
                timed.append((moment, receipt))
    timed.sort(key=lambda pair: pair[0])
    return [receipt for _, receipt in timed], len(lines) - len(timed)


def describe_run(cfg: Any, shaped: Any, settings: "PlanSettings") -> ReceiptRun:
    """Return the run that a config describes, for its receipt.

    cfg: the user's config. shaped: its copy that is planned, in which `parallel.strategy` is no
    longer `auto` and what has no part in a step is removed. settings: of the plan.
    """
    # In a mesh's shape the context dimension, of ranks that share a sequence, is a part of another.
    mesh = add_context_dim(shaped.parallel, compute_mesh_shape(shaped.parallel, settings.ranks))
    levers = list_changed_levers(shaped)
    if settings.ranks == 1:  # nothing is sharded, so that the strategy changes nothing
        levers.pop("parallel.strategy", None)
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
        card=settings.hardware.name,
        card_memory=settings.hardware.memory,
        ranks=settings.ranks,
        settings=described | levers,
    )


def find_nearest(receipts: list[Receipt], planned: ReceiptRun) -> Receipt | None:
    """Return the receipt of the planned card and recipe whose settings differ in the fewest names.

    receipts: oldest first; of equally near ones the newest is returned. None if no receipt is of
    that card and recipe.
    """

    def count_differences(receipt: Receipt) -> int:
        differing_items = receipt.run.settings.items() ^ planned.settings.items()
        return len({name for name, _ in differing_items})

    def is_same_card(run: ReceiptRun) -> bool:
        return (
            run.card == planned.card
            and abs(run.card_memory / planned.card_memory - 1) <= _MEMORY_TOLERANCE
        )

    comparable = [
        receipt
        for receipt in reversed(receipts)  # newest first, as `min` takes the first of equal ones
        if receipt.run.recipe == planned.recipe and is_same_card(receipt.run)
    ]
    return min(comparable, key=count_differences, default=None)


def format_receipt(receipt: Receipt) -> str:
    """Format a receipt as a line for a plan.

    `2026-11-20, rtx4090, lora_finetune_distributed llama3/8B_lora: planned 15.21 GiB reserved,
    measured 15.43 GiB (-1.4%); ...`, with the speed where it is known.
    """
    line = (
        f"{receipt.time[:10]}, {receipt.run.card}, {receipt.run.recipe} {receipt.run.config}:"
        f" planned {format_bytes(receipt.planned['reserved'])} reserved, measured"
        f" {format_bytes(receipt.measured['reserved'])} ({receipt.errors['reserved']:+.1%})"
    )
    if "tokens_per_second" in receipt.errors:
        line += (
            f"; {format_count(receipt.planned['tokens_per_second'])} tokens/s planned,"
            f" {format_count(receipt.measured['tokens_per_second'])} measured"
        )
    return line
