"""Which keys change the memory of a run, and which overrides say nothing about its user. No torch."""

import re
from collections.abc import Iterable
from functools import reduce
from typing import Any

from recipe_lib.config.describe import value_text
from recipe_lib.config.keys import read_schema

# Sections, and single keys of others.
LEVER_SECTIONS = ("lora", "dpo", "distill", "memory", "parallel")
LEVERS = (
    "compile", "fused_kernels", "matmul_dtype", "qat", "qat_group_size", "loss", "model.implementation", "data.packing",
    "data.pad_to_multiple_of", "optimizer.name", "optimizer.momentum", "optimizer.state_bits",
    "optimizer.master_weights", "optimizer.stochastic_rounding", "optimizer.implementation",
)  # fmt: skip
# Of those sections what changes no peak of a step, and what the mesh says.
NO_LEVERS = (
    "lora.alpha", "lora.rslora", "lora.adapter_path", "lora.merge_on_save",
    "dpo.beta", "dpo.label_smoothing", "dpo.simpo_gamma",
    "distill.teacher", "distill.teacher_preset", "distill.beta", "distill.temperature",
    "distill.weight", "memory.host_memory_limit_gib",
    "parallel.data_shard", "parallel.data_replicate", "parallel.context", "parallel.tensor",
    "parallel.pipeline",
    "parallel.heartbeat_timeout_seconds",
)  # fmt: skip
# Keys whose text says nothing about a user's data, folders and accounts.
_HARMLESS = re.compile(
    r"(lora|dpo|memory|parallel|optimizer|lr_scheduler|model)\..*|dtype|matmul_dtype|qat|loss|"
    r"distill\.(divergence|quantize_teacher|trainable)"
)
_PLAIN = re.compile(r"[+-]?[\d_.]+(e[+-]?\d+)?|true|false|null", re.IGNORECASE)


def levers_of(cfg: Any) -> dict[str, str]:
    """Key to value, as a config has it, of those that are not at their defaults."""
    schema: type = type(cfg)
    found = {}
    for name, key in read_schema(schema).keys.items():
        if name in NO_LEVERS or not (name in LEVERS or name.partition(".")[0] in LEVER_SECTIONS):
            continue
        value = reduce(getattr, name.split("."), cfg)
        if value != key.default:
            found[name] = value_text(value)
    return found


def harmless_overrides(overrides: Iterable[str]) -> list[str]:
    """Those that say nothing about the user: texts only of keys that hold none, elsewhere numbers, true and false."""
    return [word for word in overrides if word.startswith("~") or _is_harmless(*word.partition("=")[::2])]


def _is_harmless(key: str, value: str) -> bool:
    if _PLAIN.fullmatch(value):
        return True
    names_file = key.endswith("path") and key != "model.path"
    return _HARMLESS.fullmatch(key) is not None and not names_file
