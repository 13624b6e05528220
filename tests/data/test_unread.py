"""Every column of a row and every key of a message is read, or known to change nothing and named,
or a fault.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe_lib.config import registry
from recipe_lib.config.registry import register
from recipe_lib.config.schema_data import SourceConfig
from recipe_lib.data.column_names import is_idle
from recipe_lib.data.formats import build_conversation, columns
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.data.row_cases import (
    COLUMNS,
    CONTENT,
    IDLE,
    KEYS,
    NOTHING,
    OTHER,
    ROWS,
    TOOL,
    encode,
    encode_file,
    get_format,
    write_tokenizer_folder,
)

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hot?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "31"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Dry?"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer_folder(tmp_path_factory.mktemp("qwen3")))


def outcome(
    tokenizer: Tokenizer, form: str, row: dict[str, Any], name: str, bare: str, **settings: Any
) -> str:
    """`idle`, `used` or the fault that names it; anything else fails."""
    text, trained, report = encode(tokenizer, form, row, **settings)
    if report.bad_samples:
        (line,) = report.first_bad.values()
        return line
    if any(idle == name or idle.startswith(f"{name}.") for idle in report.idle_names):
        assert f"{text} {trained}" == bare, f"{name} is said to change nothing"
        return "idle"
    assert f"{text} {trained}" != bare, f"{name} is neither read nor named"
    return "used"


# Read, and to be seen elsewhere: a number of the pair; and what the template asks about before an
# answer alone.
ELSEWHERE = {"preference": ("margin",), "classification of messages": ("chat_template_kwargs",)}


@pytest.mark.parametrize("case", ROWS)
def test_no_column_is_passed_over(case: str, qwen3: Tokenizer) -> None:
    row = ROWS[case]
    form = get_format(case)
    text, trained, report = encode(qwen3, form, row)
    bare = f"{text} {trained}"
    assert not report.bad_samples and not report.idle_names
    for name, value in (CONTENT | COLUMNS | IDLE).items():
        if name in row or name in ELSEWHERE.get(case, ()):
            continue
        found = outcome(qwen3, form, row | {name: value}, name, bare)
        if name in CONTENT:
            assert name in found, (name, found)
            assert_remedy_works(qwen3, form, row | {name: value}, found, bare)
        elif name in IDLE:
            assert found == "idle", (name, found)
        else:
            assert found in ("idle", "used") or name in found, (name, found)
    columns = CONTENT | COLUMNS | IDLE
    for nothing in NOTHING:
        text, trained, report = encode(qwen3, form, dict.fromkeys(columns, nothing) | row)
        assert (f"{text} {trained}", dict(report.idle_names), dict(report.bad_samples)) == (
            bare,
            {},
            {},
        ), nothing


def assert_remedy_works(
    tokenizer: Tokenizer, form: str, row: dict[str, Any], line: str, bare: str
) -> None:
    """What the line says to set leads to the row without the column, which is named then."""
    if "data.ignore_columns=" not in line:
        return
    names = yaml.safe_load(re.search(r"data\.ignore_columns=(\[.*?\]) if", line)[1])  # type: ignore[index]
    text, trained, report = encode(tokenizer, form, row, ignore_columns=names)
    assert (f"{text} {trained}", list(report.idle_names)) == (bare, names)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_no_key_of_a_message_is_passed_over(form: str, role: str, qwen3: Tokenizer) -> None:
    column = {"messages": "messages", "sharegpt": "conversations"}[form]
    at = max(number for number, message in enumerate(CHAT) if message["role"] == role)
    text, trained, _ = encode(qwen3, form, {column: CHAT, "tools": [TOOL]})
    bare = f"{text} {trained}"
    flags = ("train", "training", "loss", "weight", "mask", "masked")
    for key, value in KEYS.items():
        chat = [
            message | ({key: value} if number == at else {}) for number, message in enumerate(CHAT)
        ]
        row = {column: chat, "tools": [TOOL]}
        if key in flags and role != "assistant" or (key, role) == ("tool_call_id", "tool"):
            continue  # not trained as it is; and what belongs to which call
        found = outcome(qwen3, form, row, f"messages.{key}", bare)
        if key in flags:
            assert found == "used" and "No." not in "".join(encode(qwen3, form, row)[1]), key
        elif found not in ("idle", "used"):
            assert key in found, (key, found)
            assert_remedy_works(qwen3, form, row, found, bare)
    for nothing in (None, "", [], {}):
        chat = [
            dict.fromkeys(KEYS, nothing) | message if number == at else message
            for number, message in enumerate(CHAT)
        ]
        text, trained, report = encode(qwen3, form, {column: chat, "tools": [TOOL]})
        assert (f"{text} {trained}", dict(report.idle_names), dict(report.bad_samples)) == (
            bare,
            {},
            {},
        ), nothing


@pytest.mark.slow
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_no_key_of_a_part_is_passed_over(role: str, qwen3: Tokenizer) -> None:
    """Of a content that is a list of parts: what changes nothing is named, the rest is a fault."""
    at = max(number for number, message in enumerate(CHAT) if message["role"] == role)
    text, trained, _ = encode(qwen3, "messages", {"messages": CHAT, "tools": [TOOL]})
    bare = f"{text} {trained}"

    def chat(**keys: Any) -> dict[str, Any]:
        parts = [{"type": "text", "text": CHAT[at]["content"]} | keys]
        changed = [
            message | ({"content": parts} if at == number else {})
            for number, message in enumerate(CHAT)
        ]
        return {"messages": changed, "tools": [TOOL]}

    for name, value in ({"cache_control": {"type": "ephemeral"}, "index": 0} | IDLE | KEYS).items():
        if name == "text":  # its content
            continue
        found = outcome(qwen3, "messages", chat(**{name: value}), f"messages.content.{name}", bare)
        assert (
            found == "idle"
            if is_idle(name, value)
            else f".messages[{at}].content[0].{name}: found" in found
        ), name
    for nothing in NOTHING:
        _, _, report = encode(
            qwen3, "messages", chat(**dict.fromkeys(KEYS.keys() - {"text"}, nothing))
        )
        assert not report.idle_names and not report.bad_samples


def put_call(where: str, keys: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A format, and a row of it with a call that has these keys."""
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    said = json.dumps(function | keys)
    call = {
        "call": CALL | keys,
        "function": {"function": function | keys},
        "bare call": function | keys,
    }
    turns: dict[str, Any] = {
        "function_call": {"role": "assistant", "content": "", "function_call": function | keys},
        "turn": {"from": "function_call", "value": said},
        "message": {"role": "tool_call", "content": said},
    }
    turn = turns.get(where) or {"role": "assistant", "content": "", "tool_calls": [call[where]]}
    chat = [CHAT[1], turn, *CHAT[3:]]
    return (
        ("sharegpt", {"conversations": chat})
        if where == "turn"
        else ("messages", {"messages": chat})
    )


@pytest.mark.parametrize(
    "where", ["call", "function", "bare call", "function_call", "turn", "message"]
)
def test_no_key_of_a_call_is_passed_over(where: str, qwen3: Tokenizer) -> None:
    form, row = put_call(where, {})
    text, trained, _ = encode(qwen3, form, row)
    bare = f"{text} {trained}"
    keys = {
        name: value
        for name, value in (CONTENT | COLUMNS | IDLE).items()
        if name not in ("id", "audio")
    }
    for name, value in keys.items():
        form, row = put_call(where, {name: value})
        if name == "function" and where in ("call", "bare call", "function_call"):
            continue  # the call itself
        found = outcome(qwen3, form, row, f"messages.tool_calls.{name}", bare)
        assert found == "idle" if is_idle(name, value) else f"{name}: found" in found, (name, found)
    form, row = put_call(where, dict.fromkeys(keys.keys() - {"function"}, None))
    text, trained, report = encode(qwen3, form, row)
    assert (f"{text} {trained}", dict(report.idle_names)) == (bare, {})


@pytest.mark.parametrize(
    "first", [{"from": "gpt", "value": "Let me see."}, {"from": "function_call"}]
)
def test_no_key_of_a_call_after_words_is_passed_over(
    first: dict[str, Any], qwen3: Tokenizer
) -> None:
    """Which is joined to the message before it."""
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}

    def row(**keys: Any) -> dict[str, Any]:
        return {"conversations": [CHAT[1], call | first, call | keys, *CHAT[3:]]}

    text, trained, _ = encode(qwen3, "sharegpt", row())
    bare = f"{text} {trained}"
    for name, value in KEYS.items():
        if name == "value":  # its content
            continue
        if name in ("train", "training", "loss", "weight", "mask", "masked"):
            _, _, report = encode(qwen3, "sharegpt", row(**{name: value}))
            assert list(report.bad_samples) == ["call apart from its words"]
            continue
        found = outcome(qwen3, "sharegpt", row(**{name: value}), f"messages.{name}", bare)
        assert found == "idle" or name in found, (name, found)
        if found != "idle":
            assert_remedy_works(qwen3, "sharegpt", row(**{name: value}), found, bare)
    text, trained, report = encode(
        qwen3, "sharegpt", row(**dict.fromkeys(KEYS.keys() - {"value"}, None))
    )
    assert (f"{text} {trained}", dict(report.idle_names)) == (bare, {})


@pytest.mark.parametrize("train_on", ["assistant", "last", ["user"], "all"])
def test_messages_after_the_last_answer_are_told(train_on: Any, qwen3: Tokenizer) -> None:
    chat = [*CHAT, {"role": "user", "content": "Thank you."}]
    text, _, report = encode(
        qwen3, "messages", {"messages": chat, "tools": [TOOL]}, train_on=train_on
    )
    line = "data: in 1 conversation messages follow the last one that is trained; they are left out"
    is_left_out = "Thank you." not in text
    assert (
        is_left_out
        == (line in report.format_lines())
        == ("user" not in train_on and train_on != "all")
    )
    _, _, report = encode(qwen3, "messages", {"messages": CHAT, "tools": [TOOL]}, train_on=train_on)
    assert (report.endings == 0) == (train_on != ["user"])  # whose answer comes last


@pytest.mark.parametrize("margin", [0.5, -2, "0.5", "big"])
def test_a_margin_is_told(margin: Any, qwen3: Tokenizer) -> None:
    """No loss of preferences takes it into account, but that of rewards."""
    row = ROWS["preference"]
    _, _, report = encode(qwen3, "preference", row | {"margin": margin}, row, row | {"margin": 0})
    line = "data: 1 pair with a margin, which reward_distributed alone reads"
    assert report.margins == 1 and line in report.format_lines()


@pytest.mark.parametrize("flags", [
    {"train": True, "weight": 0}, {"training": False, "weight": 1}, {"train": False, "training": True},
    {"loss": True, "masked": True}, {"train": True, "mask": True},
])  # fmt: skip
def test_flags_that_differ(flags: dict[str, Any], qwen3: Tokenizer) -> None:
    chat = [CHAT[1], CHAT[4] | flags, CHAT[5], CHAT[6]]
    _, _, report = encode(qwen3, "messages", {"messages": chat})
    (line,) = report.first_bad.values()
    assert all(name in line for name in flags) and "expected them to say the same" in line


@pytest.mark.parametrize(("form", "row", "idle"), [
    ("messages", {"prompt": "Hot?", "prompt_id": "7", "messages": CHAT[1:2] + CHAT[4:5]}, ["prompt", "prompt_id"]),
    ("messages", {"messages": CHAT[5:], "text": "<|im_start|>user\nDry?<|im_end|>\nassistant: No."}, ["text"]),
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3",
                "text": "Below is an instruction.\n### Instruction:\nAdd.\n1 2\n### Response:\n3"}, ["text"]),
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3",
                "text": "Below it is.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3"}, ["text"]),
    ("preference", {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4",
                    "full_text": "Add.\n\n1 2\n3 or 4"},
     ["full_text"]),
    ("messages", {"prompt": "Dry?", "chosen": CHAT[5:], "messages": CHAT[5:], "rejected": [CHAT[5], CHAT[4]],
                  "score_chosen": 8.0}, ["chosen", "prompt", "rejected", "score_chosen"]),
    ("preference", {"prompt": "Dry?", "chosen": CHAT[5:], "messages": CHAT[5:], "rejected": [CHAT[5], CHAT[4]]},
     ["messages"]),
])  # fmt: skip
def test_what_repeats_the_row_changes_nothing(
    form: str, row: Any, idle: list[str], qwen3: Tokenizer
) -> None:
    text, _, report = encode(qwen3, form, row)
    assert text and not report.bad_samples and sorted(report.idle_names) == idle


@pytest.mark.parametrize(
    "case", ["alpaca", "sharegpt", "messages", "prompt_completion", "prompt_completion of messages"]
)
def test_answers_that_are_not_wanted_are_not_trained(case: str, qwen3: Tokenizer) -> None:
    for name in ("label", "kto_tag", "is_correct", "train"):
        for value in (False, "false", 0) if name in ("label", "kto_tag") else (False,):
            _, trained, report = encode(qwen3, get_format(case), ROWS[case] | {name: value})
            assert not trained and list(report.bad_samples) == [f"{name} is not read"], (
                name,
                value,
            )
        _, trained, report = encode(qwen3, get_format(case), ROWS[case] | {name: True})
        assert trained and report.idle_names == {name: 1}
    _, trained, report = encode(qwen3, get_format(case), ROWS[case] | {"rejected": "Lima."})
    assert not trained and list(report.bad_samples) == ["rejected is not read"]


@pytest.mark.parametrize("case", ROWS)
def test_a_weight_of_one_changes_nothing(case: str, qwen3: Tokenizer) -> None:
    """As JSON and as the text of a table's cell; any other weight is a fault that says so."""
    for name in ("weight", "sample_weight", "loss_scale", "importance_weight", "Chosen-Weights"):
        for value in (1, 1.0, "1", "1.0", " 1 "):
            _, _, report = encode(qwen3, get_format(case), ROWS[case] | {name: value})
            assert report.idle_names == {name: 1} and not report.bad_samples, (name, value)
        for value in (0, 0.5, "0", "0.5", "2", True, "high"):
            _, _, report = encode(qwen3, get_format(case), ROWS[case] | {name: value})
            assert list(report.bad_samples) == [f"{name} is not read"], (name, value)
            assert "found a weight of the row" in report.first_bad[f"{name} is not read"], (
                name,
                value,
            )


def test_it_holds_for_each_row_and_is_counted(qwen3: Tokenizer) -> None:
    rows = [ROWS["messages"] | {"id": number} for number in range(150)]
    rows[120] = rows[120] | {"history": [["a", "b"]]}
    rows[130] = rows[130] | {"foo": "bar", "b,c": "baz"}
    _, trained, report = encode(qwen3, "messages", *rows)
    assert len(trained) == 148 and report.idle_names == {"id": 148}
    assert list(report.bad_samples) == ["history is not read", "foo, b,c are not read"]
    assert (
        'set data.ignore_columns=[foo,"b,c"] if they change nothing'
        in report.first_bad["foo, b,c are not read"]
    )
    assert "data: columns that change nothing: id (148)" in report.format_lines()
    restored = type(report).from_json(report.to_json())
    assert (
        restored.idle_names == report.idle_names
        and restored.format_lines() == report.format_lines()
    )


@pytest.mark.parametrize("first", [True, False])
def test_no_key_beside_the_rows_is_passed_over(
    first: bool, tmp_path: Path, qwen3: Tokenizer
) -> None:
    """Of a file that holds its rows as `data`: what is said there is said of no row, and is not
    read.
    """
    rows = {"data": [ROWS["messages"]] * 2}
    path = tmp_path / "rows.json"

    def read(beside: dict[str, Any], **settings: Any) -> tuple[str, list[str], Any]:
        path.write_text(json.dumps(beside | rows if first else rows | beside, indent=1))
        (file,) = open_sources(SourceConfig(str(path)))
        return encode_file(qwen3, "messages", file, **settings)

    bare = read({})[:2]
    for name, value in (
        CONTENT | COLUMNS | IDLE | {"description": "Of Peru.", "test": OTHER, "n": [[3]]}
    ).items():
        if name in IDLE:
            *found, report = read({name: value})
            assert (tuple(found), report.idle_names) == (bare, {f"file.{name}": 1}), name
        elif name != "audio" and not is_idle(name, value):  # bytes, which JSON has none of
            with pytest.raises(DataError) as caught:
                read({name: value})
            line = str(caught.value)
            assert (
                line.startswith(f"{path}: .{name}: found ") and "beside the list of samples" in line
            ), line
            names = yaml.safe_load(re.search(r"data\.ignore_columns=(\[.*?\]) if", line)[1])  # type: ignore[index]
            *found, report = read({name: value}, ignore_columns=names)
            assert (tuple(found), list(report.idle_names)) == (bare, names)
    *found, report = read(
        dict.fromkeys(CONTENT | COLUMNS, None) | {"a": "", "b": [], "c": {}, "d": {"e": " "}}
    )
    assert (tuple(found), dict(report.idle_names)) == (bare, {})
    with pytest.raises(
        DataError, match=r"\.foo: found text; \.\[\"b,c\"\]: found a list beside .* if they change"
    ):
        read({"foo": "bar", "b,c": [{"a": 1}], "version": 1})


def test_ignored_names_that_no_row_has_are_told(qwen3: Tokenizer) -> None:
    names = ["foo", "gone", "messages.bar", "system"]
    chat = [CHAT[5], CHAT[6] | {"bar": {"a": "b"}}]
    row = {"messages": chat, "foo": "x", "system": "Be a pirate."}
    text, _, report = encode(qwen3, "messages", row, ignore_columns=names)
    assert "pirate" not in text and sorted(report.idle_names) == ["foo", "messages.bar", "system"]
    assert "warning: data: data.ignore_columns: no sample has gone" in report.format_lines()
    bad = row | {"gone": "y", "more": "z"}  # refused for `more`; it has `gone`
    _, _, report = encode(qwen3, "messages", row, bad, ignore_columns=names)
    assert report.bad_samples and not any("no sample has" in line for line in report.format_lines())


def test_all_keys_of_a_row_are_named_at_once(qwen3: Tokenizer) -> None:
    chat = [CHAT[5] | {"foo": "a"}, CHAT[6] | {"bar": True, "foo": "b"}]
    _, _, report = encode(qwen3, "messages", {"messages": chat})
    (line,) = report.first_bad.values()
    assert (
        line == "rows.jsonl:1: .messages[0].foo: found text, which the chat template does not read;"
        " .messages[1].bar: found true or false, which the chat template does not read; set"
        " data.ignore_columns=[messages.foo,messages.bar] if they change nothing"
    )


def test_formats_of_plugins_that_do_not_say_what_they_read(
    qwen3: Tokenizer, monkeypatch: Any
) -> None:
    monkeypatch.setitem(
        registry._components, "data.format", dict(registry._components["data.format"])
    )
    row = {"q": "Dry?", "a": "No.", "images": ["a.jpg"], "query": "Hot?", "id": 3}

    def read(row: dict[str, Any]) -> Any:
        chat = [
            {"role": "user", "content": row["q"]},
            {"role": "assistant", "content": row["a"], "mood": "calm"},
        ]
        return build_conversation(chat)

    register("data.format", "silent quiz")(read)
    register("data.format", "quiz")(
        columns("q", "a", optional=["input"])(lambda row: build_conversation(CHAT[5:]))
    )
    _, trained, report = encode(qwen3, "silent quiz", row)
    assert len(trained) == 1 and not report.idle_names and not report.bad_samples
    _, _, report = encode(qwen3, "quiz", row)
    assert list(report.bad_samples) == ["images, query are not read"]
    _, trained, report = encode(qwen3, "quiz", row, ignore_columns=["images", "query"])
    assert len(trained) == 1 and sorted(report.idle_names) == ["id", "images", "query"]


def test_control_characters_are_counted(qwen3: Tokenizer) -> None:
    chats = [
        [CHAT[5], {"role": "assistant", "content": text}]
        for text in ("\x08oxed{4}", "a\tb\r\n", "\\boxed{4}")
    ]
    _, _, report = encode(qwen3, "messages", *({"messages": chat} for chat in chats))
    assert (report.control_characters, report.first_control) == (1, "rows.jsonl:1")


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "{}\n"), ("a.json", "[{}]")):
        row = '{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
        (tmp_path / name).write_text(text.format(row) if "[" not in text else f"[{row}]")
        (file,) = open_sources(SourceConfig(str(tmp_path / name)))
        ((_, fault),) = file.read()
        assert str(fault) == "found the key 'content' twice in an object, expected it once"


@pytest.mark.parametrize("value", [1, 0.5, True, [1, 2], {"a": 1}, "words", ["words"]])
def test_a_name_that_nobody_knows_stops_whatever_it_holds(value: Any, qwen3: Tokenizer) -> None:
    """`mask_history: 1` changes what is trained elsewhere: a number is no more known than a
    text.
    """
    _, trained, report = encode(qwen3, "messages", ROWS["messages"] | {"mask_history": value})
    assert not trained and list(report.bad_samples) == ["mask_history is not read"]
    (line,) = report.first_bad.values()
    assert (
        ".mask_history: found " in line
        and "; set data.ignore_columns=[mask_history] if it changes nothing" in line
    )
