"""`overwrite_output_dir=true` by whole runs: the earlier model is there until the new one is,
however the run ends.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe_lib import files
from tests.checkpoint.test_faults import in_child
from tests.recipes.runs import build_arguments, read_tree, run_here

SMALL = ["batch_size=4", "max_steps=2", "log.every_n_steps=1000", "data.num_workers=0"]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run that has ended well, with a state."""
    code = in_child(
        lambda: end_with(
            [*build_arguments(tmp_path / "out"), *SMALL, "checkpoint.save_every_n_steps=2"]
        )
    )
    assert code == 0
    return tmp_path / "out"


def end_with(argv: list[str], arrange: Any = None) -> None:
    """A run in a process of its own, which ends with the run's exit code."""
    run = run_here(argv, arrange)
    print("\n".join(run.said), file=sys.stderr, flush=True)
    os._exit(run.code)


def arrange_kill(recipe: Any) -> None:
    """The process is gone in the second step."""
    honest, steps = recipe.train_step, []

    def train_step(batches: Any) -> Any:
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(batches)

    recipe.train_step = train_step


def arrange_stop(recipe: Any) -> None:
    """Ctrl-C in the first step."""
    honest = recipe.train_step

    def train_step(batches: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return honest(batches)

    recipe.train_step = train_step


def arrange_full_disk(recipe: Any) -> None:
    """The disk is full when the new model is written."""

    def refuse(operation: str, path: Path) -> None:
        if path.suffix == ".safetensors" and operation == "write":
            raise OSError(28, "No space left on device", str(path))

    files.before_operation = refuse


ENDS = {
    "diverged": (4, ["optimizer.name=sgd", "optimizer.lr=1e30", "~clip_grad_norm"], None),
    "diverged in the last step": (
        4,
        ["optimizer.lr=1e300", "max_steps=1", "checkpoint.save_every_n_steps=1"],
        None,
    ),
    "killed": (-9, [], arrange_kill),
    "stopped": (3, [], arrange_stop),
    "full disk": (6, [], arrange_full_disk),
}


@pytest.mark.slow
def test_the_model_is_there_however_the_run_ends(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = read_tree(finished)
    model = {name: content for name, content in before.items() if name.startswith("model/")}
    state = {name: content for name, content in before.items() if name.startswith("state/")}
    assert model and state
    again = [*build_arguments(finished), *SMALL]

    def held() -> dict[str, bytes]:
        return {
            name: content
            for name, content in read_tree(finished).items()
            if name.startswith("model/")
        }

    for end, (code, settings, arrange) in ENDS.items():
        run = lambda settings=settings, arrange=arrange: end_with(  # noqa: E731
            [*again, "overwrite_output_dir=true", "seed=5", *settings], arrange
        )
        assert in_child(run) == code, end
        assert held() == model, end
        kept = read_tree(finished / "earlier")
        assert {
            name: content for name, content in kept.items() if name.startswith("state/")
        } == state, end
    said = capfd.readouterr().err
    assert (
        "error: step 1: found weights that are not finite after the update, expected finite"
        " numbers; lower optimizer.lr (1e+300) or clip_grad_norm, and resume=latest from a saved"
        " state\n" in said
    )
    assert (
        "overwrite_output_dir: this run has written no model; the earlier run is still there:"
        f" {finished / 'model'}" in said
    )
    settings = [f"model.path={finished / 'model'}", "~model.preset", "overwrite_output_dir=true"]
    assert in_child(lambda: end_with([*again, *settings])) == 2
    assert (
        f"model.path: {finished / 'model'} is read from {finished / 'model'}, "
        in capfd.readouterr().err
    )
    assert held() == model
    assert in_child(lambda: end_with([*again, "overwrite_output_dir=true", "seed=6"])) == 0
    assert held() != model and set(held()) == set(model)
    assert json.loads((finished / "summary.json").read_text())["settings"]["seed"] == 6
    assert not list(finished.glob("earlier*")) and not (finished / "state").exists()


@pytest.mark.slow
def test_a_stopped_run_takes_the_place_when_it_has_gone_on_to_its_end(finished: Path) -> None:
    model = read_tree(finished / "model")
    again = [*build_arguments(finished), *SMALL, "seed=5"]
    assert in_child(lambda: end_with([*again, "overwrite_output_dir=true"], arrange_stop)) == 3
    assert read_tree(finished / "model") == model
    assert in_child(lambda: end_with([*again, "resume=latest"])) == 0
    assert read_tree(finished / "model") != model and not list(finished.glob("earlier*"))
    assert [path.name for path in (finished / "state").iterdir()] == ["step_1"]
