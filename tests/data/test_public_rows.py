"""Rows with the columns of public datasets, as they are published: read, and nothing trained but
what they say.
"""

import json
from typing import Any

import pytest

from recipe_lib.config.schema_data import SourceConfig
from recipe_lib.data.find_format import find_format
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.data.row_cases import encode, write_tokenizer_folder

ASK = {"role": "user", "content": "Name a city."}
SAY = {"role": "assistant", "content": "Lima."}
BAD = {"role": "assistant", "content": "A fish."}
SHARE = [{"from": "human", "value": "Name a city."}, {"from": "gpt", "value": "Lima."}]
TOOL = {"name": "weather", "description": "Of a city.", "parameters": {"city": {"type": "str"}}}
# name -> samples of the recipe, format, row
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "alpaca": ("answers", "alpaca", {
        "instruction": "Name a city.", "input": "", "output": "Lima.",
        "text": "Below is an instruction that describes.\n\n### Instruction:\nName a city.\n\n### Response:\nLima.",
    }),
    "alpaca-cleaned": ("answers", "alpaca", {"output": "Lima.", "instruction": "Name a city.", "input": ""}),
    "ultrachat_200k": ("answers", "messages", {"prompt": "Name a city.", "prompt_id": "a1", "messages": [ASK, SAY]}),
    "no_robots": ("answers", "messages", {
        "prompt": "Name a city.", "prompt_id": "a1", "messages": [ASK, SAY], "category": "Open QA"}),
    "tulu-3": ("answers", "messages", {"id": "a_1", "messages": [ASK, SAY], "source": "ai2-adapt-dev/x"}),
    "OpenHermes-2.5": ("answers", "sharegpt", {
        "custom_instruction": None, "topic": None, "model_name": None, "model": "gpt-4",
        "skip_prompt_formatting": False,
        "category": "orca", "conversations": SHARE, "views": None, "language": None, "id": None, "title": None,
        "idx": None, "hash": None, "avatarUrl": None, "system_prompt": None, "source": "airoboros2.2"}),
    "SlimOrca": ("answers", "sharegpt", {"conversations": [
        {"from": "system", "value": "Be brief.", "weight": None}, SHARE[0] | {"weight": 0.0},
        SHARE[1] | {"weight": 1.0}]}),
    "FineTome": ("answers", "sharegpt", {"conversations": SHARE, "source": "a", "score": 5.2}),
    "LIMA": ("answers", "sharegpt", {"conversations": ["Name a city.", "Lima."], "source": "stackexchange"}),
    "smoltalk": ("answers", "messages", {"messages": [ASK, SAY], "source": "smol-magpie", "full_topic": "a/b"}),
    "smoltalk2": ("answers", "messages", {"messages": [ASK, SAY], "source": "x", "chat_template_kwargs": {
        "custom_instructions": "", "enable_thinking": False, "python_tools": [], "xml_tools": []}}),
    "hermes-function-calling": ("answers", "sharegpt", {
        "id": "u", "conversations": SHARE, "tools": json.dumps([{"type": "function", "function": TOOL}]),
        "category": "IoT", "subcategory": "Cameras", "task": "View a camera"}),
    "ultrafeedback_binarized": ("pairs", "preference", {
        "prompt": "Name a city.", "prompt_id": "a", "chosen": [ASK, SAY], "rejected": [ASK, BAD],
        "messages": [ASK, SAY], "score_chosen": 8.0, "score_rejected": 2.0}),
    "ultrafeedback-cleaned": ("pairs", "preference", {
        "source": "evol", "prompt": "Name a city.", "chosen": [ASK, SAY], "chosen-rating": 5.0, "chosen-model": "a",
        "rejected": [ASK, BAD], "rejected-rating": 1.0, "rejected-model": "b"}),
    "hh-rlhf": ("pairs", "preference", {
        "chosen": "\n\nHuman: Name a city.\n\nAssistant: Lima.",
        "rejected": "\n\nHuman: Name a city.\n\nAssistant: A fish."}),
    "dpo-mix-7k": ("pairs", "preference", {
        "dataset": "a/b", "chosen": [ASK, SAY], "rejected": [ASK, BAD], "chosen_rating": 5.0, "rejected_rating": 1.0}),
    "kto-mix-14k": ("labeled answers", "kto", {"prompt": [ASK], "completion": [SAY], "label": True}),
    "LLaMA-Factory kto": ("labeled answers", "kto", {"messages": [ASK, SAY], "label": True}),
    "LLaMA-Factory kto, alpaca": ("labeled answers", "kto", {
        "instruction": "Name a city.", "input": "", "output": "Lima.", "kto_tag": True}),
    "LLaMA-Factory pairs": ("pairs", "preference", {
        "instruction": "Name a city.", "input": "", "chosen": "Lima.", "rejected": "A fish."}),
    "OpenAI pairs": ("pairs", "preference", {
        "input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [SAY], "non_preferred_output": [BAD]}),
    "OpenAI chats": ("answers", "messages", {
        "messages": [ASK, SAY | {"refusal": None, "annotations": [], "audio": None}], "parallel_tool_calls": False}),
    "TRL conversational": ("answers", "prompt_completion", {"prompt": [ASK], "completion": [SAY]}),
    # by the columns that the error names
    "dolly-15k": ("answers", "alpaca", {
        "instruction": "Name a city.", "context": "", "response": "Lima.", "category": "brainstorming"}),
    "gsm8k": ("answers", "alpaca", {"question": "Name a city.", "answer": "Lima."}),
    "HelpSteer": ("answers", "alpaca", {
        "prompt": "Name a city.", "response": "Lima.", "helpfulness": 4, "correctness": 0, "coherence": 4,
        "complexity": 1, "verbosity": 0}),
    "OpenOrca": ("answers", "alpaca", {
        "id": "niv.1", "system_prompt": "", "question": "Name a city.", "response": "Lima."}),
    "aya": ("answers", "alpaca", {
        "inputs": "Name a city.", "targets": "Lima.", "language": "English", "language_code": "eng",
        "annotation_type": "original-annotations", "user_id": "f"}),
    "orca_dpo_pairs": ("pairs", "preference", {
        "system": "", "question": "Name a city.", "chosen": "Lima.", "rejected": "A fish."}),
    "lmsys-chat": ("answers", "messages", {
        "conversation_id": "c", "model": "vicuna", "conversation": [ASK, SAY], "turn": 1, "language": "English",
        "openai_moderation": [{"categories": {"hate": False}, "flagged": False}], "redacted": False}),
    "xlam-function-calling": ("answers", "alpaca", {
        "id": 0, "query": "Name a city.", "answers": "Lima.", "tools": json.dumps([TOOL])}),
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer_folder(tmp_path_factory.mktemp("qwen3")))


@pytest.mark.parametrize("name", ROWS)
def test_a_public_row_is_read_whole(name: str, qwen3: Tokenizer, rows_file: Any) -> None:
    samples, expected, row = ROWS[name]
    files, columns = open_sources(SourceConfig(rows_file(row))), dict[str, str]()
    try:
        form = find_format(files, {}, samples=samples)
    except DataError as error:  # what it says to set is set
        words = str(error).partition("; set ")[2].partition(", if")[0].split()
        columns = dict(word.removeprefix("data.columns.").split("=") for word in words[1:])
        form = words[0].removeprefix("data.format=")
    text, trained, report = encode(qwen3, form, row, columns=columns)
    if not trained and "no prompt" in report.bad_samples:
        (line,) = report.first_bad.values()
        own = line.partition("set data.columns.")[2].partition("=")
        columns = {own[0]: own[2]}
        text, trained, report = encode(qwen3, form, row, columns=columns)
    assert (form, dict(report.bad_samples)) == (expected, {})
    assert "<|im_start|>user\nName a city.<|im_end|>" in text
    answers = ["Lima.", "A fish."] if form == "preference" else ["Lima."]
    assert [one.rpartition("\n\n")[2] for one in trained] == [
        f"{answer}<|im_end|>" for answer in answers
    ]
    read = {"instruction", "input", "output", "messages", "conversations", "prompt", "completion", "label", "system",
            "chosen", "rejected", "tools", "chat_template_kwargs", "kto_tag", "preferred_output",
            "non_preferred_output", "system_prompt", *columns.values()}  # fmt: skip
    said = {key for key, value in row.items() if value not in (None, "", [])}
    assert said - read - set(report.idle_names) == set()
