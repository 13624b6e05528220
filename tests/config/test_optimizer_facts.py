"""What a config, a plan and the stages of a pipeline know of an optimizer, read from its file
without torch.
"""

import pytest

from recipe_lib.config.describe import describe_key
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.key_conditions import explain_idle_key
from recipe_lib.config.optimizer_facts import (
    OptimizerFacts,
    find_optimizer_facts,
    read_built_in_optimizers,
)
from recipe_lib.config.registry import list_names, register
from recipe_lib.config.schema import FullFinetuneConfig, OptimizerConfig

KEYS = read_schema(FullFinetuneConfig).keys


def test_the_names_are_those_of_the_files() -> None:
    assert (
        list(read_built_in_optimizers())
        == list_names("optimizer.name")[:3]
        == ["adamw", "muon", "sgd"]
    )


def test_the_facts_are_those_that_the_files_register() -> None:
    from recipe_lib.optim.algorithms import adamw, muon, sgd

    assert read_built_in_optimizers() == {
        "adamw": adamw.FACTS,
        "muon": muon.FACTS,
        "sgd": sgd.FACTS,
    }


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_every_key_that_is_read_is_one_of_the_section(name: str) -> None:
    facts = find_optimizer_facts(name)
    assert facts is not None and {f"optimizer.{key}" for key in facts.keys} <= set(KEYS)


def test_keys_that_an_optimizer_does_not_read_are_idle() -> None:
    cfg = FullFinetuneConfig(optimizer=OptimizerConfig(name="sgd"))
    assert explain_idle_key(cfg, KEYS["optimizer.eps"]) == "optimizer.name is sgd"
    assert explain_idle_key(cfg, KEYS["optimizer.momentum"]) is None
    assert describe_key(KEYS["optimizer.momentum"]).endswith("Only with `optimizer.name != adamw`.")


def test_a_plugin_gives_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = FullFinetuneConfig(optimizer=OptimizerConfig(name="lion"))
    assert (
        find_optimizer_facts("lion") is None
        and explain_idle_key(cfg, KEYS["optimizer.eps"]) is None
    )
    monkeypatch.setattr("recipe_lib.config.optimizer_facts._of_plugins", {})
    facts = OptimizerFacts(keys=("betas",), states=("exp_avg",))
    register("optimizer.name", "lion", facts)(len)
    assert find_optimizer_facts("lion") is facts
    assert explain_idle_key(cfg, KEYS["optimizer.eps"]) == "optimizer.name is lion"


def test_states_follow_the_keys() -> None:
    momentum = read_built_in_optimizers()["sgd"]
    assert momentum.list_states(OptimizerConfig(), layer_matrix=True) == ()
    assert momentum.list_states(OptimizerConfig(momentum=0.9), layer_matrix=True) == (
        "momentum_buffer",
    )
    assert momentum.get_state_bits(OptimizerConfig(state_bits=8)) is None
    assert read_built_in_optimizers()["muon"].list_states(OptimizerConfig(), layer_matrix=True) == (
        "momentum_buffer",
    )
