"""Define current chat templates and kinds of conversations, for the tests of label masks.

The templates are files of trl's wheel and of the folder REALDATA_DIR. `write_tokenizer` writes a
byte-level tokenizer with a template and its special tokens; the ids that end a turn stand in its
generation_config.json, as in the models' own.
"""

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizers.made import write_json

TRL = "trl"
REALDATA = "realdata"
# Texts of a template's Jinja that are special tokens.
SPECIAL = re.compile(
    r'<\|[A-Za-z_"]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|<\|(?:START|END)[A-Z_]+\|>|\[gMASK\]|<sop>'
    r"|\[/?[A-Z_]+\]|</?s>"
)
THINKING = "reasoning_content"  # the field of a message that most templates read thoughts from


@dataclass(frozen=True)
class Template:
    """A chat template, and what its model's documentation says of it."""

    name: str
    place: str  # TRL or REALDATA
    file: str  # its path under `chat_templates` or `chat-templates`, without .jinja
    end: str  # text that ends an answer
    eos: str = ""  # text of which the last special token is EOS; empty: `end`
    bos: str = "<bos>"  # empty: none
    call_end: str = ""  # text that ends a tool call; empty: `end`
    thought: str = ""  # field of a message that it reads thoughts from; empty: none
    calls: str = ""  # how it wants the arguments of tool calls: `object`, `text`; empty: no calls
    opens: str = ""  # text that ends a thought which the generation prompt has begun; empty: none
    tags: bool = True  # it reads thoughts from between <think> tags of the content too
    system: bool = True  # it accepts system messages


def make_trl_template(name: str, end: str, **more: Any) -> Template:
    """Return a template of trl's wheel. more: further fields."""
    return Template(name=name, place=TRL, file=name, end=end, **more)


def make_real_template(name: str, file: str, end: str, **more: Any) -> Template:
    """Return a template of REALDATA_DIR. more: further fields."""
    return Template(name=name, place=REALDATA, file=file, end=end, **more)


# Ends of answers, and fields that several templates share.
_IM = "<|im_end|>"
_EOT = "<|eot_id|>"
_EOS = "<｜end▁of▁sentence｜>"
_THINKS = {"thought": THINKING}
_TOOLS = {"calls": "object"}
_BOTH = _THINKS | _TOOLS
_GEMMA4 = {"end": "<turn|>", "call_end": "<|tool_response>"} | _TOOLS
_R1 = {"opens": "\n</think>\n\n"}
_APART = _THINKS | {"tags": False}
# The text templates that trl 1.16 knows, and a few files more.
TEMPLATES = [
    make_trl_template("cohere", "<|END_OF_TURN_TOKEN|>"),
    make_trl_template("cohere2", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>"),
    make_trl_template("deepseek_r1_distill", _EOS, **_R1),
    make_trl_template("deepseekv3", _EOS, calls="text", **_R1),
    make_trl_template("diffusion_gemma", **_GEMMA4, **_APART),
    make_trl_template("gemma", "<end_of_turn>", system=False),
    make_trl_template("gemma3", "<end_of_turn>"),
    make_trl_template("gemma4", **_GEMMA4),
    make_trl_template("gemma4_v2", "<turn|>", **_TOOLS),
    make_trl_template("gemma4_v3", **_GEMMA4),
    make_trl_template("gemma4_v4", **_GEMMA4),
    make_trl_template("gemma4_v5", **_GEMMA4, **_APART),
    make_trl_template("glm4moe", "<|user|>", call_end="<|observation|>", eos="<|endoftext|>", bos="", **_BOTH),
    make_trl_template("gptoss", "<|return|>", call_end="<|call|>", bos="", thought="thinking", tags=False, **_TOOLS),
    make_trl_template("lfm2", _IM),
    make_trl_template("lfm2_2_5", _IM, thought="thinking", **_TOOLS),
    make_trl_template("lfm2_2_5_v2", _IM, **_BOTH),
    make_trl_template("lfm2_v2", _IM, **_TOOLS),
    make_trl_template("llama3", _EOT),
    make_trl_template("llama3_1", _EOT, **_TOOLS),
    make_trl_template("llama3_2", _EOT, **_TOOLS),
    make_trl_template("muse_glimmer", "<|eot|>", **_APART, **_TOOLS),
    make_trl_template("nemotron_3_5_lightning", _IM, **_BOTH),
    make_trl_template("nemotron_3_nano", _IM, **_BOTH),
    make_trl_template("nemotron_3_super", _IM, **_BOTH),
    make_trl_template("nemotron_3_ultra", _IM, **_BOTH),
    make_trl_template("phi3", "<|end|>", eos="<|endoftext|>", bos=""),
    make_trl_template("phi3_5", "<|end|>", eos="<|endoftext|>", bos=""),
    make_trl_template("qwen2_5", _IM, bos="", **_TOOLS),
    make_trl_template("qwen3", _IM, bos="", **_BOTH),
    make_trl_template("qwen3_5_nothink", _IM, bos="", **_BOTH),
    make_trl_template("qwen3_5_think", _IM, bos="", **_BOTH),
    make_trl_template("qwen3_6", _IM, bos="", **_BOTH),
    make_trl_template("qwen3_8", _IM, bos="", **_APART, **_TOOLS),
    make_trl_template("qwen3_instruct_2507", _IM, bos="", **_TOOLS),
    make_real_template("axolotl qwen3", "axolotl/qwen3", _IM, bos="", **_BOTH),
    make_real_template("axolotl mistral v3", "axolotl/mistral_v2v3", "</s>", bos="<s>", **_TOOLS),
    make_real_template("axolotl phi_4", "axolotl/phi_4", _IM, bos=""),
    make_real_template("Command R7B", "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
                 "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>",
                 call_end="<|END_ACTION|><|END_OF_TURN_TOKEN|>", **_TOOLS),
    make_real_template("R1 Distill Llama", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B", _EOS, **_R1),
    make_real_template("R1 Distill Qwen", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", _EOS, **_R1),
    make_real_template("Mistral Nemo", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", "</s>", bos="<s>", **_TOOLS),
    make_real_template("Phi-3.5", "llama.cpp/microsoft-Phi-3.5-mini-instruct", "<|end|>", eos="<|endoftext|>", bos=""),
    make_real_template("Llama 3.3", "llama.cpp/meta-llama-Llama-3.3-70B-Instruct", _EOT, **_TOOLS),
]  # fmt: skip
BY_NAME = {template.name: template for template in TEMPLATES}


def read_source(template: Template, training: bool = False) -> str:
    """Return the template's Jinja; skip the test without trl or REALDATA_DIR.

    training: trl's version, which marks answers with `{% generation %}`.
    """
    if template.place == TRL:
        trl = importlib.util.find_spec("trl")  # only its files are read: it is not imported
        if trl is None or not trl.submodule_search_locations:
            pytest.skip("trl, whose wheel holds chat templates, is not installed")
        folder = Path(trl.submodule_search_locations[0]) / "chat_templates"
        return (folder / f"{template.file}{'_training' if training else ''}.jinja").read_text()
    if "REALDATA_DIR" not in os.environ:
        pytest.skip("REALDATA_DIR is not set")
    folder = Path(os.environ["REALDATA_DIR"]) / "chat-templates"
    return (folder / f"{template.file}.jinja").read_text()


def write_tokenizer(
    folder: Path, template: Template, source: str, more: tuple[str, ...] = ()
) -> Path:
    """Write a tokenizer with the template into `folder` and return it.

    source: the template's Jinja. more: further special tokens.
    """
    # Texts that end a turn; the first one has EOS.
    ends = [
        text for text in (template.eos or template.end, template.end, template.call_end) if text
    ]
    eos = SPECIAL.findall(ends[0])[-1]
    texts = dict.fromkeys(SPECIAL.findall(source))  # a set that keeps its order
    for end in ends:
        texts |= dict.fromkeys(SPECIAL.findall(end))
    texts |= dict.fromkeys([eos, *more])
    if template.bos:
        texts[template.bos] = None
    write_json(folder, template=source, bos_token=template.bos or None, eos_token=eos)
    content = json.loads((folder / "tokenizer.json").read_text())
    known = {token["content"]: token["id"] for token in content["added_tokens"]}
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    for text in texts:
        if text not in known:
            known[text] = max([*content["model"]["vocab"].values(), *known.values()]) + 1
            content["added_tokens"].append({"id": known[text], "content": text, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    # Generation stops at the last special token of each.
    stops = sorted({known[SPECIAL.findall(end)[-1]] for end in ends})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Return a message. more: further keys."""
    return {"role": role, "content": content, **more}


_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}},
                       "required": ["city"]},
        "return": {"type": "string"},
    },
}  # fmt: skip
_USE = [  # a call of the tool and its result
    say("assistant", "", tool_calls=[_CALL]),
    say("tool", "31", tool_call_id="call00001", name="weather"),
]
# Kind of conversation -> (messages, tools). `{end}` and `{bos}` stand for the template's own.
KINDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one answer": ([say("user", "Hot?"), say("assistant", "Yes, it is.")], None),
    "two answers": (
        [say("user", "Hot?"), say("assistant", "Yes."), say("user", "Dry?"), say("assistant", "No.")], None
    ),
    "three answers": (
        [say("user", "Hot?"), say("assistant", "Yes."), say("user", "Dry?"), say("assistant", "No."),
         say("user", "So?"), say("assistant", "Stay in.")], None
    ),
    "system, two answers": (
        [say("system", "Be brief."), say("user", "Hot?"), say("assistant", "Yes."), say("user", "Dry?"),
         say("assistant", "No.")], None
    ),
    "thought": ([say("user", "Hot?"), say("assistant", "Yes.", reasoning_content="It is July.")], None),
    "two thoughts": (
        [say("user", "Hot?"), say("assistant", "Yes.", reasoning_content="It is July."), say("user", "Dry?"),
         say("assistant", "No.", reasoning_content="It\nrains.")], None
    ),
    "thought in one of two": (
        [say("user", "Hot?"), say("assistant", "Yes."), say("user", "Dry?"),
         say("assistant", "No.", reasoning_content="It rains.")], None
    ),
    "thoughts in the content": (
        [say("user", "Hot?"), say("assistant", "<think>\nIt is July.\n</think>\n\nYes."), say("user", "Dry?"),
         say("assistant", "<think>\nIt rains.\n</think>\n\nNo.")], None
    ),
    "tool": ([say("user", "Hot?"), *_USE, say("assistant", "Yes.")], [_TOOL]),
    "tool, two questions": (
        [say("user", "Hot?"), *_USE, say("assistant", "Yes."), say("user", "Dry?"), say("assistant", "No.")],
        [_TOOL],
    ),
    "empty question": (
        [say("user", ""), say("assistant", "Yes."), say("user", "Dry?"), say("assistant", "No.")], None
    ),
    "white space": (
        [say("user", " Hot?\n"), say("assistant", "\n\n Yes. \n"), say("user", "\n\nDry? "),
         say("assistant", "  No.\n\n")], None
    ),
    "special tokens as text": (
        [say("user", "What is {end}?"), say("assistant", "{end} ends\n{end}"), say("user", "And {bos}?"),
         say("assistant", "It begins: {bos}.")], None
    ),
}  # fmt: skip


def fill_in_tokens(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """Return the messages with the template's tokens in place of `{end}` and `{bos}`."""
    text = json.dumps(messages)
    names = {"{end}": template.end, "{bos}": template.bos or "<|im_start|>"}
    for name, value in names.items():
        text = text.replace(name, json.dumps(value)[1:-1])  # escaped, without quotes
    return json.loads(text)


def place_thoughts(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """Return a copy of the messages as the model's own documentation has them.

    Thoughts stand in the field that the template reads, and arguments of calls in its form.
    """
    placed = []
    for message in json.loads(json.dumps(messages)):  # a deep copy
        thought = message.pop(THINKING, None)
        content = message["content"]
        if not template.tags and content.startswith("<think>\n"):
            thought, message["content"] = content.removeprefix("<think>\n").split("\n</think>\n\n")
        if thought is not None:
            message[template.thought or THINKING] = thought
        for call in message.get("tool_calls", ()):
            if template.calls != "object":
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        placed.append(message)
    return placed
