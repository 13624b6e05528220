"""Of a copied recipe, what stops a run is told before it starts; others read their words
themselves.
"""

import shutil
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from recipe_lib.cli.recipes import RecipeFile, check_arguments
from tests.cli.commands import ROOT


def test_a_recipe_that_reads_its_words_itself_is_not_imported_before_it_runs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "program.py"
    file.write_text("raise ValueError\n", encoding="utf-8")
    assert check_arguments(RecipeFile.find(str(file)), ["anything", "--else"]) is None


LORA = (ROOT / "recipes" / "lora_finetune_distributed.py").read_text(encoding="utf-8")
CALL = "parse_arguments(argv, Config)"
PROGRAMS = {
    "a word in a comment": f"raise ValueError  # run_recipe(Recipe, {CALL})\n",
    "words of its own": LORA.replace(
        "    training.run", '    argv = ["--config", "demo/lora", *argv]\n    training.run'
    ),
    "another way": LORA.replace(CALL, "load_config('demo/lora', argv, Config)"),
    "no Python": f"{CALL} (\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_reads_its_words_otherwise_needs_no_config(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAMS[name], encoding="utf-8")
    assert not RecipeFile.find(str(file)).has_known_arguments()
    assert check_arguments(RecipeFile.find(str(file)), ["anything"]) is None


def test_a_copy_s_class_may_have_another_name(tmp_path: Path) -> None:
    file = tmp_path / "named.py"
    own_class = "@dataclass\nclass MyConfig(Config):\n    sparkle: int = 1\n\n\ndef main("
    text = LORA.replace(CALL, CALL.replace("Config", "MyConfig")).replace("def main(", own_class)
    file.write_text(f"from dataclasses import dataclass\n{text}", encoding="utf-8")
    recipe = RecipeFile.find(str(file))
    assert recipe.has_known_arguments() and recipe.load_schema().__name__ == "MyConfig"
    assert check_arguments(recipe, ["--config", "demo/lora", "sparkle=3"]).sparkle == 3


def test_what_is_missing_of_a_copy_is_told_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a strategy chosen for it."""
    monkeypatch.chdir(ROOT)
    copy = tmp_path / "mine.py"
    shutil.copy(ROOT / "recipes" / "lora_finetune_distributed.py", copy)
    words = [
        "--config",
        "demo/lora",
        "model.path=examples",
        "tokenizer.path=examples/demo/tokenizer",
    ]
    words.append(f"output_dir={tmp_path}/new")
    nowhere = (
        "error: /nope: no such folder; expected a model folder, or a hub id such as OWNER/NAME"
    )
    rows = (
        "/nope.jsonl: no such file or folder; set data.source to one of yours, or to hub:OWNER/NAME"
        " for a hub dataset"
    )
    config = (
        "error: examples/config.json: no such file; expected a Hugging Face model folder with"
        " config.json"
    )
    expected = {
        (): (
            f"error: tune run: no config; expected: tune run {copy} --config CONFIG (see `tune ls`)"
        ),
        (
            "--config",
            "nope.yaml",
        ): "error: nope.yaml: no such config; `tune ls` lists the names, or give a path to a file",
        (*words, "model.path=/nope"): nowhere,
        (*words, "model.path=/nope", "parallel.strategy=auto"): nowhere,
        (*words, "data.source=/nope.jsonl"): f"{config}\nerror: {rows}",
    }
    for given, lines in expected.items():
        kept = [
            word for word in given if word != words[2] or "model.path=/nope" not in given
        ]  # no key twice
        flags = ["--nproc_per_node", "2"] if "parallel.strategy=auto" in given else []
        assert main(["run", *flags, str(copy), *kept]) == 2
        assert capsys.readouterr() == ("", f"{lines}\n")
