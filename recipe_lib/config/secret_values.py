"""Values that hold a token or a password: no key of a config takes one, as a config is written, logged and shared."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from recipe_lib.errors import ConfigError
from recipe_lib.redaction import holds_secret

if TYPE_CHECKING:
    from recipe_lib.config.check import Checked

_REFUSED = (
    "holds what looks like a token or a password, and configs are written to disk; remove it, and set it as an "
    "environment variable (HF_TOKEN, WANDB_API_KEY) or use `hf auth login`"
)


def refuse_secrets(checked: "Checked") -> None:
    """Notes a fault for each key that was set to a secret; the secret itself is in none of the lines."""
    for name, setting in checked.settings.items():
        if _is_secret(name, setting.value):
            checked.fault(setting.where, name, _REFUSED)


def check_no_secrets(cfg: Any) -> None:
    """ConfigError if a key of a config object holds a secret: a config may also be made without a file."""
    faults = [f"{name}: {_REFUSED}" for name, value in _leaves("", cfg) if _is_secret(name, value)]
    if faults:
        raise ConfigError(*faults)


def _is_secret(name: str, value: Any) -> bool:
    """Whether a value, or anything in it, is a secret; the name is a context, as in `api_key: 0123...`."""
    return any(holds_secret(f"{inner}={text}") for inner, text in _leaves(name, value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every text in a value, at any depth; the keys of a mapping are texts too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{name}[{number}]", inner)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield name, str(value)
