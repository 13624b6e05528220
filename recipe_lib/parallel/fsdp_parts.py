"""Private parts of torch's FSDP2, which a unit has no public way to."""

from typing import Any

from torch.distributed.fsdp import FSDPModule


def group_of(unit: FSDPModule) -> Any:
    """What gathers and reduces a unit's parameters together; None where it has none."""
    return unit._get_fsdp_state()._fsdp_param_group


def entries_of(unit: FSDPModule) -> list[Any]:
    """FSDP's entry for each parameter of a unit, with the `sharded_param`."""
    group = group_of(unit)
    return [] if group is None else group.fsdp_params
