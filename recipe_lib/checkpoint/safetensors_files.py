"""safetensors files: their headers, checked against the file; and files written piece by piece.

A header says where each tensor lies, so faults are found without reading a tensor, and a file is
written without ever holding more than one piece of one tensor in host memory.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from recipe_lib.errors import CheckpointError
from recipe_lib.files import CHUNK_BYTES, FileRecord, HashedFile
from recipe_lib.models.spec import WeightEntry
from recipe_lib.models.weight_names import OpenView
from recipe_lib.reading import check_regular, open_regular, parse_json
from recipe_lib.report.phases import phase
from recipe_lib.units import format_bytes

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_EIGHT_BITS = (
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
)  # of checkpoints that are quantized already; never written
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | dict.fromkeys(
    _EIGHT_BITS, 1
)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LFS_POINTER = b"version https://git-lfs"
_COMPARED_ROWS = 4096  # of two tensors, at a time


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: the format's name of its type, its shape, and its first and last byte + 1
    in the data.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a checkpoint: the file it is in, and what the file's header says of it.

    extra: it was exported as a recipe's extra parameter, which the model's family does not have.
    """

    file: Path
    entry: TensorEntry
    extra: bool = False


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, and its free text metadata."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Reads and checks a file's header; CheckpointError if it is cut short, a pointer, or not this
    format.
    """
    try:
        size = check_regular(path)
        file = open_regular(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); fetch the file again"
        ) from None
    with file:
        start = file.read(max(8, len(_LFS_POINTER)))
        if start.startswith(_LFS_POINTER):
            raise CheckpointError(
                f"{path}: is a git-lfs pointer, not the weights; fetch them with `git lfs pull` or"
                " `tune download`"
            )
        if len(start) < 8:
            raise _make_cut_short_fault(path, size, 8)
        (length,) = struct.unpack("<Q", start[:8])
        if length > MAX_HEADER_BYTES:
            raise _make_format_fault(path, f"a header of {length} bytes")
        if 8 + length > size:
            raise _make_cut_short_fault(path, size, 8 + length)
        file.seek(8)
        text = file.read(length)
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise _make_format_fault(path, "a header that is not JSON") from error
    return _check_header(path, fields, size - 8 - length, 8 + length)


def _check_header(path: Path, fields: Any, data_bytes: int, data_start: int) -> Header:
    if not isinstance(fields, dict):
        raise _make_format_fault(path, "a header that is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _make_format_fault(path, "metadata that is not a JSON object")
    tensors = {name: _read_entry(path, name, entry) for name, entry in fields.items()}
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise _make_format_fault(
                path, f"{name} at byte {entry.start} of the data where {position} was due"
            )
        position = entry.end
    if position > data_bytes:
        raise _make_cut_short_fault(path, data_start + data_bytes, data_start + position)
    if position < data_bytes:
        raise _make_format_fault(path, f"{data_bytes - position} bytes after the last tensor")
    return Header(tensors, {str(key): str(value) for key, value in metadata.items()})


def _read_entry(path: Path, name: str, entry: Any) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            numbers = [*shape, start, end]
            if all(type(number) is int and number >= 0 for number in numbers):
                if dtype not in _ITEM_BYTES or end - start == math.prod(shape) * _ITEM_BYTES[dtype]:
                    return TensorEntry(dtype, tuple(shape), start, end)
    raise _make_format_fault(path, f"an impossible entry for {name}")


def _make_cut_short_fault(path: Path, found: int, expected: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: cut short: {format_bytes(found)} ({found} bytes), expected {expected} bytes;"
        " fetch the file again"
    )


def _make_format_fault(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a whole safetensors file: found {found}; fetch the file again"
    )


class Reader(ExitStack):
    """Reads whole tensors of a checkpoint by name; a context manager that keeps the files open."""

    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._files: dict[Path, Any] = {}

    def __call__(self, name: str) -> torch.Tensor:
        """Return the tensor, in host memory."""
        return self._open(name).get_tensor(name)

    def slice(self, name: str) -> Any:
        """Return the tensor's slices, none of which is read yet."""
        return self._open(name).get_slice(name)

    def open_entry(self, entry: WeightEntry, dtype: torch.dtype) -> Any:
        """Return slices of the tensor that an entry lies in, or is made of. dtype: of what is made
        of codes.
        """
        return (
            self.slice(entry.file_name)
            if entry.view is None
            else OpenView(entry.view, self.slice, dtype)
        )

    def _open(self, name: str) -> Any:
        path = self._tensors[name].file
        if path not in self._files:
            self._files[path] = self.enter_context(safe_open(str(path), framework="pt"))
        return self._files[path]


def have_same_numbers(first: Any, second: Any) -> bool:
    """Return whether two opened tensors are equal, the second in the first's type; some rows at a
    time.
    """
    shape, other = (
        list(one.get_shape() if hasattr(one, "get_shape") else one.view.shape)
        for one in (first, second)
    )
    if shape != other:
        return False
    parts: list[Any] = (
        [slice(at, at + _COMPARED_ROWS) for at in range(0, shape[0], _COMPARED_ROWS)]
        if shape
        else [...]
    )
    for part in parts:
        rows = first[part]
        if not torch.equal(rows, second[part].to(rows.dtype)):
            return False
    return True


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its name in the file, type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of data it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path,
    plan: Sequence[PlannedTensor],
    pieces: Iterable[torch.Tensor],
    metadata: dict[str, str],
) -> FileRecord:
    """Writes a new safetensors file and flushes it to the disk.

    plan: the tensors in file order. pieces: their data in the same order, each tensor whole or in
    consecutive pieces along its first dimension (a fused tensor is written from its parts); taken
    one at a time.
    """
    header = _make_header(plan, metadata)
    total = sum(tensor.num_bytes for tensor in plan)
    with HashedFile(path) as file, phase(f"writing {path.name}", total, "bytes") as going:
        file.write(header)
        for piece in pieces:
            for chunk in copy_to_host(piece):
                file.write(chunk)
                going.advance(len(chunk))
            del piece  # a gathered tensor must be gone before the next one is gathered
        if file.size != len(header) + total:
            raise RuntimeError(f"{path}: the pieces do not fill the planned tensors")
    return file.record()


def _make_header(plan: Sequence[PlannedTensor], metadata: dict[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for tensor in plan:
        end = position + tensor.num_bytes
        fields[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (
        -len(text) % 8
    )  # data begins on a multiple of 8 bytes, as readers that map the file like it
    return struct.pack("<Q", len(text)) + text


def copy_to_host(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, in pieces of at most CHUNK_BYTES, copied to the host
    one by one.
    """
    flat = tensor.detach().contiguous().view(-1)
    for piece in flat.split(max(1, CHUNK_BYTES // flat.element_size())):
        if piece.numel():
            yield memoryview(piece.cpu().view(torch.uint8).numpy())
