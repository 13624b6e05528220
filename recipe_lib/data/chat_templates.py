"""Conversations written out, by the tokenizer's chat template or by the built-in plain one.

Samples have the thought of an answer in a field of its own or between `<think>` tags; templates
read it from one of these, from none, or leave it to the prompt. `probe_template` finds out which,
by rendering small conversations, and `TemplateFields` which keys of messages a template reads.

`Template` is what writes conversations for one tokenizer, `RenderedChat` one conversation with its
renderings. The plain template exists twice: in Python for training, and as Jinja for the exports of
what it has trained.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recipe_lib.config import FullFinetuneConfig, resolve_sources
from recipe_lib.data.escaping import Escape, SpecialTokens, encode_escaped
from recipe_lib.data.samples import Conversation, Message, SampleFault
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer
from recipe_lib.tokenizers.chat_template import TurnEnd

# Where samples have the thought of an answer apart from its words.
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_ASK = {"role": "user", "content": "a"}
_RESULT = {"role": "tool", "content": "b", "name": "f", "tool_call_id": "call00001"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}

# Jinja's blocks of a template, texts in quotes, and names that are no attributes.
_BLOCKS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEXTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_NAMES = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_UNUSED = "zqj"  # a text that no template holds

Render = Callable[
    [Sequence[Message], Sequence[RenderRequest], Sequence[Mapping[str, Any]] | None],
    Sequence[str | DataError],
]


@dataclass(frozen=True)
class TemplateFeatures:
    """The ways in which a chat template treats thoughts and tool calls."""

    thought_key: str = ""  # the field of an answer that it reads a thought from; empty: none
    tags: bool = True  # it reads one from between `<think>` and `</think>` as well
    text_arguments: bool = False  # it wants a call's arguments as JSON text, not as an object
    after_call: str = ""  # the special token that follows a call at once, if there is one
    marks: bool = False  # it says with `{% generation %}` what an answer is


def probe_template(
    render: Render, source: str, special: re.Pattern[str] | None, letter: str
) -> TemplateFeatures:
    """Return what a template makes of thoughts and tool calls.

    render: renders messages, with tools. source: the template's Jinja. letter: one that it does not
    hold.
    """
    text_arguments = False
    renderings = ["", ""]  # up to a call, and up to its result
    for as_text in (False, True):
        messages = [_ASK, _build_call(letter, as_text), _RESULT]
        texts = [
            _get_text(rendering)
            for rendering in render(messages, [RenderRequest(2), RenderRequest(3)], [_TOOL])
        ]
        if letter in texts[0]:
            text_arguments = as_text
            renderings = texts
            break
    key = next(
        (
            key
            for key in THOUGHT_KEYS
            if _can_read_thought(render, key, letter=letter, text_arguments=text_arguments)
        ),
        "",
    )
    return TemplateFeatures(
        thought_key=key,
        tags=not key or _can_read_tags(render, key, letter),
        text_arguments=text_arguments,
        after_call=_find_next_token(renderings[0], renderings[1], special),
        marks=bool(_GENERATION.search(source)),
    )


class TemplateFields:
    """The keys of messages, and the variables, that a chat template reads."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Take the tokenizer that has the template.

        None: no template reads anything but roles and contents.
        """
        self._tokenizer = tokenizer
        source = (tokenizer.chat_template if tokenizer else None) or ""
        code = " ".join(_TEXTS.sub("", block) for block in _BLOCKS.findall(source))
        self.names = frozenset(_NAMES.findall(code))  # all that the template speaks of
        self._reads_key = dict[tuple[str, str, Any], bool]()

    def reads_key(self, role: str, key: str, value: Any) -> bool:
        """Return True if the template writes a message of this role otherwise with this key, or
        refuses it.
        """
        if self._tokenizer is None:
            return False
        # Each kind of value is tried once, by one that no template holds.
        case = role, key, value if isinstance(value, bool) else type(value)
        if case not in self._reads_key:
            self._reads_key[case] = self._writes_key(
                role, key, _UNUSED if isinstance(value, str) else value
            )
        return self._reads_key[case]

    def _writes_key(self, role: str, key: str, value: Any) -> bool:
        """Return True if a rendering changes with the key.

        The message is tried as the last one of its role and as an earlier one, an answer also as a
        call.
        """
        assert self._tokenizer is not None
        answer = {"role": "assistant", "content": "b"}
        call = _build_call("c", as_text=False)
        chats: dict[str, list[tuple[list[Message], int]]] = {
            "system": [([{"role": "system", "content": "s"}, _ASK, answer], 0)],
            "user": [([_ASK, answer, _ASK, answer], at) for at in (0, 2)],
            "assistant": (
                [([_ASK, answer, _ASK, answer], at) for at in (1, 3)] + [([_ASK, call, _RESULT], 1)]
            ),
            "tool": [([_ASK, call, _RESULT, answer], 2)],
        }
        for messages, at in chats[role]:
            without_key = {name: field for name, field in messages[at].items() if name != key}
            texts = set[str]()
            for message in (without_key, {**without_key, key: value}):
                chat = [*messages[:at], message, *messages[at + 1 :]]
                (rendering,) = self._tokenizer.render_chats(
                    chat, [RenderRequest(len(chat))], [_TOOL]
                )
                texts.add(_get_text(rendering))
            if len(texts) > 1:
                return True
        return False


def _build_call(letter: str, as_text: bool) -> dict[str, Any]:
    """Return an answer that calls the tool with this letter. as_text: the arguments are JSON
    text.
    """
    arguments: Any = {"x": letter}
    function = {
        "name": "f",
        "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
    }
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _can_read_thought(render: Render, key: str, letter: str, text_arguments: bool) -> bool:
    """Return True if a thought in this field is written, after a question or before a tool call."""
    answers = ({"role": "assistant", "content": "b"}, _build_call("c", text_arguments))
    renderings = [
        render([_ASK, answer | {key: letter}], [RenderRequest(2)], [_TOOL])[0] for answer in answers
    ]
    return any(letter in _get_text(rendering) for rendering in renderings)


def _can_read_tags(render: Render, key: str, letter: str) -> bool:
    """Return True if a thought between tags is written as one in its field is, but for white space.

    Also if a thought in its field is not written at all.
    """
    apart = {"role": "assistant", "content": "b", key: letter}
    tagged = {"role": "assistant", "content": f"<think>\n{letter}\n</think>\n\nb"}
    texts = [
        _get_text(render([_ASK, answer], [RenderRequest(2)], None)[0]) for answer in (apart, tagged)
    ]
    return letter not in texts[0] or "".join(texts[0].split()) == "".join(texts[1].split())


def _find_next_token(last: str, followed: str, special: re.Pattern[str] | None) -> str:
    """Return the special token at which `followed` goes on from `last`; empty: none."""
    token = (
        special.match(followed, len(last))
        if special and last and followed.startswith(last)
        else None
    )
    return token.group() if token else ""


def _get_text(rendering: str | DataError) -> str:
    """Return a rendering; empty where the template objects."""
    return "" if isinstance(rendering, DataError) else rendering


# A prompt for an answer may end with a thought that is begun, or with one that is over.
OPENED = re.compile(r"<think>\s*\Z")
CLOSED = re.compile(r"<think>\s*</think>\s*\Z")
_WRITTEN = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def split_thought(message: Message) -> tuple[str | None, str]:
    """Return the thought of an answer, None if there is none, and its words."""
    for key in THOUGHT_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip("\n"), message["content"]
    written = _WRITTEN.match(message["content"])
    if written is None:
        return None, message["content"]
    return written.group(1).strip("\n"), message["content"][written.end() :].lstrip("\n")


def move_thought(message: dict[str, Any], features: TemplateFeatures) -> dict[str, Any]:
    """Return the message with its thought in the field that the template reads, if it reads one."""
    key = next((name for name in THOUGHT_KEYS if isinstance(message.get(name), str)), None)
    if message["role"] != "assistant" or not features.thought_key or key == features.thought_key:
        return message
    thought, words = split_thought(message)
    if thought is None or (key is None and features.tags):
        return message
    return {name: value for name, value in message.items() if name != key} | {
        features.thought_key: thought if key is None else message[key],
        "content": words,
    }


def complete_thought(
    alone: str,
    *,
    begin: str,
    message: Message,
    features: TemplateFeatures,
    letter: str,
    render: Callable[[Message], str],
) -> str:
    """Return what a model must write after a prompt that has begun a thought.

    That is the thought, its end, and the answer. The template's own words are taken where it writes
    thoughts, else those of DeepSeek-R1, whose template does not.

    alone: the rendering in which the answer comes last and its thought is missing or written in
    another way. begin: the prompt without the beginning of a thought, which `alone` goes on from.
    letter: one that nothing holds. render: the rendering up to this message, with another in its
    place; empty if there is none.
    """
    thought, words = split_thought(message)
    if features.thought_key:
        rendering = render({**message, "content": words, features.thought_key: letter})
        if rendering.startswith(begin) and letter in rendering:
            return (thought or "") + rendering[rendering.index(letter) + 1 :]
    rest = strip_thought(alone[len(begin) :])
    return (thought or "") + "\n</think>\n\n" + (rest if thought is None else rest.lstrip("\n"))


def strip_thought(written: str) -> str:
    """Return an answer as a template writes it, without the thought at its beginning."""
    thought = _WRITTEN.match(written)
    return written[thought.end() :].lstrip("\n") if thought else written


Tools = Sequence[Mapping[str, Any]] | None


class Template:
    """A writer of conversations for one tokenizer, with what is known of its template."""

    def __init__(
        self, tokenizer: Tokenizer, special: SpecialTokens, is_chat: bool, add_bos: bool
    ) -> None:
        """Take the parts of a template.

        special: looks for special tokens. is_chat: the tokenizer's own template, not the plain one.
        add_bos: for the plain one.
        """
        self.tokenizer = tokenizer
        self.special = special
        self.is_chat = is_chat
        # It is written, so that what follows is encoded as it is after BOS.
        self._bos = get_bos_text(tokenizer, add_bos)
        # The tokens that generation stops at, as text.
        self.stops = {
            tokenizer.get_token_bytes(i).decode(errors="replace") for i in tokenizer.stop_ids
        }

    @cached_property
    def end(self) -> TurnEnd:
        """The end of an answer; the plain template has no token but EOS for it."""
        return self.tokenizer.turn_end if self.is_chat else TurnEnd()

    @cached_property
    def features(self) -> TemplateFeatures:
        """The features of the template: how it treats thoughts and tool calls."""
        source = self.tokenizer.chat_template
        if not self.is_chat or source is None:
            return TemplateFeatures()
        letter = self.special.find_unused_letters([], 1)[0]
        return probe_template(
            self.tokenizer.render_chats, source, special=self.special.pattern, letter=letter
        )

    def render(
        self,
        messages: Sequence[Message],
        requests: Sequence[RenderRequest],
        tools: Tools = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Return renderings of one conversation, all made in one go; where the template objects,
        its words.

        options: as `ChatTemplate.render_many` has them. Raises DataError: the template cannot be
        run at all.
        """
        if self.is_chat:
            return self.tokenizer.render_chats(
                messages, requests=requests, tools=tools, options=options
            )
        eos = get_eos_text(self.tokenizer)
        return [try_render_plain(messages, request, eos=eos, bos=self._bos) for request in requests]


class RenderedChat:
    """A conversation and its renderings, each of which is made once."""

    def __init__(self, template: Template, conversation: Conversation, escape: Escape) -> None:
        """Take a conversation. escape: how special tokens in its texts are written."""
        self.template = template
        self.escape = escape
        self.messages = conversation.messages
        self.tools = conversation.tools
        self.places = conversation.places
        self._variables = conversation.variables
        self._renderings = dict[RenderRequest, str | DataError]()

    @property
    def whole(self) -> str:
        """The rendering of all messages. Raises SampleFault like `get_text`."""
        return self.get_text(RenderRequest(len(self.messages)))

    @cached_property
    def letters(self) -> Sequence[str]:
        """Two letters that neither the conversation nor the template holds."""
        content = [self.messages, self.tools, self._variables]
        return self.template.special.find_unused_letters(content, 2)

    def render(
        self,
        requests: Sequence[RenderRequest],
        messages: Sequence[Message] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Return renderings as `Template.render` does.

        messages: other ones than the conversation's. The sample's variables win over those in
        options.
        """
        merged = dict(options or {})
        if self._variables:
            merged["variables"] = {**merged.get("variables", {}), **self._variables}
        return self.template.render(
            messages or self.messages, requests, tools=self.tools, options=merged or None
        )

    def fetch(self, requests: Iterable[RenderRequest]) -> None:
        """Make the renderings that will be asked for, in one go."""
        missing = [key for key in dict.fromkeys(requests) if key not in self._renderings]
        if missing:
            self._renderings |= zip(missing, self.render(missing), strict=True)

    def get_text(self, request: RenderRequest) -> str:
        """Return a rendering. Raises SampleFault for what the template objects to."""
        self.fetch([request])
        return require_text(self._renderings[request])

    def show_tokens(self, text: str) -> list[str]:
        """Return a text as tokens, for error lines."""
        tokenizer = self.template.tokenizer
        ids = encode_escaped(tokenizer, [text], self.escape)[0]
        return [tokenizer.get_token_bytes(i).decode(errors="replace") for i in ids]


def require_text(rendering: str | DataError) -> str:
    """Return a rendering.

    Raises SampleFault: a template that objects to a conversation makes the sample a bad one, not
    the run.
    """
    if isinstance(rendering, DataError):
        raise SampleFault("refused by the chat template", str(rendering))
    return rendering


NO_CALLS = "the plain template has no tool calls; use a tokenizer with a chat template"
NO_TOOLS = (
    "the plain template does not show tools; leave them out, or use a tokenizer with a chat"
    " template"
)
# Formats that no template writes, unless a row of the second has messages.
WITHOUT_TURNS = ("text", "prompt_completion")

_ANSWER = "Assistant:\n"

# The same as `render_plain`, and the readers' checks of roles and contents, which other programs do
# not have.
_JINJA = """\
{%- set ns = namespace(text=BOS, content='', asks=false) -%}
{%- for message in messages -%}
{%- if message['tool_calls'] -%}{{- raise_exception(NO_CALLS) -}}{%- endif -%}
{%- if message['content'] is string -%}
{%- set ns.content = message['content'] -%}
{%- elif message['content'] is defined and message['content'] is iterable \
and message['content'] is not mapping -%}
{%- set ns.content = '' -%}
{%- for part in message['content'] -%}
{%- if part['type'] != 'text' -%}{{- raise_exception('the plain template takes text alone') -}}\
{%- endif -%}
{%- set ns.content = ns.content + part['text'] -%}
{%- endfor -%}
{%- else -%}{{- raise_exception('the plain template needs a content of text in each message') -}}
{%- endif -%}
{%- if message['role'] == 'system' or message['role'] == 'developer' -%}
{%- set ns.text = ns.text + ns.content + '\\n\\n' -%}
{%- elif message['role'] == 'user' -%}
{%- set ns.text = ns.text + 'User:\\n' + ns.content + '\\n\\n' -%}
{%- elif message['role'] == 'tool' -%}
{%- set ns.text = ns.text + 'Tool:\\n' + ns.content + '\\n\\n' -%}
{%- elif message['role'] == 'assistant' -%}
{%- set ns.text = ns.text + 'Assistant:\\n' + ns.content + EOS -%}
{%- else -%}\
{{- raise_exception('unknown role; the plain template has system, user, assistant and tool') -}}
{%- endif -%}
{%- set ns.asks = message['role'] == 'user' or message['role'] == 'tool' -%}
{%- endfor -%}
{%- if ns.asks or add_generation_prompt -%}\
{%- set ns.text = ns.text + 'Assistant:\\n' -%}{%- endif -%}
{%- for tool in tools or [] -%}
{%- set function = tool['function'] if tool['function'] else tool -%}
{%- if function['name'] is string and function['name'] not in ns.text -%}\
{{- raise_exception(NO_TOOLS) -}}{%- endif -%}
{%- endfor -%}
{{- ns.text -}}
"""


def render_plain(messages: Sequence[Message], eos: str, bos: str = "", prompt: bool = False) -> str:
    """Return a conversation in the plain template.

    `User:`, `Tool:` and `Assistant:` stand on lines of their own before each turn, in any order,
    EOS after each answer. A question that comes last is followed by the prompt for its answer;
    prompt: whatever comes last is. Raises DataError for a tool call.
    """
    parts = [bos]
    for message in messages:
        content = message["content"]
        if message.get("tool_calls"):
            raise DataError(NO_CALLS)
        turns = {
            "system": f"{content}\n\n",
            "assistant": f"{_ANSWER}{content}{eos}",
            "tool": f"Tool:\n{content}\n\n",
        }
        parts.append(turns.get(message["role"], f"User:\n{content}\n\n"))
    if prompt or (messages and messages[-1]["role"] in ("user", "tool")):
        parts.append(_ANSWER)
    return "".join(parts)


def try_render_plain(
    messages: Sequence[Message], request: RenderRequest, eos: str, bos: str
) -> str | DataError:
    """Return one rendering of a conversation, as a tokenizer's `render_chats` does."""
    stop, prompt, replacements = request
    contents = dict(replacements)
    replaced = [
        {**message, "content": contents.get(n, message["content"])}
        for n, message in enumerate(messages)
    ]
    try:
        return render_plain(replaced[:stop], eos, bos=bos, prompt=prompt)
    except DataError as error:
        return error


def build_plain_jinja(eos: str, bos: str = "") -> str:
    """Return the Jinja that writes what `render_plain` does.

    It is for transformers' `apply_chat_template` and what else reads it, and raises an exception
    where training refuses a sample: tool calls, tools that are not shown, unknown roles.
    """
    # Written out: what a tokenizer calls its EOS may be set to something else later.
    values = {"BOS": bos, "EOS": eos, "NO_CALLS": NO_CALLS, "NO_TOOLS": NO_TOOLS}
    return re.sub(
        "|".join(values), lambda name: json.dumps(values[name[0]], ensure_ascii=False), _JINJA
    )


def get_eos_text(tokenizer: Tokenizer) -> str:
    """Return the EOS token as it is written. Raises DataError: there is none."""
    if tokenizer.eos_id is None:
        raise DataError(
            f"{tokenizer.place}: the tokenizer has no EOS token to end an answer with; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer.get_token_bytes(tokenizer.eos_id).decode()


def get_bos_text(tokenizer: Tokenizer, add_bos: bool) -> str:
    """Return what a conversation begins with: BOS as it is written, or nothing.

    BOS where the tokenizer begins texts with it.
    """
    if not add_bos or tokenizer.bos_id is None or not tokenizer.add_bos_by_default:
        return ""
    bos = tokenizer.get_token_bytes(tokenizer.bos_id).decode(errors="replace")
    return bos if tokenizer.encode_pieces([bos])[0] == [tokenizer.bos_id] else ""


def find_trained_template(
    cfg: FullFinetuneConfig, tokenizer: Tokenizer, chats: int = 0
) -> str | None:
    """Return the template that wrote the conversations of a run; None: the tokenizer's own files
    hold it.

    None also where no sample of the run is a conversation. One that asks for today's date has that
    of training instead. tokenizer: as the run loads it, with the file that tokenizer.chat_template
    names. chats: how many samples a template wrote, where that is known; else their formats decide.
    """
    if not chats and all(source.format in WITHOUT_TURNS for source in resolve_sources(cfg.data)):
        return None
    if cfg.data.template == "plain" or tokenizer.chat_template is None:
        return build_plain_jinja(get_eos_text(tokenizer), get_bos_text(tokenizer, cfg.data.add_bos))
    is_dated = tokenizer.dated_template != tokenizer.chat_template
    return tokenizer.dated_template if cfg.tokenizer.chat_template or is_dated else None
