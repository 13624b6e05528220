"""Tensors of a checkpoint's files as a model has them, without their being made whole.

A view says which tensors of the files it takes, and opened gives slices of what they make, as safetensors' own slices
do: an expert's matrices that lie apart as one tensor of all experts, transposed ones, MXFP4 blocks, FP8 with scales of
blocks. So each rank reads the part that it keeps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_FLOATS = ("F64", "F32", "BF16", "F16")
_SCALES = (*_FLOATS, "F8_E8M0", "U8")  # of FP8
MXFP4_BLOCK = 32  # numbers that share an exponent (OCP Microscaling Formats 1.0)
_MX_BIAS = 127  # of exponents that stand for scales
# Of the 16 codes; the highest bit is the sign.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Bounds = list[tuple[int, int]]


@dataclass(frozen=True)
class FileForm:
    """What a tensor of a file has to be: its shape, and safetensors' names of the types that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = _FLOATS


class FileView(Protocol):
    """A tensor that is made of tensors of files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is made."""

    def tensors(self) -> dict[str, FileForm]:
        """Those that it takes, by name."""

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """The part within (first, after the last) of each dimension. slice_of: safetensors' slice of a name.

        dtype: of what is made of codes; other numbers keep their type.
        """


@dataclass(frozen=True)
class OpenView:
    """A view with its files open, read by slices as a tensor of a file is."""

    view: FileView
    slice_of: Callable[[str], Any]
    dtype: torch.dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given: Sequence[slice] = index if isinstance(index, tuple) else (index,)
        every = [*given, *[slice(None)] * (len(self.view.shape) - len(given))]
        bounds = [part.indices(size)[:2] for part, size in zip(every, self.view.shape, strict=True)]
        return self.view.read(self.slice_of, bounds, self.dtype)

    def rows(self, start: int, stop: int, columns: slice) -> Tensor:
        """Rows of the matrices `[e, o, i]` as if they were one below the other, `[e o, i]`."""
        if len(self.view.shape) == 2:
            return self[start:stop, columns]
        height = self.view.shape[1]
        pieces = []
        for expert in range(start // height, -(-stop // height)):
            first, last = max(start - expert * height, 0), min(stop - expert * height, height)
            pieces.append(self[expert : expert + 1, first:last, columns].flatten(0, 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in bounds)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as the file has it."""

    name: str
    shape: tuple[int, ...]

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        return {self.name: FileForm(self.shape)}

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        found: Tensor = slice_of(self.name)[_slices(bounds)]
        return found


@dataclass(frozen=True)
class Swapped:
    """The last two dimensions the other way round."""

    part: FileView

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is made."""
        *before, rows, columns = self.part.shape
        return (*before, columns, rows)

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        return self.part.tensors()

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        *before, rows, columns = bounds
        return self.part.read(slice_of, [*before, columns, rows], dtype).transpose(-1, -2)


@dataclass(frozen=True)
class Rows:
    """One below the other: tensors that differ in their first dimension alone."""

    parts: tuple[FileView, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is made."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        return {name: form for part in self.parts for name, form in part.tensors().items()}

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        (start, stop), *others = bounds
        found, at = [], 0
        for part in self.parts:
            first, last = max(start - at, 0), min(stop - at, part.shape[0])
            if first < last:
                found.append(part.read(slice_of, [(first, last), *others], dtype))
            at += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class Stack:
    """One after the other in a new first dimension: the same of each expert."""

    parts: tuple[FileView, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is made."""
        return (len(self.parts), *self.parts[0].shape)

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        return {name: form for part in self.parts for name, form in part.tensors().items()}

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        (start, stop), *others = bounds
        return torch.stack([part.read(slice_of, others, dtype) for part in self.parts[start:stop]])


@dataclass(frozen=True)
class SomeRows:
    """Some of the rows: of a tensor that holds several parameters one below the other."""

    part: FileView
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is made."""
        return (self.length, *self.part.shape[1:])

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        return self.part.tensors()

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        (first, last), *others = bounds
        return self.part.read(slice_of, [(first + self.start, last + self.start), *others], dtype)


@dataclass(frozen=True)
class Fp8Blocks:
    """A matrix `[o, i]`, or those of all experts `[E, o, i]`, in 8-bit floating point, with a scale for each block of
    `block` rows and columns; the last of a row or column of blocks may be smaller.

    What it stands for is computed in fp32. Scales are of any type of floating point, or the exponents of 2 alone: as
    float8, or uint8 with 127 added.
    """

    name: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    def _sizes(self) -> tuple[int, ...]:
        """Of a block in each dimension, none larger than the tensor itself."""
        every = (*[1] * (len(self.shape) - 2), *self.block)
        return tuple(max(1, min(size, each)) for size, each in zip(self.shape, every, strict=True))

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        blocks = tuple(-(-size // each) for size, each in zip(self.shape, self._sizes(), strict=True))
        return {self.name: FileForm(self.shape, ("F8_E4M3",)), self.scales: FileForm(blocks, _SCALES)}

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        sizes = self._sizes()
        values = slice_of(self.name)[_slices(bounds)].float()
        blocks = [(first // each, -(-last // each)) for (first, last), each in zip(bounds, sizes, strict=True)]
        scales = slice_of(self.scales)[_slices(blocks)]
        scales = (scales.float() - _MX_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()
        for dim, ((first, last), each) in enumerate(zip(bounds, sizes, strict=True)):
            scales = scales.index_select(dim, torch.arange(first, last) // each - first // each)
        return values.mul_(scales).to(dtype)


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Matrices `[E, o, i]` in 4-bit floating point, 32 numbers of a row sharing an exponent.

    In the file blocks are uint8 `[E, o, i / 32, 16]`, the first of two numbers in the low bits, and scales uint8
    `[E, o, i / 32]`, the exponents of 2 with 127 added.
    """

    blocks: str
    scales: str
    shape: tuple[int, int, int]

    def tensors(self) -> dict[str, FileForm]:
        """See `FileView`."""
        *rows, columns = self.shape
        count = (*rows, columns // MXFP4_BLOCK)
        return {self.blocks: FileForm((*count, MXFP4_BLOCK // 2), ("U8",)), self.scales: FileForm(count, ("U8",))}

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """See `FileView`."""
        *rows, (first, last) = bounds
        begin, end = first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK)
        place = (*_slices(rows), slice(begin, end))
        codes, exponents = slice_of(self.blocks)[place], slice_of(self.scales)[place].int() - _MX_BIAS
        levels = torch.tensor([*_FP4, *(-level for level in _FP4)], dtype=dtype)
        pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)  # of each byte
        values = pairs.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], MXFP4_BLOCK)
        values = torch.ldexp(values, exponents.unsqueeze(-1)).to(dtype).flatten(-2)
        return values[..., first - begin * MXFP4_BLOCK : last - begin * MXFP4_BLOCK]


def elements(view: FileView) -> int:
    """Numbers that a view makes."""
    return math.prod(view.shape)
