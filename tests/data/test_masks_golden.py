"""What the loss counts with the templates of real models, row by row, and that renderings and ids
are transformers'.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import Conversation
from tests.data import masks_cases
from tests.data.masks_cases import CASES, HOT, MILD, ROWS, THOUGHT
from tests.selection import mark_slow_but, mark_slow_except
from tests.tokenizers.made import render

NAMES = [case.name for case in CASES]
REFUSED = "refused: "
TOOLS = "messages with tools"
LEFT_OUT = REFUSED + "tool call left out"
OBJECTS = REFUSED + "refused by the chat template"
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MISTRAL_CALL = '[{"name": "weather", "arguments": {"city": "Rome"}, "id": "call00001"}]</s>'
QWEN3_CALL = "<think>\n\n</think>\n\n" + QWEN_CALL
NO_THOUGHT = "<think>\n\n</think>\n\n"

# name -> how an answer is written, what is trained of the row with tools, columns that are another
# matter
EXPECTED: dict[str, tuple[str, list[str] | str, dict[str, list[str] | str]]] = {
    "Llama 2": (" {} </s>", OBJECTS, {}),
    "Llama 3": ("{}<|eot_id|>", LEFT_OUT, {}),
    "Llama 3.1": ("{}<|eot_id|>", [LLAMA_CALL + "<|eot_id|>", HOT + "<|eot_id|>"], {}),
    "Llama 3.2": ("{}<|eot_id|>", [LLAMA_CALL + "<|eot_id|>", HOT + "<|eot_id|>"], {}),
    "Qwen2.5": ("{}<|im_end|>", [QWEN_CALL + "<|im_end|>", HOT + "<|im_end|>"], {}),
    "Qwen3": (
        NO_THOUGHT + "{}<|im_end|>",
        [QWEN3_CALL + "<|im_end|>", "|", NO_THOUGHT + HOT + "<|im_end|>"],
        {
            "sharegpt, two answers": [
                NO_THOUGHT + HOT + "<|im_end|>",
                "|",
                NO_THOUGHT + MILD + "<|im_end|>",
            ],
            "messages with thoughts, two answers": [
                THOUGHT + HOT + "<|im_end|>",
                "|",
                THOUGHT + MILD + "<|im_end|>",
            ],
        },
    ),
    "Mistral v1": (" {}</s>", OBJECTS, {}),
    "Mistral v3": (" {}</s>", ["[TOOL_CALLS] " + MISTRAL_CALL, f" {HOT}</s>"], {}),
    "Mistral Nemo": ("{}</s>", ["[TOOL_CALLS]" + MISTRAL_CALL, HOT + "</s>"], {}),
    "Gemma 2": ("{}<end_of_turn>", OBJECTS, {"messages with system": OBJECTS}),
    "Gemma 3": ("{}<end_of_turn>", OBJECTS, {}),
    "Phi-3": ("{}<|end|>", LEFT_OUT, {}),
    "Phi-4": ("{}<|im_end|>", LEFT_OUT, {}),
    "ChatML": ("{}<|im_end|>", LEFT_OUT, {}),
    "Hermes 3": (
        "",
        [QWEN_CALL + "<|im_end|>", HOT + "<|im_end|>"],
        dict.fromkeys([*(row for row in ROWS if row != TOOLS), "preference"], OBJECTS),
    ),
    "none: plain": ("{}<|endoftext|>", OBJECTS, {}),
}


@pytest.fixture(scope="module")
def folder_of(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("case") / "folder"
            made[name] = masks_cases.write_folder(CASES[NAMES.index(name)], realdata, folder)
        return made[name]

    return get


@pytest.fixture(scope="module")
def encoder_of(folder_of: Callable[[str], Path]) -> Callable[..., Encoder]:
    loaded: dict[str, Any] = {}

    def get(name: str, train_on: str | list[str] = "assistant") -> Encoder:
        if name not in loaded:
            loaded[name] = masks_cases.load_tokenizer(folder_of(name))
        return Encoder(loaded[name], "auto", train_on)

    return get


@pytest.mark.parametrize("name", mark_slow_but(NAMES, 5))
def test_what_is_trained(name: str, encoder_of: Callable[..., Encoder]):
    written, tools, others = EXPECTED[name]
    expected: dict[str, list[str] | str] = {
        "alpaca": [written.format(HOT)],
        "sharegpt, two answers": [written.format(HOT), written.format(MILD)],
        "messages with system": [written.format(HOT)],
        TOOLS: tools,
        "messages with thoughts, two answers": [
            written.format(THOUGHT + HOT),
            written.format(THOUGHT + MILD),
        ],
        "preference": [written.format(HOT), written.format(MILD)],
    }
    encoder = encoder_of(name)
    assert {
        column: masks_cases.describe_outcome(encoder, column) for column in expected
    } == expected | others


def test_the_last_answer_alone(encoder_of: Callable[..., Encoder]):
    """Qwen3 drops the thoughts of all answers but those behind the last question."""
    encoder = encoder_of("Qwen3", "last")
    for column, before in (
        ("sharegpt, two answers", NO_THOUGHT),
        ("messages with thoughts, two answers", THOUGHT),
    ):
        assert masks_cases.describe_outcome(encoder, column) == [before + MILD + "<|im_end|>"]
    assert masks_cases.describe_outcome(encoder, TOOLS) == [NO_THOUGHT + HOT + "<|im_end|>"]


def parsed(sample: Conversation) -> list[dict[str, Any]]:
    """The messages as transformers wants them: arguments of tool calls as objects."""
    messages = json.loads(json.dumps(list(sample.messages)))
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize(
    "name",
    mark_slow_except(
        ["Llama 3.1", "Qwen3", "Mistral v3", "ChatML", "Llama 2", "Gemma 2"],
        ["Llama 3.1", "Qwen3", "Mistral v3", "ChatML"],
    ),
)
def test_the_whole_rendering_is_that_of_transformers(name, encoder_of, folder_of, real_folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = encoder_of(name).tokenizer
    has_json = (folder_of(name) / "tokenizer.json").is_file()
    reference = transformers.AutoTokenizer.from_pretrained(
        str(folder_of(name) if has_json else real_folder("gpt2"))
    )
    if not has_json:  # only the text can be compared: the special tokens that templates ask for
        special = {role: tokenizer.get_token_bytes(i).decode() for role, i in
                   (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)) if i is not None}  # fmt: skip
        reference.add_special_tokens(special)
    compared = 0
    for column in ROWS:
        sample = masks_cases.read_row(column)
        if isinstance(masks_cases.describe_outcome(encoder_of(name), column), str):
            continue
        for tools, prompt in ((sample.tools, False), (sample.tools, True)):
            asked = {
                "chat_template": tokenizer.chat_template, "tools": tools, "date_string": "26 Jul 2024",
                "add_generation_prompt": prompt,
            }  # fmt: skip
            expected = reference.apply_chat_template(parsed(sample), tokenize=False, **asked)
            assert render(tokenizer.render_chats, parsed(sample), prompt, sample.tools) == expected
            compared += 1
            if has_json:
                ids = reference.apply_chat_template(parsed(sample), return_dict=False, **asked)
                assert tokenizer.encode(expected, allow_special=True) == ids
                encoded = encoder_of(name, "all").encode(sample).ids
                assert prompt or encoded == ids[: len(encoded)]
    assert compared >= 4


@pytest.mark.slow
def test_the_table_of_the_documentation_is_up_to_date(encoder_of: Callable[..., Encoder]):
    written = (Path(masks_cases.__file__).parents[2] / "docs" / "masks.md").read_text()
    made = masks_cases.build_page(encoder_of(name) for name in NAMES)
    assert written == made, "python -m tests.data.masks_cases > docs/masks.md"
