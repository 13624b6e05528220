"""Turns a sample into ids and says which of them the loss counts.

An answer is trained from the first token behind the prompt that generation would be given, up to and including the
token that ends the turn. Where the answer begins is found by rendering the conversation up to it: that must be a
beginning of the whole rendering, or the row is refused with the first difference.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.data.samples import Completion, Conversation, Message, RowFault, TextTokenizer
from recipe_lib.errors import DataError

Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True)
class Encoded:
    """A row before it is cut: ids, whether the loss counts each of them as a target, and whether an answer had to be
    encoded apart from the prompt because a token reached over the border."""

    ids: list[int]
    trained: list[bool]
    apart: bool = False


class Encoder:
    """Encodes samples for one tokenizer and template.

    template: `chat`, `plain`, or `auto` (chat if the tokenizer has a template). train_on: `answer` or `all`.
    add_bos: begin plain text with BOS where the tokenizer does so by itself; a chat template writes its own.
    """

    def __init__(self, tokenizer: TextTokenizer, template: str, train_on: str = "answer", add_bos: bool = True) -> None:
        """Raises DataError: `chat` without a chat template, or no EOS for the end of plain answers."""
        self.tokenizer, self.train_on = tokenizer, train_on
        if template == "chat" and tokenizer.chat_template is None:
            raise DataError(
                f"{tokenizer.place}: data.template is chat, but the tokenizer has no chat template; "
                "set tokenizer.chat_template to a Jinja file, or data.template to plain"
            )
        self.template = "plain" if template == "plain" or tokenizer.chat_template is None else "chat"
        self.add_bos = add_bos and tokenizer.bos_id is not None and tokenizer.add_bos_by_default
        self._stops = {tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.stop_ids}
        texts = sorted((text for text in tokenizer.special_texts if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def encode(self, sample: Conversation | Completion) -> Encoded:
        """Ids and trained targets. Raises RowFault for a sample that does not fit the template."""
        if isinstance(sample, Completion):
            (prompt, completion), literal = self._escape([sample.prompt, sample.completion])
            whole = prompt + completion + self._eos()
            return self._mark(whole, [(len(prompt), len(whole))], literal, self.add_bos)
        (messages, tools), literal = self._escape([list(sample.messages), sample.tools])
        render = self._renderer(tools)
        whole = self._rendered(render, messages, False)
        spans = self._answers(render, messages, whole)
        return self._mark(whole, spans, literal, self.add_bos and self.template == "plain")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Ids of a conversation that the assistant is to go on with."""
        (messages, tools), literal = self._escape([list(messages), tools])
        text = self._renderer(tools)(messages, True)
        ids = self.tokenizer.encode_pieces([text], literal=literal)[0]
        return self._with_bos(ids) if self.add_bos and self.template == "plain" else ids

    def _renderer(self, tools: Sequence[Mapping[str, Any]] | None) -> Render:
        if self.template == "chat":
            return lambda messages, prompt: self.tokenizer.render_chat(messages, prompt, tools)
        eos = self._eos()
        return lambda messages, prompt: render_plain(messages, prompt, eos)

    def _rendered(self, render: Render, messages: Sequence[Message], prompt: bool) -> str:
        """A template that objects to a conversation makes the row a bad one, not the run."""
        try:
            return render(messages, prompt)
        except DataError as error:
            raise RowFault("refused by the chat template", str(error)) from None

    def _eos(self) -> str:
        tokenizer = self.tokenizer
        if tokenizer.eos_id is None:
            raise DataError(
                f"{tokenizer.place}: the tokenizer has no EOS token to end an answer with; "
                "set eos_token in tokenizer_config.json"
            )
        return tokenizer.token_bytes(tokenizer.eos_id).decode()

    def _escape(self, content: Any) -> tuple[Any, str | None]:
        """The same with a private letter inside each special token that is only written in the text.

        Rendering puts the template's own special tokens between; these are found, the others are not.
        """
        texts = list(_texts(content))
        if self._special is None or not any(self._special.search(text) for text in texts):
            return content, None
        taken = {letter for text in [*texts, self.tokenizer.chat_template or ""] for letter in text}
        literal = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in taken)
        pattern = self._special

        def broken(text: str) -> str:
            return pattern.sub(lambda match: match.group()[0] + literal + match.group()[1:], text)

        return _walk(content, broken), literal

    def _answers(self, render: Render, messages: Sequence[Message], whole: str) -> list[tuple[int, int]]:
        """Where each answer stands in the whole rendering, its end-of-turn token included."""
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        starts = []
        for number in numbers:
            before = self._rendered(render, messages[:number], True)
            if not whole.startswith(before):
                raise RowFault("template writes the past anew", _difference(before, whole, number + 1))
            starts.append(len(before))
        limits = [*starts[1:], len(whole)]
        spans = []
        for number, start, limit in zip(numbers, starts, limits, strict=True):
            _check_tool_calls(messages[number], whole[start:limit], number + 1)
            spans.append((start, self._end_of_turn(whole, start, limit, messages[number])))
        return spans

    def _end_of_turn(self, whole: str, start: int, limit: int, message: Message) -> int:
        """The end of the first special token behind the answer's text; where the template writes something else than
        the text (a tool call, an answer without its thoughts), the end of the first token that ends answers."""
        tokens = list(self._special.finditer(whole, start, limit)) if self._special else []
        stops = [token for token in tokens if token.group() in self._stops]
        said = message["content"].strip()
        at = whole.find(said, start, limit)
        known = bool(said) and at >= 0 and not any(token.end() <= at for token in stops)
        if known and not message.get("tool_calls"):
            behind = [token for token in tokens if token.start() >= at + len(said)]
        else:
            behind = stops or tokens[-1:]
        if not behind:
            raise DataError(
                f"{self.tokenizer.chat_template_place}: the chat template puts no special token behind an answer, so "
                "nothing would teach the model to stop; set tokenizer.chat_template to one that does, or data.template "
                "to plain"
            )
        return behind[0].end()

    def _mark(self, whole: str, spans: list[tuple[int, int]], literal: str | None, add_bos: bool) -> Encoded:
        """Ids of the whole text with the answers' ids marked."""
        cuts = [0, *(at for span in spans for at in span), len(whole)]
        parts = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        pieces = self.tokenizer.encode_pieces(parts, literal=literal)
        together = self.tokenizer.encode_pieces([whole], literal=literal)[0]
        ids, lengths = [i for piece in pieces for i in piece], [len(piece) for piece in pieces]
        apart = False
        if ids != together:
            found = self._lengths_within(together, whole, cuts, literal)
            apart = found is None
            ids, lengths = (ids, lengths) if found is None else (together, found)
        trained = [bool(number % 2) for number, length in enumerate(lengths) for _ in range(length)]
        if add_bos and ids[:1] != [self.tokenizer.bos_id]:
            ids, trained = self._with_bos(ids), [False, *trained]
        if self.train_on == "all":
            trained = [True] * len(ids)
        trained[:1] = [False] * len(trained[:1])  # nothing stands before the first token to predict it from
        last = max((at for at, is_trained in enumerate(trained) if is_trained), default=-1)
        if last < 0:
            raise RowFault("no trained token", "found no token that the loss would count, expected an answer")
        return Encoded(ids[: last + 1], trained[: last + 1], apart)

    def _lengths_within(
        self, together: list[int], whole: str, cuts: Sequence[int], literal: str | None
    ) -> list[int] | None:
        """Token counts between the cuts if each cut is also a border between tokens of the whole; else None.

        Pieces can differ from the whole although no token reaches over a cut (a token that swallows white space).
        """
        ends = [0]
        for cut in cuts[1:]:
            before = self.tokenizer.encode_pieces([whole[:cut]], literal=literal)[0]
            if together[: len(before)] != before:
                return None
            ends.append(len(before))
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def render_plain(messages: Sequence[Message], add_generation_prompt: bool, eos: str) -> str:
    """The built-in template: `User:` and `Assistant:` on lines of their own, EOS behind each answer."""
    parts = []
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            raise DataError("the plain template has no tool calls; use a tokenizer with a chat template")
        written = {"system": f"{content}\n\n", "assistant": f"{content}{eos}", "tool": f"Tool:\n{content}\n\n"}
        parts.append(written.get(role, f"User:\n{content}\n\n"))
        if role in ("user", "tool"):
            parts.append("Assistant:\n")
    return "".join(parts)


def render_prompt(
    tokenizer: TextTokenizer, messages: Sequence[Message], template: str = "auto", add_bos: bool = True
) -> list[int]:
    """Ids to generate an answer from, the same as training puts before that answer. Raises DataError."""
    return Encoder(tokenizer, template, add_bos=add_bos).prompt(messages)


def _check_tool_calls(message: Message, written: str, number: int) -> None:
    """Raises RowFault if the template leaves out a call: the model would learn to say nothing in its place."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in written:
            raise RowFault(
                "tool call left out",
                f"message {number}: found a tool call that the chat template does not write, expected a template that "
                "knows tool calls; set tokenizer.chat_template to one",
            )


def _walk(content: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and dicts with each text changed; keys and roles stay."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [_walk(item, change) for item in content]
    if isinstance(content, dict):
        return {key: value if key == "role" else _walk(value, change) for key, value in content.items()}
    return content


def _texts(content: Any) -> Iterator[str]:
    """Every text that `_walk` would change."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from _texts(item)
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _texts(value) if key != "role" else ()


def _common(left: str, right: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def _difference(before: str, whole: str, number: int) -> str:
    at = _common(before, whole)
    return (
        f"message {number}: the chat template writes what stands before it differently once it is there: at character "
        f"{at + 1} found {whole[at : at + 24]!r}, expected {before[at : at + 24]!r} as when generating"
    )
