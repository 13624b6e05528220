"""Chat templates of today (of trl's wheel, and of REALDATA_DIR), a tokenizer for each, and kinds of
conversations.

The tokenizers are byte-level ones with each template's special tokens; what ends a turn is what the
models' generation_config.json says.
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

TRL, REALDATA = "trl", "realdata"
SPECIAL = re.compile(
    r'<\|[A-Za-z_"]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|<\|(?:START|END)[A-Z_]+\|>|\[gMASK\]|<sop>'
    r"|\[/?[A-Z_]+\]|</?s>"
)
THINKING = "reasoning_content"


@dataclass(frozen=True)
class Template:
    """place: `trl` or `realdata`, and the file. end: what ends an answer, call_end: what ends a
    tool call. thought: the field that it reads thoughts from, empty: none, and then opens: what
    ends a thought that its prompt has begun. tags: it reads them from between tags too. calls: how
    it wants the arguments of tool calls (`object`, `text`; empty: it has none). system: it has
    system messages.
    """

    name: str
    place: str
    file: str
    end: str
    eos: str = ""
    bos: str = "<bos>"
    call_end: str = ""
    thought: str = ""
    calls: str = ""
    opens: str = ""
    tags: bool = True
    system: bool = True


def _of_trl(name: str, end: str, **more: Any) -> Template:
    return Template(name, TRL, name, end, **more)


def _of_realdata(name: str, file: str, end: str, **more: Any) -> Template:
    return Template(name, REALDATA, file, end, **more)


_IM, _EOT, _EOS = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
_THINKS, _TOOLS = {"thought": THINKING}, {"calls": "object"}
_BOTH = _THINKS | _TOOLS
_GEMMA4 = {"end": "<turn|>", "call_end": "<|tool_response>"} | _TOOLS
_R1 = {"opens": "\n</think>\n\n"}
_APART = _THINKS | {"tags": False}
# The text templates that trl 1.16 knows, and a few files more.
TEMPLATES = [
    _of_trl("cohere", "<|END_OF_TURN_TOKEN|>"),
    _of_trl("cohere2", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>"),
    _of_trl("deepseek_r1_distill", _EOS, **_R1),
    _of_trl("deepseekv3", _EOS, calls="text", **_R1),
    _of_trl("diffusion_gemma", **_GEMMA4, **_APART),
    _of_trl("gemma", "<end_of_turn>", system=False),
    _of_trl("gemma3", "<end_of_turn>"),
    _of_trl("gemma4", **_GEMMA4),
    _of_trl("gemma4_v2", "<turn|>", **_TOOLS),
    _of_trl("gemma4_v3", **_GEMMA4),
    _of_trl("gemma4_v4", **_GEMMA4),
    _of_trl("gemma4_v5", **_GEMMA4, **_APART),
    _of_trl("glm4moe", "<|user|>", call_end="<|observation|>", eos="<|endoftext|>", bos="", **_BOTH),
    _of_trl("gptoss", "<|return|>", call_end="<|call|>", bos="", thought="thinking", tags=False, **_TOOLS),
    _of_trl("lfm2", _IM),
    _of_trl("lfm2_2_5", _IM, thought="thinking", **_TOOLS),
    _of_trl("lfm2_2_5_v2", _IM, **_BOTH),
    _of_trl("lfm2_v2", _IM, **_TOOLS),
    _of_trl("llama3", _EOT),
    _of_trl("llama3_1", _EOT, **_TOOLS),
    _of_trl("llama3_2", _EOT, **_TOOLS),
    _of_trl("muse_glimmer", "<|eot|>", **_APART, **_TOOLS),
    _of_trl("nemotron_3_5_lightning", _IM, **_BOTH),
    _of_trl("nemotron_3_nano", _IM, **_BOTH),
    _of_trl("nemotron_3_super", _IM, **_BOTH),
    _of_trl("nemotron_3_ultra", _IM, **_BOTH),
    _of_trl("phi3", "<|end|>", eos="<|endoftext|>", bos=""),
    _of_trl("phi3_5", "<|end|>", eos="<|endoftext|>", bos=""),
    _of_trl("qwen2_5", _IM, bos="", **_TOOLS),
    _of_trl("qwen3", _IM, bos="", **_BOTH),
    _of_trl("qwen3_5_nothink", _IM, bos="", **_BOTH),
    _of_trl("qwen3_5_think", _IM, bos="", **_BOTH),
    _of_trl("qwen3_6", _IM, bos="", **_BOTH),
    _of_trl("qwen3_8", _IM, bos="", **_APART, **_TOOLS),
    _of_trl("qwen3_instruct_2507", _IM, bos="", **_TOOLS),
    _of_realdata("axolotl qwen3", "axolotl/qwen3", _IM, bos="", **_BOTH),
    _of_realdata("axolotl mistral v3", "axolotl/mistral_v2v3", "</s>", bos="<s>", **_TOOLS),
    _of_realdata("axolotl phi_4", "axolotl/phi_4", _IM, bos=""),
    _of_realdata("Command R7B", "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
                 "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>",
                 call_end="<|END_ACTION|><|END_OF_TURN_TOKEN|>", **_TOOLS),
    _of_realdata("R1 Distill Llama", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B", _EOS, **_R1),
    _of_realdata("R1 Distill Qwen", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", _EOS, **_R1),
    _of_realdata("Mistral Nemo", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", "</s>", bos="<s>", **_TOOLS),
    _of_realdata("Phi-3.5", "llama.cpp/microsoft-Phi-3.5-mini-instruct", "<|end|>", eos="<|endoftext|>", bos=""),
    _of_realdata("Llama 3.3", "llama.cpp/meta-llama-Llama-3.3-70B-Instruct", _EOT, **_TOOLS),
]  # fmt: skip
BY_NAME = {template.name: template for template in TEMPLATES}


def source_of(template: Template, training: bool = False) -> str:
    """The template's Jinja; skips a test where the file is not there. training: trl's version with
    `generation`.
    """
    if template.place == TRL:
        found = importlib.util.find_spec("trl")  # its files alone are wanted: it is not imported
        if found is None or not found.submodule_search_locations:
            pytest.skip("trl, whose wheel holds chat templates, is not installed")
        folder = Path(found.submodule_search_locations[0]) / "chat_templates"
        return (folder / f"{template.file}{'_training' if training else ''}.jinja").read_text()
    if "REALDATA_DIR" not in os.environ:
        pytest.skip("REALDATA_DIR is not set")
    return (
        Path(os.environ["REALDATA_DIR"]) / "chat-templates" / f"{template.file}.jinja"
    ).read_text()


def write_tokenizer(
    folder: Path, template: Template, source: str, more: tuple[str, ...] = ()
) -> Path:
    """A tokenizer folder with the template. more: special tokens that it has besides."""
    ends = [
        text for text in (template.eos or template.end, template.end, template.call_end) if text
    ]
    eos = SPECIAL.findall(ends[0])[-1]
    texts = dict.fromkeys(
        [*SPECIAL.findall(source), *(t for end in ends for t in SPECIAL.findall(end)), eos, *more]
    )
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
    stops = sorted({known[SPECIAL.findall(end)[-1]] for end in ends})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
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
_USE = [
    _said("assistant", "", tool_calls=[_CALL]),
    _said("tool", "31", tool_call_id="call00001", name="weather"),
]
# kind -> messages, tools
KINDS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one answer": ([_said("user", "Hot?"), _said("assistant", "Yes, it is.")], None),
    "two answers": (
        [_said("user", "Hot?"), _said("assistant", "Yes."), _said("user", "Dry?"), _said("assistant", "No.")], None
    ),
    "three answers": (
        [_said("user", "Hot?"), _said("assistant", "Yes."), _said("user", "Dry?"), _said("assistant", "No."),
         _said("user", "So?"), _said("assistant", "Stay in.")], None
    ),
    "system, two answers": (
        [_said("system", "Be brief."), _said("user", "Hot?"), _said("assistant", "Yes."), _said("user", "Dry?"),
         _said("assistant", "No.")], None
    ),
    "thought": ([_said("user", "Hot?"), _said("assistant", "Yes.", reasoning_content="It is July.")], None),
    "two thoughts": (
        [_said("user", "Hot?"), _said("assistant", "Yes.", reasoning_content="It is July."), _said("user", "Dry?"),
         _said("assistant", "No.", reasoning_content="It\nrains.")], None
    ),
    "thought in one of two": (
        [_said("user", "Hot?"), _said("assistant", "Yes."), _said("user", "Dry?"),
         _said("assistant", "No.", reasoning_content="It rains.")], None
    ),
    "thoughts in the content": (
        [_said("user", "Hot?"), _said("assistant", "<think>\nIt is July.\n</think>\n\nYes."), _said("user", "Dry?"),
         _said("assistant", "<think>\nIt rains.\n</think>\n\nNo.")], None
    ),
    "tool": ([_said("user", "Hot?"), *_USE, _said("assistant", "Yes.")], [_TOOL]),
    "tool, two questions": (
        [_said("user", "Hot?"), *_USE, _said("assistant", "Yes."), _said("user", "Dry?"), _said("assistant", "No.")],
        [_TOOL],
    ),
    "empty question": (
        [_said("user", ""), _said("assistant", "Yes."), _said("user", "Dry?"), _said("assistant", "No.")], None
    ),
    "white space": (
        [_said("user", " Hot?\n"), _said("assistant", "\n\n Yes. \n"), _said("user", "\n\nDry? "),
         _said("assistant", "  No.\n\n")], None
    ),
    "special tokens as text": (
        [_said("user", "What is {end}?"), _said("assistant", "{end} ends\n{end}"), _said("user", "And {bos}?"),
         _said("assistant", "It begins: {bos}.")], None
    ),
}  # fmt: skip


def filled(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """The messages of a kind with the template's special tokens."""
    text = json.dumps(messages)
    names = {"{end}": template.end, "{bos}": template.bos or "<|im_start|>"}
    for name, value in names.items():
        text = text.replace(name, json.dumps(value)[1:-1])
    return json.loads(text)


def as_expected(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """The messages as the model's own documentation has them: thoughts and arguments where its
    template reads them.
    """
    found = []
    for message in json.loads(json.dumps(messages)):
        thought, content = message.pop(THINKING, None), message["content"]
        if not template.tags and content.startswith("<think>\n"):
            thought, message["content"] = content.removeprefix("<think>\n").split("\n</think>\n\n")
        if thought is not None:
            message[template.thought or THINKING] = thought
        for call in message.get("tool_calls", ()):
            if template.calls != "object":
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        found.append(message)
    return found
