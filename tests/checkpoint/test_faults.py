"""A save that stops, by an error or by the end of the process, at each of its operations on the
disk.
"""

import errno
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch

from recipe_lib import files
from recipe_lib.checkpoint.huggingface import check_weights, export_model
from recipe_lib.checkpoint.rank_groups import SingleRank, write_gathered
from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.checkpoint.run_files import OutputRecord, write_record
from recipe_lib.checkpoint.safetensors_files import PlannedTensor
from recipe_lib.errors import StorageError
from recipe_lib.parallel.world import World
from tests.checkpoint.tiny import (
    CONFIG,
    OPTIMIZERS,
    build_tiny_model,
    build_tiny_spec,
    build_tiny_world,
    compute_fingerprint,
    read_tree,
    train,
)

Operation = tuple[str, str]
SMALL = build_tiny_spec(
    num_hidden_layers=1
)  # a save writes each tensor: fewer tensors, fewer operations to stop at


def build(step: int, world: World) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and optimizer after `step` steps."""
    model = build_tiny_model(world, spec=SMALL)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    train(model, optimizer, step)
    return model, optimizer


def save(root: Path, step: int, keep: int = 1) -> None:
    """Trains to `step` and saves."""
    with build_tiny_world() as world:
        model, optimizer = build(step, world)
        save_state(root, step, model, optimizer, {"step": step}, world, keep)


def expected(step: int) -> str:
    with build_tiny_world() as world:
        return compute_fingerprint(*build(step, world))


def latest(root: Path) -> tuple[int, str]:
    """Step and fingerprint of what a resumed run would get."""
    with build_tiny_world() as world:
        found = find_state(root, "latest", world)
        assert found is not None, "no state is left"
        model = build_tiny_model(world, seed=None, spec=SMALL)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        step = load_state(found, model, optimizer, world)["step"]
        return step, compute_fingerprint(model, optimizer)


def operations_of(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Every operation that the action does on the disk."""
    seen: list[Operation] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            files, "before_operation", lambda operation, path: seen.append((operation, path.name))
        )
        action()
    return seen


def places_to_stop(operations: list[Operation]) -> list[int]:
    """Return the numbers of the operations to stop at: of writes in a row to one file the first and
    the last.
    """
    return [
        number
        for number, operation in enumerate(operations)
        if operations[number - 1 : number] != [operation]
        or operations[number + 1 : number + 2] != [operation]
    ]


def stop_at(count: int, how: Callable[[str, Path], None]) -> Callable[[str, Path], None]:
    """A hook that does `how` at the operation with this number."""
    left = count

    def hook(operation: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            how(operation, path)

    return hook


def no_space(operation: str, path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def end_process(operation: str, path: Path) -> None:
    os._exit(9)


def in_child(action: Callable[[], None]) -> int:
    """Runs the action in a fork; returns its exit code. The parent has imported everything, and
    holds no group.
    """
    child = os.fork()
    if child == 0:
        gc.freeze()  # what is the parent's must not be collected here
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def first(memory_root: Path) -> Path:
    """A folder with the state of step 1."""
    root = memory_root / "first"
    save(root, 1)
    return root


def test_the_order_of_a_save(
    first: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files before the manifest, the manifest before the name, the name before anything old
    goes.
    """
    root = memory_path / "state"
    shutil.copytree(first, root)
    seen = operations_of(lambda: save(root, 2), monkeypatch)
    flushed = [name for operation, name in seen if operation == "flush"]
    temporary = next(name for operation, name in seen if operation == "make")
    assert flushed[:4] == [
        "shard-00001-of-00001.safetensors",
        "rng-00001.safetensors",
        "state.json",
        "manifest.json",
    ]
    assert flushed[4:6] == [temporary, "state"]
    assert [step[0] for step in seen[seen.index(("flush", temporary)) :]] == [
        "flush", "rename", "flush", "rename", "flush", "remove",
    ]  # fmt: skip
    assert seen[-1][0] == "remove" and seen[-1][1].startswith(".step_1.")
    assert all(name in flushed for operation, name in seen if operation == "open")


@pytest.mark.slow
def test_a_full_disk_at_every_operation(
    first: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {1: expected(1), 2: expected(2)}
    shutil.copytree(first, memory_path / "count")
    places = places_to_stop(operations_of(lambda: save(memory_path / "count", 2), monkeypatch))
    assert len(places) > 15
    for number in places:
        root = memory_path / f"state{number}"
        shutil.copytree(first, root)
        with monkeypatch.context() as patch:
            patch.setattr(files, "before_operation", stop_at(number, no_space))
            try:
                save(root, 2)
            except StorageError as error:
                assert "No space left on device" in str(error) and "\n" not in str(error)
                assert "free some space, or choose another place" in str(error)
        step, found = latest(root)
        assert found == good[step]
        assert not list(root.glob(".*")), "a temporary folder is left"
        save(root, 2)
        assert latest(root) == (2, good[2])


@pytest.mark.slow
def test_the_end_of_the_process_at_every_operation(
    first: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {1: expected(1), 2: expected(2)}
    shutil.copytree(first, memory_path / "count")
    steps = []
    for number in places_to_stop(
        operations_of(lambda: save(memory_path / "count", 2), monkeypatch)
    ):
        root = memory_path / f"state{number}"
        shutil.copytree(first, root)

        def save_and_end(number: int = number, root: Path = root) -> None:
            files.before_operation = stop_at(number, end_process)
            save(root, 2)

        assert in_child(save_and_end) == 9
        step, found = latest(root)
        assert found == good[step]
        assert all(path.name in ("step_1", "step_2") for path in root.iterdir()), (
            "leftovers outlive the next start"
        )
        steps.append(step)
    assert steps == sorted(steps) and set(steps) == {1, 2}


def naive_save(root: Path, step: int) -> None:
    """What is not done here: tensors written over the last ones, no manifest, no new name."""
    with build_tiny_world() as world:
        model, _ = build(step, world)
        for name, value in model.state_dict().items():
            files.before_operation("write", root / name)
            (root / name).write_bytes(value.numpy().tobytes())


def test_a_naive_save_fails_the_same_test(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the harness sees a writer that loses its only state."""
    naive_save(memory_path, 1)
    good = [read_tree(memory_path)]
    count = len(operations_of(lambda: naive_save(memory_path, 2), monkeypatch))
    good.append(read_tree(memory_path))
    lost = 0
    for number in range(count):
        naive_save(memory_path, 1)

        def save_and_end(number: int = number) -> None:
            files.before_operation = stop_at(number, end_process)
            naive_save(memory_path, 2)

        assert in_child(save_and_end) == 9
        lost += read_tree(memory_path) not in good
    assert lost >= count // 2


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_an_export_that_ends_at_every_operation(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:  # a file system that cannot exchange two names
        monkeypatch.setattr(files, "_renameat2", lambda source, target, flags: False)

    def export(seed: int, root: Path) -> None:
        with build_tiny_world() as world:
            model = build_tiny_model(world, seed, spec=SMALL)
            options = {"tokenizer_folder": None, "max_shard_bytes": 1500, "world": world}
            export_model(model, SMALL, CONFIG | {"num_hidden_layers": 1}, root / "model", **options)

    source = memory_path / "source"
    source.mkdir()
    write_record(source, OutputRecord())
    export(0, source)
    whole = [read_tree(source / "model")]
    shutil.copytree(source, memory_path / "count")
    places = places_to_stop(operations_of(lambda: export(1, memory_path / "count"), monkeypatch))
    whole.append(read_tree(memory_path / "count" / "model"))
    for number in places:
        root = memory_path / f"out{number}"
        shutil.copytree(source, root)

        def export_and_end(number: int = number, root: Path = root) -> None:
            files.before_operation = stop_at(number, end_process)
            export(1, root)

        assert in_child(export_and_end) == 9
        if at_once:
            assert read_tree(root / "model") in whole, (
                "neither the old model nor the new one is there"
            )
        else:
            models = [root / "model", *root.glob(".model.*.old")]
            assert any(read_tree(model) in whole for model in models), (
                "neither the old model nor the new one is left"
            )
        export(1, root)
        assert read_tree(root / "model") == whole[-1]
        assert sorted(path.name for path in root.iterdir()) == ["model", "written.json"]
        check_weights(SMALL, root / "model")


def test_the_disk_refuses_in_other_ways(
    first: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {
        errno.EROFS: "Read-only file system; make it writable, or choose another place",
        errno.EACCES: "Permission denied; make it writable, or choose another place",
        errno.EIO: "Input/output error; check the disk, or choose another place",
    }
    for number, line in lines.items():

        def refuse(operation: str, path: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number), str(path))

        root = memory_path / str(number)
        shutil.copytree(first, root)
        monkeypatch.setattr(files, "before_operation", stop_at(3, refuse))
        with pytest.raises(StorageError) as raised:
            save(root, 2)
        assert str(raised.value).endswith(f": {line}")
        assert latest(root)[0] == 1


def test_a_file_is_replaced_whole(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = memory_path / "config.yaml"
    files.replace_text(path, "one: 1\n")
    assert path.read_text() == "one: 1\n"
    for number in range(
        len(operations_of(lambda: files.replace_text(path, "two: 2\n"), monkeypatch))
    ):
        path.write_text("one: 1\n")

        def replace_and_end(number: int = number) -> None:
            files.before_operation = stop_at(number, end_process)
            files.replace_text(path, "two: 2\n")

        assert in_child(replace_and_end) == 9
        assert path.read_text() in ("one: 1\n", "two: 2\n")
    files.remove_leftovers(memory_path, "config.yaml")
    assert [found.name for found in memory_path.iterdir()] == ["config.yaml"]


def test_a_full_disk_is_one_line_while_another_rank_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / ".step_2.tmp"

    def disk_usage(folder: Path) -> shutil._ntuple_diskusage:
        if folder != tmp_path:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        return shutil._ntuple_diskusage(10, 7, 3)

    monkeypatch.setattr(files.shutil, "disk_usage", disk_usage)
    line = files.describe_fault(
        OSError(errno.ENOSPC, "No space left on device", str(gone / "shard.safetensors"))
    )
    assert line.startswith(
        f"{gone / 'shard.safetensors'}: No space left on device (3 B free); free some space"
    )


def test_what_other_ranks_wait_for_is_gathered_after_a_fault(memory_path: Path) -> None:
    """Each tensor's gather is a collective: rank 0 takes part in those after the one that failed,
    and says which.
    """
    gathered = []

    def gather(number: int) -> Iterator[torch.Tensor]:
        gathered.append(number)
        if number in (1, 2):
            raise ValueError(f"tensor {number}")
        yield torch.zeros(2)

    plan = [PlannedTensor(str(number), torch.float32, (2,)) for number in range(4)]
    with pytest.raises(ValueError, match="tensor 1"):
        write_gathered(
            memory_path / "x",
            plan,
            pieces=chain.from_iterable(map(gather, range(4))),
            metadata={},
            world=SingleRank(),
        )
    assert gathered == [0, 1, 2, 3]
