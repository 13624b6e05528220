"""What a model makes of data that are not trained on: the loss, and metrics of likelihoods and of
answers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.data import Batch, StepBatches
from recipe_lib.generation.answer_questions import compute_metric, generate_answers
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.head_losses import TokenScores
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.micro_batches import result_of_each
from recipe_lib.training.training_data import TrainingData

_TOGETHER = 16  # batches that go through a pipeline at a time


@torch.no_grad()
def sum_over_validation(
    model: nn.Module,
    parallel: Parallel,
    data: TrainingData,
    results_of: Callable[[Sequence[Batch]], Iterable[Any]],
    sums: Tensor,
    *,
    batches_of: Callable[[StepBatches], Sequence[Batch]] = attrgetter("micro_batches"),
) -> tuple[int, int]:
    """Add numbers of all validation sequences, each counted once and without dropout, to this
    rank's sums in fp64.

    results_of: micro-batches to the numbers of each; None where another rank of the pipeline has
    them. batches_of: what it is given of one micro-batch of sequences. Returns the label tokens and
    the items. Collective.
    """
    model.eval()
    tokens = items = 0
    steps = data.validation_batches()
    at_once = _TOGETHER if parallel.pipeline is not None else 1
    while together := list(islice(steps, at_once)):
        for numbers in results_of([batch for batches in together for batch in batches_of(batches)]):
            sums += 0 if numbers is None else numbers
        tokens += sum(batches.num_label_tokens for batches in together)
        items += sum(batches.num_items for batches in together)
    model.train()
    return tokens, items


def name_validation(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers as those of a validation, on the host."""
    return {f"validation_{name}": value.item() for name, value in numbers.items()}


def validation_loss(
    model: nn.Module,
    parallel: Parallel,
    summed_loss: Callable[[Batch], torch.Tensor],
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Mean loss of the trained tokens of all validation sequences, each counted once; without
    dropout. Collective.

    summed_loss: the sum of the token losses of a micro-batch. Also the numbers that
    `validation.metrics` names.
    """
    loss = torch.zeros((), device=world.device, dtype=torch.float64)
    tokens, _ = sum_over_validation(
        model, parallel, data, partial(result_of_each, parallel, summed_loss), loss
    )
    numbers = {
        "validation_loss": world.all_reduce_sum(loss).item() / max(1, tokens),
        "validation_tokens": tokens,
    }
    if data.scored_metrics:
        numbers |= _metrics_of_scores(model, parallel, data, world)
    if data.generated_metrics:
        numbers |= _metrics_of_answers(model, data, world)
    return numbers


def _metrics_of_scores(
    model: nn.Module, parallel: Parallel, data: TrainingData, world: World
) -> dict[str, float]:
    """The share of label tokens that are the likeliest, and of sequences in which all are."""
    sums = torch.zeros(
        4, device=world.device, dtype=torch.float64
    )  # label tokens, right ones, sequences, right ones

    def sums_of(batch: Batch) -> Tensor:
        _, tokens, right = sequence_sums(scores_by(model)(batch), batch).unbind(dim=1)
        real = tokens > 0
        return torch.stack(
            [tokens.sum(), right.sum(), real.sum(), (real & (right == tokens)).sum()]
        )

    sum_over_validation(model, parallel, data, partial(result_of_each, parallel, sums_of), sums)
    tokens, right, sequences, exact = world.all_reduce_sum(sums).tolist()
    numbers = {
        "token_accuracy": right / max(1.0, tokens),
        "exact_match": exact / max(1.0, sequences),
    }
    return {f"validation_{name}": numbers[name] for name in data.scored_metrics}


def _metrics_of_answers(model: Any, data: TrainingData, world: World) -> dict[str, float]:
    """The means of a plugin's metrics of the answers to all validation questions."""
    model.eval()
    answers = generate_answers(
        model, model.spec, data.questions, world, **data.generation_options()
    )
    model.train()
    found = {}
    for name in data.generated_metrics:
        numbers = compute_metric(name, answers, data.questions, data.tokenizer)
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
    return lambda batch: token_scores_of(
        model, batch.tokens, batch.labels, batch.positions, batch.attention
    )


def sequence_sums(scores: Tensor, batch: Batch) -> Tensor:
    """For each sequence of a micro-batch, fp64 `[n, 3]`: log-likelihood, label tokens, and how many
    of these are as likely as the likeliest token. Rows, or where they hold several documents those;
    padding is one without labels.

    scores: `[b, s, 2]`, of `scores_by`.
    """
    counts = batch.labels != IGNORED
    right = counts & (scores[..., 0] == scores[..., 1])
    numbers = torch.stack(
        [scores[..., 0].double(), counts.double(), right.double()], dim=-1
    )  # [b, s, 3]
    documents = None if batch.attention is None else batch.attention.documents
    if documents is None:
        return numbers.sum(dim=1)
    rows, length = documents.shape
    places = documents.long() + length * torch.arange(rows, device=documents.device)[:, None]
    sums = numbers.new_zeros(rows * length, 3).index_add_(
        0, places.flatten(), numbers.flatten(0, 1)
    )
    return sums
