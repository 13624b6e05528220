"""Names and paths of configs and recipes."""

from pathlib import Path
from types import ModuleType

import pytest

from recipe_lib.config import load_config, paths
from recipe_lib.config.load import load_with_origins
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError

GOOD = "recipe: full_finetune_distributed\nmodel: {path: x}\ndata: {source: y}\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A checkout of two configs and two recipes."""
    (tmp_path / "recipes").mkdir()
    for name in ("full_finetune_distributed", "other", "_private"):
        (tmp_path / "recipes" / f"{name}.py").write_text("")
    for name in ("llama3/8B_full", "qwen2_5/0.5B_full"):
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"# {name}\n#\n{GOOD}")
    monkeypatch.setattr(paths, "_find_shipped_folder", lambda kind: tmp_path / kind)
    return tmp_path


def refusal(find, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find(name)
    return str(caught.value)


def test_by_name(checkout):
    assert paths.find_config("llama3/8B_full") == checkout / "configs/llama3/8B_full.yaml"
    assert paths.find_config("qwen2_5/0.5B_full") == checkout / "configs/qwen2_5/0.5B_full.yaml"
    assert paths.find_recipe("other") == checkout / "recipes/other.py"
    assert paths.list_recipes() == ["full_finetune_distributed", "other"]
    # Of the newest family first.
    assert paths.list_configs() == {
        "distill_distributed": [],
        "dpo_distributed": [],
        "full_finetune_distributed": ["qwen2_5/0.5B_full", "llama3/8B_full"],
        "lora_finetune_distributed": [],
        "other": [],
        "reward_distributed": [],
    }


def test_by_path(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    (checkout / "mine.yml").write_text(GOOD)
    (checkout / "mine.py").write_text("")
    for name in (
        "mine.yml",
        "./mine.yml",
        str(checkout / "mine.yml"),
        "configs/llama3/8B_full.yaml",
    ):
        assert paths.find_config(name) == Path(name)
    assert paths.find_recipe("mine.py") == Path("mine.py")
    monkeypatch.setenv("HOME", str(checkout))
    assert paths.find_config("~/mine.yml") == checkout / "mine.yml"


def test_a_shipped_name_is_no_relative_path(checkout, monkeypatch):
    (checkout / "llama3").mkdir()
    (checkout / "llama3/8B_full").write_text("not this")
    monkeypatch.chdir(checkout)
    assert paths.find_config("llama3/8B_full") == checkout / "configs/llama3/8B_full.yaml"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3/8b_full", "llama3/8b_full: no such config; did you mean llama3/8B_full?"),
        ("llama3/8B", "llama3/8B: no such config; did you mean llama3/8B_full?"),
        (
            "llama3/8B_full.yaml",
            "llama3/8B_full.yaml: no such config; did you mean llama3/8B_full?",
        ),
        (
            "configs/llama3/8B_full.yaml",
            "configs/llama3/8B_full.yaml: no such config; did you mean llama3/8B_full?",
        ),
        ("zzz", "zzz: no such config; `tune ls` lists the names, or give a path to a file"),
        ("", "config '': expected a name (`tune ls` lists them) or a path"),
        ("a\0b", "config 'a\\x00b': expected a name (`tune ls` lists them) or a path"),
        ("folder", "folder: is a folder; expected a config file ending in .yaml or .yml"),
        ("rows.json", "rows.json: not a config: expected a file ending in .yaml or .yml"),
        (
            "x" * 300,
            (
                f"{'x' * 57}...{'x' * 20}: no such config; `tune ls` lists the names, or give a"
                " path to a file"
            ),
        ),
    ],
)
def test_no_such_config(checkout, tmp_path_factory, monkeypatch, name, said):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    (elsewhere / "folder").mkdir()
    (elsewhere / "rows.json").write_text("{}")
    assert refusal(paths.find_config, name) == said


def test_no_such_recipe(checkout):
    assert (
        refusal(paths.find_recipe, "full_finetune")
        == "full_finetune: no such recipe; did you mean full_finetune_distributed?"
    )
    assert refusal(paths.find_recipe, "_private").startswith("_private: no such recipe")


def test_a_named_config_is_shown_by_its_path(checkout, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(checkout)
    rows = {name: where for name, _, where in load_with_origins("llama3/8B_full", ["seed=3"]).rows}
    assert rows["model.path"] == "configs/llama3/8B_full.yaml:4"
    assert (rows["seed"], rows["epochs"]) == ("command line", "default")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    rows = {name: where for name, _, where in load_with_origins("llama3/8B_full").rows}
    assert rows["model.path"] == f"{checkout}/configs/llama3/8B_full.yaml:4"


def test_every_shipped_recipe_has_a_config_class():
    assert set(paths.list_recipes()) == set(read_recipe_configs())


def test_a_base_of_several_recipes_is_not_the_config_class_of_one():
    module = ModuleType("recipe_lib.methods.example.config")
    base_class = type("PairsConfig", (FullFinetuneConfig,), {"__module__": module.__name__})
    recipe_class = type(
        "ExampleConfig", (base_class,), {"__module__": module.__name__, "recipe": "example"}
    )
    vars(module).update({"PairsConfig": base_class, "ExampleConfig": recipe_class})
    assert paths._find_config_class(module) is recipe_class


SHIPPED = [name for names in paths.list_configs().values() for name in names]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads(name):
    path = paths.find_config(name)
    recipe = next(recipe for recipe, names in paths.list_configs().items() if name in names)
    cfg = load_config(name, (), read_recipe_configs()[recipe])
    assert cfg.recipe == recipe
    text = path.read_text()
    assert text.startswith("#"), "a config begins with what it is for"
    keys = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert keys[0] == f"recipe: {recipe}"
    assert len(keys) <= 40


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_holds_only_what_differs(name):
    recipe = next(recipe for recipe, names in paths.list_configs().items() if name in names)
    schema = read_recipe_configs()[recipe]
    from recipe_lib.config.flat_schema import read_schema

    keys = read_schema(schema).keys
    same = [
        key for key, value, where in load_with_origins(name, (), schema).rows
        if where != "default" and value == keys[key].default and key != "recipe"
    ]  # fmt: skip
    assert same == []


def test_there_are_shipped_configs_and_presets():
    assert len(SHIPPED) > 10
    assert "llama3/8B" in paths.list_presets()
    assert all((paths.PRESETS / f"{name}.json").is_file() for name in paths.list_presets())
