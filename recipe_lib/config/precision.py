"""Settings that a GPU cannot compute, and means that an optimizer keeps in too few bits. No torch.

`find_capability_faults` compares a config with one GPU, before a kernel raises.
`describe_stalled_means` says how far off a mean may stay from what it averages, and what to set
instead. A mean m becomes d m + (1 - d) x in a step. bf16 has 8 bits, so that a change of less than
half the distance of two numbers, 1/256 of m at most, is lost: m may rest wherever x / m is within
1 +- 1 / (256 (1 - d)). docs/measurements/optimizer_states.md has runs of it.
"""

from dataclasses import dataclass
from typing import Any

from recipe_lib.config.key_conditions import get_trained_dtype
from recipe_lib.config.optimizer_facts import BYTES, find_optimizer_facts

# Times too large or too small that a mean may stay before it is told.
FARTHEST = 2.0
# Share of a number in bf16 that a step may lose.
_LOST_IN_BF16 = 1 / 256

# A state that is a mean, of a plugin's optimizer too -> what it is called, the setting that is its
# decay, and the share of it that a step of 8 bits loses.
# In 8 bits a block's largest number is exact, and below it levels are 0.9/128 of it apart, with a
# sign 0.9/64. Of half of the largest, which stays, half a distance is that share.
_MEANS = {
    "exp_avg": ("the gradients' mean", "betas[0]", 0.9 / 64),
    "exp_avg_sq": ("the second moment", "betas[1]", 0.9 / 128),
    "momentum_buffer": ("the momentum", "momentum", 0.9 / 64),
}


def describe_stalled_means(cfg: Any) -> list[str]:
    """Return a line for each mean of a config that may stay FARTHEST times off.

    States of 4 bits have a line of their own.
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
    # Stochastic rounding loses nothing on average.
    if bits > 16 or (bits == 16 and optimizer.stochastic_rounding):
        return []
    remedy = "set optimizer.state_bits=32"
    if get_trained_dtype(cfg) == "bf16" and not optimizer.master_weights:
        # It rounds the weights as well, which have to be in bf16.
        remedy += ", or 16 with optimizer.stochastic_rounding=true"
    if "state_bits" not in facts.keys:
        dtype_key = "dtype" if cfg.trained_adapters is None else "lora.dtype"
        remedy = f"set it to 0.98 or less, or {dtype_key}=fp32"
    decays = {
        "betas[0]": optimizer.betas[0],
        "betas[1]": optimizer.betas[1],
        "momentum": optimizer.momentum,
    }
    lines = []
    for state in dict.fromkeys((*facts.states, *(facts.layer_matrix_states or ()))):
        name, setting, lost_in_8_bits = _MEANS.get(state, ("", "", 0.0))
        if setting.partition("[")[0] not in facts.keys:
            continue
        decay = float(decays[setting] or 0)
        # It rests where x / m is within 1 +- off.
        off = (lost_in_8_bits if bits == 8 else _LOST_IN_BF16) / (1 - decay)
        if off >= 1 - 1 / FARTHEST:
            highest = f"or stay at {1 / (1 - off):.2g} times it" if off < 1 else ""
            lines.append(
                f"optimizer.{setting}={decay:g}: {name} in {bits} bits may rest at"
                f" {1 / (1 + off):.2g} of its value, {highest or 'and not come down again'};"
                f" {remedy}"
            )
    return lines


@dataclass(frozen=True)
class CapabilityRequirement:
    """A setting, and the GPUs that can compute it."""

    # Of the config: the setting that asks for it.
    key: str
    value: str
    # The least that can: (major, minor).
    capability: tuple[int, int]
    # Those GPUs in words.
    gpus: str
    # For a GPU with less.
    remedy: str

    def is_needed(self, cfg: Any) -> bool:
        """Return True if a config asks for it."""
        return bool(getattr(cfg, self.key, None) == self.value)


CAPABILITY_REQUIREMENTS = (
    # Tensor cores, and torch's flash and memory-efficient attention in bf16.
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
# Of the flash kernel for documents of packed sequences; below it they take a mask.
VARLEN_CAPABILITY = (8, 0)


def find_capability_faults(cfg: Any, name: str, capability: tuple[int, int]) -> list[str]:
    """Return a line for each setting that a GPU cannot compute. name: of the GPU."""
    major, minor = capability
    return [
        f"{requirement.key}: found {requirement.value} for {name} of compute capability"
        f" {major}.{minor}, expected a GPU of compute capability"
        f" {'.'.join(map(str, requirement.capability))} or more ({requirement.gpus});"
        f" {requirement.remedy}"
        for requirement in CAPABILITY_REQUIREMENTS
        if requirement.is_needed(cfg) and capability < requirement.capability
    ]
