"""Next tokens from logits, and the loop that appends them: `[1, s]` tokens in, ids out one by one."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from recipe_lib.generation.prompt_reader import prompt_reader
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.spec import ModelSpec


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
