"""Which operators make the host wait for the device, and what for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipe_lib.plan.streams.code_line import Line, text_of
from recipe_lib.plan.tracing.operator_costs import tensors_in

# Operators whose result has a size, or is a number, that the host reads from the device.
_READS = {
    "aten::_local_scalar_dense": ".item()",
    "aten::item": ".item()",
    "aten::is_nonzero": "a condition on a tensor",
    "aten::equal": "torch.equal",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique_consecutive",
    "aten::bincount": "bincount",
}


@dataclass(frozen=True)
class HostWait:
    """The host stalls until the device comes to it. what: `.item()`, `a blocking copy to the host`, ... place:
    the line of code. module, part: as an `Op` has them. phase: of the trace."""

    what: str
    place: Line
    module: str
    part: str
    phase: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, [self.part, self.module]))
        return f"{self.what} at {text_of(self.place)} ({where})"


def reads_value(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> str:
    """What of an operator's result the host reads from tensors of the device, in words; "": nothing."""
    if name in _READS:
        on_device = any(_type(tensor) == device for tensor in tensors_in((args, tuple(kwargs.values()))))
        return _READS[name] if on_device else ""
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        indices = [one for one in args[1] if isinstance(one, Tensor)]
        if any(one.dtype in (torch.bool, torch.uint8) and _type(one) == device for one in indices):
            return "indexing by a mask"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        repeats = [one for one in tensors_in(args) if _type(one) == device]
        if repeats and "Tensor" in func._overloadname and len(args) < 3:
            return "repeat_interleave without output_size"
    return ""


def copy_waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], transfer: str, pinned: bool) -> str:
    """Why the host waits in a copy between it and the device, in words; "": it does not.

    pinned: whether the host's side is. One to memory that is not pinned is done when it returns; one from there waits
    for its stream first (CUDA's documentation, "API synchronization behavior").
    """
    blocking = not kwargs.get("non_blocking", len(args) > 2 and name == "aten::copy_" and args[2])
    way = "to the host" if transfer == "to_host" else "to the device"
    if not pinned:
        return f"a copy {way} {'into' if transfer == 'to_host' else 'from'} memory that is not pinned"
    return f"a blocking copy {way}" if blocking else ""


def _type(tensor: Tensor) -> str:
    return tensor.device.type
