"""Samples once they are read, whatever their format; and the fault of one that cannot be read.

Formats make a Conversation, Completion, Document, Preference, LabeledAnswer or Classified of a row.
Every fault names its place in the sample as jq has it (`.messages[1].content`), under the names
that the file has. The functions below read one field of a row, or say what it holds.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

from recipe_lib.config.registry import get_registered
from recipe_lib.data.column_names import is_blank, is_idle
from recipe_lib.errors import escape_invisible
from recipe_lib.reading import parse_json

# `role`, `content`, and what a chat template may know besides (`tool_calls`, `name`, ...)
Message = Mapping[str, Any]


class MessagePlace(NamedTuple):
    """The place of a message in its sample, as jq has it: `.messages[1]`."""

    path: str
    text: str  # where its content is


@dataclass(frozen=True)
class SamplePlaces:
    """The places of a sample's messages and tools."""

    messages: Sequence[MessagePlace] = ()  # empty where nobody knows
    tools: str = ".tools"

    def at(self, number: int, field: str = "") -> str:
        """Return where a message is, or one of its fields (`.train`), for the beginning of an
        error line.
        """
        if number < len(self.messages):
            return self.messages[number].path + field
        return f"message {number} (the first is 0)" + (f": {field}" if field else "")

    @property
    def are_texts(self) -> bool:
        """True if each message is the text of a column, which has the message's place too."""
        return bool(self.messages) and all(place.path == place.text for place in self.messages)

    def text(self, number: int) -> str:
        """Return where the content of a message is."""
        return (
            self.messages[number].text
            if number < len(self.messages)
            else self.at(number, ".content")
        )


@dataclass(frozen=True)
class Conversation:
    """Messages of the roles system, user, assistant and tool."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None  # descriptions that the template may show
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)  # for error lines
    variables: Mapping[str, Any] = field(default_factory=dict)  # more that the template is given
    # So many of the first messages are the prompt, which is trained with data.train_on=all alone.
    asked: int = 0

    def conversations(self) -> "list[Conversation]":
        """Return itself alone."""
        return [self]


@dataclass(frozen=True)
class Completion:
    """Text as it stands, without a template; the loss counts the completion and the end token
    after it.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text that is learned as a whole."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two ways to go on from the same messages; each ends with a message of the assistant."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    # Of the prompt with the chosen answer, and with the rejected one.
    places: tuple[SamplePlaces, SamplePlaces] = field(
        default=(SamplePlaces(), SamplePlaces()), compare=False
    )
    margin: float = 0.0  # by how much chosen is better; NaN: the sample has one that is no number
    # The fault of a pair without a prompt, unless its texts turn out to be rendered already.
    no_prompt: "SampleFault | None" = field(default=None, compare=False)
    variables: Mapping[str, Any] = field(default_factory=dict)  # more that the template is given

    def conversations(self) -> list[Conversation]:
        """Return the prompt with the chosen answer, and with the rejected one."""
        return [
            Conversation(
                [*self.prompt, *answer],
                tools=self.tools,
                places=places,
                variables=self.variables,
                asked=len(self.prompt),
            )
            for answer, places in zip((self.chosen, self.rejected), self.places, strict=True)
        ]


@dataclass(frozen=True)
class LabeledAnswer:
    """An answer that is wanted (label true) or not, after the messages of the prompt."""

    prompt: Sequence[Message]
    completion: Sequence[Message]
    label: bool
    tools: Sequence[Mapping[str, Any]] | None = None
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)
    variables: Mapping[str, Any] = field(default_factory=dict)  # more that the template is given

    def conversations(self) -> list[Conversation]:
        """Return the prompt with the answer."""
        return [
            Conversation(
                [*self.prompt, *self.completion],
                tools=self.tools,
                places=self.places,
                variables=self.variables,
                asked=len(self.prompt),
            )
        ]


@dataclass(frozen=True)
class Classified:
    """A text, or messages, and the name of their class."""

    content: Conversation | Document
    label: str


def list_conversations(sample: "Sample") -> list[Conversation]:
    """Return the messages of a sample: of a pair the prompt with each answer, of texts nothing."""
    content = sample.content if isinstance(sample, Classified) else sample
    return [] if isinstance(content, (Document, Completion)) else content.conversations()


Sample = Conversation | Completion | Document | Preference | LabeledAnswer | Classified


# The roles of a prompt's messages where it was made of columns.
_PROMPT_ROLES: tuple[list[str], ...] = ([], ["user"], ["system"], ["system", "user"])


@dataclass(frozen=True)
class TextRow:
    """A row whose prompt and answers are the texts of columns, and no messages."""

    prompt: str  # empty where there is none
    answers: Sequence[str]  # one, the chosen and the rejected one, or none
    beside: str  # a column that the row has besides, which a rendered text would hold; empty: none


def read_text_row(sample: Conversation | Preference | LabeledAnswer) -> TextRow | None:
    """Return the texts of a row; None: something in it is a message."""
    chats = sample.conversations()
    first = chats[0]
    asked = len(first.messages) if isinstance(sample, Conversation) else first.asked
    prompt = first.messages[:asked]
    answers = [
        list(chat.messages[asked:]) for chat in chats if not isinstance(sample, Conversation)
    ]
    roles = [message["role"] for message in prompt]
    are_single = all(len(answer) == 1 for answer in answers)
    are_texts = all(chat.places.are_texts for chat in chats)
    if roles not in _PROMPT_ROLES or not are_single or not are_texts:
        return None
    columns = {
        "tools": first.tools,
        "system": "system" in roles,
        "chat_template_kwargs": first.variables,
    }
    return TextRow(
        prompt=prompt[-1]["content"] if "user" in roles else "",
        answers=[answer[0]["content"] for answer in answers],
        beside=next((name for name, value in columns.items() if value), ""),
    )


# No Error by name: an outcome of reading a sample, which becomes a DataError or is counted.
class SampleFault(Exception):  # noqa: N818
    """A sample that cannot be used."""

    def __init__(self, cause: str, detail: str) -> None:
        """Note a cause, a few words to count by, and in detail what was found and expected."""
        self.cause = escape_invisible(cause)
        super().__init__(escape_invisible(detail))


def describe_kind(value: Any) -> str:
    """Return a value's kind in words, for error lines."""
    kinds: tuple[tuple[Any, str], ...] = (
        (type(None), "null"),
        (str, "text"),
        (bool, "true or false"),
        (Number, "a number"),
        (list, "a list"),
        (Mapping, "an object"),
        (bytes, "bytes"),
        (date, "a date"),
        (time, "a time"),
    )
    return next(
        (words for kind, words in kinds if isinstance(value, kind)), "a value of another kind"
    )


def format_value(value: Any) -> str:
    """Return a short value as it is, for error lines; of others the kind.

    Text is put in quotes; numbers, true, false and null stand as in JSON.
    """
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:37]}...")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else describe_kind(value)


def prefix_place(place: str, detail: object) -> str:
    """Return a fault with its place before it.

    A path in the sample goes on from that of the sample (`rows.json:4: .[1]`).
    """
    text = str(detail)
    is_path = text.startswith(".") and "/" not in text.partition(": ")[0]  # but none of a file
    return place + text if is_path and place.endswith("]") else f"{place}: {text}"


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
    """Return an object of JSON. Raises SampleFault for a key that stands in it twice.

    Python's parser would take the last one without a word.
    """
    json_object = dict(pairs)
    if len(json_object) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = next(key for key in keys if keys.count(key) > 1)
        raise SampleFault(
            "key twice",
            f"found the key {format_value(repeated_key)} twice in an object, expected it once",
        )
    return json_object


def parse_object(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError like `parse_json`, and SampleFault for a key twice.
    """
    return parse_json(text, make_object=_build_object)


@dataclass(frozen=True)
class Columns:
    """The columns that a format reads; a format that names none may be given anything."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    # What may stand in the place of a required one.
    instead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Other names, which are put under the column's own.
    same: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.required, *self.optional)

    def list_spellings(self, column: str, columns: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names under which a column of a row is taken, in this order.

        columns: as `data.columns`.
        """
        if column in columns:
            return (columns[column],)
        return (column, *self.same.get(column, ()), *self.instead.get(column, ()))


def find_columns(form: str) -> Columns:
    """Return the columns that a format reads, by its name."""
    return getattr(get_registered("data.format", form), "columns", Columns())


def find_column(column: str, sample: RawSample, aliases: Sequence[str]) -> str | None:
    """Return what a sample calls a column, of the column's name and its aliases.

    None: there is none, or it holds null.
    """
    names_by_lower = {
        str(name).lower(): str(name) for name, value in sample.items() if value is not None
    }
    return next(
        (names_by_lower[name] for name in (column, *aliases) if name in names_by_lower), None
    )


class RenamedSample(dict[str, Any]):
    """A sample under the names that formats know."""

    def __init__(
        self,
        sample: RawSample,
        columns: Mapping[str, str],
        section: str,
        required: Sequence[str] = (),
    ) -> None:
        """Rename the columns.

        One that goes under another name keeps its own only where that is required.
        """
        file_names = set(columns.values())
        moved_names = file_names - set(columns) - set(required)
        super().__init__({name: value for name, value in sample.items() if name not in moved_names})
        self.update({name: sample[column] for name, column in columns.items() if column in sample})
        self.columns = columns  # by what names the file has them, as `data.columns`
        self.section = section  # of the config, in which `columns` are
        # Columns of the file that have the name of another one here.
        self.hidden = {
            name: sample[name] for name in columns if name in sample and name not in file_names
        }


def get_path(sample: RawSample, name: str) -> str:
    """Return where a column is in the sample: `.messages`, `.["my column"]`."""
    return format_path(
        sample.columns.get(name, name) if isinstance(sample, RenamedSample) else name
    )


def format_path(name: str) -> str:
    """Return the path of a column by its name in the file; one that begins with a dot is a path
    already.
    """
    if name.startswith("."):
        return name
    return f".{name}" if _WORD.match(name) else f".[{json.dumps(name, ensure_ascii=False)}]"


def get_columns_section(section: str) -> str:
    """Return the section of the config that names the columns of a source of this one.

    Validation has none of its own.
    """
    return "data" if section == "validation" else section


def format_overrides(section: str, columns: Mapping[str, str]) -> list[str]:
    """Return what names columns on the command line: `data.columns.prompt=question`.

    section: that of the source.
    """
    if section == "data":
        return [f"data.columns.{name}={column}" for name, column in columns.items()]
    pairs = ", ".join(f"{name}: {column}" for name, column in columns.items())
    return [f"{section}.columns={{{pairs}}}"] if columns else []


def describe_field(holder: RawSample, name: str) -> str:
    """Return the kind of a field, in words, for error lines; `nothing` if it is not there."""
    return describe_kind(holder[name]) if name in holder else "nothing"


def read_text_field(
    sample: RawSample, name: str, *, may_be_missing: bool = False, where: str = ""
) -> str:
    """Return the text in a column.

    where: path of the object that has it, if that is not the sample. Raises SampleFault: missing,
    no text, or not encodable as UTF-8.
    """
    value = sample.get(name)
    if value is None and may_be_missing:
        return ""
    label = f"{where}.{name}" if where else get_path(sample, name)
    if not isinstance(value, str):
        raise SampleFault(
            f"{name} is no text", f"{label}: found {describe_field(sample, name)}, expected text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleFault(
            "half a character",
            f"{label}: found half a surrogate pair at character {error.start + 1}, expected whole"
            " characters",
        ) from None
    return value


def read_object_list(sample: RawSample, name: str) -> tuple[list[RawSample], str]:
    """Return the list of objects in a column, and its path, which an index goes behind.

    Raises SampleFault.
    """
    value, path = open_json_list(sample, name)
    if not isinstance(value, list):
        kind = describe_field(sample, name)
        if isinstance(value, str):
            kind = "text that is no JSON list" if value.strip() else "empty text"
        raise SampleFault(f"{name} is no list", f"{path}: found {kind}, expected a list of objects")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise SampleFault(
                f"{name} is no list of objects",
                f"{path}[{number}]: found {describe_kind(item)}, expected an object",
            )
    return value, path


def open_json_list(sample: RawSample, name: str) -> tuple[Any, str]:
    """Return what a column holds, and its path; a list as JSON text, as tables have it, is parsed.

    Raises SampleFault for one that is no JSON.
    """
    value = sample.get(name)
    path = get_path(sample, name)
    if is_json_list(value):
        return parse_column(value, name, path), f"{path}|fromjson|."
    return value, path


def is_json_list(value: Any) -> TypeGuard[str]:
    """Return True if a value is a text that is meant as a list in JSON."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def refuse_keys(
    holder: RawSample, read_keys: Sequence[str], where: str, owner: str, expected: str
) -> None:
    """Raise SampleFault for a key of an object that is not read and may change something.

    where: the object's path. owner: what has the key, in words, to count the fault by. expected:
    the line's end.
    """
    for name, value in holder.items():
        if name not in read_keys and not is_blank(value) and not is_idle(name, value):
            # Trained without it, the sample may say something else: never dropped in silence.
            raise SampleFault(
                f"key {name} of {owner}",
                f"{where}.{name}: found {describe_kind(value)}, {expected}",
            )


def parse_column(text: str, name: str, path: str, expected: str = "a list of objects") -> Any:
    """Return what the JSON text in a column holds. Raises SampleFault."""
    try:
        return parse_object(text)
    except ValueError as error:
        raise SampleFault(
            f"{name} is no JSON",
            f"{path}: found text that is no JSON ({error}), expected {expected} as JSON",
        ) from None
