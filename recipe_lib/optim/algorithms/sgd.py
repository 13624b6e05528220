"""Stochastic gradient descent, with momentum if asked for; torch's but for its weight decay."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recipe_lib.config import OptimizerConfig, register
from recipe_lib.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    keys=("momentum", "implementation"),
    states=("momentum_buffer",),
    states_need="momentum",
    torch_class="SGD",
)


@register("optimizer.name", "sgd", FACTS)
def build_sgd(
    cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]
) -> Optimizer:
    """Return torch's SGD, with decoupled weight decay."""
    optimizer = torch.optim.SGD(
        [{"params": list(params)}], lr=cfg.lr, momentum=cfg.momentum or 0.0, **kernels
    )
    # torch's own weight decay is added to the gradient, and so to the momentum.
    if cfg.weight_decay > 0:

        def decay(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for group in optimizer.param_groups:
                stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
                if stepped:
                    with torch.no_grad():
                        torch._foreach_mul_(stepped, 1 - group["lr"] * cfg.weight_decay)

        optimizer.register_step_pre_hook(decay)
    return optimizer
