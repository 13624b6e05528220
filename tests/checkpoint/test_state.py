"""Resumable state: equal bit for bit after any change of the world, saved whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from recipe_lib import files
from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.checkpoint.safetensors_files import read_header
from recipe_lib.errors import CheckpointError, StorageError
from tests.checkpoint.tiny import (
    OPTIMIZERS,
    build_tiny_model,
    build_tiny_spec,
    build_tiny_world,
    compute_fingerprint,
    gather_full,
    read_tree,
    train,
)
from tests.distributed.ranks import run_ranks
from tests.selection import mark_slow_but


def save_after(
    root: Path, steps: int, optimizer_name: str = "adamw", replicate: int = 1
) -> tuple[str, list[float]]:
    """Trains and saves in this process's world; the state's fingerprint, and the losses of the next
    two steps.
    """
    with build_tiny_world(replicate) as world:
        model = build_tiny_model(world)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        train(model, optimizer, steps)
        optimizer.param_groups[0]["lr"] /= 3  # as a schedule does
        torch.manual_seed(100 + world.rank)
        save_state(root, steps, model, optimizer, {"step": steps, "tokens": 12345}, world, keep=3)
        return compute_fingerprint(model, optimizer), train(model, optimizer, 2, steps)


def load_and_continue(
    root: Path, optimizer_name: str = "adamw", replicate: int = 1
) -> tuple[str, list[float], dict, float]:
    """Loads the latest state into a model of NaNs; its fingerprint, two more losses, the extra, a
    random number.
    """
    with build_tiny_world(replicate) as world:
        model = build_tiny_model(world, seed=None)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        found = find_state(root, "latest", world)
        assert found is not None
        torch.manual_seed(999)
        extra = load_state(found, model, optimizer, world)
        number = float(torch.rand(()))
        return (
            compute_fingerprint(model, optimizer),
            train(model, optimizer, 2, extra["step"]),
            extra,
            number,
        )


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_one_process_goes_on_bitwise(tmp_path: Path, optimizer_name: str) -> None:
    saved, losses = save_after(tmp_path, 3, optimizer_name)
    loaded, resumed_losses, extra, number = load_and_continue(tmp_path, optimizer_name)
    assert loaded == saved
    assert resumed_losses == losses
    assert extra == {"step": 3, "tokens": 12345}
    torch.manual_seed(100)
    assert number == float(torch.rand(()))


def test_a_state_from_before_the_first_step(tmp_path: Path) -> None:
    saved, losses = save_after(tmp_path, 0)
    assert load_and_continue(tmp_path)[:2] == (saved, losses)


PAIRS = {"one and two": [(1, 1), (2, 1)], "one and four": [(1, 1), (4, 2)]}  # ranks, copies (HSDP)


@pytest.mark.parametrize("worlds", mark_slow_but(PAIRS.values(), 1), ids=PAIRS)
def test_every_world_size_reads_every_other(tmp_path: Path, worlds: list[tuple[int, int]]) -> None:
    roots = {world: tmp_path / f"{world[0]}-{world[1]}" for world in worlds}
    saved = {
        world: run_ranks(save_after, world[0], roots[world], 2, "adamw", world[1])
        for world in worlds
    }

    def load_all(replicate: int) -> list[tuple]:
        return [load_and_continue(root, "adamw", replicate) for root in roots.values()]

    for here in worlds:
        for rank, loaded in enumerate(run_ranks(load_all, here[0], here[1])):
            for there, (found, losses, extra, number) in zip(worlds, loaded, strict=True):
                assert found == saved[there][0][0], (there, here)
                assert extra == {"step": 2, "tokens": 12345}
                torch.testing.assert_close(losses, saved[there][0][1], rtol=1e-5, atol=0)
                if there == here:
                    assert losses == saved[there][rank][1]
                    torch.manual_seed(100 + rank)
                    assert number == float(torch.rand(()))


def test_momentum_is_resharded_too(tmp_path: Path) -> None:
    saved = run_ranks(save_after, 2, tmp_path, 2, "momentum")
    assert load_and_continue(tmp_path, "momentum")[0] == saved[0][0] == saved[1][0]


@pytest.mark.slow
def test_a_rank_writes_its_share_and_replicas_write_once(tmp_path: Path) -> None:
    for size, replicate in [(1, 1), (2, 1), (2, 2)]:
        run_ranks(save_after, size, tmp_path / f"{size}-{replicate}", 1, "adamw", replicate)
    parameters = tiny_model_parameters()
    whole = sum(parameter.numel() for parameter in parameters) * 4 * 3 + 4 * len(parameters)
    data = {
        name: [data_bytes(path) for path in sorted((tmp_path / name / "step_1").glob("shard-*"))]
        for name in ("1-1", "2-1", "2-2")
    }
    for name, found in data.items():
        assert sum(found) == whole, name
    assert max(data["2-1"]) < 0.6 * whole


def data_bytes(path: Path) -> int:
    """Bytes of a safetensors file behind its header."""
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


def tiny_model_parameters() -> list[torch.Tensor]:
    with build_tiny_world() as world:
        return list(build_tiny_model(world).parameters())


def test_torchs_own_reader_reads_the_files(tmp_path: Path) -> None:
    run_ranks(save_after, 2, tmp_path, 2)
    with build_tiny_world() as world:
        model = build_tiny_model(world, seed=None)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        load_state(tmp_path / "step_2", model, optimizer, world)
        targets = {
            f"model/{name}": torch.full_like(value, 7) for name, value in model.named_parameters()
        }
        (tmp_path / "step_2" / "rng-00001.safetensors").unlink()
        (tmp_path / "step_2" / "rng-00002.safetensors").unlink()
        dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step_2")))
        for name, value in model.named_parameters():
            assert torch.equal(targets[f"model/{name}"], value), name


def test_no_file_of_a_state_is_anything_but_tensors_and_json(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    names = {path.name for path in (tmp_path / "step_1").iterdir()}
    assert names == {
        "manifest.json",
        "state.json",
        "shard-00001-of-00001.safetensors",
        "rng-00001.safetensors",
    }
    for name in ("manifest.json", "state.json"):
        json.loads((tmp_path / "step_1" / name).read_text())


@pytest.mark.slow
def test_after_a_forward_without_backward_the_shards_are_saved(tmp_path: Path) -> None:
    """FSDP keeps the root's parameters gathered after an evaluation; what is saved are still the
    shards.
    """

    def evaluate_and_save() -> str:
        with build_tiny_world() as world:
            model = build_tiny_model(world)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            train(model, optimizer, 1)
            with torch.no_grad():
                model(torch.zeros(1, 4, dtype=torch.int64))
            save_state(tmp_path, 1, model, optimizer, {"step": 1}, world, keep=1)
            return compute_fingerprint(model, optimizer)

    saved = run_ranks(evaluate_and_save, 2)
    assert {found for found, *_ in run_ranks(load_and_continue, 2, tmp_path)} == set(saved)


@pytest.mark.slow
def test_a_tied_head_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    spec = build_tiny_spec(tie_word_embeddings=True)

    def save() -> str:
        with build_tiny_world() as world:
            model = build_tiny_model(world, spec=spec)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            train(model, optimizer, 2)
            save_state(tmp_path, 2, model, optimizer, {}, world, keep=1)
            return compute_fingerprint(model, optimizer)

    def load() -> str:
        with build_tiny_world() as world:
            model = build_tiny_model(world, seed=None, spec=spec)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            load_state(tmp_path / "step_2", model, optimizer, world)
            assert model.lm_head.weight is model.model.embed_tokens.weight
            return compute_fingerprint(model, optimizer)

    [saved, _] = run_ranks(save, 2)
    assert run_ranks(load, 2) == [saved, saved]
    assert load() == saved
    header = read_header(tmp_path / "step_2" / "shard-00001-of-00002.safetensors")
    assert "model/model.embed_tokens.weight" in header.tensors
    assert "model/lm_head.weight" not in header.tensors


def test_keep_and_order_are_by_saves_not_by_step_or_clock(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        model = build_tiny_model(world)
        optimizer = OPTIMIZERS["sgd"](model.parameters())

        def save(step: int, keep: int = 2) -> Path:
            return save_state(tmp_path, step, model, optimizer, {"step": step}, world, keep)

        for step in (10, 20, 30):
            save(step)
        assert {path.name for path in tmp_path.iterdir()} == {"step_20", "step_30"}
        assert (
            save(25).name == "step_25"
        )  # the run went on from an older state: this is the newest now
        assert find_state(tmp_path, "latest", world) == tmp_path / "step_25"
        assert save(25).name == "step_25-2"  # never written over
        assert {path.name for path in tmp_path.iterdir()} == {"step_25", "step_25-2"}
        assert find_state(tmp_path, "latest", world) == tmp_path / "step_25-2"
        assert find_state(tmp_path, str(tmp_path / "step_25"), world) == tmp_path / "step_25"
        save(40, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step_40"]


def test_pruning_counts_only_states_that_are_whole(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        model = build_tiny_model(world)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for step in (1, 2, 3):
            save_state(tmp_path, step, model, optimizer, {}, world, keep=3)
        (tmp_path / "step_3" / "shard-00001-of-00001.safetensors").unlink()
        save_state(tmp_path, 4, model, optimizer, {}, world, keep=2)
        assert {path.name for path in tmp_path.iterdir()} == {"step_2", "step_3", "step_4"}


def test_nothing_saved_yet(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        assert find_state(tmp_path / "state", "latest", world) is None
        assert not (tmp_path / "state").exists()


def test_leftovers_of_a_killed_save_are_removed_and_never_taken(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    (tmp_path / "step_1").rename(tmp_path / ".step_1.0badcafe.tmp")
    with build_tiny_world() as world:
        assert find_state(tmp_path, "latest", world) is None
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_state(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        with pytest.raises(CheckpointError) as raised:
            find_state(tmp_path, str(tmp_path / "step_7"), world)
    assert (
        str(raised.value)
        == f"resume={tmp_path / 'step_7'}: no such folder; expected a whole state folder:"
        " resume=latest takes the newest whole one"
    )


def test_the_state_of_another_model_dtype_or_optimizer(tmp_path: Path) -> None:
    save_after(tmp_path, 1)
    path = tmp_path / "step_1"
    with build_tiny_world() as world:

        def load(model: torch.nn.Module, optimizer_name: str = "adamw") -> str:
            with pytest.raises(CheckpointError) as raised:
                load_state(path, model, OPTIMIZERS[optimizer_name](model.parameters()), world)
            return str(raised.value)

        other = load(build_tiny_model(world, spec=build_tiny_spec(num_hidden_layers=3)))
        assert (
            other == f"{path}: is the state of another model: only the model has"
            " model.layers.2.input_layernorm.weight; resume with the run's own config"
        )
        wider = load(build_tiny_model(world, spec=build_tiny_spec(vocab_size=32)))
        assert (
            wider
            == f"{path}: lm_head.weight is float32 [31, 6], this run's model has float32 [32, 6]; "
            "resume with the run's own config"
        )
        assert "is float32 [31, 6], this run's model has bfloat16 [31, 6]" in load(
            build_tiny_model(world, dtype=torch.bfloat16)
        )
        assert (
            load(build_tiny_model(world), "sgd")
            == f"{path}: was saved by another optimizer (it has betas); resume with the run's own"
            " optimizer.name"
        )


def test_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_after(tmp_path, 1)
    before = read_tree(tmp_path)
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 10**9, "free": 1000})()
    )
    with pytest.raises(StorageError) as raised:
        save_after(tmp_path, 2)
    assert (
        str(raised.value)
        == f"{tmp_path}: the state of step 2 needs 2.01 MiB, 1000 B are free; free some space, or"
        " choose another place"
    )
    assert read_tree(tmp_path) == before


@pytest.mark.slow
def test_a_folder_that_other_ranks_do_not_see(tmp_path: Path) -> None:
    def save_apart() -> str:
        import os

        root = tmp_path / os.environ["RANK"]  # as if each machine had a disk of its own
        with pytest.raises(StorageError) as raised:
            save_after(root, 1)
        return str(raised.value)

    messages = run_ranks(save_apart, 2)
    assert messages[0].endswith(
        "made by rank 0, not seen here; set output_dir to a disk that all ranks share"
    )
    assert read_tree(tmp_path) == {}


def test_gathering_is_what_the_comparison_rests_on() -> None:
    """The fingerprint sees a single changed bit in one rank's shard."""

    def compare() -> bool:
        with build_tiny_world() as world:
            model = build_tiny_model(world)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            train(model, optimizer, 1)
            before = compute_fingerprint(model, optimizer)
            weight = model.model.layers[1].mlp.up_proj.weight
            if world.rank == 1:
                with torch.no_grad():
                    weight.to_local()[0, 0] += 1e-7
            assert gather_full(weight.detach()).shape == (10, 6)
            return compute_fingerprint(model, optimizer) != before

    assert run_ranks(compare, 2) == [True, True]
