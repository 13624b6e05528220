"""What the forward of a class of another library is called with: tokens, and what keeps documents of a row apart."""

from typing import Any

import torch
from torch import Tensor

from recipe_lib.ops.attention import AttentionInfo


def external_inputs(
    accepted: frozenset[str],
    windows: bool,
    tokens: Tensor,
    positions: Tensor | None,
    attention: AttentionInfo | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What a class' forward is called with; accepted: the names of its parameters.

    Rows are padded on the right, so that causality alone hides the padding. Documents are kept apart by a mask
    `[b, 1, s, s]` of `dtype`; in a model with windows by the positions alone, of which transformers makes masks that
    keep the windows. What does not come of it is noticed by `check_packing_isolation`.
    """
    inputs: dict[str, Any] = {"input_ids": tokens}
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    if attention is None or attention.documents is None:
        if positions is not None and "position_ids" in accepted:
            inputs["position_ids"] = positions
        return inputs
    if "position_ids" in accepted:
        inputs["position_ids"] = positions
    if "attention_mask" in accepted and not windows:
        documents, length = attention.documents, tokens.shape[1]
        order = torch.arange(length, device=tokens.device)
        seen = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order)
        mask = torch.zeros(seen.shape, dtype=dtype, device=tokens.device)
        inputs["attention_mask"] = mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)
    return inputs
