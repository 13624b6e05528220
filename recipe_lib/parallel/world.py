"""Find the world of a run: its ranks, this rank's device, the mesh that divides the work.

A recipe trains in the block of `start_world(cfg)`. Its two halves are `meet_ranks`, which finds the
processes, and `make_world`, which makes them a process group; in between a run reads its data. The
mesh is pipeline x data_replicate x data_shard x tensor. Data ranks are the ranks, or groups of
ranks, that have batches of their own. The heartbeat ends all ranks when one fails or hangs.
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

    device: str  # `auto`, `cpu` or `cuda`
    parallel: ParallelConfig


@dataclass(frozen=True)
class Meeting:
    """The processes of a run before they are a group: all run, and none waits for another."""

    rank: int  # of this process, among all
    size: int  # number of all processes
    local_rank: int  # of this process, on its machine
    heartbeat: Heartbeat  # ends all ranks if one of them fails or hangs
    store: dist.Store | None = None  # the rendezvous store; None: the group is there already


@contextmanager
def meet_ranks(cfg: WorldConfig) -> Iterator[Meeting]:
    """Yield the processes that torchrun's environment describes, or one alone that opens no port.

    A process group that is there already is taken over and left as it is (tests and simulations
    make their own). Otherwise `join_group` makes it, of gloo on the host, plus NCCL on GPUs, and it
    ends with the block.

    Raise SetupError for an incomplete environment, a device that is not there, and fewer GPUs than
    processes on this machine. A UserError that several ranks raise in the block is reported by the
    first of them only. What one rank raises alone ends the processes of the others by the
    heartbeat.
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
    can_destroy_group = size == 1
    try:
        with Heartbeat(store, rank=rank, size=size, timeout=timeout_seconds) as heartbeat:
            yield Meeting(rank, size=size, local_rank=local_rank, heartbeat=heartbeat, store=store)
        can_destroy_group = True
    except StoppedAndSaved:
        can_destroy_group = True  # all ranks stop at the same step boundary: none is missing
        raise
    finally:
        # After an error the group is left to the end of the process when there are other ranks:
        # taking it down would wait for ranks that may never come.
        if can_destroy_group and dist.is_initialized():
            dist.destroy_process_group()


def _read_environment() -> tuple[int, int, int]:
    """Return (rank, size, local rank) from torchrun's variables; (0, 1, 0) without them.

    Raise SetupError if some of them are missing or no integers, and for a rank that is not below
    the size.
    """
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
    """Return an environment variable as an integer; None as default: it has to be set."""
    text = os.environ.get(name) or (None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise SetupError(
            f"environment: found {name}={text}, expected an integer >= 0; torchrun sets it"
        )
    return int(text)


def _choose_device_type(device: str) -> str:
    """Return `cpu` or `cuda` for the config's `device`; `auto` is a GPU where there is one.

    Raise SetupError for `cuda` where torch sees no GPU.
    """
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

    A collective: joining waits for all ranks.
    """
    device_type = _choose_device_type(cfg.device)
    if meeting.store is not None:
        if device_type == "cuda":
            device_module = torch.get_device_module(device_type)
            device_module.set_device(meeting.local_rank)
            device_module.init()  # else the mesh picks the device once more, and warns
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
        meeting.heartbeat.enter("meeting the other ranks")
        # torch's own limit would end ranks that wait for one that still reads its data.
        meeting.store.set_timeout(_compute_group_timeout(cfg))
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
    """Return how long torch lets ranks wait for each other.

    It is twice the longest time the heartbeat allows, so that the heartbeat ends a run first.
    """
    longest_phase_seconds = LONG_TIMEOUTS * cfg.parallel.heartbeat_timeout_seconds
    return timedelta(seconds=min(2 * longest_phase_seconds, 30 * 86400.0))  # 30 days at most


def _connect_store(rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return the rendezvous store of the ranks: torchrun's, or rank 0's.

    timeout_seconds: `parallel.heartbeat_timeout_seconds`. A connection that takes too long ends the
    process.
    """
    if size == 1:
        return dist.HashStore()
    # Not `dist.rendezvous`, which would wait in rank 0 for the other ranks.
    is_held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # torchrun's store is there before any rank; rank 0 may still import before it makes its own.
    # A heartbeat without a store watches nothing; it writes the line of a connection that failed.
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
    """The position of this rank in its pipeline."""

    rank: int  # among the ranks of the pipeline, first to last
    size: int  # number of ranks of the pipeline
    ranks: tuple[int, ...]  # their ranks among all processes, in the order of the pipeline


@dataclass(frozen=True)
class World:
    """This process among all the processes of a run."""

    rank: int  # among all processes
    size: int  # number of all processes
    local_rank: int  # on this machine
    device: torch.device  # where this rank computes
    mesh: DeviceMesh  # `pipeline` x `data_replicate` x `data_shard` x `tensor`
    # Index of this rank's batches among the different ones. The ranks of a pipeline, of a
    # tensor-parallel group and those that share sequences have the same.
    data_rank: int
    data_ranks: int  # number of different batches at a time
    # The tensor-parallel group, whose ranks share matrices; None: a rank has all of them.
    tensor: Group | None = None
    # The context-parallel group, whose ranks share sequences, neighbors in the data dimensions;
    # None: a rank has whole sequences.
    context: Group | None = None
    # This rank's position in its pipeline; None: a rank has all layers.
    pipeline: PipelineRank | None = None
    # Is told what this rank is doing, and ends all ranks if one of them fails or hangs.
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @property
    def is_main(self) -> bool:
        """Return True on the one rank that logs and writes shared files."""
        return self.rank == 0

    @property
    def copies(self) -> int:
        """Return the number of ranks whose gradients are summed to those of one parameter.

        They are the data ranks, times the ranks that share a batch's sequences. Only ranks with the
        layers of this one are counted, and a tensor-parallel group counts once.
        """
        return self.data_ranks * (self.context.size if self.context else 1)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the different batches, in place, on host or device. A collective.

        The ranks of a pipeline are summed too: a value that the last stage alone has must be 0 on
        the others. Ranks that share matrices or sequences have the same value, which counts once.
        """
        if self.context is not None and self.context.rank:
            tensor.zero_()  # the first rank of the group gives the value
        # Across the tensor dimension nothing is summed, so that its ranks count once.
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
        """Return True on every rank if `flag` is true on any. A collective on the host."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags[0])

    def broadcast_json(self, value: Any = None) -> Any:
        """Return rank 0's `value` (anything JSON holds) on every rank. A collective.

        The value of other ranks is not read. With several ranks, keys of dicts come back as texts.
        """
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
        """Raise a UserError of any rank in the block on all ranks. A collective at the block's end.

        The error has the faults of the lowest rank that failed. They are reported once a machine:
        on ranks with another `local_rank` than 0 it has no lines. Another exception keeps its
        traceback on the rank where it happened; the others raise a PeerFailedError that names that
        rank. The block itself should hold no collective: a rank that failed is missing in it, and
        the others end by the heartbeat.
        """
        try:
            yield
        except Exception as error:
            # Any exception: the other ranks must hear of it before they wait for this one.
            self._raise_agreed(error)
            raise
        self._raise_agreed(None)

    def _raise_agreed(self, own_error: Exception | None) -> None:
        """Raise the error of the lowest rank that has failed; return if none has.

        Return also if this rank's own error is a bug, which is no UserError: the caller raises it.
        """
        if not self.any(own_error is not None):
            return
        descriptions = self.gather_json(_describe(own_error))
        if own_error is not None and not isinstance(own_error, UserError):
            return
        rank = next(rank for rank, description in enumerate(descriptions) if description)
        class_name, faults = descriptions[rank]
        if not class_name:
            raise PeerFailedError(f"rank {rank} failed: {faults[0]}") from own_error
        error_class = getattr(errors, class_name)  # `_describe` gives names of `errors` only
        lines = faults if self.local_rank == 0 else []
        raise error_class(*lines) from own_error

    def agree(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `fn(...)`, called on every rank under `raise_together`."""
        with self.raise_together():
            return fn(*args, **kwargs)


@contextmanager
def start_world(cfg: WorldConfig) -> Iterator[World]:
    """Yield the world of a run that has nothing to do before its ranks are a group.

    Raise SetupError as `meet_ranks` and `make_world` do.
    """
    with meet_ranks(cfg) as ranks:
        yield make_world(cfg, ranks)


def make_world(cfg: WorldConfig, meeting: Meeting) -> World:
    """Make the processes a group, and return their world. A collective.

    Raise SetupError for a mesh of more or fewer ranks than there are, and for a device that is not
    there.
    """
    device = join_group(cfg, meeting)
    shape = tuple(compute_mesh_shape(cfg.parallel, meeting.size).values())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=MESH_DIMS)
    if meeting.store is not None:
        # The groups of a mesh have a timeout of ten minutes, and `init_device_mesh` takes no other.
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
    """Return the world of a mesh with the dimensions `MESH_DIMS`. A collective.

    context: `parallel.context`, the number of neighbors in the data dimensions that share
    sequences.
    """
    sizes = dict(zip(MESH_DIMS, mesh.shape, strict=True))
    # Only a rank outside of the mesh has no coordinate, and here every rank is in it.
    coordinate = dict(zip(MESH_DIMS, mesh.get_coordinate() or (0,) * len(MESH_DIMS), strict=True))
    tensor_group = None
    if sizes["tensor"] > 1:
        tensor_group = Group(
            mesh.get_group("tensor").group_name, sizes["tensor"], coordinate["tensor"]
        )
        # Makes a process group for `all_reduce_sum`: here, since all ranks have to make it.
        _flatten_without_tensor(mesh)
    pipeline = None
    if sizes["pipeline"] > 1:
        pipeline_ranks = tuple(mesh["pipeline"].mesh.tolist())
        pipeline = PipelineRank(coordinate["pipeline"], sizes["pipeline"], pipeline_ranks)
    data_rank = 0
    for name in DATA_DIMS:
        data_rank = data_rank * sizes[name] + coordinate[name]
    context_group = None
    if context > 1:
        # [pipeline, data / context, tensor, context]: the last dimension is the ranks of a group.
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
    return mesh[tuple(name for name in MESH_DIMS if name != "tensor")]._flatten("data")


def count_communicator_ranks(parallel: ParallelConfig, size: int) -> list[int]:
    """Return the sizes of a rank's process groups that communicate on its device.

    The planner counts the memory that NCCL takes for each. They are the dimensions of the mesh, the
    ranks that share sequences, and all ranks. With tensor parallelism, the other dimensions
    together are one too, if there are several. The ranks of a pipeline have no group of their own:
    they exchange tensors by twos, and sum over all ranks. size: number of all ranks.
    """
    shape = compute_mesh_shape(parallel, size)
    group_sizes = [ranks for name, ranks in shape.items() if name != "pipeline" and ranks > 1]
    context_sizes = [parallel.context] if parallel.context > 1 else []
    if parallel.pipeline == 1 and len(group_sizes) < 2:
        # The only dimension has all ranks, and shares their group.
        return group_sizes + context_sizes
    # `_flatten_without_tensor` makes a group only of several dimensions.
    has_several_dims = parallel.pipeline > 1 or all(shape[name] > 1 for name in DATA_DIMS)
    if parallel.tensor > 1 and has_several_dims:
        group_sizes.append(size // parallel.tensor)
    return [*group_sizes, size, *context_sizes]


def _describe(error: Exception | None) -> list[Any] | None:
    """Return an error as JSON: [name of a class in recipe_lib.errors, its lines]; None for None.

    The class is the error's, or the nearest one that it derives from. The name is "" for a bug,
    that is for another exception than a UserError.
    """
    if error is None:
        return None
    if not isinstance(error, UserError):
        return ["", [f"{type(error).__name__}: {error}"]]
    class_names = (
        cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls
    )
    return [next(class_names), error.faults]


def derive_seed(root: int, *names: str | int) -> int:
    """Return a seed in [0, 2^63) for a named stream, as in `derive_seed(42, "dropout", rank)`.

    It is a part of the SHA-256 of root and names. So streams of different names are unrelated, and
    none changes when another is added.
    """
    text = "\0".join(str(part) for part in (root, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seeds(seed: int, world: World, *, alike: bool = False) -> None:
    """Seed the generators of Python and torch (host and device) with this rank's dropout stream.

    Each rank has a stream of its own. So have the ranks of a tensor-parallel group: dropout before
    a column-parallel matrix is of a rank's part of the tokens, before a row-parallel one of its
    part of the channels. Weights and data order draw from streams of their own, derived by name;
    they do not touch these generators. alike: True for ranks with the same batch to have the same
    stream, because each of them has all of its tokens (external models); but stages of a pipeline
    have layers of their own, and so streams of their own.
    """
    stage = () if world.pipeline is None else (world.pipeline.rank,)
    stream = derive_seed(seed, "dropout", *((world.data_rank, *stage) if alike else (world.rank,)))
    random.seed(stream)
    torch.manual_seed(stream)
