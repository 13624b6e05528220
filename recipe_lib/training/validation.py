"""The loss on data that are not trained on."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recipe_lib.data import Batch, StepBatches
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.training.micro_batches import result_of_each
from recipe_lib.training.training_data import TrainingData

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

_TOGETHER = 16  # batches that go through a pipeline at a time


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    parallel: Parallel,
    summed_loss: Callable[[Batch], torch.Tensor],
    data: TrainingData,
    world: "World",
) -> dict[str, float]:
    """Mean loss of the trained tokens of all validation sequences, each counted once; without dropout. Collective.

    summed_loss: the sum of the token losses of a micro-batch.
    """
    model.eval()
    loss, tokens = torch.zeros((), device=world.device, dtype=torch.float64), 0
    for together in validation_groups(parallel, data):
        found = result_of_each(parallel, summed_loss, [batches.micro_batches[0] for batches in together])
        for batches, part in zip(together, found, strict=True):
            loss += 0 if part is None else part
            tokens += batches.trained_tokens
    model.train()
    return {
        "validation_loss": world.all_reduce_sum(loss).item() / max(1, tokens),
        "validation_tokens": tokens,
    }


@torch.no_grad()
def validation_sums(
    model: nn.Module,
    numbers_of: Callable[[Sequence[Batch]], Iterator[Any]],
    count: int,
    parallel: Parallel,
    data: TrainingData,
    world: "World",
) -> tuple[torch.Tensor, int]:
    """Numbers summed over all validation items, fp64 `[count]`, and how many items; without dropout. Collective.

    numbers_of: micro-batches to the numbers of each; None where another rank of the pipeline has them.
    """
    model.eval()
    sums, items = torch.zeros(count, device=world.device, dtype=torch.float64), 0
    for together in validation_groups(parallel, data):
        for numbers in numbers_of([batches.micro_batches[0] for batches in together]):
            sums += 0 if numbers is None else numbers
        items += sum(batches.items for batches in together)
    model.train()
    return world.all_reduce_sum(sums), items


def validation_groups(parallel: Parallel, data: TrainingData) -> Iterator[list[StepBatches]]:
    """The validation sequences, one micro-batch in each: so many of them as go through a pipeline at a time."""
    batches = data.validation_batches()
    while together := list(islice(batches, _TOGETHER if parallel.pipeline is not None else 1)):
        yield together
