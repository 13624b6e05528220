"""Where a rank's part of a parameter lies in a checkpoint's tensor.

Tensor parallel cuts a matrix that holds several others (queries, keys and values, gate and up) within each of them, so
that the ranks' parts one behind the other are not in the file's order. `model.tensor_runs` says of such a parameter
along which dimension, and which runs `(start, stop)` of the file follow one another.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

Runs = tuple[int, tuple[tuple[int, int], ...]]


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter (it shares memory with it), and where it begins in the full tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offset)


def gathered(part: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
    """The whole tensor of parts that lie on the ranks as the parameter's do. A collective.

    shape: of the whole, which is the parameter's in the dimensions that it is cut along (None: in all of them). What
    FSDP cut within parts of a tensor-parallel group is put together first: torch's own way warns, and is slow.
    """
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    sizes = list(parameter.shape if shape is None else shape)
    strided = [dim for dim, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if strided:
        (dim,), names = strided, mesh.mesh_dim_names or ()
        (cut,) = [at for at in range(dim + 1, mesh.ndim) if placements[at].is_shard(0)]
        inner = mesh[names[cut]]
        rows = -(-sizes[0] // inner.size())  # the last of a group may have fewer
        own = max(0, min(rows, sizes[0] - rows * inner.get_local_rank()))
        part = _from_parts(part, mesh[names[dim]], [Shard(0)], [own, *sizes[1:]])
        mesh, placements = inner, [Shard(0)]
    return _from_parts(part, mesh, placements, sizes)


def _from_parts(part: Tensor, mesh: DeviceMesh, placements: list[Placement], sizes: list[int]) -> Tensor:
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    placed = DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(sizes), stride=tuple(strides))
    return placed.full_tensor()


def runs_of(model: nn.Module, name: str) -> Runs | None:
    """The dimension and the runs of a parameter that is not in the file's order; None for all others."""
    held: dict[str, Runs] = getattr(model, "tensor_runs", {})
    return held.get(name)


def own_parts(model: nn.Module, name: str, parameter: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """This rank's part of a parameter in pieces, which share memory with it, and where each begins in the file."""
    local, offset = local_part(parameter)
    found = runs_of(model, name)
    if found is None:
        return [(local, offset)]
    dim, runs = found
    pieces, at = [], -offset[dim]  # of a run, counted from where this rank's part begins
    for start, stop in runs:
        low, high = max(at, 0), min(at + stop - start, local.shape[dim])
        if low < high:
            begins: Any = (*offset[:dim], start + low - at, *offset[dim + 1 :])
            pieces.append((local.narrow(dim, low, high - low), begins))
        at += stop - start
    return pieces


def in_file_order(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """A whole parameter, gathered from the ranks, as the file has it."""
    return ordered(whole, runs_of(model, name))


def ordered(whole: Tensor, found: Runs | None) -> Tensor:
    """A whole tensor whose runs follow one another, in the order of the file."""
    if found is None:
        return whole
    dim, runs = found
    result = whole.new_empty(whole.shape)
    at = 0
    for start, stop in runs:
        result.narrow(dim, start, stop - start).copy_(whole.narrow(dim, at, stop - start))
        at += stop - start
    return result
