"""Make integers know where they come from: an attribute, a tensor's size, or arithmetic on both.

A forward that was written for whole tensors says `view(b, s, self.num_heads, self.head_dim)`. While
a model is traced, integer attributes of its modules and of their configs are `Sourced`
(`make_attributes_sourced`), and so are the sizes of tensors. `evaluate` then computes what a call's
integer would be on one tensor-parallel rank, where some attributes are divided.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from recipe_lib.models.language_model import Entry, replace_entries


class Attribute(NamedTuple):
    """The source of an integer that was read off a module."""

    module: str  # path of the module
    name: str  # of its attribute; `config.num_heads` for one of an object that it has
    value: int  # in the whole model


class Size(NamedTuple):
    """The source of an integer that is the size of one dimension of a tensor."""

    tensor: Any  # a `TracedTensor` of forward_trace, which imports this module
    dimension: int


_Source = TypeVar("_Source", Attribute, Size)


class Arithmetic(NamedTuple):
    """The source of an integer that was computed of others, which may be `Sourced`."""

    operator: str  # `+`, `-`, `*` or `//`
    left: int
    right: int


_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


def _make_operator(sign: str, reflected: bool) -> Callable[[Any, Any], Any]:
    """Return the method of `Sourced` for an operator. reflected: its operand is on the left."""

    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        return Sourced(
            _COMPUTE[sign](int(left), int(right)), Arithmetic(sign, left, right), self.note
        )

    return compute


class Decision(NamedTuple):
    """A comparison that the forward made; with another result it may run other calls."""

    operator: str  # a key of `_COMPARE`
    left: int
    right: int
    module: str = ""  # path of the module whose forward made it; empty: the model itself
    call: int = 0  # number of the torch function call that came next in that forward


_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _make_comparison(sign: str) -> Callable[[Any, Any], Any]:
    """Return the method of `Sourced` for a comparison, which notes it. sign: as in `_COMPARE`."""

    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        if self.note is not None and (
            isinstance(self.source, Size)
            or list_sources(self, Attribute) + list_sources(other, Attribute)
        ):
            self.note(Decision(sign, self, other))
        return _COMPARE[sign](int(self), int(other))

    return compare


class Sourced(int):
    """An integer with its source; other code takes it for a plain integer."""

    source: Any  # an `Attribute`, a `Size` or an `Arithmetic`; None: not known
    note: Any  # a function that gets the `Decision` of each comparison; None: nobody asks

    def __new__(cls, value: int, source: Any = None, note: Any = None) -> "Sourced":
        sourced = super().__new__(cls, value)
        sourced.source = source
        sourced.note = note
        return sourced

    __add__ = _make_operator("+", False)  # type: ignore[assignment]
    __radd__ = _make_operator("+", True)  # type: ignore[assignment]
    __sub__ = _make_operator("-", False)  # type: ignore[assignment]
    __rsub__ = _make_operator("-", True)  # type: ignore[assignment]
    __mul__ = _make_operator("*", False)  # type: ignore[assignment]
    __rmul__ = _make_operator("*", True)  # type: ignore[assignment]
    __floordiv__ = _make_operator("//", False)  # type: ignore[assignment]
    __rfloordiv__ = _make_operator("//", True)  # type: ignore[assignment]
    __eq__ = _make_comparison("==")  # type: ignore[assignment]
    __ne__ = _make_comparison("!=")  # type: ignore[assignment]
    __lt__ = _make_comparison("<")  # type: ignore[assignment]
    __le__ = _make_comparison("<=")  # type: ignore[assignment]
    __gt__ = _make_comparison(">")  # type: ignore[assignment]
    __ge__ = _make_comparison(">=")  # type: ignore[assignment]
    __hash__ = int.__hash__


class Division(NamedTuple):
    """A division of an integer over ranks, which share evenly what it counts."""

    ranks: int = 1
    kept: int = 0  # how much of it every rank has; the rest is divided

    def divide(self, value: int) -> int:
        return self.kept + (int(value) - self.kept) // self.ranks


def evaluate(value: int, sizes: Callable[[Size], int], divisions: dict[Attribute, Division]) -> int:
    """Compute what an integer would be on a rank, from its source; without one it is the same.

    sizes: returns the size of a dimension there. divisions: the attributes that are divided there.
    """
    source = getattr(value, "source", None)
    if isinstance(source, Attribute):
        return divisions.get(source, Division()).divide(value)
    if isinstance(source, Size):
        return sizes(source)
    if isinstance(source, Arithmetic):
        left, right = (evaluate(side, sizes, divisions) for side in (source.left, source.right))
        return _COMPUTE[source.operator](left, right) if right or source.operator != "//" else 0
    return int(value)


def is_decided_alike(
    decision: Decision, sizes: Callable[[Size], int], divisions: dict[Attribute, Division]
) -> bool:
    """Return True if a comparison comes out on a rank as in the whole model; see `evaluate`."""
    compare = _COMPARE[decision.operator]
    left, right = (evaluate(side, sizes, divisions) for side in (decision.left, decision.right))
    return bool(compare(int(decision.left), int(decision.right)) == compare(left, right))


def list_sources(value: object, kind: type[_Source]) -> list[_Source]:
    """Return the attributes, or sizes, that an integer or a slice was computed from.

    kind: `Attribute` or `Size`.
    """
    if isinstance(value, slice):
        return list_sources(value.start, kind) + list_sources(value.stop, kind)
    source = getattr(value, "source", None)
    if isinstance(source, kind):
        return [source]
    if isinstance(source, Arithmetic):
        return list_sources(source.left, kind) + list_sources(source.right, kind)
    return []


def make_attributes_sourced(
    model: torch.nn.Module, note: Callable[[Decision], None]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which integer attributes of the model's modules are `Sourced`.

    So are those of plain objects that modules have, such as configs. note: gets the comparisons
    that are made with them.
    """
    entries: list[Entry] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        entries += _make_sourced(module.__dict__, path=path, prefix="", note=note)
        for name, value in module.__dict__.items():
            if _is_settings(value) and id(value) not in seen:
                seen.add(id(value))
                entries += _make_sourced(value.__dict__, path=path, prefix=f"{name}.", note=note)
    return replace_entries(entries)


def _make_sourced(
    held: dict[str, Any], path: str, prefix: str, note: Callable[[Decision], None]
) -> Iterator[Entry]:
    """Yield (dict, name, new value) for the public integers above 1 among attributes.

    held: the `__dict__` of a module at `path`, or of an object that it has. prefix: of the names.
    """
    for name, value in held.items():
        if type(value) is int and value > 1 and not name.startswith("_"):
            yield held, name, Sourced(value, Attribute(path, prefix + name, value), note)


def _is_settings(value: Any) -> bool:
    """Return True for a plain object with attributes, such as a config."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type, dict)) or callable(value):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith("torch")
