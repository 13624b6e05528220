"""Preference runs with every lever that acts on the model: two ranks record what one does, a
resumed run what a whole one does.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe_lib.config.flat_schema import read_schema
from recipe_lib.memory import apply_levers
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from tests.distributed.ranks import import_compiler, run_ranks
from tests.recipes import labeled_runs
from tests.recipes.runs import DPO, ROOT, read_metrics, run_here
from tests.selection import mark_slow_except, select_cases

STEPS = 2
PAIRS = 4  # of a step, over all ranks
RECORDED = (
    "loss",
    "grad_norm",
    "reward_chosen",
    "reward_rejected",
    "reward_margin",
    "reward_accuracy",
)

KINDS = {
    "lora": (),
    "dora ipo on nf4": (
        "dtype=fp32",
        "lora.dora=true",
        "lora.quantize_base=nf4",
        "lora.target_modules=[q, head]",
        "dpo.loss=ipo",
        "dpo.beta=0.4",
    ),
    "full cdpo": ("dpo.trainable=all", "dpo.label_smoothing=0.1"),
    "full simpo": ("dpo.trainable=all", "dpo.loss=simpo", "dpo.beta=2", "dpo.simpo_gamma=1"),
}
LEVERS: list[tuple[str, ...]] = [
    (
        "parallel.fsdp_wrap_policy=memory_efficient",
        "memory.activation_checkpointing=full",
        "memory.loss_chunks=5",
    ),
    ("parallel.data_replicate=2", "gradient_accumulation_steps=2"),
    (
        "data.packing=true",
        "memory.activation_checkpointing=selective",
        "checkpoint.save_every_n_steps=1",
        "checkpoint.keep_last_n=3",
    ),
]

COMPILED = ("lora", ("compile=true", "data.pad_to_multiple_of=128"))  # lengths are compiled apart
CASES = list(zip(("lora", "dora ipo on nf4", "full simpo"), LEVERS, strict=True))
ALONE = [(kind, lever) for kind in KINDS for lever in ((), ("data.packing=true",))]
QUICK = CASES[:1]


def write_pairs(folder: Path, number: int = 24) -> Path:
    """Answers of different lengths, the chosen ones politer."""
    path = folder / "pairs.jsonl"
    rows = [
        {
            "prompt": f"Tell me about cat {at} " * (1 + at % 3),
            "chosen": "Gladly: " + "it sleeps all day. " * (1 + at % 2),
            "rejected": "No. " + "Go away. " * (at % 4),
        }
        for at in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(data: Path, output: Path, *overrides: str) -> list[str]:
    """Command line of a run of seconds on a model of two layers of width 32 and 64."""
    return labeled_runs.build_arguments(
        data, output, DPO, "data.format=preference", f"max_steps={STEPS}", *overrides
    )


def train(folder: Path, kind: str, overrides: tuple[str, ...], ranks: int) -> list[dict[str, Any]]:
    """Lines of a run; with saved states those of a second run that goes on after the first step."""
    torch._dynamo.reset()
    output = folder / f"{kind} {ranks}"
    accumulation = 2 if "gradient_accumulation_steps=2" in overrides else 1
    size = f"batch_size={PAIRS // ranks // accumulation}"
    argv = arguments(folder / "pairs.jsonl", output, size, *KINDS[kind], *overrides)
    starts = [[*argv, "overwrite_output_dir=true"]]
    if any("save_every_n_steps" in override for override in overrides):
        starts.append([*argv, f"resume={output / 'state' / 'step_1'}"])
    for start in starts:
        run = run_here(start, recipe=DPO)
        assert run.code == 0, run.said
        dist.barrier()  # a rank that is there first would find the folder in use
    return read_metrics(output)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, list[dict[str, Any]]]:
    """By (kind, lever, ranks): on one rank those that are asked for, the selected ones with a lever
    on two.
    """
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder)

    def train_all(
        cases: list[tuple[str, tuple[str, ...]]], ranks: int
    ) -> list[list[dict[str, Any]]]:
        apply_levers.compile_layers = functools.partial(
            apply_levers.compile_layers, backend="eager"
        )
        return [train(folder, kind, lever, ranks) for kind, lever in cases]

    together = select_cases(request, "case")
    compiled = select_cases(request, "compiled")
    alone = [*sum(select_cases(request, "alone"), []), *map(basis, together)]
    alone = list(dict.fromkeys([*alone, *compiled, *(("lora", ()) for _ in compiled)]))
    if COMPILED in alone:
        import_compiler()
    found: dict[Any, list[dict[str, Any]]] = {}
    for ranks, cases in ((1, alone), (2, together)):
        recorded = run_ranks(train_all, ranks, cases, ranks, timeout=300)[0]
        found |= {(*case, ranks): lines for case, lines in zip(cases, recorded, strict=True)}
    return found


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]], kind: str) -> None:
    single = "dtype=fp32" in KINDS[kind]
    assert len(found) == len(expected) == STEPS
    for name in RECORDED:
        for mine, wanted in zip(found, expected, strict=True):
            assert mine[name] == pytest.approx(
                wanted[name], rel=1e-4 if single else 1e-8, abs=1e-5 * single
            ), name


def basis(case: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    """The run of one rank that is the same."""
    kind, lever = case
    return kind, ("data.packing=true",) if "data.packing=true" in lever else ()


@pytest.mark.parametrize(
    "case", mark_slow_except(CASES, QUICK), ids=lambda case: f"{case[0]}-{' '.join(case[1])}"
)
def test_two_ranks_record_what_one_records(
    results: dict[Any, Any], case: tuple[str, tuple[str, ...]]
) -> None:
    assert_alike(results[*case, 2], results[*basis(case), 1], case[0])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [COMPILED])
def test_compiled_layers_know_when_adapters_are_off(results: dict[Any, Any], compiled: Any) -> None:
    assert_alike(results[*compiled, 1], results["lora", (), 1], "lora")


@pytest.mark.parametrize("alone", [ALONE], ids=["each"])
def test_a_run_begins_where_model_and_reference_are_alike(
    results: dict[Any, Any], alone: Any
) -> None:
    first = results["lora", (), 1][0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert first["reward_chosen"] == first["reward_rejected"] == first["reward_accuracy"] == 0
    assert results["full cdpo", (), 1][0]["reward_margin"] == 0


@pytest.mark.parametrize("alone", [ALONE], ids=["each"])
def test_kinds_and_packing_differ(
    results: dict[Any, Any], alone: list[tuple[str, tuple[str, ...]]]
) -> None:
    last = {case: results[*case, 1][-1]["loss"] for case in alone}
    assert len(last) == len({round(loss, 9) for loss in last.values()}) == 2 * len(KINDS), last


def test_every_key_is_tried() -> None:
    keys = {name for name in read_schema(DpoFinetuneConfig).keys if name.startswith("dpo.")}
    tried = {
        override.partition("=")[0]
        for kind in KINDS.values()
        for override in kind
        if "dpo." in override
    }
    of_single_answers = {"dpo.desirable_weight", "dpo.undesirable_weight"}  # test_kto
    assert (
        keys == tried | {"dpo.reference_free"} | of_single_answers
    )  # the first: an argument of the losses


@pytest.mark.parametrize("kind", ["lora", "full simpo"])
def test_loss_and_gradient_are_means_over_pairs(kind: str, tmp_path: Path) -> None:
    """A step in which every pair comes twice is the step of the pairs once."""
    once = write_pairs(tmp_path, 4).read_text()
    (tmp_path / "pairs.jsonl").write_text(once + once)
    found = []
    for size in (4, 8):
        argv = arguments(
            tmp_path / "pairs.jsonl", tmp_path / str(size), f"batch_size={size}", *KINDS[kind]
        )
        run = run_here([*argv, "max_steps=1", "data.shuffle=false"], recipe=DPO)
        assert run.code == 0, run.said
        found.append([read_metrics(tmp_path / str(size))[0][name] for name in RECORDED])
    assert found[1] == pytest.approx(found[0], rel=1e-10, abs=1e-12)
    assert found[0][1] > 0


def test_rows_of_one_answer_are_refused_before_there_is_a_model(tmp_path: Path) -> None:
    argv = arguments(
        ROOT / "examples" / "demo" / "train.jsonl", tmp_path / "run", "data.format=alpaca"
    )
    run = run_here(argv, recipe=DPO)
    assert run.code == 2 and not hasattr(run.recipe, "model")
    (line,) = run.said
    assert line.startswith("error: ") and "data.format" in line and "preference" in line
    assert not (tmp_path / "run").exists()
