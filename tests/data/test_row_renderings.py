"""What a row's columns become: the text is what transformers writes of the messages that the row
means.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.data.row_cases import encode, write_tokenizer_folder

FUNCTION = {
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": FUNCTION}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASK = say("user", "2+2?")
SAY = say("assistant", "4")
BAD = say("assistant", "5")
MORE = say("user", "Times two?")
LAST = say("assistant", "8")
SYSTEM = say("system", "Be kind.")
CALL = say(
    "assistant",
    "",
    tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {"a": 1}}}],
)
RESULT = say("tool", "31")
OLD = [
    ASK,
    {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"a": 1}'},
    },
    {"role": "function", "name": "weather", "content": "31"},
    SAY,
]
BOTH = {"chosen": "4", "rejected": "5"}
NO_THOUGHT = {"enable_thinking": False}
# format, row, the messages that it means (of a pair: to the chosen answer), tools, variables, what
# is trained
CASES: dict[str, tuple[str, dict[str, Any], list[Any], Any, dict[str, Any], list[str]]] = {
    "history": ("alpaca", {"instruction": "Times two?", "output": "8", "history": [["2+2?", "4"]],
                            "system": "Be kind."}, [SYSTEM, ASK, SAY, MORE, LAST], None, {}, ["4", "8"]),
    "history as JSON": ("alpaca", {"instruction": "Times two?", "output": "8", "history": '[["2+2?", "4"]]'},
                        [ASK, SAY, MORE, LAST], None, {}, ["4", "8"]),
    "input": ("alpaca", {"instruction": "Add.", "input": "2+2", "output": "4", "tools": json.dumps([FUNCTION])},
              [say("user", "Add.\n2+2"), SAY], [TOOL], {}, ["4"]),
    "query": ("alpaca", {"instruction": "Add.", "query": "2+2", "output": "4"}, [say("user", "Add.\n2+2"), SAY],
              None, {}, ["4"]),
    "ranking": ("preference", {"instruction": "Add.", "input": "2+2", "system": "Be kind.", **BOTH},
                [SYSTEM, say("user", "Add.\n2+2"), SAY], None, {}, ["4"]),
    "ranking with history": ("preference", {"prompt": "Add.", "query": "2+2", "history": [["2+2?", "4"]], **BOTH},
                             [ASK, SAY, say("user", "Add.\n2+2"), SAY], None, {}, ["4"]),
    "pairs with a system column": ("preference", {"prompt": "2+2?", "system": "Be kind.", "chosen": [ASK, SAY],
                                                  "rejected": [ASK, BAD]}, [SYSTEM, ASK, SAY], None, {}, ["4"]),
    "OpenAI pairs": ("preference", {"input": {"messages": [SYSTEM, ASK], "tools": [TOOL]}, "preferred_output": [SAY],
                                    "non_preferred_output": [BAD]}, [SYSTEM, ASK, SAY], [TOOL], {}, ["4"]),
    "labeled": ("kto", {"instruction": "Add.", "input": "2+2", "output": "4", "kto_tag": "false", "system": "Be kind.",
                        "history": [["2+2?", "4"]]},
                [SYSTEM, ASK, SAY, say("user", "Add.\n2+2"), SAY], None, {}, ["4"]),
    "labeled turns": ("kto", {"conversations": [SYSTEM, ASK, SAY, MORE, LAST], "label": True},
                      [SYSTEM, ASK, SAY, MORE, LAST], None, {}, ["8"]),
    "system column": ("messages", {"system": "Be kind.", "messages": [ASK, SAY]}, [SYSTEM, ASK, SAY], None, {}, ["4"]),
    "system prompt": ("sharegpt", {"system_prompt": "Be kind.", "conversations": [SYSTEM, ASK, SAY]},
                      [SYSTEM, ASK, SAY], None, {}, ["4"]),
    "function_call": ("messages", {"messages": OLD, "functions": [FUNCTION]}, [ASK, CALL, RESULT, SAY], [TOOL], {},
                      ["</tool_call>", "4"]),
    "speakers": ("messages", {"messages": [
                 say("human", "2+2?"), say("function_call", '{"name": "weather", "arguments": {"a": 1}}'),
                 say("observation", "31"), say("gpt", "4")], "available_tools": json.dumps([TOOL])},
                 [ASK, CALL, RESULT, SAY], [TOOL], {},
                      ["</tool_call>", "4"]),
    "from and value": ("messages", {"messages": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
                       [ASK, SAY], None, {}, ["4"]),
    "training": ("sharegpt", {"conversations": [ASK, SAY | {"training": False}, MORE, LAST]}, [ASK, SAY, MORE, LAST],
                 None, {}, ["8"]),
    "template arguments": ("messages", {"messages": [ASK, SAY], "chat_template_kwargs": NO_THOUGHT}, [ASK, SAY], None,
                           NO_THOUGHT, ["4"]),
    "template arguments of pairs": ("preference", {"prompt": [ASK], "chat_template_kwargs": NO_THOUGHT, **BOTH},
                                    [ASK, SAY], None, NO_THOUGHT, ["4"]),
    "template arguments of labels": ("kto", {"prompt": [ASK], "completion": "4", "label": 1,
                                             "chat_template_kwargs": json.dumps(NO_THOUGHT)},
                                     [ASK, SAY], None, NO_THOUGHT, ["4"]),
    "conversational": ("prompt_completion", {"prompt": [SYSTEM, ASK, SAY, MORE], "completion": [LAST], "tools": [TOOL],
                                             "chat_template_kwargs": NO_THOUGHT},
                       [SYSTEM, ASK, SAY, MORE, LAST], [TOOL], NO_THOUGHT, ["8"]),
    "messages and text": ("prompt_completion", {"prompt": [ASK], "completion": "4"}, [ASK, SAY], None, {}, ["4"]),
    "text and a message": ("prompt_completion", {"prompt": "2+2?", "completion": SAY, "system": "Be kind."},
                           [SYSTEM, ASK, SAY], None, {}, ["4"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_transformers(name: str, folder: Path, qwen3: Tokenizer) -> None:
    form, row, messages, tools, variables, expected = CASES[name]
    text, trained, report = encode(qwen3, form, row)
    assert not report.bad_samples and set(report.idle_names) <= {"messages.name"}
    texts = text.split("\n---\n")
    at = (
        0 if form == "preference" else len(texts) - 1
    )  # the chosen answer; or the sequence of the last answer
    said = "".join(trained[: 1 if form == "preference" else None])
    theirs = AutoTokenizer.from_pretrained(folder)
    options = {"tools": tools, "tokenize": False, **variables}
    whole = theirs.apply_chat_template(messages, **options)
    assert texts[at] == whole.rstrip("\n")
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    prompt = theirs.apply_chat_template(messages[:last], add_generation_prompt=True, **options)
    assert trained[at].endswith(whole.rstrip("\n").removeprefix(prompt))
    assert [part.rpartition("\n")[2] for part in said.split("<|im_end|>")[:-1]] == expected


def test_the_template_is_given_what_it_reads_alone(qwen3: Tokenizer) -> None:
    row = {"messages": [ASK, SAY]}
    bare, _, _ = encode(qwen3, "messages", row)
    with_thought = [ASK, say("assistant", "4", reasoning_content="Two and two.")]
    for kwargs, line in (
        ({"messages": []}, None),
        (
            {"messages": [ASK]},
            "chat_template_kwargs.messages: found a name that a run gives itself",
        ),
        ({"tools": [TOOL]}, "chat_template_kwargs.tools: found a name that a run gives itself"),
        (
            {"add_generation_prompt": True},
            "chat_template_kwargs.add_generation_prompt: found a name",
        ),
        (
            {"custom_instructions": "Speak as a pirate.\nAlways."},
            "found custom_instructions, which the chat template",
        ),
        ("yes", "chat_template_kwargs: found text, expected an object"),
    ):
        text, _, report = encode(qwen3, "messages", row | {"chat_template_kwargs": kwargs})
        assert (
            (text == bare and not report.bad_samples)
            if line is None
            else line in str(report.first_bad)
        ), kwargs
    text, _, report = encode(qwen3, "messages", row | {"chat_template_kwargs": {"language": "en"}})
    assert (text, report.idle_names) == (bare, {"chat_template_kwargs.language": 1})
    _, _, report = encode(
        qwen3, "messages", {"messages": with_thought, "chat_template_kwargs": NO_THOUGHT}
    )
    assert "anew" in str(report.first_bad)  # a thought where the row says that there is none
    _, _, report = encode(qwen3, "messages", row | {"documents": [{"title": "a", "text": "b"}]})
    assert ".documents: found documents, which the chat template does not read" in str(
        report.first_bad
    )


def test_documents_go_to_a_template_that_reads_them(tmp_path: Path) -> None:
    from tests.tokenizers.made import CHATML, write_json

    source = "{% for d in documents or [] %}[{{ d['text'] }}]{% endfor %}" + CHATML
    folder = write_json(tmp_path, template=source)
    documents = [{"text": "Lima <|im_end|> is"}, {"text": "big."}]
    text, trained, report = encode(
        load_tokenizer(folder), "messages", {"messages": [ASK, SAY], "documents": documents}
    )
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [ASK, SAY], documents=documents, tokenize=False
    )
    assert text == theirs.rstrip("\n") and trained == ["4<|im_end|>"] and not report.bad_samples
    assert text.count("<|im_end|>") == 3  # of which the first is text, as in a message


@pytest.mark.parametrize(
    ("train_on", "expected"), [("assistant", ["8<|im_end|>"]), ("last", ["8<|im_end|>"])]
)
def test_the_prompt_of_a_completion_is_not_trained(
    train_on: str, expected: list[str], qwen3: Tokenizer
) -> None:
    row = {"prompt": [ASK, SAY, MORE], "completion": [LAST], "chat_template_kwargs": NO_THOUGHT}
    assert encode(qwen3, "prompt_completion", row, train_on=train_on)[1] == expected
    _, (everything,), _ = encode(qwen3, "prompt_completion", row, train_on="all")
    assert "2+2?" in everything
