"""Which step is best and where a run stops, against a plain loop over the numbers; and what is
refused.
"""

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.resumable_state import save_state
from recipe_lib.config.schema import CheckpointConfig, FullFinetuneConfig, ValidationConfig
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.training.best_step import BestStep, describe_best

WORLD: Any = SingleRank()


def best_step(output: Path | str = "run", **keys: Any) -> BestStep:
    """keys: of the sections checkpoint and validation."""
    of_validation = {name: keys.pop(name) for name in ("patience", "min_delta") if name in keys}
    checkpoint, validation = (
        CheckpointConfig(**keys),
        ValidationConfig(source="own.jsonl", **of_validation),
    )
    return BestStep(
        FullFinetuneConfig(checkpoint=checkpoint, validation=validation, output_dir=str(output))
    )


def by_hand(
    numbers: list[float], greater: bool, patience: int, delta: float
) -> tuple[int | None, int | None]:
    """(place of the best, place at which to stop): the first of the best numbers up to there."""
    worth = [-math.inf if not math.isfinite(one) else one if greater else -one for one in numbers]
    stop, bar, since = None, -math.inf, 0
    for place, one in enumerate(worth):
        since = 0 if one > -math.inf and (bar == -math.inf or one > bar + delta) else since + 1
        bar = one if since == 0 else bar
        if since == patience:
            stop = place
            break
    seen = worth[: len(worth) if stop is None else stop + 1]
    return (seen.index(max(seen)) if max(seen) > -math.inf else None), stop


@pytest.mark.parametrize("greater", [False, True])
@pytest.mark.parametrize("delta", [0.0, 0.25])
def test_the_best_and_the_end_are_those_of_a_plain_loop(
    tmp_path: Path, greater: bool, delta: float
):
    """Numbers that recur, among them such as are not finite; also of a run that goes on from its
    record each time.
    """
    draw, stopped = random.Random(7), 0
    for trial in range(200):
        numbers = [
            draw.choice([1.0, 1.125, 1.25, 1.5, 1.75, 2.0, math.nan, math.inf]) for _ in range(12)
        ]
        patience = draw.randint(1, 5)
        keys = {
            "best_metric": "validation_x",
            "greater_is_better": greater,
            "patience": patience,
            "min_delta": delta,
        }
        best = best_step(**keys)
        found, expected = None, by_hand(numbers, greater, patience, delta)
        for place, number in enumerate(numbers):
            best.judge(place, {"validation_x": number}, WORLD)
            if trial % 2:
                record, best = best.make_record(), best_step(**keys)
                best.restore({"best": record}, tmp_path, WORLD)
            if best.is_waited_out:
                found = place
                break
        assert (best.step, found) == expected, (numbers, patience)
        assert best.value == (None if best.step is None else numbers[best.step])
        stopped += found is not None
    assert stopped > 20


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("validation_loss", False),
        ("validation_perplexity", False),
        ("validation_character_error", False),
        ("validation_divergence", False),
        ("validation_cross_entropy", False),
        ("validation_kl", False),
        ("validation_reward_rejected", False),
        ("validation_reward_chosen", True),
        ("validation_reward_accuracy", True),
        ("validation_exact_match", True),
    ],
)
def test_the_name_says_which_way_is_better(metric: str, greater: bool):
    assert best_step(best_metric=metric).greater_is_better is greater
    assert (
        best_step(best_metric=metric, greater_is_better=not greater).greater_is_better
        is not greater
    )


COUNTS = ("validation_tokens", "validation_pairs", "validation_samples", "validation_sequences")


def test_a_number_that_validation_does_not_give_is_named():
    best = best_step(best_metric="validation_los", keep_best=True)
    line = (
        "checkpoint.best_metric: found validation_los, expected a number of the recipe's"
        " validation: validation_loss, validation_x; did you mean validation_loss?"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        counts = dict.fromkeys(COUNTS, 5.0)
        best.judge(1, {"validation_loss": 1.0, **counts, "validation_x": 2.0}, WORLD)


def test_the_first_ranks_number_counts():
    """Rounding may differ between ranks; what they decide may not."""
    first: Any = SimpleNamespace(broadcast_json=lambda value: 1.0)
    best = best_step(patience=1)
    assert [best.judge(step, {"validation_loss": 9.0 - step}, first) for step in (1, 2)] == [
        True,
        False,
    ]
    assert best.value == 1.0 and best.is_waited_out


SAID: list[tuple[dict[str, Any], list[float], str | None]] = [
    ({}, [2.0], None),
    ({"patience": 1}, [2.0, 1.0], "last step 2; the best was step 2: validation_loss 1.0000"),
    ({"patience": 1}, [1.0, 2.0], "last step 2; the best was step 1: validation_loss 1.0000; stopped early (of 9 "
     "steps) after 1 validation without improvement"),
    ({"keep_best": True}, [1.0, 2.0], "best step 1 of 2: validation_loss 1.0000"),
    ({"keep_best": True, "patience": 2}, [1.0, 2.0, 3.0], "best step 1 of 3: validation_loss 1.0000; stopped early (of "
     "9 steps) after 2 validations without improvement"),
    ({"keep_best": True}, [math.nan], "last step 1; no validation gave a finite validation_loss"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "numbers", "said"), SAID)
def test_one_sentence_says_what_is_exported(
    tmp_path: Path, keys: dict[str, Any], numbers: list[float], said: str | None
):
    best, model = best_step(tmp_path, **keys), nn.Linear(2, 2)
    for at, number in enumerate(numbers):
        if best.judge(at + 1, {"validation_loss": number}, WORLD) and best.keeps_weights:
            best.save_weights(at + 1, model, WORLD)
    best.load(model, len(numbers), 9, WORLD)
    assert best.describe_outcome(9) == said
    assert best.list_facts(9).get("outcome") == said
    assert best.list_facts(9).get("exported_step") == (
        None if said is None else int(re.findall(r"step (\d+)", said)[0])
    )


def test_the_log_says_by_what_it_is_found():
    cfg = FullFinetuneConfig(validation=ValidationConfig(source="x", patience=2, min_delta=0.01))
    assert describe_best(FullFinetuneConfig()) == []
    assert describe_best(replace(cfg, checkpoint=CheckpointConfig(keep_best=True))) == [
        "best step: by validation_loss, lower is better; its weights are kept and exported; the run"
        " stops after 2 validations without improvement by more than 0.01; the learning rate is"
        " scheduled over all steps all the same"
    ]


# --- what a state names, and what stays on the disk


def kept(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "state" / "best").iterdir())


def state(output: Path, step: int, best: BestStep) -> Path:
    """A state that names the best step until then."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    path = save_state(
        output / "state",
        step,
        model,
        optimizer,
        {"step": step, "best": best.make_record()},
        WORLD,
        2,
    )
    best.prune(WORLD)
    return path


def test_the_weights_of_a_best_step_stay_while_a_state_or_the_run_names_them(tmp_path: Path):
    best, model = best_step(tmp_path, keep_best=True), nn.Linear(2, 2)

    def better(step: int) -> None:
        assert best.judge(step, {"validation_loss": 1.0 / step}, WORLD)
        best.save_weights(step, model, WORLD)

    better(1)
    better(2)
    assert kept(tmp_path) == ["step_2"]
    state(tmp_path, 2, best)
    better(3)
    better(4)
    assert kept(tmp_path) == ["step_2", "step_4"]
    state(tmp_path, 4, best)
    state(tmp_path, 5, best)  # the third of two that stay
    assert kept(tmp_path) == ["step_4"]


def test_a_later_best_step_is_forgotten_with_the_steps_that_are_trained_again(tmp_path: Path):
    best, model = best_step(tmp_path, keep_best=True), nn.Linear(2, 2)
    best.judge(1, {"validation_loss": 2.0}, WORLD)
    best.save_weights(1, model, WORLD)
    record, saved = best.make_record(), state(tmp_path, 1, best)
    best.judge(2, {"validation_loss": 1.0}, WORLD)
    best.save_weights(2, model, WORLD)
    assert kept(tmp_path) == ["step_1", "step_2"]
    again = best_step(tmp_path, keep_best=True)
    again.restore({"best": record}, saved, WORLD)
    assert (again.step, again.value, again.folder, kept(tmp_path)) == (1, 2.0, "step_1", ["step_1"])


def record_of(step: int, **changes: Any) -> dict[str, Any]:
    found = {
        "metric": "validation_loss",
        "greater_is_better": False,
        "step": step,
        "value": 1.0,
        "waited": 0,
        "reference": 1.0,
        "folder": f"step_{step}",
    }
    return found | changes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "metric": (
        {"metric": "validation_x"},
        (
            "was saved with checkpoint.best_metric=validation_x, found validation_loss; what was"
            " best until then was decided by it: set checkpoint.best_metric=validation_x"
        ),
    ),
    "direction": (
        {"greater_is_better": True},
        (
            "was saved with checkpoint.greater_is_better=true, found false; what was best until"
            " then was decided by it: set checkpoint.greater_is_better=true"
        ),
    ),
    "gone": (
        {},
        (
            "names {root}/state/best/step_1 as the best step of its run: manifest.json is missing;"
            " resume from another state, or set checkpoint.keep_best=false"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_cannot_go_on_with_is_refused(tmp_path: Path, case: str):
    changes, line = REFUSED[case]
    where = tmp_path / "state" / "step_1"
    best = best_step(tmp_path, keep_best=True)
    with pytest.raises(CheckpointError) as refused:
        best.restore({"best": record_of(1, **changes)}, where, WORLD)
    assert str(refused.value) == f"{where}: {line.format(root=tmp_path)}"


@pytest.mark.parametrize("record", [None, record_of(1, folder=None)], ids=["none", "no weights"])
def test_a_state_without_a_best_step_is_gone_on_from(tmp_path: Path, record: Any) -> None:
    best = best_step(tmp_path, keep_best=True)
    best.restore({"best": record}, tmp_path / "step_1", WORLD)
    assert (best.step, best.value, best.exported_step) == (None, None, None)
    assert best.judge(2, {"validation_loss": 5.0}, WORLD)


def test_another_runs_state_brings_its_best_step_along(tmp_path: Path):
    first, model = best_step(tmp_path / "first", keep_best=True), nn.Linear(2, 2)
    first.judge(1, {"validation_loss": 1.0}, WORLD)
    first.save_weights(1, model, WORLD)
    saved = state(tmp_path / "first", 1, first)
    second = best_step(tmp_path / "second", keep_best=True)
    second.restore({"best": first.make_record()}, saved, WORLD)
    assert kept(tmp_path / "second") == kept(tmp_path / "first") == ["step_1"]
    copied = nn.Linear(2, 2)
    second.load(copied, 3, 3, WORLD)
    assert copied.weight.equal(model.weight) and not copied.weight.equal(nn.Linear(2, 2).weight)
