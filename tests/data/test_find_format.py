"""The format of samples by their columns: of real files, of columns by other names, and what is
told of others.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.schema import FullFinetuneConfig, SourceConfig
from recipe_lib.config.schema_data import DataConfig, ModelConfig, ValidationConfig
from recipe_lib.data.find_format import find_format, settle_formats
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from recipe_lib.methods.reward.config import RewardFinetuneConfig

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def found(source: str, columns: dict[str, str] | None = None) -> str:
    return find_format(open_sources(SourceConfig(source)), columns or {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alpaca/alpaca_en_demo.json", "alpaca"),
        ("alpaca/identity.json", "alpaca"),
        ("toolcall/glaive_toolcall_en_demo.json", "sharegpt"),
        ("dpo/dpo_en_demo.json", "preference"),
        ("text/c4_demo.jsonl", "text"),
        ("text/wiki_demo.txt", "text"),
        ("chat/axolotl_sharegpt_conversation.json", "sharegpt"),
    ],
)
def test_real_files(name: str, expected: str, realdata: Path) -> None:
    assert found(str(realdata / "datasets" / name)) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT}, "messages"),
        ({"prompt": "a", "prompt_id": "7", "messages": CHAT}, "messages"),
        ({"conversations": TURNS}, "sharegpt"),
        ({"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]}, "preference"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"instruction": "a", "input": "", "output": "b", "text": "a b"}, "alpaca"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"text": "a", "meta": {"url": "x"}}, "text"),
        ({"messages": "a, b", "text": "a b"}, "text"),  # messages that are none
        ({"messages": "a, b"}, "messages"),  # for its line to say so
        ({"messages": json.dumps(CHAT), "prompt": "a", "completion": "b"}, "messages"),
        ({"conversations": json.dumps(TURNS), "text": "a"}, "sharegpt"),
        ({"messages": None, "instruction": "a", "output": "b"}, "alpaca"),
        ({"instruction": None, "output": None}, "alpaca"),  # for its line to say that they are null
        ({"messages": None}, "messages"),
        ({"instruction": None, "output": None, "text": "a"}, "text"),
    ],
)
def test_columns(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert found(write(tmp_path / "rows.jsonl", row)) == expected


def test_the_most_of_the_first_samples_decide(tmp_path: Path) -> None:
    rows = [{"text": "stray"}, *[{"messages": CHAT}] * 80, *[{"text": "late"}] * 500]
    assert found(write(tmp_path / "rows.jsonl", *rows)) == "messages"
    (tmp_path / "rows.jsonl").write_text("{oops}\n\n[1]\n" + json.dumps({"messages": CHAT}) + "\n")
    assert found(str(tmp_path / "rows.jsonl")) == "messages"
    (tmp_path / "rows.jsonl").write_text("{oops}\n")
    assert found(str(tmp_path / "rows.jsonl")) == "auto"  # nothing to tell it by


def test_columns_by_other_names(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"question": "a", "answer": "b"})
    assert found(rows, {"instruction": "question", "output": "answer"}) == "alpaca"
    assert found(rows, {"prompt": "question", "completion": "answer"}) == "prompt_completion"
    with pytest.raises(DataError) as caught:
        found(rows)
    said = str(caught.value)
    assert (
        "rows.jsonl:1: found the columns answer, question, which are those of no format (" in said
    )
    assert (
        "set data.format=alpaca data.columns.instruction=question data.columns.output=answer"
        in said
    )
    with pytest.raises(
        DataError,
        match=r"data.columns.instructoin: no format has such a column; did you mean instruc",
    ):
        found(rows, {"instructoin": "question"})


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            {"instruction": "a", "context": "b", "response": "c", "category": "d"},
            "set data.format=alpaca data.columns.output=response data.columns.input=context, if",
        ),
        (
            {"system_prompt": "s", "question": "a", "response": "c"},
            (
                "set data.format=alpaca data.columns.instruction=question"
                " data.columns.output=response data.columns.system=system_prompt, if"
            ),
        ),
        (
            {"instruction": "a", "input": "b", "answer": "c"},
            "set data.format=alpaca data.columns.output=answer, if",
        ),
        (
            {"input": "a", "output": "b"},
            "set data.format=alpaca data.columns.instruction=input, if",
        ),
        ({"text": None, "content": "a"}, "set data.format=text data.columns.text=content, if"),
        (
            {"question": None, "answer": "a"},
            "say which column is which with data.format and data.columns",
        ),
        (
            {"context": "a", "question": "b", "answers": {"text": ["c"], "answer_start": [0]}},
            "say which column is which with data.format and data.columns",
        ),
        (
            {"question": "a", "answers": ["b", "c"]},
            "say which column is which with data.format and data.columns",
        ),
        (
            {"dialog": [{"speaker": "a", "text": "b"}]},
            "say which column is which with data.format and data.columns",
        ),
    ],
)
def test_the_remedy_names_all_columns(row: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        found(write(tmp_path / "rows.jsonl", row))
    assert f"; {remedy}" in str(caught.value)
    if None in row.values():
        assert " (null)" in str(caught.value).partition(", which are")[0]


def config(**changes: Any) -> FullFinetuneConfig:
    validation = changes.pop("validation", ValidationConfig())
    return FullFinetuneConfig(
        recipe="full_finetune_distributed",
        model=ModelConfig(path="x"),
        data=DataConfig(**changes),
        validation=validation,
    )


def test_the_config_has_what_was_found(tmp_path: Path) -> None:
    """So that the run's config.yaml means the same samples later, whatever is in the file then."""
    chats, text = (
        write(tmp_path / "chats.jsonl", {"messages": CHAT}),
        write(tmp_path / "text.jsonl", {"text": "a"}),
    )
    cfg = config(source=chats, validation=ValidationConfig(source=text))
    assert settle_formats(cfg) == [
        f"data: format messages, found by the columns of {chats}",
        f"data: format text, found by the columns of {text}",
    ]
    assert (cfg.data.format, cfg.validation.format) == ("messages", "text")
    cfg = config(
        sources=[SourceConfig(chats), SourceConfig(text), SourceConfig(chats, format="sharegpt")]
    )
    assert len(settle_formats(cfg)) == 2
    assert [source.format for source in cfg.data.sources] == ["messages", "text", "sharegpt"]
    cfg = config(source=chats, format="alpaca", validation=ValidationConfig(source=chats))
    assert settle_formats(cfg) == [] and (cfg.data.format, cfg.validation.format) == (
        "alpaca",
        None,
    )


def test_pairs_are_for_the_recipe_of_pairs(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(
        ConfigError,
        match="which this recipe has no use for; choose other samples, or run dpo_distribut",
    ):
        settle_formats(config(source=pairs))


@pytest.mark.parametrize(
    ("settings", "row", "names"),
    [
        ([], {"prompt": "a", "completion": "b", "worse": "c"}, ["completion", "worse"]),
        ([], {"messages": CHAT, "rejected_messages": [CHAT[0], CHAT[0] | CHAT[1] | {"content": "c"}]},
         ["messages", "rejected_messages"]),
        (["dpo.loss=kto"], {"prompt": "a", "completion": "b", "ok": True}, ["ok"]),
        (["dpo.loss=kto"], {"prompt": "a", "completion": "b", "label": None}, ["label"]),
        (["reward.loss=classification"], {"text": "a", "kind_of_it": "b"}, ["kind_of_it"]),
    ],
)  # fmt: skip
def test_the_remedy_for_a_loss_that_needs_more_leads_on(
    settings: list[str], row: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    """Setting what the line says ends it, whatever else the rows look like."""
    source = write(tmp_path / "rows.jsonl", row)
    name, schema = (
        ("reward", RewardFinetuneConfig)
        if "reward" in "".join(settings)
        else ("dpo", DpoFinetuneConfig)
    )
    (tmp_path / "c.yaml").write_text(f"recipe: {name}_distributed\nmodel: {{path: x}}\n")
    overrides = [*settings, f"data.source={source}"]
    with pytest.raises(ConfigError, match="name yours with") as caught:
        settle_formats(load_config(str(tmp_path / "c.yaml"), overrides, schema))
    said = str(caught.value).partition("name yours with ")[2].partition(", or train")[0]
    left = iter(names)
    remedy = [word.replace("NAME", next(left)) if "NAME" in word else word for word in said.split()]
    assert not list(left)
    cfg = load_config(str(tmp_path / "c.yaml"), [*overrides, *remedy], schema)
    assert settle_formats(cfg) == []
    assert set(cfg.data.columns.values()) == set(names)
