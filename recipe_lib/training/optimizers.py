"""Optimizers by registered name, and the bytes their states take."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from recipe_lib.config.registry import register, registered
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

Builder = Callable[[OptimizerConfig, list[nn.Parameter], dict[str, bool]], Optimizer]


def build_optimizer(
    cfg: OptimizerConfig, params: Iterable[nn.Parameter], device: torch.device, world: "World | None" = None
) -> Optimizer:
    """The optimizer `cfg.name` over the parameters that require a gradient, in one group.

    params: plain or sharded (DTensor); the states will be where they are, under CPU offload on the host.
    device: the device that computes; `implementation: auto` takes fused kernels where torch has them.
    The implementations agree to rounding and differ in time and in the temporary memory of a step (`foreach` takes
    up to one more copy of the parameters, `fused` and `single` next to nothing).
    ConfigError when there is nothing to train. world: in a pipeline a rank may have nothing, if others do.
    """
    trained: list[Any] = [parameter for parameter in params if parameter.requires_grad]
    if not trained and world is not None and world.pipeline is not None:
        trained = [{"params": []}]
    if not trained:
        raise ConfigError("optimizer: found no parameter that requires a gradient; leave at least one unfrozen")
    build: Builder = registered("optimizer.name", cfg.name)
    return build(cfg, trained, _kernels(cfg.implementation, device))


@register("optimizer.name", "adamw")
def adamw(cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]) -> Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101): two states of each parameter's shape and dtype."""
    beta1, beta2 = cfg.betas
    return torch.optim.AdamW(
        params, lr=cfg.lr, betas=(beta1, beta2), eps=cfg.eps, weight_decay=cfg.weight_decay, **kernels
    )


@register("optimizer.name", "sgd")
def sgd(cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]) -> Optimizer:
    """Gradient descent; with `momentum` one state of each parameter's shape and dtype.

    torch's SGD adds the weight decay to the gradient, and so to the momentum; ours is decoupled, as it is in AdamW.
    """
    if kernels["fused"] and any(isinstance(parameter, DTensor) for parameter in params):
        if cfg.implementation == "fused":
            raise ConfigError(
                "optimizer.implementation: found fused with optimizer.name=sgd and sharded parameters, for which torch "
                "has no such kernel; use auto or foreach"
            )
        kernels = {"fused": False, "foreach": True}
    optimizer = torch.optim.SGD(params, lr=cfg.lr, momentum=cfg.momentum, **kernels)
    if cfg.weight_decay > 0:

        def decay(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for group in optimizer.param_groups:
                stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
                with torch.no_grad():
                    torch._foreach_mul_(stepped, 1 - group["lr"] * cfg.weight_decay)

        optimizer.register_step_pre_hook(decay)
    return optimizer


def set_numbers(optimizer: Optimizer, cfg: OptimizerConfig) -> None:
    """Puts the config's numbers in every group, over those that a saved state has brought back.

    The learning rate is set before every step. Of an optimizer that a plugin registered nothing is touched: what its
    groups hold may be what it has learnt.
    """
    numbers: dict[str, dict[str, Any]] = {
        "adamw": {"betas": tuple(cfg.betas), "eps": cfg.eps, "weight_decay": cfg.weight_decay},
        "sgd": {"momentum": cfg.momentum},  # its weight decay is read from the config, by our hook
    }
    for group in optimizer.param_groups:
        group.update(numbers.get(cfg.name, {}))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the rate that the next step trains with, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state_bytes(cfg: OptimizerConfig, params: Iterable[nn.Parameter]) -> int | None:
    """Bytes that the states will take on this rank, known before the first step makes them.

    Two states of each trained element's dtype for AdamW, one for SGD with momentum, none without. None: not known, as
    for an optimizer that a plugin registered.
    """
    states = {"adamw": 2, "sgd": 1 if cfg.momentum > 0 else 0}.get(cfg.name)
    if states is None:
        return None
    return states * local_bytes(parameter for parameter in params if parameter.requires_grad)


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors on this rank: of a sharded one (DTensor) its own part. The same tensor counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in distinct.values())
    return sum(part.numel() * part.element_size() for part in parts)


def _kernels(implementation: str, device: torch.device) -> dict[str, bool]:
    """The arguments by which torch's optimizers choose their kernels."""
    if implementation == "auto":
        implementation = "fused" if device.type in _get_fused_kernels_supported_devices() else "foreach"
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}
