"""Write the files of a run: flushed to the disk, and under their names only when whole.

A file or folder is written next to its final name under a temporary one (`.NAME.<nonce>.tmp`),
flushed, and renamed: `write_aside` for a single file, `publish_folder` and `exchange_folders` for a
folder. The next process knows by its name what a killed one left, and removes it. Tests replace
`before_operation`, which is called before each change of the disk, to make it fail there.
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

CHUNK_BYTES = 16 * MIB  # read and written at a time
TEMPORARY_SUFFIX = ".tmp"
REPLACED_SUFFIX = ".old"  # of a folder that `exchange_folders` is replacing at this moment
# The writer of a temporary file that has not changed for so long is taken to be gone.
IDLE_SECONDS = 3600.0
# Flags of Linux's renameat2: fail if the target exists; give both files each other's name.
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_FREE = "free some space"
# Number of the system's error -> what the user can do.
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
    """Do nothing: a hook that tests replace, called before every change of the disk.

    operation: open, write, flush, make, rename or remove. path: what it changes; for rename the new
    name.
    """


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    # File name without its folder.
    name: str
    # Bytes that were written.
    size: int
    # SHA-256 of these bytes, in hexadecimal digits.
    sha256: str


@contextmanager
def report_storage_faults() -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError of one line."""
    try:
        yield
    except OSError as error:
        raise StorageError(describe_fault(error)) from error


def describe_fault(error: OSError) -> str:
    """Return one line: which file, what the system said, what to do."""
    path = error.filename2 or error.filename or "the output folder"
    reason = error.strerror or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "check the disk")
    free = _describe_free_space(Path(os.fsdecode(path))) if remedy == _FREE else ""
    return f"{path}: {reason}{free}; {remedy}, or choose another place"


def _describe_free_space(path: Path) -> str:
    """Return ` (1.00 GiB free)` for the disk of a path, which need not exist; "": not known."""
    for folder in (path, *path.parents):
        with suppress(OSError):  # not there, or removed at this moment by the rank that tidies up
            return f" ({format_bytes(shutil.disk_usage(folder).free)} free)"
    return ""


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise StorageError if the disk under `folder` has fewer than `needed` bytes free.

    purpose: what needs them, for the message.
    """
    disk = shutil.disk_usage(folder)
    # /proc and its like have size 0. Writing there is refused with the system's own reason.
    if disk.total and disk.free < needed:
        raise StorageError(
            f"{folder}: {purpose} needs {format_bytes(needed)}, {format_bytes(disk.free)} are free;"
            f" {_FREE}, or choose another place"
        )


class HashedFile:
    """A new binary file that is hashed while it is written, and flushed when its `with` block ends.

    After an exception it is closed without a flush, and whoever made its temporary folder removes
    it.
    """

    def __init__(self, path: Path):
        """Create the file. Raises FileExistsError if it is there, OSError if it cannot be made."""
        self.path = path
        self.size = 0  # bytes written so far
        self._hash = hashlib.sha256()
        before_operation("open", path)
        # Unbuffered, so that a full disk is reported by the write that met it, not by a later one.
        self._file = open(path, "xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append the bytes. Raises OSError with the file's name."""
        view = memoryview(data)
        before_operation("write", self.path)
        self._hash.update(view)
        # One call may write only a part, near a full disk or above 2 GiB.
        while len(view):
            try:
                written = self._file.write(view)
            except OSError as error:  # an error of writing to a descriptor does not name the file
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self.size += written
            view = view[written:]

    def record(self) -> FileRecord:
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
    """Write a new file and flush it to the disk."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record()


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a new, indented JSON file and flush it to the disk."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Half a surrogate pair cannot be encoded in UTF-8: backslashreplace writes JSON's own escape.
    return write_bytes(path, text.encode(errors="backslashreplace"))


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copy the bytes of a file, not its mode, into a new file and flush it to the disk."""
    with open_regular(source) as incoming, HashedFile(target) as file:
        while chunk := incoming.read(CHUNK_BYTES):
            file.write(chunk)
    return file.record()


@contextmanager
def write_aside(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary name to write a file under; it is renamed to `path` when the block ends.

    After an error the temporary file is removed. An OSError names `path`, which the user knows.

    replace: replace a file of that name; False: FileExistsError is raised if there is one by then.
    """
    # A symbolic link stays, and the file that it leads to is replaced.
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
    """Write a small file so that a reader sees the old content or the new one, never a part.

    replace: as in `write_aside`. Raises StorageError if the system refuses the write.
    """
    with report_storage_faults(), write_aside(path, replace=replace) as temporary:
        write_bytes(temporary, data)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file like `replace_bytes`."""
    replace_bytes(path, text.encode())


def open_to_append(path: Path, mode: int = 0o666) -> FileIO:
    """Open a file that only grows, or make it; unbuffered, and readable too.

    mode: permissions of a new file, less the umask. Raises OSError for a FIFO, a device and a
    folder, without waiting for a writer.
    """
    with suppress(FileNotFoundError):  # it is made below
        check_regular(path)
    # Non-blocking: the name may have become a FIFO since.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    return FileIO(os.open(path, flags, mode), "a+")


class LineFile:
    """A file that only grows, a whole line at a time; this process alone writes it."""

    def __init__(self, path: Path, size: int | None = None):
        """Open the file, or make it. Raises OSError like `open_to_append`.

        size: bytes to keep of a file that is there; None: all.
        """
        self.path = path
        self._is_new = not path.exists()  # True: made here, and removed if it stays empty
        self._file = open_to_append(path)
        if size is not None:
            self._file.truncate(size)

    def append(self, lines: bytes) -> None:
        """Add whole lines, or nothing. Raises OSError with the file's name."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            before_operation("write", self.path)
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # A full disk may have taken half a line: remove it, and a file that was new and has
            # no line. The first error is the one to report, not one of this.
            with suppress(OSError):
                self._file.truncate(size)
                if self._is_new and not size:
                    Path(os.path.realpath(self.path)).unlink()  # not a link that leads to it
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        self._file.close()


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of the bytes that the file has now, in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: Path) -> None:
    """Make a new folder, with its parents."""
    before_operation("make", path)
    path.mkdir(parents=True)


def flush_folder(path: Path) -> None:
    """Flush the folder's own entries to the disk, so that new names survive a power failure."""
    before_operation("flush", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path, *, replace: bool = True) -> None:
    """Rename within one folder, and flush the folder.

    replace: replace a file of that name; False: FileExistsError is raised if there is one.
    """
    before_operation("rename", target)
    if replace or not _renameat2(source, target, _RENAME_NOREPLACE):
        # Without renameat2 the check and the renaming are two steps.
        if not replace and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)
    flush_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a published folder."""
    # It is renamed first, so that a half-removed folder is never taken for a whole one.
    temporary = make_temporary_path(path)
    rename(path, temporary)
    remove_temporary(temporary)


def remove_temporary(path: Path) -> None:
    """Remove a folder or file under a temporary name."""
    before_operation("remove", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    before_operation("remove", path)
    path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove the temporary file or folder of a write that failed; log a warning if that fails.

    Raises nothing, as the error of the write is to be reported.
    """
    try:
        remove_temporary(path)
    except OSError:
        if os.path.lexists(path):
            get_logger().warning(
                "warning: %s could not be removed; the next save will try again", path
            )


def make_temporary_path(final: Path) -> Path:
    """Return a new temporary name next to `final`: `.NAME.<nonce>.tmp`."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def is_temporary(path: Path, finals: str, suffix: str = TEMPORARY_SUFFIX) -> bool:
    """Return True if the name is one that `make_temporary_path` gives.

    finals: a pattern (`step_*`) that the final name fits. suffix: of the temporary name.
    """
    match = re.fullmatch(rf"\.(.+)\.[0-9a-f]{{8}}{re.escape(suffix)}", path.name)
    return match is not None and fnmatchcase(match[1], finals)


def list_leftovers(parent: Path, finals: str) -> list[Path]:
    """Return the paths in `parent` under temporary names, which killed processes left.

    finals: as in `is_temporary`.
    """
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if is_temporary(path, finals))


def remove_leftovers(parent: Path, finals: str) -> None:
    """Remove what `list_leftovers` returns. Call it only while no other process writes there."""
    for path in list_leftovers(parent, finals):
        remove_temporary(path)


def discard_idle(parent: Path, finals: str) -> None:
    """Remove those of `list_leftovers` that have not changed for IDLE_SECONDS."""
    # Newer ones may be of processes that are writing them.
    for path in list_leftovers(parent, finals):
        with suppress(OSError):  # its writer has just renamed it
            if time.time() - path.lstat().st_mtime > IDLE_SECONDS:
                discard(path)


def count_folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder and its subfolders; a link counts as itself."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a finished temporary folder its final name, which nothing has yet."""
    flush_folder(temporary)
    rename(temporary, final)


def exchange_folders(temporary: Path, final: Path) -> Path:
    """Give a finished temporary folder the name of an existing one; return where the latter is now.

    The caller removes the former folder.
    """
    before_operation("rename", final)
    if _renameat2(temporary, final, _RENAME_EXCHANGE):
        flush_folder(final.parent)
        return temporary
    # Where the system cannot do it in one operation, no folder has the name for a moment. If the
    # process is killed then, `restore_replaced` finds `.NAME.<nonce>.old`.
    old = make_temporary_path(final).with_suffix(REPLACED_SUFFIX)
    os.rename(final, old)
    rename(temporary, final)
    return old


def restore_replaced(root: Path, name: str) -> None:
    """Finish or undo an exchange of folders that a process did not live to finish.

    The folder with REPLACED_SUFFIX gets its name again if nothing has it, else it is removed.
    root: the folder that has both.
    """
    leftovers = (
        path for path in root.glob(f".{name}.*") if is_temporary(path, name, REPLACED_SUFFIX)
    )
    for old in sorted(leftovers):
        if (root / name).exists():
            remove_temporary(old)  # the new folder has the name already
        else:
            rename(old, root / name)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Rename by Linux's renameat2, with its flags; return True if that was done.

    Return False where the system or the file system does not have it. Raises OSError for any other
    failure.
    """
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd = -100  # AT_FDCWD: relative paths are from the working folder
    if not renameat2(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), flags):
        return True
    error_number = ctypes.get_errno()
    if error_number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error_number, os.strerror(error_number), str(target))


def is_plain_name(name: Any) -> bool:
    """Return True if `name` is a file name: a text without folders, not empty and not `..`."""
    return (
        isinstance(name, str)
        and name not in ("", "..")
        and "\0" not in name
        and Path(name).name == name
    )
