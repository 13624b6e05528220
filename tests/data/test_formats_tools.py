"""Calls of tools, and what else a message may hold, in the spellings that rows are found in."""

import re

import pytest

from recipe_lib.config.registry import get_registered
from recipe_lib.data.samples import RenamedSample, SampleFault


def read(name, row):
    return get_registered("data.format", name)(row)


def turns(*pairs, **more):
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in pairs]} | more


CALL = '{"name": "f", "arguments": {"x": 1}}'
WANTED = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def without_ids(messages):
    """Messages as they were before calls got their ids."""
    bare = []
    for message in messages:
        message = {name: value for name, value in message.items() if name != "tool_call_id"}
        if "tool_calls" in message:
            calls = [
                {name: value for name, value in call.items() if name != "id"}
                for call in message["tool_calls"]
            ]
            message["tool_calls"] = calls
        bare.append(message)
    return bare


def test_calls_of_sharegpt_get_ids_that_their_answers_have():
    row = turns(
        ("human", "a"),
        ("function_call", f"[{CALL}, {CALL}]"),
        ("observation", "5"),
        ("observation", "6"),
    )
    row["conversations"] += turns(
        ("gpt", "b"), ("human", "a"), ("function_call", CALL), ("observation", "7")
    )["conversations"]
    _, calls, first, second, _, _, again, third = read("sharegpt", row).messages
    ids = [call["id"] for message in (calls, again) for call in message["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"], third["tool_call_id"]]
    assert len(set(ids)) == 3 and all(re.fullmatch("[a-zA-Z0-9]{9}", found) for found in ids)
    assert read("sharegpt", row).messages[1] == calls  # the same at the next start


def test_ids_that_are_there_stay():
    call = {"id": "mine00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "mine00001"},
        {"role": "assistant", "content": "b"},
    ]
    for name, column in (("messages", "messages"), ("sharegpt", "conversations")):
        messages = read(name, {column: talk}).messages
        assert messages[1]["tool_calls"] == [call] and messages[2]["tool_call_id"] == "mine00001"


def test_a_call_of_sharegpt():
    sample = read(
        "sharegpt",
        turns(("human", "a"), ("function_call", CALL), ("observation", "5"), ("gpt", "five")),
    )
    assert without_ids(sample.messages) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [WANTED]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "five"},
    ]
    assert sample.tools is None


@pytest.mark.parametrize(
    "spoken",
    [
        [("function_call", f"[{CALL}, {CALL}]")],
        [("function_call", CALL), ("tool_call", CALL)],
    ],
)
def test_calls_behind_each_other_are_one_message(spoken):
    row = turns(
        ("human", "a"), *spoken, ("observation", "5"), ("function_response", "6"), ("gpt", "done")
    )
    messages = without_ids(read("sharegpt", row).messages)
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert messages[1]["tool_calls"] == [WANTED, WANTED]


def test_words_before_a_call_are_of_its_message():
    row = turns(("human", "a"), ("gpt", "I look."), ("function_call", CALL), ("observation", "5"))
    message = without_ids(read("sharegpt", row).messages)[1]
    assert message == {"role": "assistant", "content": "I look.", "tool_calls": [WANTED]}


def test_words_and_call_of_which_one_is_trained_stay_apart():
    """Joining them would train, or leave out, what the row says not to."""
    row = turns(("human", "a"), ("gpt", "I look."), ("function_call", CALL))
    row["conversations"][1]["train"] = False
    with pytest.raises(SampleFault, match="found a call of which `train` is another"):
        read("sharegpt", row)


def test_missing_arguments_are_none():
    for text in (
        '{"name": "f"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": ""}',
    ):
        (call,) = read("sharegpt", turns(("human", "a"), ("function_call", text))).messages[1][
            "tool_calls"
        ]
        assert call["function"] == {"name": "f", "arguments": {}}
    text = '{"name": "f", "arguments": "{}"}'
    (call,) = read("sharegpt", turns(("human", "a"), ("function_call", text))).messages[1][
        "tool_calls"
    ]
    assert call["function"] == {"name": "f", "arguments": "{}"}


FUNCTION = {"name": "f", "description": "d", "parameters": {}}
AS_API = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("name", ["sharegpt", "messages", "preference"])
@pytest.mark.parametrize(
    ("tools", "wanted"),
    [
        (AS_API, AS_API),
        ([FUNCTION], AS_API),
        ('[{"name": "f", "description": "d", "parameters": {}}]', AS_API),
        ([{"type": "code_interpreter"}], [{"type": "code_interpreter"}]),
        ("[]", None), ("", None), (" ", None), ([], None), (None, None), ("null", None),
    ],
)  # fmt: skip
def test_tools(name, tools, wanted):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {
        "sharegpt": {"conversations": talk},
        "messages": {"messages": talk},
        "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    }[name]
    assert read(name, row | {"tools": tools}).tools == wanted


def test_what_else_a_message_holds_is_kept():
    talk = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "a", "name": "Ann"},
        {
            "role": "assistant",
            "content": "b",
            "train": False,
            "reasoning_content": "hm",
            "audio": None,
        },
        {"role": "user", "content": "c", "train": True},
        {"role": "assistant", "content": "d", "weight": 0},
        {"role": "user", "content": "e", "weight": 1},
        {"role": "assistant", "content": "f", "weight": 1, "train": True},
    ]
    assert read("messages", {"messages": talk}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "b", "train": False, "reasoning_content": "hm"},
        {"role": "user", "content": "c", "train": True},
        {"role": "assistant", "content": "d", "train": False},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f", "train": True},
    ]
    row = turns(("human", "a"), ("gpt", "b"))
    row["conversations"][1]["train"] = False
    assert read("sharegpt", row).messages[1] == {
        "role": "assistant",
        "content": "b",
        "train": False,
    }


NO_JSON = ".conversations[1].value: found a function_call that is no JSON object, expected "


@pytest.mark.parametrize(
    ("name", "row", "line"),
    [
        ("sharegpt", turns(("human", "a"), ("function_call", "f(1)")), NO_JSON),
        ("sharegpt", turns(("human", "a"), ("function_call", "[]")), NO_JSON),
        ("sharegpt", turns(("human", "a"), ("function_call", '{"arguments": {}}')), NO_JSON),
        ("sharegpt", turns(("human", "a"), ("function_call", "[" * 100_000)), NO_JSON),
        (
            "sharegpt",
            turns(("human", "a"), ("function_call", None)),
            ".conversations[1].value: found null, expected",
        ),
        (
            "sharegpt",
            turns((["gpt"], "x")),
            ".conversations[0].from: found a list, expected human, gpt",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", "b"), tools="{"),
            ".tools: found text that is no JSON list, expected a list",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", "b"), tools="[{"),
            (
                ".tools: found text that is no JSON (line 1 column 3: invalid JSON (Expecting"
                " property name enclosed in double quotes))"
            ),
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", "b"), tools="{}"),
            ".tools: found text that is no JSON list, expected a list of objects",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", "b"), tools=["f"]),
            ".tools[0]: found text, expected an object",
        ),
        (
            "sharegpt",
            turns(("human", "a"), ("gpt", "b"), tools="[1]"),
            ".tools|fromjson|.[0]: found a number, expected an object",
        ),
        (
            "messages",
            {"messages": [{"from": "human", "value": "a", "content": "b"}]},
            ".messages[0]: found from and content, expected {from, value} or {role, content}",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a", "weight": 0.5}]},
            ".messages[0].weight: found 0.5, expected 0 or 1",
        ),
    ],
)
def test_rows_that_cannot_be_used(name, row, line):
    with pytest.raises(SampleFault, match=re.escape(line)) as caught:
        read(name, row)
    assert caught.value.cause and "\n" not in str(caught.value)


def test_the_path_of_tools_as_texts_has_the_name_of_the_file():
    row = turns(("human", "a"), ("gpt", "b"), functions=['{"name": "f"}'])
    chat = read("sharegpt", RenamedSample(row, {"tools": "functions"}, "data"))
    assert chat.tools[0]["function"] == {"name": "f"}
    assert chat.places.tools == ".functions"


def calling(tool_calls):
    return {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": tool_calls},
        ]
    }


def function(**fields):
    return [{"type": "function", "function": {"name": "f", "arguments": {}} | fields}]


@pytest.mark.parametrize(
    ("tool_calls", "line"),
    [
        (
            "f()",
            (
                ': found text, expected a list of calls {"function": {"name": ..., "arguments":'
                " {...}}}"
            ),
        ),
        ({"a": 1}, ": found an object, expected a list of calls"),
        ([5], "[0]: found a number, expected a call {"),
        ([[]], "[0]: found a list, expected a call {"),
        ([{"a": 1}], "[0].name: found nothing, expected the function's name, as in {"),
        (
            [{"name": "f"}],
            "[0].arguments: found nothing, expected an object, or JSON text of one ({} for none)",
        ),
        ([{"function": "f"}], '[0].function: found text, expected {"name"'),
        (
            [{"function": {"arguments": {}}}],
            "[0].function.name: found nothing, expected the function's name",
        ),
        (function(name=""), "[0].function.name: found empty text, expected the function's name"),
        (function(name=5), "[0].function.name: found a number"),
        (
            [*function(), *function(arguments=[1])],
            "[1].function.arguments: found a list, expected an object",
        ),
        (function(arguments=None), "[0].function.arguments: found null, expected an object"),
        (
            function(arguments="{bad"),
            "[0].function.arguments: found '{bad', expected an object, or JSON text of one",
        ),
        (function(arguments="[1]"), "[0].function.arguments: found '[1]', expected an object"),
    ],
)
def test_calls_of_another_shape(tool_calls, line):
    with pytest.raises(SampleFault) as caught:
        read("messages", calling(tool_calls))
    assert str(caught.value).startswith(".messages[1].tool_calls" + line)
    with pytest.raises(SampleFault) as caught:
        read("sharegpt", {"conversations": calling(tool_calls)["messages"]})
    assert str(caught.value).startswith(".conversations[1].tool_calls" + line)


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', {}, "{}", ""])
def test_calls_of_either_shape(arguments):
    """As chat APIs have them, or bare, which is put as chat APIs have it."""
    wanted = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    for call in (wanted, {"function": wanted["function"]}, {"name": "f", "arguments": arguments}):
        (found,) = read("messages", calling([call])).messages[1]["tool_calls"]
        assert found == (wanted if "function" not in call else call)
    (found,) = read(
        "messages", calling([{"id": "1", "name": "f", "arguments": arguments}])
    ).messages[1]["tool_calls"]
    assert found == wanted | {"id": "1"}


def test_a_call_of_sharegpt_with_other_arguments():
    row = turns(("human", "a"), ("function_call", '{"name": "f", "arguments": [1]}'))
    line = (
        ".conversations[1].value: arguments of 'f': found a list, expected an object, or JSON text"
        " of one"
    )
    with pytest.raises(SampleFault, match=re.escape(line)):
        read("sharegpt", row)
