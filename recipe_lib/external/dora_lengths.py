"""DoRA's lengths where ranks share a matrix by an inferred plan.

The plan is that of LoRA. What DoRA adds is a number for each output: the trained length over the matrix's own, which is
computed beside the calls that the plan counts. A rank has the outputs of its rows, or of a matrix that is cut by
columns all of them, whose squares are summed over the ranks.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from recipe_lib.adapters.layers import AdaptedMatrix
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.errors import ConfigError
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.ops.dtensor_shards import Runs, local
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, wait

_LENGTHS = "lora_magnitude_vector"
_CALLS = 3  # of an adapted linear, before DoRA does anything else: the product, and the adapter's two


def share_lengths(model: nn.Module, plan: ShardingPlan, group: Group) -> dict[str, Placement]:
    """Makes adapted linears with DoRA compute lengths as one rank; how each one's trained lengths lie on the group.

    Raises ConfigError where ranks would exchange what DoRA changes, or cut an adapter by its rank.
    """
    late = {each.module for each in plan.boundaries if each.call >= _CALLS}
    found: dict[str, Placement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, AdaptedMatrix) or module.lora_magnitude_vector is None:
            continue
        first, second = plan.parameter(f"{name}.lora_A.weight"), plan.parameter(f"{name}.lora_B.weight")
        if first.dim == 0 or name in late:
            raise ConfigError(
                f"parallel.tensor={group.size}: lora.dora: the plan exchanges what the adapter of {name} gives, before "
                "DoRA has changed it; set lora.dora=false, or parallel.tensor=1"
            )
        module.weight_norms = partial(_all_norms, module, group, first.dim, second.dim)  # type: ignore[method-assign]
        module.relative_lengths = partial(_relative, module, group, first.dim)  # type: ignore[method-assign]
        found[f"{name}.{_LENGTHS}"] = Shard(0) if second.dim == 0 else Replicate()
    return found


def runs_of_lengths(runs: Mapping[str, Runs], stored: Mapping[str, Placement]) -> dict[str, Runs]:
    """Those of lengths that are cut as the rows of their matrix, which holds several."""
    owners = {name: name.removesuffix(_LENGTHS) for name in stored if name.endswith(_LENGTHS)}
    return {name: runs[f"{owner}lora_B.weight"] for name, owner in owners.items() if f"{owner}lora_B.weight" in runs}


def _relative(module: AdaptedMatrix, group: Group, cut: int) -> Tensor:
    """What this rank's outputs are multiplied by; no call of the forward that the plan counts."""
    with torch._C.DisableTorchFunction():
        lengths: Tensor = local(module.lora_magnitude_vector)
        return lengths / _norms(module, group, cut)


@torch.no_grad()
def _norms(module: AdaptedMatrix, group: Group, cut: int) -> Tensor:
    """Of this rank's rows of the matrix. cut: the dimension of A that is cut, 1: as the matrix's columns are."""
    weight = module.part_weight() if isinstance(module, QuantizedLinear) else local(module.weight)
    weight = weight.t() if module.transposed else weight
    first, second = local(module.lora_A.weight), local(module.lora_B.weight)
    found = module.lengths_with(lambda start, stop: weight[start:stop], first, second)
    return found if cut != 1 else all_reduce(found.square(), "sum", group).sqrt()


def _all_norms(module: AdaptedMatrix, group: Group, cut: int, rows: int) -> Tensor:
    """Of all rows, in the order of the ranks. A collective."""
    found = _norms(module, group, cut)
    return wait(start_gather(found, group)) if rows == 0 else found
