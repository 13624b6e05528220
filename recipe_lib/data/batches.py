"""Batches as a step takes them: right-padded by length, with token counts known before anything is computed.

b sequences, s tokens. One holds one document, or several when packed; padding is known by length and never by id:
a pad id may be a real token. Items of two sequences (pairs) stay in one micro-batch, each a separate document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from recipe_lib.data.dataset import Dataset
from recipe_lib.data.packing import pack
from recipe_lib.ops.attention import AttentionInfo, document_positions, make_attention_info
from recipe_lib.ops.fused_loss import IGNORED

Slots = Sequence[np.ndarray] | np.ndarray


@dataclass(frozen=True)
class Batch:
    """tokens, labels: int64 `[b, s]`; labels[., i] is the target of tokens[., i], -100 where there is none.

    positions int64 `[b, s]` and attention: of packed sequences; None for right-padded ones of one document each, where
    causality is enough. segments int64 `[b, s]`: for items of several sequences, which of the micro-batch's
    `num_segments` a token is of (of pair i the chosen is 2 i, the rejected 2 i + 1), -1 for padding; else None.
    sequences: for each row the numbers of the dataset's sequences in it, in their order.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    attention: AttentionInfo | None = None
    segments: torch.Tensor | None = None
    num_segments: int = 0
    sequences: tuple[tuple[int, ...], ...] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor | AttentionInfo)
        }
        return replace(self, **moved)

    def pin_memory(self) -> "Batch":
        """The same in host memory that a device can copy from by itself."""
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        info = self.attention
        if info is not None and info.documents is not None and info.boundaries is not None:
            pinned["attention"] = replace(
                info, documents=info.documents.pin_memory(), boundaries=info.boundaries.pin_memory()
            )
        return replace(self, **pinned)


@dataclass(frozen=True)
class StepBatches:
    """One step's micro-batches of this rank; the counts are those of all ranks together.

    trained_tokens: targets that the loss counts. total_tokens: tokens of sequences. padded_tokens: also padding.
    items: sequences, or pairs.
    """

    micro_batches: list[Batch]
    trained_tokens: int
    total_tokens: int
    padded_tokens: int
    items: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "StepBatches":
        """The same on another device."""
        return replace(self, micro_batches=[batch.to(device, non_blocking) for batch in self.micro_batches])

    def pin_memory(self) -> "StepBatches":
        """The same in host memory that a device can copy from by itself."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


def make_step(
    dataset: Dataset,
    slots: Slots,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    accumulation: int,
    pad_id: int | None = None,
    multiple: int = 1,
    pack_length: int | None = None,
) -> StepBatches:
    """This rank's part of a step whose slots, over all ranks, are `slots` (`DataPlan.slots`, or one item number each).

    Micro-batch m of rank r takes `batch_size` slots from (m * data_ranks + r) * batch_size on, so that the items of a
    step do not depend on how they are divided. Needs no communication.

    multiple: sequences are padded to a multiple of so many tokens. pack_length: they are packs, padded to so many
    tokens before that; None: to the longest slot of their micro-batch, packs if any slot of the step holds several
    items."""
    if len(slots) != batch_size * accumulation * data_ranks:
        raise ValueError(f"{len(slots)} slots for {data_ranks} ranks x {accumulation} micro-batches x {batch_size}")
    step = _StepSlots(dataset, slots, batch_size, pad_id, multiple, pack_length)
    return step.batches(range(data_rank, data_ranks * accumulation, data_ranks))


def validation_steps(
    dataset: Dataset,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    pad_id: int | None = None,
    multiple: int = 1,
    packing_capacity: int | None = None,
) -> Iterator[StepBatches]:
    """All items exactly once, one micro-batch a step: in file order, or with `packing_capacity` in packs of it.

    A rank that runs out of items gets sequences without labels, so that all ranks run the same number of batches.
    """
    slots = [np.array([item]) for item in range(len(dataset.item_lengths))]
    pack_length = None
    if packing_capacity:
        packs = pack(dataset.item_lengths, packing_capacity * dataset.group)
        slots = [packs[number] for number in range(len(packs))]
        pack_length = max(int(dataset.item_lengths[slot].sum()) for slot in slots)
    batch_size = min(batch_size, max(1, -(-len(slots) // data_ranks)))  # more would be empty
    together = batch_size * data_ranks
    nothing = np.empty(0, dtype=np.int64)
    for start in range(0, len(slots), together):
        part = slots[start : start + together]
        part += [nothing] * (together - len(part))
        yield _StepSlots(dataset, part, batch_size, pad_id, multiple, pack_length).batches([data_rank])


class _StepSlots:
    """The slots of a step, of all ranks; micro-batch n takes `batch_size` of them from n * batch_size on."""

    def __init__(
        self,
        dataset: Dataset,
        slots: Slots,
        batch_size: int,
        pad_id: int | None,
        multiple: int,
        pack_length: int | None,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.slots = [np.atleast_1d(slot) for slot in slots]
        self.pad_id, self.multiple, self.pack_length = pad_id or 0, multiple, pack_length
        self.packed = pack_length is not None or any(len(slot) > 1 for slot in self.slots)

    def batches(self, own: Sequence[int]) -> StepBatches:
        """own: numbers of this rank's micro-batches."""
        rows = [self.sequences_of(number) for number in range(len(self.slots) // self.batch_size)]
        numbers = np.array([number for micro_batch in rows for row in micro_batch for number in row], dtype=np.int64)
        return StepBatches(
            micro_batches=[self.batch(rows[number]) for number in own],
            trained_tokens=int(self.dataset.trained_counts[numbers].sum()),
            total_tokens=int(self.dataset.lengths[numbers].sum()),
            padded_tokens=sum(self.width(micro_batch) * len(micro_batch) for micro_batch in rows),
            items=len(numbers) // self.dataset.group,
        )

    def sequences_of(self, number: int) -> list[list[int]]:
        """For each row of a micro-batch the dataset's sequences in it: all of a slot's, or one of them each."""
        group = self.dataset.group
        slots = self.slots[number * self.batch_size : (number + 1) * self.batch_size]
        held = [[int(item) * group + at for item in slot for at in range(group)] for slot in slots]
        if self.packed:
            return held
        return [[row] for rows in held for row in rows] + [[] for rows in held for _ in range(group - len(rows))]

    def width(self, rows: list[list[int]]) -> int:
        """Tokens of a micro-batch's rows, padding included."""
        longest = max([1, self.pack_length or 0, *(int(self.dataset.lengths[row].sum()) for row in rows if row)])
        return -(-longest // self.multiple) * self.multiple

    def batch(self, rows: list[list[int]]) -> Batch:
        """The dataset's sequences, one after the other in each row of the batch."""
        width = self.width(rows)
        tokens = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        segments = np.full((len(rows), width), -1, dtype=np.int64)
        lengths: list[list[int]] = []
        segment = 0
        for at, numbers in enumerate(rows):
            lengths.append([])
            start = 0
            for number in numbers:
                own = self.dataset[number]
                end = start + len(own.tokens)
                tokens[at, start:end], labels[at, start:end] = own.tokens, own.labels
                segments[at, start:end] = segment
                lengths[-1].append(len(own.tokens))
                start, segment = end, segment + 1
        batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels), sequences=tuple(map(tuple, rows)))
        if self.packed:
            positions, info = document_positions(lengths, width), make_attention_info(lengths, width)
            batch = replace(batch, positions=positions, attention=info)
        if self.dataset.group > 1:
            batch = replace(batch, segments=torch.from_numpy(segments), num_segments=segment)
        return batch
