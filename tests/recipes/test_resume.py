"""Stopped and gone on: bitwise the uninterrupted run on as many ranks, the same state and losses on
another number of them; and what is refused, with its line.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.checkpoint.run_files import read_manifest
from recipe_lib.config import load_config
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    build_arguments,
    find_largest_difference,
    list_parameters,
    list_states,
    read_losses,
    read_metrics,
    read_steps,
    read_tree,
    run_here,
)
from tests.selection import mark_slow_except, select_cases

ROWS_PER_STEP = 12  # 4 rows at a time on one rank, 3 micro-batches; 24 rows: 2 steps an epoch
EPOCHS = 3
STEPS = 6
STOP = 3  # in the middle of the second epoch
WORLDS = (1, 2)
MOVES = [(2, 1), (2, 4)]


def command(output: Path, ranks: int, *overrides: str) -> list[str]:
    """A run of 6 steps, each of 3 micro-batches a rank."""
    return [
        *build_arguments(output),
        f"batch_size={ROWS_PER_STEP // 3 // ranks}",
        "gradient_accumulation_steps=3",
        f"epochs={EPOCHS}",
        "optimizer.weight_decay=0.1",
        "lr_scheduler.warmup_steps=2",
        "checkpoint.keep_last_n=100",
        "log.every_n_steps=1000",
        *overrides,
    ]


def stop_after(step: int, rank: int = 0, number: int = signal.SIGTERM) -> Callable[[Any], None]:
    """Makes a rank send itself the signal in the middle of that step."""

    def arrange(recipe: Any) -> None:
        honest, begun = recipe.train_step, [recipe.step]

        def train_step(batches: Any) -> Any:
            begun[0] += 1
            if begun[0] == step and recipe.world.rank == rank:
                os.kill(os.getpid(), number)
            return honest(batches)

        recipe.train_step = train_step

    return arrange


def everything(recipe: Any) -> dict[str, torch.Tensor]:
    """Parameters and optimizer states, whole. A collective."""
    return list_parameters(recipe) | list_states(recipe)


def go_on(argv: list[str]) -> dict[str, Any]:
    """Resumes and trains to the end; the state as it was before the first step after the resume."""
    loaded: list[dict[str, torch.Tensor]] = []
    run = run_here(argv, before_training=lambda recipe: loaded.append(everything(recipe)))
    return {"code": run.code, "said": run.said, "loaded": loaded[0] if loaded else {}}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """For each number of ranks: a quiet run, a stopped one, and that one gone on; and those gone on
    elsewhere.
    """
    folder = tmp_path_factory.mktemp("resume")
    moves = select_cases(request, "move")
    worlds = sorted({1, *select_cases(request, "ranks"), *(before for before, _ in moves)})

    def first(ranks: int) -> dict[str, Any]:
        quiet = run_here(command(folder / f"quiet{ranks}", ranks))
        assert quiet.code == 0, quiet.said
        # The last rank alone hears of it: all must agree to stop.
        halted = run_here(
            command(folder / f"stopped{ranks}", ranks), stop_after(STOP, rank=ranks - 1)
        )
        kept = everything(halted.recipe)
        if halted.recipe.world.is_main:
            for name in ["same", *(f"to{after}" for before, after in moves if before == ranks)]:
                shutil.copytree(folder / f"stopped{ranks}", folder / f"{ranks}{name}")
        if ranks > 1:
            torch.distributed.barrier()
        same = go_on(command(folder / f"{ranks}same", ranks, "resume=latest"))
        return {"halted": halted.code, "said": halted.said, "kept": kept, "same": same}

    def elsewhere(ranks: int) -> dict[str, Any]:
        return {
            f"{before}to{ranks}": go_on(
                command(folder / f"{before}to{ranks}", ranks, "resume=latest")
            )
            for before, after in moves
            if after == ranks
        }

    found: dict[str, Any] = {"folder": folder}
    for ranks in worlds:
        found[str(ranks)] = run_ranks(first, ranks, ranks)[0]
    for ranks in sorted({after for _, after in moves}):
        found |= run_ranks(elsewhere, ranks, ranks)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORLDS)
def test_a_signal_saves_at_the_step_boundary(runs: dict[str, Any], ranks: int):
    output = runs["folder"] / f"stopped{ranks}"
    assert runs[str(ranks)]["halted"] == 3
    state = output / "state" / f"step_{STOP}"
    assert (
        runs[str(ranks)]["said"][-1]
        == f"stopped after step {STOP}; resume it with resume=latest ({state})"
    )
    assert [path.name for path in (output / "state").iterdir()] == [state.name]
    manifest = read_manifest(state)
    assert (manifest.step, manifest.world_size) == (STOP, ranks)
    assert [line["step"] for line in read_metrics(output)] == list(range(1, STOP + 1))
    assert not (output / "model").exists()


@pytest.mark.parametrize("ranks", mark_slow_except(WORLDS, [2]))
def test_the_same_ranks_go_on_bitwise(runs: dict[str, Any], ranks: int):
    folder, record = runs["folder"], runs[str(ranks)]
    assert record["same"]["code"] == 0, record["same"]["said"]
    assert _differing(record["same"]["loaded"], record["kept"]) == []
    assert read_steps(folder / f"{ranks}same") == read_steps(folder / f"quiet{ranks}")
    assert read_tree(folder / f"{ranks}same" / "model") == read_tree(
        folder / f"quiet{ranks}" / "model"
    )
    for line, other in zip(
        read_metrics(folder / f"{ranks}same"), read_metrics(folder / f"quiet{ranks}"), strict=True
    ):
        assert all(
            line[name] == other[name] for name in ("step", "epoch", "lr", "label_tokens", "tokens")
        )


@pytest.mark.parametrize("move", mark_slow_except(MOVES, [(2, 1)]), ids=str)
def test_another_number_of_ranks_goes_on_from_the_same_state(
    runs: dict[str, Any], move: tuple[int, int]
):
    before, after = move
    folder, moved = runs["folder"], runs[f"{before}to{after}"]
    assert moved["code"] == 0, moved["said"]
    kept = runs[str(before)]["kept"]
    assert len(kept) == 20 * 4  # of each parameter: its values, AdamW's two states and step count
    assert _differing(moved["loaded"], kept) == []
    found, expected = (
        read_losses(folder / f"{before}to{after}"),
        read_losses(folder / f"quiet{before}"),
    )
    assert len(found) == STEPS and found[:STOP] == expected[:STOP]
    assert find_largest_difference(found, expected) <= 1e-5


def _differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("ranks", mark_slow_except(WORLDS, [2]))
def test_metrics_have_one_line_a_step_after_a_resume(runs: dict[str, Any], ranks: int):
    for name in [f"{ranks}same", *(name for name in runs if name.endswith(f"to{ranks}"))]:
        assert [line["step"] for line in read_metrics(runs["folder"] / name)] == list(
            range(1, STEPS + 1)
        )


# --- what else may have happened between the two starts; one process, since the decisions are those
# of one rank


@pytest.fixture(scope="module")
def stopped(runs: dict[str, Any]) -> Path:
    """A run stopped on one rank after step 3."""
    return runs["folder"] / "stopped1"


def alone(
    argv: list[str], before_training: Callable[[Any], None] | None = None
) -> tuple[int, list[str]]:
    """Code and lines of a run in a process of its own."""

    def train() -> tuple[int, list[str]]:
        run = run_here(argv, before_training)
        return run.code, run.said

    return run_ranks(train, 1, process_group=False)[0]


REFUSED = {
    "seed": (
        ["seed=7"],
        (
            "was saved with seed=42, found seed=7; the order of the sequences follows from it: set"
            " seed=42"
        ),
    ),
    "global batch": (
        ["gradient_accumulation_steps=2"],
        (
            "was saved with a global batch of 12 sequences, found 8; make batch_size x"
            " gradient_accumulation_steps x ranks 12 again"
        ),
    ),
    "shorter rows": (["max_seq_len=20"], "was saved with other data (fingerprint "),
    "dtype": (["dtype=bf16"], "this run's model has bfloat16"),
    "optimizer": (
        ["optimizer.name=sgd"],
        "was saved by another optimizer (it has betas); resume with the run's own",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_resume_that_would_be_another_run_is_refused(stopped: Path, tmp_path: Path, change: str):
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    before = read_tree(output)
    overrides, words = REFUSED[change]
    code, said = alone(command(output, 1, "resume=latest", *overrides))
    assert code == 2
    assert said[-1].startswith(f"error: {output}/state/step_{STOP}: ") and words in said[-1], said[
        -1
    ]
    assert "\n" not in said[-1]
    assert read_tree(output) == before


def test_a_folder_with_states_is_not_trained_into_unasked(stopped: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    before = read_tree(output)
    assert alone(command(output, 1)) == (
        2,
        [
            f"error: output_dir: {output} holds saved states of an earlier run; resume=latest goes"
            " on from them, overwrite_output_dir=true replaces what is there, or choose another"
            " output_dir"
        ],
    )
    assert read_tree(output) == before


def test_a_run_that_only_left_a_model_is_not_resumed(runs: dict[str, Any], tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(runs["folder"] / "quiet1", output)
    before = read_tree(output)
    code, said = alone(command(output, 1, "resume=latest"))
    assert code == 2
    assert said == [
        f"error: resume=latest: {output} holds a trained model and no saved state to resume from; "
        "overwrite_output_dir=true trains "
        "anew, or choose another output_dir (checkpoint.save_every_n_steps saves states)"
    ]
    assert read_tree(output) == before


def test_resume_latest_of_a_new_folder_starts_at_the_beginning(
    runs: dict[str, Any], tmp_path: Path
):
    code, said = alone(command(tmp_path / "run", 1, "resume=latest"))
    assert code == 0, said
    assert read_steps(tmp_path / "run") == read_steps(runs["folder"] / "quiet1")


@pytest.mark.slow
def test_a_resume_after_the_end_changes_nothing_and_more_epochs_go_on(tmp_path: Path):
    output = tmp_path / "run"
    short = command(
        output, 1, "checkpoint.save_every_n_steps=3", "epochs=2", "lr_scheduler.type=constant"
    )
    assert alone(short)[0] == 0
    assert sorted(path.name for path in (output / "state").iterdir()) == ["step_3", "step_4"]
    before = read_tree(output)
    record = json.loads((output / "written.json").read_text())
    code, said = alone([*short, "resume=latest"])
    assert code == 0, said
    after = read_tree(output)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"summary.json", "report.html", "written.json"}, changed
    for name in ("summary.json", "report.html"):  # whose hashes the last one has
        record["records"].pop(name)
    again = json.loads((output / "written.json").read_text())
    again["records"] = {name: again["records"][name] for name in record["records"]}
    assert again == record
    assert "resume: no step is left to train; the model of that state is exported" in said

    code, said = alone([*short, "max_steps=3", "resume=latest"])
    state = output / "state" / "step_4"
    assert code == 2
    assert (
        said[-1]
        == f"error: {state}: was saved after step 4, found a run of 3 steps (epochs, max_steps);"
        " set max_steps to 4 or more, or resume from an earlier state"
    )
    assert read_tree(output) == after

    assert alone([*short, f"epochs={EPOCHS}", "resume=latest"])[0] == 0
    longer = command(
        tmp_path / "longer", 1, "checkpoint.save_every_n_steps=3", "lr_scheduler.type=constant"
    )
    assert alone(longer)[0] == 0
    assert read_steps(output) == read_steps(tmp_path / "longer")
    assert read_tree(output / "model") == read_tree(tmp_path / "longer" / "model")


CHANGES = {
    "adamw": ["optimizer.betas=[0.5, 0.6]", "optimizer.eps=1e-2", "optimizer.weight_decay=0.5"],
    "sgd": ["optimizer.momentum=0.5", "optimizer.weight_decay=0.5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_changed_numbers_of_the_optimizer_hold_after_a_resume(tmp_path: Path, name: str):
    before = [f"optimizer.name={name}", *(["optimizer.momentum=0.9"] if name == "sgd" else [])]
    config = load_config("demo/full", [*before, *CHANGES[name]]).optimizer

    def change_after_the_stop(recipe: Any) -> None:
        """The same by hand, in a run without a stop."""
        honest, begun = recipe.train_step, []

        def train_step(batches: Any) -> Any:
            begun.append(batches)
            if len(begun) == STOP + 1:
                for group in recipe.optimizer.param_groups:
                    group["weight_decay"] = config.weight_decay
                    if name == "adamw":
                        group.update(betas=tuple(config.betas), eps=config.eps)
                    else:
                        group["momentum"] = config.momentum
            return honest(batches)

        recipe.train_step = train_step

    assert alone(command(tmp_path / "quiet", 1, *before), change_after_the_stop)[0] == 0
    assert alone(command(tmp_path / "run", 1, *before), stop_after(STOP))[0] == 3
    assert alone(command(tmp_path / "run", 1, *before, *CHANGES[name], "resume=latest"))[0] == 0
    assert alone(command(tmp_path / "unchanged", 1, *before))[0] == 0
    assert read_steps(tmp_path / "run") == read_steps(tmp_path / "quiet")
    assert read_steps(tmp_path / "run")[STOP + 1] != read_steps(tmp_path / "unchanged")[STOP + 1]


def _flip_a_bit(state: Path) -> None:
    path = next(state.glob("shard-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_newest_state_is_passed_over(runs: dict[str, Any], tmp_path: Path):
    """test_damage has the other damages."""
    output = tmp_path / "run"
    assert alone(command(output, 1, "checkpoint.save_every_n_steps=1"), stop_after(STOP))[0] == 3
    assert sorted(path.name for path in (output / "state").iterdir()) == [
        "step_1",
        "step_2",
        "step_3",
    ]
    _flip_a_bit(output / "state" / "step_3")
    before = read_tree(output)
    code, said = alone(command(output, 1, f"resume={output}/state/step_3"))
    assert (
        code == 2
        and "expected a whole state folder: resume=latest takes the newest whole one" in said[-1]
    )
    assert read_tree(output) == before
    shutil.copytree(output, tmp_path / "named")
    assert alone(command(tmp_path / "named", 1, f"resume={tmp_path}/named/state/step_1"))[0] == 0

    code, said = alone(command(output, 1, "resume=latest"))
    assert code == 0, said
    assert [line for line in said if line.startswith("warning: ")] == [
        (
            f"warning: {output}/state/step_3:"
            f" {next((output / 'state').glob('step_3/shard-*')).name} has changed since it was"
            " written (SHA-256 differs from the manifest); it is not used"
        ),
        f"warning: resuming from {output}/state/step_2",
    ]
    assert (
        read_steps(output)
        == read_steps(tmp_path / "named")
        == read_steps(runs["folder"] / "quiet1")
    )


@pytest.mark.slow
def test_a_second_stop_and_an_interrupt(runs: dict[str, Any], tmp_path: Path):
    output = tmp_path / "run"
    assert alone(command(output, 1), stop_after(2, number=signal.SIGINT))[0] == 3
    assert alone(command(output, 1, "resume=latest"), stop_after(3))[0] == 3
    assert alone(command(output, 1, "resume=latest"), stop_after(STEPS))[0] == 3  # in the last step
    code, said = alone(command(output, 1, "resume=latest"))
    assert code == 0, said
    assert read_steps(output) == read_steps(runs["folder"] / "quiet1")
    assert (output / "model" / "model.safetensors").is_file()
