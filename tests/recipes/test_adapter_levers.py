"""Adapters with every lever that acts on the model: 2 and 4 ranks give the losses of one, or the pair is refused.

The levers themselves are those of test_levers; here each meets each kind of adapter and each storage of the base.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe_lib.config.keys import read_schema
from recipe_lib.config.schema import LoraFinetuneConfig
from recipe_lib.errors import STORAGE
from recipe_lib.memory import levers
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes.runs import LORA, ROOT, furthest, metrics, run_here

STEPS = 3
ROWS = 8  # rows of a step, over all ranks


@dataclass(frozen=True)
class Kind:
    """An adapter. overrides: what makes it. alone: tried on two ranks without another lever, to tell what fails."""

    name: str
    overrides: tuple[str, ...]
    tolerance: float = 1e-5
    alone: bool = False

    def __str__(self) -> str:
        return self.name


# Those that are not alone hold every property between them, so that each meets every lever.
KINDS = [
    Kind("lora", ()),
    Kind("dora on nf4", ("lora.dora=true", "lora.quantize=nf4")),
    Kind(
        "embedding and head on int8",
        ("lora.targets=[q, v, down, embedding, head]", "lora.quantize=int8", "lora.rslora=true"),
    ),
    Kind("fp32 beside bf16", ("dtype=bf16", "lora.dtype=fp32", "lora.quantize=nf4"), tolerance=1e-2),
    Kind("dora", ("lora.dora=true",), alone=True),
    Kind("nf4", ("lora.quantize=nf4",), alone=True),
    Kind("int8", ("lora.quantize=int8",), alone=True),
    Kind("embedding and head", ("lora.targets=[q, embedding, head]",), alone=True),
]

# Levers that change how the same numbers are computed; (overrides, ranks).
LEVERS: list[tuple[tuple[str, ...], int]] = [
    ((), 2),
    (("parallel.wrapping=memory_efficient",), 2),
    (("parallel.wrapping=[model.layers.*]", "parallel.reshard_after_forward=false"), 2),
    (("parallel.data_replicate=2",), 4),
    (("memory.activation_checkpointing=full", "memory.loss_chunks=5"), 2),
    (("memory.activation_checkpointing=selective", "gradient_accumulation_steps=2"), 2),
    (("compile=true",), 2),
    (("data.packing=true",), 2),
    (("checkpoint.save_every_steps=1", "checkpoint.keep=3"), 2),
]
CASES = [(kind, *lever) for kind in KINDS for lever in (LEVERS[:1] if kind.alone else LEVERS)]
NOT_LEVERS = {
    "lora.rank": "a number",
    "lora.alpha": "a number",
    "lora.dropout": "draws differ from rank to rank; tests/adapters",
    "lora.adapter": "where adapters come from; tests/adapters",
    "lora.modules": "names of a foreign model's linears; test_foreign_runs",
    "lora.merge": "written after the last step; test_adapter_runs",
}


def arguments(output: Path) -> list[str]:
    """Command line of a run of seconds on a model of two layers of width 32 and 64."""
    return [
        "--config",
        str(Path(__file__).parent / "adapters.yaml"),
        f"model.preset={ROOT / 'tests' / 'recipes' / 'tiny.json'}",
        "tokenizer.path=examples/demo/tokenizer",
        "data.source=examples/demo/train.jsonl",
        "data.max_rows=64",
        "max_seq_len=64",
        "dtype=fp32",
        "device=cpu",
        "epochs=3",
        "optimizer.lr=1e-2",
        "lr_schedule.kind=constant",
        "checkpoint.save_model=false",
        "log.every_steps=1000",
        f"max_steps={STEPS}",
        f"output_dir={output}",
    ]


def train(folder: Path, kind: Kind, overrides: tuple[str, ...], ranks: int) -> list[dict[str, Any]]:
    """Lines of a run; with saved states those of a second run that goes on after the first step."""
    torch._dynamo.reset()
    output = folder / f"{kind}{ranks}"
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    argv = [*arguments(output), f"batch_size={ROWS // ranks // accumulation}", *kind.overrides, *overrides]
    run = run_here([*argv, "overwrite=true"], recipe=LORA)
    torch.distributed.barrier()  # the first rank still writes its records
    assert run.code == 0, run.said
    if any("save_every_steps" in override for override in overrides):
        run = run_here([*argv, f"resume={output / 'state' / 'step_1'}"], recipe=LORA)
        assert run.code == 0, run.said
    torch.distributed.barrier()
    return metrics(output)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """Every kind with every lever, and with one rank under `(kind, packed)`."""
    folder = tmp_path_factory.mktemp("adapters")

    def train_all(ranks: int) -> list[list[dict[str, Any]]]:
        levers.compile_layers = functools.partial(levers.compile_layers, backend="eager")
        if ranks == 1:
            return [train(folder, kind, ("data.packing=true",) * packed, 1) for kind, packed in bases]
        return [train(folder, kind, lever, ranks) for kind, lever, size in CASES if size == ranks]

    bases = [(kind, packed) for kind in KINDS for packed in (False, True) if not (packed and kind.alone)]
    keys: list[Any] = list(bases)
    import_compiler()
    found = dict(zip(keys, run_ranks(train_all, 1, 1)[0], strict=True))
    for ranks in (2, 4):
        keys = [case for case in CASES if case[2] == ranks]
        found |= dict(zip(keys, run_ranks(train_all, ranks, ranks, timeout=300)[0], strict=True))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {' '.join(case[1])}".strip())
def test_losses_are_those_of_one_rank(results: dict[Any, Any], case: tuple[Kind, tuple[str, ...], int]):
    kind, overrides, _ = case
    found, expected = results[case], results[kind, "data.packing=true" in overrides]
    assert len(found) == len(expected) == STEPS
    for name, slack in (("loss", 1), ("grad_norm", 10)):
        mine, wanted = ([line[name] for line in lines] for lines in (found, expected))
        assert furthest(mine, wanted) <= slack * kind.tolerance


def test_kinds_differ(results: dict[Any, Any]):
    last = {kind.name: results[kind, False][-1]["loss"] for kind in KINDS}
    assert len({round(loss, 6) for loss in last.values()}) == len(KINDS), last


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_falls(results: dict[Any, Any], kind: Kind):
    """Adapters that are applied in the forward but get no gradient would train nothing."""
    lines = results[kind, False]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_every_key_is_tried_or_said_not_to_be():
    keys = {name for name in read_schema(LoraFinetuneConfig).keys if name.startswith("lora.")}
    tried = {override.partition("=")[0] for kind in KINDS for override in kind.overrides}
    assert keys <= tried | set(NOT_LEVERS)
    assert set(NOT_LEVERS) <= keys


def test_room_for_the_merged_model_is_looked_for_before_training(
    realdata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "Say red.", "output": "red"}\n' * 4)
    argv = ["--config", str(ROOT / "tests/recipes/adapters.yaml"), f"model.path={realdata / 'stories260K-hf'}"]
    argv += [f"data.source={rows}", "data.cache=false", "device=cpu", f"output_dir={tmp_path / 'out'}"]

    def fill_the_disk(recipe: Any) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))

    run = run_here([*argv, "lora.merge=true"], before_training=fill_the_disk, recipe=LORA)
    assert run.code == STORAGE
    assert run.said[-1].startswith(f"error: {tmp_path}: the model at the end of the run needs ")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("metrics*"))
