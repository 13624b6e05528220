"""Train LoRA and DoRA adapters on frozen, perhaps quantized weights, with PEFT's names."""

from recipe_lib.adapters.lora import (
    add_adapters,
    describe_adapters,
    disable_adapters,
    get_adapter_parameters,
    init_adapters,
    is_adapter,
    quantize_frozen,
)

__all__ = [
    "get_adapter_parameters",
    "disable_adapters",
    "add_adapters",
    "describe_adapters",
    "init_adapters",
    "is_adapter",
    "quantize_frozen",
]
