"""Read files of samples by index: the interface `SampleFile`, and .txt, .jsonl and .csv files.

`open_sources` (sources.py) makes the objects, and a SourceEncoder calls `read` for a run of
samples. No object keeps samples in memory: it keeps where each of them is in the file (24 bytes a
sample) and reads those that are asked for. A sample is a row of the file, column -> value; a
SampleFault says why one cannot be used.
"""

import codecs
import csv
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipe_lib.config.suggest import show
from recipe_lib.data.samples import SampleFault, describe_kind, parse_object
from recipe_lib.errors import DataError
from recipe_lib.reading import open_regular, suggest_remedy
from recipe_lib.units import MIB, format_bytes

SAMPLE_LIMIT = 16 * MIB  # bytes of a sample by default
# Bytes of a line. A sparse file or a disk image may have no line end at all, and would fill memory
LINE_LIMIT = 2**30
BLOCK = 2**22  # bytes read at once by a pass over a file

# (file and line of a sample, the sample or why it cannot be used)
LocatedSample = tuple[str, dict[str, Any] | SampleFault]


class SampleFile(ABC):
    """The samples of one file (or of one split of a hub dataset), read by index.

    An object holds no open file and no sample, so it may be pickled, and used by several processes
    after a fork. Call `len` before the fork, so that the index of the file is made once. Any method
    raises DataError if the file as a whole cannot be read (no permission, invalid JSON, empty,
    ...). A sample over the limit is a SampleFault, and is never read into memory.
    """

    def __init__(self, place: str, sample_limit: int = SAMPLE_LIMIT) -> None:
        self.place = place  # path of the file, or `hub:OWNER/NAME`
        self.sample_limit = sample_limit  # most bytes of a sample

    def build_size_fault(self, size: int) -> SampleFault:
        """Return the fault of a sample over the limit. size: its bytes."""
        return SampleFault(
            "too large",
            f"found a sample of {format_bytes(size)}, expected at most"
            f" data.max_sample_mib={self.sample_limit / MIB:g}; divide the text, or raise"
            " data.max_sample_mib (a sample takes about 80 times its size in memory)",
        )

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, faulty ones included. Blank lines are no samples."""

    @abstractmethod
    def read(self, start: int = 0, stop: int | None = None) -> Iterator[LocatedSample]:
        """Yield (place, sample) of samples start .. stop (exclusive; None: to the end), in order.

        Few are in memory at a time. A SampleFault stands for a sample that cannot be used.
        """

    def read_first(self, count: int) -> Iterator[LocatedSample]:
        """Yield the same as `read(0, count)`, where possible without a pass over the whole file."""
        return self.read(0, count)

    def locate_sample(self, sample_index: int) -> str:
        """Return the place of a sample, the same as `read` yields, without reading it.

        It is the file with the sample's line (from 1), or its index (from 0) as a jq path, or both:
        `rows.jsonl:7`, `rows.parquet: .[6]`, `rows.json:9: .[6]`.
        """
        return f"{self.place}: .[{sample_index}]"

    @property
    def keys_beside(self) -> dict[str, str]:
        """Return {key beside the list of samples: the kind of its value, in words}.

        A .json file may have such keys. The kind is "" for a key that changes nothing.
        """
        return {}

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return `name`, `size` in bytes and `sha256` of the file, which enter a cache key.

        The first call reads the whole file; the index is not needed.
        """


class LocalFile(SampleFile):
    """A file on disk."""

    def __init__(
        self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None
    ) -> None:
        """Take the path.

        sample_limit: bytes. place: name of the file for error lines, if it was unpacked to `path`;
        None: the path.
        """
        super().__init__(place or str(path), sample_limit)
        self.path = path

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {"name": Path(self.place).name} | hash_contents(self.path)


class IndexedFile(LocalFile):
    """A file in which each sample is a run of bytes.

    One pass by `scan` finds where the samples are; then each can be read by itself.
    """

    # Most bytes of the line end that `scan` includes; they do not count for the limit of a sample
    line_end = 0

    @abstractmethod
    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """Yield (first byte, byte after the last, line) of each sample; line 0: the whole file.

        file: just opened. Raises DataError for an error of the file, after the samples before it.
        """

    def decode(self, content: bytes, sample_index: int) -> dict[str, Any] | SampleFault:
        return parse_sample(content)

    def locate(self, sample_index: int, line: int) -> str:
        return f"{self.place}:{line}" if line else self.place

    def __len__(self) -> int:
        return len(self._index)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[LocatedSample]:
        rows = map(np.ndarray.tolist, self._index[start:stop])
        with open_checked(self.path) as file:
            yield from self._read_rows(file, rows, start)

    def read_first(self, count: int) -> Iterator[LocatedSample]:
        with open_checked(self.path) as scanned, open_checked(self.path) as file:
            yield from self._read_rows(file, islice(self.scan(scanned), count), 0)

    def locate_sample(self, sample_index: int) -> str:
        return self.locate(sample_index, int(self._index[sample_index, 2]))

    def _read_rows(
        self, file: BinaryIO, rows: Iterable[Sequence[int]], first: int
    ) -> Iterator[LocatedSample]:
        """Yield the samples at rows of the index. first: index of the first sample."""
        # Adjacent samples are read without seeking, which would drop the file's buffer.
        position = -1  # of the file; -1: not known
        for sample_index, (start, end, line) in enumerate(rows, first):
            size = end - start
            if size > self.sample_limit + self.line_end:
                yield self.locate(sample_index, line), self.build_size_fault(size)
                continue
            if position != start:
                file.seek(start)
            position = end
            yield self.locate(sample_index, line), self.decode(file.read(size), sample_index)

    @cached_property
    def _index(self) -> np.ndarray:
        """Return (first byte, byte after the last, line) of each sample, int64 `[samples, 3]`."""
        with open_checked(self.path) as file:
            return np.fromiter(chain.from_iterable(self.scan(file)), np.int64).reshape(-1, 3)


class TextFile(IndexedFile):
    """A .txt file: one sample with the column `text`, which keeps its line ends."""

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        yield 0, os.fstat(file.fileno()).st_size, 0

    def decode(self, content: bytes, sample_index: int) -> dict[str, Any] | SampleFault:
        """Return {"text": the content}. Raises DataError if that is empty or no UTF-8."""
        content = content.removeprefix(codecs.BOM_UTF8)
        if not content.strip():
            raise build_empty_fault(self.place)
        try:
            return {"text": content.decode("utf-8")}
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise build_utf8_fault(self.place, line, content[error.start]) from None


class JsonLinesFile(IndexedFile):
    """A .jsonl file: an object a line; blank lines are skipped."""

    line_end = 2  # carriage return and line feed

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        start = end = skip_mark(file)
        line = 1
        is_blank = is_empty = True
        while piece := file.readline(BLOCK):  # in blocks: a line may be longer than memory
            end += len(piece)
            is_blank = is_blank and piece.isspace()
            if end - start > LINE_LIMIT:
                raise build_line_fault(self.place, line)
            if piece.endswith(b"\n"):
                if not is_blank:
                    yield start, end, line
                    is_empty = False
                start = end
                line += 1
                is_blank = True
        if not is_blank:
            yield start, end, line
        elif is_empty:
            raise DataError(f"{self.place}: the file is empty, expected samples")

    def decode(self, content: bytes, sample_index: int) -> dict[str, Any] | SampleFault:
        content = content.rstrip(b"\r\n")
        if len(content) > self.sample_limit:
            return self.build_size_fault(len(content))
        sample = parse_sample(content)
        is_list = sample_index == 0 and content.lstrip().startswith(b"[")
        if is_list and isinstance(sample, SampleFault):  # the whole file may be one list
            return SampleFault(
                sample.cause, f"{sample}; if the file is one list of objects, name it .json"
            )
        return sample


def skip_mark(file: BinaryIO) -> int:
    """Move a file that was just opened behind its byte order mark, if any; return the offset."""
    has_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return file.seek(len(codecs.BOM_UTF8) if has_mark else 0)


def parse_sample(line: bytes) -> dict[str, Any] | SampleFault:
    """Return the object in the JSON of a line, or of a list's item; or why it cannot be used."""
    try:
        sample = parse_object(line.decode("utf-8"))
    except SampleFault as fault:
        return fault
    except UnicodeDecodeError as error:
        return SampleFault(
            "not UTF-8",
            f"column {error.start + 1}: found the byte 0x{line[error.start]:02x}, expected UTF-8",
        )
    except ValueError as error:
        message = str(error).removeprefix("line 1 ")
        if "JSON" not in message:  # it is the message for a number with too many digits
            message = f"found {message}"
        return SampleFault("invalid JSON", f"{message}, expected an object a line")
    if isinstance(sample, dict):
        return sample
    return SampleFault(
        "not an object",
        f"found {describe_kind(sample)}, expected an object with the columns of the sample",
    )


@contextmanager
def open_checked(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises DataError if it cannot be opened, and for an OSError inside the block.
    """
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}"
        ) from None


def hash_contents(*paths: Path) -> dict[str, Any]:
    """Return `size` in bytes and `sha256`, in hex, of the content of one file or several.

    Raises DataError if one cannot be read.
    """
    digest = hashlib.sha256()
    size = 0
    for path in paths:
        with open_checked(path) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}


def build_empty_fault(place: str) -> DataError:
    """Return the fault of a file with nothing in it."""
    return DataError(f"{place}: the file is empty, expected samples or text")


def build_line_fault(place: str, line: int) -> DataError:
    """Return the fault of a file with a line over LINE_LIMIT."""
    return DataError(
        f"{place}:{line}: found {format_bytes(LINE_LIMIT)} without a line's end, expected a sample"
        " a line; write or download the file again"
    )


def build_utf8_fault(place: str, line: int, byte: int) -> DataError:
    """Return the fault of a file with a byte that is no UTF-8. byte: its value."""
    return DataError(
        f"{place}:{line}: found the byte 0x{byte:02x}, expected UTF-8; convert the file"
    )


_DELIMITERS = (",", ";", "\t")  # a .csv file has the one that is most frequent in its first line


class CsvFile(IndexedFile):
    """A .csv or .tsv file. Quoted cells may contain line ends; blank lines are skipped."""

    def __init__(
        self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None
    ) -> None:
        super().__init__(path, sample_limit, place)
        # The csv module limits a cell to 131,072 characters; it has one limit for the process.
        csv.field_size_limit(max(sample_limit, csv.field_size_limit()))

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        header, delimiter = self._header
        is_empty = True
        rows = _read_csv_rows(file, self.place, delimiter)
        for _, start, end, line in islice(rows, 1, None):  # the first row is the header
            is_empty = False
            yield start, end, line
        if is_empty:
            names = show(", ".join(filter(None, header)))
            raise DataError(
                f"{self.place}: found a header ({names}) and no rows, expected samples below it"
            )

    def decode(self, content: bytes, sample_index: int) -> dict[str, Any] | SampleFault:
        header, delimiter = self._header
        lines = io.StringIO(content.decode("utf-8", errors="replace"), newline="\n")
        cells = next(csv.reader(lines, delimiter=delimiter), [])
        if len(cells) != len(header):
            names = show(", ".join(header))
            return SampleFault(
                "number of cells",
                f"found {len(cells)} cells, expected {len(header)} ({names}); quote cells that hold"
                " the delimiter",
            )
        return {name: cell for name, cell in zip(header, cells, strict=True) if name}

    @cached_property
    def _header(self) -> tuple[list[str], str]:
        """Return (names of the columns, delimiter).

        Raises DataError for an empty file, or a name that is there twice.
        """
        with open_checked(self.path) as file:
            skip_mark(file)
            first = file.readline(LINE_LIMIT).decode("utf-8", errors="replace")
        if not first.strip():
            raise build_empty_fault(self.place)
        is_tsv = Path(self.place.removesuffix(".gz").removesuffix(".zst")).suffix == ".tsv"
        delimiter = "\t" if is_tsv else max(_DELIMITERS, key=first.count)
        with open_checked(self.path) as file:
            cells, *_ = next(_read_csv_rows(file, self.place, delimiter))
        header = [name.strip() for name in cells]
        repeated = next((name for name in header if name and header.count(name) > 1), None)
        if repeated is not None:
            raise DataError(
                f"{self.place}:1: found the column {repeated} twice, expected each name once;"
                " rename one"
            )
        return header, delimiter


def _read_csv_rows(
    file: BinaryIO, place: str, delimiter: str
) -> Iterator[tuple[list[str], int, int, int]]:
    """Yield (cells, first byte, byte after the last, line) of each row that is not blank.

    file: just opened. Raises DataError for quotes that are not closed, and for invalid UTF-8.
    """
    byte_offset = skip_mark(file)  # byte at which the next line begins
    line = 1

    def read_lines() -> Iterator[str]:
        # The csv reader takes as many lines as a row has; `byte_offset` and `line` follow it.
        nonlocal byte_offset, line
        while content := file.readline(LINE_LIMIT + 1):
            if len(content) > LINE_LIMIT:
                raise build_line_fault(place, line)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise build_utf8_fault(place, line, content[error.start]) from None
            byte_offset += len(content)
            line += 1
            yield text

    reader = csv.reader(read_lines(), delimiter=delimiter, strict=True)
    while True:
        start = byte_offset
        first_line = line
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{place}:{first_line}: found a row that is no CSV ({error}), expected quotes"
                " around cells closed, and doubled inside; correct the row"
            ) from None
        if cells is None:
            return
        if cells:
            yield cells, start, byte_offset, first_line
