"""Whole runs whose layers are divided among ranks: the losses of one process, folders that others
open, states that pipelines of any size, and none, go on from.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from recipe_lib.cli.main import main as tune
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    DPO,
    FULL,
    LORA,
    ROOT,
    build_story_arguments,
    expect_done,
    find_largest_difference,
    gather_whole,
    make_probe_tokens,
    read_metrics,
    read_steps,
    run_here,
)
from tests.recipes.test_dpo import arguments as preference_arguments
from tests.recipes.test_dpo import write_pairs
from tests.selection import mark_slow_except, select_cases

# of a step, over all data ranks
MICRO_BATCHES = 4
ROWS = 8
# steps of a run, and the step of the state that others go on from
STEPS = 4
SAVED = 2
PIPELINE = "parallel.pipeline=2"
QUICK = {"full 2"}  # of tests' names and kinds; the runs of others are slow
ZBV, ZERO_BUBBLE = (
    "parallel.pipeline_schedule=zbv",
    "parallel.pipeline_schedule=interleaved_zero_bubble",
)


class Runs:
    """The runs of this file: each kind by one process and by a pipeline of two; four ranks go on.
    slow: all.
    """

    def __init__(self, realdata: Path, folder: Path, slow: bool = False) -> None:
        self.realdata, self.folder, self.slow = realdata, folder, slow
        preset = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text()) | {
            "num_hidden_layers": 4
        }
        (folder / "deep.json").write_text(json.dumps(preset))
        wide = preset | {
            "hidden_size": 128,
            "intermediate_size": 256,
        }  # matrices of whole blocks of 64
        (folder / "wide.json").write_text(json.dumps(wide))
        text = (realdata / "datasets" / "text" / "tinyshakespeare.txt").read_text()
        for name, part in {"text": text[:15_000], "validation": text[-1_000:]}.items():
            (folder / f"{name}.txt").write_text(part)
        self.pairs = write_pairs(folder)

    def text(self, data_ranks: int) -> list[str]:
        return [
            f"data.source={self.folder / 'text.txt'}",
            "data.format=text",
            f"batch_size={ROWS // MICRO_BATCHES // data_ranks}",
            f"gradient_accumulation_steps={MICRO_BATCHES}",
            f"max_steps={STEPS}",
            "max_seq_len=64",
            "lr_scheduler.type=constant",
        ]

    def full(self, name: str, data_ranks: int, *overrides: str) -> Any:
        argv = build_story_arguments(
            self.realdata,
            self.folder / name,
            *self.text(data_ranks),
            f"validation.source={self.folder / 'validation.txt'}",
            f"validation.every_n_steps={SAVED}",
            f"checkpoint.save_every_n_steps={SAVED}",
            *overrides,
        )
        return expect_done(run_here(argv, recipe=FULL))

    def packed(self, name: str, *overrides: str) -> Any:
        rows = (f"data.source={ROOT / 'examples' / 'demo' / 'heldout.jsonl'}", "data.format=alpaca")
        packing = ("data.packing=true", "checkpoint.save_model=false")
        argv = build_story_arguments(
            self.realdata, self.folder / name, *self.text(1), *rows, *packing, *overrides
        )
        return expect_done(run_here(argv, recipe=FULL))

    def adapters(self, name: str, *overrides: str) -> Any:
        argv = build_story_arguments(
            self.realdata, self.folder / name, *self.text(1), "optimizer.lr=1e-2", *overrides
        )
        argv[1] = str(Path(__file__).parent / "adapters.yaml")
        return expect_done(run_here(argv, recipe=LORA))

    def quantized(self, name: str, *overrides: str) -> Any:
        model = (
            "~model.path",
            f"model.preset={self.folder / 'wide.json'}",
            "lora.quantize_base=nf4",
        )
        return self.adapters(
            name, *model, f"tokenizer.path={self.realdata / 'stories260K-hf'}", *overrides
        )

    def preference(self, name: str, *overrides: str) -> Any:
        argv = preference_arguments(self.pairs, self.folder / name, "batch_size=4", *overrides)
        argv += [f"model.preset={self.folder / 'deep.json'}", "max_steps=2"]
        return expect_done(run_here(argv, recipe=DPO))

    def state(self, name: str) -> str:
        return f"resume={self.folder / name / 'state' / f'step_{SAVED}'}"


def alone(runs: Runs) -> torch.Tensor:
    if runs.slow:
        runs.preference("preference 1")
        runs.packed("packed 1")
        runs.quantized("nf4 1")
        runs.preference("preference full 1", "dpo.trainable=all")
    model = runs.full("full 1", 1).recipe.model
    with torch.no_grad():
        return gather_whole(model(make_probe_tokens()))


def pipeline_of_two(runs: Runs) -> None:
    runs.full("full 2", 1, PIPELINE, ZBV)
    if runs.slow:
        runs.preference("preference 2", PIPELINE, ZBV, "parallel.pipeline_microbatches=4")
        runs.packed("packed 2", PIPELINE, ZERO_BUBBLE, "parallel.pipeline_microbatches=2")
        runs.quantized("nf4 2", PIPELINE, ZBV)
        runs.preference(
            "preference full 2", PIPELINE, "dpo.trainable=all", "parallel.pipeline_microbatches=2"
        )


def four_ranks(runs: Runs) -> None:
    runs.full("2 to 4", 2, PIPELINE, runs.state("full 2"))


def alone_again(runs: Runs) -> None:
    runs.full("2 to 1", 1, runs.state("full 2"))


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, realdata: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """The folder of all runs, and logits of the model that one process has trained."""
    slow = not QUICK.issuperset([*select_cases(request, "name"), *select_cases(request, "kind")])
    runs = Runs(realdata, tmp_path_factory.mktemp("pipeline"), slow)
    logits = run_ranks(alone, 1, runs)[0]
    run_ranks(pipeline_of_two, 2, runs)
    for ranks, part in [(1, alone_again), (4, four_ranks)] if slow else []:
        run_ranks(part, ranks, runs)
    return runs.folder, logits


@pytest.mark.parametrize("name", mark_slow_except(["full 2", "2 to 4", "2 to 1"], ["full 2"]))
def test_a_pipeline_records_what_one_process_does(found: tuple[Path, Any], name: str) -> None:
    folder, _ = found
    alone = read_steps(folder / "full 1")
    assert len(alone) == STEPS and alone[-1][1] < alone[0][1] - 0.3
    divided = read_steps(folder / name)
    wanted = alone if name.startswith("full") else alone[SAVED:]
    assert [step for step, _, _ in divided] == [step for step, _, _ in wanted]
    assert (
        find_largest_difference([loss for _, loss, _ in divided], [loss for _, loss, _ in wanted])
        <= 1e-5
    )
    assert (
        find_largest_difference([norm for _, _, norm in divided], [norm for _, _, norm in wanted])
        <= 1e-4
    )
    found_later = validated(folder / name)
    assert (
        find_largest_difference(found_later, validated(folder / "full 1")[-len(found_later) :])
        <= 1e-5
    )


def test_a_pipeline_counts_what_one_process_does(found: tuple[Path, Any]) -> None:
    folder, _ = found
    for line, other in zip(
        read_metrics(folder / "full 2"), read_metrics(folder / "full 1"), strict=True
    ):
        assert all(
            line.get(key) == other.get(key) for key in ("lr", "epoch", "label_tokens", "tokens")
        )


def validated(output: Path) -> list[float]:
    return [line["validation_loss"] for line in read_metrics(output) if "validation_loss" in line]


@pytest.mark.parametrize("name", mark_slow_except(["full 2", "2 to 4", "2 to 1"], ["full 2"]))
def test_transformers_opens_what_a_pipeline_exports(found: tuple[Path, Any], name: str) -> None:
    folder, logits = found
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / name / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        torch.testing.assert_close(model(make_probe_tokens()).logits, logits, rtol=1e-3, atol=1e-3)
    names = [set(load_file(folder / of / "model" / "model.safetensors")) for of in (name, "full 1")]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4"])
def test_a_pipeline_trains_the_adapters_of_one_process(found: tuple[Path, Any], kind: str) -> None:
    folder, _ = found
    alone, divided = read_steps(folder / f"{kind} 1"), read_steps(folder / f"{kind} 2")
    assert (
        find_largest_difference([loss for _, loss, _ in divided], [loss for _, loss, _ in alone])
        <= 1e-5
    )
    assert (
        find_largest_difference([norm for _, _, norm in divided], [norm for _, _, norm in alone])
        <= 1e-4
    )
    wanted, found_there = (
        load_file(folder / f"{kind} {n}" / "adapter" / "adapter_model.safetensors") for n in (1, 2)
    )
    assert wanted.keys() == found_there.keys()
    for tensor in wanted:
        difference = torch.linalg.vector_norm(found_there[tensor] - wanted[tensor])
        assert difference <= 1e-3 * torch.linalg.vector_norm(wanted[tensor]), tensor


@pytest.mark.slow
def test_packed_rows_go_through_a_pipeline(found: tuple[Path, Any]) -> None:
    folder, _ = found
    alone, divided = read_steps(folder / "packed 1"), read_steps(folder / "packed 2")
    assert (
        find_largest_difference([loss for _, loss, _ in divided], [loss for _, loss, _ in alone])
        <= 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["preference", "preference full"])
def test_a_pipeline_prefers_what_one_process_does(found: tuple[Path, Any], kind: str) -> None:
    """With the reference in the pipeline too: the model without its adapters, or a copy."""
    folder, _ = found
    alone, divided = (read_metrics(folder / f"{kind} {ranks}") for ranks in (1, 2))
    assert len(alone) == len(divided) > 0
    for line, wanted in zip(divided, alone, strict=True):
        for key in (
            "loss",
            "grad_norm",
            "reward_chosen",
            "reward_rejected",
            "reward_margin",
            "reward_accuracy",
        ):
            assert line[key] == pytest.approx(wanted[key], rel=1e-8, abs=1e-12), key


def test_what_stages_cannot_share_is_refused_before_anything_is_read(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs = Runs(realdata, tmp_path)
    cases = {
        ("parallel.pipeline=6", "gradient_accumulation_steps=6"): (
            "parallel.pipeline: found 6 stages for 5 layers, expected a layer for each stage at"
            " least; set "
        ),
        ("parallel.pipeline=2", "parallel.pipeline_layers_per_stage=[2, 2]"): (
            "parallel.pipeline_layers_per_stage: found 2 stages with 4 layers, expected 2 stages of"
            " one layer or more (parallel.pipeline_schedule=1f1b on 2 ranks) with the model's 5"
            " layers in all"
        ),
        ("parallel.pipeline=2", "gradient_accumulation_steps=1"): (
            "parallel.pipeline_microbatches: found 1 micro-batches a step, expected 2 or more for"
            " parallel.pipeline=2"
        ),
        ("parallel.pipeline=2", "parallel.pipeline_microbatches=3"): (
            "found 3 micro-batches for the 8 sequences of a step (batch_size 2 x"
            " gradient_accumulation_steps 4), expected a divisor of them; choose one of 2, 4, 8"
        ),
    }
    for overrides, message in cases.items():
        argv = build_story_arguments(realdata, tmp_path / "refused", *runs.text(1), *overrides)
        assert tune(["validate", *argv[1:]]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line, line
        if "per_stage" in str(overrides) or "pipeline=6" in str(
            overrides
        ):  # what only the model's shape tells
            read: list[Any] = []
            assert run_here(argv, before_model=read.append, recipe=FULL).code == 2
            assert read == []
    assert tune(["validate", *argv[1:-1], "parallel.pipeline_layers_per_stage=[2, 3]"]) == 0
