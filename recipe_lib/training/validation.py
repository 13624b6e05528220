"""What a model makes of data that are not trained on: the loss, and metrics of likelihoods and of answers."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recipe_lib.data import Batch, StepBatches
from recipe_lib.generation.answer_questions import generate_answers, metric_of_answers
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.fused_loss import IGNORED
from recipe_lib.ops.head_losses import TokenScores
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

    summed_loss: the sum of the token losses of a micro-batch. Also the numbers that `validation.metrics` names.
    """
    model.eval()
    loss, tokens = torch.zeros((), device=world.device, dtype=torch.float64), 0
    for together in validation_groups(parallel, data):
        found = result_of_each(parallel, summed_loss, [batches.micro_batches[0] for batches in together])
        for batches, part in zip(together, found, strict=True):
            loss += 0 if part is None else part
            tokens += batches.trained_tokens
    numbers = {
        "validation_loss": world.all_reduce_sum(loss).item() / max(1, tokens),
        "validation_tokens": tokens,
    }
    if data.scored_metrics:
        numbers |= _metrics_of_scores(model, parallel, data, world)
    if data.generated_metrics:
        numbers |= _metrics_of_answers(model, data, world)
    model.train()
    return numbers


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


def _metrics_of_scores(model: nn.Module, parallel: Parallel, data: TrainingData, world: "World") -> dict[str, float]:
    """The share of label tokens that are the likeliest, and of sequences in which all are."""
    sums = torch.zeros(4, device=world.device, dtype=torch.float64)  # label tokens, right ones, sequences, right ones

    def sums_of(batch: Batch) -> Tensor:
        _, tokens, right = sequence_sums(scores_by(model)(batch), batch).unbind(dim=1)
        real = tokens > 0
        return torch.stack([tokens.sum(), right.sum(), real.sum(), (real & (right == tokens)).sum()])

    for together in validation_groups(parallel, data):
        for found in result_of_each(parallel, sums_of, [batches.micro_batches[0] for batches in together]):
            sums += 0 if found is None else found
    tokens, right, sequences, exact = world.all_reduce_sum(sums).tolist()
    numbers = {"token_accuracy": right / max(1.0, tokens), "exact_match": exact / max(1.0, sequences)}
    return {f"validation_{name}": numbers[name] for name in data.scored_metrics}


def _metrics_of_answers(model: Any, data: TrainingData, world: "World") -> dict[str, float]:
    """The means of a plugin's metrics of the answers to all validation questions."""
    answers = generate_answers(model, model.spec, data.questions, world, **data.generation_options())
    found = {}
    for name in data.generated_metrics:
        numbers = metric_of_answers(name, answers, data.questions, data.tokenizer)
        found[f"validation_{name}"] = math.fsum(numbers.values()) / len(numbers)
    return found


# What a model makes of held-out sequences, each by itself: its log-likelihood, and how many of its
# label tokens are the likeliest ones, as greedy decoding would give them.


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
