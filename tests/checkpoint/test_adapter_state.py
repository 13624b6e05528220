"""States of runs that train adapters: the adapters alone, and never beside weights or settings that
are others.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.adapters import get_adapter_parameters
from recipe_lib.checkpoint.optimizer_state import hash_frozen_parameters
from recipe_lib.checkpoint.rank_groups import find_holders
from recipe_lib.checkpoint.resumable_state import find_state, has_adapters, load_state, save_state
from recipe_lib.checkpoint.safetensors_files import read_header
from recipe_lib.config.schema import LoraConfig, ParallelConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import Decoder, build_meta, init_weights
from recipe_lib.parallel import World
from tests.adapters.adapted import EVERYWHERE, Setting, build_adapted
from tests.checkpoint.tiny import gather_full
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import build_small_spec, make_small_batch

SPEC = build_small_spec()
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=["q", "up", "head"])


def optimizer_of(model: Decoder) -> torch.optim.Optimizer:
    return torch.optim.AdamW(get_adapter_parameters(model).values(), lr=0.01)


def train(
    model: Decoder, optimizer: torch.optim.Optimizer, world: World, steps: int
) -> list[float]:
    """Losses; every rank has the whole batch, and gradients are sums over ranks."""
    tokens, labels = make_small_batch()
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=labels)
        (loss / world.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(root: Path, lora: LoraConfig = LORA, **more: Any) -> list[float]:
    """Trains two steps, saves, trains two more; returns the losses of these."""
    with build_adapted(SPEC, Setting(lora, **more)) as (model, world):
        optimizer = optimizer_of(model)
        train(model, optimizer, world, 2)
        save_state(root, 2, model, optimizer, {"step": 2}, world, keep=2)
        return train(model, optimizer, world, 2)


def resume(path: Path, lora: LoraConfig = LORA, **more: Any) -> list[float]:
    with build_adapted(SPEC, Setting(lora, **more), moved=0.3) as (model, world):
        optimizer = optimizer_of(model)
        load_state(path, model, optimizer, world)
        return train(model, optimizer, world, 2)


@pytest.fixture
def state(memory_path: Path) -> Path:
    save(memory_path / "state")
    return memory_path / "state" / "step_2"


def test_a_state_holds_the_adapters_and_nothing_frozen(state: Path) -> None:
    header = read_header(next(state.glob("shard-*")))
    model = [name for name in header.tensors if name.startswith("model/")]
    assert len(model) == 2 * (2 * SPEC.num_layers + 1)
    assert all("lora_" in name for name in header.tensors)
    assert has_adapters(state)


def test_a_resumed_run_goes_on_as_if_never_stopped(memory_path: Path) -> None:
    expected = save(memory_path / "state")
    assert resume(memory_path / "state" / "step_2") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "read_by", "kind"),
    [(2, 1, {}), (1, 2, {"quantize_base": "nf4"})],
    ids=["plain", "nf4"],
)
def test_any_number_of_ranks_reads_it(
    saved_by: int, read_by: int, kind: dict, memory_path: Path
) -> None:
    lora, setting = replace(LORA, **kind), {"dtype": torch.float32 if kind else torch.float64}

    def run(work: Any, ranks: int, path: Path) -> list[float]:
        return (
            run_ranks(lambda: work(path, lora, **setting), ranks)[0]
            if ranks > 1
            else work(path, lora, **setting)
        )

    expected = run(save, saved_by, memory_path / "state")
    found = run(resume, read_by, memory_path / "state" / "step_2")
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=1e-5 if kind else 1e-12, atol=0
    )


def test_the_mark_is_the_same_for_every_sharding() -> None:
    def mark(**parallel: Any) -> str | None:
        setting = Setting(replace(LORA, target_modules=EVERYWHERE), ParallelConfig(**parallel))
        with build_adapted(SPEC, setting) as (model, world):
            return hash_frozen_parameters(model, world, find_holders(model, world))

    one = mark()
    assert one is not None
    assert run_ranks(lambda: mark(fsdp_wrap_policy="memory_efficient"), 2) == [one, one]
    assert run_ranks(lambda: mark(data_replicate=2), 2) == [one, one]


def test_the_mark_tells_one_changed_number() -> None:
    with build_adapted(SPEC, Setting(LORA)) as (model, world):
        before = hash_frozen_parameters(model, world, find_holders(model, world))
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 2] += 1e-12
        assert hash_frozen_parameters(model, world, find_holders(model, world)) != before
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 2] -= 1e-12
        for parameter in get_adapter_parameters(model).values():
            parameter.data.add_(1.0)
        assert hash_frozen_parameters(model, world, find_holders(model, world)) == before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rank": 2, "alpha": 4.0}, "was saved with lora rank 3, found rank 2"),
        ({"alpha": 12.0}, "was saved with lora scaling 2.0, found scaling 4.0"),
        ({"dora": True}, "was saved with lora dora False, found dora True"),
        (
            {"target_modules": ["q", "up"]},
            "was saved with lora targets q, up, head, found targets q, up",
        ),
        ({"quantize_base": "int8"}, "was saved with lora quantize none, found quantize int8"),
    ],
)
def test_other_settings_are_refused(changes: dict, what: str, state: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        resume(
            state,
            replace(LORA, **changes),
            dtype=torch.float32 if "quantize_base" in changes else torch.float64,
        )
    assert str(error.value) == f"{state}: {what}; resume with the run's own section lora"


def test_another_base_is_refused_by_all_ranks(state: Path) -> None:
    def work() -> str:
        with build_adapted(SPEC, Setting(LORA)) as (model, world):
            init_weights(model, 4, SPEC)
            try:
                load_state(state, model, optimizer_of(model), world)
            except CheckpointError as error:
                return str(error)
        return "loaded"

    line = (
        f"{state}: was saved with other frozen weights than this run has loaded; resume with the"
        " run's own model, dtype and lora.quantize_base"
    )
    assert work() == line
    assert run_ranks(work, 2)[0] == line


def test_full_and_adapted_runs_do_not_mix(state: Path, memory_path: Path) -> None:
    with build_adapted(SPEC, Setting(LORA)) as (model, world):
        whole = build_meta(SPEC, torch.float64).to_empty(device="cpu")
        init_weights(whole, 3, SPEC)
        everything = torch.optim.SGD(whole.parameters(), lr=0.1)
        with pytest.raises(
            CheckpointError, match="of a run that trained adapters, this run trains all weights"
        ):
            load_state(state, whole, everything, world)
        path = save_state(memory_path / "full", 1, whole, everything, {}, world, keep=1)
        assert not has_adapters(path)
        with pytest.raises(
            CheckpointError, match="of a run that trained all weights, this run trains adapters"
        ):
            load_state(path, model, optimizer_of(model), world)


def test_the_model_alone_can_be_read(state: Path) -> None:
    def read(world: World, model: Decoder) -> dict[str, torch.Tensor]:
        assert find_state(state.parent, str(state), world) == state
        load_state(state, model, None, world)
        return {
            name: gather_full(parameter.detach()).clone()
            for name, parameter in get_adapter_parameters(model).items()
        }

    with build_adapted(SPEC, Setting(LORA)) as (model, world):
        found = read(world, model)
        optimizer = optimizer_of(model)
        load_state(state, model, optimizer, world)
        for name, parameter in get_adapter_parameters(model).items():
            assert torch.equal(found[name], parameter)
    assert json.loads((state / "state.json").read_bytes())["adapters"]["targets"] == [
        "q",
        "up",
        "head",
    ]
