"""List the rows of a step, for tests that need no more of a `DataPlan`.

A data plan decides which rows a step trains on, over all ranks.
"""

from dataclasses import dataclass

import numpy as np

from recipe_lib.data import DataPlan


@dataclass(frozen=True)
class OneSource:
    """A data source of `rows` rows of one token each, as `DataPlan` reads it."""

    rows: int
    group: int = 1  # sequences of an item
    weights: tuple[float, ...] = (1.0,)  # of each source

    @property
    def item_lengths(self) -> np.ndarray:
        """Return the tokens of each item."""
        return np.ones(self.rows, dtype=np.int64)

    @property
    def source_of(self) -> np.ndarray:
        """Return the index of each item's source."""
        return np.zeros(self.rows, dtype=np.int16)


def list_global_rows(
    num_rows: int, seed: int, epoch: int, step: int, rows_per_step: int, shuffle: bool
) -> np.ndarray:
    """Return the row numbers of a step (from 0) of an epoch (from 0), over all ranks."""
    plan = DataPlan(OneSource(num_rows), seed=seed, slots_per_step=rows_per_step, shuffle=shuffle)
    return np.concatenate(plan.list_slots(epoch * plan.count_steps(0) + step))
