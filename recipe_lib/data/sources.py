"""Open sources of samples: files, folders of files, Parquet tables, datasets of the hub.

A DatasetBuilder calls `open_sources`, which returns the SampleFiles of a source, read by index.
Compressed files cannot be read by index, so they are unpacked once into the cache. Parquet is read
by pyarrow, a dataset of the hub by `datasets`, a batch at a time; both come with the extra
`datasets`. What a file says it unpacks to is checked against its size before it is unpacked.
"""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from huggingface_hub.errors import HTTPError

from recipe_lib.config import HUB, SourceConfig, is_hub
from recipe_lib.config.local_files import (
    COMPRESSED,
    describe_missing_datasets,
    describe_missing_reader,
    find_files,
    get_cache_root,
)
from recipe_lib.data.json_files import JsonFile
from recipe_lib.data.sample_files import (
    SAMPLE_LIMIT,
    CsvFile,
    JsonLinesFile,
    LocalFile,
    LocatedSample,
    SampleFile,
    TextFile,
    build_empty_fault,
    hash_contents,
    open_checked,
)
from recipe_lib.data.samples import SampleFault
from recipe_lib.errors import DataError, StorageError, get_first_line
from recipe_lib.files import discard_idle, write_aside
from recipe_lib.reading import open_regular, suggest_remedy
from recipe_lib.report.phases import phase
from recipe_lib.units import GIB, MIB, format_bytes

ROWS_AT_ONCE = 256  # most samples of a batch, which is read from a table at once
BYTES_AT_ONCE = 512 * MIB  # bytes that a batch may unpack to
# A file of repeated values, made to fill disks, unpacks to thousands of times its size; samples are
# packed to a third or a tenth.
MAX_UNPACKED_BYTES = 256 * MIB  # bytes that a table may unpack to in any case
MAX_RATIO = 200  # bytes that a larger file may unpack to, over its size
MAX_ROW_BYTES = GIB  # bytes that the average sample of a row group may unpack to
MAX_ROWS_PER_BYTE = 1000  # samples for each byte of the file
PARQUET_MAGIC = b"PAR1"  # at both ends of the file
# A name on the hub, with an optional subset. A path is refused, because `datasets` would read it as
# a local folder.
HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^/:]+)?")


class ParquetFile(LocalFile):
    """A .parquet file; the row groups in its footer say where its samples are."""

    def __init__(
        self, path: Path, sample_limit: int = SAMPLE_LIMIT, place: str | None = None
    ) -> None:
        super().__init__(path, sample_limit, place)
        try:
            import pyarrow.parquet  # noqa: F401  (a missing package is told before any reading)
        except ImportError:
            raise DataError(describe_missing_reader(path)) from None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[LocatedSample]:
        """Yield (place, sample) of samples start .. stop (exclusive), without null fields.

        A SampleFault stands for a sample over the limit.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        if start >= stop:
            return
        # Indices of the row groups with the first and the last sample
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        sample_index = int(self._ends[first - 1]) if first else 0  # index of the next sample
        with _open_parquet(self.path) as file:
            for group in range(first, last + 1):
                rows_at_once = self._count_rows_at_once(file.metadata.row_group(group))
                for batch in file.iter_batches(rows_at_once, row_groups=[group], use_threads=False):
                    skipped = min(max(start - sample_index, 0), len(batch))
                    sample_index += skipped
                    for sample in _read_batch(self, batch.slice(skipped, stop - sample_index)):
                        yield self.locate_sample(sample_index), sample
                        sample_index += 1
                    if sample_index >= stop:
                        return

    def _count_rows_at_once(self, group: Any) -> int:
        """Return how many samples of a row group to read at once, at most BYTES_AT_ONCE unpacked.

        group: metadata of the row group, from which the average size of a sample is estimated.
        Raises DataError for samples over MAX_ROW_BYTES.
        """
        sample_bytes = 0.0
        with open_checked(self.path) as file:
            for index in range(group.num_columns):
                column = group.column(index)
                column_bytes = column.total_uncompressed_size
                if column.has_dictionary_page:
                    # A value of the dictionary is stored once and may be every sample's.
                    value_bytes = min(_read_dictionary_size(file, column), column_bytes)
                    column_bytes = max(column_bytes, value_bytes * column.num_values)
                sample_bytes += column_bytes / max(1, group.num_rows)
        if sample_bytes > MAX_ROW_BYTES:
            raise DataError(
                f"{self.place}: a sample may unpack to {format_bytes(sample_bytes)}, expected at"
                f" most {format_bytes(MAX_ROW_BYTES)}; write the file again with smaller row"
                " groups, or take it from a source you trust"
            )
        return max(1, min(ROWS_AT_ONCE, int(BYTES_AT_ONCE // max(sample_bytes, 1))))

    @cached_property
    def _ends(self) -> np.ndarray:
        """Return the number of samples up to the end of each row group, int64 `[groups]`."""
        with _open_parquet(self.path) as file:
            groups = list(map(file.metadata.row_group, range(file.metadata.num_row_groups)))
        counts = [group.num_rows for group in groups]
        num_samples = sum(counts)
        num_bytes = sum(group.total_byte_size for group in groups)
        size = os.path.getsize(self.path)
        # Before anything is unpacked, refuse metadata that claim far more than the bytes can hold.
        if (
            num_bytes > max(MAX_UNPACKED_BYTES, MAX_RATIO * size)
            or num_samples > MAX_ROWS_PER_BYTE * size
        ):
            raise DataError(
                f"{self.place}: {format_bytes(size)} say that they unpack to {num_samples} samples"
                f" of {format_bytes(num_bytes)}, expected at most {MAX_RATIO} times the size;"
                " take the file from a source you trust"
            )
        if not num_samples:
            raise build_empty_fault(self.place)
        return np.cumsum(counts, dtype=np.int64)


def _read_dictionary_size(file: BinaryIO, column: Any) -> int:
    """Return the bytes that a column's dictionary page unpacks to; if unknown, the whole column's.

    They are read from the page's header, a Thrift compact struct: field 1 is the kind of page,
    field 2 its unpacked bytes, both i32 (0x15) as zigzag varints.
    """
    column_bytes = int(column.total_uncompressed_size)
    if column.dictionary_page_offset is None:
        return column_bytes
    file.seek(column.dictionary_page_offset)
    header = file.read(16)
    if len(header) < 4 or header[0] != 0x15 or header[2] != 0x15:
        return column_bytes
    value = 0
    for position, byte in enumerate(header[3:8]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return min(column_bytes, value >> 1)  # zigzag has twice a positive number
    return column_bytes


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file; raise DataError if it cannot be read or is no Parquet."""
    from pyarrow import ArrowException, parquet

    with open_checked(path) as content:
        beginning = content.read(len(PARQUET_MAGIC))
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - len(PARQUET_MAGIC)))
        if beginning != PARQUET_MAGIC or content.read() != PARQUET_MAGIC:
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
    """Yield the samples of a batch, or the faults of those over the limit.

    batch: an Arrow table or batch. If it is over the limit of one sample, its samples are converted
    one by one.
    """
    is_large = batch.nbytes > file.sample_limit
    for part in [batch.slice(index, 1) for index in range(len(batch))] if is_large else [batch]:
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
    return [_leave_out_nulls(item) for item in value] if isinstance(value, list) else value


class HubSamples(SampleFile):
    """One split of `hub:OWNER/NAME`, or of the subset that `hub:OWNER/NAME:SUBSET` names.

    key: of the config, for error lines. Raises DataError for another name, or without `datasets`.
    """

    def __init__(
        self, source: str, split: str, sample_limit: int = SAMPLE_LIMIT, key: str = "data.source"
    ) -> None:
        super().__init__(source, sample_limit)
        self.split = split
        self.key = key
        if not HUB_NAME.fullmatch(source.removeprefix(HUB)):
            raise DataError(
                f"{key}: found {source!r}, expected {HUB}OWNER/NAME or {HUB}OWNER/NAME:SUBSET"
            )
        try:
            import datasets  # noqa: F401  (a missing package is told before any reading)
        except ImportError:
            raise DataError(describe_missing_datasets(source, key)) from None

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[LocatedSample]:
        samples = self._samples
        stop = len(samples) if stop is None else min(stop, len(samples))
        for first in range(start, stop, ROWS_AT_ONCE):
            table = samples[first : min(first + ROWS_AT_ONCE, stop)]
            for sample_index, sample in enumerate(_read_batch(self, table), start=first):
                yield self.locate_sample(sample_index), sample

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return `name`, `size` in bytes and `sha256` of the files that `datasets` has cached."""
        name = f"{self.place} {self.split}"
        files = [Path(file["filename"]) for file in self._samples.cache_files]
        if files:
            return {"name": name} | hash_contents(*files)
        # A dataset in memory has no files: its samples are hashed one by one.
        digest = hashlib.sha256()
        size = 0
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
                f"{self.key}: {self.place}: the hub dataset cannot be loaded"
                f" ({get_first_line(error)})"
            ) from None


# Suffix -> class of a file, made of (path, limit of a sample in bytes, place for error lines)
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
    """Return the files of one source, sorted by name; their samples have this order.

    Nothing is read yet, but compressed files are unpacked. cfg: has `source` and `split`.
    sample_limit: bytes; a larger sample is a SampleFault. cache: folder of the cache; None: the
    default one. section: of the config, for error lines. Raises DataError if there is no file, or
    one of an unknown kind.
    """
    if is_hub(cfg.source):
        return [
            HubSamples(
                cfg.source, cfg.split or "train", sample_limit=sample_limit, key=f"{section}.source"
            )
        ]
    files = list[SampleFile]()
    for path in find_files(cfg.source, f"{section}.source"):
        content = path
        if path.suffix in COMPRESSED:
            content = unpack_once(path, cache or get_cache_root(None))
        files.append(_KINDS[content.suffix](content, sample_limit, str(path)))
    return files


_SMALL = 2**26  # bytes that any compressed file may unpack to, whatever its size
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # errors of damaged files
_BLOCK = 2**18  # bytes read at a time


def unpack_once(path: Path, root: Path) -> Path:
    """Return the unpacked file of a compressed one, in `root/unpacked`; unpack it if needed.

    An unpacked file is used again as long as path, size and time of the compressed one are the
    same. Raises DataError for a damaged file or one of another kind, StorageError if the disk is
    full.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}"
        ) from None
    # The name of the unpacked file is a hash of the state of the compressed one.
    state = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    folder = root / "unpacked"
    target = (
        folder / f"{hashlib.sha256(state.encode()).hexdigest()[:24]}{path.with_suffix('').suffix}"
    )
    discard_idle(folder, "*")  # what killed processes left, also of files not asked for again
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
        if error.filename == str(path):  # reading failed; else writing
            raise DataError(
                f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}"
            ) from None
        raise StorageError(
            f"{path}: cannot be unpacked into {folder} ({error.strerror or error}); free some"
            " space, or set data.cache_dir to another disk"
        ) from None
    return target


def _unpack(path: Path, target: Path, advance: Callable[[int], None]) -> None:
    """Write the content of a compressed file to `target`.

    advance: called with the number of bytes of each block, to show progress. Raises DataError for a
    damaged file, or one that unpacks to too much.
    """
    blocks = _read_gzip_blocks(path) if path.suffix == ".gz" else _read_zstd_blocks(path)
    size = 0
    max_size = max(_SMALL, MAX_RATIO * path.stat().st_size)
    try:
        with closing(blocks), target.open("wb") as out:
            for block in blocks:
                size += len(block)
                if size > max_size:
                    raise DataError(
                        f"{path}: unpacks to more than {MAX_RATIO} times its size"
                        f" ({format_bytes(max_size)}), expected samples; unpack it yourself if it"
                        " is to be read"
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
        yield from iter(partial(source.read, _BLOCK), b"")


def _read_zstd_blocks(path: Path) -> Generator[bytes]:
    """Yield the content of a .zst file, one frame after the other.

    Raises DataError if zstandard is not installed, and EOFError for a damaged file or an incomplete
    last frame, which zstandard itself does not report.
    """
    try:
        import zstandard
    except ImportError:
        raise DataError(describe_missing_reader(path)) from None
    frame = None
    with open_regular(path) as source:
        while block := source.read(_BLOCK):
            while block:  # a block may have the end of one frame and the beginning of the next
                if frame is None or frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                block = frame.unused_data if frame.eof else b""
    if frame is not None and not frame.eof:
        raise EOFError("the last frame is not whole")
