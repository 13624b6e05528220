"""Flags of messages as JSON and tables write them, and keys of messages that data.ignore_columns
names.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.data.messages import MASKED, TRAINED
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.data.row_cases import KEYS, encode, write_tokenizer_folder

FLAGS = (*TRAINED, *MASKED, "weight")
CHAT = [
    {"role": "user", "content": "Hot?"}, {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Dry?"}, {"role": "assistant", "content": "No."},
]  # fmt: skip
COLUMNS = {"messages": "messages", "sharegpt": "conversations", "prompt_completion": "completion"}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer_folder(tmp_path_factory.mktemp("qwen3")))


def put_row(form: str, spelling: str, **keys: Any) -> dict[str, Any]:
    """A row whose last answer has these keys. spelling: of its messages."""
    chat = [*CHAT[:-1], CHAT[-1] | keys]
    if spelling == "from":
        named = [
            {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
            for m in CHAT
        ]
        chat = [*named[:-1], named[-1] | keys]
    row = {COLUMNS[form]: chat}
    if form == "prompt_completion":
        row = {"prompt": chat[:-1], "completion": chat[-1:]}
    return (
        {name: json.dumps(value) for name, value in row.items()} if spelling == "JSON text" else row
    )


@pytest.mark.parametrize("flag", FLAGS)
def test_zero_and_one_are_false_and_true(flag: str, qwen3: Tokenizer) -> None:
    said = {}
    for value in (True, False, 1, 0, *((1.0, 0.0) if flag == "weight" else ())):
        _, trained, report = encode(qwen3, "messages", put_row("messages", "role", **{flag: value}))
        assert not report.bad_samples
        said.setdefault(bool(value), []).append("No." in "".join(trained))
    assert [set(found) for found in said.values()] == [{flag not in MASKED}, {flag in MASKED}]
    for value in (
        (2, -1, 0.5, "no", [], {"a": 1}) if flag == "weight" else (2, 1.5, 1.0, 0.0, "no", {"a": 1})
    ):
        _, trained, report = encode(qwen3, "messages", put_row("messages", "role", **{flag: value}))
        assert bool(report.bad_samples) == (value != []), (
            flag,
            value,
        )  # an empty list says nothing


@pytest.mark.parametrize("spelling", ["role", "from", "JSON text"])
@pytest.mark.parametrize("form", COLUMNS)
def test_a_key_that_is_ignored_changes_nothing(form: str, spelling: str, qwen3: Tokenizer) -> None:
    """Whatever it holds, also one that is read where it is not named; it is counted."""
    bare = encode(qwen3, form, put_row(form, spelling))[:2]
    for key, value in {
        **KEYS,
        **dict.fromkeys(FLAGS, False),
        "weight": 0,
        "tool_calls": [{"x": 1}],
        "mood": 3,
    }.items():
        if key in ("role", "from", "content", "value"):
            continue
        row = put_row(form, spelling, **{key: value})
        text, trained, report = encode(qwen3, form, row, ignore_columns=[f"messages.{key}"])
        assert ((text, trained), dict(report.idle_names)) == (bare, {f"messages.{key}": 1}), (
            key,
            report.first_bad,
        )


def test_only_messages_lose_it(qwen3: Tokenizer) -> None:
    """Not a tool's description, nor a text that begins with a bracket; of several keys each is
    counted.
    """
    tools = [
        {
            "name": "weather",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}},
        }
    ]
    chat = [CHAT[0] | {"name": "Ann"}, CHAT[1] | {"weight": 0, "name": "Bot"}, *CHAT[2:]]
    row = {"messages": chat, "tools": tools, "id": "[1] of 3"}
    keys = ["messages.name", "messages.weight", "messages.mood"]
    text, trained, report = encode(qwen3, "messages", row, row, ignore_columns=keys)
    assert "Looks." in text and "Yes." in "".join(trained)
    assert dict(report.idle_names) == {"messages.name": 2, "messages.weight": 2, "id": 2}
    assert (
        "warning: data: data.ignore_columns: no sample has messages.mood" in report.format_lines()
    )


def test_the_rows_of_a_file(tmp_path: Path, qwen3: Tokenizer) -> None:
    """The reader's own rows stay as they are."""
    row = put_row("messages", "role", weight=0)
    before = json.dumps(row)
    encode(qwen3, "messages", row, ignore_columns=["messages.weight"])
    assert json.dumps(row) == before
