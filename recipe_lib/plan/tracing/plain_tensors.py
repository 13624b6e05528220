"""Tensors with memory of their own, and the wrappers that hold such."""

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

PLAIN_TENSORS = frozenset({FakeTensor, Tensor, nn.Parameter})


def has_memory(tensor: Tensor) -> bool:
    """A wrapper has none of its own; what it holds was seen when that was made."""
    return type(tensor) in PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__")


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: of a sharded one its local part, of a wrapper what it holds."""
    if has_memory(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    held = (getattr(tensor, name) for name in names)
    return [part for value in held if isinstance(value, Tensor) for part in plain_parts(value)]
