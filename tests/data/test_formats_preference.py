"""Pairs of a chosen and a rejected answer in every spelling: the same prompt and the same two
answers come out.
"""

import re

import pytest

from recipe_lib.config.registry import get_registered
from recipe_lib.data.samples import Preference, RenamedSample, SampleFault


def read(**row):
    return get_registered("data.format", "preference")(row)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def turn(speaker, text):
    return {"from": speaker, "value": text}


WANTED = Preference([user("q")], [answer("good")], [answer("bad")])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [answer("good")], "rejected": [answer("bad")]},
        {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": answer("good"), "rejected": answer("bad")},
        {"chosen": [user("q"), answer("good")], "rejected": [user("q"), answer("bad")]},
        {
            "prompt": None,
            "chosen": [user("q"), answer("good")],
            "rejected": [user("q"), answer("bad")],
        },
        {
            "prompt": "q",
            "chosen": [user("q"), answer("good")],
            "rejected": [user("q"), answer("bad")],
        },
        {"prompt": [user("q")], "chosen": [user("q"), answer("good")], "rejected": [answer("bad")]},
        {
            "conversations": [turn("human", "q")],
            "chosen": turn("gpt", "good"),
            "rejected": turn("gpt", "bad"),
        },
        {
            "conversations": [turn("human", "q")],
            "chosen": [turn("gpt", "good")],
            "rejected": [turn("gpt", "bad")],
        },
        {"conversations": [user("q")], "chosen": answer("good"), "rejected": answer("bad")},
        {
            "prompt": "q",
            "chosen": "good",
            "rejected": "bad",
            "system": "",
            "score": 3,
            "tools": None,
        },
    ],
)
def test_every_spelling_is_the_same_pair(row):
    assert read(**row) == WANTED


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "row",
    [
        {"system": "s", "prompt": "q", "chosen": "good", "rejected": "bad"},
        {
            "system": "s",
            "chosen": [user("q"), answer("good")],
            "rejected": [user("q"), answer("bad")],
        },
        {
            "prompt": "q",
            "chosen": [SYSTEM, user("q"), answer("good")],
            "rejected": [SYSTEM, user("q"), answer("bad")],
        },
        {
            "conversations": [turn("system", "s"), turn("human", "q")],
            "chosen": answer("good"),
            "rejected": "bad",
        },
    ],
)
def test_with_a_system_message(row):
    assert read(**row) == Preference([SYSTEM, user("q")], [answer("good")], [answer("bad")])


def test_the_prompt_is_all_that_both_begin_with():
    shared = [user("q"), answer("a"), user("r")]
    assert read(chosen=[*shared, answer("good")], rejected=[*shared, answer("bad")]) == Preference(
        shared, [answer("good")], [answer("bad")]
    )
    later = [answer("a"), user("r")]
    assert (
        read(prompt="q", chosen=[*later, answer("good")], rejected=[*later, answer("bad")]).prompt
        == shared
    )


def test_conversations_that_part_early_stay_whole():
    """From the first answer that differs on, all of it belongs to the pair."""
    chosen = [answer("a"), user("r"), answer("good")]
    rejected = [answer("b"), user("r"), answer("bad")]
    assert read(prompt="q", chosen=chosen, rejected=rejected) == Preference(
        [user("q")], chosen, rejected
    )


def test_answers_that_call_tools():
    call = turn("function_call", '{"name": "f", "arguments": {}}')
    sample = read(
        conversations=[turn("human", "q")],
        chosen=call,
        rejected=turn("gpt", "no"),
        tools='[{"name": "f"}]',
    )
    assert sample.chosen[0]["tool_calls"][0]["function"]["name"] == "f"
    assert sample.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"system": "s", "question": "q", "chosen": "a", "rejected": "b"}, "; if question is the prompt, set data.col"
         "umns.prompt=question"),
        ({"question": "q", "chosen": "a", "rejected": "b"}, "; if question is the prompt, set data.columns.prompt=que"
         "stion"),
        ({"system": "s", "chosen": "a", "rejected": "b"}, ""),
        ({"system": "s", "question": None, "chosen": [answer("a")], "rejected": [answer("b")]}, ""),
    ],
)  # fmt: skip
def test_answers_to_nothing(row, remedy):
    """A system message is no prompt."""
    with pytest.raises(SampleFault) as caught:
        read(**row)
    wanted = "found answers without a prompt, expected prompt, or conversations that begin alike"
    assert str(caught.value) == wanted + remedy
    with pytest.raises(SampleFault) as caught:
        get_registered("data.format", "preference")(RenamedSample(row, {}, "data.sources[1]"))
    assert str(caught.value) == wanted + remedy.replace(
        "data.columns.prompt=question", "data.sources[1].columns={prompt: question}"
    )


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": "a"},
            "found chosen equal to rejected, expected two different answers",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": None},
            ".rejected: found null, expected text or messages",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": 3},
            ".rejected: found a number, expected text or messages",
        ),
        (
            {"prompt": "q", "chosen": " ", "rejected": "a"},
            ".chosen: found an empty answer, expected text to train on",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": ""},
            ".rejected: found an empty answer, expected text to train on",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            "found answers without a prompt, expected prompt, or conversations that begin",
        ),
        (
            {"prompt": "q", "conversations": [user("q")], "chosen": "a", "rejected": "b"},
            "found prompt and conversations, expected one of the two",
        ),
        (
            {"chosen": [user("q"), answer("a")], "rejected": [user("p"), answer("b")]},
            (
                ".chosen[0]: found a message of the user that differs between chosen and rejected,"
                " expected them to part"
            ),
        ),
        (
            {
                "chosen": [user("q"), answer("a")],
                "rejected": [user("q"), answer("a"), user("r"), answer("b")],
            },
            ".chosen: found nothing at its end, expected an answer of its own",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": [answer("b"), user("r")]},
            ".rejected: found user at its end, expected an answer of its own",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": []},
            ".rejected: found nothing at its end, expected an answer",
        ),
        (
            {"prompt": [user("q")], "chosen": "a", "rejected": [turn("bard", "b")]},
            ".rejected[0].from: found 'bard'",
        ),
        (
            {"prompt": ["q"], "chosen": "a", "rejected": "b"},
            ".prompt[0]: found text, expected an object",
        ),
        (
            {"prompt": "\ud83d", "chosen": "a", "rejected": "b"},
            ".prompt: found half a surrogate pair at character 1",
        ),
    ],
)
def test_rows_that_cannot_be_used(row, line):
    with pytest.raises(SampleFault, match=re.escape(line)) as caught:
        read(**row)
    assert caught.value.cause and "\n" not in str(caught.value)
