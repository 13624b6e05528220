"""Adapters of a mixture's experts against those of its other matrices: how many numbers, how many bytes, as built."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from recipe_lib.adapters import add_adapters
from recipe_lib.config.optimizer_facts import BYTES, state_bytes
from recipe_lib.models import build_meta
from recipe_lib.plan.router_choices import mixture_of
from recipe_lib.plan.world.shape_only_model import spec_of
from recipe_lib.units import format_bytes, format_count

_EXPERTS = "experts"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def other_targets(cfg: Any) -> list[str] | None:
    """`lora.target_modules` with the experts of a plannable config's model, or without them where it has them; None
    where it trains no new adapters, its model has no experts, or nothing else is adapted."""
    adapters = cfg.trained_adapters
    if adapters is None or adapters.adapter_path is not None or mixture_of(cfg) is None:
        return None
    if _EXPERTS not in adapters.target_modules:
        return [*adapters.target_modules, _EXPERTS]
    return [name for name in adapters.target_modules if name != _EXPERTS] or None


def compared_text(cfg: Any, targets: list[str]) -> str:
    """What adapters of other targets take, next to those of the config's own."""
    own = cfg.trained_adapters.target_modules
    with_experts, without = (targets, own) if _EXPERTS in targets else (own, targets)
    return (
        f"adapters, with their gradients and optimizer states: {_adapters_text(cfg, with_experts)} with those of all "
        f"experts, {_adapters_text(cfg, without)} without"
    )


def _adapters_text(cfg: Any, targets: list[str]) -> str:
    numbers = trained_numbers(cfg, targets)
    width = BYTES[cfg.trained_adapters.dtype or cfg.dtype]
    size = numbers * (2 * width + state_bytes(cfg.optimizer, width, in_layer=True))
    return f"{format_bytes(int(size))} ({format_count(numbers)} numbers)"


def trained_numbers(cfg: Any, targets: list[str]) -> int:
    """The numbers of the adapters that a plannable config's model has on such targets."""
    lora = replace(deepcopy(cfg.trained_adapters), target_modules=targets, quantize_base="none")
    dtype = _DTYPES[cfg.dtype]
    model = build_meta(spec_of(cfg), dtype)
    add_adapters(model, lora, dtype)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
