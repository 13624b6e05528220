"""Receipts: what a run was planned to take and what it took, a line of JSON a run, in one file of this machine.

The file is `$XDG_STATE_HOME/tune-recipes/receipts.jsonl` (https://specifications.freedesktop.org/basedir-spec/); only
`tune plan` reads it, and nothing sends it anywhere. No torch in here.
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
from typing import Any

from recipe_lib.errors import ConfigError
from recipe_lib.files import open_to_append
from recipe_lib.plan.typed_json import read_typed
from recipe_lib.reading import parse_json, read_end
from recipe_lib.redaction import redact_values
from recipe_lib.report.planned import KINDS
from recipe_lib.units import GIB

VARIABLE = "TUNE_RECEIPTS"  # `off`: none is written, and no plan quotes one
FORMAT = 1  # of a line; raised when a key changes its meaning or goes away
_SOFTWARE = ("tune-recipes", "torch", "cuda")
_LARGEST = 2**63  # no size that a run has is larger, nor is NaN less
_NEWEST_BYTES, _NEWEST_LINES = 2**23, 10_000  # that are read of the file: some 3,000 runs


@dataclass
class ReceiptRun:
    """A run by what decides its memory and its time. recipe, config: as typed. overrides: as typed, without those that
    hold a text about data, folders or trackers. model: its preset or path as typed. layers: of the model. width: of
    its hidden states, 0 where it is not known. parameters: elements of the model, without adapters. card: such as
    `rtx4090`. card_memory: total bytes of one. ranks: of the run. mesh: dimension to its size. sequence: tokens of the
    longest one. batch_size: sequences of a micro-batch. gradient_accumulation_steps: micro-batches of a step. dtype: of
    parameters. levers: key to value of the other settings that change memory, those at their defaults left out."""

    recipe: str
    config: str
    overrides: list[str]
    model: str
    layers: int
    width: int
    parameters: int
    card: str
    card_memory: int
    ranks: int
    mesh: dict[str, int]
    sequence: int
    batch_size: int
    gradient_accumulation_steps: int
    dtype: str
    levers: dict[str, str]

    @property
    def tokens(self) -> int:
        """Of a micro-batch, at most."""
        return self.sequence * self.batch_size


@dataclass
class ReceiptFigures:
    """Peaks of the first rank in its steps, bytes, and the time of a step. active, reserved: as of a PhasePeak.
    allocated: likewise; None: the plan was extrapolated from a model of few layers. step_seconds: of a step; None: not
    known. tokens_per_second: of all ranks; None likewise."""

    active: int
    allocated: int | None
    reserved: int
    step_seconds: float | None
    tokens_per_second: float | None


@dataclass
class Receipt:
    """A run that was planned and measured. time: its end, ISO 8601. versions: program to version. run: what it was.
    planned: by the plan that `tune run` made of it. measured: by torch; of a step the median, without the first one.
    expandable: whether the allocator had expandable segments. errors: figure to planned / measured - 1."""

    time: str
    versions: dict[str, str]
    run: ReceiptRun
    planned: ReceiptFigures
    measured: ReceiptFigures
    expandable: bool
    errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The errors are always those of the figures."""
        planned, measured = asdict(self.planned), asdict(self.measured)
        self.errors = {name: planned[name] / measured[name] - 1 for name in planned if planned[name] and measured[name]}

    @property
    def date(self) -> str:
        """`2026-11-20`."""
        return self.time[:10]


@dataclass
class NearestReceipt:
    """The receipt that a plan quotes. receipt: of the same card and recipe. differences: what else that run had, in
    words, against what is planned; empty: nothing that matters."""

    receipt: Receipt
    differences: list[str]


def is_off() -> bool:
    """Whether the environment says that there are to be none."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0", "no")


def receipts_file() -> Path:
    """Where they are; by the specification a relative XDG_STATE_HOME counts for none."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~"), ".local", "state")
    return folder / "tune-recipes" / "receipts.jsonl"


def receipt_of(
    figures: Mapping[str, Any], summary: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]
) -> Receipt | None:
    """The receipt of a run on the GPU that its plan was for; None for any other run, and where a peak is missing.

    figures: of the plan, as `tune run` has them written. summary: of summary.json. steps: of metrics.jsonl.
    """
    if summary.get("memory_kind") != "device" or not figures.get("own_device") or not figures.get("run"):
        return None
    planned = {**figures, **(figures.get("first") or {})}
    measured = {kind: round((summary.get(f"peak_memory_{kind}_gib") or 0.0) * GIB) for kind in KINDS}
    if not all(found.get(kind) for found in (planned, measured) for kind in ("active", "reserved")):
        return None
    lines = [line for line in steps if "loss" in line]
    found = summary.get("versions") or {}
    return Receipt(
        time=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={name: str(found[name]) for name in _SOFTWARE if name in found},
        run=read_typed(ReceiptRun, figures["run"], "run"),
        planned=_figures(planned, planned.get("seconds"), planned.get("tokens_per_second")),
        measured=_figures(measured, _typical(lines, "seconds"), _typical(lines, "tokens_per_second")),
        expandable=bool(figures.get("expandable")),
    )


def _figures(peaks: Mapping[str, Any], step_seconds: float | None, tokens_per_second: float | None) -> ReceiptFigures:
    return ReceiptFigures(
        peaks["active"], peaks["allocated"] or None, peaks["reserved"], step_seconds, tokens_per_second
    )


def _typical(lines: list[Mapping[str, Any]], name: str) -> float | None:
    """The median without the first step, which makes optimizer states and compiles kernels."""
    values = [line[name] for line in lines[1:] if isinstance(line.get(name), (int, float))]
    return float(median(values)) if values else None


def append_receipt(path: Path, receipt: Receipt) -> bool:
    """Adds a line, readable by this user alone; whether the file is new. OSError where it cannot be written.

    The line is one write to a file opened for appending, so that runs that end at the same time do not mix theirs. A
    line that a full disk has cut off before is ended first.
    """
    if not path.is_absolute():
        raise OSError(errno.ENOENT, "no home folder", str(path))
    line = json.dumps({"format": FORMAT, **redact_values(asdict(receipt))}, allow_nan=False) + "\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_to_append(path, 0o600) as file:
        size = os.fstat(file.fileno()).st_size
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        data = (f"\n{line}" if torn else line).encode()
        if os.write(file.fileno(), data) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return size == 0


def read_receipts(path: Path) -> tuple[list[Receipt], int]:
    """The newest receipts of a file by their time, oldest first, and how many lines of it cannot be read: those that
    were cut off, and those of another version. No file: none. OSError for one that cannot be read."""
    try:
        content = read_end(path, _NEWEST_BYTES)
    except FileNotFoundError:
        return [], 0
    pieces = content.rsplit(b"\n", _NEWEST_LINES)
    begins_inside = len(content) == _NEWEST_BYTES or len(pieces) > _NEWEST_LINES
    lines = [line for line in pieces[begins_inside:] if line.strip()]
    found = []
    for line in lines:
        with suppress(ConfigError, ValueError, OverflowError):
            found.append(_read(line))
    return [receipt for _, receipt in sorted(found, key=lambda pair: pair[0])], len(lines) - len(found)


def _read(line: bytes) -> tuple[float, Receipt]:
    """(seconds since 1970, receipt). ConfigError, ValueError or OverflowError for what is none."""
    data = parse_json(line)
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError("another version's")
    receipt = read_typed(Receipt, data, "receipt")
    numbers = _numbers(asdict(receipt))
    run, peaks = receipt.run, [receipt.planned.reserved, receipt.measured.reserved]
    sizes = [run.layers, run.parameters, run.card_memory, run.ranks, run.sequence, run.batch_size, *peaks]
    if not all(abs(number) < _LARGEST for number in numbers) or min(sizes) < 1:
        raise ValueError("a size that no run has")
    return datetime.fromisoformat(receipt.time).timestamp(), receipt


def _numbers(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [number for inner in value for number in _numbers(inner)]
    return [value] if isinstance(value, (int, float)) else []
