"""Where samples come from: files, folders of files, hub datasets. Each is a list of SampleFiles,
read by number.
"""

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
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from huggingface_hub.errors import HTTPError

from recipe_lib.config.local_files import (
    COMPRESSED,
    describe_missing_datasets,
    describe_missing_reader,
    find_files,
    get_cache_root,
)
from recipe_lib.config.schema import SourceConfig
from recipe_lib.config.schema_data import HUB, is_hub
from recipe_lib.data.column_names import is_idle_beside, says_nothing
from recipe_lib.data.sample_files import (
    SAMPLE_LIMIT,
    CsvFile,
    IndexedFile,
    JsonLinesFile,
    LocalFile,
    LocatedSample,
    SampleFile,
    TextFile,
    build_empty_fault,
    build_utf8_fault,
    hash_contents,
    open_checked,
)
from recipe_lib.data.samples import SampleFault, describe_kind
from recipe_lib.errors import DataError, StorageError, get_first_line
from recipe_lib.files import discard_idle, write_aside
from recipe_lib.reading import open_regular, suggest_remedy
from recipe_lib.report.phases import phase
from recipe_lib.units import GIB, MIB, format_bytes

# Reads JSON files, an item at a time in memory: a list of objects, `{"data": [...]}`, or one
# object.


# A fault so near to the end of what is decoded may be only that it ends there (in a word or in an
# escape).
UNSURE = 16

_BLANK = re.compile(rb"[ \t\n\r]*+")
_TOKEN = re.compile(rb'[\[\]{}]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # a bracket, or a text in quotes
_WORD = re.compile(rb'[^\s,:\[\]{}"]*+')  # a number, or `true`

TOO_LONG = object()


class JsonFile(IndexedFile):
    """A .json file. Its index is made by decoding each item once, which also finds every fault of
    the file.
    """

    def scan(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        if os.fstat(file.fileno()).st_size == 0:
            raise build_empty_fault(self.place)
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            scanner = _Scanner(content, self.place, self.sample_limit)
            opening = scanner.next_byte()
            if not opening:
                raise build_empty_fault(self.place)
            self._list_path = "." if opening == b"[" else ".data"
            self._beside = scanner.beside
            yield from scanner.items()

    def locate(self, number: int, line: int) -> str:
        return f"{self.place}:{line}: {self._list_path}[{number}]" if line else self.place

    @property
    def keys_beside(self) -> dict[str, str]:
        """Return the keys beside the list of samples, as SampleFile says."""
        len(self)  # they are known once the file was scanned
        return self._beside


def _describe(value: Any) -> str:
    """Return what kind of value was read, for error lines."""
    return "a very long value" if value is TOO_LONG else describe_kind(value)


class _Scanner:
    """Takes the values of a JSON file one after the other, each decoded by itself.

    `content[at]` is the next byte; `line` is where it is in the file.
    """

    def __init__(self, content: mmap, place: str, sample_limit: int) -> None:
        """sample_limit: a value of more bytes is passed over, not decoded."""
        self.content, self.place, self.sample_limit = content, place, sample_limit
        self.at = len(codecs.BOM_UTF8) if content[:3] == codecs.BOM_UTF8 else 0
        self.line = 1
        self.decoder = json.JSONDecoder()
        self.beside = dict[
            str, str
        ]()  # keys of the object that holds the list, as SampleFile.keys_beside

    def items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what JsonFile's `scan` does. Raises DataError."""
        opening = self.next_byte()
        if opening not in (b"[", b"{"):
            value = self.value()
            raise DataError(
                f'{self.place}: found {_describe(value)}, expected a list of objects or {{"data":'
                " [...]}"
            )
        yield from self.list_items() if opening == b"[" else self.object_items()
        if self.next_byte():
            raise self.invalid("Extra data", self.at)

    def entries(self, closing: bytes) -> Iterator[None]:
        """Pass over the list or object that begins here; yield where each of its entries begins."""
        self.advance(self.at + 1)
        mark = closing if self.next_byte() == closing else b","
        while mark == b",":
            yield
            mark = self.next_byte()
            if mark not in (b",", closing):
                raise self.invalid("Expecting ',' delimiter", self.at)
            if mark == b",":
                self.advance(self.at + 1)
                self.next_byte()
        self.advance(self.at + 1)

    def list_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what `items` does of the list that begins here."""
        for _ in self.entries(b"]"):
            first, line = self.at, self.line
            self.value()
            yield first, self.at, line

    def object_items(self) -> Iterator[tuple[int, int, int]]:
        """Yield what `items` does of the list under the key `data` of the object that begins here;
        else the object itself.
        """
        start = self.at
        has_list = False
        num_data_keys = 0
        for _ in self.entries(b"}"):
            if self.next_byte() != b'"':
                raise self.invalid("Expecting property name enclosed in double quotes", self.at)
            key = self.value()
            num_data_keys += key == "data"
            if num_data_keys > 1:
                raise DataError(
                    f"{self.place}:{self.line}: found the key 'data' twice, expected it once;"
                    " correct it"
                )
            if self.next_byte() != b":":
                raise self.invalid("Expecting ':' delimiter", self.at)
            self.advance(self.at + 1)
            if self.next_byte() == b"[" and key == "data":
                has_list = True
                yield from self.list_items()
            else:
                value = self.value()
                if not says_nothing(value):
                    self.beside[str(key)] = (
                        "" if is_idle_beside(str(key), value) else _describe(value)
                    )
        if not has_list:
            self.beside.clear()  # the object is the one sample, and these are its columns
            yield start, self.at, 0

    def next_byte(self) -> bytes:
        """Pass over blanks; return the byte after them, or nothing at the end of the file."""
        blanks = _BLANK.match(self.content, self.at)
        self.advance(blanks.end() if blanks else self.at)
        return self.content[self.at : self.at + 1]

    def value(self) -> Any:
        """Take the value that begins here; TOO_LONG for one over the limit."""
        end, is_closed = self._find_end()
        cut = min(end, self.at + self.sample_limit + UNSURE)
        try:
            text, _ = codecs.utf_8_decode(self.content[self.at : cut], "strict", cut == end)
            value, length = self.decoder.raw_decode(text)
        except UnicodeDecodeError as error:
            line = self.line + error.object[: error.start].count(b"\n")
            raise build_utf8_fault(self.place, line, error.object[error.start]) from None
        except json.JSONDecodeError as error:
            is_fault = not error.msg.startswith("Unterminated") and error.pos < len(text) - UNSURE
            if cut == end or is_fault:
                raise self.invalid(error.msg, self.at + len(text[: error.pos].encode())) from None
            if not is_closed:
                raise self.invalid("Unterminated value", end) from None
            self.advance(end)
            return TOO_LONG
        except RecursionError:
            raise DataError(
                f"{self.place}: JSON nested too deep, expected a list of objects"
            ) from None
        except ValueError:  # Python refuses integers of thousands of digits
            raise self.invalid("a number of too many digits", self.at) from None
        self.advance(self.at + len(text[:length].encode()))
        return value

    def _find_end(self) -> tuple[int, bool]:
        """Return where the list, object, text or word that begins here ends, by its brackets and
        quotes alone, and whether it does before the file.
        """
        depth = 0
        word = _WORD.match(self.content, self.at)
        if word and word.end() > self.at:
            return word.end(), True
        for token in _TOKEN.finditer(self.content, self.at):
            depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
            if depth <= 0:
                return token.end(), True
        return len(self.content), False

    def advance(self, end: int) -> None:
        """Move on to `content[end]`."""
        self.line += self.content[self.at : end].count(b"\n")
        self.at = end

    def invalid(self, said: str, position: int) -> DataError:
        """Return the fault at a position that is not before `at`."""
        line = self.line + self.content[self.at : position].count(b"\n")
        before = self.content[self.content.rfind(b"\n", 0, position) + 1 : position].removeprefix(
            codecs.BOM_UTF8
        )
        remedy = (
            "; if every line is an object of its own, name the file .jsonl"
            if said == "Extra data"
            else ""
        )
        column = len(before.decode(errors="replace")) + 1
        return DataError(
            f"{self.place}:{line}: column {column}: invalid JSON ({said}), expected a list of"
            f" objects{remedy}"
        )


# Reads Arrow tables, a batch of samples at a time: Parquet files, through pyarrow, and datasets of
# the hub, through `datasets`, which maps its files into memory; both packages come with the extra
# `datasets`.


ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 512 * MIB  # that a batch may unpack to
# A file of repeated values unpacks to thousands of times its size. Text is packed to a third or a
# tenth.
MOST_UNPACKED, LARGEST_RATIO = 256 * MIB, 200
MAX_ROW_BYTES = GIB  # that the average sample of a group may unpack to
ROWS_PER_BYTE = 1000  # of the file
MAGIC = b"PAR1"  # at both ends of the file
# A name on the hub, and no path, which `datasets` would read as well.
NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^/:]+)?")


class ParquetFile(LocalFile):
    """A .parquet file; where its samples begin is what its footer says of the row groups."""

    def __init__(
        self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None
    ) -> None:
        super().__init__(path, sample_limit, place)
        try:
            import pyarrow.parquet  # noqa: F401  (a missing package is said before anything is read)
        except ImportError:
            raise DataError(describe_missing_reader(path)) from None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[LocatedSample]:
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
        """Samples of a group that unpack to BYTES_AT_ONCE, if each is as large as the group's
        metadata allows on average.

        A value that is kept once, in a dictionary, may be that of every sample. Raises DataError
        for samples that cannot be.
        """
        sample = 0.0
        with open_checked(self.path) as content:
            for index in range(group.num_columns):
                column = group.column(index)
                own = column.total_uncompressed_size
                once = _dictionary_bytes(content, column) if column.has_dictionary_page else 0
                sample += max(own, min(once, own) * column.num_values) / max(1, group.num_rows)
        if sample > MAX_ROW_BYTES:
            raise DataError(
                f"{self.place}: a sample may unpack to {format_bytes(sample)}, expected at most"
                f" {format_bytes(MAX_ROW_BYTES)}; write the file again with smaller row groups, or"
                " take it from a source you trust"
            )
        return max(1, min(ROWS_AT_ONCE, int(BYTES_AT_ONCE // max(sample, 1))))

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of samples up to the end of each row group, int64."""
        with _parquet(self.path) as file:
            groups = [
                file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)
            ]
        counts = [group.num_rows for group in groups]
        num_samples = sum(counts)
        num_bytes = sum(group.total_byte_size for group in groups)
        size = os.path.getsize(self.path)
        # Metadata that speak of far more than the file's bytes can hold.
        if (
            num_bytes > max(MOST_UNPACKED, LARGEST_RATIO * size)
            or num_samples > ROWS_PER_BYTE * size
        ):
            raise DataError(
                f"{self.place}: {format_bytes(size)} say that they unpack to {num_samples} samples"
                f" of {format_bytes(num_bytes)}, expected at most {LARGEST_RATIO} times the size;"
                " take the file from a source you trust"
            )
        if not num_samples:
            raise build_empty_fault(self.place)
        return np.cumsum(counts, dtype=np.int64)


def _dictionary_bytes(file: BinaryIO, column: Any) -> int:
    """Bytes that a column's dictionary page unpacks to, from the first numbers of its header; all,
    if not to be seen.

    The header is a Thrift compact struct: field 1 the kind of page, field 2 its bytes, both i32
    (0x15) and zigzag.
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

    with open_checked(path) as content:
        begins, size = content.read(len(MAGIC)), content.seek(0, os.SEEK_END)
        content.seek(max(0, size - len(MAGIC)))
        if begins != MAGIC or content.read() != MAGIC:
            raise DataError(
                f"{path}: found no Parquet table, or one that is cut short; write or download it"
                " again"
            )
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise DataError(
            f"{path}: the Parquet file cannot be read ({get_first_line(error)}); write or download"
            " it again"
        ) from None


def _read_batch(file: SampleFile, batch: Any) -> Iterator[dict[str, Any] | SampleFault]:
    """Yield the samples of a batch, each on its own where one of them may be too large."""
    is_large = batch.nbytes > file.sample_limit
    for part in [batch.slice(at, 1) for at in range(len(batch))] if is_large else [batch]:
        if part.nbytes > file.sample_limit:
            yield file.build_size_fault(part.nbytes)
        else:
            for sample in part.to_pylist():
                yield {name: _leave_out_nulls(value) for name, value in sample.items()}


def _leave_out_nulls(value: Any) -> Any:
    """Return a value of an Arrow table without the nulls in it.

    A table gives all objects of a column the same fields, filled up with nulls; a chat template
    would write them out.
    """
    if isinstance(value, dict):
        return {name: _leave_out_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_leave_out_nulls(item) for item in value]
    return value


class HubSamples(SampleFile):
    """One split of `hub:OWNER/NAME`, or of the subset that `hub:OWNER/NAME:SUBSET` names."""

    def __init__(
        self, source: str, split: str, sample_limit: int = SAMPLE_LIMIT, key: str = "data.source"
    ) -> None:
        super().__init__(source, sample_limit)
        self.split = split
        if not NAME.fullmatch(source.removeprefix(HUB)):
            raise DataError(
                f"{key}: found {source!r}, expected {HUB}OWNER/NAME or {HUB}OWNER/NAME:SUBSET"
            )
        try:
            import datasets  # noqa: F401  (a missing package is said before anything is read)
        except ImportError:
            raise DataError(describe_missing_datasets(source, key)) from None

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[LocatedSample]:
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
            return {"name": name} | hash_contents(*files)
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
            raise DataError(
                f"data.source: {self.place}: the hub dataset cannot be loaded"
                f" ({get_first_line(error)})"
            ) from None


_KINDS: dict[str, Callable[[Path, int, str], SampleFile]] = {
    ".csv": CsvFile,
    ".json": JsonFile,
    ".jsonl": JsonLinesFile,
    ".parquet": ParquetFile,
    ".tsv": CsvFile,
    ".txt": TextFile,
}


def open_sources(
    cfg: SourceConfig,
    sample_limit: int = SAMPLE_LIMIT,
    cache: Path | None = None,
    section: str = "data",
) -> list[SampleFile]:
    """The files of one source (`cfg.source`, `cfg.split`), by name, which is the order of its
    samples.

    sample_limit: bytes of a sample; a larger one cannot be used. cache: where compressed files are
    unpacked; None: the default one. Others are looked up and not read yet. section: of the config,
    with the key `source`. Raises DataError: nothing is there, or a kind that is not read.
    """
    if is_hub(cfg.source):
        return [HubSamples(cfg.source, cfg.split or "train", sample_limit, f"{section}.source")]
    files = list[SampleFile]()
    for path in find_files(cfg.source, f"{section}.source"):
        inside = (
            unpack_once(path, cache or get_cache_root(None)) if path.suffix in COMPRESSED else path
        )
        files.append(_KINDS[inside.suffix](inside, sample_limit, str(path)))
    return files


# Files compressed with gzip or Zstandard: unpacked once, next to the tokenized samples, and read
# there.
#
# Samples are read by number, from any place of the file and by several processes, which compressed
# files do not allow.


# Samples are compressed to a tenth or so; what is far below that is made to fill disks.
_MOST_TIMES, _SMALL = 200, 2**26
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
_BLOCK = 2**18  # bytes read at a time


def unpack_once(path: Path, root: Path) -> Path:
    """The content of a compressed file, as a file below `root/unpacked`; made if it is not there
    yet.

    It is found again as long as the compressed file is the same by path, size and time. Raises
    DataError for one that is damaged or of another kind, StorageError where the disk has no room.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}"
        ) from None
    state = f"{path.resolve()} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    folder = root / "unpacked"
    target = (
        folder / f"{hashlib.sha256(state.encode()).hexdigest()[:24]}{path.with_suffix('').suffix}"
    )
    discard_idle(folder, "*")  # also of files that nobody asks for again
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            write_aside(target) as partial,
            phase(f"unpacking {path.name}", unit="bytes") as progress,
        ):
            _unpack(path, partial, progress.advance)
    except OSError as error:
        if error.filename == str(path):
            raise DataError(
                f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}"
            ) from None
        raise StorageError(
            f"{path}: cannot be unpacked into {folder} ({error.strerror or error}); free some"
            " space, or set data.cache_dir to another disk"
        ) from None
    return target


def _unpack(path: Path, target: Path, advance: Callable[[int], None]) -> None:
    blocks = _read_gzip_blocks(path) if path.suffix == ".gz" else _read_zstd_blocks(path)
    size, most = 0, max(_SMALL, _MOST_TIMES * path.stat().st_size)
    try:
        with closing(blocks), target.open("wb") as out:
            for block in blocks:
                size += len(block)
                if size > most:
                    raise DataError(
                        f"{path}: unpacks to more than {_MOST_TIMES} times its size"
                        f" ({format_bytes(most)}), expected samples; unpack it yourself if it is to"
                        " be read"
                    )
                out.write(block)
                advance(len(block))
    except _DAMAGED as error:
        raise DataError(
            f"{path}: is damaged, or no {COMPRESSED[path.suffix]} file ({error}); fetch or make it"
            " again"
        ) from None


def _read_gzip_blocks(path: Path) -> Generator[bytes]:
    with open_regular(path) as file, gzip.GzipFile(fileobj=file) as source:
        while block := source.read(_BLOCK):
            yield block


def _read_zstd_blocks(path: Path) -> Generator[bytes]:
    """Yield the content, one frame after the other. Raises DataError without the package that reads
    it, and EOFError for a damaged file, or a last frame that is not whole, which the package passes
    over.
    """
    try:
        import zstandard
    except ImportError:
        raise DataError(describe_missing_reader(path)) from None
    frame = None
    with open_regular(path) as source:
        while block := source.read(_BLOCK):
            while block:
                if frame is None or frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                block = frame.unused_data if frame.eof else b""
    if frame is not None and not frame.eof:
        raise EOFError("the last frame is not whole")
