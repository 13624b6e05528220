"""Runs that keep their best step: which one that is, by their own validations; what they export;
and the same of runs that are killed, stopped, gone on with from elsewhere and on other ranks.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe_lib import files
from recipe_lib.cli.main import main as tune
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    FULL,
    build_arguments,
    import_recipe_module,
    keep_latest,
    read_metrics,
    read_steps,
    read_tree,
    run_here,
)
from tests.recipes.test_resume import stop_after
from tests.selection import mark_slow_except

KEEP = ("checkpoint.keep_best=true", "validation.patience=3")
VALIDATION = (
    "validation.source=examples/demo/heldout.jsonl",
    "validation.format=alpaca",
    "validation.every_n_steps=2",
    "validation.max_samples=8",
)
BEST, LAST, STEPS = (
    4,
    10,
    36,
)  # of the plain run below: its best step, where it stops, and what it was to have


def command(output: Path, *overrides: str, config: str = "demo/full") -> list[str]:
    """A run at a rate at which validation is soon worse; constant, so that a shorter run is the
    same up to its end.
    """
    return keep_latest(
        *[word for word in build_arguments(output, config) if word != "~validation"],
        *VALIDATION,
        "data.cache=false",
        "epochs=6",
        "optimizer.lr=3e-2",
        "lr_scheduler.type=constant",
        "checkpoint.save_every_n_steps=3",
        "log.every_n_steps=1000",
        *overrides,
    )


def validations(output: Path, name: str = "validation_loss") -> list[tuple[float, int]]:
    return [(line[name], line["step"]) for line in read_metrics(output) if name in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def summary(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return found


def judged(output: Path) -> dict[str, Any]:
    """What a run came to, without the times of it."""
    found = summary(output)
    return {
        name: found.get(name)
        for name in ("status", "steps", "best_step", "best_value", "exported_step", "outcome")
    }


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].equal(expected[name]) for name in expected
    )


def alone(
    argv: list[str], before_training: Callable[[Any], None] | None = None, recipe: str = FULL
) -> list[str]:
    """Lines of a run in a process of its own; the last one is the exit code."""

    def train() -> list[str]:
        run = run_here(argv, before_training, recipe=recipe)
        return [*run.said, str(run.code)]

    return run_ranks(train, 1, process_group=False)[0]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    output = tmp_path_factory.mktemp("best") / "quiet"
    said = alone(command(output, *KEEP))
    assert said[-1] == "0", said
    return output


@pytest.mark.slow
def test_the_best_of_the_validations_is_exported(quiet: Path, tmp_path: Path):
    found = validations(quiet)
    assert min(found)[1] == BEST and [step for _, step in found] == [2, 4, 6, 8, LAST]
    assert [line["step"] for line in read_metrics(quiet) if "loss" in line] == list(
        range(1, LAST + 1)
    )
    assert alone(command(tmp_path / "short", f"max_steps={BEST}"))[-1] == "0"
    assert equal(weights(quiet / "model"), weights(tmp_path / "short" / "model"))
    assert alone(command(tmp_path / "long", f"max_steps={LAST}"))[-1] == "0"
    assert not equal(weights(quiet / "model"), weights(tmp_path / "long" / "model"))
    assert read_steps(tmp_path / "long") == read_steps(
        quiet
    )  # keeping a best step changes no training


def test_all_records_say_which_step_it_is(quiet: Path):
    value = f"{min(validations(quiet))[0]:.4f}"
    sentence = (
        f"best step {BEST} of {LAST}: validation_loss {value}; stopped early (of {STEPS} steps)"
        " after 3 validations without improvement"
    )
    found = summary(quiet)
    assert (found["status"], found["steps"], found["total_steps"]) == ("stopped early", LAST, STEPS)
    assert (found["best_step"], found["exported_step"], found["outcome"]) == (BEST, BEST, sentence)
    assert (quiet / found["best_weights"]).is_dir()
    assert sentence in (quiet / "report.html").read_text()
    card = (quiet / "model" / "README.md").read_text()
    assert (
        sentence in card
        and f"| optimizer steps | {BEST} |" in card
        and f"| validation loss at the end | {value} |" in card
    )


# --- killed: at operations on the disk, of which saves consist


def die_at(argv: list[str], log: Path, number: int) -> int:
    """Runs in a fork that is gone before its `number`-th change of the disk; its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        done: list[str] = []

        def count(operation: str, path: Path) -> None:
            done.append(f"{operation} {path}")
            if len(done) == number:
                os._exit(9)

        files.before_operation = count
        code = import_recipe_module().main(argv) or 0
        (log.parent / "operations.json").write_text(json.dumps(done))
    finally:
        os._exit(code)


@cache
def operations(folder: Path) -> list[str]:
    assert die_at(command(folder / "counted", *KEEP), folder / "counted.log", 0) == 0, (
        folder / "counted.log"
    ).read_text()
    found: list[str] = json.loads((folder / "operations.json").read_text())
    return found


SHARES = [0.4, 0.85]


@pytest.mark.parametrize("share", mark_slow_except(SHARES, SHARES[:1]))
def test_a_run_that_is_killed_has_the_same_best_step(
    quiet: Path, tmp_path_factory: pytest.TempPathFactory, share: float
):
    """By shares of the run's changes of the disk between its first best step and its end."""
    folder = quiet.parent
    every = operations(folder)
    first = next(at for at, one in enumerate(every) if "/state/best" in one)
    number = first + 1 + round(share * (len(every) - first - 1))
    output = tmp_path_factory.mktemp("killed") / "run"
    log = output.with_name("run.log")
    argv = command(output, *KEEP, "resume=latest")
    assert die_at(argv, log, number) == 9, log.read_text()
    whole = [path for path in output.glob("state/**/step_*") if (path / "manifest.json").is_file()]
    assert len(whole) == len(list(output.glob("state/**/step_*")))
    assert die_at(argv, log, 0) == 0, log.read_text()
    assert read_steps(output) == read_steps(quiet) and validations(output) == validations(quiet)
    assert judged(output) == judged(quiet)
    assert read_tree(output / "model") == read_tree(quiet / "model")
    assert [path.name.split("-")[0] for path in (output / "state" / "best").iterdir()] == [
        f"step_{BEST}"
    ]


# --- stopped, and gone on with otherwise


@pytest.mark.slow
def test_a_signal_at_the_best_step_or_at_the_end_changes_nothing(quiet: Path, tmp_path: Path):
    """SIGTERM in steps whose validation makes them the best, or makes the run end."""
    output = tmp_path / "run"
    assert alone(command(output, *KEEP, "resume=latest"), stop_after(BEST))[-1] == "3"
    assert alone(command(output, *KEEP, "resume=latest"), stop_after(LAST))[-1] == "3"
    assert summary(output)["status"] == "stopped" and not (output / "model").exists()
    assert alone(command(output, *KEEP, "resume=latest"))[-1] == "0"  # no step is left
    assert read_steps(output) == read_steps(quiet) and judged(output) == judged(quiet)
    assert read_tree(output / "model") == read_tree(quiet / "model")


@pytest.mark.slow
def test_a_best_step_after_the_state_that_is_gone_on_from_is_forgotten(tmp_path: Path):
    """A run that gets better all the time, resumed from an early state at a rate that makes it
    worse.
    """
    calm = (
        "checkpoint.keep_best=true",
        "optimizer.lr=1e-3",
        "max_steps=8",
        "checkpoint.keep_last_n=9",
    )
    output = tmp_path / "run"
    assert alone(command(output, *calm))[-1] == "0"
    assert min(validations(output))[1] == 8 and summary(output)["exported_step"] == 8
    said = alone(command(output, *calm, "optimizer.lr=1", f"resume={output}/state/step_3"))
    assert said[-1] == "0", said
    found = validations(output)
    assert min(found)[1] == 2 and len(found) == 4
    assert summary(output)["exported_step"] == 2
    assert alone(command(tmp_path / "short", "optimizer.lr=1e-3", "max_steps=2"))[-1] == "0"
    assert equal(weights(output / "model"), weights(tmp_path / "short" / "model"))


@pytest.mark.slow
def test_more_patience_goes_on_from_an_early_end(quiet: Path, tmp_path: Path):
    output, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(quiet, output)
    more = ("checkpoint.keep_best=true", "validation.patience=5")
    said = alone(command(output, *more, "resume=latest"))
    assert said[-1] == "0" and summary(output)["steps"] > LAST, said
    assert alone(command(whole, *more))[-1] == "0"
    assert judged(output) == judged(whole) and read_tree(output / "model") == read_tree(
        whole / "model"
    )


@pytest.mark.slow
def test_an_early_end_replaces_the_earlier_run(quiet: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(quiet, output)
    assert alone(command(output, *KEEP, "seed=3", "overwrite_output_dir=true"))[-1] == "0"
    assert summary(output)["status"] == "stopped early" and not (output / "earlier").exists()
    assert not equal(weights(output / "model"), weights(quiet / "model"))


@pytest.mark.slow
def test_patience_alone_exports_the_last_step(quiet: Path, tmp_path: Path):
    output = tmp_path / "patient"
    assert alone(command(output, "validation.patience=3"))[-1] == "0"
    assert (summary(output)["best_step"], summary(output)["exported_step"]) == (BEST, LAST)
    assert not (output / "state" / "best").exists()
    assert not equal(weights(output / "model"), weights(quiet / "model"))


@pytest.mark.slow
def test_the_best_step_may_be_all_that_a_run_leaves(tmp_path: Path):
    output = tmp_path / "kept"
    own = (
        "checkpoint.keep_best=true",
        "checkpoint.save_every_n_steps=null",
        "checkpoint.save_model=false",
    )
    assert alone(command(output, *own, "max_steps=6"))[-1] == "0"
    assert [str(path.relative_to(output / "state")) for path in output.glob("state/**/step_*")] == [
        f"best/step_{BEST}"
    ]
    assert alone(command(output, *own, "max_steps=6"))[-2:] == [
        (
            f"error: output_dir: {output} holds the weights of a best step of an earlier run;"
            " overwrite_output_dir=true replaces what is there, or choose another output_dir"
        ),
        "2",
    ]
    assert alone(command(output, *own, "max_steps=2", "overwrite_output_dir=true"))[-1] == "0"
    assert [path.name for path in output.glob("state/best/*")] == ["step_2"]
    assert [path.name for path in output.glob("earlier/state/best/*")] == [f"step_{BEST}"]


def test_what_cannot_be_is_refused(quiet: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(quiet, output)
    before, best = read_tree(output), output / "state" / "best" / f"step_{BEST}"
    assert alone(command(output, *KEEP, f"resume={best}"))[-2:] == [
        (
            f"error: {best}: holds the weights of a best step and no optimizer, and cannot be"
            " resumed from; resume=latest goes on from the newest state, `tune export` makes a"
            " model or an adapter of these weights"
        ),
        "2",
    ]
    assert read_tree(output) == before
    (shard,) = best.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    line, code = alone(command(output, *KEEP, "resume=latest"))[-2:]
    assert (
        code == "2"
        and line
        == f"error: {best}: holds the weights of the best step: {shard.name} has changed since it"
        " was written (SHA-256 differs from the manifest); to export the last step in its"
        " place, resume=latest checkpoint.keep_best=false"
    )
    assert read_tree(output / "model") == read_tree(quiet / "model")
    assert alone(command(output, "validation.patience=3", "resume=latest"))[-1] == "0"
    assert summary(output)["exported_step"] == LAST


def test_export_takes_the_best_step(
    quiet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert tune(["export", str(quiet), "--hf", "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"note: {quiet}/state/best/step_{BEST} is the best step of the run, and is taken" in said
    assert equal(weights(tmp_path / "out"), weights(quiet / "model"))
    assert (
        f"| exported | best step {BEST}: validation_loss "
        in (tmp_path / "out" / "README.md").read_text()
    )
    assert (
        tune(
            ["export", f"{quiet}/state/best/step_{BEST}", "--hf", "--out", str(tmp_path / "named")]
        )
        == 0
    )
    assert read_tree(tmp_path / "named") == read_tree(tmp_path / "out")
    assert (
        tune(["export", f"{quiet}/state/step_{LAST}", "--hf", "--out", str(tmp_path / "last")]) == 0
    )
    assert not equal(weights(tmp_path / "last"), weights(quiet / "model"))
