"""The global gradient norm and clipping by it, over sharded and plain gradients, without waiting for the device."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from recipe_lib.ops.device import kernels_of
from recipe_lib.parallel.parallelize import Parallel

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

# Added to the norm before dividing by it, so that a norm of zero gives a factor of 1 and not a division by zero.
_TINY = 1e-6

# torch sums squares in one fp32 number on a CPU, which is off by 1e-3 at 20 M elements; pieces of this length by 1e-7.
_CPU_PIECE = 16384
_CPU_PIECES = 1024  # at a time: as many as are turned to fp32 together


_Key = tuple[tuple[tuple[DeviceMesh, int], ...], torch.device]  # dimensions that a gradient is cut over, and its device


class GradNormsInBackward:
    """Squared norms of this rank's gradients that were used and freed before the others are there, by kind."""

    def __init__(self) -> None:
        self._squares: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def add(self, parameter: nn.Parameter) -> None:
        """Counts a parameter's gradient, on the stream that has it."""
        ((key, group),) = _group([parameter]).items()
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        square = group.own_square(dtype)
        self._squares[key] = square if key not in self._squares else self._squares[key] + square

    def take(self) -> dict[_Key, Tensor]:
        """All that was counted since the last call, `[]` fp64 each."""
        squares, self._squares = self._squares, {}
        return squares


@dataclass
class _Group:
    """Gradients on one device that are cut over the same dimensions of the same mesh."""

    sharded_over: tuple[tuple[DeviceMesh, int], ...]
    device: torch.device
    grads: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)  # scaled with the others, and counted on another rank

    def own_square(self, dtype: torch.dtype) -> Tensor:
        """Sum of squares of this rank's part in fp64, `[]` on the group's device."""
        if not self.grads:  # none here, perhaps one elsewhere
            return torch.zeros((), dtype=torch.float64, device=self.device)
        on_cpu = kernels_of(self.device) == "cpu"
        norms = _norms_of_pieces(self.grads, dtype) if on_cpu else torch._foreach_norm(self.grads, 2, dtype=dtype)
        together = torch.cat(norms) if on_cpu else torch.stack(norms)
        return torch.linalg.vector_norm(together, dtype=torch.float64).square()

    def squared_norm(self, dtype: torch.dtype, earlier: Tensor | None = None) -> Tensor:
        """Sum of squares over the whole group in fp64, the same on every rank. earlier: of gradients that are gone."""
        total = self.own_square(dtype)
        if earlier is not None:
            total = total + earlier
        for mesh, dim in self.sharded_over:
            dist.all_reduce(total, group=mesh.get_group(dim))
        return total


def _norms_of_pieces(grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Norms of pieces of _CPU_PIECE elements, many at a time `[n]`; what is left of a gradient is one shorter piece."""
    norms = []
    for grad in grads:
        for part in grad.reshape(-1).split(_CPU_PIECE * _CPU_PIECES):
            whole = len(part) - len(part) % _CPU_PIECE
            if whole:
                norms.append(torch.linalg.vector_norm(part[:whole].view(-1, _CPU_PIECE), dim=1, dtype=dtype))
            if whole < len(part) or not len(part):
                norms.append(torch.linalg.vector_norm(part[whole:], dtype=dtype).view(1))
    return norms


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    world: "World",
    parallel: Parallel,
    earlier: GradNormsInBackward | None,
) -> Tensor:
    """Scales all gradients so that their global L2 norm is at most `max_norm`; returns the norm before that.

    parameters: sharded (DTensor, over meshes of any number of dimensions) or plain, on one device or several (CPU
    offload); those without a gradient are left out. Each element counts once: sums run over the mesh dimensions a
    gradient is cut along, not over those it is copied along, and over the stages of a pipeline. max_norm None: only the
    norm is taken. parallel: says which parameter is a copy of another rank's. earlier: what parameters without a
    gradient had before they were stepped, in backward.

    The norm is fp32 (fp64 where a parameter is), `[]` where gradients are. Nothing is read back: the factor, at
    most 1, is made and applied on the gradients' device. A norm that is not finite makes the gradients so too.
    """
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    squares = earlier.take() if earlier is not None else {}
    groups = {key: _Group(*key) for key in squares} | _group(trained, parallel.tied_copy)
    groups = {key: group for key, group in groups.items() if group.sharded_over or group.grads or key in squares}
    first = next(iter(groups.values()), None)
    total = torch.zeros((), dtype=torch.float64, device=first.device if first else world.device)
    for key, group in groups.items():
        total += group.squared_norm(dtype, squares.get(key)).to(total.device)
    if world.pipeline is not None:  # each stage has parameters of its own
        total = world.all_reduce_sum(total) / world.data_ranks  # by a group that there is anyway
    norm = total.sqrt_().to(dtype)
    if max_norm is not None:
        factor = (max_norm / (norm + _TINY)).clamp_(max=1.0)
        for group in groups.values():
            if scaled := group.grads + group.copies:
                torch._foreach_mul_(scaled, factor.to(group.device))
    return norm


def _group(parameters: Iterable[nn.Parameter], copy: nn.Parameter | None = None) -> dict[_Key, _Group]:
    """Local gradients by mesh, sharded dimensions and device.

    A parameter without a gradient still makes its group: another rank may have one and wait for this rank in the sum.
    """
    groups: dict[_Key, _Group] = {}
    for parameter in parameters:
        grad = parameter.grad
        tensor = parameter if grad is None else grad
        sharded_over = _sharded_over(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        group = groups.setdefault((sharded_over, local.device), _Group(sharded_over, local.device))
        if grad is not None:
            (group.copies if parameter is copy else group.grads).append(local)
    return groups


def _sharded_over(tensor: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """The mesh dimensions of more than one rank that a tensor is cut along."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a gradient placed {tensor.placements} is not summed over the ranks yet; sum it, then clip")
    sharded = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tuple((tensor.device_mesh, dim) for dim in sharded if tensor.device_mesh.size(dim) > 1)
