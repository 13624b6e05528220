"""Extra parameters in files: written by the ranks that have them, read by others, refused where
they differ.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from recipe_lib.checkpoint.huggingface import check_weights, export_model, load_weights
from recipe_lib.checkpoint.model_folders import INDEX
from recipe_lib.checkpoint.tensor_matching import read_headers
from recipe_lib.errors import CheckpointError
from recipe_lib.models import Decoder, build_meta
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.parallel import World
from tests.checkpoint import staged
from tests.checkpoint.staged import CONFIG, WORLDS, build_changed_spec, build_staged, build_world
from tests.checkpoint.tiny import gather_full
from tests.distributed.ranks import run_ranks

KINDS = [
    lambda: nn.BatchNorm1d(8),
    lambda: nn.Linear(8, 7),
]  # with a counter, and rows that two ranks do not share
SHARD_BYTES = 900


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second layer of what `staged` builds has a module more."""

    def build_with(spec: Any, dtype: torch.dtype) -> Decoder:
        model = build_meta(spec, dtype)
        with torch.device("meta"):
            model.model.layers[0].extra, model.model.layers[2].extra = (make() for make in KINDS)
        return model

    monkeypatch.setattr(staged, "build_meta", build_with)


def export(model: Decoder, out: Path, world: World, save: bool = True) -> None:
    options: dict[str, Any] = {
        "tokenizer_folder": None,
        "max_shard_bytes": SHARD_BYTES,
        "save_extra": save,
    }
    export_model(model, model.spec, CONFIG, out, world=world, **options)


def in_and_out(root: Path, name: str) -> dict[str, torch.Tensor]:
    """Exports what was read from the export of one process; returns the extra tensors that were
    read, whole.
    """
    with build_world(name) as (cfg, world):
        model = build_staged(cfg, world, build_changed_spec(CONFIG), seed=None)
        if name == "one":
            load_weights(model, model.spec, root / "plain", 5)
            for at, tensor in enumerate(find_extra_tensors(model).values()):
                tensor.data.add_(at + 1)  # as training would change them
        else:
            load_weights(model, model.spec, root / "one", 6)
        export(model, root / name, world)
        return {
            key: gather_full(tensor.detach()) for key, tensor in find_extra_tensors(model).items()
        }


@pytest.mark.slow
def test_round_trip(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with build_world("one") as (cfg, world):
        export(
            build_staged(cfg, world, build_changed_spec(CONFIG)),
            memory_path / "plain",
            world,
            save=False,
        )
    request.getfixturevalue("added")
    expected = in_and_out(memory_path, "one")
    kinds = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    names = {f"model.layers.0.extra.{kind}" for kind in kinds} | {
        f"model.layers.2.extra.{kind}" for kind in kinds[:2]
    }
    assert expected.keys() == names
    assert expected["model.layers.0.extra.num_batches_tracked"].dtype == torch.int64
    check_weights(build_changed_spec(CONFIG), memory_path / "one")  # before there is a model
    found = read_headers(memory_path / "one")
    assert {name for name, tensor in found.items() if tensor.extra} == names
    assert (memory_path / "one" / INDEX).is_file()
    for name in ("stages", "stages of shards"):
        ranks = run_ranks(in_and_out, WORLDS[name][0], memory_path, name)
        read = {key: value for rank in ranks for key, value in rank.items()}
        assert read.keys() == names
        assert all(
            torch.equal(value, expected[key]) for rank in ranks for key, value in rank.items()
        )
        for file in sorted((memory_path / "one").glob("*.safetensors")):
            other = load_file(memory_path / name / file.name)
            for key, value in load_file(file).items():
                assert torch.equal(other[key], value), key


def test_faults(tmp_path: Path, added: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with build_world("one") as (cfg, world):
        model = build_staged(cfg, world, build_changed_spec(CONFIG))
        line = (
            "found model.layers.0.extra.bias and 6 more, which the recipe added .*"
            " checkpoint.extra_parameters=save"
        )
        with pytest.raises(CheckpointError, match=line):
            export(model, tmp_path / "refused", world, save=False)
        assert not (tmp_path / "refused").exists()
        export(model, tmp_path / "one", world)
        monkeypatch.undo()
        plain = build_staged(cfg, world, build_changed_spec(CONFIG))
        with pytest.raises(
            CheckpointError,
            match="holds model.layers.0.extra.bias and 6 more, which a recipe added",
        ):
            load_weights(plain, plain.spec, tmp_path / "one")
        other = build_meta(build_changed_spec(CONFIG), torch.float32)
        other.model.layers[0].extra, other.model.layers[2].extra = (
            nn.BatchNorm1d(8),
            nn.Linear(8, 6),
        )
        line = r"layers.2.extra.\w+ has shape .*, the recipe makes it .*1 more of another shape"
        with pytest.raises(CheckpointError, match=line):
            load_weights(other, other.spec, tmp_path / "one")
