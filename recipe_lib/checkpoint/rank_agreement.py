"""Work around a checkpoint that concerns all ranks: everyone's own part, and what rank 0 decides alone."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from recipe_lib.checkpoint.tensor_files import PlannedTensor, write_tensor_file
from recipe_lib.errors import StorageError
from recipe_lib.files import storage_faults

Result = TypeVar("Result")


class RankGroup(Protocol):
    """The part of `recipe_lib.parallel.World` that checkpoints need."""

    @property
    def rank(self) -> int:
        """This process among all."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(...)` on every rank; a user error on any is raised on all. Collective."""

    def broadcast_json(self, value: Any = None) -> Any:
        """Rank 0's value on every rank. Collective."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank. Collective."""


class SingleRank:
    """A process on its own, on the CPU, without a process group: what a command of the CLI works as."""

    rank, size, device = 0, 1, torch.device("cpu")

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(...)`."""
        return fn(*args, **kwargs)

    def broadcast_json(self, value: Any = None) -> Any:
        """The value."""
        return value

    def gather_json(self, value: Any) -> list[Any]:
        """The value, alone in a list."""
        return [value]


def together(world: RankGroup, action: Callable[[], Result]) -> Result:
    """Runs `action`, which holds no collective, on every rank; returns this rank's result. Collective.

    A user error on any rank, or a disk that refuses (StorageError), is raised on all of them.
    """

    def guarded() -> Result:
        with storage_faults():
            return action()

    return world.agree(guarded)


def decide(world: RankGroup, action: Callable[[], Any]) -> Any:
    """Runs `action` on rank 0 alone and returns its JSON result on every rank; its failure is raised on all."""
    return world.broadcast_json(together(world, action if world.rank == 0 else lambda: None))


def write_gathered(
    path: Path,
    plan: Sequence[PlannedTensor],
    pieces: Iterator[torch.Tensor],
    metadata: dict[str, str],
    world: RankGroup,
) -> None:
    """Rank 0 writes a file of tensors that all ranks gather. Collective.

    pieces: see `write_tensor_file`; each step of it holds the same collectives on all ranks. Every rank goes through
    all steps, even after the disk refused or a step failed, so that none waits for another; then the first fault is
    raised.
    """

    def write() -> None:
        fault: Exception | None = None
        while True:
            try:
                if world.rank == 0 and fault is None:
                    write_tensor_file(path, plan, pieces, metadata)
                for piece in pieces:
                    del piece
                break
            except Exception as error:  # noqa: BLE001 raised once no rank waits for another
                fault = fault or error
        if fault is not None:
            raise fault

    together(world, write)


def check_shared(folder: Path) -> None:
    """StorageError if a folder that rank 0 has made is not there for this rank."""
    if not folder.is_dir():
        raise StorageError(f"{folder}: made by rank 0, not seen here; set output_dir to a disk that all ranks share")
