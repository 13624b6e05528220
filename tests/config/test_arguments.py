"""A recipe's own command line, with and without the CLI."""

import sys

import pytest

from recipe_lib.config import FullFinetuneConfig, parse_arguments
from recipe_lib.errors import ConfigError

EXPECTED = "; expected --config NAME_OR_PATH [--plugin FILE] [key=value ...]"


@pytest.fixture
def config(write) -> str:
    return str(write("model: {path: x}\ndata: {source: y}\n"))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_in_any_order(config, order):
    words = ["epochs=2", "~seed", "optimizer.lr=1e-3"]
    words[order:order] = ["--config", config]
    cfg = parse_arguments(words)
    assert (cfg.epochs, cfg.optimizer.lr) == (2, 1e-3)


def test_from_the_process(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe.py", f"--config={config}", "epochs=3"])
    assert parse_arguments(None).epochs == 3
    assert type(parse_arguments(None, FullFinetuneConfig)) is FullFinetuneConfig


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--config is missing"),
        (["epochs=2"], "--config is missing"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "x", "--confg", "y"], "unrecognized arguments: --confg"),
        (["--conf", "x"], "--config is missing"),
        (["--config", "x", "--twice"], "unrecognized arguments: --twice"),
    ],
)
def test_wrong_words(words, said):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(words)
    assert str(caught.value).startswith(f"command line: {said}")
    assert str(caught.value).endswith(EXPECTED)


def test_help_exits_with_zero(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    assert "--plugin FILE" in capsys.readouterr().out
