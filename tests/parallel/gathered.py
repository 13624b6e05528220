"""Count the bytes that FSDP holds on this rank: gathered parameters and unreduced gradients.

`with GatheredPeak(model) as peak: ...` gives the most of each while the block runs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode


def list_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's parameter groups, one for each unit, the root among them.

    A unit is what FSDP gathers and frees as one; that of several modules comes once.
    """
    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


def count_gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of gathered (full) parameters that are in memory on this rank."""
    return sum(
        tensor.untyped_storage().nbytes()
        for group in list_groups(model)
        for parameter in group.fsdp_params
        for tensor in getattr(parameter, "all_gather_outputs", [])
    )


def count_unreduced_bytes(model: nn.Module) -> int:
    """Return the bytes of full gradients in memory that are not reduced over ranks yet."""
    total = 0
    for group in list_groups(model):
        for parameter in group.fsdp_params:
            grad = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            total += grad.untyped_storage().nbytes() if grad is not None else 0
    return total


class GatheredPeak(TorchDispatchMode):
    """While entered, records the peaks of gathered parameters and of unreduced gradients."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.gathered = 0  # the most bytes after any operator
        self.unreduced = 0  # the most bytes after any operator

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        with torch._C._DisableTorchDispatch():
            self.gathered = max(self.gathered, count_gathered_bytes(self.model))
            self.unreduced = max(self.unreduced, count_unreduced_bytes(self.model))
        return result
