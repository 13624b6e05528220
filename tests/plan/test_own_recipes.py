"""Plans of users' recipes, whose micro-batches need not be alike, against real runs on a CPU, to
the byte.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  (so that no process pays for the import)

from recipe_lib.cli.recipes import load_module
from recipe_lib.config import load_config
from recipe_lib.parallel import start_world
from recipe_lib.plan.tracing import simulated_micro_batches
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, simulate, trace_real_run
from tests.distributed.collectives import let_collectives_go
from tests.distributed.ranks import run_ranks
from tests.plan.own_recipes import STEPS, derive_recipe, run_as_shipped
from tests.plan.test_real_runs import BASE, PAIRS, TIED
from tests.recipes.runs import DPO, FULL, LORA, PLAIN, get_recipe_class, import_recipe_module
from tests.selection import mark_slow_except, select_cases

SHAPE = SimpleNamespace(tokens=64, documents=1)
STEP = {step.__name__: step for step in (*STEPS, run_as_shipped)}
# Up to FEW micro-batches are simulated at once, more of them after a look at two.
CASES = [(step.__name__, count) for step, counts in STEPS.items() for count in counts]


def config(count: int, *overrides: str) -> Any:
    words = [
        *BASE,
        f"model.preset={TIED}",
        f"gradient_accumulation_steps={count}",
        "output_dir=none",
        *overrides,
    ]
    return load_config(PLAIN, words, import_recipe_module(FULL).Config)


def peaks(simulated: bool, ranks: int, cases: list[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Of every case the most bytes of the first step and of a later one."""
    found = {}
    for name, count in cases:
        cfg = config(count)
        recipe = derive_recipe(STEP[name])
        if simulated:
            trace = simulate(recipe, cfg, SHAPE, ranks=ranks, phases=(), like_cpu=True).trace
        else:
            with start_world(cfg) as world, let_collectives_go():
                trace = trace_real_run(recipe, cfg, world, SHAPE).trace
        found[f"{name} {count}"] = {
            phase: trace.find_active_peaks()[phase] for phase in (FIRST, STEADY)
        }
    return found


SHIPPED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (FULL, ("parallel.fsdp_wrap_policy=layers", "memory.activation_checkpointing=full")),
    (FULL, ("device=cuda", "memory.activation_offload=true", "memory.optimizer_offload=true")),
    (FULL, ("parallel.tensor=2",)),
    (LORA, ("parallel.strategy=ddp", "lora.quantize_base=nf4")),
    (DPO, (PAIRS,)),
)
TWO_RANKS = [("keep_from_the_third", 4)]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """(planned, real) peaks of every selected case."""
    cases = list(dict.fromkeys([*select_cases(request, "case"), *select_cases(request, "kept")]))
    planned = run_ranks(peaks, 1, True, 1, cases, process_group=False, timeout=600)[0]
    return planned, run_ranks(peaks, 1, False, 1, cases, timeout=600)[0]


QUICK = [("sum_losses", 3), ("keep_each", 8)]


@pytest.mark.parametrize(
    "case", mark_slow_except(CASES, QUICK), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_peaks_are_those_of_the_real_run(
    runs: tuple[dict[str, Any], dict[str, Any]], case: tuple[str, int]
) -> None:
    name, count = case
    assert runs[0][f"{name} {count}"] == runs[1][f"{name} {count}"]


@pytest.mark.slow
def test_peaks_of_two_ranks_are_those_of_the_real_run() -> None:
    planned = run_ranks(peaks, 1, True, 2, TWO_RANKS, process_group=False)[0]
    assert planned == run_ranks(peaks, 2, False, 2, TWO_RANKS)[0]


def looked_at(recipe_file: Path) -> dict[str, Any]:
    """What is said of steps that there is no time to simulate whole; micro-batches of copies of the
    shipped file.
    """
    found = {}
    simulated_micro_batches.MAX_EVENTS = 1
    for name in ("keep_each", "run_as_shipped", "sum_losses"):
        one = simulate(derive_recipe(STEP[name]), config(8), SHAPE, phases=(), like_cpu=True)
        found[name] = [
            one.traced,
            one.untraced_bytes,
            one.estimate,
            one.trace.find_active_peaks()[STEADY],
        ]
    text = Path(import_recipe_module(FULL).__file__ or "").read_text(encoding="utf-8")
    changed = text.replace("treats_all_alike = True", "treats_all_alike = False") + "# mine\n"
    for name, copy in (("copy", text + "# mine\n"), ("changed copy", changed)):
        recipe_file.write_text(copy, encoding="utf-8")
        planned = load_module(recipe_file)
        one = simulate(get_recipe_class(planned), config(4), SHAPE, phases=(), like_cpu=True)
        found[name] = [one.traced, len(one.trace.events)]
        del sys.modules[planned.__name__]
    shipped = get_recipe_class(import_recipe_module(FULL))
    one = simulate(shipped, config(4), SHAPE, phases=(), like_cpu=True)
    found["shipped"] = [one.traced, len(one.trace.events)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kept", [("keep_each", 8)])
def test_what_is_not_simulated_is_said(
    runs: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, kept: tuple[str, int]
) -> None:
    found = run_ranks(looked_at, 1, tmp_path / "own_copy.py", process_group=False)[0]
    traced, untraced, said, peak = found["keep_each"]
    left = 4 * 40_000
    assert (traced, untraced) == (2, 6 * left)
    assert runs[1][f"{kept[0]} {kept[1]}"][STEADY] <= peak + untraced + left
    assert (
        said
        == "2 of a step's 8 micro-batches are simulated; each left 156.25 KiB more than the one"
        " before, and so are the others taken to do"
    )
    assert found["run_as_shipped"][:2] == [2, 0] and found["run_as_shipped"][2].endswith(
        "the others are taken to be like them"
    )
    assert found["sum_losses"][1] > 0
    # A copy is planned by as much work as the shipped file, but where it says to be unlike it.
    assert found["copy"] == found["shipped"] and found["copy"][0] == 2
    assert found["changed copy"][0] == 4


@pytest.mark.slow
def test_micro_batches_of_shipped_recipes_stand_for_each_other() -> None:
    """Whatever the lever: else a plan would take as long as all of them."""

    def traced() -> list[int]:
        found = []
        for name, overrides in SHIPPED:
            module = import_recipe_module(name)
            words = [
                *BASE,
                *overrides,
                f"recipe={name}",
                f"model.preset={TIED}",
                "gradient_accumulation_steps=4",
            ]
            cfg = load_config(PLAIN, words, module.Config)
            found.append(simulate(get_recipe_class(module), cfg, SHAPE, ranks=2, phases=()).traced)
        return found

    assert run_ranks(traced, 1, process_group=False)[0] == [2] * len(SHIPPED)
