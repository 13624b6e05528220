"""What a dataset sample is once it is read, whatever its format; and what a sample that cannot be read raises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from numbers import Number
from typing import Any, NamedTuple, Protocol

from recipe_lib.errors import DataError, visible

Message = Mapping[str, Any]  # `role`, `content`, and what a chat template may know besides (`tool_calls`, `name`, ...)


class MessagePlace(NamedTuple):
    """Where a message is in its sample, as jq has it: `.messages[1]`. text: where its content is."""

    path: str
    text: str


@dataclass(frozen=True)
class SamplePlaces:
    """Where the messages of a sample are, and its tools; messages: empty where nobody knows."""

    messages: Sequence[MessagePlace] = ()
    tools: str = ".tools"

    def at(self, number: int, field: str = "") -> str:
        """Where a message is, or one of its fields (`.train`), for the beginning of an error line."""
        if number < len(self.messages):
            return self.messages[number].path + field
        return f"message {number} (the first is 0)" + (f": {field}" if field else "")

    @property
    def are_texts(self) -> bool:
        """Return whether each message is the text of a column, which has the message's place too."""
        return bool(self.messages) and all(place.path == place.text for place in self.messages)

    def text(self, number: int) -> str:
        """Where the content of a message is."""
        return self.messages[number].text if number < len(self.messages) else self.at(number, ".content")


@dataclass(frozen=True)
class Conversation:
    """Messages of the roles system, user, assistant, tool. tools: descriptions that the template may show. places: in
    the sample, for error lines. variables: more that the template is given. asked: so many of the first messages are
    the prompt, which is trained with data.train_on=all alone."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)
    variables: Mapping[str, Any] = field(default_factory=dict)
    asked: int = 0


@dataclass(frozen=True)
class Completion:
    """Text as it stands, without a template; the loss counts the completion and the end token after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Text that is learned as a whole."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two ways to go on from the same messages; each ends with a message of the assistant. places: in the sample, of
    the prompt and the chosen answer, and of the prompt and the rejected one."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    places: tuple[SamplePlaces, SamplePlaces] = field(default=(SamplePlaces(), SamplePlaces()), compare=False)
    margin: float = 0.0  # by how much chosen is better; NaN: the sample has one that is no number
    no_prompt: "SampleFault | None" = field(default=None, compare=False)  # unless the texts are rendered already
    variables: Mapping[str, Any] = field(default_factory=dict)  # more that the template is given


@dataclass(frozen=True)
class LabeledAnswer:
    """An answer that is wanted (label true) or not, after the messages of the prompt."""

    prompt: Sequence[Message]
    completion: Sequence[Message]
    label: bool
    tools: Sequence[Mapping[str, Any]] | None = None
    places: SamplePlaces = field(default=SamplePlaces(), compare=False)
    variables: Mapping[str, Any] = field(default_factory=dict)  # more that the template is given


@dataclass(frozen=True)
class Classified:
    """A text, or messages, and the name of their class."""

    content: Conversation | Document
    label: str


Sample = Conversation | Completion | Document | Preference | LabeledAnswer | Classified


class SampleFault(Exception):  # noqa: N818  (an outcome of reading a sample, turned into a DataError or a count)
    """A sample that cannot be used. cause: a few words to count by; str(): what was found and expected."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = visible(cause)
        super().__init__(visible(detail))


def kind_of(value: Any) -> str:
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
    return next((words for kind, words in kinds if isinstance(value, kind)), "a value of another kind")


def shown(value: Any) -> str:
    """A short value as it is, for error lines: text in quotes, a number, true, false or null; else its kind."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:37]}...")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else kind_of(value)


def located(place: str, detail: object) -> str:
    """A fault with its place before it; a path in the sample goes on from that of the sample (`rows.json:4: .[1]`)."""
    text = str(detail)
    goes_on = place.endswith("]") and text.startswith(".") and "/" not in text.partition(": ")[0]  # no path of a file
    return place + text if goes_on else f"{place}: {text}"


# One rendering of a conversation: its first messages only, whether a prompt for the next answer follows, and what to
# write in place of the contents of some messages.
Wanted = tuple[int, bool, tuple[tuple[int, str], ...]]


class AnswerEnd(Protocol):
    """closing: what the template writes after the end of an answer that comes last, and no model is asked for.
    next_turn: the special token of the next turn that ends an answer, where the template ends it with nothing."""

    @property
    def closing(self) -> str:
        """See above."""

    @property
    def next_turn(self) -> str:
        """See above."""


class TextTokenizer(Protocol):
    """What this folder asks of a tokenizer; `recipe_lib.tokenizers.Tokenizer` is one and says more."""

    place: str
    vocab_size: int
    ordinary_size: int
    bos_id: int | None
    eos_id: int | None
    add_bos_by_default: bool

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, if there is one."""

    @property
    def dated_template(self) -> str | None:
        """The same, with the date of training where it asks for today's."""

    @property
    def chat_template_place(self) -> str:
        """The file it came from, for error lines."""

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens as text."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def turn_end(self) -> "AnswerEnd":
        """How the chat template ends an answer."""

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Ids of a text."""

    def encode_pieces(
        self, pieces: Sequence[str], *, allow_special: bool = True, literal: str | None = None
    ) -> list[list[int]]:
        """Ids of each piece of a text; special tokens that hold the letter `literal` are text without it."""

    def token_bytes(self, token: int) -> bytes:
        """What an id stands for."""

    def render_chats(
        self,
        messages: Sequence[Message],
        wanted: Sequence[Wanted],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Renderings of one conversation by the chat template, all in one go; where it objects, what it said. options:
        `marks`, two letters to write around what `{% generation %}` holds; `variables`, more that the template sees.
        Raises DataError: the template cannot be run at all."""
