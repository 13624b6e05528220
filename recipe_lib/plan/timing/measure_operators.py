"""Measures each operator of training steps on this machine, one by one, and what the steps take beyond them."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from recipe_lib.plan.timing.operator_times import fit, operator_key
from recipe_lib.plan.tracing.operator_costs import Cost, cost_of, tensors_in
from recipe_lib.plan.tracing.summed_gradients import ADD_IN_PLACE, is_summed_in_place

# Inputs of so many bytes in turn, so that a call finds none of its own in the caches, as in a step it seldom does.
_IN_TURN = 64 * 2**20
_MOST_COPIES = 128
_SHORT = 0.02  # seconds of all calls so far, below which they are made again
_STEPS = 20


@dataclass
class _TimedCall:
    """An operator with its arguments. count: how often a step calls it with such."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    cost: Cost
    count: int = 0


class _OperatorCalls(TorchDispatchMode):
    """Collects the operators that do work, each with arguments of its kind once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, _TimedCall] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_summed_in_place(func, args, kwargs):
            func = ADD_IN_PLACE
        result = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, result)
        if not cost.is_view and not cost.communicates and (cost.flops or cost.bytes):
            key = (func, _signature(args), _signature(tuple(kwargs.items())))
            call = self.found.setdefault(key, _TimedCall(func, args, kwargs, cost))
            call.count += 1
        return result


def measure_operators(steps: Sequence[tuple[Callable[[], Any], Callable[[], Any]]]) -> dict[str, Any]:
    """`operators`: by name and dtype the numbers of an OperatorTime; `host_seconds`: what a step takes beyond its
    operators for each of them; `recompute_seconds`: the same for each that is computed again in backward. Medians of
    all steps, on a CPU, which computes and issues in turn.

    steps: of small runs, of different sizes, each with the same step whose layers are computed again (activation
    checkpointing); each is called some twenty times.
    """
    points: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    beyond: list[float] = []
    again: list[float] = []
    for step, recomputed in steps:
        calls = _calls_of(step)
        taken = {key: seconds for key, call in calls.items() if (seconds := _call_seconds(call)) is not None}
        for key, seconds in taken.items():
            cost = calls[key].cost
            points[operator_key(cost.name, cost.dtype)].append((cost.flops, cost.bytes, seconds))
        more, count = _beyond(step, calls, taken)
        beyond.append(more / max(1, count))
        longer, larger = _beyond(recomputed, _calls_of(recomputed), taken)
        if larger > count:
            again.append((longer - more) / (larger - count))
    return {
        "operators": {name: asdict(fit(found)) for name, found in sorted(points.items())},
        "host_seconds": max(median(beyond), 1e-7),
        "recompute_seconds": max(median(again), 1e-7) if again else None,
    }


def _calls_of(step: Callable[[], Any]) -> dict[Any, _TimedCall]:
    with _OperatorCalls() as calls:
        step()
    return calls.found


def _beyond(step: Callable[[], Any], calls: Mapping[Any, _TimedCall], taken: Mapping[Any, float]) -> tuple[float, int]:
    """(seconds, operators): what a step takes beyond its operators of known seconds, and how many these are."""
    known = [(calls[key].count, taken[key]) for key in calls if key in taken]
    return _step_seconds(step) - sum(count * seconds for count, seconds in known), sum(count for count, _ in known)


def _step_seconds(step: Callable[[], Any]) -> float:
    for _ in range(3):
        step()
    taken = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return median(taken)


@torch.no_grad()
def _call_seconds(call: _TimedCall) -> float | None:
    """Of one call, the least of two rounds or more; None for one that cannot be made again."""
    size = sum(
        tensor.numel() * tensor.element_size() for tensor in tensors_in((call.args, tuple(call.kwargs.values())))
    )
    copies = max(1, min(_MOST_COPIES, _IN_TURN // max(1, size)))
    try:
        inputs = [tree_map_only(Tensor, _copy, (list(call.args), dict(call.kwargs))) for _ in range(copies)]
        taken = [_round_seconds(call.func, inputs) for _ in range(2)]
    except (RuntimeError, NotImplementedError):
        return None
    while sum(taken) * copies < _SHORT and len(taken) < 7:
        taken.append(_round_seconds(call.func, inputs))
    return min(taken)


def _round_seconds(func: Any, inputs: Sequence[Any]) -> float:
    """Of one call among those with each of the inputs."""
    begun = time.perf_counter()
    for args, kwargs in inputs:
        func(*args, **kwargs)
    return (time.perf_counter() - begun) / len(inputs)


def _copy(tensor: Tensor) -> Tensor:
    """A tensor of its own with the same values and strides; one of one value that is expanded stays so."""
    source = tensor.detach()
    if 0 in source.stride() and source.numel() > 1:
        return source
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype).copy_(source)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return repr(value)
