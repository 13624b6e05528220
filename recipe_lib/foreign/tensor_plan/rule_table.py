"""What a rule for an aten operator works on, the table of rules, and values that meta tensors do not have."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipe_lib.foreign.tensor_plan.axes import Node, unify
from recipe_lib.foreign.tensor_plan.calls import tensors_in

Dims = list[Node]
Rule = Callable[["Step"], list[Dims] | None]
RULES: dict[str, Rule] = {}


class Step:
    """One operator at work: its arguments by name, the dimensions of its inputs, and what it says beside its outputs.

    contractions: dimensions that it sums over, of which inputs. lookup: it picks rows by token. uniform: what comes out
    is the same everywhere, whatever its size. values: it differs from place to place, and no input has those places.
    ordered: it counts or sorts. added: what a product is added to.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        place: str,
        dims: Callable[[torch.Tensor], Dims],
    ):
        self.args, self.kwargs, self.outputs, self.dims = args, kwargs, outputs, dims
        self.name = str(function._schema.name).removeprefix("aten::")
        self.reason = f"{self.name} in {place}"
        self.contractions: list[tuple[Node, torch.Tensor, torch.Tensor]] = []
        self.lookup = self.uniform = self.values = self.ordered = False
        self.added: torch.Tensor | None = None
        self._schema = function._schema.arguments

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by the name that the operator's schema gives it."""
        if name in self.kwargs:
            return self.kwargs[name]
        for number, argument in enumerate(self._schema):
            if argument.name == name:
                if number < len(self.args):
                    return self.args[number]
                return argument.default_value if argument.has_default_value() else default
        return default

    def first(self) -> torch.Tensor:
        """The first tensor argument."""
        return next(tensors_in((self.args, self.kwargs)))

    def shape(self) -> list[int]:
        """The sizes of the first output."""
        return list(self.outputs[0].shape)

    def contract(self, left: Node, right: Node, left_tensor: torch.Tensor, right_tensor: torch.Tensor) -> None:
        """Sums over a dimension that both tensors have."""
        unify(left, right, self.reason)
        self.contractions.append((left, left_tensor, right_tensor))

    def join(self, left: Node, right: Node) -> Node:
        """The dimension that comes of two under broadcasting."""
        if left.size == 1:
            return right
        if right.size != 1:
            unify(left, right, self.reason)
        return left

    def fresh(self, sizes: Sequence[int], blocked: bool = False) -> Dims:
        """New dimensions, of which nothing is known, or which cannot be cut."""
        return [Node(size, blocked=self.reason if blocked else "") for size in sizes]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators by their names without namespace and overload."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def broadcast(step: Step, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> Dims:
    """The dimensions of tensors that come together element by element."""
    found: Dims = [Node(1) for _ in shape]
    for tensor in tensors:
        dims = step.dims(tensor)
        offset = len(shape) - len(dims)
        for number, node in enumerate(dims):
            if shape[offset + number] == node.size:
                found[offset + number] = step.join(found[offset + number], node)
    for number, size in enumerate(shape):
        if found[number].size != size:  # no input has it
            found[number] = Node(size)
    return found


def assumed_result(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives that asks a meta tensor for its values: made up; None for any other operator."""
    name = str(function._schema.name).removeprefix("aten::")
    tensors = list(tensors_in((args, kwargs)))
    if not tensors or tensors[0].device.type != "meta":
        return None
    first = tensors[0]
    if name == "_local_scalar_dense":
        return False if first.dtype is torch.bool else 0.0 if first.is_floating_point() else 0
    if name == "nonzero":
        return first.new_zeros((3, first.dim()), dtype=torch.long)
    if name == "equal":
        return False
    if name == "_to_copy" and torch.device(kwargs.get("device") or "meta").type != "meta":
        return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=kwargs["device"])
    if name == "_grouped_mm":  # the meta kernel takes bfloat16 alone
        return first.new_empty((first.shape[0], args[1].shape[-1]))
    if name == "bincount":
        return first.new_zeros((max(kwargs.get("minlength", 0), 1),))
    return None
