"""Batches that a planned recipe finds in place of its dataset's.

`simulate` sets a `PlannedData` as the recipe's `data`. Its sequences are as long as the plan is
for, and every token is trained. A step has all of its micro-batches, but going through them yields
only as many as are simulated.
"""

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
    """The data of a planned recipe, in place of what its `setup_data` would have made.

    Its datasets have one item, or with packing those of one pack. `batches` yields one step,
    `validation_batches` one micro-batch, both on the device.
    """

    # Nothing was read for these, but recipes of users' own may ask for them in any method that is
    # planned.
    tokenizer = chat_template = tokenizer_path = plan = None
    total_steps = 1

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: World,
        sequence: PlannedSequence,
        traced_micro_batches: int | None = None,
        marks: MicroBatchMarks | None = None,
        mismatched_marks: MicroBatchMarks | None = None,
    ) -> None:
        """Make data for a plan.

        traced_micro_batches: all of a step's are there, but going through them yields so many;
        None: all of them, in plain lists. marks, mismatched_marks: note where each micro-batch,
        and each of the mismatched ones (of KTO's KL estimate), begins and ends.
        """
        self._cfg = cfg
        self._world = world
        self._sequence = sequence
        self._traced = traced_micro_batches
        self._marks = marks
        self._mismatched_marks = mismatched_marks
        self.dataset = self.validation_dataset = _build_dataset(cfg, sequence)
        self.global_batch_size = cfg.batch_size * cfg.gradient_accumulation_steps * world.data_ranks

    def batches(self, first_step: int = 0) -> Iterator[StepBatches]:
        """Yield one step of this rank."""
        yield self._make_step(*compute_micro_batches(self._cfg))

    def validation_batches(self) -> Iterator[StepBatches]:
        """Yield one validation batch of this rank."""
        yield self._make_step(self._cfg.validation.batch_size or self._cfg.batch_size, 1)

    def report(self) -> list[str]:
        """Return no lines: nothing was read."""
        return []

    def identity(self) -> dict[str, Any]:
        """Return nothing that a checkpoint could be compared by."""
        return {}

    def _make_step(self, batch_size: int, accumulation: int) -> StepBatches:
        ranks = self._world.data_ranks
        slot = np.zeros(1, dtype=np.int64)
        pack_length = None
        if self._cfg.data.packing:
            slot = np.arange(self.dataset.items)
            pack_length = self._sequence.tokens * self.dataset.group
        with unset_fake_temporarily():  # make_step reads lengths, so its tensors need values
            step = make_step(
                self.dataset,
                slots=[slot] * (batch_size * accumulation),
                data_rank=0,
                data_ranks=1,
                batch_size=batch_size,
                accumulation=accumulation,
                pad_id=0,
                multiple=compute_padded_multiple(self._cfg),
                pack_length=pack_length,
                mismatched=self._cfg.max_seq_len if self._cfg.compares_mismatched else None,
            )
        # All ranks have as much as this one.
        step = replace(
            step,
            num_label_tokens=ranks * step.num_label_tokens,
            total_tokens=ranks * step.total_tokens,
            padded_tokens=ranks * step.padded_tokens,
            num_items=ranks * step.num_items,
        )
        on_device = _make_fake(step).to(self._world.device)
        if self._traced is None or self._traced >= len(on_device.micro_batches):
            return on_device
        return replace(
            on_device,
            micro_batches=_FirstMicroBatches(on_device.micro_batches, self._traced, self._marks),
            mismatched=_FirstMicroBatches(
                on_device.mismatched, self._traced, self._mismatched_marks
            ),
        )


class _FirstMicroBatches(list[Batch]):
    """All micro-batches of a step, of which going through the list yields the first ones only.

    Its length is that of what it yields. The others are held, as a run holds them on the device.
    """

    def __init__(self, batches: list[Batch], count: int, marks: MicroBatchMarks | None) -> None:
        super().__init__(batches)
        self._count = count
        self._marks = marks

    def __iter__(self) -> Iterator[Batch]:
        batches = islice(super().__iter__(), self._count)
        return batches if self._marks is None else self._marks.follow(batches)

    def __len__(self) -> int:
        return min(super().__len__(), self._count)


def _make_fake(step: StepBatches) -> StepBatches:
    """Return a step whose tensors are the simulation's; the same step outside of one."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return step

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        if isinstance(value, (AttentionInfo, Batch)):
            return replace(value, **{name: convert(entry) for name, entry in vars(value).items()})
        return value

    return replace(
        step,
        micro_batches=[convert(batch) for batch in step.micro_batches],
        mismatched=[convert(batch) for batch in step.mismatched],
    )


def _build_dataset(cfg: FullFinetuneConfig, sequence: PlannedSequence) -> Dataset:
    """Build the items of one packed sequence, or one item."""
    group = 2 if cfg.trains_on_pairs else 1
    # No document is shorter than two tokens.
    documents = max(1, min(sequence.documents, sequence.tokens // 2)) if cfg.data.packing else 1
    bounds = np.linspace(0, sequence.tokens, documents + 1).astype(np.int64)
    lengths = np.repeat(np.diff(bounds), group)
    # A dataset keeps one id more than a sequence has tokens, its last target; a scored sequence has
    # no targets.
    extra_tokens = 0 if cfg.scores_sequences else 1
    offsets = np.concatenate([[0], np.cumsum(lengths + extra_tokens)]).astype(np.int64)
    report: Any = None
    ids = np.zeros(int(offsets[-1]), dtype=np.int32)
    trained = np.ones(len(ids), dtype=np.uint8)
    return adapt_to_recipe(cfg, Dataset(ids, offsets, trained, report, "planned", group=group))


def list_batch_tensors(batches: StepBatches) -> list[torch.Tensor]:
    """Return the tensors of a step's micro-batches."""
    all_batches = [*batches.micro_batches, *batches.mismatched]
    holders = [vars(batch) for batch in all_batches]
    holders += [vars(batch.attention) for batch in all_batches if batch.attention is not None]
    return [
        value for holder in holders for value in holder.values() if isinstance(value, torch.Tensor)
    ]
