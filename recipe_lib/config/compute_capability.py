"""What a card cannot compute, by its compute capability, and so is refused before a kernel raises.
No torch.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CapabilityRequirement:
    """key, value: of the config, which it applies to. capability: the least that can. cards: in
    words. remedy: for a card with less.
    """

    key: str
    value: str
    capability: tuple[int, int]
    cards: str
    remedy: str

    def applies(self, cfg: Any) -> bool:
        """Whether a config asks for it."""
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
VARLEN_CAPABILITY = (
    8,
    0,
)  # of the flash kernel for documents of packed sequences; below it they take a mask


def find_capability_faults(cfg: Any, name: str, capability: tuple[int, int]) -> list[str]:
    """What of a config a card cannot compute, a line each. name: of the card."""
    found = ".".join(map(str, capability))
    return [
        f"{limit.key}: found {limit.value} for {name} of compute capability {found}, expected a GPU"
        f" of compute capability {'.'.join(map(str, limit.capability))} or more ({limit.cards});"
        f" {limit.remedy}"
        for limit in CAPABILITY_REQUIREMENTS
        if limit.applies(cfg) and capability < limit.capability
    ]
