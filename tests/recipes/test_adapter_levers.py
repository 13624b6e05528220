"""Adapters with every lever that acts on the model: 2 and 4 ranks give the losses of one, or the
pair is refused.

The levers themselves are those of test_levers; here each meets each kind of adapter and each
storage of the base.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.schema import LoraFinetuneConfig
from recipe_lib.errors import STORAGE
from recipe_lib.memory import apply_levers
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.runs import (
    DISTILL,
    DPO,
    LORA,
    ROOT,
    find_largest_difference,
    offload_on_a_cpu,
    read_metrics,
    run_here,
)
from tests.recipes.watched import Watch
from tests.selection import mark_slow_except, select_cases

STEPS = 3
ROWS = 8  # rows of a step, over all ranks
LENGTH = 64  # tokens of the longest row


@dataclass(frozen=True)
class Kind:
    """An adapter. overrides: what makes it. tolerance: relative, of losses."""

    name: str
    overrides: tuple[str, ...]
    tolerance: float = 1e-5

    def __str__(self) -> str:
        return self.name

    @property
    def is_quantized(self) -> bool:
        return any(override.startswith("lora.quantize_base=") for override in self.overrides)


# They hold every property between them, so that each meets every lever.
KINDS = [
    Kind("lora", ()),
    Kind("dora on nf4", ("lora.dora=true", "lora.quantize_base=nf4")),
    Kind(
        "embedding and head on int8",
        (
            "lora.target_modules=[q, v, down, embedding, head]",
            "lora.quantize_base=int8",
            "lora.rslora=true",
        ),
    ),
    Kind(
        "fp32 beside bf16",
        ("dtype=bf16", "lora.dtype=fp32", "lora.quantize_base=nf4"),
        tolerance=1e-2,
    ),
]
# With no lever but itself.
SGD = Kind("sgd in bf16", ("dtype=bf16", "optimizer.name=sgd", "optimizer.lr=1"), tolerance=1e-2)


@dataclass(frozen=True)
class Lever:
    """Levers that change how numbers are computed. basis: overrides of the run of one rank that has
    the same numbers. tolerance: relative, of losses, where it is wider than the kind's. plain_base:
    words of the line that it is refused with for a base that is quantized; none: it goes with every
    kind.
    """

    overrides: tuple[str, ...] = ()
    ranks: int = 2
    basis: tuple[str, ...] = ()
    tolerance: float = 0.0
    plain_base: str = ""

    def __str__(self) -> str:
        return " ".join(self.overrides)

    def refuses(self, kind: Kind) -> str:
        """Words of the line that a kind is refused with, if it is."""
        return self.plain_base if kind.is_quantized else ""


ON_ANY_DEVICE = "device=auto"  # said to be a CPU, offloading is refused
NO_CLIPPING = "clip_grad_norm=null"
PACKED = ("data.packing=true",)
EIGHT_BITS = ("optimizer.state_bits=8",)
INT8 = ("matmul_dtype=int8",)
SAVED = ("checkpoint.save_every_n_steps=1", "checkpoint.keep_last_n=3")
# Rows of one length, so that one compilation serves all.
COMPILED = ("compile=true", f"data.pad_to_multiple_of={LENGTH}")
LEVERS = [
    Lever(),
    Lever(("parallel.fsdp_wrap_policy=memory_efficient", *SAVED)),
    Lever(("parallel.fsdp_wrap_policy=[model.layers.*]", "parallel.reshard_after_forward=false")),
    Lever(("parallel.data_replicate=2",), ranks=4),
    Lever(("memory.activation_checkpointing=full", "memory.loss_chunks=5")),
    Lever(("memory.activation_checkpointing=selective", "gradient_accumulation_steps=2")),
    Lever(("memory.activation_offload=true", "memory.mlp_tiles=3", ON_ANY_DEVICE)),
    Lever(("memory.optimizer_in_backward=true", NO_CLIPPING), basis=(NO_CLIPPING,)),
    Lever(("memory.optimizer_offload=true", "parallel.strategy=ddp", ON_ANY_DEVICE)),
    Lever(("memory.stream_layers=true", ON_ANY_DEVICE, *COMPILED)),
    Lever(
        (
            "memory.stream_layers=true",
            "memory.activation_offload=true",
            "parallel.strategy=ddp",
            ON_ANY_DEVICE,
        )
    ),
    Lever(PACKED, basis=PACKED),
    Lever(EIGHT_BITS, basis=EIGHT_BITS, tolerance=1e-4),
    Lever(
        INT8, basis=INT8, tolerance=1e-2, plain_base="rounding them a second time would lose more"
    ),
]
# Each lever with one kind, in turn with each; the last one, which some refuse, with one that does
# not too.
CASES = [(KINDS[number % len(KINDS)], lever) for number, lever in enumerate(LEVERS)]
CASES += [(SGD, LEVERS[0]), (KINDS[0], LEVERS[-1])]
BASES = [(kind, ()) for kind in KINDS] + [
    (kind, lever.basis) for kind, lever in CASES if not lever.refuses(kind)
]
BASES = list(dict.fromkeys(BASES))
QUICK = [CASES[4], CASES[7]]
QUICK_BASES = [(kind, lever.basis) for kind, lever in QUICK] + [(kind, ()) for kind in KINDS]
QUICK_BASES = [base for base in BASES if base in QUICK_BASES]
NOT_LEVERS = {
    "lora.rank": "a number",
    "lora.alpha": "a number",
    "lora.dropout": "draws differ from rank to rank; tests/adapters",
    "lora.adapter_path": "where adapters come from; tests/adapters",
    "lora.target_modules": "names of an external model's linears; test_external_runs",
    "lora.merge_on_save": "written after the last step; test_adapter_runs",
}


def arguments(folder: Path, output: Path) -> list[str]:
    """Command line of a run of seconds on a model of two layers of width 32."""
    return [
        "--config",
        str(Path(__file__).parent / "adapters.yaml"),
        f"model.preset={folder / 'wide.json'}",
        "tokenizer.path=examples/demo/tokenizer",
        "data.source=examples/demo/train.jsonl",
        "data.max_samples=64",
        f"max_seq_len={LENGTH}",
        "dtype=fp32",
        "device=cpu",
        "epochs=3",
        "optimizer.lr=1e-2",
        "lr_scheduler.type=constant",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        f"max_steps={STEPS}",
        f"output_dir={output}",
    ]


def write_wide_model(folder: Path) -> None:
    """A model whose adapters of an MLP are long enough to have states of few bits."""
    model = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    (folder / "wide.json").write_text(json.dumps(model | {"intermediate_size": 512}))


def train(folder: Path, kind: Kind, overrides: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Code, last line and metrics of a run; with saved states those of a second run, which goes on
    after a step.
    """
    torch._dynamo.reset()
    output = folder / f"{kind}{ranks}"
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    argv = [
        *arguments(folder, output),
        f"batch_size={ROWS // ranks // accumulation}",
        *kind.overrides,
        *overrides,
    ]
    watch = Watch() if ranks == 1 else None
    run = run_here([*argv, "overwrite_output_dir=true"], recipe=LORA, before_training=watch)
    beside = watch.report(run.recipe) if watch and run.code == 0 else {}
    torch.distributed.barrier()  # the first rank still writes its records
    if run.code == 0 and any("save_every_n_steps" in override for override in overrides):
        run = run_here([*argv, f"resume={output / 'state' / 'step_1'}"], recipe=LORA)
        torch.distributed.barrier()
    return {
        "code": run.code,
        "said": run.said[-1:],
        "lines": [] if run.code else read_metrics(output),
        "formula": beside,
    }


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, dict[str, Any]]:
    """Every selected case of a kind and a lever, and what one rank gives under `(kind, lever's
    basis)`.
    """
    folder = tmp_path_factory.mktemp("adapters")
    write_wide_model(folder)
    cases = select_cases(request, "case")
    needed = [
        (KINDS[0], changed) for changed in ((), *select_cases(request, "changed"))
    ] + select_cases(request, "basis")
    needed += [(kind, ()) for kind in KINDS]
    needed += [(kind, lever.basis) for kind, lever in cases]
    bases = [base for base in BASES if base in needed]

    def train_all(ranks: int) -> list[dict[str, Any]]:
        apply_levers.compile_layers = functools.partial(
            apply_levers.compile_layers, backend="eager"
        )
        offload_on_a_cpu()
        if ranks == 1:
            return [train(folder, kind, basis, 1) for kind, basis in bases]
        return [
            train(folder, kind, lever.overrides, ranks)
            for kind, lever in cases
            if lever.ranks == ranks
        ]

    if any("compile=true" in lever.overrides for _, lever in cases):
        import_compiler()
    found: dict[Any, dict[str, Any]] = dict(zip(bases, run_ranks(train_all, 1, 1)[0], strict=True))
    for ranks in {lever.ranks for _, lever in cases}:
        keys = [case for case in cases if case[1].ranks == ranks]
        found |= dict(zip(keys, run_ranks(train_all, ranks, ranks, timeout=300)[0], strict=True))
    return found


@pytest.mark.parametrize(
    "case", mark_slow_except(CASES, QUICK), ids=lambda case: f"{case[0]} {case[1]}".strip()
)
def test_losses_are_those_of_one_rank_or_it_is_refused(
    results: dict[Any, Any], case: tuple[Kind, Lever]
):
    kind, lever = case
    found = results[case]
    if lever.refuses(kind):
        assert found["code"] == 2
        assert lever.refuses(kind) in found["said"][0]
        return
    expected = results[kind, lever.basis]
    assert found["code"] == expected["code"] == 0, (found["said"], expected["said"])
    assert len(found["lines"]) == len(expected["lines"]) == STEPS
    for name, slack in (("loss", 1), ("grad_norm", 10)):
        mine, wanted = ([line[name] for line in run["lines"]] for run in (found, expected))
        assert find_largest_difference(mine, wanted) <= slack * max(kind.tolerance, lever.tolerance)


@pytest.mark.parametrize("basis", mark_slow_except(BASES, QUICK_BASES), ids=str)
def test_every_adapter_moves_as_the_formula_says(
    results: dict[Any, Any], basis: tuple[Kind, tuple[str, ...]]
):
    """By a plain loop, with the gradients of the run of one rank, which the others are compared
    with.
    """
    kind, overrides = basis
    found = results[basis]["formula"]
    # In bf16 a small step may round to none: then the formula's weights, rounded alike, have not
    # moved either.
    assert found["still"] == [] and len(found["errors"]) >= 4
    assert not [name for name in found["unmoved"] if "lora_B" in name]
    tolerance = (
        0.1 if "dtype=bf16" in kind.overrides and "lora.dtype=fp32" not in kind.overrides else 1e-3
    )
    bad = {name: error for name, error in found["errors"].items() if not error <= tolerance}
    assert bad == {}, overrides


def test_kinds_differ(results: dict[Any, Any]):
    last = {kind.name: results[kind, ()]["lines"][-1]["loss"] for kind in KINDS}
    assert len({round(loss, 6) for loss in last.values()}) == len(KINDS), last


@pytest.mark.parametrize("changed", [EIGHT_BITS], ids=lambda changed: changed[0])
def test_what_changes_results_does(results: dict[Any, Any], changed: tuple[str, ...]):
    kind = KINDS[0]
    losses = [[line["loss"] for line in results[kind, one]["lines"]] for one in (changed, ())]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_falls(results: dict[Any, Any], kind: Kind):
    """Adapters that are applied in the forward but get no gradient would train nothing."""
    lines = results[kind, ()]["lines"]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_every_key_is_tried_or_said_not_to_be():
    keys = {name for name in read_schema(LoraFinetuneConfig).keys if name.startswith("lora.")}
    tried = {override.partition("=")[0] for kind in KINDS for override in kind.overrides}
    assert keys <= tried | set(NOT_LEVERS)
    assert set(NOT_LEVERS) <= keys


LORA_ROW = {"instruction": "Say red.", "output": "red"}
PAIR = {"prompt": "Say red.", "chosen": "red", "rejected": "blue"}
ANSWER = {"prompt": "Say red.", "completion": "red"}


@pytest.mark.parametrize(
    ("recipe", "row", "overrides"),
    [
        (LORA, LORA_ROW, ()),
        (DPO, PAIR, ("data.format=preference", "data.template=plain")),
        (DISTILL, ANSWER, ("distill.trainable=adapters", "distill.teacher={model}")),
    ],
    ids=[LORA, DPO, DISTILL],
)
def test_room_for_the_merged_model_is_looked_for_before_training(
    realdata: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    row: dict[str, str],
    overrides: tuple[str, ...],
):
    model = realdata / "stories260K-hf"
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(row) + "\n") * 4)
    argv = [
        "--config",
        str(ROOT / "tests/recipes/adapters.yaml"),
        f"recipe={recipe}",
        f"model.path={model}",
        f"data.source={rows}",
        "data.cache=false",
        "batch_size=2",
        "device=cpu",
        f"output_dir={tmp_path / 'out'}",
        "lora.merge_on_save=true",
        *(override.format(model=model) for override in overrides),
    ]

    def fill_the_disk(recipe: Any) -> None:
        monkeypatch.setattr(
            "shutil.disk_usage", lambda path: SimpleNamespace(total=10**9, free=1000)
        )

    run = run_here(argv, before_training=fill_the_disk, recipe=recipe)
    assert run.code == STORAGE, run.said
    assert run.said[-1].startswith(f"error: {tmp_path}: the model at the end of the run needs ")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("metrics*"))
