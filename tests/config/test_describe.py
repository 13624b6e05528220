"""What is generated from the schema: the reference page, the terminal text, and a config as
YAML.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.compatibility.table import list_rules
from recipe_lib.config.describe import (
    format_config,
    format_markdown,
    format_terminal_reference,
    format_value,
)
from recipe_lib.config.flat_schema import build_item_schema, read_schema
from recipe_lib.config.load import load_with_origins
from recipe_lib.config.paths import list_configs, read_recipe_configs
from recipe_lib.config.schema import SourceConfig, key
from recipe_lib.methods.dpo.config import DpoFinetuneConfig

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == format_markdown(), "run `python -m recipe_lib.config.describe > docs/config.md`"


def test_every_key_and_combination_is_described():
    page = format_markdown()
    text = format_terminal_reference(DpoFinetuneConfig)
    inner = build_item_schema(read_schema(FullFinetuneConfig).keys["data.sources"], 0).keys
    for name, described in {**read_schema(DpoFinetuneConfig).keys, **inner}.items():
        assert described.help.endswith("."), f"{name}: a line of description ends with a full stop"
        assert f"| `{name}` |" in page
        assert f"  {name} = " in text
        assert described.help in text
    for entry in list_rules():
        assert f"| {entry.reason} | {entry.remedy} |" in page


def test_every_key_has_its_name_elsewhere():
    """Of torch, HF, PEFT, TRL, torchtitan, Megatron, torchtune or another tool, or the reason why
    none has one.
    """
    page, tools = (
        format_markdown(),
        (
            "torch",
            "HF",
            "PEFT",
            "TRL",
            "Megatron",
            "DeepSpeed",
            "Axolotl",
            "LLaMA-Factory",
            "vLLM",
            "Soup",
        ),
    )
    inner = build_item_schema(read_schema(DpoFinetuneConfig).keys["data.sources"], 0).keys
    for name, described in {**read_schema(DpoFinetuneConfig).keys, **inner}.items():
        known = described.limits.get("known_as", "")
        assert known.startswith(("none has it: ", "as data.")) or known.startswith(tools), (
            f"{name}: {known!r}"
        )
        assert f" | {known} |" in page


def test_every_row_has_five_cells():
    for line in format_markdown().splitlines():
        if line.startswith("| `") and "." in line.split("|")[1]:
            assert line.replace("\\|", "").count("|") in (4, 6)


def test_own_keys_are_described():
    @dataclasses.dataclass
    class Mine(FullFinetuneConfig):
        noise: float = key(0.5, "Share of tokens | replaced.", minimum=0, below=1)
        bare: int = 3

    assert (
        "| `noise` | `0.5` | a number >= 0 and < 1 | Share of tokens \\| replaced. |"
        in format_markdown(Mine)
    )
    assert "  bare = 3   (an integer)\n" in format_terminal_reference(Mine)


def test_resolved(write):
    path = write("model:\n  path: x\ndata: {source: y}\noptimizer:\n  lr: 1e-4\n")
    rows = load_with_origins(path, ["epochs=2", "data.columns.a=b", "~seed"]).rows
    assert [name for name, _, _ in rows] == list(read_schema(FullFinetuneConfig).keys)
    told = {name: (value, where) for name, value, where in rows}
    assert told["model.path"] == ("x", f"{path}:2")
    assert told["data.source"] == ("y", f"{path}:3")
    assert told["optimizer.lr"] == (1e-4, f"{path}:5")
    assert told["epochs"] == (2, "command line")
    assert told["data.columns"] == ({"a": "b"}, "command line")
    assert told["seed"] == (42, "default")
    cfg = load_config(path, ["epochs=2", "data.columns.a=b"])
    for name, value, _ in rows:
        found = cfg
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


def test_resolved_names_both_places_of_a_mapping(write):
    path = write("model: {path: x}\ndata:\n  source: y\n  columns: {a: b}\n")
    told = {
        name: (value, where)
        for name, value, where in load_with_origins(path, ["data.columns.c=d"]).rows
    }
    assert told["data.columns"] == ({"a": "b", "c": "d"}, f"{path}:4, command line")


# Enough of them to have every recipe and family; all are loaded by the tests of the configs
# themselves.
SHIPPED = [(recipe, name) for recipe, names in list_configs().items() for name in names[::7]]


@pytest.mark.parametrize(("recipe", "name"), SHIPPED)
def test_yaml_of_a_shipped_config_reads_back(write, recipe, name):
    schema = read_recipe_configs()[recipe]
    cfg = load_config(name, (), schema)
    assert load_config(write(format_config(cfg)), (), schema) == cfg


def test_yaml_of_sources_reads_back(write):
    cfg = FullFinetuneConfig()
    cfg.model.path = "x"
    cfg.data.sources = [
        SourceConfig("a: b", 0.5),
        SourceConfig("hub:a/b", columns={"x": "true"}, format="text"),
    ]
    written = format_config(cfg)
    assert (
        '    - {source: "a: b", weight: 0.5, format: null, split: null, columns: null, max_samples:'
        " null}\n" in written
    )
    assert load_config(write(written)) == cfg


TEXTS = ["a", "1", "1e-5", "true", "null", "none", "None", "~", "on", "off", "Yes", "no",
         "a: b", "a #b", "[x]", "{x}", "'x'", '"x"', "é",
         "日本", "-", "- a", "@x", "x=y", "a\\b", "%a", "😀", "2024-01-01", "hub:owner/name", "0x1", ".5", "a,b",
         "?", "*x", "&x", "!x", "|", ">", "`", " x ", "=", "<<"]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_yaml_of_any_text_reads_back(write, text):
    import yaml

    cfg = FullFinetuneConfig()
    cfg.log.run_name = text
    cfg.model.path = cfg.data.source = cfg.output_dir = os.path.expanduser(
        text
    )  # as a path is read
    cfg.parallel.fsdp_wrap_policy = [text, text]
    cfg.data.columns = {text: text}
    cfg.optimizer.lr, cfg.optimizer.eps = 1e-300, 123456789.123456789
    written = format_config(cfg)
    assert load_config(write(written)) == cfg
    if not set(text) & {"\\"}:
        assert yaml.safe_load(written)["data"]["columns"] == {
            text: text
        }  # other readers see the same text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1e-5, "1e-05"), ([0.9, 1], "[0.9, 1]"), ({"a": "1"}, '{a: "1"}'),
     ("none", "none"), (Path("/a/b"), "/a/b"), ("a b", '"a b"'), ([], "[]"), ({}, "{}")],
)  # fmt: skip
def test_value_text(value, text):
    assert format_value(value) == text
