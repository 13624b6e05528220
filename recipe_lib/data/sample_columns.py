"""The columns of a sample: their values, and their paths in it, as jq has them, for error lines."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from recipe_lib.data.column_names import is_idle, says_nothing
from recipe_lib.data.samples import SampleFault, kind_of, shown
from recipe_lib.reading import parse_json

RawSample = Mapping[str, Any]

_WORD = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)


# Columns by other names, for the remedy.
OTHER_NAMES = {
    "instruction": ("question", "query", "problem", "input", "prompt", "inputs"),
    "input": ("context", "query"),
    "output": ("response", "answer", "completion", "target", "solution", "targets", "answers"),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("question", "instruction", "query", "problem", "input"),
    "chosen": ("preferred", "accepted", "response_chosen", "win"),
    "rejected": ("dispreferred", "response_rejected", "lose"),
    "system": ("system_prompt",),
    "text": ("content", "document", "body"),
    "completion": ("response", "answer", "output"),
    "label": ("kto_tag", "class", "labels", "category", "target"),
}


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises SampleFault for a key that stands in it twice: the last one would win unsaid."""
    json_object = dict(pairs)
    if len(json_object) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = next(key for key in keys if keys.count(key) > 1)
        raise SampleFault("key twice", f"found the key {shown(repeated_key)} twice in an object, expected it once")
    return json_object


DECODER = json.JSONDecoder(object_pairs_hook=_build_object)  # made once: json.loads makes one for each text


def list_spellings(reader: Any, column: str, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names under which a format takes a column of a row, in this order. columns: as `data.columns`."""
    if column in columns:
        return (columns[column],)
    aliases = getattr(reader, "same", {}), getattr(reader, "instead", {})
    return (column, *(name for names in aliases for name in names.get(column, ())))


def called(column: str, sample: RawSample, others: Sequence[str]) -> str | None:
    """Return what a sample calls a column, of the column's name and others; None: there is none, or it is null."""
    names_by_lower = {str(name).lower(): str(name) for name, value in sample.items() if value is not None}
    return next((names_by_lower[name] for name in (column, *others) if name in names_by_lower), None)


class Renamed(dict[str, Any]):
    """A sample under the names that formats know. own: by what names the file has them, as `data.columns`. section: of
    the config, in which `columns` are."""

    def __init__(self, sample: RawSample, own: Mapping[str, str], section: str, required: Sequence[str] = ()) -> None:
        """Rename the columns; one that goes under another name keeps its own only where that is required."""
        file_names = set(own.values())
        moved_names = file_names - set(own) - set(required)
        super().__init__({name: value for name, value in sample.items() if name not in moved_names})
        self.update({name: sample[column] for name, column in own.items() if column in sample})
        self.own = own
        self.section = section
        # Columns of the file that have the name of another one here.
        self.hidden = {name: sample[name] for name in own if name in sample and name not in file_names}


def path_of(sample: RawSample, name: str) -> str:
    """Return where a column is in the sample: `.messages`, `.["my column"]`."""
    return format_path(sample.own.get(name, name) if isinstance(sample, Renamed) else name)


def format_path(name: str) -> str:
    """Return the path of a column by its name in the file; one that begins with a dot is a path already."""
    if name.startswith("."):
        return name
    return f".{name}" if _WORD.match(name) else f".[{json.dumps(name, ensure_ascii=False)}]"


def columns_section(section: str) -> str:
    """Return the section of the config that names the columns of a source of this one; validation has none of its
    own."""
    return "data" if section == "validation" else section


def overrides(section: str, own: Mapping[str, str]) -> list[str]:
    """Return what names columns on the command line: `data.columns.prompt=question`. section: that of the source."""
    if section == "data":
        return [f"data.columns.{name}={column}" for name, column in own.items()]
    return [f"{section}.columns={{{', '.join(f'{name}: {column}' for name, column in own.items())}}}"] if own else []


def found_in(holder: RawSample, name: str) -> str:
    """Return the kind of a field, in words, for error lines; of one that is not there, `nothing`."""
    return kind_of(holder[name]) if name in holder else "nothing"


def text_of(sample: RawSample, name: str, *, may_be_missing: bool = False, where: str = "") -> str:
    """Return the text in a column. Raises SampleFault: missing, no text, or not encodable as UTF-8.

    where: path of the object that has it, if that is not the sample.
    """
    value = sample.get(name)
    if value is None and may_be_missing:
        return ""
    label = f"{where}.{name}" if where else path_of(sample, name)
    if not isinstance(value, str):
        raise SampleFault(f"{name} is no text", f"{label}: found {found_in(sample, name)}, expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleFault(
            "half a character",
            f"{label}: found half a surrogate pair at character {error.start + 1}, expected whole characters",
        ) from None
    return value


def list_of(sample: RawSample, name: str) -> tuple[list[RawSample], str]:
    """Return the list of objects in a column, and its path, which an index goes behind. Raises SampleFault."""
    value, path = open_json_list(sample, name)
    if not isinstance(value, list):
        found = found_in(sample, name)
        if isinstance(value, str):
            found = "text that is no JSON list" if value.strip() else "empty text"
        raise SampleFault(f"{name} is no list", f"{path}: found {found}, expected a list of objects")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise SampleFault(
                f"{name} is no list of objects", f"{path}[{number}]: found {kind_of(item)}, expected an object"
            )
    return value, path


def open_json_list(sample: RawSample, name: str) -> tuple[Any, str]:
    """Return what a column holds, and its path; a list as JSON text, as tables have it, is parsed. Raises SampleFault
    for one that is no JSON."""
    value = sample.get(name)
    path = path_of(sample, name)
    if is_json_list(value):
        return parse_column(value, name, path), f"{path}|fromjson|."
    return value, path


def is_json_list(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text that is meant as a list in JSON."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def refuse_keys(holder: RawSample, read_keys: Sequence[str], where: str, owner: str, expected: str) -> None:
    """Raise SampleFault for a key of an object that is not read and holds something that may change something.

    where: the object's path. owner: what has the key, in words, to count the fault by. expected: the line's end.
    """
    for name, value in holder.items():
        if name not in read_keys and not says_nothing(value) and not is_idle(name, value):
            raise SampleFault(f"key {name} of {owner}", f"{where}.{name}: found {kind_of(value)}, {expected}")


def parse_column(text: str, name: str, path: str, expected: str = "a list of objects") -> Any:
    """Return what the JSON text in a column holds. Raises SampleFault."""
    try:
        return parse_json(text, make_object=_build_object)
    except ValueError as error:
        raise SampleFault(
            f"{name} is no JSON", f"{path}: found text that is no JSON ({error}), expected {expected} as JSON"
        ) from None
