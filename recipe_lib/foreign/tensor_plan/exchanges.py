"""A call with boundaries, as one rank makes it: the same for ranks that train and for the threads of a proof."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipe_lib.foreign.tensor_plan.calls import places_in
from recipe_lib.foreign.tensor_plan.certificate import own_part, replaced
from recipe_lib.foreign.tensor_plan.plan import Boundary, TensorPlan, bounds


@dataclass(frozen=True)
class Exchanges:
    """Which rank of how many, and how they exchange.

    enter: `fn(tensor, activation)` to the tensor whose gradient is summed over ranks, once for each activation. leave:
    `fn(partial)` to the sum over ranks.
    """

    plan: TensorPlan
    rank: int
    size: int
    enter: Callable[[Tensor, int], Tensor]
    leave: Callable[[Tensor], Tensor]

    def call(self, here: list[Boundary], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does a call that has boundaries. Returns what the model is to get."""
        for boundary in here:
            if boundary.kind in ("enter", "cut") and not boundary.place.startswith("output"):
                tensor = self.enter(dict(places_in(args, kwargs))[boundary.place], boundary.activation)
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
                result = self.enter(result, boundary.activation)
            elif boundary.kind == "enter" and boundary.place.startswith("output."):
                number = int(boundary.place.split(".")[1])
                entered = self.enter(result[number], boundary.activation)
                result = type(result)([entered if at == number else each for at, each in enumerate(result)])
        return result

    def _leave(self, boundary: Boundary, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The sum over ranks of what a function gives; its bias is added once."""
        bias = dict(places_in(args, kwargs))[boundary.bias] if boundary.bias else None
        if bias is not None:
            args, kwargs = replaced(args, kwargs, boundary.bias, torch.zeros_like(bias))
        result = self.leave(function(*args, **kwargs))
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
        return self.leave(function(*args, **kwargs).masked_fill(~own.unsqueeze(-1), 0))
