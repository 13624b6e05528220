"""Define the kinds of samples, the fault of one that cannot be used, and readers of a row's fields.

A row is what a file holds (`RawSample`), with columns by name; a format of `data.formats` makes a
Conversation, Completion, Document, Preference, LabeledAnswer or Classified of it, by the functions
below. A SampleFault names its place in the row as a jq path (`.messages[1].content`), with the
names that the file has. `data.columns` of the config renames columns.
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

# `role`, `content`, and further keys that a chat template may read (`tool_calls`, `name`, ...)
Message = Mapping[str, Any]


class MessagePlace(NamedTuple):
    """The place of a message in its row, as jq paths."""

    path: str  # of the message: `.messages[1]`
    content: str  # of its content: `.messages[1].content`


@dataclass(frozen=True)
class SamplePlaces:
    """Where a sample's messages and tools are in its row, for error lines."""

    messages: Sequence[MessagePlace] = ()  # one for each message; empty: not known
    tools: str = ".tools"  # jq path of the tools

    def locate_message(self, message_index: int, field: str = "") -> str:
        """Return where a message is, or one of its fields (`.train`): the start of an error line.

        field: jq path inside of it.
        """
        if message_index < len(self.messages):
            return self.messages[message_index].path + field
        return f"message {message_index} (the first is 0)" + (f": {field}" if field else "")

    @property
    def are_texts(self) -> bool:
        """Return True if each message is the text of a column of its own."""
        return bool(self.messages) and all(place.path == place.content for place in self.messages)

    def locate_content(self, message_index: int) -> str:
        return (
            self.messages[message_index].content
            if message_index < len(self.messages)
            else self.locate_message(message_index, ".content")
        )


@dataclass(frozen=True)
class Conversation:
    """Messages of the roles system, user, assistant and tool."""

    messages: Sequence[Message]  # in order
    tools: Sequence[Mapping[str, Any]] | None = None  # descriptions that the template may show
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)  # for error lines
    # Variables of the chat template, by name, such as `enable_thinking`
    variables: Mapping[str, Any] = field(default_factory=dict)
    # Number of leading messages that are the prompt; 0: not known. Only data.train_on=all or a
    # message's own key `train` trains these
    asked: int = 0

    def build_conversations(self) -> "list[Conversation]":
        """Return a list of the conversation alone: other samples have several."""
        return [self]


@dataclass(frozen=True)
class Completion:
    """Text as it stands, without a template; trained are the completion and the EOS after it."""

    prompt: str  # the completion follows it without a space
    completion: str


@dataclass(frozen=True)
class Document:
    """Text that is trained as a whole, cut into sequences."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two answers to the same prompt; each ends with a message of the assistant."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]  # the better answer, without the prompt
    rejected: Sequence[Message]  # the worse one
    tools: Sequence[Mapping[str, Any]] | None = None  # descriptions that the template may show
    # Places of the messages of the prompt with the chosen answer, and with the rejected one
    places: tuple[SamplePlaces, SamplePlaces] = field(
        default=(SamplePlaces(), SamplePlaces()), compare=False
    )
    # By how much the chosen answer is better; NaN: the sample has a margin that is no number
    margin: float = 0.0
    # Raised for a pair without a prompt, unless its texts turn out to be rendered already
    no_prompt: "SampleFault | None" = field(default=None, compare=False)
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template

    def build_conversations(self) -> list[Conversation]:
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
    """A desirable answer to a prompt (label True), or an undesirable one, as KTO trains them."""

    prompt: Sequence[Message]
    completion: Sequence[Message]  # the answer, without the prompt
    label: bool  # whether the answer is desirable
    tools: Sequence[Mapping[str, Any]] | None = None  # descriptions that the template may show
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)  # for error lines
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template

    def build_conversations(self) -> list[Conversation]:
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

    content: Conversation | Document  # read as a whole and scored
    label: str  # name of the class


def list_conversations(sample: "Sample") -> list[Conversation]:
    """Return a sample's conversations: of a pair the prompt with each answer, of texts none."""
    content = sample.content if isinstance(sample, Classified) else sample
    return [] if isinstance(content, (Document, Completion)) else content.build_conversations()


Sample = Conversation | Completion | Document | Preference | LabeledAnswer | Classified


# The roles that a prompt's messages may have if it was made of columns of texts
_PROMPT_ROLES: tuple[list[str], ...] = ([], ["user"], ["system"], ["system", "user"])


@dataclass(frozen=True)
class TextRow:
    """A row whose prompt and answers are texts of columns, and not messages.

    Such texts may be renderings of a chat template already: they spell out its special tokens.
    """

    prompt: str  # "" if there is none
    answers: Sequence[str]  # one answer; or (chosen, rejected); or none
    # Name of a column with a value that a rendering would contain, such as `tools`; "": none
    beside: str


def read_text_row(sample: Conversation | Preference | LabeledAnswer) -> TextRow | None:
    """Return the texts of a sample's row; None if the row has messages.

    A Conversation counts as a prompt without answers: it is read as a whole, for classification.
    """
    chats = sample.build_conversations()
    first = chats[0]  # of a pair, the one with the chosen answer
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


# It has no Error in its name: it is an outcome of reading a sample, and is counted or becomes a
# DataError.
class SampleFault(Exception):  # noqa: N818
    """The reason why a sample cannot be used."""

    def __init__(self, cause: str, detail: str) -> None:
        """Take a cause, a few words by which faults are counted, and the text of the error line."""
        self.cause = escape_invisible(cause)
        super().__init__(escape_invisible(detail))


def describe_kind(value: Any) -> str:
    """Return the kind of a value in words ("a list"), for error lines."""
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
    """Return a value for error lines: text in quotes and cut, a number as it is, else its kind."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:37]}...")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else describe_kind(value)


def prefix_place(place: str, detail: object) -> str:
    """Return the text of a fault with the sample's place before it.

    place: file, and line or jq path. detail: the fault. If both are jq paths they are joined:
    `rows.json:4: .[1]` and `.text` give `rows.json:4: .[1].text`.
    """
    text = str(detail)
    is_path = text.startswith(".") and "/" not in text.partition(": ")[0]  # no relative file path
    return place + text if is_path and place.endswith("]") else f"{place}: {text}"


RawSample = Mapping[str, Any]  # a row of a file: name of a column -> value

_WORD = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)  # a name that a jq path has without quotes


# Column of a format -> other common names for it. An error suggests to name such a column
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
    """Return a JSON object of its (key, value) pairs. Raises SampleFault for a repeated key.

    Python's parser would silently take the last one.
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

    Raises ValueError like `parse_json`, and SampleFault for a repeated key.
    """
    return parse_json(text, make_object=_build_object)


@dataclass(frozen=True)
class Columns:
    """The columns that a format reads; one without any, such as a plugin's, accepts all rows."""

    required: tuple[str, ...] = ()  # each is in a row, or one of its `instead` or `same`
    optional: tuple[str, ...] = ()
    # Required column -> other columns that the format reads in its place
    instead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Column -> other names for it, which are renamed to it
    same: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    def list_spellings(self, column: str, columns: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names under which a column is looked for in a row, in this order.

        columns: `data.columns`, from a column to its name in the file.
        """
        if column in columns:
            return (columns[column],)
        return (column, *self.same.get(column, ()), *self.instead.get(column, ()))


def find_columns(form: str) -> Columns:
    """Return the columns that a format reads. form: its name in `data.format`."""
    return getattr(get_registered("data.format", form), "columns", Columns())


def find_column(column: str, sample: RawSample, aliases: Sequence[str]) -> str | None:
    """Return the sample's name of a column, which is the column's or one of its aliases.

    The sample's names are compared in lower case. None: it has no such column, or null in it.
    """
    names_by_lower = {
        str(name).lower(): str(name) for name, value in sample.items() if value is not None
    }
    return next(
        (names_by_lower[name] for name in (column, *aliases) if name in names_by_lower), None
    )


class RenamedSample(dict[str, Any]):
    """A sample whose columns are renamed to the names that formats know."""

    def __init__(
        self,
        sample: RawSample,
        columns: Mapping[str, str],
        section: str,
        required: Sequence[str] = (),
    ) -> None:
        """Rename the columns.

        columns: `data.columns`, from a format's name to the file's. section: of the config, in
        which they are, such as `data`. required: the format's required columns; a column of the
        file that has one of these names also stays under it.
        """
        file_names = set(columns.values())
        moved_names = file_names - set(columns) - set(required)
        super().__init__({name: value for name, value in sample.items() if name not in moved_names})
        self.update({name: sample[column] for name, column in columns.items() if column in sample})
        self.columns = columns  # format's name of a column -> the file's
        self.section = section
        # Name -> value of the file's columns whose name is now that of another column
        self.hidden = {
            name: sample[name] for name in columns if name in sample and name not in file_names
        }


def get_path(sample: RawSample, name: str) -> str:
    """Return a column's path in the file's row, as jq writes it: `.messages`, `.["my column"]`."""
    return format_path(
        sample.columns.get(name, name) if isinstance(sample, RenamedSample) else name
    )


def format_path(name: str) -> str:
    """Return the path of a column by its name in the file; a name with a leading dot is a path."""
    if name.startswith("."):
        return name
    return f".{name}" if _WORD.match(name) else f".[{json.dumps(name, ensure_ascii=False)}]"


def get_columns_section(section: str) -> str:
    """Return the config's section whose key `columns` applies to a source of this section.

    section: `data`, `data.sources[0]` etc., or `validation`, which has no columns of its own: those
    of `data` apply.
    """
    return "data" if section == "validation" else section


def format_overrides(section: str, columns: Mapping[str, str]) -> list[str]:
    """Return command-line overrides that name columns: `data.columns.prompt=question`.

    section: of the source. columns: from a format's name to the file's.
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

    may_be_missing: return "" for a missing column or null. where: path of the object with the
    column, if that is not the sample. Raises SampleFault if it is missing, no text, or not
    encodable as UTF-8.
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
    """Return (list of objects in a column, its path, to which `[index]` can be appended).

    Raises SampleFault for anything but a list of objects, or a JSON text of one.
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
    """Return (value of a column, its path); a text that begins like a JSON list is parsed.

    Tables hold lists as text. The path is jq's, for text `.column|fromjson|.`. Raises SampleFault
    if such a text is no JSON.
    """
    value = sample.get(name)
    path = get_path(sample, name)
    if is_json_list(value):
        return parse_column(value, name, path), f"{path}|fromjson|."
    return value, path


def is_json_list(value: Any) -> TypeGuard[str]:
    """Return True if a value is a text that begins like a list in JSON."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def refuse_keys(
    holder: RawSample, read_keys: Sequence[str], where: str, owner: str, expected: str
) -> None:
    """Raise SampleFault for a key of an object that is not read and may change its meaning.

    where: the object's path. owner: the object in words, to count the fault by. expected: the end
    of the error line. A blank value, or a name known to change nothing (`id`, `source`), passes.
    """
    for name, value in holder.items():
        if name not in read_keys and not is_blank(value) and not is_idle(name, value):
            # Without the key the sample may mean something else, so it is not dropped silently.
            raise SampleFault(
                f"key {name} of {owner}",
                f"{where}.{name}: found {describe_kind(value)}, {expected}",
            )


def parse_column(text: str, name: str, path: str, expected: str = "a list of objects") -> Any:
    """Return the value of the JSON text in a column.

    name, path: of the column. expected: what the text should be, for the error line. Raises
    SampleFault if it is no JSON, or repeats a key.
    """
    try:
        return parse_object(text)
    except ValueError as error:
        raise SampleFault(
            f"{name} is no JSON",
            f"{path}: found text that is no JSON ({error}), expected {expected} as JSON",
        ) from None
