"""Keep tokenized samples on disk: one process of a machine makes them, all of them map the files.

A `DatasetBuilder` calls `compute_cache_key`, and `load_or_make` with that key. A folder
`<cache>/<key>` holds the arrays of an `ArrayWriter`, and in `manifest.json` their SHA-256, checked
whenever it is opened, and the report (counts of the samples). The process that makes it holds the
lock `<key>.lock`, for which the others wait; if it fails, it writes the reason there for the other
ranks of its launch (the processes of one torchrun).
"""

import fcntl
import hashlib
import inspect
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from recipe_lib import errors
from recipe_lib.data.dataset import ARRAYS
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.data.encoding import Chunk, SourceEncoder
from recipe_lib.data.sample_files import hash_contents
from recipe_lib.data.sources import SampleFile
from recipe_lib.errors import UserError
from recipe_lib.files import compute_sha256, flush_folder, write_bytes
from recipe_lib.logs import get_logger, warn_on_first_rank
from recipe_lib.reading import parse_json, read_object
from recipe_lib.tokenizers import Tokenizer


class ArrayWriter:
    """A writer of a dataset's arrays, one file for each, to which chunks are appended."""

    def __init__(self, folder: Path | None) -> None:
        """Open a file for each array. Raises OSError if one cannot be opened.

        folder: of the files; None: buffers in memory.
        """
        self.folder = folder
        # Number of items appended so far; an item is a sequence, or a pair of two
        self.items = 0
        self.classes: dict[str, int] = {}  # name of a class -> its index in the dataset
        self._num_ids = 0  # number of ids appended so far
        self._hashes = {name: hashlib.sha256() for name in ARRAYS}
        self._files: dict[str, BinaryIO] = {}
        try:
            for name in ARRAYS:
                self._files[name] = io.BytesIO() if folder is None else open(folder / name, "xb")
            self._write("offsets", np.zeros(1))  # where the first sequence begins
        except OSError:
            self.close()
            raise

    def append(self, chunk: Chunk, file: int) -> None:
        """Append all items of a chunk. file: index of the file of samples that they come from.

        Raises OSError if the disk is full, for example.
        """
        for name in ("ids", "trained", "sample_of", "digests"):
            self._write(name, np.frombuffer(getattr(chunk, name), dtype=ARRAYS[name]))
        lengths = np.frombuffer(chunk.lengths, dtype=np.int64)
        self._write("offsets", np.cumsum(lengths) + self._num_ids)
        self._write("file_of", np.full(len(chunk.sample_of), file))
        values = np.frombuffer(chunk.values, dtype=np.float64)
        if chunk.classes:
            # Values are indices into the chunk's own classes: translate them to those of all.
            class_indices = [
                self.classes.setdefault(name, len(self.classes)) for name in chunk.classes
            ]
            values = np.array(class_indices, dtype=np.float64)[values.astype(np.int64)]
        self._write("values", values)
        self._num_ids += int(lengths.sum())
        self.items += len(chunk.sample_of)

    def sync(self) -> None:
        """Flush and sync the files to the disk. Raises OSError if that fails."""
        for file in self._files.values():
            file.flush()
            if self.folder is not None:
                os.fsync(file.fileno())

    @property
    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each array's bytes, in hex."""
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def get_arrays(self) -> dict[str, np.ndarray]:
        if self.folder is not None:
            return map_arrays(self.folder)
        return {
            name: np.frombuffer(file.getbuffer(), dtype=ARRAYS[name])  # type: ignore[attr-defined]
            for name, file in self._files.items()
        }

    def _write(self, name: str, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values, dtype=ARRAYS[name]).data
        self._hashes[name].update(content)
        self._files[name].write(content)

    def close(self) -> None:
        """Close the files; buffers in memory stay."""
        if self.folder is not None:
            for file in self._files.values():
                file.close()


def map_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Map the arrays in a folder, read-only, so that processes share their pages.

    Raises OSError if a file cannot be opened, ValueError if it is empty.
    """
    return {
        name: np.memmap(folder / name, dtype=kind, mode="r").view(np.ndarray)
        for name, kind in ARRAYS.items()
    }


MANIFEST = "manifest.json"
FIRST_RANK_SECONDS = 2.0  # how long other ranks wait for local rank 0 to take the lock first


@dataclass(frozen=True)
class Stored:
    """The arrays of a complete dataset."""

    arrays: dict[str, np.ndarray]  # by the names of ARRAYS
    checksums: Mapping[str, str]  # SHA-256 of each array, in hex
    report: DataReport  # counts of the samples that they were made of


MakeArrays = Callable[[ArrayWriter], DataReport]  # writes all arrays, returns the report


class _Unusable(Exception):  # noqa: N818  (an outcome, turned into a warning)
    """Raised if the cache cannot be used on this machine; its text is the reason."""


def load_or_make(root: Path, key: str | None, make: MakeArrays) -> Stored:
    """Return the arrays stored under a key; one process makes them if they are missing or damaged.

    root: folder of the cache. key: None keeps the arrays in memory. So does, with a warning, a
    folder that cannot be written. make: writes the arrays and returns the report. Raises what
    `make` raises; other processes of the launch, which have waited for it, raise the same.
    """
    try:
        if key is not None:
            return _read_stored(root / key) or _make_under_lock(root, key, make)
    except _Unusable as unusable:
        warn_on_first_rank(
            "warning: data.cache_dir: tokenized samples cannot be kept in %s (%s); they are kept in"
            " memory",
            root,
            unusable,
        )
    with closing(ArrayWriter(None)) as writer:
        report = make(writer)
        return Stored(writer.get_arrays(), writer.checksums, report)


def _make_under_lock(root: Path, key: str, make: MakeArrays) -> Stored:
    with _hold_lock(root, key) as lock:
        folder = root / key
        # Another process may have made it, or failed, while this one waited for the lock.
        if stored := _read_stored(folder, say=True):
            return stored
        if failure := _find_noted_failure(lock):
            raise failure
        try:
            return _make_folder(folder, make)
        except (UserError, _Unusable) as error:
            _note_failure(lock, error)
            raise


def _make_folder(folder: Path, make: MakeArrays) -> Stored:
    # Renamed once it is complete
    partial = folder.with_name(f"{folder.name}.partial")
    with _convert_os_errors():
        _remove_folder(partial)
        _remove_folder(folder)
        partial.mkdir(parents=True)
    try:
        with _convert_os_errors(), closing(ArrayWriter(partial)) as writer:
            report = make(writer)
            writer.sync()
            content = {"checksums": writer.checksums, "report": report.to_json()}
            manifest = {"content": content, "sha256": _hash_json(content)}
            write_bytes(partial / MANIFEST, json.dumps(manifest).encode())
            # Synced before the rename, so that after a crash the folder is complete or not there
            flush_folder(partial)
            partial.rename(folder)
            flush_folder(folder.parent)
            return Stored(map_arrays(folder), writer.checksums, report)
    finally:
        with suppress(OSError):  # then the next process that holds the lock removes it
            _remove_folder(partial)


@contextmanager
def _convert_os_errors() -> Iterator[None]:
    """Turn an OSError inside into _Unusable. Errors of the sources are UserErrors already."""
    try:
        yield
    except OSError as error:
        raise _Unusable(error.strerror or str(error)) from None


def _hash_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_stored(folder: Path, say: bool = False) -> Stored | None:
    """Return the arrays in a folder; None if it does not exist or is damaged.

    say: log a line about damage.
    """
    try:
        if not folder.exists():
            return None
        manifest = read_object(folder / MANIFEST)
        content = manifest["content"]
        checksums = content["checksums"] | {MANIFEST: manifest["sha256"]}
        actual = {MANIFEST: _hash_json(content)} | {
            name: compute_sha256(folder / name) if (folder / name).is_file() else None
            for name in ARRAYS
        }
        damaged = [name for name in actual if actual[name] != checksums.get(name)]
        if not damaged:
            report = DataReport.from_json(content["report"])
            return Stored(map_arrays(folder), content["checksums"], report)
        is_missing = actual[damaged[0]] is None
        fault = (
            f"{damaged[0]} {'is missing' if is_missing else 'has other content than was written'}"
        )
    except FileNotFoundError:
        fault = f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        fault = f"{MANIFEST} cannot be read"
    if say:
        get_logger().info("data: %s: found a damaged cache (%s); tokenizing anew", folder, fault)
    return None


def _remove_folder(folder: Path) -> None:
    """Remove a cache folder: only files with the cache's names, then the folder if it is empty.

    Raises OSError, also if other files are left in it.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    for name in (*ARRAYS, MANIFEST):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


@contextmanager
def _hold_lock(root: Path, key: str) -> Iterator[TextIO]:
    """Hold the lock of a key; wait while another process holds it.

    Raises _Unusable if the file cannot be opened, or the file system has no locks.
    """
    path = root / f"{key}.lock"
    with _convert_os_errors():
        root.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")
    with file:
        try:
            _wait_for_first_rank(file, root / key)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise _Unusable(f"no file locks: {error.strerror or error}") from None
        try:
            yield file
        finally:
            # Closing alone would not release it: forked workers have inherited the open file, and
            # may outlive this block.
            fcntl.flock(file, fcntl.LOCK_UN)


def _wait_for_first_rank(lock: TextIO, folder: Path) -> None:
    """Wait until another process holds the lock or is done, FIRST_RANK_SECONDS at most.

    So local rank 0, which does not wait, makes the dataset: it is the one that shows progress.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return
    deadline = time.monotonic() + FIRST_RANK_SECONDS
    while time.monotonic() < deadline and not folder.exists() and _find_noted_failure(lock) is None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(0.02)


def _name_launch() -> str | None:
    """Return a text that is the same for all ranks of a launch on this machine; None: one rank."""
    # The parent process and these variables tell launches on one machine apart.
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))) == 1:
        return None
    names = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "MASTER_PORT",
        errors.FOLDER_VARIABLE,
    )
    return "|".join([str(os.getppid()), *(os.environ.get(name, "") for name in names)])


def _note_failure(lock: TextIO, error: UserError | _Unusable) -> None:
    """Write the reason of a failure into the lock file, for the other ranks of this launch."""
    launch = _name_launch()
    if launch is not None:
        with suppress(OSError):  # on a full disk the other ranks will fail by themselves
            lock.truncate(0)
            faults = error.faults if isinstance(error, UserError) else error.args
            json.dump({"launch": launch, "error": type(error).__name__, "faults": faults}, lock)
            lock.flush()


# Name -> class of the failures that are written. All ranks raise the same one, as it decides the
# exit code.
_NOTED_KINDS: dict[str, type[UserError | _Unusable]] = {_Unusable.__name__: _Unusable} | {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, UserError)
}


def _find_noted_failure(lock: TextIO) -> UserError | _Unusable | None:
    """Return the failure that another rank of this launch has written; None: there is none."""
    lock.seek(0)
    try:
        noted = parse_json(lock.read(2**20))
        # A failure of another launch is ignored: its cause may be gone.
        if noted["launch"] == _name_launch() is not None:
            return _NOTED_KINDS[noted["error"]](*map(str, noted["faults"]))
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


# All of these enter the key of a dataset.
# Patterns of the files that a tokenizer reads in its folder
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens*",
    "added_tokens*",
    "chat_template*",
    "generation_config.json",
    "config.json",
)
# Packages whose code decides the ids and labels
PACKAGES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pyarrow", "numpy")
FOLDERS = ("data", "tokenizers")  # folders of recipe_lib whose code does


def compute_cache_key(
    settings: Mapping[str, Any],
    files: Sequence[SampleFile],
    encoders: Sequence[SourceEncoder],
    tokenizer: Tokenizer,
) -> str | None:
    """Return a SHA-256 in hex of all that decides a dataset's ids and labels.

    That is the settings, the contents and places of all files, tokenizer, formats and the code of
    recipe_lib. A plugin's format enters by the file that it is in, not by what that file imports.
    None: a format or the tokenizer has no file to hash, so the dataset cannot be cached. encoders:
    one for each source. Raises DataError if a file cannot be read.
    """
    # A format is a function that reads a row.
    readers = [_identify_reader(encoder.read) for encoder in encoders]
    file = Path(tokenizer.place)
    if None in readers or not file.is_file():
        return None
    tokenizer_files = {file}
    for pattern in TOKENIZER_FILES:
        tokenizer_files.update(path for path in file.parent.glob(pattern) if path.is_file())
    key_parts = {
        "settings": settings,
        "files": [[file.place, file.identity] for file in files],
        "columns": [encoder.columns for encoder in encoders],
        "sources": [encoder.source.source for encoder in encoders],
        "formats": readers,
        "tokenizer": [
            tokenizer.place,
            _hash_files(tokenizer_files),
            tokenizer.chat_template,
            tokenizer.chat_template_place,
        ],
        "ids": [
            tokenizer.bos_id,
            tokenizer.eos_id,
            tokenizer.add_bos_by_default,
            sorted(tokenizer.stop_ids),
        ],
        "arrays": ARRAYS,
        "code": _identify_code(),
    }
    return _hash_json(key_parts)


def _identify_reader(reader: Any) -> list[str] | None:
    """Return [name of a function, name of its file, hash of that file]; None: it has no file."""
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(reader)) or "")
    except TypeError:
        return None
    return (
        [getattr(reader, "__qualname__", ""), *_hash_files([file])[0]] if file.is_file() else None
    )


@cache
def _identify_code() -> list[Any]:
    """Return the hashes of the files in FOLDERS, and the versions of PACKAGES."""
    package = Path(__file__).parents[1]
    files = _hash_files(path for folder in FOLDERS for path in (package / folder).glob("*.py"))
    return [files, [[name, version(name)] for name in PACKAGES if find_spec(name)]]


def _hash_files(paths: Iterable[Path]) -> list[list[str]]:
    return [[path.name, hash_contents(path)["sha256"]] for path in sorted(paths)]
