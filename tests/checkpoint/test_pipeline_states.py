"""States of pipelines: whole, the same as those of one process, and gone on from by pipelines of
any other size.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib import files
from recipe_lib.checkpoint import resumable_state
from recipe_lib.checkpoint.optimizer_state import hash_frozen_parameters
from recipe_lib.checkpoint.rank_groups import find_holders
from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.checkpoint.safetensors_files import read_header
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError, StorageError
from recipe_lib.models import Decoder
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
from tests.checkpoint.tiny import read_tree
from tests.distributed.ranks import run_ranks
from tests.selection import mark_slow_except

QUANTIZED = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
}  # nf4 takes blocks of 64
EXPERTS = CONFIG | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2,
                    "num_experts_per_tok": 2}  # fmt: skip
TARGETS = ["q", "up", "embedding", "head"]
CASES: dict[str, tuple[dict[str, Any], LoraConfig | None]] = {
    "untied": (CONFIG, None),
    "tied": (CONFIG | {"tie_word_embeddings": True}, None),
    "adapters": (CONFIG, LoraConfig(rank=2, alpha=4.0, target_modules=TARGETS, dora=True)),
    "tied adapters": (
        CONFIG | {"tie_word_embeddings": True},
        LoraConfig(rank=2, alpha=4.0, target_modules=TARGETS),
    ),
    "experts": (
        EXPERTS,
        None,
    ),  # whose ranks of a tensor group have parts of gate above parts of up
    "ends": (
        CONFIG,
        LoraConfig(rank=2, alpha=4.0, target_modules=["embedding", "head"]),
    ),  # some ranks train nothing
    "quantized": (
        QUANTIZED,
        LoraConfig(rank=2, alpha=4.0, target_modules=["q", "up"], quantize_base="nf4"),
    ),
}
# Which of WORLDS a case has.
USED = {
    "untied": ["one", "stages", "shards", "folded", "stages of shards"],
    "adapters": ["one", "stages"],
    "tied adapters": ["one", "stages", "stages of tensors"],
    "experts": ["one", "stages of tensors", "stages"],
    "ends": ["one", "four stages"],
    "quantized": ["one", "stages"],
}
# Who goes on from whose state.
CROSSINGS = [
    ("one", "stages"),
    ("stages", "stages"),
    ("stages", "one"),
    ("stages", "shards"),
    ("shards", "folded"),
    ("folded", "one"),
    ("stages", "four stages"),
    ("four stages", "stages"),
    ("four stages", "one"),
    ("one", "four stages"),
    ("folded", "stages of shards"),
    ("stages of shards", "shards"),
    ("stages of tensors", "stages"),
    ("stages of tensors", "stages of tensors"),
    ("stages of tensors", "one"),
]


def save(root: Path, case: str, name: str, model: Decoder, world: World) -> list[dict[str, str]]:
    """Saves `root/NAME` after two steps; what was held then, and after a third one."""
    optimizer = build_optimizer(model)
    take_random_step(model, optimizer, 0)
    take_random_step(model, optimizer, 1)
    saved = hash_trained(model, optimizer, world)
    torch.manual_seed(100 + world.rank)
    save_state(root / name, 2, model, optimizer, {"step": 2}, world, keep=1)
    take_random_step(model, optimizer, 2)
    return [saved, hash_trained(model, optimizer, world)]


def load(root: Path, saved_by: str, model: Decoder, world: World) -> list[dict[str, str]]:
    """What is held after that state was loaded into NaNs, and after a third step."""
    optimizer = build_optimizer(model)
    path = find_state(root / saved_by, "latest", world)
    assert path is not None
    torch.manual_seed(5)
    assert load_state(path, model, optimizer, world) == {"step": 2}
    if WORLDS[saved_by][0] == world.size:
        number = torch.rand(())
        torch.manual_seed(100 + world.rank)
        assert torch.rand(()) == number
    loaded = hash_trained(model, optimizer, world)
    take_random_step(model, optimizer, 2)
    return [loaded, hash_trained(model, optimizer, world)]


def save_alone(root: Path, case: str, name: str = "one") -> Path:
    """A state of one of WORLDS."""
    config, lora = CASES[case]
    with load_staged(name, build_changed_spec(config), lora) as (model, world):
        save(root, case, name, model, world)
    return root / name / "step_2"


def work_in(
    name: str, case: str, root: Path, saves: bool, saved_by: list[str]
) -> dict[str, list[dict[str, str]]]:
    """What is held in one of WORLDS after it has saved a state (by its own name), and after it went
    on from others.
    """
    config, lora = CASES[case]
    found = {}
    with build_world(name) as (cfg, world):
        if saves:
            found[f"{name} saves"] = save(
                root, case, name, build_staged(cfg, world, build_changed_spec(config), lora), world
            )
        for other in saved_by:
            model = build_staged(cfg, world, build_changed_spec(config), lora, seed=None)
            found[f"{other} to {name}"] = load(root, other, model, world)
    return found


@pytest.mark.parametrize("case", mark_slow_except(USED, ["tied adapters"]))
def test_a_pipeline_of_another_size_goes_on_from_a_state(case: str, memory_path: Path) -> None:
    used = USED[case]
    crossings = [pair for pair in CROSSINGS if set(pair) <= set(used)]
    size = {name: ranks for name, (ranks, _) in WORLDS.items()}

    def work(ranks: int, saves: bool, saved_by: set[int]) -> dict[str, list[dict[str, str]]]:
        todo = {}
        for name in (name for name in used if size[name] == ranks):
            others = [
                there for there, here in crossings if here == name and size[there] in saved_by
            ]
            if saves or others:
                todo[name] = others

        def run() -> dict[str, list[dict[str, str]]]:
            found = {}
            for name, others in todo.items():
                found |= work_in(name, case, memory_path, saves, others)
            return found

        return run() if ranks == 1 or not todo else run_ranks(run, ranks)[0]

    found = work(1, True, set()) | work(2, True, {1, 2}) | work(4, True, {1, 2, 4})
    found |= work(2, False, {4}) | work(1, False, {1, 2, 4})
    assert found.keys() == {f"{name} saves" for name in used} | {
        f"{there} to {here}" for there, here in crossings
    }
    expected = found["one saves"]
    assert expected[0] != expected[1]
    for what, held_then in found.items():
        assert held_then == expected, what
    compare_folders(case, {name: memory_path / name / "step_2" for name in used})


def compare_folders(case: str, folders: dict[str, Path]) -> None:
    """Each holds what the one of one process does, and nothing twice."""
    wanted, size = tensors(folders["one"])
    written = json.loads((folders["one"] / "state.json").read_bytes())
    for name, folder in folders.items():
        found, total = tensors(folder)
        assert found == wanted, name
        assert total == size, name
        mine = json.loads((folder / "state.json").read_bytes())
        cut = case == "experts" and name == "stages of tensors"
        assert len(mine.pop("runs")) == (4 if cut else 0), (
            name
        )  # of all layers, whichever stage has them
        assert mine == {key: value for key, value in written.items() if key != "runs"}, name
        # Each rank wrote its own part, where it has any.
        assert len(list(folder.glob("shard-*"))) == (
            2 if case == "ends" and name != "one" else WORLDS[name][0]
        )


def tensors(folder: Path) -> tuple[set[str], int]:
    """Names of all tensors of a state, and their bytes."""
    headers = [read_header(path).tensors for path in folder.glob("shard-*")]
    entries = [entry for header in headers for entry in header.values()]
    return {name for header in headers for name in header}, sum(
        entry.end - entry.start for entry in entries
    )


@pytest.mark.slow
def test_names_are_in_the_order_of_the_whole_model() -> None:
    with load_staged("one", build_changed_spec(CONFIG)) as (model, _):
        order = [name for name, _ in model.named_parameters()]

    def found(world_names: list[str]) -> list[list[str]]:
        orders = []
        for name in world_names:
            with load_staged(name, build_changed_spec(CONFIG)) as (model, world):
                holders = find_holders(model, world)
                assert holders.first_ranks["model.layers.0.mlp.up_proj.weight"] == 0
                assert holders.is_ours("model.layers.0.mlp.up_proj.weight") == (holders.leader == 0)
                orders.append(list(holders.first_ranks))
        return orders

    assert run_ranks(found, 2, ["stages", "folded", "shards"]) == [[order] * 3] * 2


def refusals(path: Path, world_name: str) -> list[str]:
    """What each attempt to go on from a state of case `untied` with something else is refused with,
    in this world.
    """
    found = []

    def attempt(
        config: dict[str, Any],
        lora: LoraConfig | None = None,
        plain: bool = False,
        half: bool = False,
    ) -> None:
        with load_staged(world_name, build_changed_spec(config), lora) as (model, world):
            optimizer = (
                torch.optim.SGD(model.parameters(), lr=0.1) if plain else build_optimizer(model)
            )
            if half and model.lm_head is not None:
                model.lm_head.weight.data = model.lm_head.weight.data.to(torch.bfloat16)
            try:
                load_state(path, model, optimizer, world)
                found.append("loaded")
            except CheckpointError as error:
                found.append(str(error))

    attempt(CONFIG | {"num_hidden_layers": 5})
    attempt(CONFIG | {"vocab_size": 32})
    attempt(CONFIG | {"tie_word_embeddings": True})
    attempt(CONFIG, LoraConfig(rank=2, target_modules=["q"]))
    attempt(CONFIG, plain=True)
    attempt(CONFIG, half=True)
    return found


def test_other_models_are_refused_alike_by_all_ranks(memory_path: Path) -> None:
    path = save_alone(memory_path, "untied")
    expected = refusals(path, "one")
    assert len(set(expected)) == 6
    assert "only the model has model.layers.4.input_layernorm.weight" in expected[0]
    assert "only the state has lm_head.weight" in expected[2]
    assert "lm_head.weight is float32 [30, 8], this run's model has bfloat16 [30, 8]" in expected[5]
    told = run_ranks(lambda: refusals(path, "stages"), 2)
    # Of several wrong shapes the first stage's is told first.
    expected[1] = expected[1].replace("lm_head.weight", "model.embed_tokens.weight")
    assert told[0] == expected
    assert "loaded" not in told[1]


def test_a_changed_frozen_weight_of_another_stage_is_found(memory_path: Path) -> None:
    path = save_alone(memory_path, "adapters")
    config, lora = CASES["adapters"]

    def work() -> list[Any]:
        with load_staged("stages", build_changed_spec(config), lora) as (model, world):
            before = hash_frozen_parameters(model, world, find_holders(model, world))
            if model.lm_head is not None:
                with torch.no_grad():
                    model.model.layers.get_submodule("3").mlp.down_proj.weight[3, 2] += 1e-3
            changed = hash_frozen_parameters(model, world, find_holders(model, world)) != before
            with suppress(CheckpointError):
                load_state(path, model, None, world)
                return [changed, "loaded"]
            return [changed, "refused"]

    assert run_ranks(work, 2) == [[True, "refused"]] * 2


def test_a_stage_that_cannot_write_stops_all_and_nothing_changes(memory_path: Path) -> None:
    save_alone(memory_path, "tied")
    (memory_path / "one").rename(memory_path / "stages")
    before = read_tree(memory_path)

    def failing() -> str:
        def fail(operation: str, path: Path) -> None:
            if path.name == "shard-00002-of-00002.safetensors" and operation == "flush":
                raise OSError(28, "No space left on device", str(path))

        files.before_operation = fail
        with pytest.raises(StorageError) as raised:
            save_alone(memory_path, "tied", "stages")
        return str(raised.value)

    assert "shard-00002-of-00002.safetensors: No space left on device" in run_ranks(failing, 2)[0]
    assert read_tree(memory_path) == before


def test_the_room_that_is_asked_for_is_that_of_all_stages(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        resumable_state.files, "require_space", lambda folder, needed, purpose: asked.append(needed)
    )

    def work(name: str) -> int:
        asked.clear()
        save_alone(memory_path, "tied", name)
        return asked[-1] - 2**20 * (WORLDS[name][0] + 1) if asked else 0

    one = work("one")
    assert one == tensors(memory_path / "one" / "step_2")[1]
    assert run_ranks(lambda: work("stages"), 2) == [one, 0]
