"""What reads the tokens of a batch of prompts, and those that follow, each once: keys and values are kept.

Prompts of different lengths are padded on the left, so that their next tokens stand in one column. Padding is a
document of its own (`AttentionInfo.documents`), which no token of the prompt sees, and positions count from the
prompt's first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recipe_lib.models.decoder import Decoder
from recipe_lib.models.kv_cache import KVCache
from recipe_lib.models.spec import DecoderSpec, ModelSpec
from recipe_lib.ops.attention import AttentionInfo, make_attention_info


def prompt_reader(
    model: Decoder, spec: ModelSpec, lengths: Sequence[int], room: int, device: torch.device | None = None
) -> Callable[[Tensor], Tensor]:
    """A function of tokens `[b, s]`, those that follow each time, to the logits `[b, v]` after the last of them.

    lengths: tokens of each prompt; the first call's are padded on the left to the longest of them. room: tokens of a
    row in all, padding included. device: that computes; None: where the model's weights are.
    """
    longest = max(lengths)
    weight = next(model.parameters())
    device = device or weight.device
    padding = torch.tensor([longest - length for length in lengths], device=device)
    padded = min(lengths) < longest
    if not isinstance(spec, DecoderSpec):
        return spec.token_reader(model, padding if padded else None)
    cache = KVCache(spec, len(lengths), room, weight.dtype, device)
    first = _without_padding(lengths, longest).to(device) if padded else None

    def read(unread: Tensor) -> Tensor:
        past, count = cache.length, unread.shape[1]
        positions, info = None, None
        if first is not None:
            places = torch.arange(past, past + count, device=device)
            positions = (places - padding[:, None]).clamp(min=0)
            info = first if past == 0 else _longer(first, past + count)
        return model(unread, positions, info, cache=cache, logits_to_keep=1)[:, -1]

    return read


def _without_padding(lengths: Sequence[int], longest: int) -> AttentionInfo:
    """Of rows whose first document is their padding."""
    return make_attention_info(
        [[longest - length, length] if length < longest else [length] for length in lengths], longest
    )


def _longer(info: AttentionInfo, length: int) -> AttentionInfo:
    """Rows whose last document has grown to so many tokens."""
    assert info.documents is not None
    rows, known = info.documents.shape
    grown = info.documents[:, -1:].expand(rows, length - known)
    return replace(info, documents=torch.cat([info.documents, grown], dim=1), boundaries=None, real=None)
