"""Batches as a step takes them: right-padded by length, with token counts known before anything is computed.

b rows, s tokens. Padding is told from tokens by length and never by id: a pad id may be a real token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from recipe_lib.data.dataset import Dataset
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.cross_entropy import IGNORED


@dataclass(frozen=True)
class Batch:
    """tokens, labels: int64 `[b, s]`; labels[., i] is the target of tokens[., i], -100 where there is none.

    positions int64 `[b, s]` and attention: None for right-padded rows of one document each, where causality is enough.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    attention: AttentionInfo | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same on another device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking) for name, value in vars(self).items() if value is not None
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class StepBatches:
    """One step's micro-batches of this rank; the counts are those of all ranks together.

    trained_tokens: targets that the loss counts. total_tokens: tokens of rows. padded_tokens: also padding.
    """

    micro_batches: list[Batch]
    trained_tokens: int
    total_tokens: int
    padded_tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "StepBatches":
        """The same on another device."""
        return replace(self, micro_batches=[batch.to(device, non_blocking) for batch in self.micro_batches])


def make_step(
    dataset: Dataset,
    rows: np.ndarray,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    accumulation: int,
    pad_id: int | None = None,
) -> StepBatches:
    """This rank's part of a step whose rows, over all ranks, are `rows` (`recipe_lib.data.global_rows`).

    Micro-batch m of rank r takes `batch_size` rows from (m * data_ranks + r) * batch_size on, so that the rows of a
    step do not depend on how they are divided. Needs no communication.
    """
    if len(rows) != batch_size * accumulation * data_ranks:
        raise ValueError(f"{len(rows)} rows for {data_ranks} ranks x {accumulation} micro-batches x {batch_size}")
    parts = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    return _step(dataset, parts, parts[data_rank::data_ranks], batch_size, pad_id)


def validation_steps(
    dataset: Dataset, data_rank: int, data_ranks: int, batch_size: int, pad_id: int | None = None
) -> Iterator[StepBatches]:
    """All rows exactly once, in file order, one micro-batch a step. A rank that runs out of rows gets rows without
    labels, so that all ranks run the same number of batches."""
    for start in range(0, len(dataset), batch_size * data_ranks):
        end = min(start + batch_size * data_ranks, len(dataset))
        parts = [
            np.arange(min(at, end), min(at + batch_size, end))
            for at in range(start, start + batch_size * data_ranks, batch_size)
        ]
        yield _step(dataset, parts, parts[data_rank : data_rank + 1], batch_size, pad_id)


def _step(
    dataset: Dataset, parts: Sequence[np.ndarray], own: Sequence[np.ndarray], batch_size: int, pad_id: int | None
) -> StepBatches:
    lengths = [dataset.lengths[part] for part in parts]
    return StepBatches(
        micro_batches=[_padded(dataset, part, batch_size, pad_id or 0) for part in own],
        trained_tokens=int(sum(dataset.trained_counts[part].sum() for part in parts)),
        total_tokens=int(sum(length.sum() for length in lengths)),
        padded_tokens=int(sum(max(length, default=1) * batch_size for length in lengths)),
    )


def _padded(dataset: Dataset, rows: np.ndarray, batch_size: int, pad_id: int) -> Batch:
    width = int(max(dataset.lengths[rows], default=1))
    tokens = np.full((batch_size, width), pad_id, dtype=np.int64)
    labels = np.full((batch_size, width), IGNORED, dtype=np.int64)
    for at, number in enumerate(rows):
        row = dataset[int(number)]
        tokens[at, : len(row.tokens)] = row.tokens
        labels[at, : len(row.labels)] = row.labels
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
