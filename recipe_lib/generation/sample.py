"""Next tokens from logits, and the loop that appends them: `[1, s]` tokens in, ids out one by one.

What reads the tokens of a batch of prompts, and those that follow, each once: keys and values are kept.

Prompts of different lengths are padded on the left, so that their next tokens stand in one column. Padding is a
document of its own (`AttentionInfo.documents`), which no token of the prompt sees, and positions count from the
prompt's first token.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recipe_lib.models.decoder import Decoder, KVCache
from recipe_lib.models.spec import DecoderSpec, ModelSpec
from recipe_lib.ops.attention import AttentionInfo, make_attention_info


def next_probabilities(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities `[b, v]` (fp32) that the next token is drawn from, given logits `[b, v]`.

    temperature (> 0) divides the logits. top_k then keeps the k likeliest tokens; top_p keeps, of those and by their
    renormalized probabilities, the fewest likeliest whose sum reaches p (arXiv 1904.09751), at least one.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: probabilities need one above 0")
    ordered, order = (logits.float() / temperature).sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if top_p is not None:
        likelier = probabilities.cumsum(dim=-1) - probabilities  # sum over the tokens before each
        likelier[..., 0] = 0.0
        beyond = likelier >= top_p
        beyond[..., 0] = False
        probabilities = probabilities.masked_fill(beyond, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)


def sample_next(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Ids `[b]` of the next tokens, given logits `[b, v]`: the likeliest (temperature 0), or drawn.

    generator: the source of randomness, on the logits' device; None: torch's own.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = next_probabilities(logits, temperature, top_k, top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def generate(
    model: Decoder,
    spec: ModelSpec,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Ids that follow `tokens` (at least one), as they are chosen.

    It ends before the first id in `stop_ids`, after `max_new_tokens`, or when prompt and completion are as long as
    the model was made for (`spec.max_positions`). Keys and values are kept, so each token is computed once.
    """
    if not tokens:
        raise ValueError("generate needs at least one token to begin from")
    count = min(max_new_tokens, spec.max_positions - len(tokens))
    read = prompt_reader(model, spec, [len(tokens)], len(tokens) + max(count, 0))
    unread = torch.tensor([list(tokens)], device=next(model.parameters()).device)  # [1, s], later [1, 1]
    for _ in range(count):
        chosen = sample_next(read(unread), temperature, top_k, top_p, generator)
        token = int(chosen)
        if token in stop_ids:
            return
        yield token
        unread = chosen[:, None]


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
