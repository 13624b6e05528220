"""Optimizers by registered name, and the bytes their states take."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from recipe_lib.config.optimizer_facts import optimizer_facts
from recipe_lib.config.registry import registered
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.optim.low_bit_adamw import Trained
from recipe_lib.optim.state_layout import is_layer_matrix, stored_sizes
from recipe_lib.parallel.world import derive_seed

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

# Of parameters that are trained (`Trained` knows their names too), and torch's arguments for its kernels.
Builder = Callable[[OptimizerConfig, list[nn.Parameter], dict[str, bool]], Optimizer]
Parameters = Iterable[nn.Parameter | tuple[str, nn.Parameter]]


def build_optimizer(
    cfg: OptimizerConfig, params: Parameters, device: torch.device, world: "World | None" = None, seed: int = 0
) -> Optimizer:
    """The optimizer `cfg.name` over the parameters that require a gradient, in one group.

    params: plain or sharded (DTensor); the states will be where they are, under CPU offload on the host. Alone, or with
    their names, by which Muon chooses and which tell apart what is drawn by chance. seed: the root of that.
    device: the device that computes; `implementation: auto` takes fused kernels where torch has right ones.
    The implementations agree to rounding in fp32 and fp64, and differ in time and in the temporary memory of a step
    (`foreach` takes up to one more copy of the parameters, `fused` and `single` next to nothing). In bf16 `fused`
    rounds a second moment once a step, the others twice, and `foreach` on a CPU takes the betas in bf16 too: with
    betas[1] of 0.95 their steps are within 4 % and 8 % of the right ones, with 0.999 they stand still at different
    values, for a gradient of 1 at 0.25 and 0.5 (`recipe_lib/config/stalled_means.py` tells of it).
    ConfigError when there is nothing to train, for Muon without names, for a fused SGD that torch lacks or has wrong,
    and where ranks share a matrix so that blocks of `state_bits` would be cut. world: in a pipeline a rank may have
    nothing, if others do.
    """
    found = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    named = {parameter: name for name, parameter in found if parameter.requires_grad}
    if not named and (world is None or world.pipeline is None):
        raise ConfigError("optimizer: found no parameter that requires a gradient; leave at least one unfrozen")
    drawn = derive_seed(seed, "rounding")
    trained = Trained(list(named), {parameter: name for parameter, name in named.items() if name}, device, drawn)
    build: Builder = registered("optimizer.name", cfg.name)
    optimizer = build(cfg, trained, _kernels(cfg.implementation, device))
    _leave_fused_sgd(optimizer, cfg)
    return optimizer


def step_only(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    step: Callable[[], Any] | None = None,
    instead: nn.Parameter | None = None,
) -> None:
    """Step one of the optimizer's parameters.

    step: the optimizer's own, where `optimizer.step` is another. instead: what is stepped in the parameter's place, by
    the numbers of its group.
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


def set_numbers(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Puts the config's numbers, with which the optimizer was built, over those that a saved state has brought back.

    The learning rate is set before every step. Of a plugin's optimizer without facts nothing is touched: what its
    groups hold may be what it has learned.
    """
    facts = optimizer_facts(cfg.name)
    read = (*facts.keys, "weight_decay") if facts is not None else ()
    numbers = {key: optimizer.defaults[key] for key in read if key in optimizer.defaults}
    for group in optimizer.param_groups:
        group.update(numbers)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the rate that the next step trains with, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state_bytes(cfg: OptimizerConfig, params: Parameters) -> int | None:
    """Bytes that the states will take on this rank, known before the first step makes them; see
    `optimizer_state_sizes`."""
    sizes = optimizer_state_sizes(cfg, params)
    return None if sizes is None else sum(sizes)


def optimizer_state_sizes(cfg: OptimizerConfig, params: Parameters) -> list[int] | None:
    """Bytes of each state tensor on this rank.

    params: alone or, as Muon needs them, with their names; those that are not trained have none. States as the
    optimizer's facts name them; of the parameter's dtype or, in `state_bits`, codes and scales; and master weights.
    None: not known, as for an optimizer of a plugin that gives no facts.
    """
    facts = optimizer_facts(cfg.name)
    if facts is None:
        return None
    found = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    trained = {parameter: name for name, parameter in found if parameter.requires_grad}
    kept = {
        parameter: facts.states_of(cfg, layer_matrix=is_layer_matrix(parameter, name))
        for parameter, name in trained.items()
    }
    made_of = facts.state_bits(cfg), facts.keeps_master(cfg)
    return [size for parameter, names in kept.items() for size in stored_sizes(parameter, names, *made_of)]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors on this rank: of a sharded one (DTensor) its own part. The same tensor counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in distinct.values())
    return sum(part.numel() * part.element_size() for part in parts)


def _leave_fused_sgd(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Takes torch's SGD, also a plugin's, off the fused kernel where that is missing or wrong: ConfigError if the
    config asks for it by name."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        fault = _fault_of_fused_sgd(group["params"]) if group.get("fused") else None
        if fault and cfg.implementation == "fused":
            raise ConfigError(
                f"optimizer.implementation: found fused with optimizer.name={cfg.name} and {fault}; use auto or foreach"
            )
        if fault:
            for settings in (group, optimizer.defaults):
                settings.update(fused=False, foreach=True)


def _fault_of_fused_sgd(params: Iterable[torch.Tensor]) -> str | None:
    """The parameters that torch's fused SGD cannot step, and why; None: it is right for all of them.

    On a CPU torch 2.13 and before compute the update of 16-bit parameters in vectors and never store it, so that only
    what is left over of the last vector moves (docs/upstream/sgd_fused_cpu_bf16.md).
    """
    for parameter in params:
        if isinstance(parameter, DTensor):
            return "sharded parameters, for which torch has no such kernel"
        if parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
            kind = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
            return f"{kind} parameters on a CPU, of which torch's kernel leaves most elements as they are"
    return None


def _kernels(implementation: str, device: torch.device) -> dict[str, bool]:
    """The arguments by which torch's optimizers choose their kernels."""
    if implementation == "auto":
        implementation = "fused" if device.type in _get_fused_kernels_supported_devices() else "foreach"
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}
