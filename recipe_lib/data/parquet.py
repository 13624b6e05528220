"""Parquet files, a batch of rows at a time, through pyarrow (it comes with the extra `datasets`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recipe_lib.config.local_files import no_pyarrow
from recipe_lib.data.row_files import LocalFile, Located, empty, opened
from recipe_lib.errors import DataError

ROWS_AT_ONCE = 256
MAGIC = b"PAR1"  # at both ends of the file


class ParquetRows(LocalFile):
    """A .parquet file; where its rows begin is what its footer says of the row groups."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import pyarrow.parquet  # noqa: F401  (a missing package is said before anything is read)
        except ImportError:
            raise DataError(no_pyarrow(path)) from None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As RowFile says; inside a row, a field that holds null is left out (see `without_nulls`)."""
        stop = len(self) if stop is None else min(stop, len(self))
        if start >= stop:
            return
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        number = int(self._ends[first - 1]) if first else 0
        with _parquet(self.path) as file:
            groups = list(range(first, last + 1))
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=groups, use_threads=False):
                skipped = min(max(start - number, 0), len(batch))
                number += skipped
                for row in batch.slice(skipped, stop - number).to_pylist():
                    yield self.place_of(number), without_nulls(row)
                    number += 1
                if number >= stop:
                    return

    def place_of(self, row: int) -> str:
        """As RowFile says."""
        return f"{self.place} (row {row + 1})"

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of rows up to the end of each row group, int64."""
        with _parquet(self.path) as file:
            counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        if not sum(counts):
            raise empty(self.place)
        return np.cumsum(counts, dtype=np.int64)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The file, open; what is wrong with it is a DataError."""
    from pyarrow import ArrowException, parquet

    with opened(path) as content:
        begins, size = content.read(len(MAGIC)), content.seek(0, os.SEEK_END)
        content.seek(max(0, size - len(MAGIC)))
        if begins != MAGIC or content.read() != MAGIC:
            raise DataError(f"{path}: found no Parquet table, or one that is cut short; write or download it again")
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (ArrowException, OSError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: the Parquet file cannot be read ({said}); write or download it again") from None


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an Arrow table, without the nulls inside of its columns.

    A table gives all objects of a column the same fields, filled up with nulls; a chat template would write them out.
    """
    return {name: _bare(value) for name, value in row.items()}


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return value
