"""Losses by registered name. The built-in one is `recipe_lib.ops.cross_entropy`; a plugin registers its own."""

from recipe_lib.config.registry import registered
from recipe_lib.ops.cross_entropy import Loss


def build_loss(name: str) -> Loss:
    """The loss registered as `name`: `fn(logits [m, v], labels [m]) -> summed scalar` over one chunk of m tokens.

    ConfigError with the nearest name if there is none.
    """
    return registered("loss", name)
