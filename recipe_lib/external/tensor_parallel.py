"""Tensor parallel for a model that nobody wrote a plan for: the plan is inferred, proven, and then
run.

Every rank traces one forward of the model without memory (`recipe_lib.external.tensor_plan`).
Before its weights are read, a small model of the same class has to pass the certificate of its own
plan, which must treat every parameter as the large one's does.

With DoRA the plan is that of LoRA. What DoRA adds is a number for each output: the trained length
over the matrix's own, which is computed beside the calls that the plan counts. A rank has the
outputs of its rows, or of a matrix that is cut by columns all of them, whose squares are summed
over the ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from recipe_lib.adapters.layers import AdaptedMatrix
from recipe_lib.adapters.quantized import QuantizedLinear, can_cut
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.external.plan_executor import build_ranks, make_total, run_by_plan
from recipe_lib.external.tensor_plan.exchanges import enter, exchange, take_parameter_part
from recipe_lib.external.tensor_plan.sharding_plan import (
    ParameterPlan,
    ShardingPlan,
    compute_bounds,
)
from recipe_lib.models.decoder import LogitTransform
from recipe_lib.ops.dtensor_shards import Runs, get_local
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, wait
from recipe_lib.ops.head_losses import HeadLoss, run_head_loss
from recipe_lib.parallel.tensor import place_parameter
from recipe_lib.parallel.world import World

_LENGTHS = "lora_magnitude_vector"
# Of an adapted linear, before DoRA does anything else: the product, and the adapter's two.
_CALLS = 3


def shard_module(
    model: Any, plan: ShardingPlan, parallel: ParallelConfig, world: World
) -> dict[str, str]:
    """Shard a meta model's matrices by its proven plan over each tensor-parallel group, in place.

    Returns what each parameter's gradient is on a rank, as `recipe_lib.parallel.shard_tensors`
    does. Raises ConfigError where the ranks can share nothing of it, SetupError where its forward
    cannot be traced.
    """
    group = world.tensor
    assert group is not None
    # Without what other ranks of a pipeline have. Exchanges stay: those in other ranks' modules are
    # not come to.
    elsewhere = model.modules_elsewhere
    plan = replace(
        plan,
        parameters=tuple(
            each for each in plan.parameters if each.name.rpartition(".")[0] not in elsewhere
        ),
        rewrites=tuple(each for each in plan.rewrites if each.module not in elsewhere),
    )
    head = model.output_head()
    columns = 0
    if head is not None:
        plan, columns = exclude_head_exchanges(plan, model, head)
    stored = _take_parts(model, plan, group) | share_lengths(model, plan, group)
    place_parameters(model, plan=plan, mesh=world.mesh["tensor"], stored=stored)
    runs = {each.name: find_runs(each, group.size) for each in plan.parameters}
    # Lengths are cut as the rows of their matrix, which may hold several.
    rows = {name: f"{name.removesuffix(_LENGTHS)}lora_B.weight" for name in stored}
    runs |= {name: runs[rows[name]] for name in stored if name.endswith(_LENGTHS)}
    model.runs = {name: run for name, run in runs.items() if run is not None}
    if head is not None:
        head.forward = partial(project, head, group, columns)
    run_by_plan(
        model,
        plan=plan,
        ranks=build_ranks(group),
        head=head,
        gathers_again=parallel.tensor_regather_in_backward != "false",
    )
    names = {name for name, _ in model.named_parameters()}
    of_stored = {
        name: "full" if placement.is_replicate() else "sharded"
        for name, placement in stored.items()
    }
    return {each.name: each.gradient for each in plan.parameters if each.name in names} | of_stored


def _take_parts(model: nn.Module, plan: ShardingPlan, group: Group) -> dict[str, Placement]:
    """Tell quantized linears which part of their weight this rank computes with; return how their
    storage lies on the group.

    Raises ConfigError where a part is not one of whole blocks, or of rows that follow one another.
    """
    placements: dict[str, Placement] = {}
    quantized = {
        name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)
    }
    for name, module in quantized.items():
        weight = plan.parameter(f"{name}.weight")
        outputs = module.out_features
        inputs = module.in_features
        by_columns = weight.dim == 1
        codes: Placement = Replicate()
        factors: Placement = Replicate()
        if weight.dim >= 0:
            is_one = len(weight.segments) == 1
            if not is_one or not can_cut(
                inputs,
                out_features=outputs,
                kind=module.kind,
                parts=group.size,
                by_columns=by_columns,
            ):
                reason = (
                    "has no whole blocks of 64 numbers for each rank"
                    if is_one
                    else "holds several matrices"
                )
                raise ConfigError(
                    f"parallel.tensor={group.size}: lora.quantize_base={module.kind} keeps {name}"
                    f" in blocks, and it {reason}; set lora.quantize_base=none,"
                    f" {'int8, ' if is_one else ''}or parallel.tensor=1"
                )
            (part,) = compute_bounds(weight.segments, group.rank, group.size)
            module.take_part(*((0, outputs), part) if by_columns else (part, (0, inputs)))
            codes = Shard(weight.dim)
            if not by_columns and module.kind != "nf4":
                factors = Shard(0)
        placements[f"{name}.weight_codes"] = codes
        placements[f"{name}.weight_factors"] = factors
        if module.weight_scales is not None:
            placements[f"{name}.weight_scales"] = codes
    return placements


def exclude_head_exchanges(
    plan: ShardingPlan, model: nn.Module, head: nn.Module
) -> tuple[ShardingPlan, int]:
    """Take out of the plan what the output projection is exchanged for, which the loss does itself;
    return the size of the vocabulary, too.

    0 tokens: no rank has a part of the vocabulary, all have the whole.
    """
    of_head = {id(parameter) for parameter in head.parameters()}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in of_head}
    axis = next((axis for axis in plan.axes if axis.output and names & set(axis.parameters)), None)
    if axis is None:
        return plan, 0
    kept = tuple(
        each
        for each in plan.boundaries
        if each.kind in ("lookup", "gather", "slice")
        or not each.parameters
        or not set(each.parameters) <= names
    )
    return replace(plan, boundaries=kept), plan.parameter(axis.parameters[0]).shape[0]


def place_parameters(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    stored: Mapping[str, Placement] | None = None,
) -> None:
    """Make each parameter a DTensor of this rank's part of it; one that several modules own stays
    one.

    stored: how parameters that are no weights of the class lie on the group.
    """
    plans = {each.name: each for each in plan.parameters}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in placed:
                path = names[id(parameter)]
                placed[id(parameter)] = (
                    place_parameter(parameter, stored[path], mesh)
                    if stored and path in stored
                    else _take_parameter_part(parameter, plans[path], mesh)
                )
            setattr(module, name, placed[id(parameter)])


def _take_parameter_part(
    parameter: nn.Parameter, plan: ParameterPlan, mesh: DeviceMesh
) -> nn.Parameter:
    full = parameter.detach()
    part = take_parameter_part(full, plan, rank=mesh.get_local_rank(), size=mesh.size())
    placement = Shard(plan.dim) if plan.dim >= 0 else Replicate()
    placed = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(placed, parameter.requires_grad)


def find_runs(plan: ParameterPlan, size: int) -> Runs | None:
    """Return the runs of the file that follow one another on the ranks; None where the order is
    that of the file.
    """
    if plan.dim < 0 or len(plan.segments) < 2:
        return None
    parts = (compute_bounds(plan.segments, rank, size) for rank in range(size))
    return plan.dim, tuple(chain.from_iterable(parts))


# The output projection, of a part of the vocabulary.


def project(
    head: Any,
    group: Group,
    vocabulary: int,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
    after: LogitTransform | None = None,
) -> Tensor:
    """Compute the loss, or logits, as `LinearHead.forward`; each rank has hidden `[..., d]` whole,
    and its part of `vocabulary`, 0: all of it.

    The ranks share the tokens out for the loss. Without labels all get all logits: for short texts.
    """
    weight, bias = map(get_local, (head.weight, head.bias))
    after = after or LogitTransform()
    if labels is None and vocabulary:
        return _gather_columns(
            F.linear(enter(hidden, make_total(group)), weight, bias), vocabulary, group
        )
    if labels is None:
        return F.linear(hidden, weight, bias)
    parts = None
    if vocabulary:
        hidden = exchange(
            hidden.flatten(0, -2),
            lambda whole: whole.chunk(group.size)[group.rank].clone(),
            lambda gradient: wait(start_gather(gradient, group)),
        )
        parts = replace(group, columns=-(-vocabulary // group.size))
    return run_head_loss(
        head_loss,
        hidden=hidden,
        weight=weight,
        labels=labels,
        softcap=after.softcap,
        finish=after.finish,
        bias=bias,
        group=parts,
    )


def _gather_columns(logits: Tensor, vocabulary: int, group: Group) -> Tensor:
    """Gather logits `[..., v / t]` of each rank to `[..., v]` on all; each rank's gradient is that
    of the same loss.
    """
    columns = -(-vocabulary // group.size)
    num_columns = logits.shape[-1]

    def gather(part: Tensor) -> Tensor:
        padded = F.pad(part, (0, columns - num_columns)).flatten(0, -2)
        gathered = wait(start_gather(padded.t(), group))[:vocabulary]
        return gathered.t().reshape(*part.shape[:-1], vocabulary)

    return exchange(
        logits, gather, lambda gradient: gradient.narrow(-1, group.rank * columns, num_columns)
    )


def share_lengths(model: nn.Module, plan: ShardingPlan, group: Group) -> dict[str, Placement]:
    """Make adapted linears with DoRA compute lengths as one rank; return how each one's trained
    lengths lie on the group.

    Raises ConfigError where ranks would exchange what DoRA changes, or cut an adapter by its rank.
    """
    late = {each.module for each in plan.boundaries if each.call >= _CALLS}
    placements: dict[str, Placement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, AdaptedMatrix) or module.lora_magnitude_vector is None:
            continue
        first = plan.parameter(f"{name}.lora_A.weight")
        second = plan.parameter(f"{name}.lora_B.weight")
        if first.dim == 0 or name in late:
            raise ConfigError(
                f"parallel.tensor={group.size}: lora.dora: the plan exchanges what the adapter of"
                f" {name} gives, before DoRA has changed it; set lora.dora=false, or"
                " parallel.tensor=1"
            )
        module.compute_weight_norms = partial(  # type: ignore[method-assign]
            _gather_norms, module, group, first.dim, second.dim
        )
        module.compute_relative_lengths = partial(  # type: ignore[method-assign]
            _compute_relative_lengths, module, group, first.dim
        )
        placements[f"{name}.{_LENGTHS}"] = Shard(0) if second.dim == 0 else Replicate()
    return placements


def _compute_relative_lengths(module: AdaptedMatrix, group: Group, cut: int) -> Tensor:
    """Return what this rank's outputs are multiplied by; no call of the forward that the plan
    counts.
    """
    with torch._C.DisableTorchFunction():
        lengths: Tensor = get_local(module.lora_magnitude_vector)
        return lengths / _compute_norms(module, group, cut)


@torch.no_grad()
def _compute_norms(module: AdaptedMatrix, group: Group, cut: int) -> Tensor:
    """Compute the norms of this rank's rows of the matrix. cut: the dimension of A that is cut, 1:
    as the matrix's columns are.
    """
    weight = (
        module.dequantize_local_weight()
        if isinstance(module, QuantizedLinear)
        else get_local(module.weight)
    )
    weight = weight.t() if module.transposed else weight
    first, second = map(get_local, (module.lora_A.weight, module.lora_B.weight))
    norms = module.compute_norms_with(lambda start, stop: weight[start:stop], first, second)
    return norms if cut != 1 else all_reduce(norms.square(), "sum", group).sqrt()


def _gather_norms(module: AdaptedMatrix, group: Group, cut: int, rows: int) -> Tensor:
    """Gather the norms of all rows, in the order of the ranks. A collective."""
    norms = _compute_norms(module, group, cut)
    return wait(start_gather(norms, group)) if rows == 0 else norms
