"""Integers that know where they come from: an attribute, the size of a tensor, or arithmetic on
both.

A forward that was written for whole tensors says `view(b, s, self.num_heads, self.head_dim)`. While
such a model is traced, the integer attributes of its modules and of their configs are `Sourced`,
and so are the sizes of tensors; what a call gets as a size can then be computed anew for a rank,
with an attribute divided or without.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from recipe_lib.models.language_model import Entry, replace_entries


class Attribute(NamedTuple):
    """module: path of the module. name: of its attribute, `config.num_heads` for one of an object
    that it holds.
    """

    module: str
    name: str
    value: int


class Size(NamedTuple):
    """The size of one dimension of a tensor; tensor: what the trace knows it by."""

    tensor: Any
    dimension: int


_Source = TypeVar("_Source", Attribute, Size)


class Arithmetic(NamedTuple):
    """`operator` is one of + - * //; the operands are integers, sourced or not."""

    operator: str
    left: int
    right: int


_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


def _make_operator(sign: str, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        return Sourced(
            _COMPUTE[sign](int(left), int(right)), Arithmetic(sign, left, right), self.note
        )

    return compute


class Decision(NamedTuple):
    """A comparison that the forward made, and perhaps went another way for. operator is one of
    _COMPARE.

    module, call: the module whose forward made it, and the number of the call that came next there.
    """

    operator: str
    left: int
    right: int
    module: str = ""
    call: int = 0


_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _make_comparison(sign: str) -> Callable[[Any, Any], Any]:
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
    """An integer with its source; to all others it is an integer. note: gets the comparisons that
    are made with it.
    """

    source: Any
    note: Any

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
    """An integer that counts what `ranks` share evenly, but for `kept` that each of them has."""

    ranks: int = 1
    kept: int = 0

    def divide(self, value: int) -> int:
        """Return what the integer is on a rank."""
        return self.kept + (int(value) - self.kept) // self.ranks


def evaluate(value: int, sizes: Callable[[Size], int], divisions: dict[Attribute, Division]) -> int:
    """Compute what the integer would be on a rank.

    sizes: the size of a dimension there. divisions: how an attribute is divided there.
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
    """Return True if a comparison comes out on a rank as it does on the whole."""
    compare = _COMPARE[decision.operator]
    left, right = (evaluate(side, sizes, divisions) for side in (decision.left, decision.right))
    return bool(compare(int(decision.left), int(decision.right)) == compare(left, right))


def list_sources(value: object, kind: type[_Source]) -> list[_Source]:
    """Return the attributes, or sizes, that an integer or a slice was computed from."""
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
    """Make integer attributes of modules, and of objects such as configs that they hold, Sourced
    while it is entered.

    note: gets the comparisons that are made with them.
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
    for name, value in held.items():
        if type(value) is int and value > 1 and not name.startswith("_"):
            yield held, name, Sourced(value, Attribute(path, prefix + name, value), note)


def _is_settings(value: Any) -> bool:
    """Return True for a plain object with attributes, such as a config."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type, dict)) or callable(value):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith("torch")
