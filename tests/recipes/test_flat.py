"""A model that learns nothing says so."""

from pathlib import Path
from typing import Any

import torch

from tests.recipes.runs import build_arguments, run_here


@torch.no_grad()
def flatten(recipe: Any) -> None:
    """All weights are 0, and so is every gradient."""
    for parameter in recipe.model.parameters():
        parameter.zero_()


def test_a_gradient_of_zero_is_told_once(tmp_path: Path):
    argv = [*build_arguments(tmp_path / "run"), "max_steps=3", "checkpoint.save_model=false"]
    run = run_here(argv, flatten)
    assert run.code == 0
    assert [line for line in run.said if "the gradient is exactly 0" in line] == [
        "warning: step 1: the gradient is exactly 0, so nothing is learned; look for damaged"
        " weights, or a frozen model"
    ]
    run = run_here([*argv, "overwrite_output_dir=true"])
    assert run.code == 0 and not any("exactly 0" in line for line in run.said)
