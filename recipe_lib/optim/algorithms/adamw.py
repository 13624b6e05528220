"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): torch's own, or ours where states or rounding
are to be others.
"""

import torch
from torch import nn
from torch.optim import Optimizer

from recipe_lib.config.optimizer_facts import OptimizerFacts
from recipe_lib.config.registry import register
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer, TrainedParameters

FACTS = OptimizerFacts(
    keys=("betas", "eps", "implementation", "state_bits", "master_weights", "stochastic_rounding"),
    states=("exp_avg", "exp_avg_sq"),
    torch_class="AdamW",
)


@register("optimizer.name", "adamw", FACTS)
def build_adamw(
    cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]
) -> Optimizer:
    """torch's AdamW, unless `state_bits` asks for another type or rounding is to be other than to
    the nearest.
    """
    beta1, beta2 = cfg.betas
    bits = {parameter.dtype.itemsize * 8 for parameter in params}
    keeps_others = cfg.state_bits is not None and not bits <= {cfg.state_bits}
    if isinstance(params, TrainedParameters) and (
        cfg.master_weights or cfg.stochastic_rounding or keeps_others
    ):
        return ChunkedOptimizer(params, cfg, {"betas": (beta1, beta2), "eps": cfg.eps})
    groups = [{"params": list(params)}]  # one, even if empty
    return torch.optim.AdamW(
        groups,
        lr=cfg.lr,
        betas=(beta1, beta2),
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        **kernels,
    )
