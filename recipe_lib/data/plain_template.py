"""The built-in template, in Python for training and as Jinja for the exports of what it has trained."""

import json
import re
from collections.abc import Sequence

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.schema_data import resolved_sources
from recipe_lib.data.samples import Message
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest, Tokenizer

NO_CALLS = "the plain template has no tool calls; use a tokenizer with a chat template"
NO_TOOLS = "the plain template does not show tools; leave them out, or use a tokenizer with a chat template"
WITHOUT_TURNS = (
    "text",
    "prompt_completion",
)  # formats that no template writes, unless a row of the second has messages

_ANSWER = "Assistant:\n"

# The same as `render_plain`, and the readers' checks of roles and contents, which other programs do not have. BOS and
# EOS are written out: what a tokenizer calls its EOS may be set to something else later.
_JINJA = """\
{%- set ns = namespace(text=BOS, content='', asks=false) -%}
{%- for message in messages -%}
{%- if message['tool_calls'] -%}{{- raise_exception(NO_CALLS) -}}{%- endif -%}
{%- if message['content'] is string -%}
{%- set ns.content = message['content'] -%}
{%- elif message['content'] is defined and message['content'] is iterable and message['content'] is not mapping -%}
{%- set ns.content = '' -%}
{%- for part in message['content'] -%}
{%- if part['type'] != 'text' -%}{{- raise_exception('the plain template takes text alone') -}}{%- endif -%}
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
{%- else -%}{{- raise_exception('unknown role; the plain template has system, user, assistant and tool') -}}
{%- endif -%}
{%- set ns.asks = message['role'] == 'user' or message['role'] == 'tool' -%}
{%- endfor -%}
{%- if ns.asks or add_generation_prompt -%}{%- set ns.text = ns.text + 'Assistant:\\n' -%}{%- endif -%}
{%- for tool in tools or [] -%}
{%- set function = tool['function'] if tool['function'] else tool -%}
{%- if function['name'] is string and function['name'] not in ns.text -%}{{- raise_exception(NO_TOOLS) -}}{%- endif -%}
{%- endfor -%}
{{- ns.text -}}
"""


def render_plain(messages: Sequence[Message], eos: str, bos: str = "", prompt: bool = False) -> str:
    """`User:`, `Tool:` and `Assistant:` on lines of their own before each turn, in any order, EOS after each answer.

    A question that comes last is followed by the prompt for its answer; prompt: whatever comes last is. Raises
    DataError for a tool call."""
    parts = [bos]
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            raise DataError(NO_CALLS)
        written = {
            "system": f"{content}\n\n",
            "assistant": f"{_ANSWER}{content}{eos}",
            "tool": f"Tool:\n{content}\n\n",
        }
        parts.append(written.get(role, f"User:\n{content}\n\n"))
    if prompt or (messages and messages[-1]["role"] in ("user", "tool")):
        parts.append(_ANSWER)
    return "".join(parts)


def plain_or_fault(messages: Sequence[Message], wanted: RenderRequest, eos: str, bos: str) -> str | DataError:
    """One rendering of a conversation, as a tokenizer's `render_chats` gives them."""
    stop, prompt, contents = wanted
    instead = dict(contents)
    replaced = [{**message, "content": instead.get(n, message["content"])} for n, message in enumerate(messages)]
    try:
        return render_plain(replaced[:stop], eos, bos, prompt)
    except DataError as error:
        return error


def plain_jinja(eos: str, bos: str = "") -> str:
    """The Jinja that writes what `render_plain` does, for transformers' `apply_chat_template` and what else reads it.

    It raises an exception where training refuses a sample: tool calls, tools that are not shown, unknown roles.
    """
    values = {"BOS": bos, "EOS": eos, "NO_CALLS": NO_CALLS, "NO_TOOLS": NO_TOOLS}
    return re.sub("|".join(values), lambda name: json.dumps(values[name[0]], ensure_ascii=False), _JINJA)


def eos_text(tokenizer: Tokenizer) -> str:
    """The EOS token as it is written. Raises DataError: there is none."""
    if tokenizer.eos_id is None:
        raise DataError(
            f"{tokenizer.place}: the tokenizer has no EOS token to end an answer with; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer.token_bytes(tokenizer.eos_id).decode()


def bos_text(tokenizer: Tokenizer, add_bos: bool) -> str:
    """What a conversation begins with: BOS as it is written where the tokenizer begins texts with it, else nothing."""
    if not add_bos or tokenizer.bos_id is None or not tokenizer.add_bos_by_default:
        return ""
    bos = tokenizer.token_bytes(tokenizer.bos_id).decode(errors="replace")
    return bos if tokenizer.encode_pieces([bos])[0] == [tokenizer.bos_id] else ""


def trained_template(cfg: FullFinetuneConfig, tokenizer: Tokenizer, chats: int = 0) -> str | None:
    """The template that wrote the conversations of a run, where the tokenizer's own files do not hold it; None: they
    do, or no sample of the run is a conversation. One that asks for today's date has that of training instead.

    tokenizer: as the run loads it, with the file that tokenizer.chat_template names. chats: how many samples a template
    wrote, where that is known; else their formats decide.
    """
    if not chats and all(source.format in WITHOUT_TURNS for source in resolved_sources(cfg.data)):
        return None
    if cfg.data.template == "plain" or tokenizer.chat_template is None:
        return plain_jinja(eos_text(tokenizer), bos_text(tokenizer, cfg.data.add_bos))
    is_own = not cfg.tokenizer.chat_template and tokenizer.dated_template == tokenizer.chat_template
    return None if is_own else tokenizer.dated_template
