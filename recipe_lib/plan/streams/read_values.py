"""What a step finds that reads values on a device of sizes, so that a check sees what comes after: numbers are 1, and
results whose size follows from values as large as they can be."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recipe_lib.plan.world.patches import Patch

_aten = torch.ops.aten


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)))


def _unique(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    flat = tensor.new_empty(tensor.numel())
    return flat, torch.empty_like(tensor, dtype=torch.int64), flat.to(torch.int64)


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Masks become the numbers of all their elements; None: there are none."""
    is_mask = [index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices]
    if not any(is_mask):
        return None
    found: list[Tensor | None] = []
    for index, masks in zip(indices, is_mask, strict=True):
        if index is not None and masks:
            found += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return _aten.index.Tensor(tensor, found)


_LARGEST: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.index.Tensor: _index,
    _aten.equal.default: lambda *_: False,
}


def largest_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator's result, every element counted; None: it is none of these."""
    make = _LARGEST.get(func)
    return None if make is None or type(args[0]) is not FakeTensor else make(*args, **kwargs)


def read_lists_as_ones() -> list[Patch]:
    """`tolist` copies to the host, once, and gives ones; torch's own reads each element by itself."""

    def tolist(tensor: Tensor) -> Any:
        return _ones(tensor.cpu().shape, int if not tensor.dtype.is_floating_point else float)

    return [(FakeTensor, "tolist", tolist)]


def _ones(shape: Sequence[int], kind: Callable[[int], Any]) -> Any:
    return [_ones(shape[1:], kind) for _ in range(shape[0])] if shape else kind(1)
