"""The world a run lives in: its ranks, this rank's device, and the mesh that divides the work."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from recipe_lib import errors
from recipe_lib.config.mesh import DATA_DIMS, MESH_DIMS, mesh_shape
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import UserError
from recipe_lib.ops.gathered import Group
from recipe_lib.parallel.hang_detection.heartbeat import Heartbeat
from recipe_lib.parallel.hang_detection.peers import PeerFailedError
from recipe_lib.parallel.meeting import Meeting, WorldConfig, join_group, meet_ranks, set_group_limits


@dataclass(frozen=True)
class PipelineRank:
    """A rank among the `size` ranks of its pipeline, first to last. ranks: their numbers among all processes."""

    rank: int
    size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """This process among all the processes of a run.

    rank, size: among all processes; local_rank: on this machine. device: where this rank computes.
    mesh: dimensions `pipeline` x `data_replicate` x `data_shard` x `tensor`. data_rank, data_ranks: which of the
    different batches is ours: the ranks of a pipeline, of a tensor-parallel group and those that share sequences have
    the same. tensor: the group that shares matrices; None: each rank has whole ones. context: the group that shares
    sequences, neighbors in the data dimensions; None: each rank has whole ones. pipeline: this rank's place among those
    that the layers are divided among.
    heartbeat: knows what this rank is doing, and ends all ranks if one of them fails or hangs.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    data_rank: int
    data_ranks: int
    tensor: Group | None = None
    context: Group | None = None
    pipeline: PipelineRank | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @property
    def is_main(self) -> bool:
        """True on the one rank that speaks and writes shared files."""
        return self.rank == 0

    @property
    def copies(self) -> int:
        """Ranks of this one's stage that have a gradient of their own for each parameter: those of all batches, and of
        these each that has a part of their sequences."""
        return self.data_ranks * (self.context.size if self.context else 1)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over the different batches, in place, on host or device. A collective.

        Of the ranks of a pipeline each gives its own part too: what the last stage knows is 0 on the others. Those that
        share matrices or sequences have the same, which counts once.
        """
        if self.context is not None and self.context.rank:
            tensor.zero_()
        if self.copies > 1 or self.pipeline is not None:
            dist.all_reduce(tensor, group=None if self.tensor is None else _flat_without_tensor(self.mesh).get_group())
        return tensor

    def sum_over_sequence(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over the ranks that share this one's sequences, in place. A collective of theirs."""
        if self.context is not None:
            dist.all_reduce(tensor, group=_resolve_process_group(self.context.name))
        return tensor

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any; over the host's group. A collective."""
        if self.size == 1:
            return flag
        found = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found[0])

    def broadcast_json(self, value: Any = None) -> Any:
        """Rank 0's `value` (anything JSON holds), on every rank. A collective."""
        if self.size == 1:
            return value
        data = _to_bytes(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        dist.broadcast(length, src=0)
        if not self.is_main:
            data = torch.empty(int(length[0]), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return _from_bytes(data)

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON holds), in rank order, on every rank. A collective."""
        if self.size == 1:
            return [value]
        data = _to_bytes(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]))
        longest = max(int(length[0]) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - data.numel())))
        return [_from_bytes(part[: int(length[0])]) for part, length in zip(parts, lengths, strict=True)]

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """A UserError inside the block on any rank is raised on all of them, with the lowest failing rank's faults.

        Faults are reported once a machine: on every other rank the error carries no lines. Another exception keeps its
        traceback on the rank where it happened; the others end with a PeerFailedError that names that rank. The block
        itself should hold no collective: a rank that failed is missing in it, and the others end by the heartbeat.
        """
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks must hear of it before they wait for this one
            self._raise_agreed(error)
            raise
        self._raise_agreed(None)

    def _raise_agreed(self, mine: Exception | None) -> None:
        """Raises what the ranks agree on; returns if none has failed, or if `mine` is a bug, to be raised as it is."""
        if not self.any(mine is not None):
            return
        gathered = self.gather_json(_describe(mine))
        if mine is not None and not isinstance(mine, UserError):
            return
        rank, (kind, faults) = next((rank, entry) for rank, entry in enumerate(gathered) if entry)
        if not kind:
            raise PeerFailedError(f"rank {rank} failed: {faults[0]}") from mine
        raise getattr(errors, kind)(*(faults if self.local_rank == 0 else [])) from mine

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(...)` on every rank, under `raise_together`."""
        with self.raise_together():
            return fn(*args, **kwargs)


@contextmanager
def start_world(cfg: WorldConfig) -> Iterator[World]:
    """Yield the world of a run that has nothing to do before its ranks are a group. See `meet_ranks`, `make_world`."""
    with meet_ranks(cfg) as ranks:
        yield make_world(cfg, ranks)


def make_world(cfg: WorldConfig, ranks: Meeting) -> World:
    """Return the world of processes that have met, once all have come here.

    Raises SetupError where mesh and ranks differ.
    """
    device = join_group(cfg, ranks)
    shape = tuple(mesh_shape(cfg.parallel, ranks.size).values())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=MESH_DIMS)
    if ranks.store is not None:
        set_group_limits(cfg)
    world = world_of(
        mesh,
        rank=ranks.rank,
        size=ranks.size,
        local_rank=ranks.local_rank,
        device=device,
        context=cfg.parallel.context,
    )
    return replace(world, heartbeat=ranks.heartbeat)


def world_of(mesh: DeviceMesh, rank: int, size: int, local_rank: int, device: torch.device, context: int = 1) -> World:
    """The world of a mesh with the dimensions `MESH_DIMS`, of whose data dimensions each `context` neighbors share
    sequences."""
    sizes = dict(zip(MESH_DIMS, mesh.shape, strict=True))
    mine = dict(zip(MESH_DIMS, mesh.get_coordinate() or (0,) * len(MESH_DIMS), strict=True))
    group, sequence, place = None, None, None
    if sizes["tensor"] > 1:
        group = Group(mesh.get_group("tensor").group_name, sizes["tensor"], mine["tensor"])
        _flat_without_tensor(mesh)  # by all ranks, before one of them needs it
    if sizes["pipeline"] > 1:
        place = PipelineRank(mine["pipeline"], sizes["pipeline"], tuple(mesh["pipeline"].mesh.tolist()))
    data_rank, data_ranks = 0, 1
    for name in DATA_DIMS:
        data_rank, data_ranks = data_rank * sizes[name] + mine[name], data_ranks * sizes[name]
    if context > 1:
        sequence = Group(_sequence_group(mesh, context).group_name, context, data_rank % context)
    others = data_rank // context, data_ranks // context
    return World(rank, size, local_rank, device, mesh, *others, group, sequence, place)


def _sequence_group(mesh: DeviceMesh, context: int) -> dist.ProcessGroup:
    """This rank's group of those that share sequences; every rank makes all of them."""
    stages, tensor = mesh.shape[0], mesh.shape[-1]
    ranks = mesh.mesh.view(stages, -1, context, tensor).movedim(2, -1).reshape(-1, context)
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return own


def _flat_without_tensor(mesh: DeviceMesh) -> DeviceMesh:
    """All dimensions but those that share matrices as one."""
    return mesh[tuple(name for name in MESH_DIMS if name != "tensor")]._flatten("data")


def communicators(parallel: ParallelConfig, size: int) -> list[int]:
    """The sizes of the groups of a rank that communicate on its device: its dimensions of the mesh, those that share
    its sequences, and all ranks.

    With tensor parallel the ranks of its other dimensions together, if these are several, have one too. The ranks of a
    pipeline have none of their own: they exchange by twos, and sum over all ranks.
    """
    shape = mesh_shape(parallel, size)
    groups = [ranks for name, ranks in shape.items() if name != "pipeline" and ranks > 1]
    sequences = [parallel.context] * (parallel.context > 1)
    if parallel.pipeline == 1 and len(groups) < 2:
        return groups + sequences
    several = parallel.pipeline > 1 or all(shape[name] > 1 for name in DATA_DIMS)
    together = parallel.tensor > 1 and several
    return [*groups, *([size // parallel.tensor] if together else []), size, *sequences]


def _describe(error: Exception | None) -> list[Any] | None:
    """[name of its class in recipe_lib.errors, or of the nearest one it derives from; its faults]; name "": a bug."""
    if error is None:
        return None
    if not isinstance(error, UserError):
        return ["", [f"{type(error).__name__}: {error}"]]
    known = (cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return [next(known), error.faults]


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes().decode())
