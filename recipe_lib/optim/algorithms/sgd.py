"""Build torch's SGD, with decoupled weight decay in place of its own.

`optim.optimizers.build_optimizer` calls `build_sgd` for `optimizer.name=sgd`.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recipe_lib.config import OptimizerConfig, register
from recipe_lib.config.optimizer_facts import OptimizerFacts

# The config keys that SGD reads, and its state, which exists only with a momentum.
FACTS = OptimizerFacts(
    keys=("momentum", "implementation"),
    states=("momentum_buffer",),
    states_need="momentum",
)


@register("optimizer.name", "sgd", FACTS)
def build_sgd(
    cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]
) -> Optimizer:
    """Return torch's SGD, with decoupled weight decay.

    kernels: torch's keywords `fused` and `foreach`.
    """
    # A group, as torch refuses an empty list of parameters, but not an empty group.
    optimizer = torch.optim.SGD(
        [{"params": list(params)}],
        lr=cfg.lr,
        momentum=cfg.momentum or 0.0,
        weight_decay=cfg.weight_decay,
        **kernels,
    )
    optimizer.register_step_pre_hook(_decay)
    optimizer.register_step_post_hook(_restore_decay)
    return optimizer


def _decay(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Apply each group's weight decay before a step, and take it out of the group meanwhile.

    torch's own weight decay is added to the gradient, and so to the momentum.
    """
    for group in optimizer.param_groups:
        rate = group["decoupled_decay"] = group["weight_decay"]
        group["weight_decay"] = 0.0
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        if stepped and rate:
            with torch.no_grad():
                torch._foreach_mul_(stepped, 1 - group["lr"] * rate)


def _restore_decay(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = group.pop("decoupled_decay")
