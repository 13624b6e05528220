"""A copied recipe's Config: a subclass with keys, sections and limits of its own is checked like
ours.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.load import load_with_origins as load_all
from recipe_lib.config.schema import DataConfig, OptimizerConfig, key
from recipe_lib.errors import ConfigError


@dataclass
class MyData(DataConfig):
    """The rows, and how noisy they are made."""

    noise: float = key(0.0, "Share of tokens replaced.", minimum=0, below=1)
    max_samples: int | None = 100


@dataclass
class Distill:
    """The teacher."""

    teacher: str
    temperatures: list[float] = field(default_factory=lambda: [1.0])


@dataclass
class Mine(FullFinetuneConfig):
    """A config of my own."""

    data: MyData = field(default_factory=MyData)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-3, betas=[0.8, 0.9])
    )
    distill: Distill = field(default_factory=lambda: Distill("none"))
    mode: Literal["fast", "slow"] = "fast"
    cache: Path = Path("cache")
    either: int | str = 3
    anything: Any = None
    weights: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    names: list[str] | None = None
    batch_size: int = 7


def test_own_keys(load):
    cfg = load(
        "data: {source: x, noise: 0.5}\ndistill: {teacher: big, temperatures: [1, 2]}\nmode:"
        " slow\ncache: /tmp/c\neither: text\nanything: {a: [1, x, null, 2.5, true]}\nweights: {b:"
        " 2}\nnames: [x]\n",
        schema=Mine,
    )
    assert type(cfg) is Mine
    assert type(cfg.data) is MyData
    assert (cfg.data.noise, cfg.data.max_samples, cfg.data.source) == (0.5, 100, "x")
    assert cfg.distill == Distill("big", [1.0, 2.0])
    assert (cfg.mode, cfg.cache, cfg.either, cfg.names) == ("slow", Path("/tmp/c"), "text", ["x"])
    assert cfg.anything == {"a": [1, "x", None, 2.5, True]}
    assert cfg.weights == {"b": 2.0}
    assert cfg.batch_size == 7
    assert load("either: 5\n", schema=Mine).either == 5


def test_own_defaults_of_a_section(load, write):
    assert load("", schema=Mine).optimizer.lr == 1e-3
    assert load("optimizer: {lr: 1}\n", "~optimizer", schema=Mine).optimizer.betas == [0.8, 0.9]
    rows = {
        name: value
        for name, value, _ in load_all(
            write("model: {path: x}\ndata: {source: x}\n"), (), Mine
        ).rows
    }
    assert (rows["optimizer.lr"], rows["optimizer.eps"], rows["data.max_samples"]) == (
        1e-3,
        1e-8,
        100,
    )
    # What the class changed is its default, so that sgd is not told to remove what nobody wrote.
    assert load("optimizer: {name: sgd}\n", schema=Mine).optimizer.betas == [0.8, 0.9]


def test_own_faults(faults):
    text = (
        "data: {source: x, nose: 1}\nmode: medium\ndistill: {teacher: 3}\neither: [1]\nweights: {a:"
        " b}\nnames: [1]\n"
    )
    assert faults(text + "zzzz: 1\n", schema=Mine) == [
        "c.yaml:1: data.nose: unknown key; did you mean data.noise?",
        "c.yaml:2: mode: found 'medium', expected one of fast, slow",
        (
            "c.yaml:3: distill.teacher: found 3, expected text; if it is meant as text, put it in"
            " quotes"
        ),
        "c.yaml:4: either: found a list, expected an integer, or text",
        "c.yaml:5: weights: found 'b', expected a mapping {name: a number}",
        (
            "c.yaml:6: names: found 1, expected a list [...] of texts, or null; if it is meant as"
            " text, put it in quotes"
        ),
        "c.yaml:7: zzzz: unknown key; `tune cat CONFIG --describe` lists all keys",
    ]
    assert faults("data: {source: x, noise: 1}\n", schema=Mine) == [
        "c.yaml:1: data.noise: found 1, expected a number >= 0 and < 1"
    ]


def test_a_copied_config_keeps_its_recipe_line(load, faults):
    @dataclass
    class Renamed(FullFinetuneConfig):
        recipe: str = "mine"

    assert (
        load("recipe: full_finetune_distributed\n", schema=Renamed).recipe
        == "full_finetune_distributed"
    )
    assert load("recipe: mine\n", schema=Renamed).recipe == "mine"
    assert load("", schema=Renamed).recipe == "mine"
    assert faults("recipe: nine\n", schema=Renamed) == [
        "c.yaml:1: recipe: found 'nine', expected mine or full_finetune_distributed; did you mean"
        " mine?"
    ]


def test_a_key_without_a_default(write):
    @dataclass(kw_only=True)
    class Needs(FullFinetuneConfig):
        teacher: str

    path = write("model: {path: x}\ndata: {source: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, (), Needs)
    assert caught.value.faults == [f"{path}: teacher: is not set, expected text"]
    assert load_config(path, ["teacher=big"], Needs).teacher == "big"


def test_a_class_that_checks_itself(write):
    @dataclass
    class Strict(FullFinetuneConfig):
        def __post_init__(self) -> None:
            if self.epochs > 3:
                raise ValueError("epochs: more than 3 overfit here")
            if self.epochs == 3:
                raise ConfigError("epochs: three is a crowd")

    path = write("model: {path: x}\ndata: {source: x}\n")
    assert load_config(path, ["epochs=2"], Strict).epochs == 2
    for epochs, said in (
        (4, f"{path}: epochs: more than 3 overfit here"),
        (3, "epochs: three is a crowd"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, [f"epochs={epochs}"], Strict)
        assert caught.value.faults == [said]


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        (set[int], "set"),
        (list[list[int]], "list"),
        (dict[int, str], "dict"),
        (bytes, "bytes"),
        (tuple[int, int], "tuple"),
    ],
)
def test_a_type_that_yaml_cannot_hold(write, annotation, named):
    Odd = dataclass(
        type("Odd", (FullFinetuneConfig,), {"__annotations__": {"odd": annotation}, "odd": None})
    )
    with pytest.raises(
        ConfigError, match=rf"^Odd\.odd: a config cannot hold the type {named}; use bool, int, "
    ):
        load_config(write(""), (), Odd)


def test_a_schema_that_is_no_dataclass(write):
    with pytest.raises(ConfigError, match="a recipe's Config is a dataclass"):
        load_config(write(""), (), int)


def test_an_unknown_annotation(write):
    Odd = dataclass(
        type("Odd", (FullFinetuneConfig,), {"__annotations__": {"odd": "Nowhere"}, "odd": None})
    )
    with pytest.raises(ConfigError, match="^Odd: a type of its keys is unknown"):
        load_config(write(""), (), Odd)


def test_the_schema_is_read_in_order():
    names = list(read_schema(FullFinetuneConfig).keys)
    assert names[0] == "recipe"
    assert names[-1] == "qat_start_step"
    assert len(names) == len(set(names)) > 55


@dataclass
class Measured(FullFinetuneConfig):
    """A config of a recipe whose validation measures more."""

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        return ("validation_loss", "validation_accuracy")


def test_the_best_step_may_be_found_by_an_own_number(load):
    text = (
        "validation: {source: y}\ncheckpoint: {keep_best: true, best_metric: validation_accuracy}\n"
    )
    assert load(text, schema=Measured).checkpoint.best_metric == "validation_accuracy"
    with pytest.raises(
        ConfigError,
        match="found 'validation_accuracy', expected validation_loss; .* names others as its",
    ):
        load(text, schema=Mine)
