"""Damaged states are noticed before a tensor of them is used, and the previous good one is
taken.
"""

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from recipe_lib.checkpoint import resumable_state
from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.config.local_files import STATE_MANIFEST
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import get_logger
from recipe_lib.parallel.world import World
from tests.checkpoint.tiny import (
    OPTIMIZERS,
    build_tiny_model,
    build_tiny_world,
    compute_fingerprint,
    train,
)
from tests.distributed.ranks import run_ranks

SHARD = "shard-00001-of-00001.safetensors"
RNG = "rng-00001.safetensors"
SETTINGS = "state.json"
FILES = (SHARD, RNG, SETTINGS, STATE_MANIFEST)


@pytest.fixture
def world() -> Iterator[World]:
    with build_tiny_world() as made:
        yield made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with step_1 and step_2, and the fingerprint of step_1."""
    root = tmp_path_factory.mktemp("saved")
    with build_tiny_world() as world:
        model = build_tiny_model(world)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train(model, optimizer, 1)
        save_state(root, 1, model, optimizer, {"step": 1}, world, keep=2)
        first = compute_fingerprint(model, optimizer)
        train(model, optimizer, 1, 1)
        save_state(root, 2, model, optimizer, {"step": 2}, world, keep=2)
        return root, first


@pytest.fixture
def warnings_seen() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    yield lines
    get_logger().removeHandler(handler)


def flip_bits(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(FILES)
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_bit_of_a_tensor(folder: Path, draw: random.Random) -> None:
    path = folder / SHARD
    data = bytearray(path.read_bytes())
    data[draw.randrange(8 + int.from_bytes(data[:8], "little"), len(data))] ^= 1 << draw.randrange(
        8
    )
    path.write_bytes(data)


def truncate(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(FILES)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def remove(folder: Path, draw: random.Random) -> None:
    (folder / draw.choice(FILES)).unlink()


def rename(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(FILES)
    path.rename(folder / f"{path.name}.old")


def swap(folder: Path, draw: random.Random) -> None:
    """A file of the other state, of the same length."""
    other = folder.parent / "step_1" / SHARD
    assert other.stat().st_size == (folder / SHARD).stat().st_size
    shutil.copy(other, folder / SHARD)


def edit_manifest(folder: Path, draw: random.Random) -> None:
    fields = json.loads((folder / STATE_MANIFEST).read_text())
    edit: Callable[[], object] = draw.choice(
        [
            lambda: fields.update(step=3),
            lambda: fields.update(world_size=2),
            lambda: fields.update(sequence=99),
            lambda: fields.update(format=2),
            lambda: fields["files"].pop(),
            lambda: fields["files"].clear(),
            lambda: fields["files"][0].update(size=1),
            lambda: fields["files"][1].update(sha256="0" * 64),
            lambda: fields["files"][0].update(name="../step_1/state.json"),
            lambda: fields.pop("manifest_sha256"),
        ]
    )
    edit()
    (folder / STATE_MANIFEST).write_text(json.dumps(fields))


DAMAGE = (
    [flip_bits] * 30 + [flip_bit_of_a_tensor] * 10 + [truncate] * 20 + [remove] * 12 + [rename] * 6
    + [swap] * 2 + [edit_manifest] * 20
)  # fmt: skip


def test_a_hundred_damaged_states(
    saved: tuple[Path, str], tmp_path: Path, world: World, warnings_seen: list[str]
) -> None:
    assert len(DAMAGE) == 100
    source, first = saved
    root = tmp_path / "state"
    for number, damage in enumerate(DAMAGE):
        shutil.copytree(source, root)
        damage(root / "step_2", random.Random(number))
        warnings_seen.clear()
        assert find_state(root, "latest", world) == root / "step_1", (number, damage.__name__)
        assert len(warnings_seen) == 2
        assert (
            warnings_seen[0].startswith(f"warning: {root / 'step_2'}: ")
            and "\n" not in warnings_seen[0]
        )
        assert warnings_seen[1] == f"warning: resuming from {root / 'step_1'}"
        with pytest.raises(CheckpointError, match=f"^resume={root / 'step_2'}: "):
            find_state(root, str(root / "step_2"), world)
        shutil.rmtree(root)
    shutil.copytree(source, root)
    shutil.rmtree(root / "step_2")
    model = build_tiny_model(world, seed=None)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    assert load_state(root / "step_1", model, optimizer, world) == {"step": 1}
    assert compute_fingerprint(model, optimizer) == first


def test_undamaged_copies_are_taken(
    saved: tuple[Path, str], tmp_path: Path, world: World, warnings_seen: list[str]
) -> None:
    """The control: a copied folder, with other times and a stranger's file in it, is still good."""
    root = tmp_path / "elsewhere"
    shutil.copytree(saved[0], root)
    (root / "step_2" / ".DS_Store").write_text("x")
    (root / "notes").mkdir()
    assert find_state(root, "latest", world) == root / "step_2"
    assert warnings_seen == []


def test_without_hashes_the_flipped_tensors_would_pass(
    saved: tuple[Path, str], tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: what the comparison of names and sizes alone does not see."""
    monkeypatch.setattr(resumable_state, "find_damaged_file", lambda *arguments, **named: None)
    shutil.copytree(saved[0], tmp_path / "state")
    flip_bit_of_a_tensor(tmp_path / "state" / "step_2", random.Random(0))
    assert find_state(tmp_path / "state", "latest", world) == tmp_path / "state" / "step_2"


def test_none_is_good(saved: tuple[Path, str], tmp_path: Path, world: World) -> None:
    root = tmp_path / "state"
    shutil.copytree(saved[0], root)
    (root / "step_1" / SHARD).unlink()
    (root / "step_2" / STATE_MANIFEST).unlink()
    with pytest.raises(CheckpointError) as raised:
        find_state(root, "latest", world)
    assert (
        str(raised.value)
        == f"{root}: no intact checkpoint ({root / 'step_2'}: manifest.json is missing;"
        f" {root / 'step_1'}: {SHARD} is missing); to start over set overwrite_output_dir=true"
        " or another output_dir"
    )


def test_a_renamed_folder_is_not_the_state_of_another_step(
    saved: tuple[Path, str], tmp_path: Path, world: World
) -> None:
    shutil.copytree(saved[0] / "step_1", tmp_path / "step_9")
    with pytest.raises(CheckpointError, match="step_9: its manifest is that of step 1"):
        find_state(tmp_path, "latest", world)


def test_a_newer_format_says_so(saved: tuple[Path, str], tmp_path: Path, world: World) -> None:
    shutil.copytree(saved[0] / "step_1", tmp_path / "step_1")
    fields = json.loads((tmp_path / "step_1" / STATE_MANIFEST).read_text())
    (tmp_path / "step_1" / STATE_MANIFEST).write_text(json.dumps(fields | {"format": 7}))
    with pytest.raises(
        CheckpointError, match="manifest.json has format 7, this release reads up to 1"
    ):
        find_state(tmp_path, "latest", world)


@pytest.mark.slow
def test_ranks_share_the_check_and_agree(tmp_path: Path) -> None:
    """Either rank's file may be the damaged one; both ranks take the older state."""

    def save() -> None:
        with build_tiny_world() as here:
            model = build_tiny_model(here)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            train(model, optimizer, 1)
            for step in (1, 2):
                save_state(tmp_path / "good", step, model, optimizer, {}, here, keep=2)

    def find(root: Path) -> str:
        with build_tiny_world() as here:
            found = find_state(root, "latest", here)
            assert found is not None
            return found.name

    run_ranks(save, 2)
    names = sorted(path.name for path in (tmp_path / "good" / "step_2").iterdir())
    assert len(names) == 6
    for name in names:
        root = tmp_path / f"without-{name}"
        shutil.copytree(tmp_path / "good", root)
        data = bytearray((root / "step_2" / name).read_bytes())
        data[-2] ^= 4
        (root / "step_2" / name).write_bytes(data)

    def find_all() -> list[str]:
        return [find(tmp_path / f"without-{name}") for name in names]

    assert run_ranks(find_all, 2) == [["step_1"] * 6] * 2
    assert run_ranks(find, 2, tmp_path / "good") == ["step_2", "step_2"]


def test_a_file_for_more_ranks_than_ever_saved_is_no_pickle(
    saved: tuple[Path, str], tmp_path: Path, world: World
) -> None:
    """A hostile pickle put in the place of a shard, under a manifest that lists it, is not opened
    as one.
    """

    class Hostile:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "executed",))

    root = tmp_path / "state"
    shutil.copytree(saved[0] / "step_1", root / "step_1")
    torch.save(Hostile(), root / "step_1" / SHARD)
    model = build_tiny_model(world)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(CheckpointError):
        find_state(root, "latest", world)
    with pytest.raises(CheckpointError):
        load_state(root / "step_1", model, optimizer, world)
    assert not (tmp_path / "executed").exists()
