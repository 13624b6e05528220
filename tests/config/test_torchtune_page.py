"""docs/torchtune.md: each key of torchtune that it lists is answered with the key beside it when it is typed here."""

import re

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config.keys import read_schema
from recipe_lib.config.recipes import RECIPE_CONFIGS
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from tests.house.files import ROOT

TEXT = (ROOT / "docs" / "torchtune.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| `([\w.]+)`(.*) \|$", TEXT.partition("## Keys")[2], re.MULTILINE)
SAME = {"tokenizer.path", "lora.target_modules"}


def test_the_table_is_read():
    assert len(ROWS) > 30


@pytest.mark.parametrize(("theirs", "ours", "rest"), ROWS, ids=lambda text: text if "." in text else None)
def test_a_key_is_answered_with_ours(theirs: str, ours: str, rest: str, capsys: pytest.CaptureFixture):
    keys = read_schema(LoraFinetuneConfig).keys
    assert ours in keys or any(key.startswith(f"{ours}.") for key in keys)
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", rest):
        assert name in keys
    if theirs == ours or theirs.endswith("_component_"):
        return
    assert main(["validate", "llama3/8B_lora", f"{theirs}=1"]) == 2
    said = capsys.readouterr().err
    assert f"{theirs}=1: unknown key; did you mean {ours}" in said, said


@pytest.mark.parametrize("name", sorted({
    name for row in re.findall(r"^\| (`\w+_(?:distributed|single_device)`.*?) \|", TEXT, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
}))  # fmt: skip
def test_a_recipe_is_answered_with_ours(name: str, capsys: pytest.CaptureFixture):
    if name in RECIPE_CONFIGS:
        return
    assert main(["run", name, "--config", "llama3/8B_full"]) == 2
    said = capsys.readouterr().err
    assert any(f"did you mean {ours}?" in said for ours in RECIPE_CONFIGS), said
