"""Build AdamW (Loshchilov and Hutter, arXiv:1711.05101): torch's, or ours for other states.

`optim.optimizers.build_optimizer` calls `build_adamw` for `optimizer.name=adamw`.
"""

import torch
from torch import nn
from torch.optim import Optimizer

from recipe_lib.config import OptimizerConfig, register
from recipe_lib.config.optimizer_facts import OptimizerFacts
from recipe_lib.errors import ConfigError
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer, TrainedParameters

# The config keys that AdamW reads, and its states.
FACTS = OptimizerFacts(
    keys=("betas", "eps", "implementation", "state_bits", "master_weights", "stochastic_rounding"),
    states=("exp_avg", "exp_avg_sq"),
)


@register("optimizer.name", "adamw", FACTS)
def build_adamw(
    cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]
) -> Optimizer:
    """Return torch's AdamW, or ours for other state bits, master weights, stochastic rounding.

    params: ours needs a TrainedParameters. kernels: torch's keywords `fused` and `foreach`. Raises
    ConfigError for a plain list with settings that torch's has not.
    """
    beta1, beta2 = cfg.betas
    bits = {parameter.dtype.itemsize * 8 for parameter in params}
    has_other_bits = cfg.state_bits is not None and not bits <= {cfg.state_bits}
    is_ours = cfg.master_weights or cfg.stochastic_rounding or has_other_bits
    if is_ours and isinstance(params, TrainedParameters):
        return ChunkedOptimizer(params, cfg, {"betas": (beta1, beta2), "eps": cfg.eps})
    if is_ours:
        key = next(
            key
            for key in ("master_weights", "stochastic_rounding", "state_bits")
            if getattr(cfg, key)
        )
        raise ConfigError(
            f"optimizer.{key}: found {getattr(cfg, key)} for a plain list of parameters, which"
            " torch's AdamW steps without it, expected the parameters that build_optimizer gives;"
            f" call build_optimizer with optimizer.name=adamw, or remove optimizer.{key}"
        )
    # torch refuses an empty list of parameters, but not an empty group.
    return torch.optim.AdamW(
        [{"params": list(params)}],
        lr=cfg.lr,
        betas=(beta1, beta2),
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        **kernels,
    )
