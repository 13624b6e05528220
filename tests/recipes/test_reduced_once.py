"""Gradients that are reduced once a step, beside every lever that has a say in when: losses, norms and weights are
those of one process that sees the same rows in one backward.

In fp64 to 1e-12 wherever the lever rounds nothing; else within the lever's own tolerance. `test_levers` has them in
runs of many levers, in which replicas may leave nothing to reduce.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.recipes.levers import FINE, LEVERS, REDUCED_ONCE, Setting, Settings, basis, refusal
from tests.recipes.runs import furthest
from tests.recipes.test_levers import STEPS, WEIGHTS, train_each, write_models
from tests.recipes.watched import distance

ONCE = next(setting for setting in LEVERS if REDUCED_ONCE in setting.overrides)
KEPT = next(setting for setting in LEVERS if "parallel.reshard_after_forward=false" in setting.overrides)
EXACT = 1e-12
FP64 = "dtype=fp64"
# Of each lever that has a say in when gradients are reduced, one value; test_levers has the others in company.
SAYS_WHEN = ("wrapping", "replicas", "pipeline", "gradient sums")
FIRST = {setting.lever: setting for setting in reversed(LEVERS) if setting.lever in SAYS_WHEN}
CASES = [setting for setting in FIRST.values() if not refusal((ONCE, setting))]


def ranks_of(setting: Setting) -> tuple[int, ...]:
    """Two, or four where two would leave nothing to reduce."""
    return (setting.ranks,)


def is_exact(setting: Setting) -> bool:
    """Whether it rounds nothing, and fp64 goes with it."""
    rounding = ("parallel.reduce_dtype=fp32", "optimizer.state_bits=32")
    return setting.tolerance == FINE and not any(override in rounding for override in setting.overrides)


def overrides_of(settings: Settings, exact: bool) -> tuple[str, ...]:
    return (*dict.fromkeys(override for setting in settings for override in setting.overrides), *([FP64] * exact))


def runs_of(setting: Setting) -> list[tuple[str, ...]]:
    """Once a step with the lever; and, for one, with weights that are kept as long."""
    found = [(ONCE, setting)]
    if setting.lever == "wrapping":
        found.append((ONCE, KEPT, setting))
    return [overrides_of(settings, is_exact(setting)) for settings in found]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, dict[str, Any]]]:
    """What every run gives, by (ranks, overrides)."""
    folder = tmp_path_factory.mktemp("reduced_once")
    write_models(folder)
    found: dict[Any, dict[str, Any]] = {}
    bases = dict.fromkeys((*basis((setting,)), *([FP64] * is_exact(setting))) for setting in CASES)
    for ranks in (1, 2, 4):
        runs = [run for setting in CASES if ranks in ranks_of(setting) for run in runs_of(setting)]
        wanted = [(base, True) for base in bases] if ranks == 1 else [(run, False) for run in runs]
        keys = [(ranks, run) for run, _ in wanted]
        found |= dict(zip(keys, run_ranks(train_each, ranks, folder, wanted, ranks, timeout=400)[0], strict=True))
    yield found


@pytest.mark.slow
@pytest.mark.parametrize("setting", CASES, ids=str)
def test_with_every_lever_the_run_is_that_of_one_process(results: dict[Any, dict[str, Any]], setting: Setting):
    exact = is_exact(setting)
    expected = results[1, (*basis((setting,)), *([FP64] * exact))]
    assert expected["code"] == 0, expected["said"]
    tolerance = EXACT if exact else setting.tolerance
    for ranks in ranks_of(setting):
        for run in runs_of(setting):
            found = results[ranks, run]
            assert found["code"] == 0, (run, found["said"][-1:])
            for lines in found["runs"]:
                for name, factor in (("loss", 1), ("grad_norm", 10)):
                    mine, wanted = ([line[name] for line in of if name in line and "loss" in line]
                                    for of in (lines, expected["runs"][0]))  # fmt: skip
                    assert len(mine) == STEPS
                    assert furthest(mine, wanted) <= factor * tolerance, (ranks, run, name)
            off = distance(found["weights"], expected["weights"], expected["formula"]["start"])
            assert off <= (1e-8 if exact else WEIGHTS[setting.tolerance]), (ranks, run)


def test_every_lever_is_tried():
    assert len(CASES) == len(SAYS_WHEN)
