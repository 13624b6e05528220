"""Which call of a torch function is which: by the module whose forward makes it, and by its number there.

Both who looks at a model (tracing) and who runs one by its plan count calls with `Calls`, so that they mean the same.
A call counts if it gives a tensor; what a torch function calls on its own account does not count.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class CallKey(NamedTuple):
    """module: its path in the model, empty for the model itself. number: of the call within one forward, from 0."""

    module: str
    number: int


class Calls(TorchFunctionMode):
    """While it is entered, hands every torch function call that a model makes to `on_call`.

    A subclass overrides `on_call`, which does the call as it stands; modules are followed through hooks.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self._open: list[list[Any]] = [["", 0]]  # path and number of calls, of the forwards that are running
        self._hooks: list[Any] = []
        self.last = ""  # path of the module that made the latest call

    def on_call(self, key: CallKey, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does one call. Returns what the model is to get."""
        return function(*args, **kwargs)

    def on_read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads an attribute of a tensor, such as its shape."""
        return function(*args, **kwargs)

    @property
    def module(self) -> str:
        """The path of the module whose forward is running."""
        return str(self._open[-1][0])

    @property
    def next_call(self) -> CallKey:
        """The call that comes next."""
        return CallKey(*self._open[-1])

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__" or name == "size":
            return self.on_read(function, args, kwargs)
        forward = self._open[-1]
        self.last = str(forward[0])
        result = self.on_call(CallKey(forward[0], forward[1]), function, args, kwargs)
        if next(tensors_in(result), None) is not None:
            forward[1] += 1
        return result

    def __enter__(self) -> "Calls":
        for path, module in self.model.named_modules():
            if path:

                def opened(module: torch.nn.Module, args: Any, path: str = path) -> None:
                    self._open.append([path, 0])

                self._hooks.append(module.register_forward_pre_hook(opened))
                self._hooks.append(module.register_forward_hook(self._closed, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open = [["", 0]]

    def _closed(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._open.pop()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def places_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every argument with its place: `0`, `1.2` (third item of the second argument), `weight`."""
    for key, value in (*enumerate(args), *kwargs.items()):
        yield from _within(str(key), value)


def _within(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _within(f"{place}.{number}", item)
    else:
        yield place, value


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], place: str, value: Any) -> tuple[Any, dict[str, Any]]:
    """Arguments with the one at a place (`places_in`) replaced."""
    first, *rest = place.split(".")
    if first.isdigit():
        changed = (_put(item, rest, value) if number == int(first) else item for number, item in enumerate(args))
        return tuple(changed), kwargs
    return args, {**kwargs, first: _put(kwargs[first], rest, value)}


def _put(held: Any, path: list[str], value: Any) -> Any:
    """No function within `replaced`: one that calls itself is a cycle, and would keep the value for a while."""
    if not path:
        return value
    items = list(held)
    items[int(path[0])] = _put(items[int(path[0])], path[1:], value)
    return type(held)(items)


def output_values(output: Any) -> Any:
    """What a model gives, dataclasses as dicts."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (dict, type)):
        return vars(output)
    return output
