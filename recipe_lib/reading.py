"""Read files that somebody else has made, without blocking and with a limit of memory.

A FIFO blocks whoever opens it and a device may never end, so only regular files are opened, and
links to them. A missing file and one that is not regular both raise OSError, whose `strerror` says
in words for a user what is wrong. JSON that cannot be read raises ValueError with one line.
"""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

# Most bytes of a JSON file that is read. The largest tokenizer.json in use has some 35 MiB.
JSON_LIMIT = 2**28
# Most bytes of a file that a person has written: a config, a recipe, a template.
TEXT_LIMIT = 2**22
# (test of a file's mode, text for the error, its number) of files that are not regular.
_KINDS = (
    (stat.S_ISDIR, "is a folder", errno.EISDIR),
    (stat.S_ISFIFO, "is a FIFO", errno.EINVAL),
    (stat.S_ISCHR, "is a device", errno.EINVAL),
    (stat.S_ISBLK, "is a device", errno.EINVAL),
    (stat.S_ISSOCK, "is a socket", errno.EINVAL),
)
# Number of the system's error -> what the user can do.
_REMEDIES = {
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check the disk",
    errno.ENOENT: "check its name",
}


def check_regular(path: Path | str) -> int:
    """Return the size in bytes of a regular file.

    Raises OSError for anything else, and for a name that no file can have.
    """
    try:
        status = os.stat(path)
    except ValueError:  # the name has a NUL character
        raise OSError(errno.EINVAL, "the name holds a NUL character", str(path)) from None
    return _check_size(status, path)


def open_regular(path: Path | str) -> BufferedReader:
    """Return a regular file, opened for reading. Raises OSError like `check_regular`."""
    # Checked before it is opened: opening a device may do something, such as rewind a tape.
    check_regular(path)
    # Non-blocking, and checked again: the name may have become a FIFO since, whose open would wait
    # for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_size(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, limit: int) -> bytes:
    """Return all of a regular file. Raises OSError for one of more than `limit` bytes."""
    with open_regular(path) as file:
        # The size is checked before anything is read, and again after, as the file may have grown.
        is_larger = os.fstat(file.fileno()).st_size > limit
        content = b"" if is_larger else file.read(limit + 1)
    if is_larger or len(content) > limit:
        size = f"{limit >> 20} MiB" if limit >= 2**20 else f"{limit} bytes"
        raise OSError(errno.EFBIG, f"is larger than {size}", str(path))
    return content


def read_end(path: Path | str, limit: int) -> bytes:
    """Return the last `limit` bytes of a regular file, all of a smaller one.

    Raises OSError like `check_regular`.
    """
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def read_text(path: Path | str, limit: int = TEXT_LIMIT) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    Raises OSError like `read_bytes`, and ValueError for a file that is not UTF-8.
    """
    return _decode(read_bytes(path, limit))


def read_object(path: Path | str, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises OSError like `read_bytes`, and ValueError for a file that is not JSON or holds a list, a
    text or a number.
    """
    value = read_json(path, limit)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    return value


def find_object(path: Path | str) -> dict[str, Any]:
    """Return the object that a JSON file holds; {} where `read_object` raises an error."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def read_json(path: Path | str, limit: int = JSON_LIMIT) -> Any:
    """Return the value that a JSON file holds.

    Raises OSError like `read_bytes`, ValueError like `parse_json`.
    """
    return parse_json(read_bytes(path, limit))


def parse_json(
    content: bytes | str, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text.

    make_object: makes the value of an object from its (key, value) pairs, in their order; None:
    `dict`, in which the last of equal keys stays. Raises ValueError with one line for a text that
    is not JSON in UTF-8, is nested too deep, or has a number with too many digits.
    """
    text = content if isinstance(content, str) else _decode(content)
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {error.lineno} column {error.colno}: invalid JSON ({error.msg})"
        ) from None
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise ValueError("a number of more digits than can be read") from None


def describe_fault(error: OSError | ValueError) -> str:
    """Return in words why a file cannot be read. error: raised by a function of this module."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def suggest_remedy(error: OSError) -> str:
    """Return what to do about a file that cannot be read."""
    return _REMEDIES.get(error.errno or 0, "name another file")


def _decode(content: bytes) -> str:
    """Return UTF-8 as text without its byte order mark; ValueError for other bytes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"a byte that is not UTF-8 at {error.start}") from None


def _check_size(status: os.stat_result, path: Path | str) -> int:
    """Return the size in bytes of a regular file; OSError that names `path` for anything else."""
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    for test, words, number in _KINDS:
        if test(status.st_mode):
            raise OSError(number, f"{words}, expected a regular file", str(path))
    raise OSError(errno.EINVAL, "is no regular file", str(path))
