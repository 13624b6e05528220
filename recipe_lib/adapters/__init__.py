"""Adapters: LoRA and DoRA on frozen, perhaps quantized weights; merging; the names that PEFT gives
them.
"""

from recipe_lib.adapters.lora import (
    adapter_parameters,
    adapters_off,
    add_adapters,
    describe_adapters,
    init_adapters,
    is_adapter,
    quantize_frozen,
)

__all__ = [
    "adapter_parameters",
    "adapters_off",
    "add_adapters",
    "describe_adapters",
    "init_adapters",
    "is_adapter",
    "quantize_frozen",
]
