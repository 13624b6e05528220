"""Gradients that are reduced once a step, beside levers that have a say in when: losses, norms and
weights are those of one process that sees the same rows in one backward, in fp64 to 1e-12.

`test_levers` has them in runs of many levers, in which replicas may leave nothing to reduce.
"""

from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.recipes.levers import LEVERS, REDUCED_ONCE, Setting
from tests.recipes.runs import find_largest_difference
from tests.recipes.test_levers import STEPS, train_each, write_models
from tests.recipes.watched import measure_distance

ONCE = next(setting for setting in LEVERS if REDUCED_ONCE in setting.overrides)
KEPT = next(
    setting for setting in LEVERS if "parallel.reshard_after_forward=false" in setting.overrides
)
EXACT = 1e-12
FP64 = "dtype=fp64"
# Of levers that have a say in when gradients are reduced, one value; test_levers has the others in
# company.
SAYS_WHEN = ("wrapping", "replicas", "pipeline")
CASES = list(
    {setting.lever: setting for setting in reversed(LEVERS) if setting.lever in SAYS_WHEN}.values()
)


def runs_of(setting: Setting) -> list[tuple[str, ...]]:
    """Once a step with the lever; and, for one, with weights that are kept as long."""
    found = [(*ONCE.overrides, *setting.overrides, FP64)]
    if setting.lever == "wrapping":
        found.append((*found[0], *KEPT.overrides))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """What every run gives, by (ranks, overrides); on two ranks, or four where two would leave
    nothing to reduce.
    """
    folder = tmp_path_factory.mktemp("reduced_once")
    write_models(folder)
    found: dict[Any, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        runs = [run for setting in CASES if setting.ranks == ranks for run in runs_of(setting)]
        wanted = [((FP64,), True)] if ranks == 1 else [(run, False) for run in runs]
        keys = [(ranks, run) for run, _ in wanted]
        found |= dict(
            zip(
                keys,
                run_ranks(train_each, ranks, folder, wanted, ranks, timeout=400)[0],
                strict=True,
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("setting", CASES, ids=str)
def test_with_every_lever_the_run_is_that_of_one_process(
    results: dict[Any, dict[str, Any]], setting: Setting
):
    expected = results[1, (FP64,)]
    assert expected["code"] == 0, expected["said"]
    for run in runs_of(setting):
        found = results[setting.ranks, run]
        assert found["code"] == 0, (run, found["said"][-1:])
        for lines in found["runs"]:
            for name, factor in (("loss", 1), ("grad_norm", 10)):
                mine, wanted = ([line[name] for line in of if name in line and "loss" in line]
                                for of in (lines, expected["runs"][0]))  # fmt: skip
                assert len(mine) == STEPS
                assert find_largest_difference(mine, wanted) <= factor * EXACT, (run, name)
        assert (
            measure_distance(found["weights"], expected["weights"], expected["formula"]["start"])
            <= 1e-8
        ), run


def test_every_lever_is_tried():
    assert len(CASES) == len(SAYS_WHEN)
