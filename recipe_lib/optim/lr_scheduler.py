"""The learning rate as a pure function of the step."""

import math

from recipe_lib.config.schema import LrSchedulerConfig


def learning_rate(cfg: LrSchedulerConfig, peak: float, step: int, total_steps: int) -> float:
    """The rate to train step `step` with; steps count from 0 and there are `total_steps` of them.

    The first `warmup_steps` steps rise linearly: step 0 trains with peak / warmup_steps, step warmup_steps - 1 with
    `peak`. Then the rate falls, by half a cosine or a line, towards `min_lr_ratio * peak`, which it would have at step
    total_steps: the last step still trains. `constant` stays at `peak`.
    """
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    if cfg.kind == "constant":
        return peak
    done = min(1.0, (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps))
    left = 1 - done if cfg.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)
