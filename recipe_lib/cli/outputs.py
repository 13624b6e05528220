"""Files that a command writes where an option says: checked before the work is done, and never over another file."""

import os
from collections.abc import Iterable
from pathlib import Path

from recipe_lib.config.local_files import check_folder
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import JSON_LIMIT, check_regular, parse_json, read_bytes

_RATES = ({"matmul", "device", "version"},)
# By what a file of ours is known again: keys of its JSON object, or of the first line's.
_KEYS: dict[str, tuple[set[str], ...]] = {
    # A plan, a tensor-parallel plan, a list of receipts.
    "--json": ({"schema", "verdict"}, {"model", "tokens", "legal_sizes"}, {"receipts", "unreadable"}),
    "--calibrate": _RATES,
    "--write": _RATES,
    "summary.json": ({"models", "sequences", "label_tokens"},),
    "examples.jsonl": ({"sequence", "place"},),
}
# By what it begins with, and what follows within the first bytes; of a snapshot, anywhere.
_WORDS = {
    "--html": (b"<!DOCTYPE html>", b'content="tune-recipes: plan"'),
    "report.html": (b"<!DOCTYPE html>", b'content="tune-recipes: evaluation"'),
    "--snapshot": (b"\x80", b"device_traces"),
}


def check_output(
    option: str, path: str | None, inputs: Iterable[tuple[str, str | None]] = (), kind: str | None = None
) -> None:
    """Raise ConfigError for a file that cannot be written, that the command reads, or that no earlier use has written.

    inputs: option and path of what the command reads, or writes elsewhere. kind: by which a file is known again;
    default: the option.
    """
    if path is None or (option == "--json" and path == "-"):
        return
    check_place(option, path, inputs)
    if os.path.exists(path) and not _is_ours(kind or option, path):
        raise ConfigError(
            f"{option}: {show(path)} is there already and is no file that {option} writes; move it away, or choose "
            "another name"
        )


def check_place(
    option: str, path: str, inputs: Iterable[tuple[str, str | None]] = (), *, makes_folders: bool = False
) -> None:
    """Raise ConfigError for a name that no file can be written under, and that of an input; see `check_output`.

    makes_folders: the command makes the folders that the name lies in.
    """
    check_replaceable(f"{option}: {show(path)}", path)
    folder = os.path.dirname(path) or "."
    if not makes_folders and not os.path.isdir(folder):
        raise ConfigError(f"{option}: {show(folder)}: no such folder; make it, or choose another name")
    for input_option, input_path in inputs:
        if input_path is not None and _is_same_file(path, input_path):
            raise ConfigError(f"{option}: {show(path)} is the file of {input_option} too; choose another name")
    check_folder(Path(folder), option)


def check_replaceable(named: str, path: Path | str) -> None:
    """Raise ConfigError for a folder, a FIFO, a device or a socket in the place of a file. named: the path, for it."""
    try:
        check_regular(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(f"{named}: lies under a file; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{named}: {error.strerror}; choose another name") from None


def check_output_folder(option: str, folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError for a folder that cannot be written, and one that has other files of these names."""
    check_folder(folder, option)
    for name in names:
        if os.path.lexists(folder / name):
            check_output(option, str(folder / name), kind=name)


def _is_same_file(path: str, input_path: str) -> bool:
    """Return whether two names, which need not be there yet, are of one file."""
    input_path = os.path.expanduser(input_path)
    if os.path.exists(path) and os.path.exists(input_path):
        return os.path.samefile(path, input_path)
    return os.path.realpath(path) == os.path.realpath(input_path)


def _is_ours(kind: str, path: str) -> bool:
    try:
        content = read_bytes(path, JSON_LIMIT)  # a larger file is none of ours
        if kind in _WORDS:
            begin, word = _WORDS[kind]
            searched = content if kind == "--snapshot" else content[:4096]
            return content.startswith(begin) and word in searched
        value = parse_json(content.partition(b"\n")[0] if kind.endswith(".jsonl") else content)
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and any(keys <= value.keys() for keys in _KEYS[kind])
