"""The loss on rows that are not trained on."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from recipe_lib.data import Batch
from recipe_lib.training.data import TrainingData

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


@torch.no_grad()
def validation_loss(
    model: nn.Module, summed_loss: Callable[[Batch], torch.Tensor], data: TrainingData, world: "World"
) -> dict[str, float]:
    """Mean loss of the trained tokens of all validation rows, each counted once; without dropout. Collective.

    summed_loss: the sum of the token losses of a micro-batch.
    """
    model.eval()
    loss, tokens = torch.zeros((), device=world.device, dtype=torch.float64), 0
    for batches in data.validation_batches():
        loss += summed_loss(batches.micro_batches[0])
        tokens += batches.trained_tokens
    model.train()
    return {
        "validation_loss": world.all_reduce_sum(loss).item() / max(1, tokens),
        "validation_tokens": tokens,
    }
