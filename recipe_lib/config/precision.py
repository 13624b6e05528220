"""Find settings that a GPU cannot compute, and optimizer states that rounding keeps from moving.

A mean here is an exponential moving average: m becomes d m + (1 - d) x in a step. bf16 loses a
change of less than half the distance of two numbers, 1/256 of m at most, so that m may rest
wherever x / m is within 1 +- 1 / (256 (1 - d)). docs/measurements/optimizer_states.md measures it.
`tune validate` prints `describe_stalled_means`; `find_capability_faults` is for a start on a GPU.
"""

from dataclasses import dataclass
from typing import Any

from recipe_lib.config.key_conditions import get_trained_dtype
from recipe_lib.config.optimizer_facts import BYTES, find_optimizer_facts

# A mean is told of if it may stay this many times too large, or as many times too small.
FARTHEST = 2.0
# A mean in bf16 may stay as it is in a step that changes it by less than this share of itself.
_LOST_IN_BF16 = 1 / 256


@dataclass(frozen=True)
class _Mean:
    """A state of an optimizer that is a mean."""

    # Its name in messages.
    title: str
    # Key of the section `optimizer` that has its decay d.
    decay_key: str
    # The share of itself that a mean in 8 bits may lose in a step. 8-bit states have dynamic levels
    # (arXiv:2110.02861, optim/low_bit_adamw.py). From a tenth of a block's largest number to that
    # number they are (1 - 0.1) / 128 of it apart, or 0.9 / 64 for states with a sign. A number that
    # is half of the largest loses at most half that distance: (0.9 / 64 / 2) / 0.5 = 0.9 / 64 of
    # itself.
    lost_in_8_bits: float


# By the state's name. momentum_buffer is a mean but for a factor.
_MEANS = {
    "exp_avg": _Mean("the gradients' mean", "betas[0]", lost_in_8_bits=0.9 / 64),
    "exp_avg_sq": _Mean("the second moment", "betas[1]", lost_in_8_bits=0.9 / 128),
    "momentum_buffer": _Mean("the momentum", "momentum", lost_in_8_bits=0.9 / 64),
}


def describe_stalled_means(cfg: Any) -> list[str]:
    """Return a line for each mean of a config that may stay FARTHEST times off, with a remedy.

    States of 4 bits have one line for all. Empty for an optimizer whose states are not known.
    """
    optimizer = cfg.optimizer
    facts = find_optimizer_facts(optimizer.name)
    if facts is None:
        return []
    bits = facts.get_state_bits(optimizer) or 8 * BYTES[get_trained_dtype(cfg)]
    if bits == 4:
        return [
            "optimizer.state_bits=4: a gradient far below its block's largest hardly moves its"
            " weight; set 8 or 32"
        ]
    # fp32 is exact enough; stochastic rounding loses nothing on average.
    if bits > 16 or (bits == 16 and optimizer.stochastic_rounding):
        return []
    remedy = "set optimizer.state_bits=32"
    if get_trained_dtype(cfg) == "bf16" and not optimizer.master_weights:
        # Stochastic rounding is for bf16 weights without an fp32 copy, which it rounds as well.
        remedy += ", or 16 with optimizer.stochastic_rounding=true"
    # SGD's momentum is in the parameters' dtype.
    if "state_bits" not in facts.keys:
        dtype_key = "dtype" if cfg.trained_adapters is None else "lora.dtype"
        # Below 1 - 1 / 128, from which on a mean in bf16 is told of.
        remedy = f"set it to 0.98 or less, or {dtype_key}=fp32"
    decays = {
        "betas[0]": optimizer.betas[0],
        "betas[1]": optimizer.betas[1],
        "momentum": optimizer.momentum,
    }
    lines = []
    # layer_matrix_states: those of the layers' matrices, if an optimizer keeps others for these.
    for state in dict.fromkeys((*facts.states, *(facts.layer_matrix_states or ()))):
        mean = _MEANS.get(state)
        if mean is None or mean.decay_key.partition("[")[0] not in facts.keys:
            continue
        decay = float(decays[mean.decay_key] or 0)
        # The mean rests where x / m is within 1 +- deviation.
        deviation = (mean.lost_in_8_bits if bits == 8 else _LOST_IN_BF16) / (1 - decay)
        if deviation < 1 - 1 / FARTHEST:
            continue
        highest = "and not come down again"
        if deviation < 1:
            highest = f"or stay at {1 / (1 - deviation):.2g} times it"
        lines.append(
            f"optimizer.{mean.decay_key}={decay:g}: {mean.title} in {bits} bits may rest at"
            f" {1 / (1 + deviation):.2g} of its value, {highest}; {remedy}"
        )
    return lines


@dataclass(frozen=True)
class CapabilityRequirement:
    """A setting, and the GPUs that can compute it."""

    # Key at the top level of a config.
    key: str
    # The value of the key that asks for it.
    value: str
    # Least compute capability of the GPUs that can, (major, minor).
    capability: tuple[int, int]
    # Names of their generations, for the error.
    gpus: str
    # What to set instead, for the error.
    remedy: str


CAPABILITY_REQUIREMENTS = (
    # bf16 has tensor cores, and torch's flash and memory-efficient attention, from 8.0 on.
    CapabilityRequirement(
        "dtype",
        value="bf16",
        capability=(8, 0),
        gpus="Ampere and later",
        remedy="set dtype=fp32, or use a newer card",
    ),
    CapabilityRequirement(
        "matmul_dtype",
        value="fp8",
        capability=(8, 9),
        gpus="Ada, Hopper and later",
        remedy="choose int8, or remove matmul_dtype",
    ),
    CapabilityRequirement(
        "matmul_dtype",
        value="int8",
        capability=(7, 5),
        gpus="Turing and later",
        remedy="remove matmul_dtype",
    ),
)
# Least compute capability of torch's flash kernel for packed documents of different lengths; on
# older GPUs attention takes a mask instead.
VARLEN_CAPABILITY = (8, 0)


def find_capability_faults(cfg: Any, name: str, capability: tuple[int, int]) -> list[str]:
    """Return a line for each setting of a config that a GPU cannot compute.

    name: of the GPU. capability: its compute capability, (major, minor).
    """
    major, minor = capability
    return [
        f"{requirement.key}: found {requirement.value} for {name} of compute capability"
        f" {major}.{minor}, expected a GPU of compute capability"
        f" {'.'.join(map(str, requirement.capability))} or more ({requirement.gpus});"
        f" {requirement.remedy}"
        for requirement in CAPABILITY_REQUIREMENTS
        if getattr(cfg, requirement.key, None) == requirement.value
        and capability < requirement.capability
    ]
