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


def reduce_kept_gradients(unit: FSDPModule) -> None:
    """Reduce the gradients that a unit has, or add them to its sums where it is to wait."""
    for entry in entries_of(unit):
        # Newer torch has autograd add them up in the reduction's type, and reduces gradients of several types at once.
        if hasattr(entry, "accumulate_unsharded_grad_if_needed"):
            entry.accumulate_unsharded_grad_if_needed()
            if hasattr(entry, "_unsharded_param"):
                entry.to_accumulated_grad_if_needed()
    group_of(unit).post_backward()


def end_backward(root: FSDPModule) -> None:
    """Do what FSDP's root does at the end of backward, after a backward that has ended before."""
    state = root._get_fsdp_state()
    context = state._state_ctx
    # Newer torch notes when backward begins whether its caller ends it, and forgets that at the end.
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    state._root_post_backward_final_callback()
