"""Whole runs whose ranks share matrices: the losses of one process, folders that others open,
states that any number of ranks goes on from.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

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
    keep_latest,
    make_probe_tokens,
    read_losses,
    read_metrics,
    read_steps,
    run_here,
)
from tests.recipes.test_dpo import arguments as preference_arguments
from tests.recipes.test_dpo import write_pairs
from tests.selection import mark_slow_except, select_cases

GLOBAL_BATCH = 8
# steps of a run, and the step of the state that others go on from
STEPS = 4
SAVED = 2
SHARED = "parallel.tensor=2"
QUICK = {"full 2"}  # of tests' names and kinds; the runs of others are slow
FULL_RUNS = ("full 2", "2 to 4", "2 to 1")


class Runs:
    """The runs of this file: each kind by one process and by two in a group; two such groups go on.
    slow: all.
    """

    def __init__(self, realdata: Path, folder: Path, slow: bool = False) -> None:
        self.realdata, self.folder, self.slow = realdata, folder, slow
        preset = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
        wide = preset | {
            "hidden_size": 128,
            "intermediate_size": 256,
        }  # each rank's columns are whole blocks of 64
        (folder / "wide.json").write_text(json.dumps(wide))
        text = (realdata / "datasets" / "text" / "tinyshakespeare.txt").read_text()
        for name, part in {"text": text[:15_000], "validation": text[-1_000:]}.items():
            (folder / f"{name}.txt").write_text(part)
        self.pairs = write_pairs(folder)

    def text(self, data_ranks: int) -> list[str]:
        return [
            f"data.source={self.folder / 'text.txt'}",
            "data.format=text",
            f"batch_size={GLOBAL_BATCH // data_ranks}",
            f"max_steps={STEPS}",
            "max_seq_len=64",
            "lr_scheduler.type=constant",
            f"checkpoint.save_every_n_steps={SAVED}",
            "checkpoint.keep_last_n=2",
        ]

    def full(self, name: str, data_ranks: int, *overrides: str) -> Any:
        validation = (
            f"validation.source={self.folder / 'validation.txt'}",
            f"validation.every_n_steps={SAVED}",
        )
        argv = build_story_arguments(
            self.realdata, self.folder / name, *self.text(data_ranks), *validation, *overrides
        )
        return expect_done(run_here(argv, recipe=FULL))

    def adapters(self, name: str, data_ranks: int, *overrides: str) -> Any:
        argv = build_story_arguments(
            self.realdata,
            self.folder / name,
            *self.text(data_ranks),
            "optimizer.lr=1e-2",
            *overrides,
        )
        argv[1] = str(Path(__file__).parent / "adapters.yaml")
        return expect_done(run_here(argv, recipe=LORA))

    def quantized(self, name: str, data_ranks: int, *overrides: str) -> Any:
        model = (
            "~model.path",
            f"model.preset={self.folder / 'wide.json'}",
            "lora.quantize_base=nf4",
        )
        tokenizer = f"tokenizer.path={self.realdata / 'stories260K-hf'}"
        return self.adapters(name, data_ranks, *model, tokenizer, *overrides)

    def preference(self, name: str, *overrides: str) -> Any:
        argv = preference_arguments(self.pairs, self.folder / name, "batch_size=4", *overrides)
        return expect_done(run_here(argv, recipe=DPO))

    def state(self, name: str) -> str:
        return f"resume={self.folder / name / 'state' / f'step_{SAVED}'}"


def logits_of(run: Any) -> torch.Tensor:
    with torch.no_grad():
        return gather_whole(run.recipe.model(make_probe_tokens()))


def alone(runs: Runs) -> dict[str, torch.Tensor]:
    if runs.slow:
        runs.quantized("nf4 1", 1)
        runs.preference("preference 1")
    return {"full 1": logits_of(runs.full("full 1", 1))}


def group_of_two(runs: Runs) -> dict[str, torch.Tensor]:
    if runs.slow:
        runs.quantized("nf4 2", 1, SHARED)
        runs.preference("preference 2", SHARED)
    return {"full 2": logits_of(runs.full("full 2", 1, SHARED))}


def two_groups(runs: Runs) -> dict[str, torch.Tensor]:
    return {"2 to 4": logits_of(runs.full("2 to 4", 2, SHARED, runs.state("full 2")))}


def alone_again(runs: Runs) -> dict[str, torch.Tensor]:
    runs.full("2 to 1", 1, runs.state("full 2"))
    runs.quantized("nf4 2 to 1", 1, runs.state("nf4 2"))
    return {}


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, realdata: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of all runs, and logits of the trained models where they were trained."""
    slow = not QUICK.issuperset([*select_cases(request, "name"), *select_cases(request, "kind")])
    runs = Runs(realdata, tmp_path_factory.mktemp("tensor"), slow)
    logits: dict[str, torch.Tensor] = {}
    for ranks, part in [
        (1, alone),
        (2, group_of_two),
        *([(1, alone_again), (4, two_groups)] if slow else []),
    ]:
        logits |= run_ranks(part, ranks, runs)[0]
    return runs.folder, logits


@pytest.mark.parametrize("name", mark_slow_except(FULL_RUNS, ["full 2"]))
def test_a_group_records_what_one_process_does(found: tuple[Path, Any], name: str) -> None:
    folder, _ = found
    alone = read_steps(folder / "full 1")
    assert len(alone) == STEPS and alone[-1][1] < alone[0][1] - 0.3
    shared = read_steps(folder / name)
    wanted = alone if name.startswith("full") else alone[SAVED:]
    assert [step for step, _, _ in shared] == [step for step, _, _ in wanted]
    assert (
        find_largest_difference([loss for _, loss, _ in shared], [loss for _, loss, _ in wanted])
        <= 1e-5
    )
    assert (
        find_largest_difference([norm for _, _, norm in shared], [norm for _, _, norm in wanted])
        <= 1e-4
    )
    found_later = validated(folder / name)
    assert (
        find_largest_difference(found_later, validated(folder / "full 1")[-len(found_later) :])
        <= 1e-5
    )


def test_a_group_counts_what_one_process_does(found: tuple[Path, Any]) -> None:
    folder, _ = found
    for line, other in zip(
        read_metrics(folder / "full 2"), read_metrics(folder / "full 1"), strict=True
    ):
        assert all(
            line.get(key) == other.get(key) for key in ("lr", "epoch", "label_tokens", "tokens")
        )


def validated(output: Path) -> list[float]:
    return [line["validation_loss"] for line in read_metrics(output) if "validation_loss" in line]


@pytest.mark.parametrize("name", mark_slow_except(["full 2", "2 to 4"], ["full 2"]))
def test_transformers_opens_what_a_group_exports(found: tuple[Path, Any], name: str) -> None:
    folder, logits = found
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / name / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        theirs = model(make_probe_tokens()).logits
    torch.testing.assert_close(logits[name], theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits["full 1"], theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4"])
def test_a_group_trains_the_adapters_of_one_process(found: tuple[Path, Any], kind: str) -> None:
    folder, _ = found
    alone, shared = read_steps(folder / f"{kind} 1"), read_steps(folder / f"{kind} 2")
    assert (
        find_largest_difference([loss for _, loss, _ in shared], [loss for _, loss, _ in alone])
        <= 1e-5
    )
    assert (
        find_largest_difference([norm for _, _, norm in shared], [norm for _, _, norm in alone])
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
@pytest.mark.parametrize("name", ["nf4 2 to 1"])
def test_quantized_weights_are_the_same_for_any_group(found: tuple[Path, Any], name: str) -> None:
    """A state names its frozen weights by their bits: it would not be taken with others."""
    folder, _ = found
    assert (
        find_largest_difference(read_losses(folder / name), read_losses(folder / "nf4 1")[SAVED:])
        <= 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["preference"])
def test_a_group_prefers_what_one_process_does(found: tuple[Path, Any], kind: str) -> None:
    folder, _ = found
    alone, shared = (read_metrics(folder / f"{kind} {ranks}") for ranks in (1, 2))
    assert len(alone) == len(shared) > 0
    for line, wanted in zip(shared, alone, strict=True):
        for key in (
            "loss",
            "grad_norm",
            "reward_chosen",
            "reward_rejected",
            "reward_margin",
            "reward_accuracy",
        ):
            assert line[key] == pytest.approx(wanted[key], rel=1e-8), key


@pytest.mark.slow
def test_dropout_differs_by_rank_and_replicas_stay_alike(realdata: Path, tmp_path: Path) -> None:
    """Two groups of two. What all ranks have gets one sum of gradients, so that its bits are the
    same after steps.
    """
    runs = Runs(realdata, tmp_path)

    def train() -> tuple[list[str], list[str], int]:
        masks: list[str] = []
        dropout = torch.native_dropout

        def watched(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            dropped, mask = dropout(*args)
            masks.append(digest(mask))
            return dropped, mask

        torch.native_dropout = watched
        run = runs.quantized(
            "dropout", 2, SHARED, "lora.dropout=0.5", "checkpoint.save_model=false", "max_steps=2"
        )
        torch.native_dropout = dropout
        run.recipe.model.state_dict()  # FSDP frees what is gathered
        replicas = [
            digest(parameter.to_local())
            for parameter in run.recipe.trained
            if isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()
        ]
        return masks, replicas, run.recipe.world.data_rank

    results = run_ranks(train, 4)
    for calls in zip(*(masks for masks, _, _ in results), strict=True):
        assert len(set(calls)) == 4
    assert len(results[0][0]) == 7 * 2 * 2  # the linears of two layers, in two steps
    by_group = [
        {tuple(replicas) for _, replicas, group in results if group == number} for number in (0, 1)
    ]
    assert [len(alike) for alike in by_group] == [1, 1] and len(results[0][1]) == 7 * 2


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def test_what_ranks_cannot_share_is_refused_before_anything_is_read(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs = Runs(realdata, tmp_path)
    read: list[Any] = []
    cases = {
        "nf4": (
            ["lora.quantize_base=nf4"],
            "does not cut o_proj and down_proj, whose blocks of numbers stay whole",
        ),
        "heads": (
            ["parallel.tensor=8"],
            "the model has 4 key and value heads, which 8 ranks cannot share evenly",
        ),
    }
    for name, (overrides, message) in cases.items():
        argv = build_story_arguments(realdata, tmp_path / name, *runs.text(1), SHARED, *overrides)
        argv[1] = str(Path(__file__).parent / "adapters.yaml")
        run = run_here(argv, before_model=read.append, recipe=LORA)
        assert run.code == 2 and message in run.said[-1] and "sizes that fit: 1" in run.said[-1], (
            run.said
        )
        assert tune(["validate", *argv[1:]]) == 2
        assert message in capsys.readouterr().err
    assert read == []
    assert tune(["validate", *keep_latest(*argv[1:], "parallel.tensor=4")]) == 0
