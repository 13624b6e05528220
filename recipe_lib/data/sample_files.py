"""What a file of samples is to the rest: samples by number. And the two kinds that are read line by line or whole.

No object here holds samples. Each keeps where its samples begin and reads those that are asked for, so that memory does
not grow with the file (8 bytes a sample), and the processes of a machine share what they read through its page cache.
"""

import codecs
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipe_lib.data.sample_columns import DECODER
from recipe_lib.data.samples import SampleFault, kind_of
from recipe_lib.errors import DataError
from recipe_lib.reading import open_regular, suggest_remedy
from recipe_lib.units import MIB, format_bytes

SAMPLE_LIMIT = 16 * MIB  # bytes of a sample, where nobody has said otherwise
LINE_LIMIT = 2**30  # bytes of a line: a file with holes, or a disk's image, may have none that ends
BLOCK = 2**22  # bytes read at once by a pass over a file
NEWLINE = 10
BLANK = np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8)

Located = tuple[str, dict[str, Any] | SampleFault]  # where the sample is, and the sample or why there is none


class SampleFile(ABC):
    """The samples of one file (or of one split of a hub dataset), read by number.

    place: its path, or `hub:OWNER/NAME`. An object holds no open file and no sample, so that it may be pickled, and
    used in several processes after a fork; asking for its `len` before the fork spares each of them the pass for the
    index. Any method raises DataError if the file cannot be read as a whole (no permission, invalid JSON, empty, ...).
    A sample of more than `sample_limit` bytes is a SampleFault, and is never held."""

    def __init__(self, place: str, sample_limit: int = SAMPLE_LIMIT) -> None:
        self.place, self.sample_limit = place, sample_limit

    def too_large(self, size: int) -> SampleFault:
        """The fault of a sample of so many bytes."""
        return SampleFault(
            "too large",
            f"found a sample of {format_bytes(size)}, expected at most "
            f"data.max_sample_mib={self.sample_limit / MIB:g}; "
            "divide the text, or raise data.max_sample_mib (a sample takes about 80 times its size in memory)",
        )

    @abstractmethod
    def __len__(self) -> int:
        """How many samples it has, those included that turn out to be faulty; blank lines are none."""

    @abstractmethod
    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """Samples start .. stop (exclusive; None: all that follow) in file order, each with its place, few at a time.

        A sample that cannot be used comes as a SampleFault.
        """

    def first(self, count: int) -> Iterator[Located]:
        """As `read(0, count)`; files that are found out about line by line, or item by item, are not read further."""
        return self.read(0, count)

    @abstractmethod
    def place_of(self, sample: int) -> str:
        """Where a sample is, as `read` says it, without reading it: `rows.jsonl:7`, by its line, counted from 1; in a
        list its number from 0, as in jq: `rows.json:9: .[6]`, `rows.parquet: .[6]`."""

    @property
    def keys_beside(self) -> dict[str, str]:
        """Return the keys of the file beside its samples, each with what it holds in words; empty: it changes
        nothing."""
        return {}

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What makes two files the same, as JSON: `name`, `size` in bytes, `sha256` of the content.

        It takes one pass over the file when first asked for, and not the index.
        """


class LocalFile(SampleFile):
    """A file on disk."""

    def __init__(self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None) -> None:
        """place: what the file is called, where its content lies in another one."""
        super().__init__(place or str(path), sample_limit)
        self.path = path

    @cached_property
    def identity(self) -> dict[str, Any]:
        """As SampleFile says."""
        return {"name": Path(self.place).name} | hash_of(self.path)


class TextFile(LocalFile):
    """A .txt file: one sample with the column `text`."""

    def __len__(self) -> int:
        return 1

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says; the text keeps its line ends."""
        if start <= 0 and (stop is None or stop > 0):
            with opened(self.path) as file:
                size = os.fstat(file.fileno()).st_size
            yield self.place, {"text": self._text()} if size <= self.sample_limit else self.too_large(size)

    def place_of(self, sample: int) -> str:
        """As SampleFile says."""
        return self.place

    def _text(self) -> str:
        with opened(self.path) as file:
            content = file.read().removeprefix(codecs.BOM_UTF8)
        if not content.strip():
            raise empty(self.place)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise not_utf8(self.place, line, content[error.start]) from None


class JsonLinesFile(LocalFile):
    """A .jsonl file: an object a line; blank lines are passed over."""

    def __len__(self) -> int:
        return len(self._index[0])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says."""
        starts = self._index[0]
        with opened(self.path) as file:
            at = -1
            for sample in range(start, len(starts) if stop is None else min(stop, len(starts))):
                if at != starts[sample]:  # the first one, or one after blank lines
                    at = file.seek(int(starts[sample]))
                line = file.readline(self.sample_limit + 2)  # and a line end of two
                at += len(line)
                if len(line.rstrip(b"\r\n")) > self.sample_limit:
                    yield self.place_of(sample), self.too_large(self._size_of(sample))
                else:
                    yield self.place_of(sample), parse_sample(line) if sample else _parse_first(line)

    def first(self, count: int) -> Iterator[Located]:
        """As SampleFile says."""
        with opened(self.path) as file:
            file.seek(len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)
            number, parse = 0, _parse_first
            while count and (line := file.readline(self.sample_limit + 2)):
                number += 1
                if not line.strip():
                    continue
                count -= 1
                whole = line.endswith(b"\n") or len(line) < self.sample_limit + 2
                yield f"{self.place}:{number}", parse(line) if whole else self.too_large(self.sample_limit + 1)
                parse = parse_sample
                if not whole:
                    return

    def place_of(self, sample: int) -> str:
        """As SampleFile says."""
        lines = self._index[1]
        return f"{self.place}:{sample + 1 if lines is None else lines[sample]}"

    def _size_of(self, sample: int) -> int:
        """Bytes to the next sample."""
        starts = self._index[0]
        end = int(starts[sample + 1]) if sample + 1 < len(starts) else os.path.getsize(self.path)
        return end - int(starts[sample])

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(offset of each sample in bytes; its line, or None if every line is a sample), int64 `[samples]`."""
        with opened(self.path) as file:
            starts, firsts = _line_starts(file, self.place)
            blank = [line for line in np.flatnonzero(np.isin(firsts, BLANK)) if _is_blank(file, int(starts[line]))]
        if len(blank) == len(starts):
            raise DataError(f"{self.place}: the file is empty, expected samples")
        if not blank:
            return starts, None
        kept = np.delete(np.arange(len(starts)), blank)
        return starts[kept], kept + 1


def _line_starts(file: BinaryIO, place: str) -> tuple[np.ndarray, np.ndarray]:
    """(offset of each line, int64; its first byte, uint8), in one pass; a byte order mark is no part of the first.

    Raises DataError for a line over LINE_LIMIT, with the file's name, `place`."""
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    base, at_start = file.tell(), True
    last_start = base
    num_lines = 1
    starts, firsts = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    while block := file.read(BLOCK):
        content = np.frombuffer(block, np.uint8)
        after = np.flatnonzero(content == NEWLINE) + 1
        inside = after[: len(after) - (content[-1] == NEWLINE)]
        if at_start:
            inside = np.concatenate([[0], inside])
        starts.append(inside + base)
        firsts.append(content[inside])
        base, at_start = base + len(content), content[-1] == NEWLINE
        if len(after):
            last_start = base - len(content) + int(after[-1])
            num_lines += len(after)
        if base - last_start > LINE_LIMIT:
            raise build_line_fault(place, num_lines)
    return np.concatenate(starts), np.concatenate(firsts)


def _is_blank(file: BinaryIO, start: int) -> bool:
    file.seek(start)
    while piece := file.readline(BLOCK):
        if piece.strip():
            return False
        if piece.endswith(b"\n"):
            return True
    return True


def parse_sample(line: bytes) -> dict[str, Any] | SampleFault:
    """The object that a line, or an item of a list, holds; or the fault."""
    try:
        sample = DECODER.decode(line.rstrip(b"\r\n").decode("utf-8"))
    except SampleFault as fault:
        return fault
    except UnicodeDecodeError as error:
        return SampleFault(
            "not UTF-8", f"column {error.start + 1}: found the byte 0x{line[error.start]:02x}, expected UTF-8"
        )
    except json.JSONDecodeError as error:
        return SampleFault(
            "invalid JSON", f"column {error.colno}: invalid JSON ({error.msg}), expected an object a line"
        )
    except RecursionError:
        return SampleFault("invalid JSON", "JSON nested too deep, expected an object a line")
    except ValueError:  # Python refuses integers of thousands of digits
        return SampleFault("invalid JSON", "found a number of more digits than can be read, expected an object a line")
    return as_sample(sample)


def as_sample(sample: Any) -> dict[str, Any] | SampleFault:
    """What was read, if it is an object; else the fault."""
    if isinstance(sample, dict):
        return sample
    return SampleFault("not an object", f"found {kind_of(sample)}, expected an object with the columns of the sample")


def _parse_first(line: bytes) -> dict[str, Any] | SampleFault:
    """As `parse_sample`, of the first line that is not blank: the list that it begins may be the whole file."""
    sample = parse_sample(line)
    if isinstance(sample, SampleFault) and line.lstrip().startswith(b"["):
        return SampleFault(sample.cause, f"{sample}; if the file is one list of objects, name it .json")
    return sample


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading; a DataError for what the system refuses inside, or what is no regular file."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}") from None


def hash_of(*paths: Path) -> dict[str, Any]:
    """`size` in bytes and `sha256`, in hex, of the content of one file or several. Raises DataError."""
    digest, size = hashlib.sha256(), 0
    for path in paths:
        with opened(path) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}


def empty(place: str) -> DataError:
    """The fault of a file with nothing in it."""
    return DataError(f"{place}: the file is empty, expected samples or text")


def build_line_fault(place: str, line: int) -> DataError:
    """Return the fault of a file with a line over LINE_LIMIT."""
    return DataError(
        f"{place}:{line}: found {format_bytes(LINE_LIMIT)} without a line's end, expected a sample a line; "
        "write or download the file again"
    )


def not_utf8(place: str, line: int, byte: int) -> DataError:
    """The fault of a file with a byte that is no UTF-8."""
    return DataError(f"{place}:{line}: found the byte 0x{byte:02x}, expected UTF-8; convert the file")
