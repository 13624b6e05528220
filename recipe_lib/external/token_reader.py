"""Generating with a model of another library: tokens that follow one another in, logits of the next ones out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipe_lib.errors import SetupError
from recipe_lib.models.spec import ExternalSpec


def token_reader(
    forward: Callable[..., Any], accepted: frozenset[str], padding: Tensor | None, spec: ExternalSpec
) -> Callable[[Tensor], Tensor]:
    """A function of tokens `[b, s]` that follow one another, to the logits `[b, v]` after the last of them.

    Keys and values are kept in the cache that the class makes; a class that returns none reads everything again.
    forward: of the class; accepted: the names that it takes. padding: see `ExternalSpec.token_reader`.
    """
    if padding is not None and "attention_mask" not in accepted:
        raise SetupError(f"{spec.family}: its forward takes no attention_mask; read one prompt at a time")
    cache, seen = None, None

    def read(unread: Tensor) -> Tensor:
        nonlocal cache, seen
        seen = unread if seen is None else torch.cat([seen, unread], dim=1)
        inputs: dict[str, Any] = {"input_ids": seen if cache is None else unread}
        if padding is not None:
            inputs |= _padded_inputs(padding, seen, inputs["input_ids"].shape[1], accepted, spec.max_positions)
        if {"use_cache", "past_key_values"} <= accepted:
            inputs |= {"use_cache": True, "past_key_values": cache}
        elif "use_cache" in accepted:
            inputs["use_cache"] = False
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = 1
        output = forward(**inputs)
        cache = getattr(output, "past_key_values", None)
        return logits_of(output)[:, -1]

    return read


def _padded_inputs(
    padding: Tensor, seen: Tensor, unread: int, accepted: frozenset[str], most: int
) -> dict[str, Tensor]:
    """The mask of all tokens seen `[b, t]`, and positions `[b, unread]` that count from a row's first real token."""
    places = torch.arange(seen.shape[1], device=seen.device)
    inputs = {"attention_mask": (places >= padding[:, None]).long()}
    if "position_ids" in accepted:
        inputs["position_ids"] = (places[-unread:] - padding[:, None]).clamp(0, most - 1)
    return inputs


def logits_of(output: Any) -> Tensor:
    """The logits of what a forward returns: a tensor, an object with `.logits`, or a tuple that begins with them."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    found = output[0] if found is None and isinstance(output, (tuple, list)) else found
    if not isinstance(found, Tensor):
        raise SetupError(f"model.implementation: forward returned {type(output).__name__}, expected logits or .logits")
    return found
