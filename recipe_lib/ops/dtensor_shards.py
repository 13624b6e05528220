"""Find a rank's part of a sharded tensor, and gather the full tensor from all parts.

Optimizers, checkpoints and weight loading call these with parameters that may be plain tensors, or
DTensors sharded by FSDP, by tensor parallelism, or by both. "Part" is the local tensor of a rank.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

# (dimension, runs): a parameter, all ranks' parts together, consists of these runs `(start, stop)`
# along the dimension of a file's tensor, in this order.
Runs = tuple[int, tuple[tuple[int, int], ...]]


def get_detached_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached, in the tensor's own memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def get_local(parameter: Tensor | None) -> Any:
    """Return this rank's part of a parameter, connected by autograd; None for None."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def wrap_local(value: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded as `value` is, with `part` as this rank's part.

    It is `part` itself if `value` is no DTensor.
    """
    if not isinstance(value, DTensor):
        return part
    # `from_local` would move the part to the device of the mesh.
    return DTensor(part, value._spec, requires_grad=False)  # type: ignore[call-arg]


def locate_local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a parameter, in its own memory, and its offset in the full tensor.

    The offset has the index of the part's first element in each dimension.
    """
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)


def gather_full(part: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Gather the full tensor of parts that are sharded as the parameter is; a collective.

    part: this rank's. shape: of the full tensor, None: the parameter's; in the dimensions that are
    sharded it must be the parameter's.
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
        # FSDP has sharded the parts of a tensor-parallel group along the same dimension 0, which
        # torch calls a strided shard. FSDP's parts are gathered first, then the group's: torch
        # would gather both at once, with a warning, and slowly.
        (strided_dim,) = strided
        mesh_names = mesh.mesh_dim_names or ()
        (tensor_dim,) = [
            dim for dim in range(strided_dim + 1, mesh.ndim) if placements[dim].is_shard(0)
        ]
        tensor_mesh = mesh[mesh_names[tensor_dim]]
        rows = -(-sizes[0] // tensor_mesh.size())  # of each rank; the last ones may have fewer
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
    """Return the full tensor of parts with these placements; sizes: its shape."""
    # With shape and stride, without which `from_local` would take all parts to be equally long.
    return DTensor.from_local(
        part,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(sizes),
        stride=tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))),
    ).full_tensor()
