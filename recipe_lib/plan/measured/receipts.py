"""Receipts: what a run was planned to take and what it took, a line of JSON a run.

`tune run` makes one (`make_receipt`, `append_receipt`) in a file of this machine,
`$XDG_STATE_HOME/tune-recipes/receipts.jsonl`
(https://specifications.freedesktop.org/basedir-spec/). `tune plan` quotes the one that is most like
its run (`find_nearest`, `quote_line`); nothing sends it anywhere. No torch in here.
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
from recipe_lib.report.planned import KINDS
from recipe_lib.units import GIB, format_bytes, format_count

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

VARIABLE = "TUNE_RECEIPTS"  # `off`: none is written, and no plan quotes one
FORMAT = 3  # of a line; raised when a key changes its meaning or goes away
_SOFTWARE = ("tune-recipes", "torch", "cuda")
_TIMES = ("seconds", "tokens_per_second")  # of a step
_NEWEST_BYTES = 2**23  # that are read of the file: some 3,000 runs
_SAME_MEMORY = 0.1  # share; a slice of a card has its name, and less memory


@dataclass
class ReceiptRun:
    """A run by what decides its memory and its time."""

    recipe: str
    config: str
    card: str
    card_memory: int
    ranks: int
    # Name to value of the model, the mesh, the batch and whatever else changes memory, defaults
    # left out.
    settings: dict[str, str]


@dataclass
class Receipt:
    """A run that was planned and measured: peaks of its first rank, bytes, and a step's time."""

    format: int
    # Of its end, ISO 8601.
    time: str
    versions: dict[str, str]
    run: ReceiptRun
    planned: dict[str, float]
    # By torch; of a step the median, without the first one.
    measured: dict[str, float]
    # Planned / measured - 1.
    errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the errors, which are always those of the figures."""
        self.errors = {
            name: planned / self.measured[name] - 1
            for name, planned in self.planned.items()
            if self.measured.get(name, 0) > 0
        }


def is_off() -> bool:
    """Return True if the environment says that there are to be none."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0", "no")


def get_receipts_file() -> Path:
    """Return the path of the file."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # By the specification a relative path counts for none.
    folder = (
        Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~"), ".local", "state")
    )
    return folder / "tune-recipes" / "receipts.jsonl"


def make_receipt(
    figures: Mapping[str, Any], summary: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]
) -> Receipt:
    """Return the receipt of a run on the GPU that its plan was for.

    figures: of the plan, as `tune run` has them written. summary: of summary.json. steps: of
    metrics.jsonl.
    """
    figures = {**figures, **(figures.get("first") or {})}
    peaks = {kind: summary.get(f"peak_memory_{kind}_gib") for kind in KINDS}
    measured: dict[str, float] = {kind: round(peak * GIB) for kind, peak in peaks.items() if peak}
    # The first step makes optimizer states and compiles kernels.
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
        planned={name: figures[name] for name in (*KINDS, *_TIMES) if figures.get(name)},
        measured=measured,
    )


def append_receipt(path: Path, receipt: Receipt) -> bool:
    """Add a line, readable by this user alone; return whether the file is new.

    OSError where it cannot be written.
    """
    if not path.is_absolute():
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
    """Return the newest receipts of a file, oldest first, and how many lines of it cannot be read.

    No file is as one without lines. OSError for one that cannot be read.
    """
    try:
        content = read_end(path, _NEWEST_BYTES)
    except FileNotFoundError:
        return [], 0
    lines = content.split(b"\n")
    if len(content) == _NEWEST_BYTES:  # begins inside of a line
        del lines[0]
    lines = [line for line in lines if line.strip()]
    # Lines that were cut off are passed over, and those of another version.
    timed: list[tuple[float, Receipt]] = []
    for line in lines:
        with suppress(ConfigError, ValueError, OverflowError):
            receipt = read_typed(Receipt, parse_json(line), "receipt")
            # By the moment, not by the clock on the wall of two time zones.
            moment = datetime.fromisoformat(receipt.time).timestamp()
            if receipt.format == FORMAT and "reserved" in receipt.errors:
                timed.append((moment, receipt))
    timed.sort(key=lambda pair: pair[0])
    return [receipt for _, receipt in timed], len(lines) - len(timed)


def describe_run(cfg: Any, shaped: Any, settings: "PlanSettings") -> ReceiptRun:
    """Return the run of a config. shaped: what is planned of it, with its strategy chosen."""
    mesh = add_context_dim(shaped.parallel, compute_mesh_shape(shaped.parallel, settings.ranks))
    levers = list_changed_levers(shaped)
    if settings.ranks == 1:  # which shards nothing
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
    """Return the receipt of the planned card and recipe with the fewest other settings.

    receipts: oldest first; of equal ones it is the newest. None if there is none of that card and
    recipe.
    """

    def count_differences(receipt: Receipt) -> int:
        settings = receipt.run.settings
        names = settings | planned.settings
        return sum(settings.get(name) != planned.settings.get(name) for name in names)

    alike = [
        receipt
        for receipt in reversed(receipts)  # `min` takes the first of equal ones
        if (receipt.run.card, receipt.run.recipe) == (planned.card, planned.recipe)
        and abs(receipt.run.card_memory / planned.card_memory - 1) <= _SAME_MEMORY
    ]
    return min(alike, key=count_differences, default=None)


def quote_line(receipt: Receipt) -> str:
    """Return the receipt in a line.

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
