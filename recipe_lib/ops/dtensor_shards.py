"""A rank's part of a sharded tensor, and the full tensor of all parts."""

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
    """Return this rank's part of a tensor, detached; it shares memory with it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def get_local(parameter: Tensor | None) -> Any:
    """Return this rank's part of a parameter; its gradient is this rank's too."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def wrap_local(value: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that lies on the ranks as `value` does, with `part` as this rank's part."""
    if not isinstance(value, DTensor):
        return part
    # `from_local` would move the part to the device of the mesh.
    return DTensor(part, value._spec, requires_grad=False)  # type: ignore[call-arg]


def locate_local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a parameter, and where it begins in the full tensor.

    The part shares memory with the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)


def gather_full(part: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return the full tensor of parts that lie on the ranks as the parameter's do. A collective.

    shape: of the full tensor, which is the parameter's in the dimensions that it is cut along;
    None: in all of them.
    """
    if not isinstance(parameter, DTensor):
        return part
    mesh = parameter.device_mesh
    placements = list(parameter.placements)
    sizes = list(parameter.shape if shape is None else shape)
    strided = [
        dim for dim, placement in enumerate(placements) if isinstance(placement, _StridedShard)
    ]
    if strided:
        # What FSDP cut within parts of a tensor-parallel group is put together first: torch's own
        # way of gathering both at once warns, and is slow.
        (strided_dim,) = strided
        mesh_names = mesh.mesh_dim_names or ()
        (tensor_dim,) = [
            dim for dim in range(strided_dim + 1, mesh.ndim) if placements[dim].is_shard(0)
        ]
        tensor_mesh = mesh[mesh_names[tensor_dim]]
        rows = -(-sizes[0] // tensor_mesh.size())  # the last of a group may have fewer
        own_rows = max(0, min(rows, sizes[0] - rows * tensor_mesh.get_local_rank()))
        part = _gather_parts(
            part,
            mesh=mesh[mesh_names[strided_dim]],
            placements=[Shard(0)],
            sizes=[own_rows, *sizes[1:]],
        )
        mesh = tensor_mesh
        placements = [Shard(0)]
    return _gather_parts(part, mesh=mesh, placements=placements, sizes=sizes)


def _gather_parts(
    part: Tensor, mesh: DeviceMesh, placements: list[Placement], sizes: list[int]
) -> Tensor:
    # Shape and stride are told: by itself `from_local` would take all parts for equally long.
    return DTensor.from_local(
        part,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(sizes),
        stride=tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))),
    ).full_tensor()
