"""The modules that PEFT puts an adapter on, by the keys of a config: it leaves others out when it loads a file."""

import re
from collections.abc import Sequence
from typing import Any

from recipe_lib.adapters.peft_patterns import PatternError, first_matches
from recipe_lib.checkpoint.adapter_config import PATTERN_REMEDY, AdapterConfig
from recipe_lib.errors import CheckpointError

_ALL_LINEAR = "all-linear"  # but for the head, which is a linear too
_NO_LINEARS = ("embed_tokens", "lm_head")


def find_unselected(config: AdapterConfig, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first module that PEFT would leave out, and the key by which it does; None: it leaves out none.

    names: of modules, as the file has them. Raises CheckpointError for a pattern that cannot be matched.
    """
    excluded = _match(config, "exclude_modules", names)
    targeted = _match(config, "target_modules", names)
    chosen: Any = config.selection.get("target_modules")
    layers: Any = config.selection.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for number, name in enumerate(names):
        if any(f".{name}.weight".endswith(f".{end}") for end in config.parameters):
            continue  # by its parameter: PEFT asks no other key then
        if excluded[number]:
            return name, "exclude_modules"
        if any(f".{saved}." in f".{name}." for saved in config.saved):
            return name, "modules_to_save"
        if chosen is not None and not targeted[number]:  # None: PEFT's own table, or target_parameters
            return name, "target_modules"
        if isinstance(chosen, list) and name in chosen:
            continue  # by its whole name, whatever the layers
        if layers and _find_layer(config, name) not in layers:
            return name, "layers_to_transform"
    return None


def _match(config: AdapterConfig, key: str, names: Sequence[str]) -> list[bool]:
    """Return for each name whether a key that takes ends of names or a pattern names it."""
    chosen: Any = config.selection.get(key)
    if key == "target_modules" and isinstance(chosen, str) and chosen.lower() == _ALL_LINEAR:
        return [not name.endswith(_NO_LINEARS) for name in names]
    if isinstance(chosen, str) and chosen:
        try:
            return [number is not None for number in first_matches([chosen], names, whole=True)]
        except PatternError as fault:
            raise CheckpointError(f"{config.path}: {key}: {fault}; {PATTERN_REMEDY}") from None
    return [any(f".{name}".endswith(f".{end}") for end in chosen or ()) for name in names]


def _find_layer(config: AdapterConfig, name: str) -> int | None:
    """Return the number of the layer that a module is in; of several numbers in its name the first."""
    patterns: Any = config.selection.get("layers_pattern")
    if not patterns:
        layer_match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns)
        layer_match = next((match for match in matches if match), None)
    return int(layer_match[1]) if layer_match else None
