"""What a model makes of data that are not trained on: the loss, and metrics of likelihoods and of
answers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.data import Batch, StepBatches
from recipe_lib.generation.sample import compute_metric, generate_answers
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.head_losses import TokenScores
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.micro_batches import evaluate_micro_batches
from recipe_lib.training.training_data import TrainingData

_TOGETHER = 16  # batches that go through a pipeline at a time


@torch.no_grad()
def sum_over_validation(
    model: nn.Module,
    parallel: Parallel,
    data: TrainingData,
    compute_sums: Callable[[Sequence[Batch]], Iterable[Tensor | None]],
    sums: Tensor,
    *,
    take: Callable[[StepBatches], Sequence[Batch]] = attrgetter("micro_batches"),
) -> tuple[int, int]:
    """Add the sums of all validation sequences, each counted once and without dropout, to this
    rank's `sums` in fp64; return the label tokens and the items. Collective.

    compute_sums: gives those of each micro-batch; None where another rank of the pipeline has them,
    or they are added already. take: what it is given of a step.
    """
    model.eval()
    tokens = items = 0
    steps = data.validation_batches()
    at_once = _TOGETHER if parallel.pipeline is not None else 1
    while together := list(islice(steps, at_once)):
        micro_batches: list[Batch] = []
        for batches in together:
            micro_batches += take(batches)
        for batch_sums in compute_sums(micro_batches):
            if batch_sums is not None:
                sums += batch_sums
        tokens += sum(batches.num_label_tokens for batches in together)
        items += sum(batches.num_items for batches in together)
    model.train()
    return tokens, items


def add_to_each(
    parallel: Parallel, add_sums: Callable[[Batch, Tensor], Any], sums: Tensor
) -> Callable[[Sequence[Batch]], Iterator[None]]:
    """Return what `sum_over_validation` takes, of a function that runs a micro-batch and adds to
    `sums` itself.
    """

    def add(batch: Batch) -> None:
        add_sums(batch, sums)

    return partial(evaluate_micro_batches, parallel, add)


def name_validation(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers as those of a validation, on the host."""
    return {f"validation_{name}": value.item() for name, value in numbers.items()}


def compute_validation_loss(
    model: nn.Module,
    parallel: Parallel,
    compute_loss: Callable[[Batch], torch.Tensor],
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Return the mean loss of the label tokens of all validation sequences, each counted once;
    without dropout. Also the numbers that `validation.metrics` names. Collective.

    compute_loss: the sum of the token losses of a micro-batch.
    """
    loss = torch.zeros((), device=world.device, dtype=torch.float64)
    tokens, _ = sum_over_validation(
        model, parallel, data, partial(evaluate_micro_batches, parallel, compute_loss), loss
    )
    numbers = {
        "validation_loss": world.all_reduce_sum(loss).item() / max(1, tokens),
        "validation_tokens": tokens,
    }
    if data.scored_metrics:
        numbers |= _compute_score_metrics(model, parallel, data, world)
    if data.generated_metrics:
        numbers |= _compute_answer_metrics(model, data, world)
    return numbers


def _compute_score_metrics(
    model: nn.Module, parallel: Parallel, data: TrainingData, world: World
) -> dict[str, float]:
    """Return the share of label tokens that are the likeliest, and of sequences in which all
    are.
    """
    # Label tokens, right ones, sequences, right ones.
    sums = torch.zeros(4, device=world.device, dtype=torch.float64)

    def compute_sums(batch: Batch) -> Tensor:
        _, tokens, right = sum_over_sequences(make_scorer(model)(batch), batch).unbind(dim=1)
        real = tokens > 0
        return torch.stack(
            [tokens.sum(), right.sum(), real.sum(), (real & (right == tokens)).sum()]
        )

    sum_over_validation(
        model, parallel, data, partial(evaluate_micro_batches, parallel, compute_sums), sums
    )
    tokens, right, sequences, exact = world.all_reduce_sum(sums).tolist()
    numbers = {
        "token_accuracy": right / max(1.0, tokens),
        "exact_match": exact / max(1.0, sequences),
    }
    return {f"validation_{name}": numbers[name] for name in data.scored_metrics}


def _compute_answer_metrics(model: Any, data: TrainingData, world: World) -> dict[str, float]:
    """Return the means of a plugin's metrics of the answers to all validation questions."""
    model.eval()
    answers = generate_answers(
        model, model.spec, data.questions, world, **data.generation_options()
    )
    model.train()
    means = {}
    for name in data.generated_metrics:
        values = compute_metric(name, answers, data.questions, data.tokenizer)
        means[f"validation_{name}"] = math.fsum(values.values()) / len(values)
    return means


# What a model makes of held-out sequences, each by itself: its log-likelihood, and how many of its
# label tokens are the likeliest ones, as greedy decoding would give them.


_CHUNK_TOKENS = 512  # tokens whose logits exist at a time


def compute_token_scores(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    attention: AttentionInfo | None = None,
) -> Tensor:
    """Return scores `[b, s, 2]` of labels, by calling the model; see `TokenScores`."""
    head_loss = TokenScores(-(-tokens.numel() // _CHUNK_TOKENS))
    scores: Tensor = model(tokens, positions, attention, labels=labels, head_loss=head_loss)
    return scores


def make_scorer(model: nn.Module) -> Callable[[Batch], Tensor]:
    """Return what gives the token scores of a micro-batch by calling the model."""
    return lambda batch: compute_token_scores(
        model, batch.tokens, batch.labels, batch.positions, batch.attention
    )


def sum_over_sequences(scores: Tensor, batch: Batch) -> Tensor:
    """Return for each sequence of a micro-batch, fp64 `[n, 3]`: log-likelihood, label tokens, and
    how many of these are as likely as the likeliest token.

    A sequence is a row, or where rows hold several documents one of those; padding is one without
    labels.

    scores: `[b, s, 2]`, of `make_scorer`.
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
