"""Levers that trade time for memory, and measured peaks; torch is imported with the first name that needs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe_lib.memory.checkpointing import apply_activation_checkpointing
    from recipe_lib.memory.oom import explain_out_of_memory
    from recipe_lib.memory.peaks import PeakMemory, Peaks

__all__ = ["PeakMemory", "Peaks", "apply_activation_checkpointing", "explain_out_of_memory"]

_HOMES = {
    "PeakMemory": "peaks",
    "Peaks": "peaks",
    "apply_activation_checkpointing": "checkpointing",
    "explain_out_of_memory": "oom",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
