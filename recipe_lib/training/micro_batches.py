"""A step's micro-batches, one by one or through a pipeline: gradients added up, or results without
gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from recipe_lib.config.registry import get_registered
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel.parallelize import Parallel


def build_head_loss(cfg: FullFinetuneConfig) -> CrossEntropy:
    """Return the sum of token losses of `loss`, in `memory.loss_chunks` chunks.

    The built-in one is `ops.head_losses`'; a plugin registers its own, `fn(logits [m, v], labels
    [m]) -> sum`. ConfigError with the nearest name if no loss of that name is registered.
    """
    return CrossEntropy(cfg.memory.loss_chunks, get_registered("loss", cfg.loss))


def sum_gradients(
    parallel: Parallel,
    summed_loss: Callable[[Batch], torch.Tensor],
    batches: StepBatches,
    device: torch.device,
) -> torch.Tensor:
    """Runs each micro-batch forward and backward; returns this rank's part of the mean loss, fp64,
    as `backward_each`.

    summed_loss: the sum of the token losses of a micro-batch, by calling the model. Gradients are
    sums over ranks, so every loss is divided by the label tokens of the whole global step. In a
    pipeline only the last stage's rank has a part of the loss.
    """
    loss = torch.zeros((), device=device, dtype=torch.float64)

    def part_of(number: int, batch: Batch) -> torch.Tensor:
        part = summed_loss(batch) / max(1, batches.num_label_tokens)
        loss.add_(part.detach())
        return part

    return backward_each(parallel, part_of, batches, loss)


def backward_each(
    parallel: Parallel,
    loss_of: Callable[[int, Batch], torch.Tensor],
    batches: StepBatches,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Adds up the gradients of all micro-batches; through the pipeline, if there is one.

    loss_of: the number of a micro-batch of this rank's, and itself, to the loss that goes backward.
    numbers: on the device, what `loss_of` adds up to be logged. They are returned: on the host if
    it has waited for gradients (`memory.cpu_offload`), so that it need not wait a second time.
    """
    accumulation = parallel.accumulation
    if parallel.levers.quantization is not None:
        parallel.levers.quantization.begin(batches.step)
    if parallel.balance is not None:
        parallel.balance.begin(len(batches.micro_batches) * parallel.data_ranks)
    if parallel.pipeline is not None:
        parallel.pipeline.train(batches.micro_batches, loss_of, accumulation)
        if accumulation is not None:
            numbers = accumulation.send(numbers)
            accumulation.add()
    else:
        last = len(batches.micro_batches) - 1
        for number, batch in enumerate(batches.micro_batches):
            if accumulation is not None:
                accumulation.begin(is_last=number == last)
            loss_of(number, batch).backward()
            if accumulation is not None:
                numbers = accumulation.send(numbers) if number == last else numbers
                accumulation.add()
    if accumulation is not None:
        accumulation.finish()
    return numbers


def result_of_each(
    parallel: Parallel,
    result_of: Callable[[Batch], Any],
    micro_batches: Sequence[Batch],
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Any]:
    """What `result_of` makes of each micro-batch by calling the model, without gradients, when it
    is asked for.

    inside: gives what the model's calls are made inside of. In a pipeline they are made at once,
    `result_of` is called on the last stage's rank alone, and the results of the others are None.
    """
    if parallel.pipeline is not None:
        with inside():
            return iter(
                parallel.pipeline.evaluate(micro_batches, lambda number, batch: result_of(batch))
            )
    return (_result_of(batch, result_of, inside) for batch in micro_batches)


@torch.no_grad()
def _result_of(
    batch: Batch,
    result_of: Callable[[Batch], Any],
    inside: Callable[[], AbstractContextManager[Any]],
) -> Any:
    with inside():
        return result_of(batch)
