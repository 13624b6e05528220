"""Every lever, and every pair of levers, either gives the losses of the plain run or is refused with a reason.

One table says which keys are levers and with which values they are tried; the runs are made from it: each value alone,
each pair that is refused alone, and few runs of many levers at once, in which all other pairs of values meet. A key
that the schema gains is in the table, or among those that are said not to be levers, or a test here fails.
"""

import functools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from recipe_lib.config.keys import read_schema
from recipe_lib.config.registry import BUILT_IN, register
from recipe_lib.config.schema import FullFinetuneConfig
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.runs import ROOT, arguments, furthest, metrics, recipe_module, run_here

STEPS = 2
ROWS = 8  # rows of a step, over all ranks
LOSS = "smoothed_for_tests"
MOST = 8  # levers of one run: if all were in all runs, one that hides what another does would hide it everywhere
FINE = 1e-6  # tolerance where nothing is rounded but sums in another order


@dataclass(frozen=True)
class Setting:
    """A lever's value. overrides: `{folder}` stands for the tests' own files. changes_results: it makes the run another
    one, so that it is compared with a run of one process that has it too; the others are compared with the plain run.
    tolerance: relative, of the losses. ranks: least number to try it on.
    """

    lever: str
    overrides: tuple[str, ...]
    changes_results: bool = False
    tolerance: float = FINE
    ranks: int = 2

    def __str__(self) -> str:
        return " ".join(self.overrides)

    @property
    def keys(self) -> set[str]:
        """Every key that it sets."""
        return {override.partition("=")[0] for override in self.overrides}


def _same(lever: str, *overrides: str, tolerance: float = FINE, ranks: int = 2) -> Setting:
    return Setting(lever, overrides, tolerance=tolerance, ranks=ranks)


def _other(lever: str, *overrides: str, tolerance: float = FINE) -> Setting:
    return Setting(lever, overrides, changes_results=True, tolerance=tolerance)


# bf16 keeps 8 bits: sums in another order differ by 2^-8 of a gradient, which two steps carry into the losses.
BF16 = 1e-2

COMPILE = _same("compile", "compile=true")
LEVERS = [
    COMPILE,
    _same("wrapping", "parallel.wrapping=layers"),
    _same("wrapping", "parallel.wrapping=memory_efficient"),
    _same("wrapping", "parallel.wrapping=[model.layers.*, model.layers.*.mlp, lm_head]"),
    _same("resharding", "parallel.reshard_after_forward=false"),
    _same("shards", "parallel.data_shard=2"),
    _same("replicas", "parallel.data_replicate=2", ranks=4),
    _same("tensor", "parallel.tensor=2", ranks=4),
    _same("pipeline", "parallel.pipeline=2", "parallel.pipeline_microbatches=2", ranks=4),
    _same("reduction", "parallel.reduce_dtype=fp32"),
    _same("reduction", "parallel.reduce_dtype=bf16", tolerance=BF16),
    _same("checkpointing", "memory.activation_checkpointing=full"),
    _same("checkpointing", "memory.activation_checkpointing=selective"),
    _same("offload", "memory.cpu_offload=true"),
    _same("loss chunks", "memory.loss_chunks=5"),
    _same("accumulation", "gradient_accumulation_steps=2"),
    _same("kernels", "optimizer.implementation=single"),
    _same("kernels", "optimizer.implementation=foreach"),
    _same("kernels", "optimizer.implementation=fused"),
    _same(
        "validation",
        "validation.source=examples/demo/heldout.jsonl",
        "validation.format=alpaca",
        "validation.every_steps=1",
        "validation.max_rows=5",
        "validation.batch_size=2",
    ),
    _same("saving", "checkpoint.save_every_steps=1", "checkpoint.keep=3"),
    _other("packing", "data.packing=true", "data.max_rows=300"),
    _other("tying", "model.preset={folder}/untied.json"),
    _other("optimizer", "optimizer.name=sgd", "~optimizer.betas"),
    _other("optimizer", "optimizer.name=sgd", "optimizer.momentum=0.9"),
    _other("decay", "optimizer.weight_decay=0.1"),
    _other("clipping", "clip_grad_norm=0.1"),
    _other("clipping", "clip_grad_norm=null"),
    _other("dtype", "dtype=bf16", tolerance=BF16),
    _other("loss", f"loss={LOSS}"),
]

# Keys that act before the first batch or beside the training, each with why no pair with it can matter.
NOT_LEVERS = {
    "recipe": "a name",
    "model.path": "where weights come from; test_worlds",
    "model.source": "another model; test_foreign_runs runs those of transformers on one rank and on two",
    "tokenizer.*": "how rows are read",
    "data.*": "which rows there are",
    "parallel.tensor_recompute_gather": "both values with every kind of model; tests/parallel/test_tensor",
    "parallel.tensor_copy_kv_heads": "for models with few kv heads; tests/parallel/test_tensor",
    "parallel.pipeline_schedule": "each with every kind of model; tests/parallel/pipeline, test_pipeline_runs",
    "parallel.pipeline_stages_per_rank": "of two schedules; tests/parallel/pipeline",
    "parallel.pipeline_split": "which rank has which layers; tests/parallel/pipeline",
    "parallel.pipeline_put_off": "the order of a step's work; tests/parallel/pipeline",
    "parallel.pipeline_timeout": "when a run ends; tests/parallel/pipeline/test_watch",
    "lr_schedule.*": "one number a step, a function of the step alone",
    "optimizer.lr": "a number of the optimizer's formula",
    "optimizer.betas": "a number of the optimizer's formula",
    "optimizer.eps": "a number of the optimizer's formula",
    "checkpoint.save_model": "written after the last step; test_worlds",
    "checkpoint.max_shard_gib": "written after the last step; tests/checkpoint",
    "log.*": "what is shown",
    "seed": "a number",
    "device": "there is one device here",
    "batch_size": "test_equality",
    "epochs": "how many steps",
    "max_steps": "how many steps",
    "max_seq_len": "how rows are read",
    "output_dir": "a name",
    "overwrite": "of one start only",
    "resume": "of one start only; test_resume",
}

# What is refused: levers' settings -> words of the line. Everything else must run.
OFFLOAD = "on a CPU everything is in host memory already"
SGD_KERNEL = "sharded parameters, for which torch has no such kernel"
HALVING = {"parallel.tensor=2", "parallel.pipeline=2", "parallel.data_replicate=2", "parallel.data_shard=2"}
OWN_LOSS = "it is called with the logits of the whole vocabulary, which no rank has"


def refusal(settings: "Settings") -> str | None:
    """Words of the line that these settings together are refused with; None: they must run."""
    overrides = {override for setting in settings for override in setting.overrides}
    if "memory.cpu_offload=true" in overrides:
        return OFFLOAD
    if {"optimizer.name=sgd", "optimizer.implementation=fused"} <= overrides:
        return SGD_KERNEL
    if {"parallel.tensor=2", f"loss={LOSS}"} <= overrides:
        return OWN_LOSS
    if len(overrides & HALVING) > 2:
        return "start 8 ranks"
    return None


Settings = tuple[Setting, ...]
SINGLES: list[Settings] = [(setting,) for setting in LEVERS]


def pairs() -> list[Settings]:
    """Every two values of different levers."""
    return [(a, b) for a, b in combinations(LEVERS, 2) if a.lever != b.lever]


def met(row: Settings) -> set[Settings]:
    """The pairs that a run of these settings says something about.

    Those that its tolerance is not too wide for. Compiling takes seconds, so that few runs do, of all levers that can
    be together: they say something about compiling alone.
    """
    widest, compiled = max(setting.tolerance for setting in row), COMPILE in row
    return {
        pair
        for pair in combinations(row, 2)
        if max(setting.tolerance for setting in pair) == widest and (COMPILE in pair) == compiled
    }


def together() -> list[Settings]:
    """Runs of several levers, so that every pair that is not refused is met by one of them (a covering array).

    Each begins with a pair that none has met yet; then the setting joins that meets most new pairs, if there is one
    and the run is not refused for it.
    """
    rows: list[Settings] = []
    left = dict.fromkeys(pair for pair in pairs() if not refusal(pair))  # in order

    def new(row: Settings) -> int:
        return sum(pair in left for pair in met(row))

    def joined_by_one(row: Settings) -> list[Settings]:
        levers = {setting.lever for setting in row}
        others = [setting for setting in LEVERS if setting.lever not in levers and setting.tolerance == FINE]
        if COMPILE in row:  # once on four ranks is enough
            others = [setting for setting in others if setting.ranks == 2]
        longer = [tuple(sorted((*row, setting), key=LEVERS.index)) for setting in others]
        return [row, *(settings for settings in longer if not refusal(settings))]

    while left:
        row, longer = (), next(iter(left))
        while longer != row and (len(longer) <= MOST or COMPILE in longer):
            row, longer = longer, max(joined_by_one(longer), key=new)
        rows.append(row)
        for pair in met(row):
            left.pop(pair, None)
    return rows


REFUSED = [pair for pair in pairs() if refusal(pair)]
TOGETHER = together()
PLAIN: Settings = ()
SUMMED_IN_BF16: Settings = next(row for row in SINGLES if "parallel.reduce_dtype=bf16" in row[0].overrides)
# The other levers say more in company.
ALONE = [row for row in SINGLES if row == SUMMED_IN_BF16 or not any(row[0] in other for other in TOGETHER)]
CASES: list[Settings] = [PLAIN, *ALONE, *REFUSED, *TOGETHER]


def basis(settings: Settings) -> Settings:
    """Those that make the run another one."""
    return tuple(setting for setting in settings if setting.changes_results)


BASES = list(dict.fromkeys(basis(settings) for settings in [*CASES, *SINGLES]))


def title(settings: Settings) -> str:
    """For reports."""
    if settings in TOGETHER:
        return f"together {TOGETHER.index(settings)}"
    return " + ".join(map(str, settings)) or "plain"


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of a user's own."""
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)


def train(folder: Path, settings: Settings, ranks: int, observed: bool = False) -> dict[str, Any]:
    """Code, lines and losses of a run; with saving, also those of a second run that goes on after the first step.

    observed: with validation.
    """
    torch._dynamo.reset()
    register("loss", LOSS)(smoothed)
    output = folder / f"run{ranks}"
    overrides = [override.format(folder=folder) for setting in settings for override in setting.overrides]
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    batches = ranks // 2 ** len({"parallel.tensor=2", "parallel.pipeline=2"} & set(overrides)) * accumulation
    validation = next(setting for setting in LEVERS if setting.lever == "validation")
    argv = [
        *arguments(output),
        f"batch_size={ROWS // batches}",
        f"max_steps={STEPS}",
        "checkpoint.save_model=false",
        "log.every_steps=1000",
        *overrides,
        *(validation.overrides if observed else ()),
    ]
    run = run_here([*argv, "overwrite=true"])
    found = {"code": run.code, "said": run.said, "runs": [] if run.code else [metrics(output)]}
    if run.code == 0 and any(setting.lever == "saving" for setting in settings):
        torch.distributed.barrier()
        if run.recipe.world.is_main:
            shutil.rmtree(output / "state" / f"step_{STEPS}")
        torch.distributed.barrier()
        run = run_here([*argv, "resume=latest"])
        assert run.code == 0, run.said
        assert any("1 of 2 steps done" in line for line in run.said) or not run.recipe.world.is_main
        found["runs"].append(metrics(output))
    torch.distributed.barrier()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """What every case gives, and under `("basis", settings)` what it is compared with."""
    folder = tmp_path_factory.mktemp("levers")
    untied = json.loads((ROOT / "tests/recipes/tiny.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "untied.json").write_text(json.dumps(untied))

    def cases(ranks: int) -> list[Settings]:
        return [settings for settings in CASES if max([2, *(setting.ranks for setting in settings)]) == ranks]

    def train_all(ranks: int) -> list[dict[str, Any]]:
        # Which operators run compiled or not is the same for every backend; inductor has a test of its own.
        module = recipe_module()
        module.compile_layers = functools.partial(module.compile_layers, backend="eager")
        if ranks == 1:
            return [train(folder, settings, ranks, observed=True) for settings in BASES]
        return [train(folder, settings, ranks) for settings in cases(ranks)]

    import_compiler()
    found = dict(zip([("basis", base) for base in BASES], run_ranks(train_all, 1, 1)[0], strict=True))
    for ranks in (2, 4):
        found |= dict(zip(cases(ranks), run_ranks(train_all, ranks, ranks, timeout=400)[0], strict=True))
    return found


@pytest.mark.parametrize("settings", CASES, ids=title)
def test_losses_are_those_of_the_plain_run_or_it_is_refused(results: dict[Any, dict[str, Any]], settings: Settings):
    found, expected = results[settings], results["basis", basis(settings)]
    assert expected["code"] == 0, expected["said"]
    words = refusal(settings)
    if words:
        assert found["code"] == 2
        assert words in found["said"][-1]
        return
    assert found["code"] == 0, (settings, found["said"][-1:])
    tolerance = max([FINE, *(setting.tolerance for setting in settings)])
    wanted = expected["runs"][0]
    for lines in found["runs"]:
        for name in ("loss", "validation_loss"):
            mine = [line[name] for line in lines if name in line]
            assert name != "loss" or len(mine) == STEPS
            assert not mine or furthest(mine, [line[name] for line in wanted if name in line]) <= tolerance
        norms = [line["grad_norm"] for line in lines if "loss" in line]
        assert furthest(norms, [line["grad_norm"] for line in wanted if "loss" in line]) <= 10 * tolerance


@pytest.mark.skipif(torch.cuda.is_available(), reason="device=auto is a GPU here")
def test_offload_where_the_device_is_found_to_be_a_cpu(results: dict[Any, dict[str, Any]], tmp_path: Path):
    settings = (Setting("offload", ("memory.cpu_offload=true", "device=auto")),)  # nothing to gain, and no harm
    found = run_ranks(train, 2, tmp_path, settings, 2)[0]
    assert found["code"] == 0, found["said"]
    wanted = results[PLAIN]["runs"][0]
    assert furthest([line["loss"] for line in found["runs"][0]], [line["loss"] for line in wanted]) <= 1e-6


def test_settings_that_change_results_do(results: dict[Any, dict[str, Any]]):
    plain = results["basis", PLAIN]["runs"][0]
    for setting in LEVERS:
        if setting.changes_results and setting.overrides != ("clip_grad_norm=null",):
            assert [line.get("loss") for line in results["basis", (setting,)]["runs"][0]] != [
                line.get("loss") for line in plain
            ], setting
    lower = results[SUMMED_IN_BF16]["runs"][0]
    assert [line["loss"] for line in lower] != [line["loss"] for line in results[PLAIN]["runs"][0]]


def test_every_key_is_a_lever_or_said_not_to_be():
    keys = read_schema(FullFinetuneConfig).keys
    levers = {key.removeprefix("~") for setting in LEVERS for key in setting.keys}
    others = {name for name in keys if name in NOT_LEVERS or f"{name.partition('.')[0]}.*" in NOT_LEVERS}
    missing = sorted(set(keys) - levers - others)
    assert not missing, f"add {missing} to LEVERS, so that it is tried with every other lever, or to NOT_LEVERS"
    stale = {name for name in NOT_LEVERS if not any(key == name or key.startswith(name[:-1]) for key in keys)}
    assert levers <= set(keys) and not stale


def test_every_two_values_meet_or_are_refused_together():
    """Where a third lever does not hide what they do by its wider tolerance, and but for compiling among few others."""
    for a, b in combinations(LEVERS, 2):
        if a.lever != b.lever and (a, b) not in REFUSED:
            meeting = [row for row in TOGETHER if a in row and b in row]
            meeting = [row for row in meeting if max(s.tolerance for s in row) == max(a.tolerance, b.tolerance)]
            assert any(len(row) <= MOST or COMPILE in (a, b) for row in meeting), (a, b)
    for row in TOGETHER:
        assert len({setting.lever for setting in row}) == len(row)
        assert not refusal(row)


def test_every_value_of_a_lever_is_tried():
    tried = {override for setting in LEVERS for override in setting.overrides}
    levers = {key for setting in LEVERS for key in setting.keys}
    for name, key in read_schema(FullFinetuneConfig).keys.items():
        if name not in levers:
            continue
        values: Iterator[str] = iter(key.limits.get("choices", ()))
        if "kind" in key.limits and name != "validation.format":
            values = iter(BUILT_IN[key.limits["kind"]][1])
        # fp64 is tried in test_equality; it is refused with a lower reduction.
        untried = [
            value for value in values if value != key.default and f"{name}={value}" not in tried and value != "fp64"
        ]
        tested_default = ["fp32"] if name == "dtype" else []  # the demo's, which every run here has
        assert not set(untried) - set(tested_default), f"add {name}={untried} to LEVERS"


def test_compiled_layers_give_the_same_losses(tmp_path: Path):
    (tmp_path / "text.txt").write_text("What is 3 plus 4? It is 7. " * 400)
    # Rows of one length, so that one compilation serves all.
    rows = ("data.format=text", f"data.source={tmp_path}/text.txt", "max_seq_len=32")
    plain = run_ranks(train, 2, tmp_path, (Setting("rows", rows),), 2)[0]
    found = run_ranks(train, 2, tmp_path, (Setting("compile", (*rows, "compile=true")),), 2, timeout=300)[0]
    assert found["code"] == plain["code"] == 0, found["said"]
    lines, wanted = found["runs"][0], plain["runs"][0]
    assert furthest([line["loss"] for line in lines], [line["loss"] for line in wanted]) <= 1e-6
    assert furthest([line["grad_norm"] for line in lines], [line["grad_norm"] for line in wanted]) <= 1e-5
