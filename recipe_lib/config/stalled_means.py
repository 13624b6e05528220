"""Means that an optimizer keeps in too few bits to follow what they average: how far off, and what to set instead.

A mean m becomes d m + (1 - d) x in a step. bf16 has 8 bits, so that a change of less than half the distance of two
numbers, 1/512 to 1/256 of m, is lost. Rounded once a step, as torch's fused kernels and ours do, m may rest wherever
x / m is within 1 +- 1 / (256 (1 - d)): with d = 0.95 a second moment is off by 8 %, a step by 4 %; with d = 0.999 a
step is up to 2.2 times too long, and m never comes down. docs/measurements/optimizer_states.md has runs of it.

In 8 bits a block's largest number is exact. Below it levels are 0.9/128 of it apart, with a sign 0.9/64: no finer than
bf16, so that a number which changes while a larger one of its block stays rests as those do, and sooner.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from recipe_lib.config.idle import trained_dtype
from recipe_lib.config.optimizer_facts import BYTES, optimizer_facts, state_bytes

FOUR_BITS = (
    "beside a gradient 100 times as large, in one block of 128 numbers, one takes a fortieth of its step, and a mean "
    "that shrinks alone stays as it is"
)
FARTHEST = 2.0  # times too large or too small that a mean may stay before it is told


# A state that is a mean, of a plugin's optimizer too -> what it is called, the setting that is its decay, the roundings
# of a step by torch's kernels that are not fused.
_MEANS = {
    "exp_avg": ("the gradients' mean", "betas[0]", 1),
    "exp_avg_sq": ("the second moment", "betas[1]", 2),
    "momentum_buffer": ("the momentum", "momentum", 2),
}
_SQUARES = "exp_avg_sq"  # a step is divided by its root


@dataclass(frozen=True)
class _StalledMean:
    """A mean that may stay far off."""

    state: str
    setting: str  # its decay, as it is typed
    lowest: float  # multiple of the mean down to which what it averages may be
    highest: float

    def describe(self, bits: int | None) -> str:
        """Return what is lost. bits: of the state's numbers, where the optimizer says it."""
        low = f"stop at {1 / self.highest:.2g} of its value"
        high = f"or stay at {1 / self.lowest:.2g} times of it" if self.lowest else "and never comes down again"
        if self.state == _SQUARES:
            low += f" (steps {math.sqrt(self.highest):.2g} times too long)"
            short = f"steps of {math.sqrt(self.lowest):.2g} of their length"
            high += f" ({short if self.lowest else 'steps too short'})"
        name = _MEANS[self.state][0]
        what = f"in 8 bits {name}, beside one twice as large in its block," if bits == 8 else f"in bf16 {name}"
        return f"{self.setting}: {what} may {low} {high}"


def resting_range(decay: float, roundings: int = 1) -> tuple[float, float]:
    """Return between which multiples of a mean in bf16 what it averages may be while the mean stays what it is.

    Exact, over all numbers of bf16, whose distances double from one power of two to the next. roundings: 2 where the
    product with `decay` is rounded as well.
    """
    lowest = highest = 1.0
    for mean in range(128, 256):  # all significands: a distance of 1, below 128 of 1/2
        kept = decay * mean
        if roundings == 2:
            kept = round(kept) if kept >= 128 else round(2 * kept) / 2
        below = mean - (0.5 if mean > 128 else 0.25)
        lowest = min(lowest, (below - kept) / ((1 - decay) * mean))
        highest = max(highest, (mean + 0.5 - kept) / ((1 - decay) * mean))
    return max(0.0, lowest), highest


def describe_stalled_means(
    cfg: Any, format_size: Callable[[Any], str] | None = None, size: str = "bytes a parameter"
) -> list[str]:
    """Return a line for each mean of a config that may stay FARTHEST times off: what is lost, what to set, its bytes.
    States of 4 bits have one too.

    format_size: size of the states with a section `optimizer`, in words; None: bytes for one parameter. size: what it
    is.
    """
    width = BYTES[trained_dtype(cfg)]
    format_size = format_size or (lambda optimizer: f"{state_bytes(optimizer, width, in_layer=False):.3g}")
    facts = optimizer_facts(cfg.optimizer.name)
    bits = None if facts is None else facts.state_bits(cfg.optimizer)
    lines = [mean.describe(bits) for mean in _list_stalled_means(cfg, cfg.optimizer)]
    if bits == 4:
        lines.append(f"optimizer.state_bits=4: {FOUR_BITS}")
    return [f"{line}; {_name_remedies(cfg, format_size, size)}" for line in lines]


def _list_stalled_means(cfg: Any, optimizer: Any) -> list[_StalledMean]:
    """Return the means of a section `optimizer` that may stay FARTHEST times off."""
    dtype = trained_dtype(cfg)
    facts = optimizer_facts(optimizer.name)
    bits = 0 if facts is None else facts.state_bits(optimizer) or 8 * BYTES[dtype]
    if facts is None or (bits != 8 and (bits != 16 or optimizer.stochastic_rounding)):
        return []
    # Of torch's SGD in bf16 `auto` is fused on a single GPU alone.
    is_fused = optimizer.implementation == "fused" or (optimizer.implementation == "auto" and optimizer.name != "sgd")
    has_own_step = facts.torch_class is None or optimizer.master_weights or dtype != "bf16"
    decays = {"betas[0]": optimizer.betas[0], "betas[1]": optimizer.betas[1], "momentum": optimizer.momentum}
    stalled = []
    for state in dict.fromkeys((*facts.states, *(facts.layer_matrix_states or ()))):
        _, key, roundings = _MEANS.get(state, ("", "", 0))
        decay = float(decays.get(key) or 0)
        if key.partition("[")[0] not in facts.keys or not decay:
            continue
        if bits == 8:
            # Of half of a block's largest number, which stays: half a distance of levels, in multiples of that half.
            off = 0.9 / (128 if state == _SQUARES else 64) / (1 - decay)
            lowest, highest = max(0.0, 1 - off), 1 + off
        else:
            lowest, highest = resting_range(decay, 1 if is_fused or has_own_step else roundings)
        if lowest <= 1 / FARTHEST or highest >= FARTHEST:
            stalled.append(_StalledMean(state, f"optimizer.{key}={decay:g}", lowest, highest))
    return stalled


def _name_remedies(cfg: Any, format_size: Callable[[Any], str], size: str) -> str:
    """`set optimizer.state_bits=32 (8) or ...; in brackets the states' bytes a parameter, now 4`"""
    optimizer = cfg.optimizer
    dtype = trained_dtype(cfg)
    facts = optimizer_facts(optimizer.name)
    if facts is None or "state_bits" not in facts.keys:
        return f"set it to 0.98 or less, or {'dtype' if cfg.trained_adapters is None else 'lora.dtype'}=fp32"
    tried: list[dict[str, Any]] = [{"state_bits": 32}, {"state_bits": 8}]
    if dtype == "bf16" and not optimizer.master_weights:
        tried.insert(1, {"state_bits": 16, "stochastic_rounding": True})
    present = vars(optimizer) | {"state_bits": optimizer.state_bits or 8 * BYTES[dtype]}
    choices = []
    for settings in tried:
        changed = replace(optimizer, **settings)
        words = [f"optimizer.{key}={str(value).lower()}" for key, value in settings.items() if value != present[key]]
        if words and not _list_stalled_means(cfg, changed):
            choices.append(f"{' '.join(words)} ({format_size(changed)})")
    remedies = " or ".join(filter(None, [", ".join(choices[:-1]), *choices[-1:]]))
    return f"set {remedies}; in brackets the states' {size}, now {format_size(optimizer)}"
