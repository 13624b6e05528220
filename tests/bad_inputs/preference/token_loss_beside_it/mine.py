"""A loss over tokens."""

from recipe_lib.config import register


@register("loss", "mine")
def mine(logits, labels):
    return logits.sum()
