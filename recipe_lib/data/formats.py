"""How a sample of a dataset is read, by the name in `data.format`.

A format is a function from a sample (a dict, its columns renamed by `data.columns`) to a Conversation, a Completion, a
Document, a Preference, a LabeledAnswer or a Classified text. A plugin registers its own with
`@register("data.format", "name")`, and says with `@columns(...)` which columns it reads; it raises SampleFault for a
sample that it cannot use.
"""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from recipe_lib.config.registry import register
from recipe_lib.data.messages import (
    Turns,
    check_answer,
    check_order,
    conversation,
    place_of_turn,
    read_message,
    read_turn,
    read_turns,
    text_turn,
)
from recipe_lib.data.sample_columns import (
    OTHER_NAMES,
    RawSample,
    Renamed,
    called,
    found_in,
    list_of,
    overrides,
    path_of,
    text_of,
)
from recipe_lib.data.samples import (
    Classified,
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    MessagePlace,
    Preference,
    Sample,
    SampleFault,
    SamplePlaces,
    shown,
)
from recipe_lib.data.tool_calls import read_tools

__all__ = ["Reader", "RawSample", "columns", "conversation", "text_of"]

Reader = Callable[[RawSample], Sample]


def columns(*required: str, optional: Sequence[str] = ()) -> Callable[[Reader], Reader]:
    """Decorator: the columns that a format reads."""

    def add(reader: Reader) -> Reader:
        reader.required, reader.optional = required, tuple(optional)  # type: ignore[attr-defined]
        return reader

    return add


@register("data.format", "alpaca")
@columns("instruction", "output", optional=("input", "system"))
def read_alpaca(sample: RawSample) -> Conversation:
    """`instruction`, `output`, and perhaps `input` (put under the instruction) and `system`."""
    question = text_of(sample, "instruction")
    more = text_of(sample, "input", may_be_missing=True)
    where = path_of(sample, "instruction")
    if not (question + more).strip():
        raise SampleFault("empty instruction", f"{where}: found an empty instruction, expected text")
    asked = {"role": "user", "content": f"{question}\n\n{more}" if more else question}
    turns = _system(sample) + Turns([asked], [MessagePlace(where, where)]) + text_turn(sample, "output", "assistant")
    return conversation(turns.messages, None, SamplePlaces(turns.places))


@register("data.format", "sharegpt")
@columns("conversations", optional=("system", "tools"))
def read_sharegpt(sample: RawSample) -> Conversation:
    """`conversations`: a list of {from, value} or {role, content}; and perhaps `system`, and `tools` (may be JSON)."""
    turns = _system(sample) + read_turns(sample, "conversations")
    tools, path = read_tools(sample)
    return conversation(turns.messages, tools, SamplePlaces(turns.places, path))


@register("data.format", "messages")
@columns("messages", optional=("tools",))
def read_messages(sample: RawSample) -> Conversation:
    """`messages`: a list of {role, content} as chat APIs have it; and perhaps `tools` for the chat template."""
    turns, path = list_of(sample, "messages")
    messages = [read_message(turn, f"{path}[{number}]") for number, turn in enumerate(turns)]
    places = [MessagePlace(f"{path}[{number}]", f"{path}[{number}].content") for number in range(len(turns))]
    tools, path = read_tools(sample)
    return conversation(messages, tools, SamplePlaces(places, path))


@register("data.format", "prompt_completion")
@columns("prompt", "completion")
def read_prompt_completion(sample: RawSample) -> Completion:
    """`prompt` and `completion`, put together as they stand: no template, no space between them."""
    completion = text_of(sample, "completion")
    if not completion:
        where = path_of(sample, "completion")
        raise SampleFault("empty answer", f"{where}: found an empty completion, expected text to train on")
    return Completion(text_of(sample, "prompt"), completion)


@register("data.format", "text")
@columns("text")
def read_text(sample: RawSample) -> Document:
    """`text`, or a whole .txt file."""
    text = text_of(sample, "text")
    if not text:
        where = path_of(sample, "text")
        raise SampleFault("empty text", f"{where}: found an empty text, expected something to train on")
    return Document(text)


@register("data.format", "preference")
@columns("chosen", "rejected", optional=("prompt", "conversations", "system", "tools", "margin"))
def read_preference(sample: RawSample) -> Preference:
    """`chosen` and `rejected`: two answers (text or a message each), or two conversations that begin alike.

    What comes before them is `prompt` (text, or messages) or `conversations`; where the conversations hold it already,
    neither is needed. The prompt is all that both have in common, up to the answer in which they part. `margin`: a
    number, by how much the chosen one is better.
    """
    if sample.get("prompt") is not None and sample.get("conversations") is not None:
        raise SampleFault("two prompts", "found prompt and conversations, expected one of the two")
    name = "prompt" if sample.get("prompt") is not None else "conversations"
    before = _system(sample)
    if sample.get(name) is not None:
        before += _turns(sample, name, "user")
    chosen, rejected = (_continued(before, _turns(sample, answer, "assistant")) for answer in ("chosen", "rejected"))
    if chosen.messages == rejected.messages:
        raise SampleFault("equal answers", "found chosen equal to rejected, expected two different answers")
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    no_prompt = _why_no_prompt(sample, chosen, rejected, shared)
    both_texts = isinstance(sample["chosen"], str) and isinstance(sample["rejected"], str)
    if no_prompt and not (both_texts and sample["chosen"][:1] == sample["rejected"][:1]):
        raise no_prompt  # of texts that begin alike the encoder raises it: it knows what a rendered prompt looks like
    tools, path = read_tools(sample)
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        where, messages, places = path_of(sample, name), turns.messages, SamplePlaces(turns.places, path)
        last = messages[-1]["role"] if len(messages) > shared else "nothing"
        if last != "assistant":
            raise SampleFault(
                f"{name} without an answer", f"{where}: found {last} at its end, expected an answer of its own"
            )
        if messages[shared]["role"] != "assistant":
            raise SampleFault(
                "other questions",
                f"{places.at(shared)}: found a message of the {messages[shared]['role']} that differs between chosen "
                "and rejected, expected them to part in an answer",
            )
        check_order(messages, places)
        for number in range(shared, len(messages)):
            if messages[number]["role"] == "assistant":
                check_answer(messages[number], places.text(number))
    both = SamplePlaces(chosen.places, path), SamplePlaces(rejected.places, path)
    answers = chosen.messages[shared:], rejected.messages[shared:]
    return Preference(chosen.messages[:shared], *answers, tools, both, _margin(sample.get("margin")), no_prompt)


def _margin(value: object) -> float:
    """0 where there is none, NaN for what is no number."""
    if value is None:
        return 0.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if is_number or isinstance(value, str) else math.nan  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        return math.nan


@register("data.format", "kto")
@columns("prompt", "completion", "label", optional=("system", "tools"))
def read_kto(sample: RawSample) -> LabeledAnswer:
    """`prompt` (text, or messages), `completion` (text, a message, or several) and `label`: whether the completion is
    wanted (true) or not (false)."""
    label = _truth(sample)
    before = _system(sample) + _turns(sample, "prompt", "user")
    whole = _continued(before, _turns(sample, "completion", "assistant"))
    tools, path = read_tools(sample)
    places, shared = SamplePlaces(whole.places, path), len(before.messages)
    if not any(message["role"] != "system" for message in whole.messages[:shared]):
        where = path_of(sample, "prompt")
        raise SampleFault("no prompt", f"{where}: found no message of the user, expected what is answered")
    last = whole.messages[-1]["role"] if len(whole.messages) > shared else "nothing"
    if last != "assistant":
        where = path_of(sample, "completion")
        raise SampleFault("no answer", f"{where}: found {last} at its end, expected an answer")
    check_order(whole.messages, places)
    for number in range(shared, len(whole.messages)):
        if whole.messages[number]["role"] == "assistant":
            check_answer(whole.messages[number], places.text(number))
    return LabeledAnswer(whole.messages[:shared], whole.messages[shared:], label, tools, places)


_TRUTHS = {"true": True, "false": False, "1": True, "0": False}  # as JSON has them, and as tables' text


def _truth(sample: RawSample) -> bool:
    value = sample.get("label")
    found = _TRUTHS.get(str(value).strip().lower()) if isinstance(value, (bool, int, str)) else None
    if found is None:
        where = path_of(sample, "label")
        raise SampleFault("label is not true or false", f"{where}: found {shown(value)}, expected true or false")
    return found


@register("data.format", "classification")
@columns("label", optional=("text", "prompt", "messages", "system", "tools"))
def read_classification(sample: RawSample) -> Classified:
    """`label`, a whole number from 0 on or the class' name, and what has it: `text` as it stands, `prompt` (text of the
    user) or `messages`."""
    given = [name for name in ("text", "prompt", "messages") if sample.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise SampleFault("no one text", f"found {found}, expected one of text, prompt and messages")
    label = _class(sample)
    if given == ["text"]:
        text = text_of(sample, "text")
        if not text.strip():
            raise SampleFault(
                "empty text", f"{path_of(sample, 'text')}: found an empty text, expected one with a class"
            )
        return Classified(Document(text), label)
    turns = _system(sample) + _turns(sample, given[0], "user")
    tools, path = read_tools(sample)
    places = SamplePlaces(turns.places, path)
    check_order(turns.messages, places)
    return Classified(Conversation(turns.messages, tools, places), label)


def _class(sample: RawSample) -> str:
    """The name of a class; that of a number is its digits."""
    value = sample.get("label")
    text = str(value).strip() if isinstance(value, (bool, int, str)) else ""
    if not text or (isinstance(value, int) and value < 0):
        where = path_of(sample, "label")
        raise SampleFault("no class", f"{where}: found {shown(value)}, expected text or a whole number from 0 on")
    return text.lower() if isinstance(value, bool) else text


def _why_no_prompt(sample: RawSample, chosen: Turns, rejected: Turns, shared: int) -> SampleFault | None:
    """What is wrong with two answers that follow nothing, or a message of the system alone; None: they do not."""
    both = [turns.messages[shared:] for turns in (chosen, rejected)]
    asked = any(message["role"] != "system" for message in chosen.messages[:shared])
    if asked or not all(messages and messages[0]["role"] == "assistant" for messages in both):
        return None
    own = called("prompt", sample, OTHER_NAMES["prompt"])
    section = sample.section if isinstance(sample, Renamed) else "data"
    remedy = f"; if {own} is the prompt, set {overrides(section, {'prompt': own})[0]}" if own else ""
    return SampleFault(
        "no prompt",
        f"found answers without a prompt, expected prompt, or conversations that begin alike{remedy}",
    )


def _continued(before: Turns, answer: Turns) -> Turns:
    """The whole conversation: the answer holds what comes before it already, or goes on from it."""
    first, said = before.messages, answer.messages
    held = said[: len(first)] == first and len(said) > len(first)
    # A dataset may repeat the question of its conversations in a separate column.
    repeated = len(first) == 1 and first[0]["role"] == "user" and first[0] in said
    return answer if held or repeated else before + answer


def _turns(sample: RawSample, name: str, role: str) -> Turns:
    """A column as messages: a list of them, one of them, or a text of the given role."""
    value = sample.get(name)
    if isinstance(value, list):
        return read_turns(sample, name)
    path = path_of(sample, name)
    if isinstance(value, dict):
        return Turns([read_turn(value, path)], [place_of_turn(value, path)])
    if not isinstance(value, str):
        found = found_in(sample, name)
        raise SampleFault(f"{name} is no text", f"{path}: found {found}, expected text or messages")
    return text_turn(sample, name, role)


def _system(sample: RawSample) -> Turns:
    return text_turn(sample, "system", "system") if text_of(sample, "system", may_be_missing=True) else Turns()
