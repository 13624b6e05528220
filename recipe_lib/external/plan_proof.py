"""The proof that an inferred plan is right, on a small model that has random weights on the host.

`certify` runs in one process, with a thread for each rank. A rank has its own, smaller parameters
and nothing of the others', takes the attributes that the plan rewrites, and runs the forward that
trains (`plan_executor`), whose exchanges are between threads. What the model gives has to be what
the whole model gives, and so has the gradient of every parameter: a forward that is right says
nothing of a boundary that is missing there, or of a whole parameter whose gradient is taken for
full.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.external.plan_executor import frame_forward
from recipe_lib.external.tensor_plan.exchanges import Ranks, exchange, take_parameter_part
from recipe_lib.external.tensor_plan.sharding_plan import (
    ShardingPlan,
    compute_bounds,
    find_period,
    get_output_values,
    list_tensors,
    make_pattern,
)


def find_plan_difference(large: ShardingPlan, small: ShardingPlan) -> str:
    """Find what one of the plans does with a kind of parameter, or at a call, and the other does
    not; empty: nothing.
    """
    of_large = _describe_treatments(large)
    of_small = _describe_treatments(small)
    for name in sorted(of_large.keys() | of_small.keys()):
        large_treatments = sorted(of_large.get(name, ()))
        small_treatments = sorted(of_small.get(name, ()))
        if large_treatments != small_treatments:
            return f"{name} has {large_treatments}, there {small_treatments}"
    return ""


def _describe_treatments(plan: ShardingPlan) -> dict[str, set[str]]:
    """Describe how a plan holds each kind of parameter, and what it exchanges in each kind of
    module.
    """
    treatments: dict[str, set[str]] = {}
    for each in plan.parameters:
        # As often as there are groups of heads, which may be fewer.
        once = find_period(list(each.segments))
        segments = f"{len(once)} {len(each.segments) > len(once)}"
        said = (
            f"{each.role} {each.dim} {each.gradient} {segments} {each.whole} {each.after_reduction}"
        )
        treatments.setdefault(make_pattern(each.name), set()).add(said)
    for boundary in plan.boundaries:
        said = (
            f"{boundary.kind} {boundary.call} {boundary.place} {boundary.function} {boundary.bias}"
            f" {boundary.taken} {boundary.dim} {boundary.tokens_first} {boundary.mean}"
            f" {boundary.whole}"
        )
        treatments.setdefault(make_pattern(boundary.module), set()).add(said)
    return treatments


# Relative error above which it is not rounding; some forwards compute in float32 whatever they are
# given.
WRONG = 1e-3
_PATIENCE = 60.0  # seconds for another rank, which has failed if it is not there by then
_OUTPUT = "output "  # and its number: a name that no parameter has


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result of a proof."""

    checked: int  # comparisons
    failures: tuple[str, ...]  # a line each


def certify(model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]) -> Certificate:
    """Run a small model on the CPU as each of `size` ranks would, in float64, or in float32 if it
    takes no other.

    model: with real weights, on the CPU, which are not changed. plan: of this very model. inputs:
    of one forward. Raises SetupError for a size that the plan does not allow.
    """
    if not all(axis.vocabulary or axis.size % size == 0 for axis in plan.axes):
        raise SetupError(
            f"certificate: {size} ranks cannot share this plan's axes, expected one of"
            f" {list(plan.legal_sizes)}"
        )
    try:
        errors = measure_rank_errors(copy.deepcopy(model).double(), plan, size, inputs)
    except (RuntimeError, ValueError, TypeError):
        try:
            errors = measure_rank_errors(copy.deepcopy(model).float(), plan, size, inputs)
        except (RuntimeError, ValueError, TypeError) as error:
            line = (str(error).splitlines() or [""])[0]
            return Certificate(0, (f"{size} ranks: forward and backward fail: {line}",))
    failures = []
    for name, relative in errors.items():
        if not relative <= WRONG:
            what = "what the model gives" if name.startswith(_OUTPUT) else f"the gradient of {name}"
            failures.append(f"{size} ranks: {what} is off by {relative:.0e} of its norm")
    return Certificate(size * len(errors), tuple(failures))


def measure_rank_errors(
    model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]
) -> dict[str, float]:
    """Measure how far what ranks come to is from what the whole model does, relative to its norm.

    By name for the gradient of each parameter, and for each of the model's outputs, of which the
    loss is a random combination. model: small, on the CPU; float64 tells rounding from mistakes.
    Raises RuntimeError where a rank fails.
    """
    # Copied before a forward, which some models keep the state of.
    models = [copy.deepcopy(model).eval() for _ in range(size + 1)]
    expected = _compute_results(
        models[size], models[size], inputs=inputs, gather=lambda tensor: tensor
    )
    group = _RankGroup(size)
    by_rank: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            by_rank[rank] = _compute_rank_results(
                models[rank], plan, group=group, rank=rank, inputs=inputs
            )
        except Exception as error:  # noqa: BLE001  (a thread hands on what it raises)
            by_rank[rank] = error
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [each for each in by_rank if isinstance(each, Exception)]
    if failed:
        first = next(
            (each for each in failed if not isinstance(each, threading.BrokenBarrierError)),
            failed[0],
        )
        raise RuntimeError(f"a rank fails: {first}") from first
    # Some gradients are nothing but rounding, as that of a bias of keys is: no error is measured
    # against less.
    precision = max(torch.finfo(each.dtype).eps for each in expected.values())
    least = precision**0.5 * max(
        float(each.norm()) for name, each in expected.items() if not name.startswith(_OUTPUT)
    )
    return {
        name: _measure_error(plan, name, expected=expected[name], by_rank=by_rank, least=least)
        for name in expected
    }


class _RankGroup:
    """Ranks that hand each other tensors, in the same order."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._slots[rank] = tensor.detach()
        self.barrier.wait()
        tensors = list(self._slots)
        self.barrier.wait()
        return tensors

    def ranks(self, rank: int) -> Ranks:
        """Return one of them."""

        def total(tensor: Tensor) -> Tensor:
            return torch.stack(self.exchange(rank, tensor)).sum(0)

        def gather(tensor: Tensor) -> Tensor:
            return torch.cat(self.exchange(rank, tensor))

        def scatter(tensor: Tensor) -> Tensor:
            return total(tensor).chunk(self.size)[rank].clone()

        return Ranks(rank, self.size, total=total, gather=gather, scatter=scatter)


def _compute_rank_results(
    model: nn.Module, plan: ShardingPlan, group: _RankGroup, rank: int, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    for name, parameter in model.named_parameters():
        parameter.data = take_parameter_part(parameter.data, plan.parameter(name), rank, group.size)
    own_tokens = [
        compute_bounds((axis.size,), rank, group.size)[0] for axis in plan.axes if axis.output
    ]

    def gather_tokens(logits: Tensor) -> Tensor:
        """Gather the logits of all ranks, for a loss that each rank has whole."""
        for start, stop in own_tokens:
            if logits.shape[-1] == stop - start:
                take_part = partial(torch.narrow, dim=-1, start=start, length=stop - start)
                return exchange(
                    logits, lambda part: torch.cat(group.exchange(rank, part), -1), take_part
                )
        return logits

    return _compute_results(
        model,
        frame_forward(model, plan, group.ranks(rank), head=None, gathers_again=False),
        inputs=inputs,
        gather=gather_tokens,
    )


@torch.enable_grad()
def _compute_results(
    model: nn.Module,
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    gather: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Compute what a model gives, and the gradients of its parameters, by name. gather: makes a
    whole output of a rank's.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    output = forward(
        **{
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in inputs.items()
        }
    )
    generator = torch.Generator().manual_seed(1)
    loss: Any = 0.0
    results: dict[str, Tensor] = {}
    for number, tensor in enumerate(list_tensors(get_output_values(output))):
        if tensor.requires_grad:
            full = gather(tensor)
            results[f"{_OUTPUT}{number}"] = full.detach()
            loss = (
                loss + (full * torch.randn(full.shape, generator=generator, dtype=full.dtype)).sum()
            )
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return results | {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _measure_error(
    plan: ShardingPlan, name: str, expected: Tensor, by_rank: list[dict[str, Tensor]], least: float
) -> float:
    ours = [results[name] for results in by_rank]
    if name.startswith(_OUTPUT):
        pairs = [(output, expected) for output in ours]
        least = 0.0
    elif (treatment := plan.parameter(name)).gradient == "partial":
        pairs = [(torch.stack(ours).sum(0), expected)]
    else:
        pairs = [
            (gradient, take_parameter_part(expected, treatment, rank, len(ours)))
            for rank, gradient in enumerate(ours)
        ]
    if any(left.shape != right.shape for left, right in pairs):
        return float("inf")
    worst = max(float((left - right).norm()) for left, right in pairs)
    return worst / max(float(expected.norm()), least, 1e-30)
