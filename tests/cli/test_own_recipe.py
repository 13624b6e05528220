"""Of a copied recipe, what stops a run is told before its file is imported; others read their words themselves."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe_lib.cli.recipes import shipped_config_of
from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.load import known_part
from recipe_lib.errors import ConfigError
from tests.cli.commands import ROOT, environment

IMPORTS = "from recipe_lib import training\nfrom recipe_lib.config import FullFinetuneConfig, parse_arguments\n"
MAIN = "def main(argv=None):\n    training.run_recipe(Mine, parse_arguments(argv, Config))\n"
REBOUND = MAIN.replace("    t", "    argv = argv[1:]\n    t")
OWN = "@dataclass\nclass Config(FullFinetuneConfig):\n    '''Mine.'''\n\n    "


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (f"{IMPORTS}Config = FullFinetuneConfig\n{MAIN}", FullFinetuneConfig),
        (f"{IMPORTS}{OWN}sparkle: int = 3\n{MAIN}", FullFinetuneConfig),
        (f"{IMPORTS}{OWN}recipe: str = 'mine'\n{MAIN}", FullFinetuneConfig),
        (f"{IMPORTS}{OWN}output_dir: str = 'here'\n{MAIN}", None),
        (f"{IMPORTS}{OWN}model: Mine = None\n{MAIN}", None),
        (f"{IMPORTS}{OWN}def __post_init__(self): self.output_dir = 'here'\n{MAIN}", None),
        (f"{IMPORTS}class Config: pass\n{MAIN}", None),
        (f"{IMPORTS}Config = FullFinetuneConfig\nConfig = changed(Config)\n{MAIN}", None),
        (f"{IMPORTS}Config = Config\n{MAIN}", None),
        (f"from mine import FullFinetuneConfig\nConfig = FullFinetuneConfig\n{MAIN}", None),
        (f"{IMPORTS}Config = FullFinetuneConfig\n{MAIN.replace('argv, ', 'argv[1:], ')}", None),
        (f"{IMPORTS}Config = FullFinetuneConfig\n{REBOUND}", None),
        (f"{IMPORTS}Config = FullFinetuneConfig\ndef main(argv): print(argv)\n", None),
        ("def main(argv:\n", None),
        ("x = '\0'\n", None),
    ],
)
def test_the_class_of_a_recipe_by_its_text(text: str, config: type | None, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert shipped_config_of(tmp_path / "mine.py") is config


@pytest.mark.parametrize("name", ["full_finetune_distributed", "lora_finetune_distributed", "dpo_distributed"])
def test_the_class_of_each_copy(name: str) -> None:
    found = shipped_config_of(ROOT / "recipes" / f"{name}.py")
    assert found is not None and vars(found)["recipe"] == name


def test_what_a_class_of_ours_knows_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--config", "demo/lora", "output_dir=new"]
    cfg = known_part([*words, "sparkle=3", "--plugin", "none.py"], LoraFinetuneConfig)
    assert cfg is not None and cfg.output_dir == "new"
    for doubtful in ("data.format=mine", "lora.rank=none", "output_dir=${sparkle}", "lora.rak=3"):
        assert known_part([*words[:2], doubtful, *(words[2:] if "_dir" not in doubtful else ())], LoraFinetuneConfig) \
            is None, doubtful  # fmt: skip
    with pytest.raises(ConfigError, match="^nope.yaml: no such config"):
        known_part(["--config", "nope.yaml"], LoraFinetuneConfig)


def test_a_copy_is_not_imported_for_what_is_missing(tmp_path: Path) -> None:
    """Nor is a strategy chosen for it."""
    copy = tmp_path / "mine.py"
    shutil.copy(ROOT / "recipes" / "lora_finetune_distributed.py", copy)
    words = ["--config", "demo/lora", "model.path=examples", "tokenizer.path=examples/demo/tokenizer"]
    words.append(f"output_dir={tmp_path}/new")
    nowhere = "error: /nope: no such folder; expected a model folder, or a hub id such as OWNER/NAME"
    rows = (
        "/nope.jsonl: no such file or folder; set data.source to one of yours, or to hub:OWNER/NAME for a hub dataset"
    )
    config = "error: examples/config.json: no such file; expected a Hugging Face model folder with config.json"
    expected = {
        (): f"error: tune run: no config; expected: tune run {copy} --config CONFIG (see `tune ls`)",
        ("--config", "nope.yaml"): "error: nope.yaml: no such config; `tune ls` lists the names, or give a path to a "
        "file",
        (*words, "model.path=/nope"): nowhere,
        (*words, "model.path=/nope", "parallel.strategy=auto"): nowhere,
        (*words, "data.source=/nope.jsonl", "sparkle=3"): f"{config}\nerror: {rows}",
    }
    commands = []
    for given in expected:
        kept = [word for word in given if word != words[2] or "model.path=/nope" not in given]  # no key twice
        flags = ["--nproc_per_node", "2"] if "parallel.strategy=auto" in given else []
        commands.append(["run", *flags, str(copy), *kept])
    program = f"import sys\nfrom recipe_lib.cli.main import main\nprint([main(one) for one in {commands!r}])\n"
    program += "assert not {'torch', 'numpy', 'recipe_mine'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{[2] * len(expected)}\n"), done.stderr
    assert done.stderr.splitlines() == "\n".join(expected.values()).splitlines()
