"""Ten of the random combinations that `make fuzz` runs, and what is drawn at all."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fuzz import cases, compare
from tests.fuzz.cases import CLASSES, FULL, LEAST, TEACHER, Case, draw_case
from tests.recipes.levers import LEVERS

SEEDS = (4, 10, 16, 20, 77, 2161)
# Of hybrids and mixtures: experts and routers adapted over streamed NF4; packs of short convolutions
# in a pipeline, and of gated delta nets in fp64; Gemma's adapters on four ranks.
CLASS_SEEDS = (7, 18, 26, 36)
# Keys of the levers' table that are not drawn, each with why.
NOT_DRAWN = {
    "compile": "takes seconds; test_levers",
    "validation": "drawn with a best step alone; changes nothing that is trained; test_levers",
    "checkpoint.save_every_n_steps": "saving and resuming; test_resume",
    "checkpoint.keep_last_n": "saving and resuming; test_resume",
    "model.preset": "the models are drawn, tied and not",
    "data.max_samples": "which rows there are",
    "matmul_dtype": "rounds too much for a comparison; test_levers",
    "qat": "rounds too much for a comparison; test_levers, test_qat_worlds",
    "qat_group_size": "as qat",
    "loss": "a plugin's; test_levers",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("combinations")
    layers = {draw_case(seed).model: 2 for seed in SEEDS}
    # Two of seed 20's are prefetched; parameters in parts of parts, as Gemma's are, take time each.
    compare.write_models_and_samples(found, layers | {TEACHER: 2, "qwen3": 3, "gemma2": 1})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_combination_is_equal_to_one_process_and_to_training_by_hand(
    folder: Path, seed: int
) -> None:
    outcome = compare.try_case(draw_case(seed), folder)
    assert outcome.verdict == "equal", "\n".join([str(outcome.case), *outcome.said])


@pytest.fixture(scope="module")
def class_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("classes")
    models = {draw_case(seed, tuple(CLASSES)).model for seed in CLASS_SEEDS}
    compare.write_models_and_samples(found, dict.fromkeys((*sorted(models), TEACHER), 2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", CLASS_SEEDS)
def test_a_random_combination_of_a_class_is_equal_too(class_folder: Path, seed: int) -> None:
    outcome = compare.try_case(draw_case(seed, tuple(CLASSES)), class_folder)
    assert outcome.verdict == "equal", "\n".join([str(outcome.case), *outcome.said])
    assert outcome.far["ranks"] and (outcome.case.dtype == "bf16" or outcome.far["by hand"])


def test_the_six_are_of_all_kinds() -> None:
    found = [draw_case(seed) for seed in SEEDS]
    assert {case.ranks for case in found} == {1, 2, 4}
    assert {case.recipe for case in found} == set(cases.CONFIGS)
    assert [draw_case(seed) for seed in SEEDS] == found
    assert all(case.drawn >= LEAST for case in found)


def test_every_lever_is_drawn() -> None:
    chance = random.Random(0)
    drawn = [case for case in (cases._draw(chance, 0, 0) for _ in range(3000)) if case]
    keys = {
        override.partition("=")[0] for case in drawn for override in (*case.numerics, *case.levers)
    }
    assert {case.model for case in drawn} == set(cases.MODELS)
    levers = {key.removeprefix("~") for setting in LEVERS for key in setting.keys}
    missing = {key for key in levers - keys if not {key, key.partition(".")[0]} & set(NOT_DRAWN)}
    assert missing == set(), "add it to cases._draw, or to NOT_DRAWN"
    assert not keys & set(NOT_DRAWN)


TOGETHER = {
    "context with KTO": ("parallel.context", "dpo.loss=kto"),
    "context with classes": ("parallel.context", "reward.loss"),
    "context with pairs of rewards": (
        "parallel.context",
        "reward.trainable",
        "data.format=preference",
    ),
    "a best step on ranks": ("checkpoint.keep_best", "parallel."),
    "a best step on shards of NF4": ("checkpoint.keep_best", "quantize_base=nf4", "parallel."),
    "NF4 of experts on ranks": ("lora.quantize_base=nf4", "parallel.", "qwen3moe"),
    "int8 of experts on ranks": ("lora.quantize_base=int8", "parallel.", "mixtral"),
    "int8 of experts with context": ("lora.quantize_base=int8", "parallel.context", "mixtral"),
}


@pytest.mark.parametrize("words", TOGETHER.values(), ids=TOGETHER)
def test_what_is_seldom_together_is_drawn_too(words: tuple[str, ...]) -> None:
    """Of 3000 draws some have all of these."""
    chance = random.Random(1)
    drawn = [
        case for case in (cases._draw(chance, 0, 0) for _ in range(3000)) if case and case.ranks > 1
    ]
    assert [case for case in drawn if all(word in str(case) for word in words)]


CASE = Case(0, FULL, "llama", 2, ("dtype=fp64",), (), 3)


@pytest.mark.parametrize(
    ("fault", "words"), [("loss", "loss"), ("norm", "norm"), ("one", "weights"), ("name", "not in")]
)
def test_what_differs_is_said(fault: str, words: str) -> None:
    """A tensor among many that is off by little is enough."""
    start = {str(at): torch.zeros(100, dtype=torch.float64) for at in range(50)}
    weights = {name: torch.ones(100, dtype=torch.float64) for name in start}
    formula = {"start": start, "weights": weights, "errors": {}, "still": []}
    lines = [[1, 2.0, 1.0], [2, 1.5, 1.0]]
    other, found = [list(line) for line in lines], dict(weights)
    if fault == "one":
        found["7"] = found["7"] + 1e-4 * torch.eye(100, dtype=torch.float64)[3]
    elif fault == "name":
        found["8b"] = found.pop("8")
    else:
        other[1][1 if fault == "loss" else 2] += 1e-6
    outcome = compare.Outcome(CASE, "equal")
    check = compare.Check(outcome, {"steps": lines, "formula": formula})
    check.compare("ranks", lines=lines, weights=weights, limit=compare.RANKS["fp64"])
    check.compare_with_formula(CASE)
    assert (outcome.verdict, outcome.said) == ("equal", [])
    check.compare("ranks", lines=other, weights=found, limit=compare.RANKS["fp64"])
    assert outcome.verdict == "wrong" and words in outcome.said[0]


def test_a_plain_run_that_does_not_move_is_said() -> None:
    outcome = compare.Outcome(CASE, "equal")
    start = {"w": torch.ones(3, dtype=torch.float64)}
    formula = {"start": start, "weights": start, "errors": {"w": 1.0}, "still": ["w"]}
    compare.Check(outcome, {"steps": [], "formula": formula}).compare_with_formula(CASE)
    assert outcome.verdict == "wrong" and "formula" in outcome.said[0]


def test_a_command_can_be_pasted() -> None:
    case = replace(CASE, levers=("parallel.fsdp_wrap_policy=[model.layers.*]",))
    command = case.format_command(Path("/tmp/x"))
    assert command.startswith("tune run --nproc_per_node 2 full_finetune_distributed --config ")
    assert "'parallel.fsdp_wrap_policy=[model.layers.*]'" in command
