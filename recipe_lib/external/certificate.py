"""Prove that an inferred tensor-parallel plan is right, on a small model with random weights.

`certify` runs in one process on the CPU, with a thread for each rank. A rank has its own parts of
parameters and nothing of the others', and runs the same forward as in training (`plan_executor`),
whose exchanges are between threads here. The outputs, and the gradients of all parameters, have to
be those of the whole model. Outputs alone are not enough: they are right also where a sum of
gradients over ranks is missing.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.external.plan_executor import build_rank_forward
from recipe_lib.external.tensor_plan.exchanges import Ranks, exchange, take_parameter_part
from recipe_lib.external.tensor_plan.sharding_plan import (
    ShardingPlan,
    compute_bounds,
    find_period,
    get_output_values,
    make_pattern,
)
from recipe_lib.ops.kept_tensors import list_tensors


def find_plan_difference(large: ShardingPlan, small: ShardingPlan) -> str:
    """Describe the first parameter or module that two plans treat differently; empty: none.

    Names have `*` for numbers of layers, since the models have different numbers of these.
    """
    treatments_of_large = _describe_treatments(large)
    treatments_of_small = _describe_treatments(small)
    for name in sorted(treatments_of_large.keys() | treatments_of_small.keys()):
        large_treatments = sorted(treatments_of_large.get(name, ()))
        small_treatments = sorted(treatments_of_small.get(name, ()))
        if large_treatments != small_treatments:
            return f"{name} has {large_treatments}, there {small_treatments}"
    return ""


def _describe_treatments(plan: ShardingPlan) -> dict[str, set[str]]:
    """Return texts on how a plan cuts each parameter, and what it exchanges in each module.

    Keys are names with `*` for numbers. Sizes are left out: the small model has others.
    """
    treatments: dict[str, set[str]] = {}
    for parameter in plan.parameters:
        # Segments repeat once for each group of heads, of which a small model may have fewer.
        period = find_period(list(parameter.segments))
        segments = f"{len(period)} {len(parameter.segments) > len(period)}"
        treatment = (
            f"{parameter.role} {parameter.dim} {parameter.gradient} {segments} {parameter.whole}"
            f" {parameter.after_reduction}"
        )
        treatments.setdefault(make_pattern(parameter.name), set()).add(treatment)
    for boundary in plan.boundaries:
        treatment = (
            f"{boundary.kind} {boundary.call} {boundary.place} {boundary.function} {boundary.bias}"
            f" {boundary.taken} {boundary.dim} {boundary.tokens_first} {boundary.mean}"
            f" {boundary.whole}"
        )
        treatments.setdefault(make_pattern(boundary.module), set()).add(treatment)
    return treatments


# Relative error above which a result is wrong. Rounding to float32 stays below it: some forwards
# compute in float32 even with float64 weights.
MAX_RELATIVE_ERROR = 1e-3
_PATIENCE = 60.0  # seconds that a rank waits for the others before it counts one as failed
_OUTPUT = "output "  # prefix of an output's name in results; no parameter's name has a space


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result of a proof."""

    checked: int  # number of comparisons
    failures: tuple[str, ...]  # one line for each that failed; empty: the plan is right


def certify(model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]) -> Certificate:
    """Prove a plan by running a small model as each of `size` ranks would, on the CPU.

    model: with values, on the CPU; it is not changed. plan: the one of this very model. inputs:
    keyword arguments of one forward. It runs in float64, or in float32 where that fails. Where both
    fail the certificate has the error. Raises SetupError for a size that does not divide the
    plan's axes; that of the vocabulary may be cut unevenly.
    """
    if not all(axis.vocabulary or axis.size % size == 0 for axis in plan.axes):
        raise SetupError(
            f"certificate: {size} ranks cannot share this plan's axes, expected one of"
            f" {list(plan.legal_sizes)}"
        )
    try:
        errors = measure_rank_errors(
            copy.deepcopy(model).double(), plan=plan, size=size, inputs=inputs
        )
    except (RuntimeError, ValueError, TypeError):
        try:
            errors = measure_rank_errors(
                copy.deepcopy(model).float(), plan=plan, size=size, inputs=inputs
            )
        except (RuntimeError, ValueError, TypeError) as error:
            line = (str(error).splitlines() or [""])[0]
            return Certificate(0, (f"{size} ranks: forward and backward fail: {line}",))
    failures = []
    for name, relative in errors.items():
        if not relative <= MAX_RELATIVE_ERROR:  # in this form nan is wrong, too
            subject = (
                "what the model gives" if name.startswith(_OUTPUT) else f"the gradient of {name}"
            )
            failures.append(f"{size} ranks: {subject} is off by {relative:.0e} of its norm")
    return Certificate(size * len(errors), tuple(failures))


def measure_rank_errors(
    model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]
) -> dict[str, float]:
    """Measure the relative errors of the ranks' outputs and gradients, by name.

    An error is the norm of the difference over that of the whole model's result; inf where shapes
    differ. Names are those of the parameters, for their gradients, and "output N" for the Nth
    tensor of the output. The loss is a random linear combination of the outputs. model: small, on
    the CPU. Raises RuntimeError where a rank's forward or backward raises.
    """
    # Copied before any forward, which may leave state in a model. The last is the whole model.
    models = [copy.deepcopy(model).eval() for _ in range(size + 1)]
    expected = _compute_results(
        models[size], models[size], inputs=inputs, gather=lambda tensor: tensor
    )
    group = _RankGroup(size)
    by_rank: list[Any] = [None] * size

    def run_rank(rank: int) -> None:
        try:
            by_rank[rank] = _compute_rank_results(
                models[rank], plan, group=group, rank=rank, inputs=inputs
            )
        except Exception as error:  # noqa: BLE001  (raised below, in the main thread)
            by_rank[rank] = error
            group.barrier.abort()  # the other ranks would wait in a collective

    with ThreadPoolExecutor(size) as pool:
        pool.map(run_rank, range(size))
    errors = [result for result in by_rank if isinstance(result, Exception)]
    if errors:
        # Ranks that wait for one that failed have a BrokenBarrierError, which says nothing.
        first = next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)),
            errors[0],
        )
        raise RuntimeError(f"a rank fails: {first}") from first
    # Some gradients are 0 but for rounding, such as that of a bias of keys: errors of gradients are
    # relative to at least this norm.
    precision = max(torch.finfo(result.dtype).eps for result in expected.values())
    smallest_norm = precision**0.5 * max(
        float(result.norm()) for name, result in expected.items() if not name.startswith(_OUTPUT)
    )
    return {
        name: _measure_error(
            plan, name, expected=expected[name], by_rank=by_rank, smallest_norm=smallest_norm
        )
        for name in expected
    }


class _RankGroup:
    """A process group of threads, one a rank; all make the same collectives in the same order."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Any] = [None] * size  # by rank, its tensor in the running collective

    def all_gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order, without gradients."""
        self._slots[rank] = tensor.detach()
        self.barrier.wait()
        tensors = list(self._slots)
        self.barrier.wait()  # no rank writes its next tensor before all have read these
        return tensors

    def build_ranks(self, rank: int) -> Ranks:
        """Build the collectives of one rank: sum, gather and reduce-scatter along dimension 0."""

        def all_reduce(tensor: Tensor) -> Tensor:
            return torch.stack(self.all_gather(rank, tensor)).sum(0)

        def all_gather(tensor: Tensor) -> Tensor:
            return torch.cat(self.all_gather(rank, tensor))

        def reduce_scatter(tensor: Tensor) -> Tensor:
            return all_reduce(tensor).chunk(self.size)[rank].clone()

        return Ranks(
            rank,
            self.size,
            all_reduce=all_reduce,
            all_gather=all_gather,
            reduce_scatter=reduce_scatter,
        )


def _compute_rank_results(
    model: nn.Module, plan: ShardingPlan, group: _RankGroup, rank: int, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    """Compute outputs and gradients as one rank; see `_compute_results`.

    model: a copy of the whole model, whose parameters are cut in place.
    """
    for name, parameter in model.named_parameters():
        parameter.data = take_parameter_part(
            parameter.data, plan=plan.parameter(name), rank=rank, size=group.size
        )
    # The rank's range of the vocabulary.
    own_tokens = [
        compute_bounds((axis.size,), rank, group.size)[0] for axis in plan.axes if axis.output
    ]

    def gather_logits(logits: Tensor) -> Tensor:
        """Gather logits `[..., v]` of all ranks, for a loss that each rank computes whole."""
        for start, stop in own_tokens:
            if logits.shape[-1] == stop - start:
                take_part = partial(torch.narrow, dim=-1, start=start, length=stop - start)
                return exchange(
                    logits, lambda part: torch.cat(group.all_gather(rank, part), -1), take_part
                )
        return logits

    return _compute_results(
        model,
        build_rank_forward(model, plan, group.build_ranks(rank), head=None, gathers_again=False),
        inputs=inputs,
        gather=gather_logits,
    )


@torch.enable_grad()
def _compute_results(
    model: nn.Module,
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    gather: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Compute a model's outputs and the gradients of its parameters, by name.

    forward: the model's own, or that of a rank. gather: makes a whole output of a rank's part.
    """
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
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
    for index, tensor in enumerate(list_tensors(get_output_values(output))):
        if tensor.requires_grad:
            full = gather(tensor)
            results[f"{_OUTPUT}{index}"] = full.detach()
            loss = (
                loss + (full * torch.randn(full.shape, generator=generator, dtype=full.dtype)).sum()
            )
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return results | {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _measure_error(
    plan: ShardingPlan,
    name: str,
    expected: Tensor,
    by_rank: list[dict[str, Tensor]],
    smallest_norm: float,
) -> float:
    """Return the largest relative error of the ranks' results of one name.

    Partial gradients are summed over ranks first; a cut one is compared with its part of
    `expected`. smallest_norm: the error of a gradient is relative to at least this norm.
    """
    rank_results = [results[name] for results in by_rank]
    if name.startswith(_OUTPUT):
        pairs = [(output, expected) for output in rank_results]
        smallest_norm = 0.0
    elif (treatment := plan.parameter(name)).gradient == "partial":
        pairs = [(torch.stack(rank_results).sum(0), expected)]
    else:
        pairs = [
            (
                gradient,
                take_parameter_part(expected, plan=treatment, rank=rank, size=len(rank_results)),
            )
            for rank, gradient in enumerate(rank_results)
        ]
    if any(result.shape != target.shape for result, target in pairs):
        return float("inf")
    worst = max(float((result - target).norm()) for result, target in pairs)
    # Not 0, which an output of zeros has.
    return worst / max(float(expected.norm()), smallest_norm, 1e-30)
