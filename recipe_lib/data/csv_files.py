"""CSV and TSV files: a sample a row, its columns named by the first one; every cell is text."""

import csv
import io
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from recipe_lib.config.suggest import show
from recipe_lib.data.sample_files import (
    LINE_LIMIT,
    SAMPLE_LIMIT,
    IndexedFile,
    build_line_fault,
    empty,
    not_utf8,
    opened,
    skip_mark,
)
from recipe_lib.data.samples import SampleFault
from recipe_lib.errors import DataError

_DELIMITERS = (",", ";", "\t")  # of a .csv file, the one that its first line has the most of


class CsvFile(IndexedFile):
    """A .csv or .tsv file. Cells may be quoted, and hold line ends then; blank lines are passed over."""

    def __init__(self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None) -> None:
        super().__init__(path, sample_limit, place)
        csv.field_size_limit(max(sample_limit, csv.field_size_limit()))

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """As IndexedFile says."""
        header, delimiter = self._header
        lines = _Lines(file, self.place)
        rows = lines.rows(delimiter)
        next(rows)  # the header
        is_empty = True
        for _ in rows:
            is_empty = False
            yield lines.row_start, lines.at, lines.row_line
        if is_empty:
            names = show(", ".join(filter(None, header)))
            raise DataError(f"{self.place}: found a header ({names}) and no rows, expected samples below it")

    def decode(self, content: bytes, number: int) -> dict[str, Any] | SampleFault:
        """As IndexedFile says."""
        header, delimiter = self._header
        lines = io.StringIO(content.decode("utf-8", errors="replace"), newline="\n")
        cells = next(csv.reader(lines, delimiter=delimiter), [])
        if len(cells) != len(header):
            names = show(", ".join(header))
            return SampleFault(
                "number of cells",
                f"found {len(cells)} cells, expected {len(header)} ({names}); quote cells that hold the delimiter",
            )
        return {name: cell for name, cell in zip(header, cells, strict=True) if name}

    @cached_property
    def _header(self) -> tuple[list[str], str]:
        """The names of the columns, and the delimiter. Raises DataError."""
        with opened(self.path) as file:
            first = next(iter(_Lines(file, self.place)), "")
        if not first.strip():
            raise empty(self.place)
        is_tsv = Path(self.place.removesuffix(".gz").removesuffix(".zst")).suffix == ".tsv"
        delimiter = "\t" if is_tsv else max(_DELIMITERS, key=first.count)
        with opened(self.path) as file:
            header = [name.strip() for name in next(_Lines(file, self.place).rows(delimiter))]
        twice = next((name for name in header if name and header.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{self.place}:1: found the column {twice} twice, expected each name once; rename one")
        return header, delimiter


class _Lines:
    """The lines of a file as csv takes them, one at a time. row_start, row_line: first byte and line of the row that
    `rows` gave last."""

    def __init__(self, file: BinaryIO, place: str) -> None:
        """file: just opened."""
        self.file = file
        self.place = place
        self.at = self.row_start = skip_mark(file)
        self.line = self.row_line = 1

    def __iter__(self) -> Iterator[str]:
        while content := self.file.readline(LINE_LIMIT + 1):
            if len(content) > LINE_LIMIT:
                raise build_line_fault(self.place, self.line)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(self.place, self.line, content[error.start]) from None
            self.at += len(content)
            self.line += 1
            yield text

    def rows(self, delimiter: str) -> Iterator[list[str]]:
        """The cells of each row that is not blank. Raises DataError for quotes that are not closed."""
        reader = csv.reader(iter(self), delimiter=delimiter, strict=True)
        while True:
            start, line = self.at, self.line
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(
                    f"{self.place}:{line}: found a row that is no CSV ({error}), expected quotes around cells closed, "
                    "and doubled inside; correct the row"
                ) from None
            if cells is None:
                return
            if cells:
                self.row_start, self.row_line = start, line
                yield cells
