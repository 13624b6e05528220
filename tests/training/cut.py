"""Shard parameters over the ranks of a test as recipes do: by FSDP, or tensor parallel and FSDP.

`place_model` shards parameters, `shard_like` a full tensor (a gradient, say) in the same way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from recipe_lib.ops.dtensor_shards import locate_local_part


@dataclass(frozen=True)
class Cut:
    """How parameters are sharded."""

    # "rows": FSDP over all ranks. "rows, then rows", "columns, then rows": first tensor parallel
    # over 2 ranks along the first or the second dimension, then FSDP.
    how: str
    ranks: int  # of the process group


class _ParameterModule(nn.Module):
    """A module for `fully_shard`, which takes no bare parameters."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params.values())


def place_model(params: dict[str, nn.Parameter], cut: Cut) -> dict[str, nn.Parameter]:
    """Return the parameters by name, sharded, with the same values. A collective.

    params: the full parameters, the same on all ranks; the dict may be changed.
    """
    full = {name: parameter.detach().clone() for name, parameter in params.items()}
    mesh: Any = init_device_mesh("cpu", (cut.ranks,), mesh_dim_names=("data",))
    if cut.how != "rows":
        mesh = init_device_mesh("cpu", (cut.ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        dim = 0 if cut.how.startswith("rows") else 1
        for name, parameter in params.items():
            parts = parameter.detach().chunk(2, dim=dim)
            shard = DTensor.from_local(
                parts[mesh["tensor"].get_local_rank()].contiguous(),
                device_mesh=mesh["tensor"],
                placements=[Shard(dim)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            params[name] = nn.Parameter(shard)
    module = _ParameterModule(params)
    fully_shard(module, mesh=mesh["data"])
    sharded = dict(zip(params, module.params, strict=True))
    for name, parameter in sharded.items():
        parameter.detach().to_local().copy_(shard_like(full[name], parameter).to_local())
    return sharded


def shard_like(full: Tensor, like: Any) -> Any:
    """Return a full tensor as a DTensor, sharded as `like` is."""
    local, start = locate_local_part(like.detach())
    bounds = zip(start, local.shape, strict=True)
    part = full[tuple(slice(first, first + size) for first, size in bounds)]
    return DTensor.from_local(
        part.clone().contiguous(),
        device_mesh=like.device_mesh,
        placements=like.placements,
        run_check=False,
        shape=full.shape,
        stride=torch.empty(full.shape, device="meta").stride(),
    )
