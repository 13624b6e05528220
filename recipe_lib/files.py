"""Files of a run: written once, flushed to the disk, and named only when whole.

Everything a run publishes is written next to its final name under a temporary one
(`.NAME.<nonce>.tmp`), flushed, and renamed. What a killed process leaves is therefore recognized by
its name, and removed by the next one. A single file is written in `write_aside`, which removes the
temporary one itself when the write fails. `before_operation` is called before each change of the
disk: tests make it fail there.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import Any, Self

from recipe_lib.errors import StorageError
from recipe_lib.logs import get_logger
from recipe_lib.reading import check_regular, open_regular
from recipe_lib.units import MIB, format_bytes

CHUNK_BYTES = 16 * MIB
TEMPORARY_SUFFIX = ".tmp"
REPLACED_SUFFIX = ".old"
IDLE_SECONDS = 3600.0  # of what nobody has written to for so long the writer is gone
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # of renameat2
_FREE = "free some space"
# What the system refused with -> what to do.
_REMEDIES = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`)",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
    errno.ENOENT: "make the folder",
    errno.ENOTDIR: "move the file away that stands for a folder",
}


def before_operation(operation: str, path: Path) -> None:
    """Called before every change of the disk (open, write, flush, make, rename, remove); does
    nothing.
    """


@dataclass(frozen=True)
class FileRecord:
    """A written file: its base name, its length in bytes, and the SHA-256 of what was written."""

    name: str
    size: int
    sha256: str


@contextmanager
def report_storage_faults() -> Iterator[None]:
    """Turns an operating system's refusal to write into one StorageError line."""
    try:
        yield
    except OSError as error:
        raise StorageError(describe_fault(error)) from error


def describe_fault(error: OSError) -> str:
    """One line: which file, what the system said, what to do."""
    where = error.filename2 or error.filename or "the output folder"
    said = error.strerror or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "check the disk")
    free = _free_text(Path(os.fsdecode(where))) if remedy == _FREE else ""
    return f"{where}: {said}{free}; {remedy}, or choose another place"


def _free_text(path: Path) -> str:
    for folder in (path, *path.parents):
        with suppress(OSError):  # not there, or removed at this moment by the rank that tidies up
            return f" ({format_bytes(shutil.disk_usage(folder).free)} free)"
    return ""


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raises StorageError if the disk under `folder` has fewer than `needed` bytes free; nothing is
    written.
    """
    disk = shutil.disk_usage(folder)
    if (
        disk.total and disk.free < needed
    ):  # /proc and its like have no size, and say themselves why they refuse
        raise StorageError(
            f"{folder}: {purpose} needs {format_bytes(needed)}, {format_bytes(disk.free)} are free;"
            f" {_FREE}, or choose another place"
        )


class HashedFile:
    """A new binary file that is hashed while it is written, and flushed to the disk when it is
    closed.

    A file left by an exception is not flushed; its folder is a temporary one, removed by whoever
    made it.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        before_operation("open", path)
        self._file = open(path, "xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Appends the bytes; raises OSError with the file's name."""
        view = memoryview(data)
        before_operation("write", self.path)
        self._hash.update(view)
        while len(view):
            try:
                written = self._file.write(view)
            except OSError as error:  # writing to a descriptor names no file
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self.size += written
            view = view[written:]

    def record(self) -> FileRecord:
        """Name, size and hash of what has been written so far."""
        return FileRecord(self.path.name, self.size, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                before_operation("flush", self.path)
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Writes a new file and flushes it to the disk."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record()


def write_json(path: Path, value: Any) -> FileRecord:
    """Writes a new, indented JSON file and flushes it to the disk."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return write_bytes(
        path, text.encode(errors="backslashreplace")
    )  # half a surrogate pair: as JSON's own escape


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copies the bytes (not mode, not links) into a new file and flushes it to the disk."""
    with open_regular(source) as incoming, HashedFile(target) as file:
        while chunk := incoming.read(CHUNK_BYTES):
            file.write(chunk)
    return file.record()


@contextmanager
def write_aside(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary name to write a file under, which becomes `path` when it is whole; after an
    error it is gone.

    replace: a file that is there is replaced; without it one that has come meanwhile stays, and
    FileExistsError is raised. A link stays, and what it leads to is written. An OSError names
    `path`, which the user knows.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    discard_idle(target.parent, target.name)
    temporary = make_temporary_path(target)
    try:
        yield temporary
        rename(temporary, target, replace=replace)
    except BaseException as error:
        discard(temporary)
        if isinstance(error, OSError) and error.filename in (temporary, str(temporary)):
            error.filename = str(path)
        raise


def replace_bytes(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a small file so that a reader sees the old content or the new one, never a part. Raises
    StorageError.

    replace: as in `write_aside`.
    """
    with report_storage_faults(), write_aside(path, replace=replace) as temporary:
        write_bytes(temporary, data)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file like `replace_bytes`."""
    replace_bytes(path, text.encode())


def open_to_append(path: Path, mode: int = 0o666) -> FileIO:
    """Open a file that only grows, or make it; unbuffered, and readable too.

    mode: of a new file, less the umask. Raises OSError for a FIFO, a device and a folder, without
    waiting.
    """
    with suppress(FileNotFoundError):
        check_regular(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    return FileIO(os.open(path, flags, mode), "a+")


class LineFile:
    """A file that only grows, a whole line at a time; this process alone writes it."""

    def __init__(self, path: Path, size: int | None = None):
        """Open it, or make it. size: bytes to keep of it; None: all. Raises OSError like
        `open_to_append`.
        """
        self.path = path
        self._is_new = not path.exists()
        self._file = open_to_append(path)
        if size is not None:
            self._file.truncate(size)

    def append(self, lines: bytes) -> None:
        """Add whole lines, or nothing: what a full disk cuts off is taken away. Raises OSError with
        the file's name.
        """
        size = os.fstat(self._file.fileno()).st_size
        try:
            before_operation("write", self.path)
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
                if self._is_new and not size:
                    Path(os.path.realpath(self.path)).unlink()  # a link to it stays
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close it."""
        self._file.close()


def compute_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes as they are on the disk now."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: Path) -> None:
    """Makes a new folder, with its parents."""
    before_operation("make", path)
    path.mkdir(parents=True)


def flush_folder(path: Path) -> None:
    """Flushes the folder's own entries (names made, renamed, removed) to the disk."""
    before_operation("flush", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path, *, replace: bool = True) -> None:
    """Rename within one folder, and flush the folder. Without `replace` FileExistsError where the
    name is taken.
    """
    before_operation("rename", target)
    if replace or not _renameat2(source, target, _RENAME_NOREPLACE):
        if not replace and os.path.lexists(
            target
        ):  # in two steps, where the system has none that does both
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)
    flush_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Removes a published folder: it loses its name first, so that half of it is never taken for
    the whole.
    """
    temporary = make_temporary_path(path)
    rename(path, temporary)
    remove_temporary(temporary)


def remove_temporary(path: Path) -> None:
    """Removes a folder or file under a temporary name."""
    before_operation("remove", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Removes a file, if it is there."""
    before_operation("remove", path)
    path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Removes what an unfinished write left, while its own error is on the way; a failure here is
    only a warning.
    """
    try:
        remove_temporary(path)
    except OSError:
        if os.path.lexists(path):
            get_logger().warning(
                "warning: %s could not be removed; the next save will try again", path
            )


def make_temporary_path(final: Path) -> Path:
    """A new temporary name next to `final`: `.NAME.<nonce>.tmp`."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def is_temporary(path: Path, finals: str, suffix: str = TEMPORARY_SUFFIX) -> bool:
    """Whether the name is one that `make_temporary_path` gives for a final name of the pattern `finals`
    (`step_*`).
    """
    found = re.fullmatch(rf"\.(.+)\.[0-9a-f]{{8}}{re.escape(suffix)}", path.name)
    return found is not None and fnmatchcase(found[1], finals)


def list_leftovers(parent: Path, finals: str) -> list[Path]:
    """What killed processes left in `parent` under temporary names of such finals."""
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if is_temporary(path, finals))


def remove_leftovers(parent: Path, finals: str) -> None:
    """Removes them."""
    for path in list_leftovers(parent, finals):
        remove_temporary(path)


def discard_idle(parent: Path, finals: str) -> None:
    """Remove what killed processes left of such files; others may be writing theirs at this
    moment.
    """
    for path in list_leftovers(parent, finals):
        with suppress(OSError):  # it has just gone
            if time.time() - path.lstat().st_mtime > IDLE_SECONDS:
                discard(path)


def count_folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def publish_folder(temporary: Path, final: Path) -> None:
    """Gives a finished temporary folder its name, which nothing has yet."""
    flush_folder(temporary)
    rename(temporary, final)


def exchange_folders(temporary: Path, final: Path) -> Path:
    """Gives a folder the name of another one, in one operation where the system can; returns where
    the other is now.

    Where it cannot, the other one is `.NAME.<nonce>.old` for a moment: `restore_replaced` finds it.
    """
    before_operation("rename", final)
    if _renameat2(temporary, final, _RENAME_EXCHANGE):
        flush_folder(final.parent)
        return temporary
    old = make_temporary_path(final).with_suffix(REPLACED_SUFFIX)
    os.rename(final, old)
    rename(temporary, final)
    return old


def list_replaced(root: Path, name: str) -> list[Path]:
    """What an exchange in two operations left of the folder `name`, if a process ended in between
    or after it.
    """
    return sorted(
        path for path in root.glob(f".{name}.*") if is_temporary(path, name, REPLACED_SUFFIX)
    )


def restore_replaced(root: Path, name: str) -> None:
    """Gives the former folder its name again, if nothing has it; of one that was replaced only the
    rest is removed.
    """
    for old in list_replaced(root, name):
        if (root / name).exists():
            remove_temporary(old)
        else:
            rename(old, root / name)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Rename as the flags of Linux's renameat2 say; False where system or file system do not have
    that.
    """
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_working_folder = -100
    if (
        renameat2(
            at_working_folder, os.fsencode(source), at_working_folder, os.fsencode(target), flags
        )
        == 0
    ):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(target))


def is_plain_name(name: Any) -> bool:
    """Whether it is the name of something in a folder, not a path out of it."""
    return (
        isinstance(name, str)
        and name not in ("", "..")
        and "\0" not in name
        and Path(name).name == name
    )
