"""Run checkpoint work on several ranks: act together, gather, and write from rank 0.

`run_on_all_ranks` and `run_on_rank_0` raise a fault of any rank on all of them, so that none waits
for another forever. `find_holders` says which ranks have which parameters: all ranks all, or, in a
pipeline, each rank those of its stages. Ranks with the same parameters are a group; its first rank
(leader) speaks for it. "Collective": all ranks must call the function.
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
        """Return the index of this process among all."""

    @property
    def size(self) -> int:
        """Return the number of processes."""

    @property
    def device(self) -> torch.device:
        """Return the device on which this rank computes."""

    @property
    def pipeline(self) -> Any:
        """Return this rank's place in a pipeline; None: all ranks have the whole model."""

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `fn(...)` on every rank; a user's error on any is raised on all. Collective."""

    def broadcast_json(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank. Collective."""

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on every rank. Collective."""


class SingleRank:
    """A process on its own, on the CPU, without a process group, as commands of the CLI are."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    pipeline = None

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def broadcast_json(self, value: Any = None) -> Any:
        return value

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


def run_on_all_ranks(world: RankGroup, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank and return this rank's result. Collective.

    `action` must hold no collective: a rank that fails in it would leave the others waiting. An
    error for the user on any rank, such as StorageError, is raised on all of them.
    """
    return world.agree(report_storage_faults()(action))


def run_on_rank_0(world: RankGroup, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 alone and return its JSON result on every rank. Collective.

    Its failure is raised on all ranks.
    """
    return world.broadcast_json(
        run_on_all_ranks(world, action if world.rank == 0 else lambda: None)
    )


def write_gathered(
    path: Path,
    plan: Sequence[PlannedTensor],
    *,
    pieces: Iterator[torch.Tensor],
    metadata: dict[str, str],
    world: RankGroup,
) -> None:
    """Write a file of tensors on rank 0, which all ranks gather. Collective.

    plan, pieces, metadata: as for `write_tensor_file`; each step of `pieces` holds the same
    collectives on all ranks. The first fault, of the disk or of a step, is raised when all steps
    are done.
    """

    def write() -> None:
        fault: Exception | None = None
        # Every rank goes through all steps, even after one has failed: each holds a collective in
        # which the other ranks wait.
        while True:
            try:
                if world.rank == 0 and fault is None:
                    write_tensor_file(path, plan, pieces=pieces, metadata=metadata)
                for piece in pieces:
                    del piece  # a gathered tensor must be gone before the next one is gathered
                break
            except Exception as error:  # noqa: BLE001 raised once no rank waits for another
                fault = fault or error
        if fault is not None:
            raise fault

    run_on_all_ranks(world, write)


def check_shared(folder: Path) -> None:
    """Raise StorageError if this rank does not see a folder that rank 0 has made."""
    if not folder.is_dir():
        raise StorageError(
            f"{folder}: made by rank 0, not seen here; set output_dir to a disk that all ranks"
            " share"
        )


# Kinds of a model's tensors: trained and frozen parameters, persistent buffers.
TRAINED = "trained"
FROZEN = "frozen"
BUFFER = "buffer"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # the number of a layer in a name
Value = TypeVar("Value")


@dataclass(frozen=True)
class Holders:
    """The ranks that have each parameter and buffer of the whole model."""

    # Index of this process.
    rank: int
    # For every rank, the first rank of its group.
    leaders: tuple[int, ...]
    # Name, in the order of the whole model -> the first rank that has it. A parameter of two
    # groups, as a tied embedding, so belongs to the earlier one.
    first_ranks: dict[str, int]
    # Name -> TRAINED, FROZEN or BUFFER.
    kinds: dict[str, str]

    @property
    def leader(self) -> int:
        return self.leaders[self.rank]

    @property
    def is_divided(self) -> bool:
        return len(set(self.leaders)) > 1

    def is_ours(self, name: str) -> bool:
        """Return True if a parameter or buffer belongs to this rank's group, which writes it."""
        return self.first_ranks[name] == self.leader

    def list_saved_names(self) -> list[str]:
        """Return the names of the model's tensors in a saved state.

        They are the trained parameters and the buffers. If no parameter is trained, they are all
        parameters and buffers: such a model is loaded to be read, not to be trained.
        """
        saved_kinds = {TRAINED if TRAINED in self.kinds.values() else FROZEN, BUFFER}
        return [name for name, kind in self.kinds.items() if kind in saved_kinds]

    def is_counted_here(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if this rank counts its part of a tensor, in a sum over ranks.

        Of a part that several ranks hold, the first one counts it.

        name: of the parameter. tensor: the parameter, or a state of its optimizer.
        """
        if not self.is_ours(name):
            return False
        if not isinstance(tensor, DTensor):
            return self.rank == self.leader
        # (this rank's index in a dimension of the mesh, placement in that dimension).
        coordinates = zip(tensor.device_mesh.get_coordinate() or [], tensor.placements, strict=True)
        return not any(placement.is_replicate() and index for index, placement in coordinates)

    def gather(self, value: Value, world: RankGroup) -> list[Value]:
        """Return the value of each group, first to last, as its leader has it. Collective.

        value: anything that JSON holds.
        """
        if not self.is_divided:
            return [value]
        values = world.gather_json(value if self.rank == self.leader else None)
        return [values[leader] for leader in sorted(set(self.leaders))]

    def stream_to_rank_0(
        self, name: str, pieces: Callable[[], Iterator[torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """Yield on rank 0 the pieces of a parameter, on the other ranks nothing. Collective.

        Pieces of a group without rank 0 come as their bytes, uint8 `[n]`, a few MiB at a time,
        through host memory.

        pieces: called on all ranks of the group that has the parameter, where it may hold
        collectives.
        """
        source = self.first_ranks[name]
        if self.leader == source:
            for piece in pieces():
                if source == 0:
                    yield piece
                elif self.rank == source:
                    _send(piece)
                del piece  # gone before the next one is gathered
            if source != 0 and self.rank == source:
                dist.send(torch.tensor([0]), dst=0)  # the size that ends `_receive`
        elif self.rank == 0:
            yield from _receive(source)


def find_holders(model: nn.Module, world: RankGroup) -> Holders:
    """Return which ranks have which parameters and buffers. Collective in a pipeline."""
    kinds_here = {
        name: TRAINED if parameter.requires_grad else FROZEN
        for name, parameter in model.named_parameters()
    }
    kinds_here |= dict.fromkeys(list_persistent_buffers(model), BUFFER)
    part_here = list(kinds_here.items())  # this rank's part of the model: [(name, kind)]
    leaders = (0,) * world.size
    if world.pipeline is not None:
        # Hashes first: the lists of names are long, and few ranks have different ones.
        digests = world.gather_json(hashlib.sha256(json.dumps(part_here).encode()).hexdigest())
        leaders = tuple(digests.index(digest) for digest in digests)  # the first with the same list
    if len(set(leaders)) == 1:
        return Holders(
            world.rank, leaders, first_ranks=dict.fromkeys(kinds_here, 0), kinds=kinds_here
        )
    parts = world.gather_json(part_here if world.rank == leaders[world.rank] else None)
    # Name -> (key to sort by, first rank that has it, kind).
    holders_by_name: dict[str, tuple[tuple[int, int, int], int, str]] = {}
    for rank, part in enumerate(parts):
        sort_keys = _find_sort_keys([name for name, _ in part or []])
        for (name, kind), sort_key in zip(part or [], sort_keys, strict=True):
            holders_by_name.setdefault(name, (sort_key, rank, kind))
    in_order = sorted(holders_by_name.items(), key=lambda item: item[1][0])
    return Holders(
        rank=world.rank,
        leaders=leaders,
        first_ranks={name: rank for name, (_, rank, _) in in_order},
        kinds={name: kind for name, (_, _, kind) in in_order},
    )


def _find_sort_keys(names: list[str]) -> list[tuple[int, int, int]]:
    """Return keys that sort the names of a group's tensors into the order of the whole model.

    A key is (0 before, 1 in, 2 after the layers; number of the layer; index in `names`).
    """
    sort_keys: list[tuple[int, int, int]] = []
    for index, name in enumerate(names):
        layer = _LAYER.search(name)
        is_after_layers = bool(sort_keys) and sort_keys[-1][0] > 0
        outer_key = (2 if is_after_layers else 0, 0, index)
        sort_keys.append((1, int(layer[1]), index) if layer else outer_key)
    return sort_keys


# Send a tensor's bytes to rank 0: for each chunk its size, then the bytes.
def _send(piece: torch.Tensor) -> None:
    for chunk in copy_to_host(piece):
        dist.send(torch.tensor([len(chunk)]), dst=0)
        dist.send(torch.frombuffer(chunk, dtype=torch.uint8), dst=0)


def _receive(source: int) -> Iterator[torch.Tensor]:
    """Yield the chunks of bytes, uint8 `[n]`, that a rank sends, until it sends a size of 0."""
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, src=source)
        if not int(size[0]):
            return
        chunk = torch.empty(int(size[0]), dtype=torch.uint8)
        dist.recv(chunk, src=source)
        yield chunk
        del chunk  # or it would be held while the next one is received
