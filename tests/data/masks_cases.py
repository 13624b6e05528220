"""Write docs/masks.md: which tokens of a conversation are labels, with real chat templates.

    REALDATA_DIR=... python -m tests.data.masks_cases > docs/masks.md

REALDATA_DIR has the tokenizers and templates. Where a model's own vocabulary is not there, another
one with its special tokens added stands in: labels depend on template and special tokens alone.
"""

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.config.registry import get_registered
from recipe_lib.data.label_masks import Encoded, Encoder
from recipe_lib.data.samples import Preference, Sample, SampleFault
from recipe_lib.tokenizers import load_tokenizer

# The format that Meta has documented for Llama 2; its files came without a template.
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content +"
    " '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set"
    " turns = messages %}{% endif %}{% for turn in turns %}{% set said = (system if loop.first else"
    " '') + turn.content | trim %}{% if turn.role == 'user' %}{{ bos_token + '[INST] ' + said + '"
    " [/INST]' }}{% elif turn.role == 'assistant' %}{{ ' ' + said + ' ' + eos_token }}{% else %}{{"
    " raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Case:
    """A model's chat template, and a tokenizer for it."""

    name: str  # of the model, as the table shows it
    tokenizer: str  # folder, or FOLDER/FILE, under `tokenizers` of REALDATA_DIR
    # `jinja:FILE` under `chat-templates`, `config:FOLDER` whose tokenizer_config.json has it, the
    # Jinja text itself, or empty for the tokenizer's own.
    template: str = ""
    config: str = ""  # folder whose JSON files replace the tokenizer's; empty: none
    extra: tuple[str, ...] = ()  # special tokens that the tokenizer lacks
    bos: str = ""  # empty: the tokenizer's own
    eos: str = ""  # empty: the tokenizer's own


# Special tokens of Mistral's tokenizers.
MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "<s>", "</s>")  # fmt: skip
CASES = [
    Case("Llama 2", "llama2/tokenizer.model", LLAMA2, bos="<s>", eos="</s>"),
    Case("Llama 3", "llama3"),
    Case("Llama 3.1", "llama3_1", "jinja:llama.cpp/meta-llama-Llama-3.1-8B-Instruct"),
    Case("Llama 3.2", "llama3_1", "config:tokenizers/llama3_2"),
    Case("Qwen2.5", "qwen2_5"),
    Case("Qwen3", "qwen2_5", config="tokenizers/qwen3"),
    Case("Mistral v1", "mistral/tokenizer.model.v1", "jinja:axolotl/mistral_v1", bos="<s>", eos="</s>"),
    Case("Mistral v3", "mistral/mistral_instruct_tokenizer_240323.model.v3",
         "config:hf-layouts/mistral-7b-instruct-v0.3", bos="<s>", eos="</s>"),
    Case("Mistral Nemo", "gpt2", "config:tokenizers/mistral_nemo", extra=MISTRAL, bos="<s>", eos="</s>"),
    Case("Gemma 2", "gemma2", "jinja:llama.cpp/google-gemma-2-2b-it"),
    Case("Gemma 3", "gemma2", "config:tokenizers/gemma3"),
    Case("Phi-3", "llama2/tokenizer.model", config="hf-layouts/phi-3-mini-merge"),
    Case("Phi-4", "gpt2", "jinja:axolotl/phi_4", extra=("<|im_start|>", "<|im_sep|>", "<|im_end|>"), eos="<|im_end|>"),
    Case("ChatML", "smollm2", "jinja:axolotl/chatml"),
    Case("Hermes 3", "llama3_1", "jinja:llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
         extra=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>"),
    Case("none: plain", "gpt2"),
]  # fmt: skip

# Two questions and their answers.
HOT = "It is 31 degrees."
MILD = "It is 18 degrees."
ASKS = ["How hot is it in Rome?", "And in Oslo?"]
THOUGHT = "<think>\nI look it up.\n</think>\n\n"  # reasoning, which an answer begins with
# A tool, as `tools` of a row has it, and an answer's call of it.
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Temperature of a city.",
        "parameters": {"type": "object"},
    },
}
CALL = {
    "id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}  # fmt: skip


def say_turns(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """Return the messages of (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in turns]


_FIRST = [("user", ASKS[0]), ("assistant", HOT)]  # (role, content) of the first two turns
_SECOND = [("user", ASKS[1]), ("assistant", MILD)]
# Column of the table -> (value of `data.format`, row).
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "alpaca": ("alpaca", {"instruction": ASKS[0], "output": HOT}),
    "sharegpt, two answers": (
        "sharegpt",
        {"conversations": [
            {"from": "human", "value": ASKS[0]}, {"from": "gpt", "value": HOT},
            {"from": "human", "value": ASKS[1]}, {"from": "gpt", "value": MILD},
        ]},
    ),
    "messages with system": ("messages", {"messages": say_turns(("system", "Be brief."), *_FIRST)}),
    "messages with tools": (
        "messages",
        {
            "messages": [
                *say_turns(_FIRST[0]), {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "31", "tool_call_id": "call00001", "name": "weather"},
                *say_turns(_FIRST[1]),
            ],
            "tools": [TOOL],
        },
    ),
    "messages with thoughts, two answers": (
        "messages",
        {"messages": say_turns(_FIRST[0], ("assistant", THOUGHT + HOT), _SECOND[0], ("assistant", THOUGHT + MILD))},
    ),
}  # fmt: skip
# Question, chosen answer, rejected answer: the column `preference`.
PAIR = Preference(say_turns(_FIRST[0]), say_turns(_FIRST[1]), say_turns(("assistant", MILD)))


def write_folder(case: Case, realdata: Path, folder: Path) -> Path:
    """Write a case's tokenizer as a checkpoint has it.

    Returns what `load_tokenizer` reads: the folder, or the one file of a case that names it.
    """
    name, _, single_file = case.tokenizer.partition("/")
    folder.mkdir(parents=True)
    for file in (realdata / "tokenizers" / name).iterdir():
        if single_file and file.name != single_file:
            continue
        packed = file.suffix == ".gz"
        content = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
        (folder / (file.stem if packed else file.name)).write_bytes(content)
    config_file = folder / "tokenizer_config.json"
    if case.config:
        for file in (realdata / case.config).glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    if case.bos:
        config["bos_token"] = case.bos
    if case.eos:
        config["eos_token"] = case.eos
    kind, _, path = case.template.partition(":")
    if kind == "jinja":
        config["chat_template"] = (realdata / "chat-templates" / f"{path}.jinja").read_text()
    elif kind == "config":
        other_config = json.loads((realdata / path / "tokenizer_config.json").read_text())
        config["chat_template"] = other_config["chat_template"]
    elif case.template:
        config["chat_template"] = case.template
    config_file.write_text(json.dumps(config))
    if case.extra:
        _add_tokens(folder / "tokenizer.json", case.extra)
    return folder / single_file if single_file else folder


def _add_tokens(file: Path, texts: tuple[str, ...]) -> None:
    """Add special tokens to a tokenizer.json, with the ids after its last one."""
    content = json.loads(file.read_text())
    known_ids = list(content["model"]["vocab"].values())
    known_ids += [token["id"] for token in content["added_tokens"]]
    first_id = 1 + max(known_ids)
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    content["added_tokens"] += [
        {"id": token_id, "content": text, **flags} for token_id, text in enumerate(texts, first_id)
    ]
    file.write_text(json.dumps(content))


def read_row(column: str) -> Sample:
    """Return the row of one of ROWS as its format reads it."""
    name, row = ROWS[column]
    return get_registered("data.format", name)(row)


def list_trained_texts(encoder: Encoder, encoded: Encoded) -> list[str]:
    """Return the text of each run of consecutive trained ids, that is of label tokens."""
    tokenizer = encoder.tokenizer
    runs: list[list[int]] = []  # [start, end)
    for position, trained in enumerate(encoded.trained):
        # Position 0 is never trained: every row begins with a prompt.
        if trained and not encoded.trained[position - 1]:
            runs.append([position, position])
        if trained:
            runs[-1][1] = position + 1
    texts = []
    for start, end in runs:
        # Decoded with the ids before it, on which the text of a first token may depend.
        prefix = tokenizer.decode(encoded.ids[:start])
        texts.append(tokenizer.decode(encoded.ids[:end]).removeprefix(prefix))
    return texts


def describe_outcome(encoder: Encoder, column: str) -> list[str] | str:
    """Return the texts of a row's label tokens, or why the row is refused.

    column: of ROWS, or `preference`. With several sequences `|` stands between their texts.
    """
    texts: list[str] = []
    try:
        if column == "preference":
            for encoded in encoder.encode_answers(PAIR):
                texts += list_trained_texts(encoder, encoded)
            return texts
        for number, encoded in enumerate(encoder.encode_sample(read_row(column)).sequences):
            if number:
                texts.append("|")
            texts += list_trained_texts(encoder, encoded)
        return texts
    except SampleFault as fault:
        return f"refused: {fault.cause}"


HEAD = """# Label masking

Label tokens, those that the loss counts, are the answers of the assistant, each from the first token after the
generation prompt up to and including the token that ends the turn. `data.train_on` chooses others: `last`, `all`, or a
list of roles such as `[assistant, tool]`. A message with `train: false` is left out and one with `train: true` is
included, whatever its role. Whatever `data.train_on` says, the labels in
`prompt_completion` are the completion and the EOS token after it. In `text` they are every token but the first, and the
EOS token after it; in `preference` the chosen and the rejected answer. A completion or text that ends with an end token
has no second one after it.

An answer is located by two renderings of the chat template: of the conversation before it, with the generation prompt,
and of the conversation in which it comes last. What the second adds to the first is what a model must write, and it
ends with the last token of that. For Command R7B this is `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`, for
gpt-oss `<|return|>`, or `<|call|>` after a tool call. A newline after that is not a label, nor an EOS that the template
puts after the whole conversation. GLM-4.5 writes no end of turn: the first token of the next turn ends the answer
(`<|user|>`, or `<|observation|>` after a tool call), and that is a label.

## Templates that rewrite history

Many templates drop the reasoning of earlier turns, write the last answer with another end, or move the system message.
One sequence cannot hold all answers of such a conversation as they are generated. With `data.history: auto` the answers
that fit into one sequence share it, and each of the others gets a separate sequence, which ends with it. The turns
before it are rendered as for generation and are not labels. Where nothing is rewritten a conversation stays one
sequence. The log says how many conversations became how many sequences, and what that costs in tokens; `data.packing`
packs them with others. `split` gives every answer a separate sequence, and `refuse` makes a sample invalid if the
template rewrites history, with the first token that differs.

Each sequence counts separately: for `batch_size`, the steps of an epoch, a source's weight, `max_seq_len`, validation,
duplicates. Two conversations that begin alike may have a sequence in common. Other roles than the assistant can be
labels only where one sequence holds the conversation (`data.train_on: [user, assistant]`).

## Reasoning

Reasoning is between `<think>` and `</think>` at the beginning of an answer, or in the message's `reasoning_content`,
`thinking` or `reasoning`. It is passed in the field that the template reads: `thinking` for gpt-oss,
`reasoning_content` for Qwen3. If a template reads none of these fields, the sample is refused, since a part of the
answer would be left out.

Some templates end the prompt with `<think>` (DeepSeek-R1, Qwen3.5, Nemotron 3). The labels are what a model must write
after that: the reasoning, `</think>`, the answer; without reasoning, `</think>` and the answer. The end of the
reasoning is written as the template does; DeepSeek's drops reasoning, and there it is a newline, `</think>` and an
empty line. Where the prompt ends with finished reasoning (`<think>`, `</think>`), an answer without any is trained
after it, and one with reasoning after the prompt that the template has for thinking enabled (`enable_thinking`).

## Templates that mark answers

Some templates mark with `{% generation %}` what an answer is. The labels are then what is marked, as in transformers'
`return_assistant_tokens_mask`. The log and `tune data check` say in how many answers it differs from what the
generation prompt asks for, with the first of them. That is `generation-marks`: the mark begins before the end of the
prompt, or does not contain the end of the turn.

## What is refused

A sample is refused if the template rejects it, if the rendering leaves out a part of an answer, a tool call, or the
tools, or if an answer does not continue its prompt. `data.on_invalid: skip` counts such samples and continues. An
answer whose last token does not stop generation (EOS, those in `generation_config.json`, what ends the template's turn)
is trained on, and `tune data check` counts it (`untrained-ends`).

## Real templates

The table has the label tokens of one sample of each kind with real templates. `A` and `B` are the first and the second
answer, `T` is `<think>`, reasoning and `</think>`, and ` ` before an answer is written by the template; *and* separates
sequences. Made by `python -m tests.data.masks_cases`. `tests/data/test_history.py` compares those of trl and others
with what transformers renders for generation.
"""


def format_cell(outcome: list[str] | str) -> str:
    """Return a cell of the table. outcome: what `describe_outcome` returns."""
    if isinstance(outcome, str):
        return outcome.replace("refused by the chat template", "the template objects")
    lines = []
    for text in outcome:
        short = text.replace(THOUGHT, "T").replace(HOT, "A").replace(MILD, "B")
        escaped = short.replace("\n", "\\n").replace("|", "\\|")
        lines.append("*and*" if text == "|" else f"`{escaped}`")
    return "<br>".join(lines)


def build_page(encoders: Iterable[Encoder]) -> str:
    """Return the text of docs/masks.md. encoders: one for each of CASES, in order."""
    columns = [*ROWS, "preference"]
    lines = [HEAD, f"| template | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for case, encoder in zip(CASES, encoders, strict=True):
        cells = [format_cell(describe_outcome(encoder, column)) for column in columns]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    realdata = Path(os.environ["REALDATA_DIR"])
    with tempfile.TemporaryDirectory() as root:
        folders = [write_folder(case, realdata, Path(root) / case.name) for case in CASES]
        # "auto": with the tokenizer's chat template, and without it as plain text.
        sys.stdout.write(build_page(Encoder(load_tokenizer(folder), "auto") for folder in folders))
