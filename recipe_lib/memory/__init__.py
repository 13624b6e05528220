"""Apply levers, which trade time or precision for memory, and measure peaks of memory."""

from recipe_lib.memory.activation_offload import offload_activations
from recipe_lib.memory.apply_levers import apply_memory_levers, compile_layers
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.low_precision import use_low_precision
from recipe_lib.memory.mlp_tiles import chunk_mlps
from recipe_lib.memory.peaks import PeakMemory, Peaks, explain_out_of_memory

__all__ = [
    "PeakMemory",
    "Peaks",
    "apply_activation_checkpointing",
    "apply_memory_levers",
    "chunk_mlps",
    "compile_layers",
    "explain_out_of_memory",
    "offload_activations",
    "use_low_precision",
]
