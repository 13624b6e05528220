"""Settings that a GPU of too low a compute capability cannot compute.

`find_capability_faults` compares a config with one GPU, before a kernel raises. No torch.
"""

from dataclasses import dataclass
from typing import Any


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
        "dtype", "bf16", (8, 0), "Ampere and later", "set dtype=fp32, or use a newer card"
    ),
    CapabilityRequirement(
        "matmul_dtype",
        "fp8",
        (8, 9),
        "Ada, Hopper and later",
        "choose int8, or remove matmul_dtype",
    ),
    CapabilityRequirement(
        "matmul_dtype", "int8", (7, 5), "Turing and later", "remove matmul_dtype"
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
