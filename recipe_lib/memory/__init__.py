"""Levers that trade time for memory, and measured peaks."""

from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.oom import explain_out_of_memory
from recipe_lib.memory.peaks import PeakMemory, Peaks

__all__ = ["PeakMemory", "Peaks", "apply_activation_checkpointing", "explain_out_of_memory"]
