"""Where a fault is: file, line, and the path in the sample that jq takes."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.config.schema_data import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.samples import (
    RenamedSample,
    describe_kind,
    format_value,
    get_path,
    prefix_place,
)
from recipe_lib.tokenizers import load_tokenizer
from tests.tokenizers.made import write_json

ASK = {"role": "user", "content": "a"}
CALL = {"function": {"name": "f", "arguments": {}}}
GOOD = {"role": "assistant", "content": "b"}


def row(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages)} | more


# The row, its path, and what is there. The last ones are found when the chat template is rendered.
FAULTS = [
    (row(ASK, GOOD | {"content": 5}), ".messages[1].content", 5),
    (row(ASK, "b"), ".messages[1]", "b"),
    (row(ASK | {"role": "robot"}, GOOD), ".messages[0].role", "robot"),
    (row(ASK, GOOD | {"content": [{"type": "text", "text": "a"}, {"type": "image"}]}), ".messages[1].content[1]",
     {"type": "image"}),
    (row(ASK, GOOD | {"content": [{"type": "text", "text": 3}]}), ".messages[1].content[0].text", 3),
    (row(ASK, GOOD | {"content": " "}), ".messages[1].content", " "),
    (row(ASK, GOOD, {"role": "user", "content": "b"}, {"role": "tool", "content": "c"}), ".messages[3]",
     {"role": "tool", "content": "c"}),
    (row(ASK, GOOD | {"weight": 0.5}), ".messages[1].weight", 0.5),
    (row(ASK, GOOD | {"train": "no"}), ".messages[1].train", "no"),
    (row(ASK, GOOD | {"tool_calls": "f()"}), ".messages[1].tool_calls", "f()"),
    (row(ASK, GOOD | {"tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}),
     ".messages[1].tool_calls[0].function.arguments", "{bad"),
    (row(ASK, GOOD, tools=3), ".tools", 3),
    (row(ASK, GOOD, tools=[{"name": "f"}, 1]), ".tools[1]", 1),
    (row(ASK, GOOD, tools=json.dumps([1])), ".tools|fromjson|.[0]", 1),
    (row(ASK, GOOD, tools=[{"name": "weather"}]), ".tools[0]", {"name": "weather"}),
    (row(ASK, GOOD, tools=json.dumps([{"name": "weather"}])), ".tools|fromjson|.[0]", {"name": "weather"}),
    (row(ASK, GOOD | {"tool_calls": [CALL]}), ".messages[1]", GOOD | {"tool_calls": [CALL]}),
    (row(ASK, GOOD | {"reasoning": "hm"}), ".messages[1]", GOOD | {"reasoning": "hm"}),
]  # fmt: skip


def faults(path: Path, tokenizer: Any, **settings: Any) -> list[str]:
    cfg = DataConfig(
        source=str(path), on_invalid="skip", cache=False, **{"format": "messages"} | settings
    )
    lines = [line for _, line in build_dataset(cfg, tokenizer, 64).report.bad_lines]
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:") for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "list", "data"])
def test_every_fault_has_the_path_that_jq_takes(kind: str, tmp_path: Path, chatml: Any) -> None:
    rows = [row(ASK, GOOD), *(sample for sample, _, _ in FAULTS)]
    path = tmp_path / ("a.jsonl" if kind == "lines" else "a.json")
    content = "\n".join(map(json.dumps, rows))
    if kind != "lines":
        content = "[" + content.replace("\n", ",\n") + "]"
    path.write_text(f'{{"data": {content}}}' if kind == "data" else content)
    prefix = {"lines": "", "list": ".[%d]", "data": ".data[%d]"}[kind]
    found = faults(path, chatml)
    assert len(found) == len(FAULTS)
    for number, (line, (_, inside, value)) in enumerate(zip(found, FAULTS, strict=True), start=1):
        place = (prefix % number if prefix else "") + inside
        assert line.startswith(f"{number + 1}: {place}: found "), line
        if shutil.which("jq"):
            text = content.split("\n")[number] if kind == "lines" else path.read_text()
            told = subprocess.run(
                ["jq", "-c", place], input=text, capture_output=True, text=True, check=True
            )
            assert json.loads(told.stdout) == value


def test_a_mark_that_differs_has_its_path(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '<|im_end|>' }}{% else %}{%"
        " generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    (tmp_path / "a.json").write_text(json.dumps([row(ASK, GOOD)]))
    cfg = DataConfig(source=str(tmp_path / "a.json"), format="messages", cache=False)
    tokenizer = load_tokenizer(write_json(tmp_path / "marks", template=source))
    said = build_dataset(cfg, tokenizer, 64).report.first_mark
    assert said.startswith(
        f"{tmp_path}/a.json:1: .[0].messages[1]: the template marks 'b', and what is generated is"
    )


def test_columns_by_their_own_names(tmp_path: Path, chatml: Any) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]
    rows = [
        {"chat": turns, "my tools": None},
        {"chat": [*turns[:1], {"from": "gpt", "value": "b"}], "my tools": 7},
    ]
    good = {"chat": [turns[0], {"from": "gpt", "value": "b"}], "my tools": None}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, good])))
    columns = {"conversations": "chat", "tools": "my tools"}
    assert faults(tmp_path / "a.jsonl", chatml, format="sharegpt", columns=columns) == [
        "1: .chat[1].value: found an empty answer, expected text to train on",
        '2: .["my tools"]: found a number, expected a list of objects',
    ]


def test_a_column_under_another_name_is_read_once(tmp_path: Path, chatml: Any) -> None:
    """`input` as the instruction is no input as well."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": "Hi!", "output": "b"}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"instruction": "Hi!", "output": "b"}))
    found, expected = (
        build_dataset(
            DataConfig(source=str(tmp_path / name), format="alpaca", columns=columns, cache=False),
            chatml,
            64,
        ).ids.tolist()
        for name, columns in (("a.jsonl", {"instruction": "input"}), ("b.jsonl", {}))
    )
    assert found == expected


def test_paths_and_places() -> None:
    assert (
        get_path({}, "a") == ".a"
        and get_path(RenamedSample({"b c": 1}, {"a": "b c"}, "data"), "a") == '.["b c"]'
    )
    assert (
        prefix_place("rows.json:4: .[1]", ".a[0]: found null")
        == "rows.json:4: .[1].a[0]: found null"
    )
    assert prefix_place("rows.json:4: .[1]", "found null") == "rows.json:4: .[1]: found null"
    assert (
        prefix_place("rows.json:4: .[1]", "./m/template.jinja: fails")
        == "rows.json:4: .[1]: ./m/template.jinja: fails"
    )
    assert prefix_place("rows.jsonl:4", ".a: found null") == "rows.jsonl:4: .a: found null"


def test_values_in_words() -> None:
    """No word of Python's."""
    values = [None, True, 3, "x", [1], {}, b"x", object()]
    kinds = [
        "null",
        "true or false",
        "a number",
        "text",
        "a list",
        "an object",
        "bytes",
        "a value of another kind",
    ]
    assert [describe_kind(value) for value in values] == kinds
    assert [format_value(value) for value in values[:5]] == ["null", "true", "3", "'x'", "a list"]
