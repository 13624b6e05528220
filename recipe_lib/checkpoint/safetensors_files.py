"""Read and check the headers of safetensors files, and write such files piece by piece.

A header says where each tensor lies, so faults are found without reading a tensor, and a file is
written without ever holding more than one piece of one tensor in host memory. `Reader` reads the
tensors of a checkpoint of several files by name.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
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

# A file is the length of its header (`<Q`, little-endian), the header in JSON, and the data.
_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
# The format's name of a type -> torch's.
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
# Further types of one byte, in checkpoints that are quantized already; never written.
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | dict.fromkeys(
    _EIGHT_BITS, 1
)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Types of plain weights. A file may hold others: codes of quantized weights, their scales, and
# buffers that are tables of integers.
READABLE_TYPES = {
    DTYPE_NAMES[dtype] for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
# Key of a file's metadata: the names of those of its tensors that a recipe added to the model.
EXTRA_PARAMETERS_KEY = "tune_extra_parameters"
_LFS_POINTER = b"version https://git-lfs"  # first bytes of a file that git-lfs has not fetched
_COMPARED_ROWS = 4096  # rows of two tensors that are compared at a time


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file's header."""

    dtype: str  # the format's name of the type, such as BF16
    shape: tuple[int, ...]
    start: int  # its first byte, counted from the end of the header
    end: int  # one past its last byte


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a checkpoint: the file it is in, and its entry in the file's header."""

    file: Path
    entry: TensorEntry
    extra: bool = False  # a parameter that a recipe added: the model's family does not have it

    @property
    def num_bytes(self) -> int:
        return self.entry.end - self.entry.start

    @contextmanager
    def open_data(self, offset: int = 0) -> Iterator[BufferedReader]:
        """Open the file at a byte of the tensor's data."""
        with open_regular(self.file) as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            file.seek(_LENGTH_BYTES + length + self.entry.start + offset)
            yield file

    def stream(self) -> Iterator[torch.Tensor]:
        """Yield the tensor's bytes, uint8 `[n]`, a few MiB at a time, whatever its type."""
        with self.open_data() as file:
            for start in range(0, self.num_bytes, CHUNK_BYTES):
                chunk = file.read(min(CHUNK_BYTES, self.num_bytes - start))
                yield torch.frombuffer(bytearray(chunk), dtype=torch.uint8)

    def fill(self, local: torch.Tensor, offsets: tuple[int, ...]) -> bool:
        """Read the tensor, or rows of it, straight into memory that they have the layout of.

        A mapped file would be resident beside the copy. Returns False if the layout differs.

        local: what is filled. offsets: where it begins in the tensor, by dimension.
        """
        shape = self.entry.shape
        is_same = local.device.type == "cpu" and local.dtype == DTYPES.get(self.entry.dtype)
        if not is_same or not local.is_contiguous() or local.shape[1:] != shape[1:]:
            return False
        first_row = offsets[0] if offsets else 0
        row_bytes = self.num_bytes // shape[0] if shape else 0
        with self.open_data(first_row * row_bytes) as file:
            memory = local.detach().view(-1).view(torch.uint8).numpy()
            is_full = file.readinto(memory) == local.nbytes
        # As after any write in place: who looks for what was filled goes by the version.
        torch.autograd.graph.increment_version(local)
        return is_full


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    tensors: dict[str, TensorEntry]  # by name
    metadata: dict[str, str]  # key -> text


def read_header(path: Path) -> Header:
    """Read and check a file's header.

    Raises CheckpointError for a file that cannot be read, is cut short, a git-lfs pointer, or no
    safetensors file.
    """
    try:
        size = check_regular(path)
        file = open_regular(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); fetch the file again"
        ) from None
    with file:
        first_bytes = file.read(max(_LENGTH_BYTES, len(_LFS_POINTER)))
        if first_bytes.startswith(_LFS_POINTER):
            raise CheckpointError(
                f"{path}: is a git-lfs pointer, not the weights; fetch them with `git lfs pull` or"
                " `tune download`"
            )
        if len(first_bytes) < _LENGTH_BYTES:
            raise _make_cut_short_fault(path, size, _LENGTH_BYTES)
        (length,) = struct.unpack("<Q", first_bytes[:_LENGTH_BYTES])
        if length > MAX_HEADER_BYTES:
            raise _make_format_fault(path, f"a header of {length} bytes")
        data_start = _LENGTH_BYTES + length
        if data_start > size:
            raise _make_cut_short_fault(path, size, data_start)
        file.seek(_LENGTH_BYTES)
        header_json = file.read(length)
    try:
        fields = parse_json(header_json)
    except ValueError as error:
        raise _make_format_fault(path, "a header that is not JSON") from error
    return _check_header(path, fields, data_bytes=size - data_start, data_start=data_start)


def _check_header(path: Path, fields: Any, *, data_bytes: int, data_start: int) -> Header:
    """Return the header; raise CheckpointError if its tensors leave gaps or overlap.

    fields: the parsed JSON. data_bytes, data_start: size of the data, and where it begins in the
    file.
    """
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


# Return the entry of one tensor; raise CheckpointError if its fields are wrong or disagree.
def _read_entry(path: Path, name: str, entry: Any) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            # `type`, since a bool is an int to isinstance and to the pattern above.
            if all(type(value) is int and value >= 0 for value in (*shape, start, end)):
                # A type that is not known has no size to check; who reads the tensor refuses it.
                if dtype not in _ITEM_BYTES or end - start == math.prod(shape) * _ITEM_BYTES[dtype]:
                    return TensorEntry(dtype=dtype, shape=tuple(shape), start=start, end=end)
    raise _make_format_fault(path, f"an impossible entry for {name}")


def _make_cut_short_fault(path: Path, num_bytes: int, min_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: cut short: {format_bytes(num_bytes)} ({num_bytes} bytes), expected {min_bytes}"
        " bytes; fetch the file again"
    )


def _make_format_fault(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a whole safetensors file: found {fault}; fetch the file again"
    )


def list_extra_names(header: Header) -> set[str]:
    """Return the tensors of a file that its metadata names as extra parameters."""
    return set(header.metadata.get(EXTRA_PARAMETERS_KEY, "").split())


class Reader(ExitStack):
    """A reader of tensors of a checkpoint by name; a context manager that keeps the files open."""

    # tensors: name in the files -> where it is.
    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._files: dict[Path, Any] = {}

    def read(self, name: str) -> torch.Tensor:
        return self._open(name).get_tensor(name)

    def fill(self, name: str, local: torch.Tensor, offsets: tuple[int, ...]) -> bool:
        """Fill a part of a parameter as `FileTensor.fill` does."""
        return self._tensors[name].fill(local, offsets)

    def get_slice(self, name: str) -> Any:
        """Return the tensor's slices, none of which is read yet."""
        return self._open(name).get_slice(name)

    def open_entry(self, entry: WeightEntry, dtype: torch.dtype) -> Any:
        """Return the slices of a parameter's tensor, none of which is read yet.

        If the entry has a view, they are slices of the tensor that the view makes: it puts several
        tensors of the files together, or decodes a quantized one.

        dtype: of weights decoded from codes; other tensors keep the file's type.
        """
        if entry.view is None:
            return self.get_slice(entry.file_name)
        return OpenView(entry.view, self.get_slice, dtype)

    def _open(self, name: str) -> Any:
        path = self._tensors[name].file
        if path not in self._files:
            self._files[path] = self.enter_context(safe_open(str(path), framework="pt"))
        return self._files[path]


def have_same_numbers(first: Any, second: Any) -> bool:
    """Return True if two opened tensors are equal, the second one cast to the type of the first.

    Some rows are read and compared at a time, so that two embeddings need not fit into memory.

    first, second: as `Reader.get_slice` or `Reader.open_entry` returns them.
    """
    shape = _get_shape(first)
    if shape != _get_shape(second):
        return False
    parts: list[Any] = [...]  # a number by itself has no rows
    if shape:
        parts = [
            slice(start, start + _COMPARED_ROWS) for start in range(0, shape[0], _COMPARED_ROWS)
        ]
    for part in parts:
        rows = first[part]
        if not torch.equal(rows, second[part].to(rows.dtype)):
            return False
    return True


def _get_shape(opened: Any) -> list[int]:
    return list(opened.get_shape() if hasattr(opened, "get_shape") else opened.view.shape)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is to be written into a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    # The tensor whose bytes are copied, and whose type is that of the copy; None: it is no copy.
    source: FileTensor | None = None

    @property
    def num_bytes(self) -> int:
        if self.source is not None:
            return self.source.num_bytes
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path,
    plan: Sequence[PlannedTensor],
    pieces: Iterable[torch.Tensor],
    metadata: dict[str, str],
) -> FileRecord:
    """Write a new safetensors file and flush it to the disk.

    plan: the tensors in file order. pieces: their data in the same order, each tensor whole or in
    consecutive pieces of its bytes (a fused tensor is written from its parts); taken one at a time.
    metadata: key -> text, for the header. Raises RuntimeError if the pieces have more or fewer
    bytes than planned.
    """
    header = _make_header(plan, metadata)
    num_bytes = sum(tensor.num_bytes for tensor in plan)
    with HashedFile(path) as file, phase(f"writing {path.name}", num_bytes, "bytes") as progress:
        file.write(header)
        for piece in pieces:
            for chunk in copy_to_host(piece):
                file.write(chunk)
                progress.advance(len(chunk))
            del piece  # a gathered tensor must be gone before the next one is gathered
        if file.size != len(header) + num_bytes:
            raise RuntimeError(f"{path}: the pieces do not fill the planned tensors")
    return file.record()


def _make_header(plan: Sequence[PlannedTensor], metadata: dict[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for tensor in plan:
        end = position + tensor.num_bytes
        fields[tensor.name] = {
            "dtype": tensor.source.entry.dtype if tensor.source else DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header_json = json.dumps(fields, separators=(",", ":")).encode()
    # Data begins on a multiple of 8 bytes, so that a reader that maps the file has it aligned.
    header_json += b" " * (-len(header_json) % 8)
    return struct.pack("<Q", len(header_json)) + header_json


def copy_to_host(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order, in chunks of at most CHUNK_BYTES.

    A chunk is copied to the host when it is asked for.
    """
    flat = tensor.detach().contiguous().view(-1)
    for chunk in flat.split(max(1, CHUNK_BYTES // flat.element_size())):
        if chunk.numel():
            yield memoryview(chunk.cpu().view(torch.uint8).numpy())
