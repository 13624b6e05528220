"""Combinations with what is kept in host memory that are refused."""

from recipe_lib.config.combination import Incompatible

_SENT = ("memory.cpu_offload", "memory.optimizer_offload", "memory.activation_offload")

OFFLOAD: tuple[Incompatible, ...] = (
    Incompatible(
        "activation offload on a CPU",
        lambda cfg: cfg.memory.activation_offload and cfg.device == "cpu",
        ("device", "memory.activation_offload"),
        "on a CPU everything is in host memory already",
        "remove memory.activation_offload",
        ("device=cpu", "memory.activation_offload=true"),
    ),
    Incompatible(
        "activation offload with a checkpointing that chooses operators",
        lambda cfg: cfg.memory.activation_offload and cfg.memory.activation_checkpointing in ("selective", "budget"),
        ("memory.activation_checkpointing", "memory.activation_offload"),
        "what selective and budget keep is in a store of their own, which stays on the device",
        "choose full (each layer's input is sent) or none (all that it keeps is sent)",
        ("memory.activation_checkpointing=selective", "memory.activation_offload=true"),
    ),
    Incompatible(
        "layers ahead of nothing",
        lambda cfg: not cfg.memory.activation_offload,
        ("memory.activation_offload", "memory.activation_offload_prefetch_layers"),
        "nothing is sent that could be ahead",
        "remove memory.activation_offload_prefetch_layers, or set memory.activation_offload=true",
        ("memory.activation_offload_prefetch_layers=2",),
        unread="memory.activation_offload_prefetch_layers",
    ),
    Incompatible(
        "host memory for nothing",
        lambda cfg: not (cfg.memory.cpu_offload or cfg.memory.optimizer_offload or cfg.memory.activation_offload),
        ("memory.host_memory_limit_gib",),
        "nothing is kept in host memory",
        f"remove it, or set one of {', '.join(_SENT)}",
        ("memory.host_memory_limit_gib=64",),
        unread="memory.host_memory_limit_gib",
        reads=_SENT,
    ),
)
