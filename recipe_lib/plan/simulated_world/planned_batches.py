"""Rows in place of a dataset's: as long as the plan is for, every token trained."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from recipe_lib.config.mesh import compute_micro_batches, compute_padded_multiple
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.data.batches import make_step
from recipe_lib.data.dataset import Dataset, adapt_to_recipe
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.parallel import World
from recipe_lib.plan.simulated_world.sequence_lengths import PlannedSequence
from recipe_lib.plan.tracing.simulated_micro_batches import MicroBatchMarks


class PlannedData:
    """What a recipe finds as `self.data` in place of what its `setup_data` would have made.

    dataset, validation_dataset: a dataset of one item. plan, tokenizer: None. total_steps: 1.
    `batches` yields one step, `validation_batches` one micro-batch, both on the device.
    """

    # Recipes of users' own may ask for them in any method that is planned.
    tokenizer = chat_template = tokenizer_path = plan = None
    total_steps = 1

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: World,
        shape: PlannedSequence,
        traced_micro_batches: int | None = None,
        passes: MicroBatchMarks | None = None,
        others: MicroBatchMarks | None = None,
    ) -> None:
        """traced_micro_batches: all of a step's are there, but so many are gone through; None: all
        of them, plainly. passes, others: note where each of those begins and ends, and each of the
        mismatched ones.
        """
        self._others = others
        self._cfg, self._world, self._shape, self._traced = cfg, world, shape, traced_micro_batches
        self._passes = passes
        self.dataset = self.validation_dataset = _build_dataset(cfg, shape)
        self.global_batch_size = cfg.batch_size * cfg.gradient_accumulation_steps * world.data_ranks

    def batches(self, first_step: int = 0) -> Iterator[StepBatches]:
        """One step of this rank."""
        yield self._step(*compute_micro_batches(self._cfg))

    def validation_batches(self) -> Iterator[StepBatches]:
        """One validation batch of this rank."""
        yield self._step(self._cfg.validation.batch_size or self._cfg.batch_size, 1)

    def report(self) -> list[str]:
        """Return no lines: nothing was read."""
        return []

    def identity(self) -> dict[str, Any]:
        """Return nothing that a checkpoint could be compared by."""
        return {}

    def _step(self, batch_size: int, accumulation: int) -> StepBatches:
        packed, ranks = self._cfg.data.packing, self._world.data_ranks
        slots = [np.arange(self.dataset.items) if packed else np.zeros(1, dtype=np.int64)] * (
            batch_size * accumulation
        )
        length = self._shape.tokens * (self.dataset.group if packed else 1)
        multiple = compute_padded_multiple(self._cfg)
        with unset_fake_temporarily():  # lengths are read from them
            step = make_step(
                self.dataset, slots, 0, 1, batch_size, accumulation, 0, multiple, length if packed else None,
                self._cfg.max_seq_len if self._cfg.compares_mismatched else None,
            )  # fmt: skip
        whole = replace(
            step,
            num_label_tokens=ranks * step.num_label_tokens,
            total_tokens=ranks * step.total_tokens,
            padded_tokens=ranks * step.padded_tokens,
            num_items=ranks * step.num_items,
        )
        on_device = _make_fake(whole).to(self._world.device)
        if self._traced is None or self._traced >= len(on_device.micro_batches):
            return on_device
        return replace(
            on_device,
            micro_batches=_FirstMicroBatches(on_device.micro_batches, self._traced, self._passes),
            mismatched=_FirstMicroBatches(on_device.mismatched, self._traced, self._others),
        )


class _FirstMicroBatches(list[Batch]):
    """A list that holds all of its elements, and is as long as the first of them that are gone
    through.
    """

    def __init__(self, batches: list[Batch], count: int, passes: MicroBatchMarks | None) -> None:
        super().__init__(batches)
        self._count, self._passes = count, passes

    def __iter__(self) -> Iterator[Batch]:
        batches = islice(super().__iter__(), self._count)
        return batches if self._passes is None else self._passes.follow(batches)

    def __len__(self) -> int:
        return min(super().__len__(), self._count)


def _make_fake(step: StepBatches) -> StepBatches:
    """The same on the host of the simulation, if there is one."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return step

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        if isinstance(value, AttentionInfo):
            return replace(value, **{name: convert(held) for name, held in vars(value).items()})
        return value

    def each(batches: list[Batch]) -> list[Batch]:
        return [
            replace(batch, **{name: convert(held) for name, held in vars(batch).items()})
            for batch in batches
        ]

    return replace(step, micro_batches=each(step.micro_batches), mismatched=each(step.mismatched))


def _build_dataset(cfg: FullFinetuneConfig, shape: PlannedSequence) -> Dataset:
    """The items of a packed sequence, or one item."""
    group = 2 if cfg.trains_on_pairs else 1
    documents = max(1, min(shape.documents, shape.tokens // 2)) if cfg.data.packing else 1
    bounds = np.linspace(0, shape.tokens, documents + 1).astype(np.int64)
    lengths = np.repeat(np.diff(bounds), group)
    scored = cfg.scores_sequences
    offsets = np.concatenate([[0], np.cumsum(lengths + (0 if scored else 1))]).astype(np.int64)
    report: Any = None
    ids = np.zeros(int(offsets[-1]), dtype=np.int32)
    return adapt_to_recipe(
        cfg,
        Dataset(ids, offsets, np.ones(len(ids), dtype=np.uint8), report, "planned", group=group),
    )


def list_batch_tensors(batches: StepBatches) -> list[torch.Tensor]:
    """The tensors of a step's micro-batches."""
    every = [*batches.micro_batches, *batches.mismatched]
    holders = [vars(batch) for batch in every]
    holders += [vars(batch.attention) for batch in every if batch.attention is not None]
    return [
        value for holder in holders for value in holder.values() if isinstance(value, torch.Tensor)
    ]
