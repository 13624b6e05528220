"""Optimizers: built by registered name, the bytes of their states, clipping, the learning rate.

A run calls `build_optimizer`, once `apply_optimizer_levers`, and each step `clip_grad_norm` and
`set_learning_rate(optimizer, compute_learning_rate(...))`. Nothing here waits for the device.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from recipe_lib.ops.dtensor_shards import get_detached_local
from recipe_lib.optim.low_bit_adamw import (
    TrainedParameters,
    is_layer_matrix,
    list_state_sizes,
)
from recipe_lib.optim.offloaded_states import OffloadedStates, step_parameter
from recipe_lib.parallel import Parallel, derive_seed

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


# Builds an optimizer of trained parameters (TrainedParameters, which knows their names), given
# torch's arguments for its implementations.
Builder = Callable[[OptimizerConfig, list[nn.Parameter], dict[str, bool]], Optimizer]
Parameters = Iterable[nn.Parameter | tuple[str, nn.Parameter]]


def build_optimizer(
    cfg: OptimizerConfig,
    params: Parameters,
    device: torch.device,
    world: "World | None" = None,
    seed: int = 0,
) -> Optimizer:
    """Return the optimizer `cfg.name` over the parameters that require a gradient, in one group.

    params: plain or sharded (DTensor), alone or with their names, by which Muon chooses and which
    tell apart what is rounded stochastically. States will be where the parameters are, under CPU
    offload on the host. device: the one that computes. world: in a pipeline a rank may have
    nothing, if others do. seed: of stochastic rounding.

    `implementation: auto` takes fused kernels where torch has right ones. Implementations agree to
    rounding in fp32 and fp64, and differ in time and in the temporary memory of a step (`foreach`
    takes up to one more copy of the parameters, `fused` and `single` next to nothing). In bf16
    `fused` rounds a second moment once a step, the others twice, and `foreach` on a CPU takes the
    betas in bf16 too: with betas[1] of 0.95 their steps are within 4 % and 8 % of the right ones,
    with 0.999 they stand still at different values, for a gradient of 1 at 0.25 and 0.5
    (`recipe_lib/config/precision.py` tells of it).

    Raises ConfigError when there is nothing to train, for Muon without names, for a fused SGD that
    torch lacks or has wrong, and where ranks share a matrix so that blocks of `state_bits` would be
    cut.
    """
    pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    named = {parameter: name for name, parameter in pairs if parameter.requires_grad}
    if not named and (world is None or world.pipeline is None):
        raise ConfigError(
            "optimizer: found no parameter that requires a gradient; leave at least one unfrozen"
        )
    trained = TrainedParameters(
        list(named),
        names={parameter: name for parameter, name in named.items() if name},
        device=device,
        seed=derive_seed(seed, "rounding"),
    )
    build: Builder = get_registered("optimizer.name", cfg.name)
    kernels = cfg.implementation
    if kernels == "auto":
        kernels = "fused" if device.type in _get_fused_kernels_supported_devices() else "foreach"
    optimizer = build(cfg, trained, {name: kernels == name for name in ("fused", "foreach")})
    _avoid_fused_sgd(optimizer, cfg)
    return optimizer


def set_hyperparameters(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Put the config's hyperparameters over those that a saved state has brought back.

    The learning rate is set before every step.
    """
    # Of a plugin's optimizer without facts nothing is touched: what its groups hold may be what it
    # has learned.
    facts = find_optimizer_facts(cfg.name)
    keys = (*facts.keys, "weight_decay") if facts is not None else ()
    values = {key: optimizer.defaults[key] for key in keys if key in optimizer.defaults}
    for group in optimizer.param_groups:
        group.update(values)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the rate that the next step trains with, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def count_optimizer_state_bytes(cfg: OptimizerConfig, params: Parameters) -> int | None:
    """Return the bytes that the states will take on this rank, before the first step makes them.

    None: not known, see `list_optimizer_state_sizes`.
    """
    sizes = list_optimizer_state_sizes(cfg, params)
    return None if sizes is None else sum(sizes)


def list_optimizer_state_sizes(cfg: OptimizerConfig, params: Parameters) -> list[int] | None:
    """Return the bytes of each state tensor on this rank.

    params: alone or, as Muon needs them, with their names; those that are not trained have none.
    States are those of the optimizer's facts, of the parameter's dtype or, in `state_bits`, codes
    and scales; and master weights. None: not known, as for a plugin's optimizer without facts.
    """
    facts = find_optimizer_facts(cfg.name)
    if facts is None:
        return None
    pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    trained = {parameter: name for name, parameter in pairs if parameter.requires_grad}
    sizes: list[int] = []
    for parameter, name in trained.items():
        states = facts.list_states(cfg, layer_matrix=is_layer_matrix(parameter, name))
        sizes += list_state_sizes(
            parameter, states, facts.get_state_bits(cfg), master=facts.has_master_weights(cfg)
        )
    return sizes


def count_local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors on this rank: of a sharded one (DTensor) its own part.

    The same tensor counts once.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(get_detached_local(tensor).nbytes for tensor in distinct.values())


def _avoid_fused_sgd(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Take torch's SGD, also a plugin's, off the fused kernel where that is missing or wrong.

    Raises ConfigError if the config asks for the kernel by name.
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
    """Return which parameters torch's fused SGD cannot step, and why; None: it steps them all."""
    for parameter in params:
        if isinstance(parameter, DTensor):
            return "sharded parameters, for which torch has no such kernel"
        # On a CPU torch 2.13 and before compute the update of 16-bit parameters in vectors and
        # never store it, so that only what is left over of the last vector moves
        # (docs/upstream/sgd_fused_cpu_bf16.md).
        if parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
            kind = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
            return (
                f"{kind} parameters on a CPU, of which torch's kernel leaves most elements as"
                " they are"
            )
    return None


def compute_learning_rate(
    cfg: LrSchedulerConfig, peak: float, step: int, total_steps: int
) -> float:
    """Return the rate to train step `step` with, of `total_steps` steps that count from 0.

    The first w = `warmup_steps` steps rise linearly: step 0 trains with peak / w, step w - 1 with
    `peak`. Then the rate falls, by half a cosine or a line, towards `min_lr_ratio * peak`, which it
    would have at step total_steps: the last step still trains. `constant` stays at `peak`.
    """
    warmup = count_warmup_steps(cfg, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if cfg.type == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1 - progress if cfg.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)


def count_warmup_steps(cfg: LrSchedulerConfig, total_steps: int) -> int:
    """Return the steps of the warm-up: `warmup_steps`, or the share `warmup_ratio` of all steps."""
    if cfg.warmup_ratio is None:
        return cfg.warmup_steps
    return math.ceil(cfg.warmup_ratio * total_steps)  # rounded up, as in transformers


# Added to the norm before dividing by it, so that a norm of zero gives a factor of 1 and not a
# division by zero.
_TINY = 1e-6

# torch sums squares in one fp32 number on a CPU, which is off by 1e-3 at 20 M elements; by pieces
# of this length it is off by 1e-7.
_CPU_PIECE = 16384
_CPU_PIECES = 1024  # at a time: as many as are converted to fp32 together

# The mesh dimensions that a gradient is sharded over, and its device
_Key = tuple[tuple[tuple[DeviceMesh, int], ...], torch.device]


@dataclass
class GradNormsInBackward:
    """Squared norms of this rank's gradients that were used and freed in backward, by kind."""

    _squares: dict[_Key, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter) -> None:
        """Count a parameter's gradient, on the stream that has it."""
        ((key, group),) = _group([parameter]).items()
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        square = group.compute_local_square(dtype)
        self._squares[key] = square if key not in self._squares else self._squares[key] + square

    def take(self) -> dict[_Key, Tensor]:
        """Return the sums since the last call, `[]` fp64 each."""
        squares = self._squares
        self._squares = {}
        return squares


@dataclass
class _Group:
    """Gradients on one device that are sharded over the same dimensions of the same mesh."""

    sharded_over: tuple[tuple[DeviceMesh, int], ...]
    device: torch.device
    grads: list[Tensor] = field(default_factory=list)
    # Scaled with the others, and counted on another rank
    copies: list[Tensor] = field(default_factory=list)

    def compute_local_square(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of squares of this rank's part, fp64 `[]` on the group's device."""
        if not self.grads:  # none here, perhaps one elsewhere
            return torch.zeros((), dtype=torch.float64, device=self.device)
        norms: Sequence[Tensor]
        if get_kernel_type(self.device) == "cpu":
            norms = _compute_piece_norms(self.grads, dtype)
            joined = torch.cat(norms)
        else:
            norms = torch._foreach_norm(self.grads, 2, dtype=dtype)
            joined = torch.stack(norms)
        return torch.linalg.vector_norm(joined, dtype=torch.float64).square()

    def compute_squared_norm(self, dtype: torch.dtype, earlier: Tensor | None = None) -> Tensor:
        """Return the sum of squares over the whole group, fp64 `[]`, the same on every rank.

        earlier: that of gradients that are gone.
        """
        total = self.compute_local_square(dtype)
        if earlier is not None:
            total = total + earlier
        for mesh, dim in self.sharded_over:
            dist.all_reduce(total, group=mesh.get_group(dim))
        return total


def _compute_piece_norms(grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the norms of pieces of _CPU_PIECE elements, `[n]` each, made many at a time."""
    norms = []
    for grad in grads:
        for part in grad.reshape(-1).split(_CPU_PIECE * _CPU_PIECES):
            # What is left of a gradient is one shorter piece.
            full = len(part) - len(part) % _CPU_PIECE
            if full:
                pieces = part[:full].view(-1, _CPU_PIECE)
                norms.append(torch.linalg.vector_norm(pieces, dim=1, dtype=dtype))
            if full < len(part) or not len(part):
                norms.append(torch.linalg.vector_norm(part[full:], dtype=dtype).view(1))
    return norms


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    world: "World",
    parallel: Parallel,
    earlier: GradNormsInBackward | None,
) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    Return the norm before that: fp32 (fp64 where a parameter is), `[]` where gradients are. Nothing
    is read back: the factor, at most 1, is made and applied on the gradients' device. A norm that
    is not finite makes the gradients so too.

    parameters: sharded (DTensor, over meshes of any number of dimensions) or plain, on one device
    or several (CPU offload); those without a gradient are left out. max_norm None: only the norm is
    taken. parallel: says which parameter is a copy of another rank's. earlier: what parameters had
    before they were stepped in backward.
    """
    # Each element counts once: sums run over the mesh dimensions a gradient is sharded over, not
    # over those it is replicated over, and over the stages of a pipeline.
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if has_double else torch.float32
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
    """Return the local gradients by mesh, sharded dimensions and device.

    copy: the parameter whose gradient is counted on another rank.
    """
    groups: dict[_Key, _Group] = {}
    for parameter in parameters:
        # A parameter without a gradient still makes its group: another rank may have one, and wait
        # for this rank in the sum.
        grad = parameter.grad
        tensor = parameter if grad is None else grad
        sharded_over = _find_sharded_dims(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        group = groups.setdefault((sharded_over, local.device), _Group(sharded_over, local.device))
        if grad is not None:
            (group.copies if parameter is copy else group.grads).append(local)
    return groups


def _find_sharded_dims(tensor: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """Return the mesh dimensions of more than one rank that a tensor is sharded over."""
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
    """The results of `memory.optimizer_in_backward` and `memory.optimizer_offload`."""

    # Of gradients that are gone when `clip_grad_norm` is called; None: none are
    norms: GradNormsInBackward | None = None
    # Gives a state's memory where it waits, without values; None: next to its parameter
    place_state: Callable[[Tensor], Tensor] | None = None


def apply_optimizer_levers(
    optimizer: Optimizer,
    model: nn.Module,
    parallel: Parallel,
    memory: MemoryConfig,
    device: torch.device,
) -> OptimizerLevers:
    """Let the optimizer step parameters, and keep its states, as these levers say.

    Call it once, after `build_optimizer`.

    `memory.optimizer_offload`: states are in pinned host memory, and `optimizer.step()` takes the
    parameters one after the other, each with its states on the device. On a CPU nothing changes.

    `memory.optimizer_in_backward`: a parameter is stepped when backward has made its gradient (a
    sharded one when FSDP has summed it), which is then freed, as in LOMO (arXiv 2306.09782).
    Parameters whose gradients are not whole at that moment are left for `optimizer.step()` after
    backward: a tied embedding's come twice, and those that every rank of a tensor-parallel group
    has are summed once a step. There may be one backward a step.
    """
    streamed = parallel.levers.layers
    get_stand_in = streamed.get_stepped_parameter if streamed is not None else None
    offloads = memory.optimizer_offload and has_host(device)
    offloaded = OffloadedStates(optimizer, device, get_stand_in) if offloads else None
    place_state = offloaded.allocate_state if offloaded is not None else None
    if not memory.optimizer_in_backward:
        return OptimizerLevers(place_state=place_state)
    norms = GradNormsInBackward()

    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # torch calls hooks also where backward has given none
            step_and_free(parameter, parameter)

    # parameter: has the gradient, and is `owner` or its stand-in on the device.
    def step_and_free(owner: nn.Parameter, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        # Offloaded by FSDP: torch 2.11 does not wait for the copy.
        if parameter.grad.device.type != device.type:
            torch.get_device_module(device).current_stream().synchronize()
        norms.add(parameter)
        if offloaded is not None:
            offloaded.step_one(owner)
        else:
            step_parameter(optimizer, owner)
        parameter.grad = None

    if streamed is not None:
        streamed.set_step(step_and_free)
    for parameter in _find_stepped_in_backward(optimizer, model, parallel.tensor_gradients):
        if get_stand_in is None or get_stand_in(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(step)
    return OptimizerLevers(norms, place_state)


def _find_stepped_in_backward(
    optimizer: Optimizer, model: nn.Module, tensor_gradients: Mapping[str, str]
) -> Sequence[nn.Parameter]:
    """Return the optimizer's parameters whose gradient is whole when backward gives it, once."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    stepped = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, *other_names = names[id(parameter)]
            if not other_names and tensor_gradients.get(name) != "partial":
                stepped.append(parameter)
    return stepped
