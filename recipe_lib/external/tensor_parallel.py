"""Shard an external model over a tensor-parallel group, by a plan that was inferred and proven.

`ModuleSpec.shard_tensors` calls `shard_module` for a meta model with its adapters. Parameters
become DTensors, the class' forward that of one rank (`plan_executor`), and the output projection's
forward `compute_loss_or_logits`. `apply_plan` uses parts of the file for a user's own model. A plan
says how each parameter is cut (in segments, such as q, k and v of a fused matrix), and at which
calls ranks exchange tensors (a boundary).
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
from recipe_lib.external.plan_executor import build_ranks, make_all_reduce, run_by_plan
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

_MAGNITUDE = "lora_magnitude_vector"  # attribute of an adapted linear: DoRA's magnitudes
# Index of B's product among the torch function calls of an adapted linear. Before it come the
# products of the weight and of A, and the latter's scaling.
_B_PRODUCT_CALL = 3


def shard_module(
    model: Any, plan: ShardingPlan, parallel: ParallelConfig, world: World
) -> dict[str, str]:
    """Shard a meta model's parameters by its proven plan over the tensor-parallel group, in place.

    Returns name of a parameter -> what its gradient on a rank is: "sharded" (of its part), "full"
    (the same on all ranks) or "partial" (to be summed over ranks). Raises ConfigError for a
    quantized or DoRA-adapted linear that the plan cuts in a way that these do not allow.
    """
    group = world.tensor
    assert group is not None
    # Parameters of other pipeline ranks' modules are left out. Their exchanges may stay: they are
    # never reached.
    absent_modules = model.modules_elsewhere
    plan = replace(
        plan,
        parameters=tuple(
            parameter
            for parameter in plan.parameters
            if parameter.name.rpartition(".")[0] not in absent_modules
        ),
        rewrites=tuple(
            rewrite for rewrite in plan.rewrites if rewrite.module not in absent_modules
        ),
    )
    head = model.get_output_head()
    vocab_size = 0  # rows of the whole projection, if ranks share them
    if head is not None:
        plan, vocab_size = exclude_head_exchanges(plan, model, head)
    # Parameters that are no weights of the class, and so not in the plan: the codes of quantized
    # weights with their scales, and DoRA's magnitudes.
    extra_placements = _assign_quantized_parts(model, plan, group) | _shard_magnitudes(
        model, plan, group
    )
    place_parameters(model, plan=plan, mesh=world.mesh["tensor"], extra_placements=extra_placements)
    runs = {parameter.name: find_runs(parameter, group.size) for parameter in plan.parameters}
    # Magnitudes are cut as B's rows, which may be those of several matrices fused into one.
    b_names = {name: f"{name.removesuffix(_MAGNITUDE)}lora_B.weight" for name in extra_placements}
    runs |= {name: runs[b_names[name]] for name in extra_placements if name.endswith(_MAGNITUDE)}
    # Under the names of the class, too, which the files' tensors have.
    runs |= {
        model.tensor_names[name]: run for name, run in runs.items() if name in model.tensor_names
    }
    model.runs = {name: run for name, run in runs.items() if run is not None}
    if head is not None:
        head.forward = partial(compute_loss_or_logits, head, group, vocab_size)
    run_by_plan(
        model,
        plan=plan,
        ranks=build_ranks(group),
        head=head,
        gathers_again=parallel.tensor_regather_in_backward != "false",
    )
    names = {name for name, _ in model.named_parameters()}
    gradients = {
        parameter.name: parameter.gradient
        for parameter in plan.parameters
        if parameter.name in names
    }
    return gradients | {
        name: "full" if placement.is_replicate() else "sharded"
        for name, placement in extra_placements.items()
    }


def _assign_quantized_parts(
    model: nn.Module, plan: ShardingPlan, group: Group
) -> dict[str, Placement]:
    """Give quantized linears the part of their weight that this rank computes with, in place.

    Returns the placements of their codes, factors and scales by name. Raises ConfigError where a
    part would not be whole quantization blocks.
    """
    placements: dict[str, Placement] = {}
    quantized = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    for name, module in quantized.items():
        weight = plan.parameter(f"{name}.weight")
        is_row_parallel = weight.dim != module.output_dim  # each rank has a part of the columns
        codes: Placement = Replicate()
        factors: Placement = Replicate()
        if weight.dim >= 0:
            if not can_cut(
                in_features=module.in_features,
                out_features=weight.segments[0],
                kind=module.kind,
                parts=group.size,
                by_columns=is_row_parallel,
            ):
                raise ConfigError(
                    f"parallel.tensor={group.size}: lora.quantize_base={module.kind} keeps {name}"
                    " in blocks, and it has no whole blocks of 64 numbers for each rank; set"
                    " lora.quantize_base=none, int8, or parallel.tensor=1"
                )
            runs = module.num_experts * len(weight.segments)
            part, *_ = compute_bounds(weight.segments, group.rank, group.size)
            if is_row_parallel:
                module.take_part((0, module.out_features), part)
            elif runs > 1:
                module.take_part_of_runs(runs, group.rank, group.size)
            else:
                module.take_part(part, (0, module.in_features))
            codes = Shard(1 if is_row_parallel or runs > 1 else 0)
            # One factor a row, except in nf4, whose factors of all blocks every rank keeps.
            if not is_row_parallel and module.kind != "nf4":
                factors = codes
        placements[f"{name}.weight_codes"] = codes
        placements[f"{name}.weight_factors"] = factors
        if module.weight_scales is not None:
            placements[f"{name}.weight_scales"] = codes
    return placements


def exclude_head_exchanges(
    plan: ShardingPlan, model: nn.Module, head: nn.Module
) -> tuple[ShardingPlan, int]:
    """Return the plan without the output projection's exchanges, and the size of the vocabulary.

    `compute_loss_or_logits` makes these exchanges together with the loss. The size is 0 where every
    rank has the whole projection; the plan is the same then.
    """
    head_ids = {id(parameter) for parameter in head.parameters()}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in head_ids}
    axis = next((axis for axis in plan.axes if axis.output and names & set(axis.parameters)), None)
    if axis is None:
        return plan, 0
    head_boundaries = {
        boundary
        for boundary in plan.boundaries
        if boundary.parameters and set(boundary.parameters) <= names
    }
    # The lookup of a tied embedding and exchanges of tokens stay: the layers need them.
    boundaries = tuple(
        boundary
        for boundary in plan.boundaries
        if boundary not in head_boundaries or boundary.kind in ("lookup", "gather", "slice")
    )
    return replace(plan, boundaries=boundaries), plan.parameter(axis.parameters[0]).shape[0]


def place_parameters(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    extra_placements: Mapping[str, Placement] | None = None,
) -> None:
    """Replace each parameter by a DTensor of this rank's part, in place; tied ones stay tied.

    mesh: of one dimension. extra_placements: name -> placement, of parameters that the plan does
    not have.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    placed_parameters: dict[int, nn.Parameter] = {}  # by id of the parameter that was replaced
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in placed_parameters:
                path = names[id(parameter)]
                placed_parameters[id(parameter)] = (
                    place_parameter(parameter, extra_placements[path], mesh)
                    if extra_placements and path in extra_placements
                    else _shard_parameter(parameter, plan.parameter(path), mesh)
                )
            setattr(module, name, placed_parameters[id(parameter)])


def _shard_parameter(
    parameter: nn.Parameter, plan: ParameterPlan, mesh: DeviceMesh
) -> nn.Parameter:
    full = parameter.detach()
    part = take_parameter_part(full, plan, rank=mesh.get_local_rank(), size=mesh.size())
    placement = Shard(plan.dim) if plan.dim >= 0 else Replicate()
    dtensor = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(dtensor, parameter.requires_grad)


def find_runs(plan: ParameterPlan, size: int) -> Runs | None:
    """Return (dim, runs) for a parameter whose order on the ranks is not the checkpoint's.

    runs: (start, stop) along dim in the checkpoint, in the order of the ranks. A fused matrix is
    cut within each of its segments, so that each rank has one run of every segment. None: the
    parameter is not cut, or the orders are the same.
    """
    if plan.dim < 0 or len(plan.segments) < 2:
        return None
    parts = (compute_bounds(plan.segments, rank, size) for rank in range(size))
    return plan.dim, tuple(chain.from_iterable(parts))


# Run the output projection, of which each rank may have a part of the vocabulary.


def compute_loss_or_logits(
    head: Any,
    group: Group,
    vocab_size: int,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
    logit_transform: LogitTransform | None = None,
) -> Tensor:
    """Compute the loss, or logits `[..., v]` without labels: the head's forward on each rank.

    vocab_size: rows of the whole projection, of which the head has this rank's; 0: the head has
    all. hidden: `[..., d]`, the same on all ranks. labels: one for each token of `hidden`.
    head_loss: see `ops.head_losses`; None: the sum of the tokens' cross-entropies.
    logit_transform: what the model does to its logits; None: nothing. With labels each rank passes
    its share of the tokens to the loss, which exchanges them over the group. Without, all ranks get
    all logits, which is for short texts.
    """
    weight, bias = map(get_local, (head.weight, head.bias))
    logit_transform = logit_transform or LogitTransform()
    if labels is None and vocab_size:
        # `enter` is Megatron's f: the identity, whose backward sums the gradient over ranks.
        return _gather_columns(
            F.linear(enter(hidden, make_all_reduce(group)), weight, bias), vocab_size, group
        )
    if labels is None:
        return F.linear(hidden, weight, bias)
    vocab_group = None
    if vocab_size:
        # Forward takes this rank's tokens, without a collective. Backward gathers: each rank has
        # the gradient of its own tokens of `hidden`.
        hidden = exchange(
            hidden.flatten(0, -2),
            lambda all_hidden: all_hidden.chunk(group.size)[group.rank].clone(),
            lambda gradient: wait(start_gather(gradient, group)),
        )
        # The loss needs the number of entries of the vocabulary on each rank (`Group.columns`).
        vocab_group = replace(group, columns=-(-vocab_size // group.size))
    return run_head_loss(
        head_loss,
        hidden=hidden,
        weight=weight,
        labels=labels,
        softcap=logit_transform.softcap,
        finish=logit_transform.finish,  # other elementwise operations, before the softcap
        bias=bias,
        group=vocab_group,
    )


def _gather_columns(logits: Tensor, vocab_size: int, group: Group) -> Tensor:
    """Gather logits `[..., v / t]` of each of t ranks to `[..., v]` on all.

    Backward takes this rank's columns of the gradient, without a sum: all ranks compute one loss.
    """
    columns = -(-vocab_size // group.size)
    num_columns = logits.shape[-1]

    def gather(part: Tensor) -> Tensor:
        # The last rank's part may be smaller, and a gather takes equal ones.
        padded = F.pad(part, (0, columns - num_columns)).flatten(0, -2)
        gathered = wait(start_gather(padded.t(), group))[:vocab_size]
        return gathered.t().reshape(*part.shape[:-1], vocab_size)

    return exchange(
        logits, gather, lambda gradient: gradient.narrow(-1, group.rank * columns, num_columns)
    )


# Shard linears with DoRA. Their plan is that of LoRA. DoRA multiplies each output channel by the
# trained magnitude over the norm of the adapted weight's row. It computes these norms outside the
# calls that the plan counts. Where a weight is row-parallel (cut along dimension 1), the squares of
# the norms are summed over ranks.


def _shard_magnitudes(model: nn.Module, plan: ShardingPlan, group: Group) -> dict[str, Placement]:
    """Make linears with DoRA compute norms over ranks, in place; return placements of magnitudes.

    Raises ConfigError where ranks would exchange an adapter's output before DoRA has changed it, or
    where A is cut along the adapter's rank r.
    """
    # An exchange at B's product or later is of what DoRA still multiplies by its factors. With a
    # bias the indices of DoRA's later calls are not those of LoRA's plan, either.
    late_modules = {
        boundary.module for boundary in plan.boundaries if boundary.call >= _B_PRODUCT_CALL
    }
    placements: dict[str, Placement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, AdaptedMatrix) or module.lora_magnitude_vector is None:
            continue
        lora_a = plan.parameter(f"{name}.lora_A.weight")
        lora_b = plan.parameter(f"{name}.lora_B.weight")
        if lora_a.dim == 0 or name in late_modules:
            raise ConfigError(
                f"parallel.tensor={group.size}: lora.dora: the plan exchanges what the adapter of"
                f" {name} gives, before DoRA has changed it; set lora.dora=false, or"
                " parallel.tensor=1"
            )
        module.compute_weight_norms = partial(  # type: ignore[method-assign]
            _gather_norms, module, group, lora_a_dim=lora_a.dim, lora_b_dim=lora_b.dim
        )
        module.compute_relative_lengths = partial(  # type: ignore[method-assign]
            _compute_relative_lengths, module, group, lora_a_dim=lora_a.dim
        )
        placements[f"{name}.{_MAGNITUDE}"] = Shard(0) if lora_b.dim == 0 else Replicate()
    return placements


def _compute_relative_lengths(module: AdaptedMatrix, group: Group, lora_a_dim: int) -> Tensor:
    """Return the factors of this rank's output channels: magnitudes over norms.

    lora_a_dim: see `_compute_norms`.
    """
    # Not counted among the calls of the forward: the plan is that of LoRA, which has none of these.
    with torch._C.DisableTorchFunction():
        magnitudes: Tensor = get_local(module.lora_magnitude_vector)
        return magnitudes / _compute_norms(module, group, lora_a_dim)


@torch.no_grad()
def _compute_norms(module: AdaptedMatrix, group: Group, lora_a_dim: int) -> Tensor:
    """Compute the norms `[out]` of this rank's rows of the adapted matrix.

    lora_a_dim: the dimension along which A is cut. 1: the matrix is row-parallel, so that ranks
    have parts of every row, and the squares of the parts' norms are summed: a collective. -1: A is
    whole.
    """
    weight = (
        module.dequantize_local_weight()
        if isinstance(module, QuantizedLinear)
        else get_local(module.weight)
    )
    weight = weight.t() if module.transposed else weight
    lora_a, lora_b = map(get_local, (module.lora_A.weight, module.lora_B.weight))
    norms = module.compute_norms_with(lambda start, stop: weight[start:stop], lora_a, lora_b)
    return norms if lora_a_dim != 1 else all_reduce(norms.square(), "sum", group).sqrt()


def _gather_norms(module: AdaptedMatrix, group: Group, lora_a_dim: int, lora_b_dim: int) -> Tensor:
    """Gather the norms of all rows, in the order of the ranks. A collective.

    lora_a_dim: see `_compute_norms`. lora_b_dim: the dimension along which B is cut; 0: each rank
    has other rows; else all ranks have all rows, and nothing is gathered.
    """
    norms = _compute_norms(module, group, lora_a_dim)
    return wait(start_gather(norms, group)) if lora_b_dim == 0 else norms
