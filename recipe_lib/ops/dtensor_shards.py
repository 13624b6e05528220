"""A rank's part of a sharded tensor, and the whole tensor of all parts."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

# Dimension, and the runs `(start, stop)` of a file's tensor that follow one another in a parameter.
Runs = tuple[int, tuple[tuple[int, int], ...]]


def get_detached_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached; it shares memory with it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def get_local(parameter: Tensor | None) -> Any:
    """Return a rank's own part; its gradient is this rank's too."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def wrap_local(value: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that lies on the ranks as `value` does, with this as its part on this
    rank.
    """
    if not isinstance(value, DTensor):
        return part
    return DTensor(part, value._spec, requires_grad=False)  # type: ignore[call-arg]  # `from_local` would move it


def locate_local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter (it shares memory with it), and where it begins in the full
    tensor.
    """
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)


def gather_full(part: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """The whole tensor of parts that lie on the ranks as the parameter's do. A collective.

    shape: of the whole, which is the parameter's in the dimensions that it is cut along (None: in
    all of them). What FSDP cut within parts of a tensor-parallel group is put together first:
    torch's own way warns, and is slow.
    """
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    sizes = list(parameter.shape if shape is None else shape)
    strided = [
        dim for dim, placement in enumerate(placements) if isinstance(placement, _StridedShard)
    ]
    if strided:
        (dim,), names = strided, mesh.mesh_dim_names or ()
        (cut,) = [at for at in range(dim + 1, mesh.ndim) if placements[at].is_shard(0)]
        inner = mesh[names[cut]]
        rows = -(-sizes[0] // inner.size())  # the last of a group may have fewer
        own = max(0, min(rows, sizes[0] - rows * inner.get_local_rank()))
        part = _gather_parts(part, mesh[names[dim]], [Shard(0)], [own, *sizes[1:]])
        mesh, placements = inner, [Shard(0)]
    return _gather_parts(part, mesh, placements, sizes)


def _gather_parts(
    part: Tensor, mesh: DeviceMesh, placements: list[Placement], sizes: list[int]
) -> Tensor:
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    placed = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(sizes), stride=tuple(strides)
    )
    return placed.full_tensor()
