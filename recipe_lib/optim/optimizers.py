"""Build optimizers, count the bytes of their states, clip gradients, set the learning rate.

A run calls `build_optimizer`, once `apply_optimizer_levers`, and each step `clip_grad_norm` and
`set_learning_rate(optimizer, compute_learning_rate(...))`. A lever is a config key that trades
memory for time: here states in host memory, and steps in backward.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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
from recipe_lib.parallel import Parallel, World, derive_seed

# `fn(cfg, parameters, kernels) -> Optimizer`, registered as a value of `optimizer.name`. The
# parameters are a TrainedParameters, which knows their names. kernels: torch's keywords `fused` and
# `foreach`, at most one of them True.
Builder = Callable[[OptimizerConfig, list[nn.Parameter], dict[str, bool]], Optimizer]
Parameters = Iterable[nn.Parameter | tuple[str, nn.Parameter]]  # alone, or (name, parameter)


def build_optimizer(
    cfg: OptimizerConfig,
    parameters: Parameters,
    device: torch.device,
    world: World | None = None,
    seed: int = 0,
) -> Optimizer:
    """Return the optimizer `cfg.name` over the parameters that require a gradient, in one group.

    parameters: plain or sharded (DTensor), alone or with their names. Muon chooses matrices by
    name, and stochastic rounding draws other numbers for each name. States will be where the
    parameters are, under CPU offload on the host. device: the one that computes. world: None: one
    process; in a pipeline a rank may have nothing to train, if others do. seed: of stochastic
    rounding.

    `implementation: auto` takes fused kernels where torch has right ones. In fp32 and fp64 the
    implementations agree but for rounding. They differ in time and in the temporary memory of a
    step: `foreach` takes up to one more copy of the parameters, `fused` and `single` next to
    nothing. In bf16 they differ by some percent of a step: `fused` rounds a second moment once, the
    others twice, and `foreach` on a CPU rounds the betas too.

    Raises ConfigError when there is nothing to train, for Muon without names, for a fused SGD that
    torch lacks or has wrong, and for `state_bits` below 16 where a rank's columns of a matrix end
    within a block of elements that share a scale.
    """
    pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in parameters]
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
    implementation = cfg.implementation
    if implementation == "auto":
        # Private in torch, whose own optimizers ask it; there is no public list of these devices.
        has_fused = device.type in _get_fused_kernels_supported_devices()
        implementation = "fused" if has_fused else "foreach"
    optimizer = build(cfg, trained, {name: implementation == name for name in ("fused", "foreach")})
    _avoid_fused_sgd(optimizer, cfg)
    return optimizer


@contextmanager
def keep_hyperparameters(optimizer: Optimizer, cfg: OptimizerConfig) -> Iterator[None]:
    """Keep each group's hyperparameters while the block loads a saved state, which has its own.

    The learning rate is not among them: it is set before every step.
    """
    # "Facts" of an optimizer are the config keys that it reads and the states that it has. An
    # optimizer of a plugin (a user's file) may have none: then nothing is touched, since what its
    # groups hold may be learned.
    facts = find_optimizer_facts(cfg.name)
    # Every optimizer with facts reads `weight_decay`, so that its `keys` do not list it.
    keys = (*facts.keys, "weight_decay") if facts is not None else ()
    # Not `optimizer.defaults`: a group that a recipe adds may have a `weight_decay` of its own.
    kept = [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def count_optimizer_state_bytes(cfg: OptimizerConfig, parameters: Parameters) -> int | None:
    """Return the bytes that the states will take on this rank, before the first step makes them.

    None: not known, see `list_optimizer_state_sizes`.
    """
    sizes = list_optimizer_state_sizes(cfg, parameters)
    return None if sizes is None else sum(sizes)


def list_optimizer_state_sizes(cfg: OptimizerConfig, parameters: Parameters) -> list[int] | None:
    """Return the bytes of each state tensor on this rank.

    Master weights count as states. None: not known, as for a plugin's optimizer without facts.

    parameters: alone or, as Muon needs them, with their names; those that are not trained have no
    states.
    """
    facts = find_optimizer_facts(cfg.name)
    if facts is None:
        return None
    pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in parameters]
    trained = {parameter: name for name, parameter in pairs if parameter.requires_grad}
    sizes: list[int] = []
    for parameter, name in trained.items():
        states = facts.list_states(cfg, layer_matrix=is_layer_matrix(parameter, name))
        sizes += list_state_sizes(
            parameter, states, facts.get_state_bits(cfg), master=facts.has_master_weights(cfg)
        )
    return sizes


def count_local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors on this rank: of a sharded one (DTensor) this rank's part.

    The same tensor counts once.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(get_detached_local(tensor).nbytes for tensor in distinct.values())


def _avoid_fused_sgd(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Switch torch's SGD, also a plugin's, to `foreach` where the fused kernel is missing or wrong.

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


def _find_fused_sgd_fault(parameters: Iterable[torch.Tensor]) -> str | None:
    """Return which parameters torch's fused SGD cannot step, and why; None: there are none."""
    for parameter in parameters:
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
    """Return the learning rate of step `step`, of `total_steps` steps that count from 0.

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
    decay = 1 - progress if cfg.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * decay)


def count_warmup_steps(cfg: LrSchedulerConfig, total_steps: int) -> int:
    """Return the number of warm-up steps: `warmup_steps`, or `warmup_ratio` times all steps."""
    if cfg.warmup_ratio is None:
        return cfg.warmup_steps
    return math.ceil(cfg.warmup_ratio * total_steps)  # rounded up, as in transformers


# Added to the norm before dividing by it, so that a norm of zero gives a factor of 1 and not a
# division by zero.
_NORM_EPSILON = 1e-6

# Elements of a piece whose norm is taken by itself: torch sums squares in one fp32 number on a CPU,
# which is off by 1e-3 at 20 M elements; by pieces of this length it is off by 1e-7.
_CPU_PIECE = 16384
_CPU_PIECES = 1024  # pieces that are converted to fp32 together: 64 MiB

# ((mesh, mesh dimension) for each one that a gradient is sharded over, its device)
_GroupKey = tuple[tuple[tuple[DeviceMesh, int], ...], torch.device]


@dataclass
class GradNormsInBackward:
    """Squared norms of this rank's gradients that were used and freed in backward.

    They are summed by sharding and device, as the sums over ranks differ. fp64 `[]` each.
    """

    _squares: dict[_GroupKey, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, parameter: nn.Parameter) -> None:
        """Add the square of a parameter's gradient, on the current stream."""
        key, group = _group_gradients([parameter]).popitem()  # one parameter makes one group
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        square = group.compute_local_square(dtype)
        self._squares[key] = square if key not in self._squares else self._squares[key] + square

    def take(self) -> dict[_GroupKey, Tensor]:
        squares = self._squares
        self._squares = {}
        return squares


@dataclass
class _GradientGroup:
    """Gradients on one device that are sharded over the same dimensions of the same mesh."""

    sharded_over: tuple[tuple[DeviceMesh, int], ...]  # (mesh, mesh dimension); (): not sharded
    device: torch.device
    grads: list[Tensor] = field(default_factory=list)  # this rank's parts
    # Gradients of tied weights, scaled with the others but counted in another rank's norm
    copies: list[Tensor] = field(default_factory=list)

    def compute_local_square(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of squares of this rank's parts, fp64 `[]` on the group's device.

        dtype: in which each tensor's squares are summed.
        """
        if not self.grads:  # another rank may have some
            return torch.zeros((), dtype=torch.float64, device=self.device)
        norms: Sequence[Tensor]
        # Not `device.type`: a simulated device sums as the device that it stands for.
        if get_kernel_type(self.device) == "cpu":
            norms = _compute_piece_norms(self.grads, dtype)
            joined = torch.cat(norms)
        else:
            norms = torch._foreach_norm(self.grads, 2, dtype=dtype)
            joined = torch.stack(norms)
        return torch.linalg.vector_norm(joined, dtype=torch.float64).square()

    def compute_squared_norm(self, dtype: torch.dtype, freed_square: Tensor | None) -> Tensor:
        """Return the sum of squares over all ranks' parts, fp64 `[]`, the same on every rank.

        A collective. dtype: see `compute_local_square`. freed_square: this rank's sum of squares of
        gradients that backward has used and freed; None: none were.
        """
        total = self.compute_local_square(dtype)
        if freed_square is not None:
            total = total + freed_square
        for mesh, dim in self.sharded_over:
            dist.all_reduce(total, group=mesh.get_group(dim))
        return total


def _compute_piece_norms(grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the norms of pieces of _CPU_PIECE elements, in tensors `[n]` of many pieces each."""
    norms = []
    for grad in grads:
        for part in grad.reshape(-1).split(_CPU_PIECE * _CPU_PIECES):
            # The last elements of a gradient are one shorter piece.
            num_even = len(part) - len(part) % _CPU_PIECE
            if num_even:
                pieces = part[:num_even].view(-1, _CPU_PIECE)
                norms.append(torch.linalg.vector_norm(pieces, dim=1, dtype=dtype))
            if num_even < len(part) or not len(part):
                norms.append(torch.linalg.vector_norm(part[num_even:], dtype=dtype).view(1))
    return norms


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    world: World,
    parallel: Parallel,
    norms_in_backward: GradNormsInBackward | None,
) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    Return the norm before clipping, `[]` on the gradients' device, fp32 (fp64 if any parameter is
    fp64). The host waits for nothing. A norm that is not finite makes the gradients so too.

    parameters: sharded (DTensor, over meshes of any number of dimensions) or plain, on one device
    or several (CPU offload). max_norm: None: only the norm is taken. parallel: says which parameter
    is a copy of another rank's. norms_in_backward: squared norms of the gradients that were used
    and freed in backward, which are not scaled; None: there are none.

    Raises ValueError for a gradient that is not summed over the ranks yet (Partial).
    """
    # Each element counts once: sums run over the mesh dimensions a gradient is sharded over, not
    # over those it is replicated over, and over the stages of a pipeline.
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if has_double else torch.float32
    squares = norms_in_backward.take() if norms_in_backward is not None else {}
    groups = {key: _GradientGroup(*key) for key in squares} | _group_gradients(
        trained, parallel.tied_copy
    )
    groups = {
        key: group
        for key, group in groups.items()
        if group.sharded_over or group.grads or key in squares
    }
    first = next(iter(groups.values()), None)
    total = torch.zeros((), dtype=torch.float64, device=first.device if first else world.device)
    for key, group in groups.items():
        total += group.compute_squared_norm(dtype, squares.get(key)).to(total.device)
    if world.pipeline is not None:
        # Each stage has parameters of its own. This sum over all ranks needs no process group for
        # the ranks of a pipeline: it has each stage's total once for each of the data ranks.
        total = world.all_reduce_sum(total) / world.data_ranks
    norm = total.sqrt_().to(dtype)
    if max_norm is not None:
        factor = (max_norm / (norm + _NORM_EPSILON)).clamp_(max=1.0)
        for group in groups.values():
            if scaled := group.grads + group.copies:
                torch._foreach_mul_(scaled, factor.to(group.device))
    return norm


def _group_gradients(
    parameters: Iterable[nn.Parameter], copy: nn.Parameter | None = None
) -> dict[_GroupKey, _GradientGroup]:
    """Return the local gradients by mesh, sharded dimensions and device.

    copy: the parameter whose gradient is counted on another rank, in a pipeline that ties embedding
    and head; None: there is none.
    """
    groups: dict[_GroupKey, _GradientGroup] = {}
    for parameter in parameters:
        # A parameter without a gradient still makes its group: another rank may have one, and wait
        # for this rank in the sum.
        grad = parameter.grad
        tensor = parameter if grad is None else grad
        sharded_over = _find_sharded_dims(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        group = groups.setdefault(
            (sharded_over, local.device), _GradientGroup(sharded_over, local.device)
        )
        if grad is not None:
            gradients = group.copies if parameter is copy else group.grads
            gradients.append(local)
    return groups


def _find_sharded_dims(tensor: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """Return (mesh, mesh dimension) for each dimension of several ranks that shards a tensor.

    Raises ValueError if the tensor is a rank's part of a sum (Partial).
    """
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

    # Norms of gradients that are freed before `clip_grad_norm` is called; None: none are
    norms: GradNormsInBackward | None = None
    # `fn(state)` returns memory without values where that state is between steps, to load a
    # checkpoint into; None: states are next to their parameters
    place_state: Callable[[Tensor], Tensor] | None = None


def apply_optimizer_levers(
    optimizer: Optimizer,
    model: nn.Module,
    parallel: Parallel,
    memory: MemoryConfig,
    device: torch.device,
) -> OptimizerLevers:
    """Apply `memory.optimizer_offload` and `memory.optimizer_in_backward` to an optimizer.

    Call it once, after `build_optimizer`. device: the one that computes.

    `memory.optimizer_offload`: states are in pinned host memory, and `optimizer.step()` takes the
    parameters one after the other, each with its states on the device. On a CPU nothing changes.

    `memory.optimizer_in_backward`: a parameter is stepped when backward has made its gradient (a
    sharded one when FSDP has summed it), which is then freed, as in LOMO (arXiv 2306.09782).
    Parameters whose gradients are not complete at that moment are left for `optimizer.step()` after
    backward: a tied embedding's comes in two parts, and those of parameters that every rank of a
    tensor-parallel group has are summed once a step. There may be only one backward a step.
    """
    # `memory.stream_layers`: parameters are on the host, and a stand-in on the device gets the
    # gradient of each.
    layer_stream = parallel.levers.layers
    get_stand_in = layer_stream.get_stepped_parameter if layer_stream is not None else None
    offloads = memory.optimizer_offload and has_host(device)  # a CPU has no other memory
    offloaded = OffloadedStates(optimizer, device, get_stand_in) if offloads else None
    place_state = offloaded.allocate_state if offloaded is not None else None
    if not memory.optimizer_in_backward:
        return OptimizerLevers(place_state=place_state)
    norms = GradNormsInBackward()

    # The hook of a parameter on the device.
    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # torch calls hooks also where backward has given none
            step_and_free(parameter, parameter)

    # parameter: has the gradient, and is `owner` or its stand-in on the device.
    def step_and_free(owner: nn.Parameter, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        # FSDP has copied the gradient to the host (CPU offload); torch 2.11 does not wait for it.
        if parameter.grad.device.type != device.type:
            torch.get_device_module(device).current_stream().synchronize()
        norms.add(parameter)
        if offloaded is not None:
            offloaded.step_one(owner)
        else:
            step_parameter(optimizer, owner)
        parameter.grad = None

    # A streamed layer steps its parameters itself, while their stand-ins are on the device.
    if layer_stream is not None:
        layer_stream.set_step(step_and_free)
    for parameter in _find_stepped_in_backward(optimizer, model, parallel.tensor_gradients):
        if get_stand_in is None or get_stand_in(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(step)
    return OptimizerLevers(norms, place_state)


def _find_stepped_in_backward(
    optimizer: Optimizer, model: nn.Module, tensor_gradients: Mapping[str, str]
) -> Sequence[nn.Parameter]:
    """Return the optimizer's parameters whose gradient is complete when backward gives it.

    tensor_gradients: name -> `sharded` or `partial`, of the parameters that a tensor-parallel group
    divides or uses in part; a `partial` gradient is a rank's part of a sum.
    """
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
