"""Optimizers: built by registered name, the bytes of their states, when they step, clipping, the
learning rate.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from recipe_lib.config.optimizer_facts import find_optimizer_facts
from recipe_lib.config.registry import get_registered
from recipe_lib.config.schema import LrSchedulerConfig, MemoryConfig, OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.ops.device import get_kernel_type, has_host
from recipe_lib.ops.dtensor_shards import get_detached_local, wrap_local
from recipe_lib.ops.host_copies import HostCopies, Pair, Prefetch
from recipe_lib.optim.low_bit_adamw import (
    ChunkedOptimizer,
    TrainedParameters,
    is_layer_matrix,
    list_state_sizes,
)
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import derive_seed

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


# Of parameters that are trained (`Trained` knows their names too), and torch's arguments for its
# kernels.
Builder = Callable[[OptimizerConfig, list[nn.Parameter], dict[str, bool]], Optimizer]
Parameters = Iterable[nn.Parameter | tuple[str, nn.Parameter]]


def build_optimizer(
    cfg: OptimizerConfig,
    params: Parameters,
    device: torch.device,
    world: "World | None" = None,
    seed: int = 0,
) -> Optimizer:
    """The optimizer `cfg.name` over the parameters that require a gradient, in one group.

    params: plain or sharded (DTensor); the states will be where they are, under CPU offload on the
    host. Alone, or with their names, by which Muon chooses and which tell apart what is drawn by
    chance. seed: the root of that. device: the device that computes; `implementation: auto` takes
    fused kernels where torch has right ones. The implementations agree to rounding in fp32 and
    fp64, and differ in time and in the temporary memory of a step (`foreach` takes up to one more
    copy of the parameters, `fused` and `single` next to nothing). In bf16 `fused` rounds a second
    moment once a step, the others twice, and `foreach` on a CPU takes the betas in bf16 too: with
    betas[1] of 0.95 their steps are within 4 % and 8 % of the right ones, with 0.999 they stand
    still at different values, for a gradient of 1 at 0.25 and 0.5
    (`recipe_lib/config/optimizer_precision.py` tells of it). ConfigError when there is nothing to
    train, for Muon without names, for a fused SGD that torch lacks or has wrong, and where ranks share
    a matrix so that blocks of `state_bits` would be cut. world: in a pipeline a rank may have
    nothing, if others do.
    """
    found = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    named = {parameter: name for name, parameter in found if parameter.requires_grad}
    if not named and (world is None or world.pipeline is None):
        raise ConfigError(
            "optimizer: found no parameter that requires a gradient; leave at least one unfrozen"
        )
    drawn = derive_seed(seed, "rounding")
    trained = TrainedParameters(
        list(named), {parameter: name for parameter, name in named.items() if name}, device, drawn
    )
    build: Builder = get_registered("optimizer.name", cfg.name)
    kernels = cfg.implementation
    if kernels == "auto":
        kernels = "fused" if device.type in _get_fused_kernels_supported_devices() else "foreach"
    optimizer = build(cfg, trained, {name: kernels == name for name in ("fused", "foreach")})
    _avoid_fused_sgd(optimizer, cfg)
    return optimizer


def step_parameter(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    step: Callable[[], Any] | None = None,
    instead: nn.Parameter | None = None,
) -> None:
    """Step one of the optimizer's parameters.

    step: the optimizer's own, where `optimizer.step` is another. instead: what is stepped in the
    parameter's place, by the numbers of its group.
    """
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    stepped = parameter if instead is None else instead
    try:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = [stepped] if any(one is parameter for one in parameters) else []
        (step or optimizer.step)()
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters


def set_hyperparameters(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Puts the config's numbers, with which the optimizer was built, over those that a saved state
    has brought back.

    The learning rate is set before every step. Of a plugin's optimizer without facts nothing is
    touched: what its groups hold may be what it has learned.
    """
    facts = find_optimizer_facts(cfg.name)
    read = (*facts.keys, "weight_decay") if facts is not None else ()
    numbers = {key: optimizer.defaults[key] for key in read if key in optimizer.defaults}
    for group in optimizer.param_groups:
        group.update(numbers)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the rate that the next step trains with, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def count_optimizer_state_bytes(cfg: OptimizerConfig, params: Parameters) -> int | None:
    """Bytes that the states will take on this rank, known before the first step makes them; see
    `optimizer_state_sizes`."""
    sizes = list_optimizer_state_sizes(cfg, params)
    return None if sizes is None else sum(sizes)


def list_optimizer_state_sizes(cfg: OptimizerConfig, params: Parameters) -> list[int] | None:
    """Bytes of each state tensor on this rank.

    params: alone or, as Muon needs them, with their names; those that are not trained have none.
    States as the optimizer's facts name them; of the parameter's dtype or, in `state_bits`, codes
    and scales; and master weights. None: not known, as for an optimizer of a plugin that gives no
    facts.
    """
    facts = find_optimizer_facts(cfg.name)
    if facts is None:
        return None
    found = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    trained = {parameter: name for name, parameter in found if parameter.requires_grad}
    kept = {
        parameter: facts.list_states(cfg, layer_matrix=is_layer_matrix(parameter, name))
        for parameter, name in trained.items()
    }
    made_of = facts.get_state_bits(cfg), facts.has_master_weights(cfg)
    return [
        size
        for parameter, names in kept.items()
        for size in list_state_sizes(parameter, names, *made_of)
    ]


def count_local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors on this rank: of a sharded one (DTensor) its own part. The same tensor
    counts once.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(get_detached_local(tensor).nbytes for tensor in distinct.values())


def _avoid_fused_sgd(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Takes torch's SGD, also a plugin's, off the fused kernel where that is missing or wrong:
    ConfigError if the config asks for it by name.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        fault = _find_fused_sgd_fault(group["params"]) if group.get("fused") else None
        if fault and cfg.implementation == "fused":
            raise ConfigError(
                f"optimizer.implementation: found fused with optimizer.name={cfg.name} and {fault};"
                " use auto or foreach"
            )
        if fault:
            for settings in (group, optimizer.defaults):
                settings.update(fused=False, foreach=True)


def _find_fused_sgd_fault(params: Iterable[torch.Tensor]) -> str | None:
    """The parameters that torch's fused SGD cannot step, and why; None: it is right for all of
    them.

    On a CPU torch 2.13 and before compute the update of 16-bit parameters in vectors and never
    store it, so that only what is left over of the last vector moves
    (docs/upstream/sgd_fused_cpu_bf16.md).
    """
    for parameter in params:
        if isinstance(parameter, DTensor):
            return "sharded parameters, for which torch has no such kernel"
        if parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
            kind = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
            return (
                f"{kind} parameters on a CPU, of which torch's kernel leaves most elements as"
                " they are"
            )
    return None


# The learning rate as a pure function of the step.


def compute_learning_rate(
    cfg: LrSchedulerConfig, peak: float, step: int, total_steps: int
) -> float:
    """The rate to train step `step` with; steps count from 0 and there are `total_steps` of them.

    The first w = `warmup_steps` steps rise linearly: step 0 trains with peak / w, step w - 1 with
    `peak`. Then the rate falls, by half a cosine or a line, towards `min_lr_ratio * peak`, which it
    would have at step total_steps: the last step still trains. `constant` stays at `peak`.
    """
    warmup = count_warmup_steps(cfg, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if cfg.type == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1 - done if cfg.type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)


def count_warmup_steps(cfg: LrSchedulerConfig, total_steps: int) -> int:
    """Steps of the warm-up: `warmup_steps`, or the share `warmup_ratio` of all steps, rounded up
    (as transformers).
    """
    return (
        cfg.warmup_steps if cfg.warmup_ratio is None else math.ceil(cfg.warmup_ratio * total_steps)
    )


# When parameters are stepped, and where the optimizer's states are in the meantime.
#
# Of AdamW's memory gradients and states are three times the parameters. A gradient can go as soon
# as it is there, if its parameter is stepped at once (as LOMO does, arXiv 2306.09782), and states
# can wait in host memory, if each parameter's are fetched for its step (ZeRO-Offload, arXiv
# 2101.06840, sends gradients to the host instead, and steps there).


# The global gradient norm and clipping by it, over sharded and plain gradients, without waiting for
# the device.


# Added to the norm before dividing by it, so that a norm of zero gives a factor of 1 and not a
# division by zero.
_TINY = 1e-6

# torch sums squares in one fp32 number on a CPU, which is off by 1e-3 at 20 M elements; pieces of
# this length by 1e-7.
_CPU_PIECE = 16384
_CPU_PIECES = 1024  # at a time: as many as are turned to fp32 together


_Key = tuple[
    tuple[tuple[DeviceMesh, int], ...], torch.device
]  # dimensions that a gradient is cut over, and its device


class GradNormsInBackward:
    """Squared norms of this rank's gradients that were used and freed before the others are there,
    by kind.
    """

    def __init__(self) -> None:
        self._squares: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def add(self, parameter: nn.Parameter) -> None:
        """Counts a parameter's gradient, on the stream that has it."""
        ((key, group),) = _group([parameter]).items()
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        square = group.compute_local_square(dtype)
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
    copies: list[Tensor] = field(
        default_factory=list
    )  # scaled with the others, and counted on another rank

    def compute_local_square(self, dtype: torch.dtype) -> Tensor:
        """Sum of squares of this rank's part in fp64, `[]` on the group's device."""
        if not self.grads:  # none here, perhaps one elsewhere
            return torch.zeros((), dtype=torch.float64, device=self.device)
        on_cpu = get_kernel_type(self.device) == "cpu"
        norms = (
            _compute_piece_norms(self.grads, dtype)
            if on_cpu
            else torch._foreach_norm(self.grads, 2, dtype=dtype)
        )
        together = torch.cat(norms) if on_cpu else torch.stack(norms)
        return torch.linalg.vector_norm(together, dtype=torch.float64).square()

    def compute_squared_norm(self, dtype: torch.dtype, earlier: Tensor | None = None) -> Tensor:
        """Sum of squares over the whole group in fp64, the same on every rank. earlier: of
        gradients that are gone.
        """
        total = self.compute_local_square(dtype)
        if earlier is not None:
            total = total + earlier
        for mesh, dim in self.sharded_over:
            dist.all_reduce(total, group=mesh.get_group(dim))
        return total


def _compute_piece_norms(grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Norms of pieces of _CPU_PIECE elements, many at a time `[n]`; what is left of a gradient is
    one shorter piece.
    """
    norms = []
    for grad in grads:
        for part in grad.reshape(-1).split(_CPU_PIECE * _CPU_PIECES):
            whole = len(part) - len(part) % _CPU_PIECE
            if whole:
                norms.append(
                    torch.linalg.vector_norm(part[:whole].view(-1, _CPU_PIECE), dim=1, dtype=dtype)
                )
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
    """Scales all gradients so that their global L2 norm is at most `max_norm`; returns the norm
    before that.

    parameters: sharded (DTensor, over meshes of any number of dimensions) or plain, on one device
    or several (CPU offload); those without a gradient are left out. Each element counts once: sums
    run over the mesh dimensions a gradient is cut along, not over those it is copied along, and
    over the stages of a pipeline. max_norm None: only the norm is taken. parallel: says which
    parameter is a copy of another rank's. earlier: what parameters without a gradient had before
    they were stepped, in backward.

    The norm is fp32 (fp64 where a parameter is), `[]` where gradients are. Nothing is read back:
    the factor, at most 1, is made and applied on the gradients' device. A norm that is not finite
    makes the gradients so too.
    """
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    dtype = (
        torch.float64
        if any(parameter.dtype == torch.float64 for parameter in parameters)
        else torch.float32
    )
    squares = earlier.take() if earlier is not None else {}
    groups = {key: _Group(*key) for key in squares} | _group(trained, parallel.tied_copy)
    groups = {
        key: group
        for key, group in groups.items()
        if group.sharded_over or group.grads or key in squares
    }
    first = next(iter(groups.values()), None)
    total = torch.zeros((), dtype=torch.float64, device=first.device if first else world.device)
    for key, group in groups.items():
        total += group.compute_squared_norm(dtype, squares.get(key)).to(total.device)
    if world.pipeline is not None:  # each stage has parameters of its own
        total = world.all_reduce_sum(total) / world.data_ranks  # by a group that there is anyway
    norm = total.sqrt_().to(dtype)
    if max_norm is not None:
        factor = (max_norm / (norm + _TINY)).clamp_(max=1.0)
        for group in groups.values():
            if scaled := group.grads + group.copies:
                torch._foreach_mul_(scaled, factor.to(group.device))
    return norm


def _group(
    parameters: Iterable[nn.Parameter], copy: nn.Parameter | None = None
) -> dict[_Key, _Group]:
    """Local gradients by mesh, sharded dimensions and device.

    A parameter without a gradient still makes its group: another rank may have one and wait for
    this rank in the sum.
    """
    groups: dict[_Key, _Group] = {}
    for parameter in parameters:
        grad = parameter.grad
        tensor = parameter if grad is None else grad
        sharded_over = _find_sharded_dims(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        group = groups.setdefault((sharded_over, local.device), _Group(sharded_over, local.device))
        if grad is not None:
            (group.copies if parameter is copy else group.grads).append(local)
    return groups


def _find_sharded_dims(tensor: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """The mesh dimensions of more than one rank that a tensor is cut along."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a gradient placed {tensor.placements} is not summed over the ranks yet; sum it, then"
            " clip"
        )
    sharded = (
        dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )
    return tuple((tensor.device_mesh, dim) for dim in sharded if tensor.device_mesh.size(dim) > 1)


@dataclass(frozen=True)
class OptimizerLevers:
    """What `memory.optimizer_in_backward` and `memory.optimizer_offload` came to.

    norms: of gradients that are gone when `clip_grad_norm` is called; None: none are. place_state:
    a state's memory where it waits, without values; None: next to its parameter.
    """

    norms: GradNormsInBackward | None = None
    place_state: Callable[[Tensor], Tensor] | None = None


def apply_optimizer_levers(
    optimizer: Optimizer,
    model: nn.Module,
    parallel: Parallel,
    memory: MemoryConfig,
    device: torch.device,
) -> OptimizerLevers:
    """Says when the optimizer steps each parameter, and where its states wait; call it once, after
    `build_optimizer`.

    `memory.optimizer_offload`: states are in pinned host memory, and `optimizer.step()` takes the
    parameters one after the other, each with its states on the device. On a CPU nothing changes.

    `memory.optimizer_in_backward`: a parameter is stepped when backward has made its gradient,
    which is freed. A sharded parameter's is there when FSDP has summed it. Parameters whose
    gradients are not whole at that moment are left for `optimizer.step()` after backward: a tied
    embedding's come twice, and those that every rank of a tensor-parallel group has are summed once
    a step. There may be one backward a step.
    """
    streamed = parallel.levers.layers
    instead = streamed.get_stepped_parameter if streamed is not None else None
    offloaded = (
        OffloadedStates(optimizer, device, instead)
        if memory.optimizer_offload and has_host(device)
        else None
    )
    place = offloaded.placed if offloaded is not None else None
    if not memory.optimizer_in_backward:
        return OptimizerLevers(place_state=place)
    norms = GradNormsInBackward()
    step_one: Callable[[nn.Parameter], Any] = (
        offloaded.step_one if offloaded else lambda one: step_parameter(optimizer, one)
    )

    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # torch calls hooks also where backward has given none
            step_in_place_of(parameter, parameter)

    def step_in_place_of(owner: nn.Parameter, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if (
            parameter.grad.device.type != device.type
        ):  # offloaded by FSDP: torch 2.11 does not wait for the copy
            torch.get_device_module(device).current_stream().synchronize()
        norms.add(parameter)
        step_one(owner)
        parameter.grad = None

    if streamed is not None:
        streamed.set_step(step_in_place_of)
    for parameter in _find_stepped_in_backward(optimizer, model, parallel.tensor_gradients):
        if instead is None or instead(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(step)
    return OptimizerLevers(norms, place)


def _find_stepped_in_backward(
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
        if len(names[id(parameter)]) == 1
        and tensor_gradients.get(names[id(parameter)][0]) != "partial"
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

        instead: what is stepped in a parameter's place, itself or one on the device for one that is
        on the host.
        """
        self._optimizer = optimizer
        self._step = optimizer.step
        self._instead = instead or (lambda parameter: parameter)
        self._copies = HostCopies(device)
        self._on_device: dict[
            nn.Parameter, dict[str, Tensor]
        ] = {}  # states for the steps that come next
        self._prefetch = Prefetch(self._copies, self._allocate, self._on_device.pop)
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came after whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a
        checkpoint.
        """
        return self._allocate_on_host(value) if _is_large(value) else value

    def step(self, closure: None = None) -> None:
        """A step of every parameter that has a gradient; then nothing is on its way, and nothing on
        the device.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter)
        self._last = None
        self._prefetch.drop_all()  # states of parameters that had no gradient in this step, too

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter, whose states change places with those on the device for as long as
        that takes.
        """
        stepped, states = self._instead(parameter), self._optimizer.state
        on_device = self._take(parameter)
        hosts = states.get(parameter, {})
        moved = {key: wrap_local(hosts[key], value) for key, value in on_device.items()}
        counts = {key: value for key, value in hosts.items() if key not in on_device}
        if self._optimizer.defaults.get(
            "fused"
        ):  # wants a count on the device, where one that was read is not
            device = self._copies.device
            counts = {
                key: value.to(device) if isinstance(value, Tensor) else value
                for key, value in counts.items()
            }
        if hosts:
            states[stepped] = counts | moved
        if stepped is not parameter and isinstance(self._optimizer, ChunkedOptimizer):
            self._optimizer.add_stand_in(stepped, parameter)
        step_parameter(self._optimizer, parameter, self._step, stepped)
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
        pairs = [
            (get_detached_local(place), get_detached_local(after[key]))
            for key, place in places.items()
        ]
        self._copies.copy_to_host(pairs, free=pairs.clear)

    def _waits(self, parameter: nn.Parameter, value: Any) -> bool:
        """Return whether a state is on the host between steps; for a stand-in, whatever has its
        shape.
        """
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return _is_large(value) or self._instead(parameter) is not parameter

    def _take(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's states on the device; those of the next one are on their way
        then.
        """
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
        hosts = {
            key: get_detached_local(value)
            for key, value in states.items()
            if self._waits(parameter, value)
        }
        if not hosts:
            return []
        on_device = {
            key: torch.empty_like(host, device=self._copies.device) for key, host in hosts.items()
        }
        self._on_device[parameter] = on_device
        return [(on_device[key], host) for key, host in hosts.items()]

    def _allocate_on_host(self, like: Tensor) -> Tensor:
        local = get_detached_local(like)
        return wrap_local(like, self._copies.allocate_on_host(local.shape, local.dtype))


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL
