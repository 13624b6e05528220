"""Parameters cut among the ranks of a test as recipes cut them: by FSDP, and by tensor parallel
before it.
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
    """how: `rows`, by FSDP over all ranks; `rows, then rows` or `columns, then rows`: first by
    tensor parallel of 2.
    """

    how: str
    ranks: int


class _Holder(nn.Module):
    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params.values())


def place_model(params: dict[str, nn.Parameter], cut: Cut) -> dict[str, nn.Parameter]:
    """The same values, of which each rank has its part. Collective."""
    whole = {name: parameter.detach().clone() for name, parameter in params.items()}
    mesh: Any = init_device_mesh("cpu", (cut.ranks,), mesh_dim_names=("data",))
    if cut.how != "rows":
        mesh = init_device_mesh("cpu", (cut.ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        dim = 0 if cut.how.startswith("rows") else 1
        for name, parameter in params.items():
            part = (
                parameter.detach().chunk(2, dim=dim)[mesh["tensor"].get_local_rank()].contiguous()
            )
            shared = DTensor.from_local(part, mesh["tensor"], [Shard(dim)], run_check=False, shape=parameter.shape,
                                        stride=parameter.stride())  # fmt: skip
            params[name] = nn.Parameter(shared)
    holder = _Holder(params)
    fully_shard(holder, mesh=mesh["data"])
    found = dict(zip(params, holder.held, strict=True))
    for name, parameter in found.items():
        parameter.detach().to_local().copy_(own_part(whole[name], parameter).to_local())
    return found


def own_part(whole: Tensor, like: Any) -> Any:
    """A whole tensor's part on this rank, cut as `like` is."""
    local, start = locate_local_part(like.detach())
    part = whole[tuple(slice(at, at + size) for at, size in zip(start, local.shape, strict=True))]
    return DTensor.from_local(part.clone().contiguous(), like.device_mesh, like.placements, run_check=False,
                              shape=whole.shape, stride=torch.empty(whole.shape, device="meta").stride())  # fmt: skip
