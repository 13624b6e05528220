"""What a dataset sample is once it is read, whatever its format; and what a sample that cannot be
read raises.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from functools import lru_cache
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

from recipe_lib.config.registry import get_registered
from recipe_lib.errors import escape_invisible
from recipe_lib.reading import parse_json

Message = Mapping[
    str, Any
]  # `role`, `content`, and what a chat template may know besides (`tool_calls`, `name`, ...)


class MessagePlace(NamedTuple):
    """Where a message is in its sample, as jq has it: `.messages[1]`. text: where its content
    is.
    """

    path: str
    text: str


@dataclass(frozen=True)
class SamplePlaces:
    """Where the messages of a sample are, and its tools; messages: empty where nobody knows."""

    messages: Sequence[MessagePlace] = ()
    tools: str = ".tools"

    def at(self, number: int, field: str = "") -> str:
        """Where a message is, or one of its fields (`.train`), for the beginning of an error
        line.
        """
        if number < len(self.messages):
            return self.messages[number].path + field
        return f"message {number} (the first is 0)" + (f": {field}" if field else "")

    @property
    def are_texts(self) -> bool:
        """Return whether each message is the text of a column, which has the message's place
        too.
        """
        return bool(self.messages) and all(place.path == place.text for place in self.messages)

    def text(self, number: int) -> str:
        """Where the content of a message is."""
        return (
            self.messages[number].text
            if number < len(self.messages)
            else self.at(number, ".content")
        )


@dataclass(frozen=True)
class Conversation:
    """Messages of the roles system, user, assistant, tool. tools: descriptions that the template
    may show. places: in the sample, for error lines. variables: more that the template is given.
    asked: so many of the first messages are the prompt, which is trained with data.train_on=all
    alone.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)
    variables: Mapping[str, Any] = field(default_factory=dict)
    asked: int = 0

    def conversations(self) -> "list[Conversation]":
        """Return itself alone."""
        return [self]


@dataclass(frozen=True)
class Completion:
    """Text as it stands, without a template; the loss counts the completion and the end token after
    it.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text that is learned as a whole."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two ways to go on from the same messages; each ends with a message of the assistant. places:
    in the sample, of the prompt and the chosen answer, and of the prompt and the rejected one.
    """

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    places: tuple[SamplePlaces, SamplePlaces] = field(
        default=(SamplePlaces(), SamplePlaces()), compare=False
    )
    margin: float = 0.0  # by how much chosen is better; NaN: the sample has one that is no number
    no_prompt: "SampleFault | None" = field(
        default=None, compare=False
    )  # unless the texts are rendered already
    variables: Mapping[str, Any] = field(default_factory=dict)  # more that the template is given

    def conversations(self) -> list[Conversation]:
        """Return the prompt with the chosen answer, and with the rejected one."""
        return [
            Conversation(
                [*self.prompt, *answer], self.tools, places, self.variables, len(self.prompt)
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
        messages = [*self.prompt, *self.completion]
        return [Conversation(messages, self.tools, self.places, self.variables, len(self.prompt))]


@dataclass(frozen=True)
class Classified:
    """A text, or messages, and the name of their class."""

    content: Conversation | Document
    label: str


def list_conversations(sample: "Sample") -> list[Conversation]:
    """Return the messages of a sample; of a pair the prompt with each answer, of texts nothing."""
    content = sample.content if isinstance(sample, Classified) else sample
    return [] if isinstance(content, (Document, Completion)) else content.conversations()


Sample = Conversation | Completion | Document | Preference | LabeledAnswer | Classified


class SampleFault(Exception):  # noqa: N818  (an outcome of reading a sample, turned into a DataError or a count)
    """A sample that cannot be used. cause: a few words to count by; str(): what was found and
    expected.
    """

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = escape_invisible(cause)
        super().__init__(escape_invisible(detail))


def describe_kind(value: Any) -> str:
    """A value in words, for error lines."""
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
    """A short value as it is, for error lines: text in quotes, a number, true, false or null; else
    its kind.
    """
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:37]}...")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else describe_kind(value)


def prefix_place(place: str, detail: object) -> str:
    """A fault with its place before it; a path in the sample goes on from that of the sample
    (`rows.json:4: .[1]`).
    """
    text = str(detail)
    goes_on = (
        place.endswith("]") and text.startswith(".") and "/" not in text.partition(": ")[0]
    )  # no path of a file
    return place + text if goes_on else f"{place}: {text}"


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
    """Return an object of JSON. Raises SampleFault for a key that stands in it twice: the last one
    would win unsaid.
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
    """Return the value of a JSON text. Raises ValueError like `parse_json`, and SampleFault for a
    key twice.
    """
    return parse_json(text, make_object=_build_object)


@dataclass(frozen=True)
class Columns:
    """Says which columns a format reads; one that names none may hold anything."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    instead: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # what may stand in the place of a required one
    same: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # other names, put under the column's own

    @property
    def known(self) -> tuple[str, ...]:
        """Return all of them."""
        return (*self.required, *self.optional)

    def list_spellings(self, column: str, columns: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names under which a column of a row is taken, in this order. columns: as
        `data.columns`.
        """
        if column in columns:
            return (columns[column],)
        return (column, *self.same.get(column, ()), *self.instead.get(column, ()))


def find_columns(form: str) -> Columns:
    """Return the columns that a format reads, by its name."""
    return getattr(get_registered("data.format", form), "columns", Columns())


def find_column(column: str, sample: RawSample, others: Sequence[str]) -> str | None:
    """Return what a sample calls a column, of the column's name and others; None: there is none, or
    it is null.
    """
    names_by_lower = {
        str(name).lower(): str(name) for name, value in sample.items() if value is not None
    }
    return next(
        (names_by_lower[name] for name in (column, *others) if name in names_by_lower), None
    )


class RenamedSample(dict[str, Any]):
    """A sample under the names that formats know. own: by what names the file has them, as
    `data.columns`. section: of the config, in which `columns` are.
    """

    def __init__(
        self, sample: RawSample, own: Mapping[str, str], section: str, required: Sequence[str] = ()
    ) -> None:
        """Rename the columns; one that goes under another name keeps its own only where that is
        required.
        """
        file_names = set(own.values())
        moved_names = file_names - set(own) - set(required)
        super().__init__({name: value for name, value in sample.items() if name not in moved_names})
        self.update({name: sample[column] for name, column in own.items() if column in sample})
        self.own = own
        self.section = section
        # Columns of the file that have the name of another one here.
        self.hidden = {
            name: sample[name] for name in own if name in sample and name not in file_names
        }


def get_path(sample: RawSample, name: str) -> str:
    """Return where a column is in the sample: `.messages`, `.["my column"]`."""
    return format_path(sample.own.get(name, name) if isinstance(sample, RenamedSample) else name)


def format_path(name: str) -> str:
    """Return the path of a column by its name in the file; one that begins with a dot is a path
    already.
    """
    if name.startswith("."):
        return name
    return f".{name}" if _WORD.match(name) else f".[{json.dumps(name, ensure_ascii=False)}]"


def get_columns_section(section: str) -> str:
    """Return the section of the config that names the columns of a source of this one; validation
    has none of its own.
    """
    return "data" if section == "validation" else section


def format_overrides(section: str, own: Mapping[str, str]) -> list[str]:
    """Return what names columns on the command line: `data.columns.prompt=question`. section: that
    of the source.
    """
    if section == "data":
        return [f"data.columns.{name}={column}" for name, column in own.items()]
    return (
        [f"{section}.columns={{{', '.join(f'{name}: {column}' for name, column in own.items())}}}"]
        if own
        else []
    )


def describe_field(holder: RawSample, name: str) -> str:
    """Return the kind of a field, in words, for error lines; of one that is not there,
    `nothing`.
    """
    return describe_kind(holder[name]) if name in holder else "nothing"


def read_text_field(
    sample: RawSample, name: str, *, may_be_missing: bool = False, where: str = ""
) -> str:
    """Return the text in a column. Raises SampleFault: missing, no text, or not encodable as UTF-8.

    where: path of the object that has it, if that is not the sample.
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
    """Return the list of objects in a column, and its path, which an index goes behind. Raises
    SampleFault.
    """
    value, path = open_json_list(sample, name)
    if not isinstance(value, list):
        found = describe_field(sample, name)
        if isinstance(value, str):
            found = "text that is no JSON list" if value.strip() else "empty text"
        raise SampleFault(
            f"{name} is no list", f"{path}: found {found}, expected a list of objects"
        )
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
    """Return whether a value is a text that is meant as a list in JSON."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def refuse_keys(
    holder: RawSample, read_keys: Sequence[str], where: str, owner: str, expected: str
) -> None:
    """Raise SampleFault for a key of an object that is not read and holds something that may change
    something.

    where: the object's path. owner: what has the key, in words, to count the fault by. expected:
    the line's end.
    """
    for name, value in holder.items():
        if name not in read_keys and not says_nothing(value) and not is_idle(name, value):
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


# Tells what the columns of a row and the keys of a message are by their names alone, whatever the
# row's format.
#
# `recipe_lib.data.encoding` asks this table about those that a format does not read. Names are
# compared as `normalize_name` writes them. A name belongs to the idle ones only if it cannot mean
# what a conversation says.


# Other names under which tools write what a format reads: taken where the column itself is absent.
SAME_AS = {
    "system": ("system_prompt", "system_message", "system_instruction"),
    "tools": (
        "functions",
        "function",
        "function_list",
        "tool_list",
        "available_tools",
        "tool_definitions",
    ),
    "input": ("query",),
    "label": ("kto_tag",),
    "chosen": ("preferred_output",),
    "rejected": ("non_preferred_output",),
}

_MEDIA = frozenset(
    "image images img imgs image_path image_paths image_url image_urls image_file picture pictures"
    " photo pixel_values image_grid_thw video videos video_path video_paths video_url frames audio"
    " audios audio_path audio_paths audio_url speech sound sounds wav waveform multi_modal_data"
    " mm_data objects bbox bboxes box boxes".split()
)
_TOKENIZED = frozenset(
    "input_ids token_ids tokens labels attention_mask loss_mask completion_mask assistant_masks"
    " position_ids token_type_ids prompt_ids completion_ids prompt_input_ids chosen_input_ids"
    " rejected_input_ids special_tokens_mask".split()
)
_WEIGHTS = frozenset("weight weights sample_weight loss_weight example_weight loss_scale".split())
_JUDGED = frozenset(
    "label kto_tag is_correct correct is_chosen is_preferred preferred is_good good is_desirable"
    " desirable accepted acceptable approved passed is_passed valid is_valid verified is_verified"
    " success is_success successful solved is_solved resolved train training trainable loss use"
    " keep include".split()
)
UNWANTED = frozenset(
    "rejected rejected_response response_rejected rejected_answer non_preferred_output".split()
)
# A text in which a whole row stands, as another template has written it.
RENDERED = frozenset(
    "text full_text formatted formatted_text rendered prompt_text chat_text conversation_text"
    " chatml templated".split()
)

_IDLE = frozenset(
    "id ids idx index uid uuid guid sha sha1 sha256 md5 hash key row_number line_number source"
    " sources src origin dataset datasets subset split config fold shard batch batch_number file"
    " filename file_name path filepath repo category categories subcategory subcategories"
    " class_name task tasks subtask topic topics subtopic subject domain domains field area genre"
    " theme keyword keywords tag tags type kind style format lang langs language languages"
    " language_code locale country region difficulty level grade complexity quality score scores"
    " rating ratings rank ranks reward rewards likes upvotes downvotes votes views view_count model"
    " models model_name generator generated_by teacher engine provider annotator annotators"
    " annotation_type author authors user username contributor license licence copyright url urls"
    " link links uri href doi avatarurl date datetime time timestamp timestamps created updated"
    " modified created_utc year version revision status stage state tree_state turn turns n_turns"
    " length len size count token_count word_count char_count temperature top_p max_tokens seed"
    " skip_prompt_formatting custom_instruction deleted synthetic toxic redacted nsfw flagged title"
    " order usage helpfulness correctness coherence verbosity harmlessness honesty truthfulness"
    " safety relevance fluency accuracy instruction_following instruction_adherence confidence"
    " agreement perplexity seconds duration cost epoch step iteration votes_up votes_down"
    " dataset_name task_name source_name finish_reason finish_reasons stop_reason object label_text"
    " label_name dump crawl pile_set_name repo_name hexsha added seed_data audience".split()
)
_IDLE_ENDS = tuple(
    "_id _ids _idx _index _uuid _hash _url _urls _uri _link _score _scores _rating _ratings _rank"
    " _model _source _category _type _tag _tags _count _length _len _tokens _date _at _time"
    " _timestamp _utc _lang _language _license _version _split _subset _difficulty _level _topic"
    " _domain _prob _logprob _path".split()
)
_IDLE_STARTS = tuple(
    "num_ n_ score_ rating_ index_level_ unnamed_ meta_ metadata_ token_count_ created_ updated_".split()
)
_ADDRESSES = ("url", "urls", "link", "links", "license", "licence", "copyright", "path", "filepath")
# Whatever lists and objects they hold: notes of those who made the rows.
_NOTES = frozenset(
    "meta metadata extra_info extra_fields annotations detoxify emojis labels moderation"
    " openai_moderation detoxify_moderation logprobs top_logprobs usage stats statistics provenance"
    " lineage quality_signals cache_control header".split()
)

MESSAGE_READ = frozenset(("role", "content", "train", "tool_calls"))
_MESSAGE_IDLE = frozenset(
    "name turn_identifier language country state object status end_turn is_error".split()
)
_WHY_NOT_MEDIA = "images, sound or film, which no recipe reads"
_WHY_NOT_DETAIL = "which letters of a message are trained, which is said of whole messages alone"
_MESSAGE_REFUSED = {
    "refusal": "the model's refusal, which a chat template does not write",
    "train_detail": _WHY_NOT_DETAIL,
    "training_detail": _WHY_NOT_DETAIL,
}
# Torchtune's fields of a message, with the value that says what is done in any case.
_MESSAGE_USUAL = {"eot": True, "ipython": False, "prefix": False}

_MOST_LABEL_LETTERS = 200  # what is longer may be what a conversation says, whatever its name
_REQUEST = ("parallel_tool_calls", "tool_choice")  # settings of a request, which no template shows


@lru_cache(4096)  # rows repeat the same few names
def normalize_name(name: str) -> str:
    """Return a name in small letters with one underscore in the place of all that is no letter and
    no digit.
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def says_nothing(value: Any) -> bool:
    """Return whether a value is as good as absent: null, blank text, an object of such, or a list
    of nothing or nulls.
    """
    if isinstance(value, str):
        return not value or value.isspace()
    if isinstance(value, dict):
        return all(map(says_nothing, value.values()))
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None


def is_label(value: Any) -> bool:
    """Return whether a value is a number, a date or a short text in one line, or a list of such."""
    if isinstance(value, str):
        return len(value) <= _MOST_LABEL_LETTERS and "\n" not in value.strip()
    if isinstance(value, (list, tuple)):
        return all(map(is_label, value))
    return value is None or isinstance(value, (Number, date, time))


def is_idle(name: str, value: Any) -> bool:
    """Return whether a column or a key is known to change nothing by its name, and holds what such
    a one does.
    """
    word = normalize_name(name)
    if word in _NOTES or word in _REQUEST:
        return not isinstance(value, str) or is_label(value) or value.lstrip()[:1] in ("{", "[")
    if word in _ADDRESSES and isinstance(value, str):
        return "\n" not in value.strip()
    is_named = word in _IDLE or word.endswith(_IDLE_ENDS) or word.startswith(_IDLE_STARTS)
    return is_named and is_label(value)


def is_idle_key(name: str, value: Any) -> bool:
    """Return whether a key of a message is known to change nothing where the chat template does not
    read it.
    """
    return (
        is_idle(name, value)
        or (name in _MESSAGE_IDLE and is_label(value))
        or _MESSAGE_USUAL.get(name) is value
    )


def why_not_key(name: str) -> str:
    """Return what a key of a message holds, where that is known and not read; empty: not known."""
    if normalize_name(name) in _MEDIA:
        return _WHY_NOT_MEDIA
    return _MESSAGE_REFUSED.get(name, "")


def why_not_column(name: str, value: Any, is_text: bool) -> str:
    """Return what a column says of its row, where that is known and not read; empty: it says
    nothing of the kind.

    is_text: the rows are documents, whose label may be a number that judges nothing.
    """
    word = normalize_name(name)
    if word in _MEDIA:
        return _WHY_NOT_MEDIA
    if word in _TOKENIZED and isinstance(value, list):
        return "tokens that are made already, and rows are read as text"
    if _is_weight(word) and not _is_one(value):
        return "a weight of the row, which data.sources has for whole sources alone"
    if word in _JUDGED and _judge(word, value, is_text) is False:
        return (
            "that the row is not wanted, and it would be trained; leave such rows out, or train"
            " with dpo.loss=kto"
        )
    return ""


def is_idle_beside(name: str, value: Any) -> bool:
    """Return whether a key beside a file's list of samples is known to change nothing."""
    return not why_not_column(name, value, is_text=False) and is_idle(name, value)


def says_wanted(name: str, value: Any) -> bool:
    """Return whether a column says of its row no more than that it is wanted, or its class, or that
    it counts once.
    """
    word = normalize_name(name)
    if _is_weight(word):
        return _is_one(value)
    return (
        word in _JUDGED
        and (_judge(word, value, is_text=False) is not None or word == "label")
        and is_label(value)
    )


def _is_weight(word: str) -> bool:
    """Return whether a column of this name says how much its row counts."""
    return word in _WEIGHTS or word.endswith(("_weight", "_weights"))


def _is_one(value: Any) -> bool:
    """Return whether a weight is 1, as a number or as the text of a table's cell."""
    return not isinstance(value, bool) and str(value).strip() in ("1", "1.0")


def _judge(word: str, value: Any, is_text: bool) -> bool | None:
    """Return what a column of this name says: the row is wanted, or not; None: neither."""
    is_label_column = word in ("label", *SAME_AS["label"])
    is_switch = isinstance(value, bool) or (
        isinstance(value, str) and value.strip().lower() in ("true", "false")
    )
    return read_truth(value) if is_switch or (is_label_column and not is_text) else None


_TRUTHS = {
    "true": True,
    "false": False,
    "1": True,
    "0": False,
}  # as JSON has them, and as tables' text


def read_truth(value: Any) -> bool | None:
    """Return true or false as JSON and tables write it; None: neither."""
    return _TRUTHS.get(str(value).strip().lower()) if isinstance(value, (bool, int, str)) else None
