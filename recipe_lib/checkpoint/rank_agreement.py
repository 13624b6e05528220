"""Work around a checkpoint that concerns all ranks: everyone's own part, and what rank 0 decides alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

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


def check_shared(folder: Path) -> None:
    """StorageError if a folder that rank 0 has made is not there for this rank."""
    if not folder.is_dir():
        raise StorageError(f"{folder}: made by rank 0, not seen here; set output_dir to a disk that all ranks share")
