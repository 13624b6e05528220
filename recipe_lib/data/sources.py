"""Sources of samples: files, folders of files, hub datasets.

`open_sources` makes a list of SampleFiles of a source, which are read by number. Samples are read
from any place of a file and by several processes, which compressed files do not allow: these are
unpacked once, next to the tokenized samples, and read there.
"""

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

from recipe_lib.config.local_files import (
    COMPRESSED,
    describe_missing_reader,
    find_files,
    get_cache_root,
)
from recipe_lib.config.schema import SourceConfig
from recipe_lib.config.schema_data import is_hub
from recipe_lib.data.arrow_files import HubSamples, ParquetFile
from recipe_lib.data.json_files import JsonFile
from recipe_lib.data.sample_files import (
    SAMPLE_LIMIT,
    CsvFile,
    JsonLinesFile,
    SampleFile,
    TextFile,
)
from recipe_lib.errors import DataError, StorageError
from recipe_lib.files import discard_idle, write_aside
from recipe_lib.reading import open_regular, suggest_remedy
from recipe_lib.report.phases import phase
from recipe_lib.units import format_bytes

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
    """Return the files of one source, by name, which is the order of its samples.

    cfg: its `source` and `split`. sample_limit: bytes of a sample; a larger one cannot be used.
    cache: where compressed files are unpacked; None: the default one. Others are looked up and not
    read yet. section: of the config, with the key `source`. Raises DataError: nothing is there, or
    a kind that is not read.
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


# Samples are compressed to a tenth or so; what is far below that is made to fill disks.
_MAX_RATIO = 200
_SMALL = 2**26  # bytes that any file may unpack to
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
_BLOCK = 2**18  # bytes read at a time


def unpack_once(path: Path, root: Path) -> Path:
    """Return a file below `root/unpacked` with the content of a compressed one; made if it is not
    there.

    It is found again as long as the compressed file is the same by path, size and time. Raises
    DataError for one that is damaged or of another kind, StorageError where the disk has no room.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read ({error.strerror}); {suggest_remedy(error)}"
        ) from None
    state = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
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
    """Write the content of a compressed file. advance: is told of each block's bytes."""
    blocks = _read_gzip_blocks(path) if path.suffix == ".gz" else _read_zstd_blocks(path)
    size = 0
    max_size = max(_SMALL, _MAX_RATIO * path.stat().st_size)
    try:
        with closing(blocks), target.open("wb") as out:
            for block in blocks:
                size += len(block)
                if size > max_size:
                    raise DataError(
                        f"{path}: unpacks to more than {_MAX_RATIO} times its size"
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
        while block := source.read(_BLOCK):
            yield block


def _read_zstd_blocks(path: Path) -> Generator[bytes]:
    """Yield the content, one frame after the other.

    Raises DataError without the package that reads it, and EOFError for a damaged file, or a last
    frame that is not whole, which the package passes over.
    """
    try:
        import zstandard
    except ImportError:
        raise DataError(describe_missing_reader(path)) from None
    frame = None
    with open_regular(path) as source:
        while block := source.read(_BLOCK):
            while block:  # which may hold the end of one frame and the next ones
                if frame is None or frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                block = frame.unused_data if frame.eof else b""
    if frame is not None and not frame.eof:
        raise EOFError("the last frame is not whole")
