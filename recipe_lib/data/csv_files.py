"""CSV and TSV files: a sample a row, its columns named by the first one; every cell is text."""

import codecs
import csv
from array import array
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipe_lib.config.suggest import show
from recipe_lib.data.sample_files import (
    LINE_LIMIT,
    SAMPLE_LIMIT,
    LocalFile,
    Located,
    build_line_fault,
    empty,
    not_utf8,
    opened,
)
from recipe_lib.data.samples import SampleFault
from recipe_lib.errors import DataError

_DELIMITERS = (",", ";", "\t")  # of a .csv file, the one that its first line has the most of


class CsvFile(LocalFile):
    """A .csv or .tsv file. Cells may be quoted, and hold line ends then; blank lines are passed over."""

    def __init__(self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None) -> None:
        super().__init__(path, sample_limit, place)
        csv.field_size_limit(max(sample_limit, csv.field_size_limit()))

    def __len__(self) -> int:
        return len(self._index)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says."""
        header, delimiter = self._header
        rows = self._index[start:stop]
        if not len(rows):
            return
        with opened(self.path) as file:
            file.seek(int(rows[0, 0]))
            lines = _Lines(file, self.place, int(rows[0, 1]))
            for (_, line), cells in zip(rows, lines.rows(delimiter), strict=False):
                yield f"{self.place}:{line}", self._sample(header, cells)

    def first(self, count: int) -> Iterator[Located]:
        """As SampleFile says."""
        header, delimiter = self._header
        with opened(self.path) as file:
            lines = _Lines(file, self.place)
            for number, cells in enumerate(lines.rows(delimiter)):
                if number > count:
                    return
                if number:
                    yield f"{self.place}:{lines.row_line}", self._sample(header, cells)

    def place_of(self, sample: int) -> str:
        """As SampleFile says: the line that the row begins in."""
        return f"{self.place}:{int(self._index[sample, 1])}"

    def _sample(self, header: list[str], cells: list[str]) -> dict[str, Any] | SampleFault:
        if len(cells) != len(header):
            names = show(", ".join(header))
            return SampleFault(
                "number of cells",
                f"found {len(cells)} cells, expected {len(header)} ({names}); quote cells that hold the delimiter",
            )
        size = sum(map(len, cells))
        if size > self.sample_limit:
            return self.too_large(size)
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

    @cached_property
    def _index(self) -> np.ndarray:
        """First byte and line of each row below the header, int64 `[samples, 2]`. Raises DataError."""
        _, delimiter = self._header
        found = array("q")
        with opened(self.path) as file:
            lines = _Lines(file, self.place)
            for _ in lines.rows(delimiter):
                found.extend((lines.row_start, lines.row_line))
        if len(found) <= 2:
            names = show(", ".join(filter(None, self._header[0])))
            raise DataError(f"{self.place}: found a header ({names}) and no rows, expected samples below it")
        return np.array(found, np.int64).reshape(-1, 2)[1:]


class _Lines:
    """The lines of a file as csv takes them, one at a time. row_start, row_line: first byte and line of the row that
    `rows` gave last."""

    def __init__(self, file: BinaryIO, place: str, line: int = 1) -> None:
        """line: of where the file stands."""
        self.file, self.place, self.line = file, place, line
        if file.tell() == 0 and file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        self.at = file.tell()
        self.row_start, self.row_line = self.at, line

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
