"""Where samples come from: files, folders of files, hub datasets. Each is a list of SampleFiles, read by number."""

import codecs
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from huggingface_hub.errors import HTTPError

from recipe_lib.config.local_files import COMPRESSED, cache_root, find_files, no_datasets, no_reader
from recipe_lib.config.schema import SourceConfig
from recipe_lib.config.schema_data import HUB, is_hub
from recipe_lib.data.column_names import is_idle_beside, says_nothing
from recipe_lib.data.sample_files import (
    SAMPLE_LIMIT,
    CsvFile,
    IndexedFile,
    JsonLinesFile,
    LocalFile,
    Located,
    SampleFile,
    TextFile,
    empty,
    hash_of,
    not_utf8,
    opened,
    parse_sample,
    skip_mark,
)
from recipe_lib.data.samples import SampleFault, kind_of
from recipe_lib.errors import DataError, StorageError
from recipe_lib.files import discard_idle, write_aside
from recipe_lib.reading import open_regular, suggest_remedy
from recipe_lib.report.phases import phase
from recipe_lib.units import GIB, MIB, format_bytes

# Reads JSON files, an item at a time in memory: a list of objects, `{"data": [...]}`, or one
# object.


READ_BYTES = 2**20  # bytes that are read at a time
# A fault so near to the end of the window may be only that the window ends there (in a word or in an escape).
UNSURE = 16

_BLANK = re.compile("[ \t\n\r]*")
_OUTSIDE, _INSIDE = re.compile(r'[\[\]{}"]'), re.compile(r'\\.?|"', re.DOTALL)  # of a text in quotes

TOO_LONG = object()


class JsonFile(IndexedFile):
    """A .json file. Its index is made by decoding each item once, which also finds every fault of the file."""

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """As IndexedFile says."""
        scanner = _Scanner(file, self.place, self.sample_limit)
        self._list_path = "." if scanner.next_letter() == "[" else ".data"
        self._beside = scanner.beside
        yield from scanner.items()

    def decode(self, content: bytes, number: int) -> dict[str, Any] | SampleFault:
        """As IndexedFile says."""
        return parse_sample(content)

    def locate(self, number: int, line: int) -> str:
        """As IndexedFile says."""
        return f"{self.place}:{line}: {self._list_path}[{number}]" if line else self.place

    @property
    def keys_beside(self) -> dict[str, str]:
        """Return the keys beside the list of samples, as SampleFile says."""
        len(self)  # they are known once the file was scanned
        return self._beside


def _describe(value: Any) -> str:
    """Return what kind of value was read, for error lines."""
    return "a very long value" if value is TOO_LONG else kind_of(value)


class _Scanner:
    """A window onto the text of a file, which moves on as values are taken from it.

    `text[at]` is the next letter; `byte`, `line`, `column` say where it is in the file.
    """

    def __init__(self, file: BinaryIO, place: str, sample_limit: int) -> None:
        """sample_limit: a value of more letters is passed over, not decoded."""
        self.file, self.place, self.sample_limit = file, place, sample_limit
        self.letters = codecs.getincrementaldecoder("utf-8")()
        self.decoder = json.JSONDecoder()
        self.text, self.at, self.ended = "", 0, False
        self.beside = dict[str, str]()  # keys of the object that holds the list, as SampleFile.keys_beside
        self.line, self.column = 1, 1
        self.byte = skip_mark(file)

    def items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what JsonFile's `scan` does. Raises DataError."""
        opening = self.next_letter()
        if not opening:
            raise empty(self.place)
        if opening not in "[{":
            value = self.value()
            raise DataError(f'{self.place}: found {_describe(value)}, expected a list of objects or {{"data": [...]}}')
        yield from self.list_items() if opening == "[" else self.object_items()
        if self.next_letter():
            raise self.invalid("Extra data", self.at)

    def list_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what `items` does of the list that begins here."""
        self.advance(self.at + 1)
        mark = "]" if self.next_letter() == "]" else ","
        while mark == ",":
            first, line = self.byte, self.line
            self.value()
            yield first, self.byte, line
            mark = self.next_letter()
            if mark not in (",", "]"):
                raise self.invalid("Expecting ',' delimiter", self.at)
            if mark == ",":
                self.advance(self.at + 1)
                self.next_letter()
        self.advance(self.at + 1)

    def object_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what `items` does of the list under the key `data` of the object that begins here; else the object
        itself."""
        start = self.byte
        has_list = False
        num_data_keys = 0
        self.advance(self.at + 1)
        mark = "}" if self.next_letter() == "}" else ","
        while mark == ",":
            if self.next_letter() != '"':
                raise self.invalid("Expecting property name enclosed in double quotes", self.at)
            key = self.value()
            num_data_keys += key == "data"
            if num_data_keys > 1:
                raise DataError(f"{self.place}:{self.line}: found the key 'data' twice, expected it once; correct it")
            if self.next_letter() != ":":
                raise self.invalid("Expecting ':' delimiter", self.at)
            self.advance(self.at + 1)
            if self.next_letter() == "[" and key == "data":
                has_list = True
                yield from self.list_items()
            else:
                value = self.value()
                if not says_nothing(value):
                    self.beside[str(key)] = "" if is_idle_beside(str(key), value) else _describe(value)
            mark = self.next_letter()
            if mark not in (",", "}"):
                raise self.invalid("Expecting ',' delimiter", self.at)
            if mark == ",":
                self.advance(self.at + 1)
        self.advance(self.at + 1)
        if not has_list:
            self.beside.clear()  # the object is the one sample, and these are its columns
            yield start, self.byte, 0

    def next_letter(self) -> str:
        """Pass over blanks; return the letter after them, or nothing at the end of the file."""
        while True:
            match = _BLANK.match(self.text, self.at)
            self.advance(match.end() if match else self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.grow()

    def value(self) -> Any:
        """Take the value that begins here; TOO_LONG for one over the limit."""
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - UNSURE
                if self.ended or not cut:
                    raise self.invalid(error.msg, error.pos) from None
                if len(self.text) - self.at > self.sample_limit:
                    self.pass_over()
                    return TOO_LONG
            except RecursionError:
                raise DataError(f"{self.place}: JSON nested too deep, expected a list of objects") from None
            except ValueError:  # Python refuses integers of thousands of digits
                raise self.invalid("a number of too many digits", self.at) from None
            else:
                if end < len(self.text) or self.ended:  # a number at the window's end may go on
                    self.advance(end)
                    return value
            self.grow()

    def pass_over(self) -> None:
        """Pass over the list, object or text that begins here, by its brackets and quotes alone."""
        at, depth, inside = self.at, 0, False
        while True:
            found = (_INSIDE if inside else _OUTSIDE).search(self.text, at)
            if found is None or found[0] == "\\":  # which may belong to the next letter
                self.advance(found.start() if found else len(self.text))
                if self.ended:
                    raise self.invalid("Unterminated value", self.at)
                self.grow()
                at = self.at
                continue
            at = found.end()
            if found[0] == '"':
                inside = not inside
            elif not inside:
                depth += 1 if found[0] in "[{" else -1
            if not inside and depth == 0:
                self.advance(at)
                return

    def advance(self, end: int) -> None:
        """Move on to `text[end]`."""
        passed = self.text[self.at : end]
        self.byte += len(passed) if passed.isascii() else len(passed.encode())
        self.line, self.column = self._place(end)
        self.at = end

    def grow(self) -> None:
        """Let go of what is passed and read on, as much as there is already or more."""
        block = self.file.read(max(READ_BYTES, len(self.text) - self.at))
        try:
            more = self.letters.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            raise not_utf8(self.place, line, error.object[error.start]) from None
        self.text, self.at, self.ended = self.text[self.at :] + more, 0, not block

    def invalid(self, said: str, position: int) -> DataError:
        """Return the fault at a position of the window."""
        line, column = self._place(position)
        remedy = "; if every line is an object of its own, name the file .jsonl" if said == "Extra data" else ""
        return DataError(
            f"{self.place}:{line}: column {column}: invalid JSON ({said}), expected a list of objects{remedy}"
        )

    def _place(self, position: int) -> tuple[int, int]:
        """Return (line, column) of a position that is not before `at`."""
        last = self.text.rfind("\n", self.at, position)
        if last < 0:
            return self.line, self.column + position - self.at
        return self.line + self.text.count("\n", self.at, position), position - last


# Reads Arrow tables, a batch of samples at a time: Parquet files, through pyarrow, and datasets of
# the hub, through `datasets`, which maps its files into memory; both packages come with the extra
# `datasets`.


ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 512 * MIB  # that a batch may unpack to
# A file of repeated values unpacks to thousands of times its size. Text is packed to a third or a tenth.
MOST_UNPACKED, LARGEST_RATIO = 256 * MIB, 200
MAX_ROW_BYTES = GIB  # that the average sample of a group may unpack to
ROWS_PER_BYTE = 1000  # of the file
MAGIC = b"PAR1"  # at both ends of the file
# A name on the hub, and no path, which `datasets` would read as well.
NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^/:]+)?")


class ParquetFile(LocalFile):
    """A .parquet file; where its samples begin is what its footer says of the row groups."""

    def __init__(self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None) -> None:
        super().__init__(path, sample_limit, place)
        try:
            import pyarrow.parquet  # noqa: F401  (a missing package is said before anything is read)
        except ImportError:
            raise DataError(no_reader(path)) from None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says; inside a sample, a field that holds null is left out."""
        stop = len(self) if stop is None else min(stop, len(self))
        if start >= stop:
            return
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        number = int(self._ends[first - 1]) if first else 0
        with _parquet(self.path) as file:
            for group in range(first, last + 1):
                rows_at_once = self._rows_at_once(file.metadata.row_group(group))
                for batch in file.iter_batches(rows_at_once, row_groups=[group], use_threads=False):
                    skipped = min(max(start - number, 0), len(batch))
                    number += skipped
                    for sample in _read_batch(self, batch.slice(skipped, stop - number)):
                        yield self.place_of(number), sample
                        number += 1
                    if number >= stop:
                        return

    def _rows_at_once(self, group: Any) -> int:
        """Samples of a group that unpack to BYTES_AT_ONCE, if each is as large as the group's metadata allows on
        average.

        A value that is kept once, in a dictionary, may be that of every sample. Raises DataError for samples that
        cannot be."""
        sample = 0.0
        with opened(self.path) as content:
            for index in range(group.num_columns):
                column = group.column(index)
                own = column.total_uncompressed_size
                once = _dictionary_bytes(content, column) if column.has_dictionary_page else 0
                sample += max(own, min(once, own) * column.num_values) / max(1, group.num_rows)
        if sample > MAX_ROW_BYTES:
            raise DataError(
                f"{self.place}: a sample may unpack to {format_bytes(sample)}, expected at most "
                f"{format_bytes(MAX_ROW_BYTES)}; write the file again with smaller row groups, or take it from a "
                "source you trust"
            )
        return max(1, min(ROWS_AT_ONCE, int(BYTES_AT_ONCE // max(sample, 1))))

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of samples up to the end of each row group, int64."""
        with _parquet(self.path) as file:
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            counts = [group.num_rows for group in groups]
            self._refuse_bomb(sum(counts), sum(group.total_byte_size for group in groups))
        if not sum(counts):
            raise empty(self.place)
        return np.cumsum(counts, dtype=np.int64)

    def _refuse_bomb(self, samples: int, unpacked: int) -> None:
        """DataError for a file whose metadata speaks of far more than its bytes can hold."""
        size = os.path.getsize(self.path)
        if unpacked > max(MOST_UNPACKED, LARGEST_RATIO * size) or samples > ROWS_PER_BYTE * size:
            raise DataError(
                f"{self.place}: {format_bytes(size)} say that they unpack to {samples} samples of "
                f"{format_bytes(unpacked)}, "
                f"expected at most {LARGEST_RATIO} times the size; take the file from a source you trust"
            )


def _dictionary_bytes(file: BinaryIO, column: Any) -> int:
    """Bytes that a column's dictionary page unpacks to, from the first numbers of its header; all, if not to be seen.

    The header is a Thrift compact struct: field 1 the kind of page, field 2 its bytes, both i32 (0x15) and zigzag.
    """
    everything = int(column.total_uncompressed_size)
    if column.dictionary_page_offset is None:
        return everything
    file.seek(column.dictionary_page_offset)
    header = file.read(16)
    if len(header) < 4 or header[0] != 0x15 or header[2] != 0x15:
        return everything
    value = 0
    for place, byte in enumerate(header[3:8]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return min(everything, value >> 1)
    return everything


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


def _read_batch(file: SampleFile, batch: Any) -> Iterator[dict[str, Any] | SampleFault]:
    """Yield the samples of a batch, each on its own where one of them may be too large."""
    if batch.nbytes <= file.sample_limit:
        yield from map(_leave_out_nulls, batch.to_pylist())
        return
    for at in range(len(batch)):
        row = batch.slice(at, 1)
        is_large = row.nbytes > file.sample_limit
        yield file.too_large(row.nbytes) if is_large else _leave_out_nulls(row.to_pylist()[0])


def _leave_out_nulls(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of an Arrow table, without the nulls inside of its columns.

    A table gives all objects of a column the same fields, filled up with nulls; a chat template would write them out.
    """
    return {name: _bare(value) for name, value in sample.items()}


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return value


class HubSamples(SampleFile):
    """One split of `hub:OWNER/NAME`, or of the subset that `hub:OWNER/NAME:SUBSET` names."""

    def __init__(self, source: str, split: str, sample_limit: int = SAMPLE_LIMIT, key: str = "data.source") -> None:
        super().__init__(source, sample_limit)
        self.split = split
        if not NAME.fullmatch(source.removeprefix(HUB)):
            raise DataError(f"{key}: found {source!r}, expected {HUB}OWNER/NAME or {HUB}OWNER/NAME:SUBSET")
        try:
            import datasets  # noqa: F401  (a missing package is said before anything is read)
        except ImportError:
            raise DataError(no_datasets(source, key)) from None

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Located]:
        """As SampleFile says; inside a sample, a field that holds null is left out."""
        samples = self._samples
        stop = len(samples) if stop is None else min(stop, len(samples))
        for first in range(start, stop, ROWS_AT_ONCE):
            table = samples[first : min(first + ROWS_AT_ONCE, stop)]
            for number, sample in enumerate(_read_batch(self, table), start=first):
                yield self.place_of(number), sample

    @cached_property
    def identity(self) -> dict[str, Any]:
        """As SampleFile says, of the files that `datasets` keeps the samples in."""
        name = f"{self.place} {self.split}"
        files = [Path(file["filename"]) for file in self._samples.cache_files]
        if files:
            return {"name": name} | hash_of(*files)
        digest, size = hashlib.sha256(), 0
        for _, sample in self.read():
            line = json.dumps(sample, sort_keys=True, default=str).encode()
            digest.update(line)
            size += len(line)
        return {"name": name, "size": size, "sha256": digest.hexdigest()}

    @cached_property
    def _samples(self) -> Any:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        name, _, subset = self.place.removeprefix(HUB).partition(":")
        try:
            return load_dataset(name, subset or None, split=self.split).with_format("arrow")
        except (OSError, ValueError, DatasetsError, HTTPError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"data.source: {self.place}: the hub dataset cannot be loaded ({said})") from None


_KINDS: dict[str, Callable[[Path, int, str], SampleFile]] = {
    ".csv": CsvFile,
    ".json": JsonFile,
    ".jsonl": JsonLinesFile,
    ".parquet": ParquetFile,
    ".tsv": CsvFile,
    ".txt": TextFile,
}


def open_sources(
    cfg: SourceConfig, sample_limit: int = SAMPLE_LIMIT, cache: Path | None = None, section: str = "data"
) -> list[SampleFile]:
    """The files of one source (`cfg.source`, `cfg.split`), by name, which is the order of its samples.

    sample_limit: bytes of a sample; a larger one cannot be used. cache: where compressed files are unpacked; None: the
    default one. Others are looked up and not read yet. section: of the config, with the key `source`. Raises DataError:
    nothing is there, or a kind that is not read."""
    if is_hub(cfg.source):
        return [HubSamples(cfg.source, cfg.split or "train", sample_limit, f"{section}.source")]
    return [_opened(path, sample_limit, cache) for path in find_files(cfg.source, f"{section}.source")]


def _opened(path: Path, sample_limit: int, cache: Path | None) -> SampleFile:
    inside = unpacked(path, cache or cache_root(None)) if path.suffix in COMPRESSED else path
    return _KINDS[inside.suffix](inside, sample_limit, str(path))


# Files compressed with gzip or Zstandard: unpacked once, next to the tokenized samples, and read
# there.
#
# Samples are read by number, from any place of the file and by several processes, which compressed
# files do not allow.


# Samples are compressed to a tenth or so; what is far below that is made to fill disks.
_MOST_TIMES, _SMALL = 200, 2**26
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
_BLOCK = 2**18  # bytes read at a time


def unpacked(path: Path, root: Path) -> Path:
    """The content of a compressed file, as a file below `root/unpacked`; made if it is not there yet.

    It is found again as long as the compressed file is the same by path, size and time. Raises DataError for one that
    is damaged or of another kind, StorageError where the disk has no room.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}") from None
    state = f"{path.resolve()} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    folder = root / "unpacked"
    target = folder / f"{hashlib.sha256(state.encode()).hexdigest()[:24]}{path.with_suffix('').suffix}"
    discard_idle(folder, "*")  # also of files that nobody asks for again
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with write_aside(target) as partial, phase(f"unpacking {path.name}", unit="bytes") as progress:
            _unpack(path, partial, progress.advance)
    except OSError as error:
        if error.filename == str(path):
            raise DataError(f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}") from None
        raise StorageError(
            f"{path}: cannot be unpacked into {folder} ({error.strerror or error}); free some space, or set "
            "data.cache_dir to another disk"
        ) from None
    return target


def _unpack(path: Path, target: Path, advance: Callable[[int], None]) -> None:
    blocks, damaged = (_gzip_blocks(path), _DAMAGED) if path.suffix == ".gz" else _zstd_blocks(path)
    size, most = 0, max(_SMALL, _MOST_TIMES * path.stat().st_size)
    try:
        with closing(blocks), target.open("wb") as out:
            for block in blocks:
                size += len(block)
                if size > most:
                    raise DataError(
                        f"{path}: unpacks to more than {_MOST_TIMES} times its size ({format_bytes(most)}), expected "
                        "samples; unpack it yourself if it is to be read"
                    )
                out.write(block)
                advance(len(block))
    except damaged as error:
        raise DataError(
            f"{path}: is damaged, or no {COMPRESSED[path.suffix]} file ({error}); fetch or make it again"
        ) from None


def _gzip_blocks(path: Path) -> Generator[bytes]:
    with open_regular(path) as file, gzip.GzipFile(fileobj=file) as source:
        while block := source.read(_BLOCK):
            yield block


def _zstd_blocks(path: Path) -> tuple[Generator[bytes], tuple[type[Exception], ...]]:
    """The content, and what is raised for a damaged file. DataError without the package that reads it."""
    try:
        import zstandard
    except ImportError:
        raise DataError(no_reader(path)) from None
    return _frames(path, lambda: zstandard.ZstdDecompressor().decompressobj()), (zstandard.ZstdError, EOFError)


def _frames(path: Path, new: Callable[[], Any]) -> Generator[bytes]:
    """One frame after the other. EOFError for a last one that is not whole, which the packages pass over."""
    frame, begun = new(), False
    with open_regular(path) as source:
        while block := source.read(_BLOCK):
            while block:
                if frame.eof:
                    frame = new()
                yield frame.decompress(block)
                begun, block = True, frame.unused_data if frame.eof else b""
    if begun and not frame.eof:
        raise EOFError("the last frame is not whole")
