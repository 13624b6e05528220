"""The learning rate as a pure function of the step."""

import math

from recipe_lib.config.schema import LrSchedulerConfig


def learning_rate(cfg: LrSchedulerConfig, peak: float, step: int, total_steps: int) -> float:
    """The rate to train step `step` with; steps count from 0 and there are `total_steps` of them.

    The first w = `warmup_steps` steps rise linearly: step 0 trains with peak / w, step w - 1 with `peak`. Then the rate
    falls, by half a cosine or a line, towards `min_lr_ratio * peak`, which it would have at step total_steps: the last
    step still trains. `constant` stays at `peak`.
    """
    warmup = warmup_steps(cfg, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if cfg.type == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1 - done if cfg.type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)


def warmup_steps(cfg: LrSchedulerConfig, total_steps: int) -> int:
    """Steps of the warm-up: `warmup_steps`, or the share `warmup_ratio` of all steps, rounded up (as transformers)."""
    return cfg.warmup_steps if cfg.warmup_ratio is None else math.ceil(cfg.warmup_ratio * total_steps)
