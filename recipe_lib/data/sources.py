"""Rows out of files: JSON, JSON lines, text, a folder of them, or a hub dataset; each with the place it came from."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from recipe_lib.data.samples import RowFault
from recipe_lib.errors import DataError

SUFFIXES = (".json", ".jsonl", ".txt")
HUB = "hub:"
BLANK = " \t\n\r"

Located = tuple[str, dict[str, Any] | RowFault]  # where the row is, and the row or why there is none


def read_rows(source: str, split: str) -> Iterator[Located]:
    """All rows of `data.source`, in file order; a .txt file is one row with the column `text`.

    Raises DataError for a source or file that cannot be read as a whole.
    """
    if source.startswith(HUB):
        yield from _hub_rows(source, split)
        return
    for path in find_files(source):
        reader = {".json": _json_rows, ".jsonl": _jsonl_rows, ".txt": _text_rows}[path.suffix]
        yield from reader(path)


def find_files(source: str) -> list[Path]:
    """The data files that a local source names, sorted by name."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            kinds = ", ".join(SUFFIXES)
            raise DataError(f"{source}: found no {kinds} file in the folder; set data.source to one with data")
        return files
    if not path.exists():
        raise DataError(
            f"{source}: no such file or folder; set data.source to one of yours, or to hub:OWNER/NAME for a hub dataset"
        )
    if path.suffix not in SUFFIXES:
        raise DataError(f"{source}: found a {path.suffix or 'nameless'} file, expected one of {', '.join(SUFFIXES)}")
    return [path]


def _text_rows(path: Path) -> Iterator[Located]:
    yield str(path), {"text": _read_text(path)}


def _jsonl_rows(path: Path) -> Iterator[Located]:
    found = False
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                found = True
                yield f"{path}:{number}", _parse_line(line)
    if not found:
        raise DataError(f"{path}: the file is empty, expected rows")


def _parse_line(line: bytes) -> dict[str, Any] | RowFault:
    try:
        row = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowFault(
            "not UTF-8", f"column {error.start + 1}: found the byte 0x{line[error.start]:02x}, expected UTF-8"
        )
    except json.JSONDecodeError as error:
        return RowFault("invalid JSON", f"column {error.colno}: invalid JSON ({error.msg}), expected an object a line")
    except RecursionError:
        return RowFault("invalid JSON", "JSON nested too deep, expected an object a line")
    return _as_row(row)


def _as_row(row: Any) -> dict[str, Any] | RowFault:
    if isinstance(row, dict):
        return row
    found = "a list" if isinstance(row, list) else type(row).__name__
    return RowFault("not an object", f"found {found}, expected an object with the columns of the row")


def _json_rows(path: Path) -> Iterator[Located]:
    """A list of objects, `{"data": [...]}`, or one object; the line of each row comes from reading item by item."""
    text = _read_text(path)
    decoder = json.JSONDecoder()
    if text.lstrip(BLANK).startswith("["):
        yield from _list_items(path, text, decoder, text.index("["))
        return
    content = _decode(path, text, decoder)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        yield from _list_items(path, text, decoder, _place_of_data(text, decoder))
    elif isinstance(content, dict):
        yield f"{path} (row 1)", content
    else:
        raise DataError(f'{path}: found {type(content).__name__}, expected a list of objects or {{"data": [...]}}')


def _place_of_data(text: str, decoder: json.JSONDecoder) -> int:
    """Where the value of the key `data` begins, in an object that is known to be valid and to have it."""
    found, at = 0, _skip_blank(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _skip_blank(text, _skip_blank(text, at) + 1)  # behind the colon
        if key == "data":
            found = at  # of equal keys the last one holds
        _, at = decoder.raw_decode(text, at)
        at = _skip_blank(text, at)
        if text[at] == ",":
            at = _skip_blank(text, at + 1)
    return found


def _list_items(path: Path, text: str, decoder: json.JSONDecoder, start: int) -> Iterator[Located]:
    """The items of the list that begins at `start`: the whole file, or a part of a valid object."""
    at = _skip_blank(text, start + 1)
    line, counted, number = 1, 0, 0
    while text[at : at + 1] != "]":
        if number:
            if text[at : at + 1] != ",":
                _decode(path, text, decoder)  # says what is wrong, and where
            at = _skip_blank(text, at + 1)
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            _decode(path, text, decoder)
            return
        number += 1
        yield f"{path}:{line} (row {number})", _as_row(row)
        at = _skip_blank(text, end)
    if text[:start].strip(BLANK) == "" and _skip_blank(text, at + 1) != len(text):
        _decode(path, text, decoder)


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


def _decode(path: Path, text: str, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        remedy = "; if every line is an object of its own, name the file .jsonl" if error.msg == "Extra data" else ""
        at = f"{path}:{error.lineno}: column {error.colno}"
        raise DataError(f"{at}: invalid JSON ({error.msg}), expected a list of objects{remedy}") from None
    except RecursionError:
        raise DataError(f"{path}: JSON nested too deep, expected a list of objects") from None


def _read_text(path: Path) -> str:
    """The file as text, its line ends as they are. Raises DataError with the line of a byte that is not UTF-8."""
    with _opened(path) as file:
        content = file.read().removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        raise DataError(f"{path}: the file is empty, expected rows or text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: found the byte 0x{content[error.start]:02x}, expected UTF-8; convert the file"
        ) from None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: the file cannot be opened ({error.strerror}); check its permissions") from None


def _hub_rows(source: str, split: str) -> Iterator[Located]:
    name = source.removeprefix(HUB)
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"data.source: {source} needs the package datasets; run `pip install 'tune-recipes[datasets]'`"
        ) from None
    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"data.source: {source}: the hub dataset cannot be loaded ({said})") from None
    for number, row in enumerate(rows, start=1):
        yield f"{source} (row {number})", _as_row(row)
