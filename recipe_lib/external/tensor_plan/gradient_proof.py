"""Checks a plan's gradients in one process: a thread for each rank, which sum as ranks would.

A forward that is right says nothing on gradients: a boundary that is missing, or a whole parameter whose gradient is
taken for full, leaves the loss as it is and the gradients wrong.
"""

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch

from recipe_lib.external.tensor_plan.calls import CallKey, Calls, output_values, tensors_in
from recipe_lib.external.tensor_plan.exchanges import (
    Collectives,
    Entered,
    Exchanges,
    own_part,
    rewritten,
    trained_length,
)
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan, bounds

# Relative error of a gradient above which it is not rounding; some forwards compute in float32 whatever they are given.
WRONG = 1e-3
_PATIENCE = 60.0  # seconds for another rank, which has failed if it is not there by then


class _RankGroup:
    """Ranks that hand each other tensors, in the same order."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = tensor.detach()
        self.barrier.wait()
        found = list(self._slots)
        self.barrier.wait()
        return found

    def collectives(self, rank: int) -> Collectives:
        def total(tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack(self.exchange(rank, tensor)).sum(0)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat(self.exchange(rank, tensor))

        def scatter(tensor: torch.Tensor) -> torch.Tensor:
            return total(tensor).chunk(self.size)[rank].clone()

        return Collectives(total, gather, scatter)


class _GatherVocabulary(torch.autograd.Function):
    """Logits of all ranks, for a loss that each rank has whole."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: _RankGroup, rank: int) -> torch.Tensor:
        pieces = group.exchange(rank, tensor)
        ctx.sizes, ctx.rank = [piece.shape[-1] for piece in pieces], rank
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].split(ctx.sizes, -1)[ctx.rank], None, None


class _Rank(Calls):
    """Runs one rank's part of a plan among the threads of a group."""

    def __init__(self, model: torch.nn.Module, plan: ShardingPlan, group: _RankGroup, rank: int, length: int):
        super().__init__(model)
        entered: Entered = {}
        self.boundaries = plan.boundaries_by_call()
        collectives = group.collectives(rank)
        self.exchanges = Exchanges(plan, lambda: rank, group.size, collectives, lambda: entered, lambda: length)

    def on_call(self, key: CallKey, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does a call, with its boundaries."""
        here = self.boundaries.get(key)
        return function(*args, **kwargs) if here is None else self.exchanges.call(here, function, args, kwargs)


def gradient_errors(model: torch.nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]) -> dict[str, float]:
    """For every parameter, how far the gradient that ranks come to is from the whole model's, relative to its norm.

    model: small, on the CPU; float64 tells rounding from mistakes. The loss is a random combination of all outputs.
    Raises RuntimeError where a rank fails.
    """
    copies = [copy.deepcopy(model) for _ in range(size)]  # before a forward, which some models keep the state of
    values = {name: _trained(parameter.detach()) for name, parameter in model.named_parameters()}
    whole = _gradients(model, values, inputs, contextlib.nullcontext(), lambda tensor: tensor)
    group = _RankGroup(size)
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            found[rank] = _of_rank(copies[rank], plan, group, rank, inputs)
        except Exception as error:  # noqa: BLE001  (a thread hands on what it raises)
            found[rank] = error
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        first = next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
        raise RuntimeError(f"{type(first).__name__}: {first}") from first
    # Some gradients are nothing but rounding, as that of a bias of keys is: no error is measured against less.
    precision = max(torch.finfo(each.dtype).eps for each in whole.values())
    least = precision**0.5 * max(float(each.norm()) for each in whole.values())
    return {each.name: _error(plan, each.name, whole, found, least) for each in plan.parameters if each.name in whole}


def gradient_failures(model: torch.nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]) -> list[str]:
    """A line for each parameter whose gradient is not the whole model's; empty if ranks come to the same.

    model: small, in float32. In float64, or in float32 where that cannot be run.
    """
    try:
        errors = gradient_errors(copy.deepcopy(model).double(), plan, size, inputs)
    except (RuntimeError, ValueError, TypeError):
        try:
            errors = gradient_errors(copy.deepcopy(model), plan, size, inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            return [f"{size} ranks: forward and backward fail: {(str(error).splitlines() or [''])[0]}"]
    return [
        f"{size} ranks: the gradient of {name} is off by {error:.0e} of its norm"
        for name, error in errors.items()
        if not error <= WRONG
    ]


def _of_rank(
    model: torch.nn.Module, plan: ShardingPlan, group: _RankGroup, rank: int, inputs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    values = {}
    for name, parameter in model.named_parameters():
        each = plan.parameter(name)
        value = parameter.detach()
        value = value if each.dim < 0 else own_part(value, each.dim, each.segments, rank, group.size)
        values[name] = _trained(value.clone())
    parts = [bounds((axis.size,), rank, group.size)[0] for axis in plan.axes if axis.output]
    local = {stop - start for start, stop in parts}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = _GatherVocabulary.apply(tensor, group, rank)
        return gathered

    with torch.enable_grad():
        length = trained_length(next(tensors_in(inputs)), plan, group.size)
    with rewritten(model, plan, group.size):
        run = _Rank(model, plan, group, rank, length)
        return _gradients(model, values, inputs, run, lambda each: whole(each) if each.shape[-1] in local else each)


def _trained(value: torch.Tensor) -> torch.Tensor:
    return value.requires_grad_(value.is_floating_point())


def _gradients(
    model: torch.nn.Module, values: dict[str, torch.Tensor], inputs: Any, run: Any, whole: Callable[[Any], Any]
) -> dict[str, torch.Tensor]:
    with torch.enable_grad():
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        with run:
            output = torch.func.functional_call(model, values, (), copies)
        generator = torch.Generator().manual_seed(1)
        loss: Any = 0.0
        for tensor in tensors_in(output_values(output)):
            if tensor.requires_grad:
                tensor = whole(tensor)
                loss = loss + (tensor * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)).sum()
        names = [name for name, value in values.items() if value.requires_grad]
        found = torch.autograd.grad(loss, [values[name] for name in names], allow_unused=True)
    return {
        name: torch.zeros_like(values[name]) if each is None else each for name, each in zip(names, found, strict=True)
    }


def _error(
    plan: ShardingPlan, name: str, whole: dict[str, torch.Tensor], found: list[dict[str, torch.Tensor]], least: float
) -> float:
    each = plan.parameter(name)
    expected = whole[name]
    ours = [gradients[name] for gradients in found]
    if each.dim >= 0:
        ranks = range(len(ours))
        pairs = [(ours[rank], own_part(expected, each.dim, each.segments, rank, len(ours))) for rank in ranks]
    elif each.gradient == "partial":
        pairs = [(torch.stack(ours).sum(0), expected)]
    else:
        pairs = [(one, expected) for one in ours]
    worst = max(float((left - right).norm()) for left, right in pairs)
    return worst / max(float(expected.norm()), least, 1e-30)
