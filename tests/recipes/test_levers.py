"""Every lever, and every pair of levers, either gives the losses of the plain run or is refused
with a reason.

The runs are made from the table in `levers`; of the pairs that are refused in the same words one is
tried. A key that the schema gains is in the table, or among those that are said not to be levers,
or a test here fails.
"""

import functools
import json
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.levers import build_page
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.mesh import MODEL_DIMS
from recipe_lib.config.registry import BUILT_IN, register
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory import apply_levers
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.levers import (
    BF16,
    COMPILE,
    COSTLY,
    FINE,
    GPU_ONLY,
    LEVERS,
    LOSS,
    LOW_BITS,
    MOST,
    NO_CLIPPING,
    NOT_LEVERS,
    REFUSED,
    ROWS,
    SINGLES,
    STEPS,
    TOGETHER,
    Settings,
    build_basis,
    cover,
    find_refusal,
    format_title,
    keep_one_rank,
)
from tests.recipes.runs import (
    ROOT,
    build_arguments,
    find_largest_difference,
    offload_on_a_cpu,
    read_metrics,
    run_here,
)
from tests.recipes.watched import Watch, measure_distance, read_trained_weights
from tests.selection import mark_slow_except, select_cases

# Values that no run here has: fp32 is the demo's; fp64 is tried in test_equality; `auto` is decided
# by `tune run`; what else linears are rounded to, in tests/memory/test_qat and test_qat_worlds.
ELSEWHERE = {
    "data.packing": ["auto"],
    "dtype": ["fp32", "fp64"],
    "parallel.strategy": ["auto"],
    "qat": ["int8", "fp8"],
}
PLAIN: Settings = ()
SUMMED_IN_BF16: Settings = next(
    row for row in SINGLES if "parallel.reduce_dtype=bf16" in row[0].overrides
)
NARROW = [row for row in TOGETHER if not set(row) & set(COSTLY)]
WIDE = [row for row in TOGETHER if set(row) & set(COSTLY)]
# Of those that are refused in the same words, one.
REFUSED_ONCE = list({find_refusal(row): row for row in REFUSED}.values())
# The other levers say more in company than alone.
CASES: list[tuple[Settings, int]] = [
    *(
        (row, max([2, *(setting.ranks for setting in row)]))
        for row in [PLAIN, SUMMED_IN_BF16, *REFUSED_ONCE, *NARROW, *WIDE]
    ),
    *((row, 1) for row in cover([keep_one_rank(row) for row in NARROW])),
]
# Of losses -> of weights, in parts of the way that they have come: where a gradient is about zero
# AdamW makes a step of any sign of it.
WEIGHTS = {FINE: 1e-3, LOW_BITS: 0.05, BF16: 0.3}
# A first step is made before its states are rounded.
CHANGING = dict.fromkeys(
    setting.basis
    for setting in LEVERS
    if setting.basis not in ((), (NO_CLIPPING,)) and setting.lever != "state bits"
)
BASES = list(
    dict.fromkeys(
        [*(build_basis(settings) for settings, _ in CASES if not find_refusal(settings)), *CHANGING]
    )
)
# Of the runs together the one on two ranks, and the one on one, that have most values.
FEW = [(cover(NARROW)[0], 2), next(case for case in CASES if case[1] == 1)]
QUICK = [
    *FEW,
    (PLAIN, 2),
    (SUMMED_IN_BF16, 2),
    *((row, ranks) for row, ranks in CASES if row in REFUSED_ONCE[::4]),
]
QUICK = [case for case in CASES if case in QUICK and case[1] < 4]
QUICK_BASES = list(dict.fromkeys(build_basis(settings) for settings, _ in FEW))


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of a user's own."""
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)


def train(
    folder: Path, settings: tuple[str, ...], ranks: int, observed: bool = False
) -> dict[str, Any]:
    """Code, lines, losses and weights of a run; with saving, also those of a second run that goes
    on after the first step.

    settings: overrides. observed: with validation, and beside the formula of its optimizer.
    """
    torch._dynamo.reset()
    register("loss", LOSS)(smoothed)
    output = folder / f"run{ranks}"
    overrides = [override.format(folder=folder) for override in settings]
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    batches = (
        ranks
        // 2 ** len({f"parallel.{name}=2" for name in MODEL_DIMS} & set(overrides))
        * accumulation
    )
    validation = next(setting for setting in LEVERS if setting.lever == "validation")
    argv = [
        *build_arguments(output),
        f"model.preset={folder}/tied.json",
        f"batch_size={ROWS // batches}",
        f"max_steps={STEPS}",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        *overrides,
        *(validation.overrides if observed else ()),
    ]
    watch = Watch() if observed else None
    run = run_here([*argv, "overwrite_output_dir=true"], before_training=watch)
    found = {"code": run.code, "said": run.said, "runs": [] if run.code else [read_metrics(output)]}
    if watch and run.code == 0:
        found["formula"] = watch.report(run.recipe)
    if run.code == 0 and "checkpoint.save_every_n_steps=1" in overrides:
        torch.distributed.barrier()
        if run.recipe.world.is_main:
            shutil.rmtree(output / "state" / f"step_{STEPS}")
        torch.distributed.barrier()
        run = run_here([*argv, "resume=latest"])
        assert run.code == 0, run.said
        assert any("1 of 2 steps done" in line for line in run.said) or not run.recipe.world.is_main
        found["runs"].append(read_metrics(output))
    found["weights"] = read_trained_weights(run.recipe) if run.code == 0 else {}
    torch.distributed.barrier()
    return found


def write_models(folder: Path) -> None:
    """A model whose widest matrices are long enough to have states of few bits, and that has a
    layer to send with two ahead; with and without a tied embedding.
    """
    model = json.loads((ROOT / "tests/recipes/tiny.json").read_text())
    model |= {"intermediate_size": 512, "num_hidden_layers": 3}
    for name, tied in (("tied", True), ("untied", False)):
        (folder / f"{name}.json").write_text(json.dumps(model | {"tie_word_embeddings": tied}))


def train_each(
    folder: Path, settings: list[tuple[tuple[str, ...], bool]], ranks: int
) -> list[dict[str, Any]]:
    # Which operators run compiled or not is the same for every backend; inductor has a test of its
    # own.
    apply_levers.compile_layers = functools.partial(apply_levers.compile_layers, backend="eager")
    # Rows of one length, so that one compilation serves all steps; test_compile_lengths has those
    # of many.
    alike = {True: ("data.pad_to_multiple_of=64",), False: ()}
    offload_on_a_cpu()
    return [
        train(folder, (*overrides, *alike["compile=true" in overrides]), ranks, observed)
        for overrides, observed in settings
    ]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, dict[str, Any]]:
    """What every selected case gives, and under `("basis", overrides)` what it is compared with."""
    folder = tmp_path_factory.mktemp("levers")
    write_models(folder)
    if any(COMPILE in settings for settings, _ in select_cases(request, "case")):
        import_compiler()
    found: dict[Any, dict[str, Any]] = {}
    wanted = select_cases(request, "case") or [(PLAIN, 2), (SUMMED_IN_BF16, 2)]
    bases = dict.fromkeys([(), *select_cases(request, "base")])
    bases |= dict.fromkeys(
        build_basis(settings) for settings, _ in wanted if not find_refusal(settings)
    )
    for ranks in (1, 2, 4):
        cases = [case for case in wanted if case[1] == ranks]
        runs = [
            (sum((setting.overrides for setting in settings), ()), False) for settings, _ in cases
        ]
        keys: list[Any] = list(cases)
        if ranks == 1:
            keys += [("basis", base) for base in bases]
            runs += [(base, True) for base in bases]
        if runs:
            each = run_ranks(train_each, ranks, folder, runs, ranks, timeout=400)
            for key, ends in zip(keys, zip(*each, strict=True), strict=True):
                told = [line for end in ends for line in end["said"] if line.startswith("error: ")]
                found[key] = ends[0] | {"said": told or ends[0]["said"]}
    return found


def case_title(case: tuple[Settings, int]) -> str:
    settings, ranks = case
    if ranks == 1:
        return f"one rank {CASES.index(case)}"
    return format_title(settings)


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK), ids=case_title)
def test_losses_are_those_of_the_plain_run_or_it_is_refused(
    results: dict[Any, dict[str, Any]], case: Any
):
    settings, _ = case
    found, words = results[case], find_refusal(settings)
    if words:
        assert found["code"] == 2
        assert words in found["said"][-1]  # of one of the ranks
        return
    expected = results["basis", build_basis(settings)]
    assert expected["code"] == 0, expected["said"]
    assert found["code"] == 0, (settings, found["said"][-1:])
    tolerance = max([FINE, *(setting.tolerance for setting in settings)])
    wanted = expected["runs"][0]
    for lines in found["runs"]:
        for name in ("loss", "validation_loss"):
            mine = [line[name] for line in lines if name in line]
            assert name != "loss" or len(mine) == STEPS
            assert (
                not mine
                or find_largest_difference(mine, [line[name] for line in wanted if name in line])
                <= tolerance
            )
        norms = [line["grad_norm"] for line in lines if "loss" in line]
        assert (
            find_largest_difference(norms, [line["grad_norm"] for line in wanted if "loss" in line])
            <= 10 * tolerance
        )
    off = measure_distance(found["weights"], expected["weights"], expected["formula"]["start"])
    assert off <= WEIGHTS[tolerance]


def formula_tolerance(base: tuple[str, ...], name: str) -> float:
    """Muon's iteration is in bf16, which on matrices that are nearly singular is far from one in
    fp64.
    """
    if "optimizer.name=muon" in base and ".layers." in name and "norm" not in name:
        return 0.3
    return 0.1 if "dtype=bf16" in base else 1e-3


@pytest.mark.parametrize("base", mark_slow_except(BASES, QUICK_BASES), ids=" ".join)
def test_runs_of_one_process_move_weights_as_the_formula_says(
    results: dict[Any, dict[str, Any]], base: Any
):
    """Each trained tensor, from the gradients that the run had, by a plain loop."""
    run = results["basis", base]
    assert run["code"] == 0, run["said"]
    found = run["formula"]
    norms = [line["grad_norm"] for line in run["runs"][0] if "loss" in line]
    assert find_largest_difference(norms, found["norms"]) <= 1e-5
    assert found["still"] == []
    bad = {
        name: error
        for name, error in found["errors"].items()
        if not error <= formula_tolerance(base, name)
    }
    assert bad == {}


@pytest.mark.slow
@pytest.mark.parametrize("base", CHANGING, ids=" ".join)
def test_settings_that_change_results_do(results: dict[Any, dict[str, Any]], base: Any):
    changed, plain = results["basis", base]["runs"][0], results["basis", ()]["runs"][0]
    assert [line.get("loss") for line in changed] != [line.get("loss") for line in plain]


def test_sums_in_bf16_change_results(results: dict[Any, dict[str, Any]]):
    lower = results[SUMMED_IN_BF16, 2]["runs"][0]
    assert [line["loss"] for line in lower] != [
        line["loss"] for line in results[PLAIN, 2]["runs"][0]
    ]


def test_the_page_is_made_from_the_table():
    page = (ROOT / "docs" / "measurements" / "levers.md").read_text(encoding="utf-8")
    assert page == build_page(), (
        "run `python -m benchmarks.levers --output docs/measurements/levers.md`"
    )


def test_every_key_is_a_lever_or_said_not_to_be():
    keys = read_schema(FullFinetuneConfig).keys
    levers = {key.removeprefix("~") for setting in LEVERS for key in setting.keys}
    others = {
        name for name in keys if name in NOT_LEVERS or f"{name.partition('.')[0]}.*" in NOT_LEVERS
    }
    missing = sorted(set(keys) - levers - others)
    assert not missing, (
        f"add {missing} to LEVERS, so that it is tried with every other lever, or to NOT_LEVERS"
    )
    stale = {
        name
        for name in NOT_LEVERS
        if not any(key == name or key.startswith(name[:-1]) for key in keys)
    }
    assert levers <= set(keys) and not stale


def test_every_two_values_meet_or_are_refused_together():
    """Where a third lever does not hide what they do by its wider tolerance; costly ones meet
    some.
    """
    for a, b in combinations(LEVERS, 2):
        if a.lever != b.lever and (a, b) not in REFUSED and not {a, b} & set(COSTLY):
            meeting = [row for row in TOGETHER if a in row and b in row]
            assert any(
                max(s.tolerance for s in row) == max(a.tolerance, b.tolerance) for row in meeting
            ), (a, b)
    assert {setting for row in TOGETHER for setting in row} == set(LEVERS)
    assert {setting for row in (*NARROW, *WIDE) for setting in row} == set(
        LEVERS
    )  # those that are run
    for row in TOGETHER:
        assert len({setting.lever for setting in row}) == len(row) <= MOST
        assert not find_refusal(row)


def test_every_value_of_a_lever_is_tried():
    tried = {override for setting in LEVERS for override in setting.overrides} | set(GPU_ONLY)
    levers = {key for setting in LEVERS for key in setting.keys}
    for name, key in read_schema(FullFinetuneConfig).keys.items():
        if name not in levers or name in NOT_LEVERS:
            continue
        values: Iterator[str] = iter(key.limits.get("choices", ()))
        if "kind" in key.limits and name not in (
            "validation.format",
            "validation.metrics",
        ):  # a list of them all
            values = iter(BUILT_IN[key.limits["kind"]][1])
        untried = [
            value for value in values if value != key.default and f"{name}={value}" not in tried
        ]
        assert not set(untried) - set(ELSEWHERE.get(name, [])), f"add {name}={untried} to LEVERS"


@pytest.mark.parametrize("override", GPU_ONLY)
def test_what_needs_a_gpu_is_refused_on_a_cpu(tmp_path: Path, override: str):
    run = run_here(
        [*build_arguments(tmp_path / "run"), override, "~memory.loss_chunks", "dtype=bf16"]
    )
    assert run.code == 2
    assert GPU_ONLY[override] in run.said[-1]
