"""Which rows a step trains on: a function of (seed, epoch, step) alone, whatever the number of ranks.

The order of an epoch sorts the rows by 64-bit numbers drawn from Philox-4x64 with the key (seed, epoch). numpy
guarantees that stream for all versions and platforms (unlike `Generator.permutation`), so a run can be resumed
elsewhere. Two equal numbers, one chance in 10^7 for a million rows, keep file order.
"""

from functools import lru_cache

import numpy as np

from recipe_lib.errors import DataError


def steps_per_epoch(num_rows: int, rows_per_step: int) -> int:
    """Optimizer steps in an epoch; the rows left over are not used in it. Raises DataError if there is not one."""
    if num_rows < rows_per_step:
        raise DataError(
            f"data.source: found {num_rows} usable rows, expected at least {rows_per_step} for one step "
            "(batch_size x gradient_accumulation_steps x ranks); lower batch_size or gradient_accumulation_steps"
        )
    return num_rows // rows_per_step


def global_rows(num_rows: int, seed: int, epoch: int, step: int, rows_per_step: int, shuffle: bool) -> np.ndarray:
    """Row numbers, int64 `[rows_per_step]`, of step `step` (from 0) of epoch `epoch` (from 0), over all ranks.

    The same number twice is impossible within an epoch. shuffle false: file order in every epoch.
    """
    if not 0 <= step < num_rows // rows_per_step:
        raise ValueError(f"step {step} is not in an epoch of {num_rows // rows_per_step} steps")
    start, end = step * rows_per_step, (step + 1) * rows_per_step
    if not shuffle:
        return np.arange(start, end, dtype=np.int64)
    return _epoch_order(num_rows, seed, epoch)[start:end].copy()


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")
    order.flags.writeable = False
    return order
