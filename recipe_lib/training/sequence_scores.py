"""What a model makes of held-out sequences, each by itself: its log-likelihood, and how many of its label tokens are
the likeliest ones, as greedy decoding would give them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipe_lib.data import Batch
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.head_losses import TokenScores

_ROWS = 512  # tokens whose logits exist at a time


def token_scores_of(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    attention: AttentionInfo | None = None,
) -> Tensor:
    """Scores `[b, s, 2]` of labels, by calling the model; see `TokenScores`."""
    head_loss = TokenScores(-(-tokens.numel() // _ROWS))
    found: Tensor = model(tokens, positions, attention, labels=labels, head_loss=head_loss)
    return found


def scores_by(model: nn.Module) -> Callable[[Batch], Tensor]:
    """Those of a micro-batch."""
    return lambda batch: token_scores_of(model, batch.tokens, batch.labels, batch.positions, batch.attention)


def sequence_sums(scores: Tensor, batch: Batch) -> Tensor:
    """For each sequence of a micro-batch, fp64 `[n, 3]`: log-likelihood, label tokens, and how many of these are as
    likely as the likeliest token. Rows, or where they hold several documents those; padding is one without labels.

    scores: `[b, s, 2]`, of `scores_by`.
    """
    counts = batch.labels != IGNORED
    right = counts & (scores[..., 0] == scores[..., 1])
    numbers = torch.stack([scores[..., 0].double(), counts.double(), right.double()], dim=-1)  # [b, s, 3]
    documents = None if batch.attention is None else batch.attention.documents
    if documents is None:
        return numbers.sum(dim=1)
    rows, length = documents.shape
    places = documents.long() + length * torch.arange(rows, device=documents.device)[:, None]
    sums = numbers.new_zeros(rows * length, 3).index_add_(0, places.flatten(), numbers.flatten(0, 1))
    return sums
