"""`tune ls`, `tune cat`, `tune validate`."""

import ast
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config import FullFinetuneConfig
from recipe_lib.config.paths import find_config, find_recipe, list_configs, list_recipes
from recipe_lib.config.suggest import show
from tests.cli.commands import tune

CONFIG = "llama3/8B_full"
RECIPE = "full_finetune_distributed"


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)"""
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_ls_shows_recipes_with_their_configs(capsys: pytest.CaptureFixture):
    code, out, err = run(capsys, "ls")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for name in list_recipes():
        docstring = ast.get_docstring(ast.parse(find_recipe(name).read_text()))
        start = lines.index(f"{name}: {docstring.splitlines()[0]}")
        configs = list_configs()[name]
        shown = lines[start + 1 : start + 1 + len(configs)]
        assert [line.split()[0] for line in shown] == configs
        for config, line in zip(configs, shown, strict=True):  # what the head of the file says
            head = find_config(config).read_text().split("\nrecipe:")[0].replace("\n# ", " ")
            reserved = head.split(" active, ")[1].split(" reserved")[0]
            meant = head.split("Meant for ")[1].split(":")[0] if "Meant for" in head else "1 rank"
            assert line.split("  ", 2)[2].split() == [*reserved.split(), "planned", *meant.split()]


def test_ls_of_one_recipe(capsys: pytest.CaptureFixture):
    code, out, _ = run(capsys, "ls", RECIPE)
    assert code == 0
    assert out.startswith(f"{RECIPE}: ")
    assert f"  {CONFIG} " in out and "dpo" not in out


@pytest.mark.parametrize(
    ("words", "configs"),
    [
        (["qwen3", "8B", "lora"], ["qwen3/8B_lora"]),
        (["QWEN2.5", "7b", "lora"], ["qwen2_5/7B_lora"]),
        (["120B"], ["gpt_oss/120B_qlora"]),
        (["lora_finetune_distributed", "llama3", "8B_q"], ["llama3_1/8B_qlora", "llama3/8B_qlora"]),
        (["dpo", "qwen3"], ["qwen3/8B_dpo"]),
        (["16gb", "llama3_2", "full"], ["llama3_2/1B_full"]),
        (["2x24GB", "llama3_2", "full"], ["llama3_2/1B_full", "llama3_2/3B_full"]),
    ],
)
def test_ls_filters(words: list[str], configs: list[str], capsys: pytest.CaptureFixture):
    code, out, err = run(capsys, "ls", *words)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == configs


def test_sizes_stand_in_their_order(capsys: pytest.CaptureFixture):
    for family, sizes in (("qwen3", "0.6B 1.7B 4B 8B 14B 32B"), ("smollm2", "135M 360M 1.7B")):
        lines = run(capsys, "ls", f"{family}/", "full")[1].splitlines()[1:]
        assert [line.split()[0] for line in lines] == [
            f"{family}/{size}_full" for size in sizes.split()
        ]


@pytest.mark.parametrize("verb", ["run", "plan", "cat", "validate"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3/8B", "qwen2_5/72b"])
def test_a_part_of_a_name_says_how_to_list_those(
    verb: str, name: str, capsys: pytest.CaptureFixture
):
    listed = [line for line in run(capsys, "ls", name)[1].splitlines() if line.startswith("  ")]
    code, _, err = run(capsys, verb, name)
    assert code == 2 and err.count("\n") == 1
    assert f"`tune ls {name}` lists its {len(listed)} configs" in err


def test_ls_of_nothing(capsys: pytest.CaptureFixture):
    said = run(capsys, "ls", "full_finetun")
    assert said == (
        2,
        "",
        f"error: full_finetun: no such recipe, and no config with it; did you mean {RECIPE}?\n",
    )
    assert (
        run(capsys, "ls", "qwen3", "120B")[2]
        == "error: no config has qwen3 and 120B; `tune ls` lists all\n"
    )


def test_cat_is_the_file(capsys: pytest.CaptureFixture):
    assert run(capsys, "cat", CONFIG) == (0, find_config(CONFIG).read_text(), "")


def test_cat_resolved_has_every_value_and_its_place(capsys: pytest.CaptureFixture):
    code, out, err = run(
        capsys, "cat", CONFIG, "--resolved", "optimizer.lr=3e-6", "data.source=a=b.json"
    )
    assert (code, err) == (0, "")
    rows = {line.split(": ", 1)[0]: line.split(": ", 1)[1].split() for line in out.splitlines()}
    assert rows["optimizer.lr"] == ["3e-06", "#", "command", "line"]
    assert rows["data.source"][1:] == ["#", "command", "line"]
    assert "a=b.json" in rows["data.source"][0]
    lines = find_config(CONFIG).read_text(encoding="utf-8").splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.startswith("  path: "))
    assert rows["model.path"][1:] == ["#", f"configs/{CONFIG}.yaml:{number}"]
    assert rows["seed"] == ["42", "#", "default"]
    assert set(FullFinetuneConfig.__dataclass_fields__) == {key.split(".")[0] for key in rows}


def test_cat_describes_every_key(capsys: pytest.CaptureFixture):
    code, out, err = run(capsys, "cat", CONFIG, "--describe")
    assert (code, err) == (0, "")
    for key in ("optimizer.lr", "memory.activation_checkpointing", "Peak learning rate."):
        assert key in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["cat", "llama3/8B_ful"],
            "error: llama3/8B_ful: no such config; did you mean llama3/8B_full?",
        ),
        (
            ["cat", RECIPE],
            f"error: {RECIPE}: is a recipe, not a config; `tune ls {RECIPE}` lists its configs",
        ),
        (
            ["cat", CONFIG, "seed=1"],
            "error: tune cat: overrides change the resolved values only; add --resolved",
        ),
        (
            ["cat", CONFIG, "--resolved", "--describe"],
            "error: tune cat: --resolved and --describe are two different views; give one of them",
        ),
    ],
)
def test_cat_mistakes(words: list[str], line: str, capsys: pytest.CaptureFixture):
    assert run(capsys, *words) == (2, "", line + "\n")


def test_cat_of_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "x.yaml"
    file.write_bytes(b"seed: \xff\n")
    assert run(capsys, "cat", file) == (
        2,
        "",
        f"error: {file}: cannot be read: a byte that is not UTF-8 at 6\n",
    )


def test_validate_says_for_which_recipe(capsys: pytest.CaptureFixture):
    code, out, err = run(capsys, "validate", CONFIG)
    assert (code, out.splitlines()[0], err) == (0, f"{CONFIG}: a valid config of {RECIPE}", "")
    assert "fetch it with `tune download meta-llama/Meta-Llama-3-8B`" in out
    assert run(capsys, "validate", "--recipe", RECIPE, CONFIG, "seed=1")[0] == 0


def test_validate_reports_all_faults_at_once(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "x.yaml"
    file.write_text(f"recipe: {RECIPE}\nmodel:\n  pth: m\nbatch_size: 0\n")
    code, out, err = run(capsys, "validate", file, "optimizer.lrr=1", "seed=-1")
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    for part in (
        f"{file}:3: model.pth",
        f"{file}:4: batch_size",
        "command line: optimizer.lrr",
        "command line: seed",
    ):
        assert any(part in line for line in lines), part


def test_validate_against_a_recipe_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture):
    recipe = tmp_path / "mine_validated.py"
    recipe.write_text(
        '"""Mine."""\nfrom dataclasses import dataclass\nfrom recipe_lib.config import'
        " FullFinetuneConfig\nfrom recipe_lib.config.schema import key\n\n@dataclass\nclass"
        " Config(FullFinetuneConfig):\n    sparkle: int = key(1, 'How much.', minimum=0)\n"
    )
    code, out, err = run(capsys, "validate", CONFIG, "--recipe", recipe, "sparkle=3")
    assert (code, out.splitlines()[0], err) == (
        0,
        f"{CONFIG}: a valid config of mine_validated",
        "",
    )
    code, _, err = run(capsys, "validate", CONFIG, "--recipe", recipe, "sparkle=-3")
    assert code == 2
    assert "sparkle" in err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "def main(argv):\n    pass\n",
            "has no class `Config`; expected one, like the shipped recipes",
        ),
        ("def main(argv:\n", "invalid syntax"),
    ],
)
def test_validate_against_a_recipe_that_is_none(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    recipe = tmp_path / f"broken_{len(text)}.py"
    recipe.write_text(text)
    code, out, err = run(capsys, "validate", CONFIG, "--recipe", recipe)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {show(str(recipe))}:")
    assert line in err or "was never closed" in err
    assert err.count("\n") == 1


def test_validate_knows_what_a_plugin_registers(tmp_path: Path) -> None:
    name = "halved"
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        f"from recipe_lib.config import register\n\n\n@register('loss', '{name}')\ndef"
        " halved(logits, labels): ...\n"
    )
    words = ["demo/full", f"loss={name}", f"output_dir={tmp_path}/out"]
    assert tune("validate", *words).returncode == 2
    assert tune("validate", *words, "--plugin", plugin).returncode == 0
    shown = tune("cat", "demo/full", "--resolved", "--plugin", plugin, f"loss={name}")
    assert shown.returncode == 0 and "loss: halved " in shown.stdout
