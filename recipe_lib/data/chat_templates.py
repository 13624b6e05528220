"""Render conversations as text, by the tokenizer's chat template or by the built-in plain one.

An `Encoder` (label_masks.py) makes a `Template`, and a `RenderedChat` for each conversation;
trained_spans.py compares its renderings to find the answers. A thought is an answer's reasoning, in
a key of its own or between `<think>` tags. `probe_template` renders small conversations to find
where a template reads it. The plain template is Python for training (`render_plain`), and Jinja for
exports (`build_plain_jinja`).
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

# Keys of a message in which samples have the thought of an answer apart from its content
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

# The block tag that some templates put around what the model writes
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
# A question, a tool's result and a tool, for the small conversations that templates are tried with.
# Mistral's templates refuse a call's id unless it has nine letters and digits.
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

# Patterns that find the names which a template reads
_BLOCKS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)  # Jinja's `{{ }}` and `{% %}`
_TEXTS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)  # quoted; removed first
_NAMES = re.compile(r"(?<![.\w])[A-Za-z_]\w*")  # after a point it would be an attribute
_UNUSED = "zqj"  # a text that no template contains

# `Tokenizer.render_chats`: (messages, requests, tools) -> a rendering for each request.
# `RenderRequest(n)` asks for the first n messages. Where the template raises an exception, a
# DataError stands in place of the text.
Render = Callable[
    [Sequence[Message], Sequence[RenderRequest], Sequence[Mapping[str, Any]] | None],
    Sequence[str | DataError],
]


@dataclass(frozen=True)
class TemplateFeatures:
    """The ways in which a chat template treats thoughts and tool calls."""

    thought_key: str = ""  # the key of an answer that it reads a thought from; empty: none
    tags: bool = True  # it reads a thought between `<think>` and `</think>` of the content as well
    text_arguments: bool = False  # it wants a call's arguments as JSON text, not as an object
    after_call: str = ""  # the special token that directly follows a tool call; empty: none
    marks: bool = False  # it has `{% generation %}` around what the model writes


def probe_template(
    render: Render, source: str, special: re.Pattern[str] | None, letter: str
) -> TemplateFeatures:
    """Find out how a template treats thoughts and tool calls, by rendering small conversations.

    source: the template's Jinja. special: matches any special token; None: there are none. letter:
    a character that the template does not contain. It is put where a value stands: the template has
    written the value if the rendering contains it.
    """
    text_arguments = False
    # Of the conversation up to a call, and up to the call's result; empty: no call was written
    renderings = ["", ""]
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
    thought_key = next(
        (
            key
            for key in THOUGHT_KEYS
            if _can_read_thought(render, key=key, letter=letter, text_arguments=text_arguments)
        ),
        "",
    )
    return TemplateFeatures(
        thought_key=thought_key,
        tags=not thought_key or _can_read_tags(render, thought_key, letter),
        text_arguments=text_arguments,
        after_call=_find_next_token(renderings[0], renderings[1], special),
        marks=bool(_GENERATION.search(source)),
    )


class TemplateFields:
    """The keys of messages, and the variables, that a chat template reads."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Take the tokenizer that has the template.

        tokenizer: None if conversations are written by the plain template, which reads roles and
        contents alone.
        """
        self._tokenizer = tokenizer
        source = (tokenizer.chat_template if tokenizer else None) or ""
        code = " ".join(_TEXTS.sub("", block) for block in _BLOCKS.findall(source))
        # All names in the template's code but attributes: variables, filters, Jinja's own words.
        self.names = frozenset(_NAMES.findall(code))
        # Results of `reads_key`, by (role, key, type of the value, or the value itself of a bool)
        self._reads_key = dict[tuple[str, str, Any], bool]()

    def reads_key(self, role: str, key: str, value: Any) -> bool:
        """Return True if this key changes how the template writes a message of this role.

        True as well if the template refuses a message with the key. value: of the key; it counts by
        its type alone, unless it is a bool.
        """
        if self._tokenizer is None:
            return False
        # A template may only ask whether the value is true, so True and False are tried apart. A
        # text is tried as one that no template contains.
        case = (role, key, value if isinstance(value, bool) else type(value))
        if case not in self._reads_key:
            self._reads_key[case] = self._writes_key(
                role, key, _UNUSED if isinstance(value, str) else value
            )
        return self._reads_key[case]

    def _writes_key(self, role: str, key: str, value: Any) -> bool:
        """Return True if a rendering changes with the key.

        A question or answer is tried as the last one of its role and as an earlier one, since
        templates treat these differently. An answer is also tried as a tool call.
        """
        assert self._tokenizer is not None
        answer = {"role": "assistant", "content": "b"}
        call = _build_call("c", as_text=False)
        # Role -> (conversation, index of the message that gets the key)
        chats: dict[str, list[tuple[list[Message], int]]] = {
            "system": [([{"role": "system", "content": "s"}, _ASK, answer], 0)],
            "user": [([_ASK, answer, _ASK, answer], 0), ([_ASK, answer, _ASK, answer], 2)],
            "assistant": [
                ([_ASK, answer, _ASK, answer], 1),
                ([_ASK, answer, _ASK, answer], 3),
                ([_ASK, call, _RESULT], 1),
            ],
            "tool": [([_ASK, call, _RESULT, answer], 2)],
        }
        for messages, index in chats[role]:
            without_key = {name: field for name, field in messages[index].items() if name != key}
            texts = set[str]()
            for message in (without_key, {**without_key, key: value}):
                chat = [*messages[:index], message, *messages[index + 1 :]]
                (rendering,) = self._tokenizer.render_chats(
                    chat, [RenderRequest(len(chat))], [_TOOL]
                )
                texts.add(_get_text(rendering))
            if len(texts) > 1:
                return True
        return False


def _build_call(letter: str, as_text: bool) -> dict[str, Any]:
    """Return an answer that calls the tool `_TOOL` with this letter as its argument.

    as_text: give the arguments as JSON text, else as an object.
    """
    arguments: Any = {"x": letter}
    function = {
        "name": "f",
        "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
    }
    call = {"id": _RESULT["tool_call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _can_read_thought(render: Render, key: str, letter: str, text_arguments: bool) -> bool:
    """Return True if the template writes a thought in this key of an answer, or of a tool call.

    render, letter: as for `probe_template`. text_arguments: it wants a call's arguments as text.
    """
    answers = ({"role": "assistant", "content": "b"}, _build_call("c", text_arguments))
    renderings = [
        render([_ASK, answer | {key: letter}], [RenderRequest(2)], [_TOOL])[0] for answer in answers
    ]
    return any(letter in _get_text(rendering) for rendering in renderings)


def _can_read_tags(render: Render, key: str, letter: str) -> bool:
    """Return True if a thought between tags is written as one in this key, but for white space.

    True as well if a thought in this key is not written in an answer without a tool call. render,
    letter: as for `probe_template`.
    """
    answer_with_key = {"role": "assistant", "content": "b", key: letter}
    answer_with_tags = {"role": "assistant", "content": f"<think>\n{letter}\n</think>\n\nb"}
    texts = [
        _get_text(render([_ASK, answer], [RenderRequest(2)], None)[0])
        for answer in (answer_with_key, answer_with_tags)
    ]
    return letter not in texts[0] or "".join(texts[0].split()) == "".join(texts[1].split())


def _find_next_token(beginning: str, text: str, special: re.Pattern[str] | None) -> str:
    """Return the special token that directly follows `beginning` in `text`; empty: none.

    special: matches any special token; None: there are none.
    """
    if not special or not beginning or not text.startswith(beginning):
        return ""
    token = special.match(text, len(beginning))
    return token.group() if token else ""


def _get_text(rendering: str | DataError) -> str:
    """Return a rendering; empty where the template raised an exception."""
    return "" if isinstance(rendering, DataError) else rendering


OPEN_THOUGHT = re.compile(r"<think>\s*\Z")  # ends a prompt after which the model has to think
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")  # ends one after which it does not think
_LEADING_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)  # begins an answer


def split_thought(message: Message) -> tuple[str | None, str]:
    """Return (thought, content without it) of an answer; thought is None if it has none."""
    for key in THOUGHT_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip("\n"), message["content"]
    tagged = _LEADING_THOUGHT.match(message["content"])
    if tagged is None:
        return None, message["content"]
    return tagged.group(1).strip("\n"), message["content"][tagged.end() :].lstrip("\n")


def move_thought(message: dict[str, Any], features: TemplateFeatures) -> dict[str, Any]:
    """Return a copy of the message with its thought in the key that the template reads it from.

    Returns the message itself if it has no thought, the template has no such key, or reads the
    thought where it is.
    """
    key = next((name for name in THOUGHT_KEYS if isinstance(message.get(name), str)), None)
    if message["role"] != "assistant" or not features.thought_key or key == features.thought_key:
        return message
    thought, content = split_thought(message)
    if thought is None or (key is None and features.tags):
        return message
    return {name: value for name, value in message.items() if name != key} | {
        # The line ends around a thought are stripped between tags alone, where they belong to the
        # tags: a thought of another key is kept as it is.
        features.thought_key: thought if key is None else message[key],
        "content": content,
    }


def complete_thought(
    up_to_answer: str,
    *,
    begin: str,
    message: Message,
    features: TemplateFeatures,
    letter: str,
    render: Callable[[Message], str],
) -> str:
    """Return what a model must write after a prompt that has begun a thought.

    That is the thought, its end, and the answer. Between thought and answer stands the template's
    own markup if it writes thoughts, else that of DeepSeek-R1, whose template does not write any.

    up_to_answer: the rendering of the conversation up to the answer, in which the thought is
    missing or written in another way. begin: the prompt without the beginning of a thought;
    `up_to_answer` begins with it. letter: a character that neither the conversation nor the
    template contains. render: renders the conversation up to the answer, with the given message in
    the answer's place; returns an empty text if the template raises an exception.
    """
    thought, content = split_thought(message)
    if features.thought_key:
        # The letter stands for the thought: what follows it is the template's own markup.
        rendering = render({**message, "content": content, features.thought_key: letter})
        if rendering.startswith(begin) and letter in rendering:
            return (thought or "") + rendering[rendering.index(letter) + 1 :]
    answer = strip_thought(up_to_answer[len(begin) :])
    # After a thought, the line ends written here take the place of those of the template.
    return f"{thought or ''}\n</think>\n\n" + (answer if thought is None else answer.lstrip("\n"))


def strip_thought(rendered_answer: str) -> str:
    """Return the rendering of an answer without the thought between tags that it begins with."""
    thought = _LEADING_THOUGHT.match(rendered_answer)
    return rendered_answer[thought.end() :].lstrip("\n") if thought else rendered_answer


Tools = Sequence[Mapping[str, Any]] | None  # descriptions of functions; None: no tools


class Template:
    """The template by which conversations of one tokenizer are rendered, with what is known of it.

    It is the tokenizer's chat template, or the built-in plain one.
    """

    def __init__(
        self, tokenizer: Tokenizer, special: SpecialTokens, is_chat: bool, add_bos: bool
    ) -> None:
        """Choose the template of a tokenizer.

        special: finds the tokenizer's special tokens in texts. is_chat: use its own chat template,
        not the plain one. add_bos: begin conversations of the plain template with BOS, if the
        tokenizer begins texts with it by default.
        """
        self.tokenizer = tokenizer
        self.special = special
        self.is_chat = is_chat
        # A text in front of the conversation, not an id, so that the first word is encoded as it is
        # after BOS.
        self._bos = get_bos_text(tokenizer, add_bos)
        # Texts of the tokens that generation stops at
        self.stops = {
            tokenizer.get_token_bytes(token_id).decode(errors="replace")
            for token_id in tokenizer.stop_ids
        }

    @cached_property
    def end(self) -> TurnEnd:
        """Return how the template ends an answer; empty for the plain one, which puts EOS there."""
        return self.tokenizer.turn_end if self.is_chat else TurnEnd()

    @cached_property
    def features(self) -> TemplateFeatures:
        source = self.tokenizer.chat_template
        if not self.is_chat or source is None:
            return TemplateFeatures()
        letter = self.special.find_unused_letters([], 1)[0]
        return probe_template(
            render=self.tokenizer.render_chats,
            source=source,
            special=self.special.pattern,
            letter=letter,
        )

    def render(
        self,
        messages: Sequence[Message],
        requests: Sequence[RenderRequest],
        tools: Tools = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Return renderings of one conversation, one for each request, all made in one go.

        Where the template raises an exception, a DataError stands in place of the text. options:
        `marks`, two letters to write around what `{% generation %}` holds, and `variables`, more
        names that the template sees; the plain template ignores both. Raises DataError if the
        template cannot be run at all.
        """
        if self.is_chat:
            return self.tokenizer.render_chats(
                messages=messages, requests=requests, tools=tools, options=options
            )
        eos = get_eos_text(self.tokenizer)
        return [
            try_render_plain(messages=messages, request=request, eos=eos, bos=self._bos)
            for request in requests
        ]


class RenderedChat:
    """A conversation and its renderings, each of which is made once."""

    def __init__(self, template: Template, conversation: Conversation, escape: Escape) -> None:
        """Take a conversation in which special tokens are escaped already.

        escape: the letter inside each special token that a message spells out, so that only the
        template's own tokens are found, and whether these become tokens when the text is encoded.
        """
        self.template = template
        self.escape = escape
        self.messages = conversation.messages
        self.tools = conversation.tools  # None: the conversation has none
        self.places = conversation.places  # where in which file each message stands, for errors
        self._variables = conversation.variables  # more names that the template sees
        self._renderings = dict[RenderRequest, str | DataError]()

    @property
    def whole(self) -> str:
        """Return the rendering of all messages. Raises SampleFault like `get_text`."""
        return self.get_text(RenderRequest(len(self.messages)))

    @cached_property
    def letters(self) -> Sequence[str]:
        """Return two letters that neither the conversation nor the template contains.

        Put in place of a text, they show where the template writes it.
        """
        content = [self.messages, self.tools, self._variables]
        return self.template.special.find_unused_letters(content, 2)

    def render(
        self,
        requests: Sequence[RenderRequest],
        messages: Sequence[Message] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence[str | DataError]:
        """Return renderings as `Template.render` does, without keeping them.

        messages: rendered in place of the conversation's; None: the conversation's. Its variables
        win over those in options.
        """
        merged_options = dict(options or {})
        if self._variables:
            merged_options["variables"] = {
                **merged_options.get("variables", {}),
                **self._variables,
            }
        return self.template.render(
            messages=messages or self.messages,
            requests=requests,
            tools=self.tools,
            options=merged_options or None,
        )

    def cache_renderings(self, requests: Iterable[RenderRequest]) -> None:
        """Make and keep the renderings that `get_text` will be asked for.

        One call makes all: a tokenizer's template renders in another process.
        """
        missing = [
            request for request in dict.fromkeys(requests) if request not in self._renderings
        ]
        if missing:
            self._renderings |= zip(missing, self.render(missing), strict=True)

    def get_text(self, request: RenderRequest) -> str:
        """Return a rendering, made at the first call.

        Raises SampleFault if the template raises an exception.
        """
        self.cache_renderings([request])
        return require_text(self._renderings[request])

    def split_into_tokens(self, text: str) -> list[str]:
        tokenizer = self.template.tokenizer
        ids = encode_escaped(tokenizer, [text], self.escape)[0]
        return [tokenizer.get_token_bytes(token_id).decode(errors="replace") for token_id in ids]


def require_text(rendering: str | DataError) -> str:
    """Return a rendering that is a text.

    Raises SampleFault for a DataError: what a template refuses is one bad sample, and does not end
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
# Values of data.format whose samples no template renders. Those of prompt_completion may be lists
# of messages, which are rendered.
FORMATS_WITHOUT_TURNS = ("text", "prompt_completion")

_ANSWER = "Assistant:\n"  # the prompt for an answer in the plain template

# Renders as `render_plain` does, and checks roles and contents. In training the readers of samples
# check these before, and make "developer" a "system"; other programs that use the exported Jinja
# have no such checks. The template does not show tools, so it refuses one that no message names.
# `build_plain_jinja` puts texts in place of BOS, EOS, NO_CALLS and NO_TOOLS.
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

    Before each turn `User:`, `Tool:` or `Assistant:` stands on a line of its own, after each answer
    EOS. The prompt for an answer follows if the last message is a question or a tool's result, or
    if `prompt` is True. eos, bos: texts of the tokens; bos may be "". Raises DataError for a tool
    call.
    """
    parts = [bos]
    for message in messages:
        content = message["content"]
        if message.get("tool_calls"):
            raise DataError(NO_CALLS)
        # The readers of samples have refused any other role but "user".
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
    """Return one rendering in the plain template, or the DataError of what it cannot write."""
    num_messages, add_prompt, replacements = request
    contents = dict(replacements)  # by index of the message
    replaced = [
        {**message, "content": contents.get(index, message["content"])}
        for index, message in enumerate(messages)
    ]
    try:
        return render_plain(messages=replaced[:num_messages], eos=eos, bos=bos, prompt=add_prompt)
    except DataError as error:
        return error


def build_plain_jinja(eos: str, bos: str = "") -> str:
    """Return the Jinja that writes what `render_plain` does, for an export's chat template.

    Where training refuses a sample, it raises an exception: tool calls, tools that are not shown,
    unknown roles.
    """
    # The tokens are written out, not read from the variables `eos_token` and `bos_token`: these may
    # be set to something else later.
    values = {"BOS": bos, "EOS": eos, "NO_CALLS": NO_CALLS, "NO_TOOLS": NO_TOOLS}
    return re.sub(
        "|".join(values), lambda match: json.dumps(values[match[0]], ensure_ascii=False), _JINJA
    )


def get_eos_text(tokenizer: Tokenizer) -> str:
    """Return the EOS token as text. Raises DataError if the tokenizer has none."""
    if tokenizer.eos_id is None:
        raise DataError(
            f"{tokenizer.place}: the tokenizer has no EOS token to end an answer with; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer.get_token_bytes(tokenizer.eos_id).decode()


def get_bos_text(tokenizer: Tokenizer, add_bos: bool) -> str:
    """Return the text that a conversation of the plain template begins with: BOS, or nothing.

    It is BOS if `add_bos`, and the tokenizer begins texts with BOS.
    """
    if not add_bos or tokenizer.bos_id is None or not tokenizer.add_bos_by_default:
        return ""
    bos = tokenizer.get_token_bytes(tokenizer.bos_id).decode(errors="replace")
    # Only if its text is encoded as the one token: else the model would be trained on its letters.
    return bos if tokenizer.encode_pieces([bos])[0] == [tokenizer.bos_id] else ""


def find_trained_template(
    cfg: FullFinetuneConfig, tokenizer: Tokenizer, chats: int = 0
) -> str | None:
    """Return the Jinja of the template that rendered a run's conversations, for its exports.

    None: the tokenizer's own files have it, or no sample of the run is a conversation. A template
    that asks for today's date is returned with a fixed date, the one that training used.

    tokenizer: as the run loads it, with the file that tokenizer.chat_template names. chats: number
    of samples that a template rendered; 0: not known, so the formats of the samples decide.
    """
    if not chats and all(
        source.format in FORMATS_WITHOUT_TURNS for source in resolve_sources(cfg.data)
    ):
        return None
    if cfg.data.template == "plain" or tokenizer.chat_template is None:
        return build_plain_jinja(get_eos_text(tokenizer), get_bos_text(tokenizer, cfg.data.add_bos))
    is_dated = tokenizer.dated_template != tokenizer.chat_template
    return tokenizer.dated_template if cfg.tokenizer.chat_template or is_dated else None
