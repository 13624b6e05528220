"""Calls with boundaries, as one rank makes them: the same for ranks that train and for the threads of a proof."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from recipe_lib.external.tensor_plan.calls import places_in, replaced
from recipe_lib.external.tensor_plan.sharding_plan import Boundary, TensorPlan, bounds

Total = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exchanges:
    """Which rank of how many, and how they exchange.

    total: a tensor to its sum over ranks. entered: what has entered so far, by activation and id; one tensor enters
    once for all calls that share it.
    """

    plan: TensorPlan
    rank: int
    size: int
    total: Total
    entered: Callable[[], dict[tuple[int, int], tuple[Tensor, Tensor]]]

    def call(self, here: list[Boundary], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does a call that has boundaries. Returns what the model is to get."""
        for boundary in here:
            if boundary.kind in ("enter", "cut") and not boundary.place.startswith("output"):
                tensor = self._enter(dict(places_in(args, kwargs))[boundary.place], boundary.activation)
                if boundary.kind == "cut":
                    tensor = own_part(tensor, boundary.dim, boundary.segments, self.rank, self.size)
                args, kwargs = replaced(args, kwargs, boundary.place, tensor)
        leaving = next((boundary for boundary in here if boundary.kind in ("leave", "lookup")), None)
        if leaving is None:
            result = function(*args, **kwargs)
        elif leaving.kind == "lookup":
            result = self._look_up(leaving, function, args, kwargs)
        else:
            result = self._leave(leaving, function, args, kwargs)
        for boundary in here:
            if boundary.kind == "enter" and boundary.place == "output":
                result = self._enter(result, boundary.activation)
            elif boundary.kind == "enter" and boundary.place.startswith("output."):
                number = int(boundary.place.split(".")[1])
                entered = self._enter(result[number], boundary.activation)
                result = type(result)([entered if at == number else each for at, each in enumerate(result)])
        return result

    def _enter(self, tensor: Tensor, activation: int) -> Tensor:
        """The tensor, whose gradient is summed over ranks."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        entered, place = self.entered(), (activation, id(tensor))
        if place not in entered:
            entered[place] = (tensor, cast(Tensor, Enter.apply(tensor, self.total)))
        return entered[place][1]

    def _leave(self, boundary: Boundary, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The sum over ranks of what a function gives; its bias is added once."""
        bias = dict(places_in(args, kwargs))[boundary.bias] if boundary.bias else None
        if bias is not None:
            args, kwargs = replaced(args, kwargs, boundary.bias, torch.zeros_like(bias))
        result = cast(Tensor, Leave.apply(function(*args, **kwargs), self.total))
        return result if bias is None else result + bias

    def _look_up(self, boundary: Boundary, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Rows of this rank's own tokens, zeros for others, summed over ranks."""
        segments = self.plan.parameter(boundary.parameters[0]).segments
        ((start, stop),) = bounds(segments, self.rank, self.size)
        held = list(places_in(args, kwargs))
        place, tokens = next((at, each) for at, each in held if torch.is_tensor(each) and not each.is_floating_point())
        own = (tokens >= start) & (tokens < stop)
        args, kwargs = replaced(args, kwargs, place, torch.where(own, tokens - start, 0))
        padding = next(((at, each) for at, each in held if at in ("2", "padding_idx") and each is not None), None)
        if padding is not None:
            inside = start <= padding[1] < stop
            args, kwargs = replaced(args, kwargs, padding[0], padding[1] - start if inside else None)
        found = function(*args, **kwargs).masked_fill(~own.unsqueeze(-1), 0)
        return cast(Tensor, Leave.apply(found, self.total))


class Enter(torch.autograd.Function):
    """What all ranks have goes into what each has a part of: its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.total(gradients[0]), None


class Leave(torch.autograd.Function):
    """The sum over ranks of what each has a part of; a gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Total) -> Tensor:
        return total(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def own_part(tensor: Tensor, dim: int, segments: tuple[int, ...], rank: int, size: int) -> Tensor:
    """A rank's part of a tensor: of each segment along dim, which repeat as often as there is room."""
    repeated = segments * (tensor.shape[dim] // sum(segments))
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in bounds(repeated, rank, size)]
    return torch.cat(pieces, dim)


@contextlib.contextmanager
def rewritten(model: nn.Module, plan: TensorPlan, size: int) -> Iterator[None]:
    """While it is entered, the plan's integer attributes are divided by size."""
    changed = []
    for each in plan.rewrites:
        held: Any = model.get_submodule(each.module)
        *path, name = each.attribute.split(".")
        for step in path:
            held = getattr(held, step)
        changed.append((held.__dict__, name, held.__dict__[name]))
        held.__dict__[name] = each.value // size
    try:
        yield
    finally:
        for values, name, value in changed:
            values[name] = value
