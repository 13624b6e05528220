"""`tune export` of a run of adapters that kept its best step."""

import shutil
from pathlib import Path

import pytest

from recipe_lib.cli.main import main as tune
from tests.cli.adapter_runs import write_adapter_run
from tests.recipes.test_best_runs import equal, summary, validations, weights


@pytest.mark.slow
def test_the_adapter_of_the_best_step(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Out of the run as it ended, and out of one that was killed before it wrote its adapter."""
    run, rows = tmp_path / "run", tmp_path / "run.jsonl"
    validation = (
        f"validation.source={rows}",
        "validation.format=messages",
        "validation.every_n_steps=1",
    )
    keep = (
        "checkpoint.keep_best=true",
        "checkpoint.greater_is_better=true",
        "checkpoint.save_every_n_steps=1",
    )
    write_adapter_run(
        realdata, run, *validation, *keep
    )  # of two steps the first has the higher loss
    assert max(validations(run))[1] == summary(run)["exported_step"] == 1
    sentence = summary(run)["outcome"]

    assert tune(["export", str(run), "--adapter", "--out", str(tmp_path / "written")]) == 0
    assert equal(weights(tmp_path / "written"), weights(run / "adapter"))
    assert sentence in (tmp_path / "written" / "README.md").read_text()
    assert tune(["export", str(run), "--merge", "--out", str(tmp_path / "merged")]) == 0
    assert sentence in (tmp_path / "merged" / "README.md").read_text()
    assert (
        tune(["export", f"{run}/state/step_2", "--adapter", "--out", str(tmp_path / "last")]) == 0
    )
    assert not equal(weights(tmp_path / "last"), weights(run / "adapter"))

    shutil.move(run / "adapter", tmp_path / "taken")
    capsys.readouterr()
    assert tune(["export", str(run), "--adapter"]) == 0
    assert f"{run}/state/best/step_1 is the best step of the run" in " ".join(
        capsys.readouterr().out.split()
    )
    assert equal(weights(run / "adapter_step_1"), weights(tmp_path / "taken"))
