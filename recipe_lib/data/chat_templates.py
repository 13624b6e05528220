"""Conversations written out, by the tokenizer's chat template or by the built-in plain one.

`Template` is what writes them for one tokenizer, `RenderedChat` one conversation with its
renderings. The plain template exists twice: in Python for training, and as Jinja for the exports of
what it has trained.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.schema_data import resolve_sources
from recipe_lib.data.escaping import Escape, SpecialTokens, encode_escaped
from recipe_lib.data.samples import Conversation, Message, SampleFault
from recipe_lib.data.thinking import TemplateFeatures, probe_template
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer
from recipe_lib.tokenizers.chat_template import TurnEnd

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
            return self.tokenizer.render_chats(messages, requests, tools, options)
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
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            raise DataError(NO_CALLS)
        turns = {
            "system": f"{content}\n\n",
            "assistant": f"{_ANSWER}{content}{eos}",
            "tool": f"Tool:\n{content}\n\n",
        }
        parts.append(turns.get(role, f"User:\n{content}\n\n"))
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
