"""Hand values of a forward, as its documents, to modules inside layers.

Layers get the values as arguments of their forward, so that a checkpointed layer is computed again
on the same ones.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

from recipe_lib.models.language_model import list_layer_names, mix_in

_Value = TypeVar("_Value")
_variables: dict[str, ContextVar[Any]] = {}  # name of the argument -> variable


def make_variable(name: str) -> ContextVar[Any]:
    """Make the variable of a value; None: the forward that runs has none. name: unique."""
    variable: ContextVar[Any] = ContextVar(name, default=None)
    _variables[name] = variable
    return variable


@contextmanager
def set_inside(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a context variable a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class _CarryingLayer(nn.Module):
    """A mixin for layers that set the variables to their arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = [
            (variable, variable.set(kwargs.pop(name, None)))
            for name, variable in _variables.items()
        ]
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for variable, token in tokens:
                variable.reset(token)


def _pass_values(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    values = {name: variable.get() for name, variable in _variables.items()}
    return args, kwargs | {name: value for name, value in values.items() if value is not None}


def carry_values(model: nn.Module, readers: Collection[str]) -> None:
    """Let layers carry all values, in place. readers: modules that read some, inside layers."""
    for name in list_layer_names(model):
        layer = model.get_submodule(name)
        is_read = any(reader.startswith(f"{name}.") for reader in readers)
        if is_read and not isinstance(layer, _CarryingLayer):
            mix_in(_CarryingLayer, layer)
            layer.register_forward_pre_hook(_pass_values, with_kwargs=True)
