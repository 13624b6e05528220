"""The world: environment, mesh, and errors that all ranks end with."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipe_lib.config.mesh import MESH_DIMS, compute_mesh_shape
from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.errors import DataError, OutOfMemoryError, SetupError, UserError, run_for_exit_code
from recipe_lib.parallel.world import World, build_world, count_communicator_ranks, start_world
from tests.distributed.ranks import RankFailure, find_free_port, run_ranks


def cpu_config(**parallel: int) -> FullFinetuneConfig:
    return FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**parallel))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)


def test_one_process_is_a_world_of_one_that_ends_with_its_block() -> None:
    with start_world(cpu_config()) as world:
        assert (world.rank, world.size, world.data_rank, world.data_ranks) == (0, 1, 0, 1)
        assert world.is_main and world.device == torch.device("cpu")
        assert world.mesh.mesh_dim_names == MESH_DIMS and tuple(world.mesh.shape) == (1, 1, 1, 1)
        assert world.any(True) and not world.any(False)
        assert world.broadcast_json({"a": [1]}) == {"a": [1]} and world.gather_json(3) == [3]
        assert world.all_reduce_sum(torch.tensor(2.0)) == 2
    assert not dist.is_initialized()
    with pytest.raises(DataError, match="row 3"), start_world(cpu_config()) as world:
        world.agree(fail_with_row, "row 3")
    assert not dist.is_initialized()


def fail_with_row(line: str) -> None:
    raise DataError(line)


@pytest.mark.parametrize(
    ("parallel", "size", "expected"),
    [({}, 4, (1, 1, 4, 1)), ({"data_replicate": 2}, 4, (1, 2, 2, 1)), ({"data_replicate": 4}, 4, (1, 4, 1, 1)),
     ({"data_shard": 2, "data_replicate": 2}, 4, (1, 2, 2, 1)), ({}, 1, (1, 1, 1, 1)),
     ({"tensor": 4}, 4, (1, 1, 1, 4)), ({"tensor": 2}, 8, (1, 1, 4, 2)),
     ({"tensor": 2, "data_replicate": 2}, 8, (1, 2, 2, 2)), ({"pipeline": 4}, 4, (4, 1, 1, 1)),
     ({"context": 4}, 8, (1, 1, 8, 1)), ({"context": 2, "data_replicate": 2, "tensor": 2}, 16, (1, 2, 4, 2)),
     ({"context": 2, "data_shard": 2}, 4, (1, 1, 4, 1)), ({"context": 4, "strategy": "ddp"}, 8, (1, 8, 1, 1)),
     ({"pipeline": 2}, 8, (2, 1, 4, 1)), ({"pipeline": 2, "tensor": 2, "data_replicate": 2}, 16, (2, 2, 2, 2))],
)  # fmt: skip
def test_mesh_shape(parallel: dict[str, int], size: int, expected: tuple[int, ...]) -> None:
    assert tuple(compute_mesh_shape(ParallelConfig(**parallel), size).values()) == expected


def test_groups_that_communicate() -> None:
    found = [
        count_communicator_ranks(ParallelConfig(**parallel), size)
        for parallel, size in COMMUNICATING
    ]
    assert found == [
        [],
        [8],
        [2, 4, 8],
        [8],
        [4, 2, 8],
        [2, 2, 2, 4, 8],
        [8],
        [4, 8],
        [2, 2, 4, 8],
        [4, 2, 8],
        [8, 4],
        [2, 2, 4, 8, 2],
    ]


COMMUNICATING: list[tuple[dict[str, int], int]] = [
    ({}, 1), ({}, 8), ({"data_replicate": 2}, 8), ({"tensor": 8}, 8), ({"tensor": 2}, 8),
    ({"tensor": 2, "data_replicate": 2}, 8), ({"pipeline": 8}, 8), ({"pipeline": 2}, 8),
    ({"pipeline": 2, "tensor": 2}, 8), ({"pipeline": 2, "tensor": 4}, 8),
    ({"context": 4}, 8), ({"pipeline": 2, "tensor": 2, "context": 2}, 8),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "size", "line"),
    [
        ({"data_replicate": 3}, 4,
         "parallel.data_replicate: found 3 copies for 4 ranks, expected a divisor of 4; use one of 1, 2, 4, or start a "
         "multiple of 3 ranks (--nproc_per_node)"),
        ({"data_replicate": 2, "data_shard": 4}, 4,
         "parallel: found data_replicate 2 x data_shard 4 = 8 for 4 ranks; set parallel.data_shard=2 or -1, or start 8 "
         "ranks (--nproc_per_node)"),
        ({"data_replicate": 3, "data_shard": 2}, 4,
         "parallel: found data_replicate 3 x data_shard 2 = 6 for 4 ranks; set parallel.data_replicate to one of "
         "1, 2, 4 and parallel.data_shard=-1, or start 6 ranks (--nproc_per_node)"),
        ({"tensor": 3}, 4, "parallel.tensor: found 3 for 4 ranks, expected a divisor of 4; start a multiple of 3 ranks "
         "(--nproc_per_node)"),
        ({"data_replicate": 3, "tensor": 2}, 8,
         "parallel.data_replicate: found 3 copies for 4 ranks (of 8, by parallel.tensor), expected a divisor of 4; use "
         "one of 1, 2, 4, or start a multiple of 6 ranks (--nproc_per_node)"),
        ({"pipeline": 3}, 4, "parallel.pipeline: found 3 for 4 ranks, expected a divisor of 4; start a multiple of 3 "
         "ranks (--nproc_per_node)"),
        ({"pipeline": 2, "tensor": 4}, 4,
         "parallel.pipeline x parallel.tensor: found 2 x 4 = 8 for 4 ranks, expected a divisor of 4; start a multiple "
         "of 8 ranks (--nproc_per_node)"),
        ({"pipeline": 2, "tensor": 2, "data_replicate": 3}, 8,
         "parallel.data_replicate: found 3 copies for 2 ranks (of 8, by parallel.pipeline and parallel.tensor), "
         "expected a divisor of 2; use one of 1, 2, or start a multiple of 12 ranks (--nproc_per_node)"),
        ({"pipeline": 2, "data_shard": 4}, 4,
         "parallel: found data_replicate 1 x data_shard 4 = 4 for 2 ranks (of 4, by parallel.pipeline); set "
         "parallel.data_shard=2 or -1, or start 8 ranks (--nproc_per_node)"),
        ({"data_shard": 0}, 4, "parallel.data_shard: found 0, expected -1 or an integer >= 1"),
    ],
)  # fmt: skip
def test_mesh_and_ranks_that_differ(parallel: dict[str, int], size: int, line: str) -> None:
    with pytest.raises(SetupError) as caught:
        compute_mesh_shape(ParallelConfig(**parallel), size)
    assert str(caught.value) == line


def enter(config: FullFinetuneConfig) -> None:
    with start_world(config):
        pass


def test_an_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SetupError) as caught:
        enter(cpu_config())
    assert (
        str(caught.value)
        == "environment: found RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start"
        " with `tune run --nproc_per_node N` or torchrun, or unset RANK and WORLD_SIZE to run"
        " one process"
    )


def test_a_rank_that_is_no_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "2",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "::1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(
        SetupError,
        match=r"environment: found RANK=2 with WORLD_SIZE=2, expected a rank from 0 to 1",
    ):
        enter(cpu_config())
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(
        SetupError, match=r"environment: found RANK=two, expected an integer >= 0; torchrun sets it"
    ):
        enter(cpu_config())


class FakeCuda:
    """A machine with two GPUs, as far as counting goes."""

    count = 2

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count


def test_more_processes_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: FakeCuda())
    launched = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "::1",
    }
    for name, value in (launched | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError) as caught:
        enter(FullFinetuneConfig(device="auto"))
    assert (
        str(caught.value)
        == "device: found 4 processes and 2 GPUs on this machine, expected a GPU for each process;"
        " start with --nproc_per_node 2, or use device=cpu"
    )


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "count", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: FakeCuda())
    with pytest.raises(
        SetupError, match=r"device: found cuda, but torch sees no GPU here; .* or use device=cpu"
    ):
        enter(FullFinetuneConfig(device="cuda"))


def test_collectives_of_two_ranks() -> None:
    def work() -> dict[str, object]:
        with start_world(cpu_config()) as world:
            values = {
                "mesh": list(world.mesh.shape),
                "sum": float(world.all_reduce_sum(torch.tensor(float(world.rank + 1)))),
                "any": [world.any(world.rank == 1), world.any(False)],
                "broadcast": world.broadcast_json({"from": world.rank, "text": "é" * 5}),
                "gather": world.gather_json("x" * (5 * world.rank)),
            }
        assert dist.is_initialized()  # it was there before, so it stays
        return values

    for values in run_ranks(work, 2):
        assert values == {
            "mesh": [1, 1, 2, 1],
            "sum": 3.0,
            "any": [True, False],
            "broadcast": {"from": 0, "text": "ééééé"},
            "gather": ["", "xxxxx"],
        }


def test_places_and_sums_of_ranks_of_pipelines() -> None:
    """Rank = (place in the pipeline, data rank, place in the tensor-parallel group), the last one
    fastest.
    """
    shapes = [{"pipeline": 4}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}]

    def work() -> list[list[object]]:
        found = []
        for parallel in shapes:
            with start_world(cpu_config(**parallel)) as world:
                assert (
                    world.pipeline is not None
                    and world.pipeline.ranks[world.pipeline.rank] == world.rank
                )
                tensor = None if world.tensor is None else world.tensor.rank
                # Of a pipeline of batch 0 or 1 the last rank alone knows a number; ranks that share
                # matrices all do.
                knows = world.pipeline.rank == world.pipeline.size - 1
                known = torch.tensor(10.0 + world.data_rank if knows else 0.0)
                place = [world.pipeline.rank, world.data_rank, tensor]
                found.append(
                    [*place, list(world.pipeline.ranks), float(world.all_reduce_sum(known))]
                )
        return found

    by_rank = run_ranks(work, 4)
    every = [0, 1, 2, 3]
    assert [found[0] for found in by_rank] == [[rank, 0, None, every, 10.0] for rank in every]
    assert [found[1] for found in by_rank] == [
        [0, 0, None, [0, 2], 21.0], [0, 1, None, [1, 3], 21.0],
        [1, 0, None, [0, 2], 21.0], [1, 1, None, [1, 3], 21.0],
    ]  # fmt: skip
    assert [found[2] for found in by_rank] == [
        [0, 0, 0, [0, 2], 10.0], [0, 0, 1, [1, 3], 10.0], [1, 0, 0, [0, 2], 10.0], [1, 0, 1, [1, 3], 10.0],
    ]  # fmt: skip


def test_the_world_of_two_pipelines_of_shared_matrices() -> None:
    """Of every one of 8 ranks of a mesh of 2 x 2 x 1 x 2, without processes."""
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        mesh = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=MESH_DIMS)
        world = build_world(mesh, rank, 8, rank, torch.device("cpu"))
        dist.destroy_process_group()
        stage, copy, column = rank // 4, rank // 2 % 2, rank % 2
        assert (world.data_rank, world.data_ranks) == (copy, 2)
        assert world.tensor is not None and (world.tensor.rank, world.tensor.size) == (column, 2)
        assert world.pipeline is not None and world.pipeline.size == 2
        assert (world.pipeline.rank, world.pipeline.ranks) == (stage, (rank % 4, rank % 4 + 4))

    def _flatten(self, name: str) -> None:
        pass


class OwnError(OutOfMemoryError):
    """A plugin's error, unknown to the other ranks' error module."""


def test_one_ranks_error_is_raised_on_all_and_told_by_rank_0() -> None:
    def work() -> list[object]:
        with start_world(cpu_config()) as world:
            try:
                with world.raise_together():
                    if world.rank == 1:
                        raise OwnError("rank one: no room", "a second fault")
            except UserError as error:
                return [type(error).__name__, error.faults, error.exit_code]
        return []

    first, second = run_ranks(work, 2)
    assert first == ["OutOfMemoryError", ["rank one: no room", "a second fault"], 5]
    assert second == ["OutOfMemoryError", [], 5]


def test_an_error_of_our_own_keeps_its_traceback_and_ends_all_ranks() -> None:
    def work() -> None:
        with start_world(cpu_config()) as world:
            with world.raise_together():
                if world.rank == 1:
                    raise ZeroDivisionError("a bug of ours")

    with pytest.raises(RankFailure, match="ZeroDivisionError: a bug of ours"):
        run_ranks(work, 2, timeout=30)


def fail(case: str) -> None:
    with start_world(cpu_config()) as world:
        if case == "together":
            with world.raise_together():
                if world.rank == 1:
                    raise DataError("rows.jsonl:7: no answer")
        if case == "bug":
            with world.raise_together():
                if world.rank == 1:
                    raise ZeroDivisionError("a bug of ours")
        raise DataError("rows.jsonl:9: every rank says so")


def end_as_a_verb_does(
    case: str, environment: dict[str, str], printed: Path, first_may_end: Any
) -> None:
    """The whole of a process, a fork. The first, whose store the other one asks at its end, ends
    last.
    """
    os.environ.update(environment)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    try:
        code = run_for_exit_code(lambda: fail(case))
    except ZeroDivisionError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if environment["RANK"] == "1":
        first_may_end.set()
    first_may_end.wait(60)
    sys.exit(code)


Launched = dict[str, tuple[list[int], list[str]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Exit codes of two processes with torchrun's environment, and what they print, by case; rank 0
    holds the store.
    """
    folder = tmp_path_factory.mktemp("launched")
    context = multiprocessing.get_context("fork")
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    found = {}
    for case in ("together", "each", "bug"):
        port = {"MASTER_PORT": str(find_free_port())}
        first_may_end = context.Event()
        files = [folder / f"{case}.{rank}" for rank in range(2)]
        ranks = [common | port | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        processes = [
            context.Process(
                target=end_as_a_verb_does, args=(case, environment, file, first_may_end)
            )
            for environment, file in zip(ranks, files, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
        found[case] = (
            [process.exitcode or 0 for process in processes],
            [file.read_text() for file in files],
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("together", ["error: rows.jsonl:7: no answer"]),
        ("each", ["error: rows.jsonl:9: every rank says so"]),
    ],
)
def test_two_processes_print_a_fault_once(launched: Launched, case: str, lines: list[str]) -> None:
    codes, printed = launched[case]
    assert codes == [2, 2]
    assert sorted(line for text in printed for line in text.splitlines()) == lines
    if case == "together":
        assert printed[1] == ""


@pytest.mark.slow
def test_two_processes_do_not_hang_on_a_bug(launched: Launched) -> None:
    codes, printed = launched["bug"]
    assert codes[1] == 1 and "ZeroDivisionError: a bug of ours" in printed[1]
    assert codes[0] == 7 and "Traceback" not in printed[0]


def test_world_is_plain_data() -> None:
    with start_world(cpu_config()) as world:
        assert isinstance(world, World)
        with pytest.raises(AttributeError):
            world.rank = 3  # type: ignore[misc]
