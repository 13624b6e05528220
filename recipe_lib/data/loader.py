"""The batches of a run's steps, made in line or ahead of the steps by worker processes, on the device."""

import gc
import signal
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from recipe_lib.data.batches import StepBatches, make_step
from recipe_lib.data.dataset import Dataset
from recipe_lib.data.order import DataPlan


def step_batches(
    dataset: Dataset,
    plan: DataPlan,
    *,
    first_step: int,
    last_step: int,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    accumulation: int,
    pad_id: int | None = None,
    multiple: int = 1,
    mismatched: int | None = None,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[StepBatches]:
    """This rank's part of the steps first_step .. last_step - 1 of the run, on `device`.

    Starting at any step costs the same, and a step is the same wherever the start was and for any number of `workers`:
    processes that make batches ahead, two steps each; 0: each is made when it is asked for. See `make_step` for the
    rest. To an accelerator, batches are copied out of pinned memory without waiting.
    """
    device = torch.device(device)
    maker = _StepMaker(dataset, data_rank, data_ranks, batch_size, accumulation, pad_id, multiple, mismatched)
    order = _Order(plan, first_step, last_step)
    if workers == 0:
        made: Iterator[StepBatches] = (maker[slots] for slots in order)
    else:
        made = _made_by_workers(maker, order, workers)
    for batches in made:
        if device.type != "cpu":
            batches = batches.pin_memory().to(device, non_blocking=True)
        yield batches


Planned = tuple[list[np.ndarray], int | None]


class _Order:
    """The slots of each step; workers are sent these and need no plan."""

    def __init__(self, plan: DataPlan, first_step: int, last_step: int) -> None:
        self.plan, self.steps = plan, range(first_step, last_step)

    def __iter__(self) -> Iterator[Planned]:
        for step in self.steps:
            yield self.plan.slots(step), self.plan.pack_length(step)

    def __len__(self) -> int:
        return len(self.steps)


class _StepMaker(TorchDataset):
    """make_step with all that does not change from step to step."""

    def __init__(
        self,
        dataset: Dataset,
        data_rank: int,
        data_ranks: int,
        batch_size: int,
        accumulation: int,
        pad_id: int | None,
        multiple: int,
        mismatched: int | None,
    ) -> None:
        self.dataset, self.mismatched = dataset, mismatched
        self.settings = (data_rank, data_ranks, batch_size, accumulation, pad_id, multiple)

    def __getitem__(self, planned: Planned) -> StepBatches:
        slots, pack_length = planned
        return make_step(self.dataset, slots, *self.settings, pack_length, self.mismatched)


def _made_by_workers(maker: _StepMaker, order: _Order, workers: int) -> Iterator[StepBatches]:
    """Forks share the dataset's pages. The generator is the loader's own: it would draw a seed from the global one,
    and what a model draws would then depend on the number of workers."""
    loader: DataLoader[StepBatches] = DataLoader(
        maker,
        sampler=order,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_begin_worker,
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    return iter(loader)


def _begin_worker(_worker: int) -> None:
    """Leave signals to the rank, and what it has left for its garbage collector.

    A launcher stops a run by a signal to the whole process group; the rank then saves, and ends its workers.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
