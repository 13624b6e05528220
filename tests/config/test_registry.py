"""Components by name: ours are known without an import, a user's come from a plugin, a name is
taken once.
"""

import sys
from pathlib import Path

import pytest

from recipe_lib.config import get_registered, load_config, parse_arguments, register, registry
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.ops import fused_kernels
from tests.forked import call_forked

GOOD = "model: {path: x}\ndata: {source: rows.jsonl}\n"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Each test has the registry and the list of loaded plugins to itself."""
    monkeypatch.setattr(
        registry, "_components", {kind: dict(names) for kind, names in registry._components.items()}
    )
    monkeypatch.setattr(registry, "_loaded", set())


def test_a_name_of_ones_own():
    @register("loss", "squared")
    def squared(logits, labels):
        return logits, labels

    assert get_registered("loss", "squared") is squared
    assert registry.list_names("loss") == ["cross_entropy", "squared"]


def test_a_class_registers_too():
    @register("optimizer.name", "lion")
    class Lion:
        """An optimizer."""

    assert get_registered("optimizer.name", "lion") is Lion


def test_a_name_is_taken_once():
    register("loss", "squared")(len)
    register("loss", "squared")(len)  # the same again: a module imported twice
    with pytest.raises(
        ConfigError,
        match=r"^register\('loss', 'squared'\): the name is taken; register another one$",
    ):
        register("loss", "squared")(max)


def test_our_names_are_not_for_plugins():
    with pytest.raises(ConfigError, match="the name is taken"):
        register("loss", "cross_entropy")(len)


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\0b", 3])
def test_a_name_is_printable(name):
    with pytest.raises(
        ConfigError, match=r"^register\('loss', .*\): expected a name of printable letters"
    ):
        register("loss", name)


def test_unknown_kind_and_name():
    kinds = "data.format, optimizer.name, loss, metric, log.trackers, model"
    for ask in (
        lambda: register("lost", "x"),
        lambda: get_registered("lost", "x"),
        lambda: registry.list_names("lost"),
    ):
        with pytest.raises(
            ConfigError, match=f"^register: found the kind 'lost', expected one of {kinds}$"
        ):
            ask()
    with pytest.raises(ConfigError) as caught:
        get_registered("optimizer.name", "adamv")
    assert (
        str(caught.value)
        == "optimizer.name: found 'adamv', expected one of adamw, muon, sgd; did you mean adamw?"
    )


def register_anew(kind: str) -> list[str]:
    """Return the names that a kind has once its owner is imported anew, and no other owner."""
    module, built_in = registry.BUILT_IN[kind]
    fused_kernels.register_fused = lambda *settings: (
        lambda function: function
    )  # torch defines an operator once in a process
    modules = {
        component.__module__ for component in registry._components[kind].values()
    }  # where imported already
    registry._components[kind].clear()
    for name in [name for name in sys.modules if name in modules or name.startswith(module)]:
        del sys.modules[name]
    assert all(callable(get_registered(kind, name)) for name in built_in)
    return sorted(registry._components[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", registry.BUILT_IN)
def test_every_declared_name_is_registered_by_its_owner(kind: str):
    """The names declared here and those that the owning module registers are the same."""
    assert call_forked(lambda: register_anew(kind)) == sorted(registry.BUILT_IN[kind][1])


def write_plugin(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


REGISTERS = (
    "from recipe_lib.config import register\n\n@register('loss', 'squared')\ndef squared(a, b):\n  "
    "  return a\n"
)


def test_a_plugins_name_is_legal_in_a_config(write, tmp_path):
    path = str(write(GOOD + "loss: squared\n"))
    with pytest.raises(ConfigError, match="loss: found 'squared', expected one of cross_entropy"):
        load_config(path)
    plugin = write_plugin(tmp_path, REGISTERS)
    cfg = parse_arguments(["--plugin", str(plugin), "--config", path, "epochs=2"])
    assert (cfg.loss, cfg.epochs) == ("squared", 2)
    assert get_registered("loss", "squared")(1, 2) == 1
    parse_arguments(
        ["--config", path, "--plugin", str(plugin)]
    )  # a second time in the process: nothing is taken twice


def test_a_plugin_may_hold_dataclasses(write, tmp_path):
    plugin = write_plugin(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass"
        " A:\n    x: int = 1\n",
    )
    registry.load_plugin(plugin)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "x = 1\nimport no_such_module\n",
            "2: raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def f(:\n", "1: raised SyntaxError: "),
        ("\ndef f():\n    raise ValueError('a\\nb')\n\nf()\n", "3: raised ValueError: a\\nb"),
        ("import json\njson.loads('{')\n", "2: raised JSONDecodeError: "),
    ],
)
def test_a_plugin_that_raises(tmp_path, text, said):
    plugin = write_plugin(tmp_path, text)
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        registry.load_plugin(plugin)
    assert str(caught.value).startswith(f"{show(str(plugin))}:{said}")
    assert "\n" not in str(caught.value)
    assert not {name for name in set(sys.modules) - before if name.startswith("tune_plugin")}


def test_a_plugin_that_takes_our_name(tmp_path):
    plugin = write_plugin(tmp_path, REGISTERS.replace("squared", "cross_entropy"))
    with pytest.raises(ConfigError) as caught:
        registry.load_plugin(plugin)
    assert (
        str(caught.value)
        == f"{show(str(plugin))}: register('loss', 'cross_entropy'): the name is taken; register"
        " another one"
    )


@pytest.mark.parametrize("path", ["/no/such.py", "mine.txt", ".", "", "a\0b.py", "os"])
def test_a_plugin_is_an_existing_py_file(path):
    with pytest.raises(ConfigError) as caught:
        registry.load_plugin(path)
    shown = path.replace("\0", "\\x00")
    assert str(caught.value) == f"--plugin '{shown}': expected the path of an existing .py file"


def test_a_config_imports_nothing(write, tmp_path, monkeypatch):
    """Names that look like import paths are names like any other: refused, and nothing is imported
    or run.
    """
    monkeypatch.chdir(tmp_path)
    write_plugin(tmp_path, "open('ran', 'w')\n", "evil.py")
    before = set(sys.modules)
    paths = ["os.system", "torch.hub.load", "evil", "evil.run", "./evil.py", "recipe_lib.config.registry.register",
             "logging.os.system", "functools.partial", "__import__('os')", "builtins.eval",
             "\N{CYRILLIC SMALL LETTER ES}ross_entropy"]  # fmt: skip
    for name in paths:
        for text in (
            f"loss: {name!r}\n",
            f"optimizer: {{name: {name!r}}}\n",
            f"log: {{trackers: [{name!r}]}}\n",
        ):
            with pytest.raises(ConfigError, match="expected "):
                load_config(write(GOOD + text))
    for key in ("_component_", "_target_", "__class__", "plugin", "import"):
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(write(GOOD + f"loss: cross_entropy\n{key}: evil\n"))
    assert not (tmp_path / "ran").exists()
    assert {
        name for name in set(sys.modules) - before if "evil" in name or name.startswith("torch.hub")
    } == set()
