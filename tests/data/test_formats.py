"""Every format reads what it should, and says of other rows what it found and what it expected."""

import json
import re

import pytest

from recipe_lib.config.registry import BUILT_IN, get_registered
from recipe_lib.data.samples import Completion, Conversation, Document, SampleFault, find_columns


def read(name: str, row: dict):
    return get_registered("data.format", name)(row)


def roles(sample: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in sample.messages]


def test_every_declared_format_is_registered():
    for name in BUILT_IN["data.format"][1]:
        assert callable(get_registered("data.format", name)) and find_columns(name).required


def test_alpaca():
    assert roles(read("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3", "id": 7})) == [
        ("user", "Add.\n1 2"), ("assistant", "3"),
    ]  # fmt: skip
    for nothing in ({"input": ""}, {"input": None}, {}):
        assert roles(read("alpaca", {"instruction": "Hi", "output": "Hello"} | nothing))[0] == (
            "user",
            "Hi",
        )
    assert roles(read("alpaca", {"instruction": "Hi", "output": "Hello", "system": "Be kind."}))[0] == (
        "system", "Be kind.",
    )  # fmt: skip


def test_sharegpt_in_both_spellings():
    expected = [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("tool", "c"),
        ("assistant", "d"),
    ]
    one = [("system", "s"), ("human", "a"), ("gpt", "b"), ("observation", "c"), ("gpt", "d")]
    two = [("system", "s"), ("user", "a"), ("assistant", "b"), ("tool", "c"), ("model", "d")]
    assert (
        roles(read("sharegpt", {"conversations": [{"from": r, "value": t} for r, t in one]}))
        == expected
    )
    assert (
        roles(read("sharegpt", {"conversations": [{"role": r, "content": t} for r, t in two]}))
        == expected
    )
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert roles(read("sharegpt", {"conversations": turns, "system": "s"})) == expected[:3]


def test_messages():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    sample = read("messages", {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
            {"role": "assistant", "content": "five"},
        ],
        "tools": [{"type": "function"}],
    })  # fmt: skip
    assert roles(sample) == [
        ("user", "ab"),
        ("assistant", ""),
        ("tool", "5"),
        ("assistant", "five"),
    ]
    assert sample.messages[1]["tool_calls"] == [call] and "name" not in sample.messages[0]
    assert sample.messages[2]["tool_call_id"] == "1" and sample.tools == [{"type": "function"}]


def test_prompt_completion_and_text():
    assert read("prompt_completion", {"prompt": "", "completion": " x"}) == Completion("", " x")
    assert read("text", {"text": " x\n"}) == Document(" x\n")


def turns(*pairs):
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in pairs]}


def said(*pairs):
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


@pytest.mark.parametrize(
    ("name", "row", "line"),
    [
        (
            "alpaca",
            {"instruction": 3, "output": "x"},
            ".instruction: found a number, expected text",
        ),
        ("alpaca", {"instruction": "x", "output": None}, ".output: found null, expected text"),
        ("alpaca", {"instruction": "x"}, ".output: found nothing, expected text"),
        (
            "alpaca",
            {"instruction": "x", "input": ["y"], "output": "z"},
            "input: found a list, expected text",
        ),
        (
            "alpaca",
            {"instruction": " ", "output": "x"},
            ".instruction: found an empty instruction, expected text",
        ),
        (
            "alpaca",
            {"instruction": "x", "output": " \n"},
            ".output: found an empty answer, expected text to train on",
        ),
        (
            "alpaca",
            {"instruction": "\ud83d", "output": "x"},
            ".instruction: found half a surrogate pair at character 1",
        ),
        (
            "sharegpt",
            {"conversations": "x"},
            ".conversations: found text that is no JSON list, expected a",
        ),
        (
            "sharegpt",
            {"conversations": ["x"]},
            "found no answer among the messages (1), expected one of the",
        ),
        (
            "sharegpt",
            {"conversations": ["x", 1]},
            ".conversations[0]: found text, expected an object",
        ),
        ("sharegpt", {"conversations": []}, "found no answer among the messages (0)"),
        (
            "sharegpt",
            turns(("human", "a"), ("bard", "b")),
            ".conversations[1].from: found 'bard', expected human",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", 1)),
            ".conversations[1].value: found a number, expected text",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", "")),
            ".conversations[1].value: found an empty answer",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("tool", "b")),
            ".conversations[1]: found tool after user, expected it after",
        ),
        (
            "sharegpt",
            turns(("human", "a")),
            "found no answer among the messages (1), expected one of the assistant",
        ),
        (
            "messages",
            said(("bard", "a")),
            ".messages[0].role: found 'bard', expected one of system",
        ),
        (
            "messages",
            {"messages": [{"content": "a"}]},
            ".messages[0].role: found nothing, expected",
        ),
        (
            "messages",
            {"messages": [{"role": None, "content": "a"}]},
            ".messages[0].role: found null, expected",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}, "b"]},
            ".messages[1]: found text, expected an ob",
        ),
        ("messages", {"messages": None}, ".messages: found null, expected a list of objects"),
        ("messages", said(("user", None)), ".messages[0].content: found null, expected text"),
        (
            "messages",
            said(("user", [{"type": "image"}])),
            (
                ".messages[0].content[0]: found a part of the type 'image', expected a part of the"
                " type 'text'"
            ),
        ),
        (
            "messages",
            said(("user", "a"), ("tool", "b")),
            ".messages[1]: found tool after user, expected it after assistant",
        ),
        (
            "messages",
            said(("user", "a"), ("assistant", "")),
            ".messages[1].content: found an empty answer",
        ),
        (
            "messages",
            said(("user", "a"), ("assistant", "b")) | {"tools": "f"},
            ".tools: found text that is no JSON list, expected a list",
        ),
        (
            "prompt_completion",
            {"prompt": "a", "completion": ""},
            ".completion: found an empty completion, expected text to train on",
        ),
        (
            "prompt_completion",
            {"prompt": True, "completion": "a"},
            ".prompt: found true or false, expected text",
        ),
        ("text", {"text": ""}, ".text: found an empty text, expected something to train on"),
        ("text", {"text": {}}, ".text: found an object, expected text"),
    ],
)
def test_rows_that_cannot_be_used(name, row, line):
    with pytest.raises(SampleFault, match=re.escape(line)) as caught:
        read(name, row)
    assert caught.value.cause and "\n" not in str(caught.value)


def test_wild_files(realdata):
    folder = realdata / "datasets"
    for file, name in (
        ("alpaca/alpaca_en_demo", "alpaca"),
        ("alpaca/identity", "alpaca"),
        ("gpteacher/roleplay", "alpaca"),
    ):
        bad = []
        rows = json.loads((folder / f"{file}.json").read_text())
        for row in rows:
            try:
                sample = read(name, row)
                assert sample.messages[-1]["content"] == row["output"]
            except SampleFault as fault:
                bad.append((fault.cause, row))
        assert all(cause == "empty answer" and not row["output"].strip() for cause, row in bad)


def test_wild_tool_calls(realdata):
    """Every row is read; calls, answers of tools and tools are those of the file."""
    called = 0
    for row in json.loads(
        (realdata / "datasets" / "toolcall" / "glaive_toolcall_en_demo.json").read_text()
    ):
        sample, turns = read("sharegpt", row), row["conversations"]
        assert len(sample.messages) == len(turns)
        for message, turn in zip(sample.messages, turns, strict=True):
            if turn["from"] == "function_call":
                (call,) = message["tool_calls"]
                assert call["function"] == json.loads(turn["value"]) and message["content"] == ""
                called += 1
            else:
                assert message["content"] == turn["value"] and "tool_calls" not in message
        tools = json.loads(row["tools"])
        assert [tool["function"] for tool in sample.tools or []] == tools
    assert called == 211


def test_wild_pairs(realdata):
    rows = json.loads((realdata / "datasets" / "dpo" / "dpo_en_demo.json").read_text())
    for row in rows:
        sample = read("preference", row)
        assert [message["content"] for message in sample.prompt] == [
            turn["value"] for turn in row["conversations"]
        ]
        assert roles(Conversation(sample.chosen)) == [("assistant", row["chosen"]["value"])]
        assert roles(Conversation(sample.rejected)) == [("assistant", row["rejected"]["value"])]
        assert sample.prompt[-1]["role"] == "user"
    assert len(rows) == 300
