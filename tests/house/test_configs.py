"""Every shipped config is valid as it stands, listed, and says how to be run."""

import re
from pathlib import Path

import pytest

from recipe_lib.cli.recipes import read_recipe_name
from recipe_lib.config import load_config as load_any
from recipe_lib.config.paths import find_config, list_configs, read_recipe_configs
from recipe_lib.config.precision import describe_stalled_means
from tests.house.files import ROOT

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def load_config(name: str) -> object:
    """The config, checked against the class of the recipe that it names."""
    return load_any(name, (), read_recipe_configs()[read_recipe_name(find_config(name)) or ""])


NAMES = [path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in CONFIGS]


def test_there_are_configs():
    assert "demo/full" in NAMES and "llama3/8B_full" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_is_valid(name: str):
    """Also that no mean of its optimizer stands still."""
    cfg = load_config(name)
    assert type(cfg) is read_recipe_configs()[cfg.recipe]
    assert describe_stalled_means(cfg) == []


def test_all_are_listed():
    assert sorted(name for names in list_configs().values() for name in names) == NAMES


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_header_says_how_to_run(path: Path):
    text = path.read_text(encoding="utf-8")
    header = " ".join(line.strip("# \\") for line in text.splitlines() if line.startswith("#"))
    name = path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    body = next(line for line in text.splitlines() if line and not line.startswith("#"))
    assert text.startswith("# "), f"{name}: no header"
    recipe = load_config(name).recipe
    assert re.search(rf"tune run [^#]*{recipe} --config {re.escape(name)}\b", header), name
    assert body.startswith("recipe: "), f"{name}: the first key is {body}"


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_holds_only_what_differs(path: Path):
    """A key that repeats the default would hide a later change of it."""
    from recipe_lib.config.load import load_with_origins

    cfg_class = read_recipe_configs()[read_recipe_name(path) or ""]
    defaults = flatten(cfg_class())
    repeated = [
        key
        for key, value, where in load_with_origins(str(path), (), cfg_class).rows
        if where.startswith(str(path)) or path.name in where
        if key != "recipe" and defaults[key] == value
    ]
    assert not repeated


def flatten(section: object, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in vars(section).items():
        inner = (
            flatten(value, f"{prefix}{key}.")
            if hasattr(value, "__dataclass_fields__")
            else {prefix + key: value}
        )
        found.update(inner)
    return found
