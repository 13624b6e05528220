"""Weights into and out of pipelines: each rank reads its stages' alone, and a folder is that of one
process.
"""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_lib import files
from recipe_lib.checkpoint import model_export, rank_groups, safetensors_files
from recipe_lib.checkpoint.huggingface import check_room, export_model, load_weights
from recipe_lib.checkpoint.peft_folders import export_adapter, load_adapter
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError, StorageError
from recipe_lib.models import Decoder
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.parallel import World
from tests.checkpoint.staged import (
    CONFIG,
    WORLDS,
    build_changed_spec,
    build_optimizer,
    build_staged,
    build_world,
    hash_trained,
    load_staged,
    take_random_step,
)
from tests.checkpoint.test_weights_in import count_reads
from tests.checkpoint.tiny import read_tree
from tests.distributed.ranks import run_ranks
from tests.selection import mark_slow_except

PHI = CONFIG | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
CONFIGS = {"untied": CONFIG, "tied": CONFIG | {"tie_word_embeddings": True}, "fused": PHI}
SHARD_BYTES = 1500  # some files hold tensors of two stages, some tensors are larger
EVERYWHERE = ["q", "k", "v", "o", "gate", "up", "down", "embedding", "head"]
ADAPTERS = {
    "untied": LoraConfig(rank=2, alpha=4.0, target_modules=EVERYWHERE),
    "tied": LoraConfig(rank=2, alpha=4.0, target_modules=["head"]),  # rank 0 has none
    "fused": LoraConfig(
        rank=2, alpha=4.0, target_modules=["q", "up"], dora=True
    ),  # and lengths of parts without an adapter
}


USED = {
    "untied": ["stages of tensors"],
    "tied": ["stages", "stages of shards"],
    "fused": ["four stages"],
}


def export(model: Decoder, config: dict[str, Any], out: Path, world: World) -> None:
    export_model(
        model,
        model.spec,
        config,
        out,
        tokenizer_folder=None,
        max_shard_bytes=SHARD_BYTES,
        world=world,
    )


def in_and_out(root: Path, case: str, name: str) -> None:
    """In one of WORLDS: an export, and one of what was read from the export of one process; the
    same of adapters.
    """
    config, lora = CONFIGS[case], ADAPTERS[case]
    spec = build_changed_spec(config)
    with build_world(name) as (cfg, world):
        model = build_staged(cfg, world, spec)
        export(model, config, root / name / "model", world)
        again = build_staged(cfg, world, spec, seed=None)
        load_weights(again, spec, root / "one" / "model")
        assert hash_trained(again, None, world) == hash_trained(model, None, world)
        adapted = build_staged(cfg, world, spec, lora)
        take_random_step(adapted, build_optimizer(adapted), 0)
        export_adapter(adapted, spec, lora, root / name / "adapter", base="base", world=world)
        empty = build_staged(cfg, world, spec, lora, seed=None)
        load_adapter(empty, spec, root / "one" / "adapter")
        assert hash_trained(empty, None, world) == hash_trained(adapted, None, world)


@pytest.mark.parametrize("case", mark_slow_except(CONFIGS, ["tied"]))
def test_folders_are_those_of_one_process(case: str, memory_path: Path) -> None:
    in_and_out(memory_path, case, "one")
    expected = read_tree(memory_path / "one")
    assert len([name for name in expected if name.startswith("model/model-")]) > 3
    assert "adapter/adapter_model.safetensors" in expected
    for ranks in (2, 4):
        names = [name for name in USED[case] if WORLDS[name][0] == ranks]
        run_ranks(lambda: [in_and_out(memory_path, case, name) for name in names], ranks)  # noqa: B023
    for name in USED[case]:
        assert read_tree(memory_path / name) == expected, name


def test_no_rank_holds_more_than_a_parameter_or_a_piece(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "CHUNK_BYTES", 128)

    def work() -> tuple[int, int, int]:
        alive: list[weakref.ref] = []
        most, largest, received = 0, 0, 0
        real, receive = model_export.gather_whole, rank_groups._receive

        def count(parameter: torch.Tensor) -> torch.Tensor:
            nonlocal most
            most = max(most, 1 + sum(reference() is not None for reference in alive))
            found = real(parameter)
            alive.append(weakref.ref(found))
            return found

        def measure(source: int) -> Any:
            nonlocal largest, received
            for piece in receive(source):
                largest, received = max(largest, len(piece)), received + len(piece)
                yield piece

        model_export.gather_whole, rank_groups._receive = count, measure
        with load_staged("stages of shards", build_changed_spec(CONFIG)) as (model, world):
            export(model, CONFIG, memory_path / "out", world)
            own = sum(value.numel() * 4 for name, value in model.named_parameters())
        return most, largest, received - (own if world.rank == 2 else 0)

    [first, second, third, fourth] = run_ranks(work, 4)
    total = sum(
        load.numel() * 4
        for path in memory_path.glob("out/*.safetensors")
        for load in load_file(path).values()
    )
    with load_staged("one", build_changed_spec(CONFIG)) as (model, _):
        assert total == sum(value.numel() * 4 for value in model.parameters())
    assert first[:2] == (1, 128)
    assert first[2] == -third[2]  # all that the last stage has, and nothing else
    assert second == fourth[:2] + (0,) == (1, 0, 0)


@pytest.mark.slow
def test_each_rank_reads_what_its_stages_have(memory_path: Path) -> None:
    config = CONFIGS["tied"]
    with load_staged("one", build_changed_spec(config)) as (model, world):
        export(model, config, memory_path, world)

    def work() -> list[int]:
        read = count_reads()
        with load_staged("stages of shards", build_changed_spec(config)) as (model, _):
            load_weights(model, model.spec, memory_path)
            return [
                sum(read),
                sum(
                    locate_local_part(parameter)[0].numel() * 4 for parameter in model.parameters()
                ),
            ]

    for read, own in run_ranks(work, 4):
        assert read == own > 0


FAULTS = {
    "missing": lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"),
    "missing first": lambda tensors: tensors.pop("model.embed_tokens.weight"),
    "unknown": lambda tensors: tensors.update(
        {"model.layers.4.mlp.up_proj.weight": torch.zeros(12, 8)}
    ),
    "shape": lambda tensors: tensors.update({"lm_head.weight": torch.zeros(30, 9)}),
    "kind": lambda tensors: tensors.update({"model.norm.weight": torch.zeros(8, dtype=torch.int8)}),
}


@pytest.mark.slow
def test_faults_of_any_stage_are_told_by_every_rank_as_by_one_process(memory_path: Path) -> None:
    with load_staged("one", build_changed_spec(CONFIG)) as (model, world):
        export_model(
            model,
            model.spec,
            CONFIG,
            memory_path / "whole",
            tokenizer_folder=None,
            max_shard_bytes=2**30,
            world=world,
        )
    for fault, spoil in FAULTS.items():
        tensors = load_file(memory_path / "whole" / "model.safetensors")
        spoil(tensors)
        (memory_path / fault).mkdir()
        save_file(tensors, memory_path / fault / "model.safetensors")
        (memory_path / fault / "config.json").write_text(json.dumps(CONFIG))

    def told(name: str) -> list[list[str]]:
        found = []
        with load_staged(name, build_changed_spec(CONFIG)) as (model, _):
            for fault in FAULTS:
                with pytest.raises(CheckpointError) as raised:
                    load_weights(model, model.spec, memory_path / fault)
                found.append(list(raised.value.faults))
        return found

    expected = told("one")
    assert (
        "model.layers.3.mlp.up_proj.weight is missing; download the folder again" in expected[0][0]
    )
    assert len({faults[0] for faults in expected}) == len(FAULTS)
    assert run_ranks(told, 2, "stages") == [expected] * 2


@pytest.mark.slow
def test_the_room_that_is_looked_for_is_that_of_the_whole_model(memory_path: Path) -> None:
    def told(name: str) -> str:
        def tell(folder: Path, needed: int, purpose: str) -> None:
            raise StorageError(str(needed))

        files.require_space = tell
        with (
            load_staged(name, build_changed_spec(CONFIGS["tied"])) as (model, world),
            pytest.raises(StorageError) as raised,
        ):
            check_room(model, memory_path / "out" / "model", world)
        return str(raised.value)

    with load_staged("one", build_changed_spec(CONFIGS["tied"])) as (model, _):
        needed = str(sum(parameter.numel() * 4 for parameter in model.parameters()))
    assert run_ranks(told, 2, "stages")[0] == needed


def test_rank_0_cannot_write_what_another_stage_sends_and_no_rank_hangs(memory_path: Path) -> None:
    def work() -> str:
        def fail(operation: str, path: Path) -> None:
            if path.name.startswith("model-00004") and operation == "write":
                raise OSError(28, "No space left on device", str(path))

        files.before_operation = fail
        with (
            load_staged("stages", build_changed_spec(CONFIG)) as (model, world),
            pytest.raises(StorageError) as raised,
        ):
            export(model, CONFIG, memory_path / "out", world)
        return str(raised.value)

    messages = run_ranks(work, 2)
    assert "model-00004-of-" in messages[0] and "No space left on device" in messages[0]
    assert list(memory_path.iterdir()) == []
