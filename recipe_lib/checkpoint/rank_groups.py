"""Work around a checkpoint that concerns all ranks: everyone's own part, and what rank 0 decides
alone.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.checkpoint.safetensors_files import PlannedTensor, copy_to_host, write_tensor_file
from recipe_lib.errors import StorageError
from recipe_lib.files import report_storage_faults
from recipe_lib.models.meta_init import list_persistent_buffers

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
    """A process on its own, on the CPU, without a process group: what a command of the CLI works
    as.
    """

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


def run_on_all_ranks(world: RankGroup, action: Callable[[], Result]) -> Result:
    """Runs `action`, which holds no collective, on every rank; returns this rank's result.
    Collective.

    A user error on any rank, or a disk that refuses (StorageError), is raised on all of them.
    """

    def guarded() -> Result:
        with report_storage_faults():
            return action()

    return world.agree(guarded)


def run_on_rank_0(world: RankGroup, action: Callable[[], Any]) -> Any:
    """Runs `action` on rank 0 alone and returns its JSON result on every rank; its failure is
    raised on all.
    """
    return world.broadcast_json(
        run_on_all_ranks(world, action if world.rank == 0 else lambda: None)
    )


def write_gathered(
    path: Path,
    plan: Sequence[PlannedTensor],
    pieces: Iterator[torch.Tensor],
    metadata: dict[str, str],
    world: RankGroup,
) -> None:
    """Rank 0 writes a file of tensors that all ranks gather. Collective.

    pieces: see `write_tensor_file`; each step of it holds the same collectives on all ranks. Every
    rank goes through all steps, even after the disk refused or a step failed, so that none waits
    for another; then the first fault is raised.
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

    run_on_all_ranks(world, write)


def check_shared(folder: Path) -> None:
    """StorageError if a folder that rank 0 has made is not there for this rank."""
    if not folder.is_dir():
        raise StorageError(
            f"{folder}: made by rank 0, not seen here; set output_dir to a disk that all ranks"
            " share"
        )


# Which ranks have which parameters: all of them have all, or, in a pipeline, each has those of its
# stages.
#
# The ranks with the same parameters are a group. What a group has is counted, gathered and written
# by that group, and where one rank speaks for it, by its first. A parameter of two groups, a tied
# embedding, is the earlier one's affair.


TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Holders:
    """Where the parameters of the whole model are.

    rank: this one. leaders: of every rank, the first of its group. first: name, in the whole
    model's order -> the first rank that has it. kinds: name -> trained, frozen or buffer.
    """

    rank: int
    leaders: tuple[int, ...]
    first: dict[str, int]
    kinds: dict[str, str]

    @property
    def own(self) -> int:
        """The first rank of this one's group."""
        return self.leaders[self.rank]

    @property
    def is_divided(self) -> bool:
        """Whether there are several groups."""
        return len(set(self.leaders)) > 1

    def is_ours(self, name: str) -> bool:
        """Whether a parameter is for this rank's group to count and to write."""
        return self.first[name] == self.own

    def list_saved_names(self) -> list[str]:
        """What a state holds of the model: the trained parameters, or all if none is, and the
        buffers.
        """
        kept = {TRAINED if TRAINED in self.kinds.values() else FROZEN, BUFFER}
        return [name for name, kind in self.kinds.items() if kind in kept]

    def is_counted_here(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether this rank's part of a parameter, or of a state of it, is to be counted.

        What several ranks hold counts on one of them.
        """
        if not self.is_ours(name):
            return False
        if not isinstance(tensor, DTensor):
            return self.rank == self.own
        coordinates = zip(tensor.device_mesh.get_coordinate() or [], tensor.placements, strict=True)
        return not any(place.is_replicate() and at for at, place in coordinates)

    def gather(self, value: Value, world: RankGroup) -> list[Value]:
        """The value (anything JSON holds) of each group, first to last, as its first rank has it.
        Collective.
        """
        if not self.is_divided:
            return [value]
        found = world.gather_json(value if self.rank == self.own else None)
        return [found[leader] for leader in sorted(set(self.leaders))]

    def stream_to_rank_0(
        self, name: str, pieces: Callable[[], Iterator[torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """On rank 0 the pieces that the ranks with the parameter `name` make, on the others
        nothing. Collective.

        pieces: called on all ranks of that group, where it may hold collectives; each piece is gone
        before the next is made. What another group makes comes to rank 0 as bytes, a few MiB at a
        time, through the host.
        """
        source = self.first[name]
        if self.own == source:
            for piece in pieces():
                if source == 0:
                    yield piece
                elif self.rank == source:
                    _send(piece)
                del piece
            if source != 0 and self.rank == source:
                dist.send(torch.tensor([0]), dst=0)
        elif self.rank == 0:
            yield from _receive(source)


def find_holders(model: nn.Module, world: RankGroup) -> Holders:
    """Who has what of the models of all ranks. Collective in a pipeline; elsewhere all have all."""
    own = [
        (name, TRAINED if parameter.requires_grad else FROZEN)
        for name, parameter in model.named_parameters()
    ] + [(name, BUFFER) for name in list_persistent_buffers(model)]
    leaders = (0,) * world.size
    if getattr(world, "pipeline", None) is not None:
        digests = world.gather_json(hashlib.sha256(json.dumps(own).encode()).hexdigest())
        leaders = tuple(digests.index(digest) for digest in digests)
    if len(set(leaders)) == 1:
        return Holders(world.rank, leaders, dict.fromkeys((name for name, _ in own), 0), dict(own))
    parts = world.gather_json(own if world.rank == leaders[world.rank] else None)
    first: dict[str, int] = {}
    kinds: dict[str, str] = {}
    places: dict[str, tuple[int, int, int]] = {}
    for rank, part in enumerate(parts):
        for (name, kind), place in zip(
            part or [], _find_sort_keys([name for name, _ in part or []]), strict=True
        ):
            if name not in first:
                first[name], kinds[name], places[name] = rank, kind, place
    order = sorted(first, key=lambda name: places[name])
    return Holders(
        world.rank,
        leaders,
        {name: first[name] for name in order},
        {name: kinds[name] for name in order},
    )


def _find_sort_keys(names: list[str]) -> list[tuple[int, int, int]]:
    """What the names of a part of a model are sorted by, for the whole model's order: before, in,
    after the layers.
    """
    places: list[tuple[int, int, int]] = []
    for at, name in enumerate(names):
        layer = _LAYER.search(name)
        if layer:
            places.append((1, int(layer[1]), at))
        else:
            after = bool(places) and places[-1][0] > 0
            places.append((2 if after else 0, 0, at))
    return places


def _send(piece: torch.Tensor) -> None:
    for chunk in copy_to_host(piece):
        dist.send(torch.tensor([len(chunk)]), dst=0)
        dist.send(torch.frombuffer(chunk, dtype=torch.uint8), dst=0)


def _receive(source: int) -> Iterator[torch.Tensor]:
    """The bytes that another rank sends, as they come, up to an empty piece."""
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, src=source)
        if not int(size[0]):
            return
        chunk = torch.empty(int(size[0]), dtype=torch.uint8)
        dist.recv(chunk, src=source)
        yield chunk
        del chunk
