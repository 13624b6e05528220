"""Find the world a run lives in: its ranks, this rank's device, the mesh that divides the work.

    with start_world(cfg) as world:
        train(cfg, world)

`meet_ranks` and `make_world` are its two halves, for what ranks do before they are a group.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from recipe_lib import errors
from recipe_lib.config.mesh import DATA_DIMS, MESH_DIMS, compute_mesh_shape
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import SetupError, StoppedAndSaved, UserError
from recipe_lib.ops.gathered import Group
from recipe_lib.parallel.heartbeat import LONG_TIMEOUTS, Heartbeat, PeerFailedError


class WorldConfig(Protocol):
    """The part of a config that makes a world."""

    device: str
    parallel: ParallelConfig


@dataclass(frozen=True)
class Meeting:
    """The processes of a run before they are a group: each lives, and none waits for another."""

    rank: int  # among all processes
    size: int  # number of all processes
    local_rank: int  # on this machine
    heartbeat: Heartbeat  # ends all ranks if one of them fails or hangs
    store: dist.Store | None = None  # where they meet; None: the group is there already


@contextmanager
def meet_ranks(cfg: WorldConfig) -> Iterator[Meeting]:
    """Yield the processes that torchrun's environment describes, or one alone that opens no port.

    A process group that is there already is taken over and left as it is (tests and simulations
    make their own). Otherwise `join_group` makes it, of gloo on the host, plus NCCL on GPUs, and it
    ends with the block.

    Raise SetupError: incomplete environment, no such device, fewer GPUs than processes. A
    UserError that several ranks raise on their own is reported by the first of them only. What one
    rank raises alone ends the others too, which do not return from here: see `heartbeat`.
    """
    timeout_seconds = cfg.parallel.heartbeat_timeout_seconds
    if dist.is_initialized():
        rank = dist.get_rank()
        size = dist.get_world_size()
        local_rank = _read_integer("LOCAL_RANK", default=0)
        is_simulated = dist.get_backend() == "fake"
        store = None if is_simulated else dist.distributed_c10d._get_default_store()
        with Heartbeat(store, rank=rank, size=size, timeout=timeout_seconds) as heartbeat:
            yield Meeting(rank, size=size, local_rank=local_rank, heartbeat=heartbeat)
        return
    rank, size, local_rank = _read_environment()
    _check_device_count(_choose_device_type(cfg.device), local_rank)
    store = _connect_store(rank, size, timeout_seconds)
    healthy = size == 1
    try:
        with Heartbeat(store, rank=rank, size=size, timeout=timeout_seconds) as heartbeat:
            yield Meeting(rank, size=size, local_rank=local_rank, heartbeat=heartbeat, store=store)
        healthy = True
    except StoppedAndSaved:
        healthy = True  # all ranks stop at the same step boundary, so that none is missing
        raise
    finally:
        # After an error the group is left to the end of the process when there are other ranks:
        # taking it down would wait for ranks that may never come.
        if healthy and dist.is_initialized():
            dist.destroy_process_group()


def _read_environment() -> tuple[int, int, int]:
    """Return (rank, size, local rank) from torchrun's variables; (0, 1, 0) without them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if os.environ.get(name)]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return 0, 1, 0
    if len(present) < len(names):
        missing = ", ".join(name for name in names if name not in present)
        raise SetupError(
            f"environment: found {', '.join(present)} but not {missing}; start with `tune run"
            " --nproc_per_node N` or torchrun, or unset RANK and WORLD_SIZE to run one process"
        )
    rank, size, local_rank = (_read_integer(name) for name in names[:3])
    if not 0 <= rank < size:
        raise SetupError(
            f"environment: found RANK={rank} with WORLD_SIZE={size}, expected a rank from 0 to"
            f" {size - 1}"
        )
    return rank, size, local_rank


def _read_integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or (None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise SetupError(
            f"environment: found {name}={text}, expected an integer >= 0; torchrun sets it"
        )
    return int(text)


def _choose_device_type(device: str) -> str:
    """Return `cpu` or `cuda` for the config's `device`. Raise SetupError if it is not there."""
    available = torch.get_device_module("cuda").is_available()
    if device == "cuda" and not available:
        raise SetupError(
            "device: found cuda, but torch sees no GPU here; check the driver and that torch is a"
            " CUDA build, or use device=cpu"
        )
    if device == "auto":
        return "cuda" if available else "cpu"
    return device


def _check_device_count(device_type: str, local_rank: int) -> None:
    """Raise SetupError unless there is a GPU for each process of this machine."""
    if device_type == "cpu":
        return
    devices = torch.get_device_module(device_type).device_count()
    processes = max(_read_integer("LOCAL_WORLD_SIZE", default=local_rank + 1), local_rank + 1)
    if processes > devices:
        raise SetupError(
            f"device: found {processes} processes and {devices} GPUs on this machine, expected a"
            f" GPU for each process; start with --nproc_per_node {devices}, or use device=cpu"
        )


def join_group(cfg: WorldConfig, meeting: Meeting) -> torch.device:
    """Join the default process group, unless it is there already; return this rank's device.

    Waits for all ranks.
    """
    device_type = _choose_device_type(cfg.device)
    if meeting.store is not None:
        if device_type == "cuda":
            device_module = torch.get_device_module(device_type)
            device_module.set_device(meeting.local_rank)
            device_module.init()  # else the mesh picks the device once more, and warns
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
        meeting.heartbeat.enter("meeting the other ranks")
        meeting.store.set_timeout(
            _compute_group_timeout(cfg)
        )  # for those that still read their data
        dist.init_process_group(
            backend,
            store=meeting.store,
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=_compute_group_timeout(cfg),
        )
    return (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, meeting.local_rank)
    )


def _compute_group_timeout(cfg: WorldConfig) -> timedelta:
    """Return how long torch lets ranks wait for each other; the heartbeat ends a run before."""
    longest_phase_seconds = LONG_TIMEOUTS * cfg.parallel.heartbeat_timeout_seconds
    return timedelta(seconds=min(2 * longest_phase_seconds, 30 * 86400.0))  # 30 days at most


def _connect_store(rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return the store that the ranks meet at: torchrun's, or rank 0's."""
    if size == 1:
        return dist.HashStore()
    # Not `dist.rendezvous`, which would wait in rank 0 for the other ranks.
    is_held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # torchrun's store is there before any rank; rank 0 may still import before it makes its own.
    with Heartbeat(None, rank=rank, size=size, timeout=timeout_seconds).limit_connecting(
        is_made=is_held_by_torchrun
    ):
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            _read_integer("MASTER_PORT"),
            size,
            is_master=rank == 0 and not is_held_by_torchrun,
            timeout=dist.default_pg_timeout,
            wait_for_workers=False,
            multi_tenant=not is_held_by_torchrun,
        )


@dataclass(frozen=True)
class PipelineRank:
    """A rank's place in its pipeline."""

    rank: int  # among the `size` ranks of the pipeline, first to last
    size: int
    ranks: tuple[int, ...]  # their numbers among all processes


@dataclass(frozen=True)
class World:
    """This process among all the processes of a run."""

    rank: int  # among all processes
    size: int
    local_rank: int  # on this machine
    device: torch.device  # where this rank computes
    mesh: DeviceMesh  # `pipeline` x `data_replicate` x `data_shard` x `tensor`
    # Which of the different batches is ours: the ranks of a pipeline, of a tensor-parallel group
    # and those that share sequences have the same.
    data_rank: int
    data_ranks: int
    # The group that shares matrices; None: each rank has its own.
    tensor: Group | None = None
    # The group that shares sequences, neighbors in the data dimensions; None: each has its own.
    context: Group | None = None
    # This rank's place among those that the layers are divided among.
    pipeline: PipelineRank | None = None
    # Knows what this rank is doing, and ends all ranks if one of them fails or hangs.
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @property
    def is_main(self) -> bool:
        """Return True on the one rank that speaks and writes shared files."""
        return self.rank == 0

    @property
    def copies(self) -> int:
        """Return the number of ranks that have a gradient of their own for each parameter.

        Their gradients are summed. Counted are the ranks of this one's stage: all data ranks, times
        the ranks that share a batch's sequences. Ranks that share matrices count once.
        """
        return self.data_ranks * (self.context.size if self.context else 1)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the different batches, in place, on host or device. A collective.

        Of the ranks of a pipeline each gives its own part too: what the last stage knows is 0 on
        the others. Those that share matrices or sequences have the same, which counts once.
        """
        if self.context is not None and self.context.rank:
            tensor.zero_()
        if self.copies > 1 or self.pipeline is not None:
            dist.all_reduce(
                tensor,
                group=None
                if self.tensor is None
                else _flatten_without_tensor(self.mesh).get_group(),
            )
        return tensor

    def sum_over_sequence(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks that share this one's sequences, in place. A collective."""
        if self.context is not None:
            dist.all_reduce(tensor, group=_resolve_process_group(self.context.name))
        return tensor

    def any(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is true on any. A collective of the host's group."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags[0])

    def broadcast_json(self, value: Any = None) -> Any:
        """Return rank 0's `value` (anything JSON holds) on every rank. A collective."""
        if self.size == 1:
            return value
        texts = [json.dumps(value)]
        dist.broadcast_object_list(texts, src=0)
        return json.loads(texts[0])

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's `value` (anything JSON holds), in rank order. A collective."""
        if self.size == 1:
            return [value]
        texts = [""] * self.size
        dist.all_gather_object(texts, json.dumps(value))
        return [json.loads(text) for text in texts]

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise a UserError of any rank in the block on all ranks, with the lowest failing rank's
        faults.

        Faults are reported once a machine: on every other rank the error carries no lines. Another
        exception keeps its traceback on the rank where it happened; the others end with a
        PeerFailedError that names that rank. The block itself should hold no collective: a rank
        that failed is missing in it, and the others end by the heartbeat.
        """
        try:
            yield
        except Exception as error:
            # Whatever it is, the other ranks must hear of it before they wait for this one.
            self._raise_agreed(error)
            raise
        self._raise_agreed(None)

    def _raise_agreed(self, own_error: Exception | None) -> None:
        """Raise the error of the lowest rank that has failed; return if none has.

        Return also if this rank's own error is a bug: its caller raises that as it is.
        """
        if not self.any(own_error is not None):
            return
        gathered = self.gather_json(_describe(own_error))
        if own_error is not None and not isinstance(own_error, UserError):
            return
        rank = next(rank for rank, entry in enumerate(gathered) if entry)
        kind, faults = gathered[rank]
        if not kind:
            raise PeerFailedError(f"rank {rank} failed: {faults[0]}") from own_error
        error_class = getattr(errors, kind)  # `_describe` gives names of this module alone
        lines = faults if self.local_rank == 0 else []
        raise error_class(*lines) from own_error

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `fn(...)`, called on every rank under `raise_together`."""
        with self.raise_together():
            return fn(*args, **kwargs)


@contextmanager
def start_world(cfg: WorldConfig) -> Iterator[World]:
    """Yield the world of a run that has nothing to do before its ranks are a group.

    See `meet_ranks`, `make_world`.
    """
    with meet_ranks(cfg) as ranks:
        yield make_world(cfg, ranks)


def make_world(cfg: WorldConfig, meeting: Meeting) -> World:
    """Return the world of processes that have met, once all have come here.

    Raise SetupError where mesh and ranks differ.
    """
    device = join_group(cfg, meeting)
    shape = tuple(compute_mesh_shape(cfg.parallel, meeting.size).values())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=MESH_DIMS)
    if meeting.store is not None:
        # The groups of a mesh have a limit of ten minutes, and `init_device_mesh` takes no other.
        for group in list(dist.distributed_c10d._world.pg_names):
            dist.distributed_c10d._set_pg_timeout(_compute_group_timeout(cfg), group)
    return replace(
        build_world(
            mesh,
            rank=meeting.rank,
            size=meeting.size,
            local_rank=meeting.local_rank,
            device=device,
            context=cfg.parallel.context,
        ),
        heartbeat=meeting.heartbeat,
    )


def build_world(
    mesh: DeviceMesh, rank: int, size: int, local_rank: int, device: torch.device, context: int = 1
) -> World:
    """Return the world of a mesh with the dimensions `MESH_DIMS`.

    Each `context` neighbors of its data dimensions share sequences.
    """
    sizes = dict(zip(MESH_DIMS, mesh.shape, strict=True))
    # Only a rank outside of the mesh has no coordinate, and here every rank is in it.
    coordinate = dict(zip(MESH_DIMS, mesh.get_coordinate() or (0,) * len(MESH_DIMS), strict=True))
    tensor_group = None
    if sizes["tensor"] > 1:
        tensor_group = Group(
            mesh.get_group("tensor").group_name, sizes["tensor"], coordinate["tensor"]
        )
        _flatten_without_tensor(mesh)  # by all ranks, before one of them needs it
    pipeline = None
    if sizes["pipeline"] > 1:
        pipeline_ranks = tuple(mesh["pipeline"].mesh.tolist())
        pipeline = PipelineRank(coordinate["pipeline"], sizes["pipeline"], pipeline_ranks)
    data_rank = 0
    for name in DATA_DIMS:
        data_rank = data_rank * sizes[name] + coordinate[name]
    context_group = None
    if context > 1:
        neighbors = mesh.mesh.view(sizes["pipeline"], -1, context, sizes["tensor"]).movedim(2, -1)
        # Every rank makes all of the groups: making one is a collective of all ranks.
        own_group, _ = dist.new_subgroups_by_enumeration(neighbors.reshape(-1, context).tolist())
        context_group = Group(own_group.group_name, context, data_rank % context)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        device=device,
        mesh=mesh,
        data_rank=data_rank // context,
        data_ranks=prod(sizes[name] for name in DATA_DIMS) // context,
        tensor=tensor_group,
        context=context_group,
        pipeline=pipeline,
    )


def _flatten_without_tensor(mesh: DeviceMesh) -> DeviceMesh:
    """Return all dimensions but that of tensor parallel as one."""
    return mesh[tuple(name for name in MESH_DIMS if name != "tensor")]._flatten("data")


def count_communicator_ranks(parallel: ParallelConfig, size: int) -> list[int]:
    """Return the sizes of the groups of a rank that communicate on its device.

    These are its dimensions of the mesh, the ranks that share its sequences, and all ranks. With
    tensor parallel the ranks of its other dimensions together, if these are several, have one too.
    The ranks of a pipeline have none of their own: they exchange by twos, and sum over all ranks.
    Planning counts the memory that NCCL takes for each.
    """
    shape = compute_mesh_shape(parallel, size)
    group_sizes = [ranks for name, ranks in shape.items() if name != "pipeline" and ranks > 1]
    context_sizes = [parallel.context] if parallel.context > 1 else []
    if parallel.pipeline == 1 and len(group_sizes) < 2:
        # The one dimension has all ranks, and their group.
        return group_sizes + context_sizes
    # Of several dimensions `_flatten_without_tensor` has other ranks than each of them.
    has_several_dims = parallel.pipeline > 1 or all(shape[name] > 1 for name in DATA_DIMS)
    if parallel.tensor > 1 and has_several_dims:
        group_sizes.append(size // parallel.tensor)
    return [*group_sizes, size, *context_sizes]


def _describe(error: Exception | None) -> list[Any] | None:
    """Return an error as JSON: [name of its class in recipe_lib.errors, its faults].

    The name is that of the nearest class it derives from; "": a bug.
    """
    if error is None:
        return None
    if not isinstance(error, UserError):
        return ["", [f"{type(error).__name__}: {error}"]]
    known = (
        cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls
    )
    return [next(known), error.faults]


def derive_seed(root: int, *names: str | int) -> int:
    """Return a seed in [0, 2^63) for a named stream, as in `derive_seed(42, "dropout", rank)`.

    Streams of different names are unrelated, and none changes when another is added: SHA-256 of
    root and names.
    """
    text = "\0".join(str(part) for part in (root, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seeds(seed: int, world: World, *, alike: bool = False) -> None:
    """Seed the generators of Python and torch (host and device) with this rank's dropout stream.

    No two ranks have the same, those that share matrices neither: each drops of what it alone has,
    its part of the tokens before a column-parallel matrix, its part of the channels before a
    row-parallel one. Weights and data order draw from streams of their own, derived by name; they
    do not touch these generators. alike: the ranks that share matrices have the same stream,
    because all of them have all tokens (external models).
    """
    stream = derive_seed(seed, "dropout", world.data_rank if alike else world.rank)
    random.seed(stream)
    torch.manual_seed(stream)
