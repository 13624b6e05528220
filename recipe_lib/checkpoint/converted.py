"""Weights that transformers makes of other tensors of a file: read and made a parameter or an expert at a time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from recipe_lib.checkpoint.tensor_files import FileTensor
from recipe_lib.models.language_model import own_parts
from recipe_lib.models.meta_init import stored_weights
from recipe_lib.models.spec import Conversion, WeightEntry
from recipe_lib.models.weight_names import OpenView

Made = TypeVar("Made")
_ROWS = 4096  # rows of two tensors that are compared at a time


class Reader:
    """Reads whole tensors of a checkpoint by name; a context manager that keeps the files open."""

    def __init__(self, found: Mapping[str, FileTensor]) -> None:
        self._found, self._files = found, dict[str, Any]()
        self._stack = ExitStack()

    def __call__(self, name: str) -> Tensor:
        """The tensor, in host memory."""
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def slice(self, name: str) -> Any:
        """The tensor's slices, none of which is read yet."""
        return self._file(name).get_slice(name)

    def opened(self, entry: WeightEntry, dtype: torch.dtype) -> Any:
        """Slices of the tensor that an entry lies in, or is made of. dtype: of what is made of codes."""
        return self.slice(entry.file_name) if entry.view is None else OpenView(entry.view, self.slice, dtype)

    def _file(self, name: str) -> Any:
        path = str(self._found[name].file)
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def hold_same_numbers(first: Any, second: Any) -> bool:
    """Return whether two opened tensors are equal, the second in the first's type; some rows at a time."""
    shapes = [list(one.get_shape() if hasattr(one, "get_shape") else one.view.shape) for one in (first, second)]
    shape = shapes[0]
    if shape != shapes[1]:
        return False
    parts: list[Any] = [slice(at, at + _ROWS) for at in range(0, shape[0], _ROWS)] if shape else [...]
    for part in parts:
        rows = first[part]
        if not torch.equal(rows, second[part].to(rows.dtype)):
            return False
    return True


@torch.no_grad()
def load_converted(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    entries: Sequence[WeightEntry],
    found: Mapping[str, FileTensor],
) -> None:
    """Fills those parameters that are made of other tensors, in place; of experts each rank reads those it has.

    As much as all tensors of one conversion, or those of one expert, are in host memory at a time, and what they make.
    """
    stored = stored_weights(model)
    with Reader(found) as read:
        for conversion, names in _by_conversion(entries):
            quantized = [name for name in names if name in stored]
            places = {name: own_parts(model, name, parameters[name]) for name in names if name not in stored}
            for start, stop, taken in conversion.pieces():
                if not quantized and not any(_meets(part, start, stop) for parts in places.values() for part in parts):
                    continue
                made = conversion.convert(read, taken)
                for name in names:
                    value = made_for(made, name)
                    if name in stored:
                        stored[name].fill_weight(_rows_of(value))
                    else:
                        for local, offset in places[name]:
                            _place(local, offset, value, start)


def _rows_of(value: Tensor) -> Callable[[int, int, slice], Tensor]:
    """Reads rows, or columns of them, of a whole weight."""
    return lambda start, stop, columns: value[start:stop, columns]


def converted_rows(conversion: Conversion, name: str, found: Mapping[str, FileTensor]) -> Tensor:
    """The rows in the middle of a parameter that is made of others: those of one expert, or all."""
    pieces = list(conversion.pieces())
    with Reader(found) as read:
        return made_for(conversion.convert(read, pieces[len(pieces) // 2][2]), name)


def made_for(made: Mapping[str, Made], name: str) -> Made:
    """Which of what a conversion makes, tensors or shapes, is a parameter's: that of its name, or the first."""
    return made[name] if name in made else next(iter(made.values()))


def _by_conversion(entries: Sequence[WeightEntry]) -> list[tuple[Conversion, list[str]]]:
    """Each conversion with the parameters that it makes."""
    found: dict[int, tuple[Conversion, list[str]]] = {}
    for entry in entries:
        if entry.made is not None:
            found.setdefault(id(entry.made), (entry.made, []))[1].append(entry.our_name)
    return list(found.values())


def _meets(part: tuple[Tensor, tuple[int, ...]], start: int, stop: int | None) -> bool:
    """Whether a rank's part of a parameter has any of its rows from `start` to `stop`."""
    local, offset = part
    if not local.numel():
        return False
    return stop is None or not offset or (offset[0] < stop and start < offset[0] + local.shape[0])


def _place(local: Tensor, offset: tuple[int, ...], value: Tensor, start: int) -> None:
    """Copies what a part and the rows from `start` on have in common."""
    if not local.numel():
        return
    if not offset:
        local.copy_(value)
        return
    first, last = max(offset[0], start), min(offset[0] + local.shape[0], start + value.shape[0])
    if first < last:
        columns = tuple(slice(at, at + size) for at, size in zip(offset[1:], local.shape[1:], strict=True))
        local[first - offset[0] : last - offset[0]].copy_(value[(slice(first - start, last - start), *columns)])
