"""What families of decoders are read by: the keys of a `config.json`, checked, and what several have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipe_lib.errors import CheckpointError
from recipe_lib.models.rope_config import NUMBERS, is_within, show_bounds

# What files of most families leave out.
COMMON: dict[str, Any] = {
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": None,
    "layer_types": None,
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class Fields:
    """The keys of one config.json, checked as they are read; each fault is one CheckpointError line."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def fault(self, key: str, expected: str) -> CheckpointError:
        """The error for a key that is missing or not what it should be."""
        found = repr(self.config[key])[:80] if key in self.config else "no such key"
        return CheckpointError(f"{self.where}: config.json: {key}: found {found}, expected {expected}")

    def integer(self, key: str) -> int:
        """A positive integer."""
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fault(key, "a positive integer")
        return value

    def number(self, key: str) -> float:
        """A number above 0."""
        if not is_within(self.config.get(key), NUMBERS):
            raise self.fault(key, f"a number {show_bounds(NUMBERS)}")
        return float(self.config[key])

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self.config.get(key)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or null."""
        return None if self.config.get(key) is None else self.number(key)


def activation(fields: Fields, key: str) -> str:
    """Our name of the MLP's activation."""
    name = fields.config.get(key)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.fault(key, "one of " + ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def layer_windows(fields: Fields, layers: int, sliding_by_default: list[bool]) -> tuple[int | None, ...]:
    """One window per layer, from `layer_types` where the file has it, else from the family's own rule."""
    window, types = fields.optional_integer("sliding_window"), fields.config["layer_types"]
    if types is None:
        sliding = sliding_by_default
    elif (
        isinstance(types, list)
        and len(types) == layers
        and all(kind in ("sliding_attention", "full_attention") for kind in types)
    ):
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        raise fields.fault("layer_types", f"{layers} times sliding_attention or full_attention")
    if window is None and any(sliding):
        raise fields.fault("sliding_window", "a positive integer, because some layers are sliding_attention")
    return tuple(window if slides else None for slides in sliding)


@dataclass(frozen=True)
class Family:
    """One family of decoders.

    shape: its fields of the spec where they differ from those that `_common_shape` reads. architectures: the classes
    in `architectures` that are its causal decoder; the first is what an exported model names. defaults: what its files
    leave out. model_types: further ones, besides the family's name.
    """

    shape: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    architectures: tuple[str, ...]
    defaults: dict[str, Any]
    model_types: tuple[str, ...] = ()
