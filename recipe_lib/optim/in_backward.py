"""When parameters are stepped, and where the optimizer's states are in the meantime.

Of AdamW's memory gradients and states are three times the parameters. A gradient can go as soon as it is there, if its
parameter is stepped at once (as LOMO does, arXiv 2306.09782), and states can wait in host memory, if each parameter's
are fetched for its step (ZeRO-Offload, arXiv 2101.06840, sends gradients to the host instead, and steps there).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from recipe_lib.config.schema import MemoryConfig
from recipe_lib.ops.device import has_host, kernels_of
from recipe_lib.ops.dtensor_shards import local_of, with_local
from recipe_lib.ops.host_copies import HostCopies, Pair, Prefetch
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer
from recipe_lib.optim.optimizers import step_only
from recipe_lib.parallel.parallelize import Parallel

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


# The global gradient norm and clipping by it, over sharded and plain gradients, without waiting for
# the device.


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


@dataclass(frozen=True)
class OptimizerLevers:
    """What `memory.optimizer_in_backward` and `memory.optimizer_offload` came to.

    norms: of gradients that are gone when `clip_grad_norm` is called; None: none are. place_state: a state's memory
    where it waits, without values; None: next to its parameter.
    """

    norms: GradNormsInBackward | None = None
    place_state: Callable[[Tensor], Tensor] | None = None


def apply_optimizer_levers(
    optimizer: Optimizer, model: nn.Module, parallel: Parallel, memory: MemoryConfig, device: torch.device
) -> OptimizerLevers:
    """Says when the optimizer steps each parameter, and where its states wait; call it once, after `build_optimizer`.

    `memory.optimizer_offload`: states are in pinned host memory, and `optimizer.step()` takes the parameters one after
    the other, each with its states on the device. On a CPU nothing changes.

    `memory.optimizer_in_backward`: a parameter is stepped when backward has made its gradient, which is freed. A
    sharded parameter's is there when FSDP has summed it. Parameters whose gradients are not whole at that moment are
    left for `optimizer.step()` after backward: a tied embedding's come twice, and those that every rank of a
    tensor-parallel group has are summed once a step. There may be one backward a step.
    """
    streamed = parallel.levers.layers
    instead = streamed.stepped if streamed is not None else None
    offloaded = OffloadedStates(optimizer, device, instead) if memory.optimizer_offload and has_host(device) else None
    place = offloaded.placed if offloaded is not None else None
    if not memory.optimizer_in_backward:
        return OptimizerLevers(place_state=place)
    norms = GradNormsInBackward()
    step_one: Callable[[nn.Parameter], Any] = offloaded.step_one if offloaded else lambda one: step_only(optimizer, one)

    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # torch calls hooks also where backward has given none
            step_in_place_of(parameter, parameter)

    def step_in_place_of(owner: nn.Parameter, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.device.type != device.type:  # offloaded by FSDP: torch 2.11 does not wait for the copy
            torch.get_device_module(device).current_stream().synchronize()
        norms.add(parameter)
        step_one(owner)
        parameter.grad = None

    if streamed is not None:
        streamed.step_with(step_in_place_of)
    for parameter in _made_at_once(optimizer, model, parallel.tensor_gradients):
        if instead is None or instead(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(step)
    return OptimizerLevers(norms, place)


def _made_at_once(
    optimizer: Optimizer, model: nn.Module, tensor_gradients: Mapping[str, str]
) -> Sequence[nn.Parameter]:
    """The optimizer's parameters whose gradient is whole when backward gives it, once."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if len(names[id(parameter)]) == 1 and tensor_gradients.get(names[id(parameter)][0]) != "partial"
    ]


# Offloaded optimizer states: in pinned host memory, on the device for their parameter's step.


_SMALL = 1024  # bytes: step counters and the like stay where the optimizer put them


class OffloadedStates:
    """Takes over `optimizer.step`: the states of a parameter come before its step, during the step
    of the one before, and go back after it.

    What has been sent back is freed when the step after the next begins, so that the states of
    three parameters are on the device at most: one leaving, one stepped, one arriving. In the first
    step, in which states are made, nothing arrives; and which parameter follows which is known from
    the second one on. What has run on a GPU: docs/measurements/on_a_gpu.md.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        instead: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """device: the one that computes; states that are elsewhere are on the host.

        instead: what is stepped in a parameter's place, itself or one on the device for one that is on the host.
        """
        self._optimizer = optimizer
        self._step = optimizer.step
        self._instead = instead or (lambda parameter: parameter)
        self._copies = HostCopies(device)
        self._on_device: dict[nn.Parameter, dict[str, Tensor]] = {}  # states for the steps that come next
        self._prefetch = Prefetch(self._copies, self._allocate, self._on_device.pop)
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came after whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a checkpoint."""
        return self._allocate_on_host(value) if _is_large(value) else value

    def step(self, closure: None = None) -> None:
        """A step of every parameter that has a gradient; then nothing is on its way, and nothing on the device."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter)
        self._last = None
        self._prefetch.drop_all()  # states of parameters that had no gradient in this step, too

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter, whose states change places with those on the device for as long as that takes."""
        stepped, states = self._instead(parameter), self._optimizer.state
        on_device = self._take(parameter)
        hosts = states.get(parameter, {})
        moved = {key: with_local(hosts[key], value) for key, value in on_device.items()}
        counts = {key: self._count_to_device(value) for key, value in hosts.items() if key not in on_device}
        if hosts:
            states[stepped] = counts | moved
        if stepped is not parameter and isinstance(self._optimizer, ChunkedOptimizer):
            self._optimizer.add_stand_in(stepped, parameter)
        step_only(self._optimizer, parameter, self._step, stepped)
        after = states.get(stepped, {})
        if stepped is not parameter:
            states.pop(stepped, None)
        places = {
            key: hosts[key] if key in on_device else self._allocate_on_host(value)
            for key, value in after.items()
            if self._waits(parameter, value)
        }
        if after:
            states[parameter] = after | places
        pairs = [(local_of(place), local_of(after[key])) for key, place in places.items()]
        self._copies.copy_to_host(pairs, free=pairs.clear)

    def _waits(self, parameter: nn.Parameter, value: Any) -> bool:
        """Return whether a state is on the host between steps; for a stand-in, whatever has its shape."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return _is_large(value) or self._instead(parameter) is not parameter

    def _count_to_device(self, value: Any) -> Any:
        """Return a state that stays; fused kernels want a count on the device, where a state that was read has none."""
        moves = isinstance(value, Tensor) and self._optimizer.defaults.get("fused")
        return value.to(self._copies.device) if moves else value

    def _take(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's states on the device; those of the next one are on their way then."""
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        self._copies.free_sent(keep=1)
        self._prefetch.use(parameter, self._next.get(parameter))
        self._prefetch.on_device.pop(parameter, None)  # freed when it has been sent back
        return self._on_device.pop(parameter, {})

    def _allocate(self, parameter: nn.Parameter) -> list[Pair]:
        """Give the states of a parameter memory on the device; return what is copied there."""
        states = self._optimizer.state.get(parameter, {})
        hosts = {key: local_of(value) for key, value in states.items() if self._waits(parameter, value)}
        if not hosts:
            return []
        on_device = {key: torch.empty_like(host, device=self._copies.device) for key, host in hosts.items()}
        self._on_device[parameter] = on_device
        return [(on_device[key], host) for key, host in hosts.items()]

    def _allocate_on_host(self, like: Tensor) -> Tensor:
        local = local_of(like)
        return with_local(like, self._copies.allocate_on_host(local.shape, local.dtype))


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL
