"""Compute losses of micro-batches, and sums and metrics over all validation sequences.

Recipes whose loss is cross-entropy call `build_head_loss` and `compute_validation_loss`. Those with
another loss call `compute_answer_logps` and `sum_over_validation`. `tune eval` calls `make_scorer`
and `sum_over_sequences`. A label token is one that the loss counts. An item is what a method counts
in a batch: a sequence, or a pair of two.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.config import FullFinetuneConfig, get_registered
from recipe_lib.data import Batch, StepBatches
from recipe_lib.generation.sample import compute_metric, generate_answers
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.head_losses import CrossEntropy, TokenScores
from recipe_lib.parallel import Parallel, World
from recipe_lib.training.training_data import TrainingData

_PIPELINE_BATCHES = 16  # validation micro-batches that a pipeline runs in one schedule
_CHUNK_TOKENS = 512  # about as many tokens have their logits in memory at a time


def build_head_loss(cfg: FullFinetuneConfig) -> CrossEntropy:
    """Return the head loss that sums the token losses of `loss`, in `memory.loss_chunks` chunks.

    A head loss computes a loss from hidden states, without the logits of all tokens at once. The
    built-in one is in `ops.head_losses`; a plugin registers its own as `fn(logits [m, v], labels
    [m]) -> sum`. Raise ConfigError, with the nearest name, for a loss that is not registered.
    """
    return CrossEntropy(cfg.memory.loss_chunks, get_registered("loss", cfg.loss))


def evaluate_micro_batches(
    parallel: Parallel,
    compute: Callable[[Batch], Any],
    micro_batches: Sequence[Batch],
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Any]:
    """Return an iterator over the results of `compute` for each micro-batch, without gradients.

    compute: calls the model. In a pipeline it is called on the rank with the last stage alone, and
    the results of other ranks are None. inside: makes the context that the model's calls run in,
    such as one that switches an adapter off.
    """
    # A pipeline's schedule runs all micro-batches together. Without a pipeline, each runs when its
    # result is asked for, so that only one is in memory.
    if parallel.pipeline is not None:
        with inside():
            results = parallel.pipeline.evaluate(
                micro_batches, lambda number, batch: compute(batch)
            )
        return iter(results)
    return (_compute_without_gradients(batch, compute, inside) for batch in micro_batches)


@torch.no_grad()
def _compute_without_gradients(
    batch: Batch,
    compute: Callable[[Batch], Any],
    inside: Callable[[], AbstractContextManager[Any]],
) -> Any:
    with inside():
        return compute(batch)


def get_values(batch: Batch) -> Tensor:
    """Return the labels of a micro-batch's items, one each.

    They are margins of pairs, indices of classes, or 1 for a desirable answer and 0 for another
    (KTO). Raise ValueError if the items have no labels.
    """
    if batch.targets is None:
        raise ValueError("this batch holds no labels")
    return batch.targets


def compute_answer_logps(token_logps: Tensor, batch: Batch, *, mean: bool) -> Tensor:
    """Return the log-probability of each answer of a micro-batch, fp64 `[answers]`.

    The answers of p pairs are `[2 p]`: chosen, rejected, chosen, ... token_logps: `[b, s]`, 0 where
    there is no label. mean: True: average over an answer's label tokens; False: sum. Raise
    ValueError for a batch without sequence ids, which tell the sequence of each token.
    """
    if batch.sequence_ids is None:
        raise ValueError("this batch holds no pairs")
    num_answers = batch.num_sequences
    # Padding has the id -1. It is summed into one more answer, which is dropped.
    answer_ids = torch.where(batch.sequence_ids < 0, num_answers, batch.sequence_ids).flatten()

    def sum_by_answer(values: Tensor) -> Tensor:
        """Return the sum of values `[b, s]` for each answer."""
        sums = values.new_zeros(num_answers + 1)
        return sums.index_add(0, answer_ids, values.flatten())[:num_answers]

    # In fp64: an answer's log-probability is in the hundreds, and losses use small differences.
    sums = sum_by_answer(token_logps.double())
    if not mean:
        return sums
    num_tokens = sum_by_answer((batch.labels != IGNORED).double())
    return sums / num_tokens.clamp(min=1)


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
    """Add up sums over this rank's validation sequences; return (label tokens, items). Collective.

    Each sequence counts once, without dropout. The two counts are those of all ranks.

    compute_sums: gets a list of micro-batches and returns the sums of each. Sums of None are left
    out: another rank of the pipeline has them, or they have been added already. sums: this rank's
    totals, fp64, added to in place. take: returns the micro-batches of a step that are used; by
    default all but its mismatched ones.
    """
    model.eval()
    num_label_tokens = 0
    num_items = 0
    steps = data.validation_batches()
    num_at_once = _PIPELINE_BATCHES if parallel.pipeline is not None else 1
    while step_group := list(islice(steps, num_at_once)):
        micro_batches: list[Batch] = []
        for batches in step_group:
            micro_batches += take(batches)
            num_label_tokens += batches.num_label_tokens
            num_items += batches.num_items
        for batch_sums in compute_sums(micro_batches):
            if batch_sums is not None:
                sums += batch_sums
    model.train()
    return num_label_tokens, num_items


def add_to_each(
    parallel: Parallel, add_sums: Callable[[Batch, Tensor], Any], sums: Tensor
) -> Callable[[Sequence[Batch]], Iterator[None]]:
    """Return a `compute_sums` for `sum_over_validation`, made of a function that adds by itself.

    add_sums: runs a micro-batch and adds its sums to a tensor, in place. sums: that tensor.
    """

    def add(batch: Batch) -> None:
        add_sums(batch, sums)

    return partial(evaluate_micro_batches, parallel, add)


def name_validation(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """Return tensors of one element as numbers, with `validation_` before their names."""
    return {f"validation_{name}": value.item() for name, value in numbers.items()}


def compute_validation_loss(
    model: nn.Module,
    parallel: Parallel,
    compute_loss: Callable[[Batch], Tensor],
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Return the mean loss over all validation label tokens, and `validation.metrics`. Collective.

    Each sequence counts once, without dropout. compute_loss: returns the sum of a micro-batch's
    token losses. The result has the names `validation_...`.
    """
    loss = torch.zeros((), device=world.device, dtype=torch.float64)
    num_label_tokens, _ = sum_over_validation(
        model,
        parallel,
        data,
        compute_sums=partial(evaluate_micro_batches, parallel, compute_loss),
        sums=loss,
    )
    metrics = {
        "validation_loss": world.all_reduce_sum(loss).item() / max(1, num_label_tokens),
        "validation_tokens": num_label_tokens,
    }
    if data.scored_metrics:
        metrics |= _compute_score_metrics(model, parallel=parallel, data=data, world=world)
    if data.generated_metrics:
        metrics |= _compute_answer_metrics(model, data, world)
    return metrics


def _compute_score_metrics(
    model: nn.Module, parallel: Parallel, data: TrainingData, world: World
) -> dict[str, float]:
    """Return those of `validation.metrics` that are computed from token scores. Collective.

    `token_accuracy` is the share of label tokens that are the model's likeliest token,
    `exact_match` the share of sequences in which all label tokens are.
    """
    # [label tokens, those predicted right, sequences, those with all tokens right]
    sums = torch.zeros(4, device=world.device, dtype=torch.float64)
    score_tokens = make_scorer(model)

    def compute_sums(batch: Batch) -> Tensor:
        _, num_labels, num_right = sum_over_sequences(score_tokens(batch), batch).unbind(dim=1)
        has_labels = num_labels > 0  # padding has none
        is_exact = has_labels & (num_right == num_labels)
        return torch.stack([num_labels.sum(), num_right.sum(), has_labels.sum(), is_exact.sum()])

    sum_over_validation(
        model,
        parallel,
        data,
        compute_sums=partial(evaluate_micro_batches, parallel, compute_sums),
        sums=sums,
    )
    num_labels, num_right, num_sequences, num_exact = world.all_reduce_sum(sums).tolist()
    metrics = {
        "token_accuracy": num_right / max(1.0, num_labels),
        "exact_match": num_exact / max(1.0, num_sequences),
    }
    return {f"validation_{name}": metrics[name] for name in data.scored_metrics}


def _compute_answer_metrics(model: Any, data: TrainingData, world: World) -> dict[str, float]:
    """Generate answers to all validation questions; return the means of their metrics.

    Collective.
    """
    cfg = data.cfg
    model.eval()
    answers = generate_answers(
        model,
        spec=model.spec,
        questions=data.questions,
        world=world,
        batch_size=cfg.validation.batch_size or cfg.batch_size,
        seed=cfg.seed,
        max_new_tokens=cfg.validation.max_new_tokens,
        stop_ids=data.tokenizer.stop_ids,
    )
    model.train()
    means = {}
    for name in data.generated_metrics:
        values = compute_metric(
            name, answers=answers, questions=data.questions, tokenizer=data.tokenizer
        )
        means[f"validation_{name}"] = math.fsum(values.values()) / len(values)
    return means


def compute_token_scores(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    attention: AttentionInfo | None = None,
) -> Tensor:
    """Return scores `[b, s, 2]` of the labels of a micro-batch, by calling the model.

    The first is the label's log-probability, the second that of the likeliest token. tokens,
    labels: `[b, s]`. positions, attention: see `Decoder.forward`.
    """
    head_loss = TokenScores(-(-tokens.numel() // _CHUNK_TOKENS))
    return model(tokens, positions, attention, labels=labels, head_loss=head_loss)


def make_scorer(model: nn.Module) -> Callable[[Batch], Tensor]:
    """Return a function from a micro-batch to its token scores, which calls the model."""
    return lambda batch: compute_token_scores(
        model,
        tokens=batch.tokens,
        labels=batch.labels,
        positions=batch.positions,
        attention=batch.attention,
    )


def sum_over_sequences(scores: Tensor, batch: Batch) -> Tensor:
    """Return (log-likelihood, label tokens, right ones) of each sequence, fp64 `[n, 3]`.

    A label token is right if no token is likelier: greedy decoding would choose it. scores: `[b, s,
    2]`, from `make_scorer`. Without packing n is b. With packing it is b s: a row has room for as
    many documents as tokens, and the numbers of documents that do not exist, and of padding, are 0.
    """
    is_label = batch.labels != IGNORED
    is_right = is_label & (scores[..., 0] == scores[..., 1])
    token_numbers = torch.stack(  # [b, s, 3]
        [scores[..., 0].double(), is_label.double(), is_right.double()], dim=-1
    )
    documents = None if batch.attention is None else batch.attention.documents
    if documents is None:
        return token_numbers.sum(dim=1)
    # Document ids begin at 0 in each row. A row gets as many sums as tokens, so that no shape
    # depends on the data.
    num_rows, length = documents.shape
    row_starts = length * torch.arange(num_rows, device=documents.device)[:, None]
    sums = token_numbers.new_zeros(num_rows * length, 3)
    return sums.index_add_(
        0, (documents.long() + row_starts).flatten(), token_numbers.flatten(0, 1)
    )
