"""Computations on a micro-batch that recipes share: losses of label tokens, log-probabilities of
answers, and results without gradients.

The micro-batches of a step are `Parallel.micro_batches`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from recipe_lib.config.registry import get_registered
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel.parallelize import Parallel


def build_head_loss(cfg: FullFinetuneConfig) -> CrossEntropy:
    """Return the head loss that sums the token losses of `loss`, in `memory.loss_chunks` chunks.

    The built-in one is `ops.head_losses`'; a plugin registers its own, `fn(logits [m, v], labels
    [m]) -> sum`. Raise ConfigError with the nearest name if no loss of that name is registered.
    """
    return CrossEntropy(cfg.memory.loss_chunks, get_registered("loss", cfg.loss))


def evaluate_micro_batches(
    parallel: Parallel,
    compute: Callable[[Batch], Any],
    micro_batches: Sequence[Batch],
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Any]:
    """Return the result of `compute`, which calls the model, for each micro-batch, without
    gradients.

    inside: makes the context that the model's calls run in. In a pipeline `compute` is called on
    the rank with the last stage alone, and the results of others are None.
    """
    # A schedule runs all micro-batches at once; elsewhere each runs when its result is asked for.
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


def get_values(batch: Batch) -> torch.Tensor:
    """Return the margins, classes or labels (1: wanted) of a micro-batch's items.

    Raise ValueError for a micro-batch without.
    """
    if batch.targets is None:
        raise ValueError("this batch holds no labels")
    return batch.targets


def compute_answer_logps(token_logps: torch.Tensor, batch: Batch, *, mean: bool) -> torch.Tensor:
    """Return the log-probability of each answer of a micro-batch, fp64: of pairs `[2 p]`, chosen
    and rejected by turns.

    token_logps: `[b, s]`, 0 where there is no label. mean: over an answer's tokens; else their sum.
    """
    if batch.sequence_ids is None:
        raise ValueError("this batch holds no pairs")
    num_answers = batch.num_sequences
    # Padding has an answer of its own, which is dropped.
    answer_ids = torch.where(batch.sequence_ids < 0, num_answers, batch.sequence_ids).flatten()

    def sum_by_answer(values: torch.Tensor) -> torch.Tensor:
        sums = values.new_zeros(num_answers + 1)
        return sums.index_add(0, answer_ids, values.flatten())[:num_answers]

    # In fp64: an answer's log-probability is in the hundreds, and what counts are differences.
    sums = sum_by_answer(token_logps.double())
    if not mean:
        return sums
    num_tokens = sum_by_answer((batch.labels != IGNORED).double())
    return sums / num_tokens.clamp(min=1)
