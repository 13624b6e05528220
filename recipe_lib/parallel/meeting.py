"""The processes of a run before they are a process group: what torchrun says of them, where they meet, how they end."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import SetupError, StoppedAndSaved, UserError
from recipe_lib.parallel.hang_detection import beats
from recipe_lib.parallel.hang_detection.heartbeat import Heartbeat, start_heartbeat
from recipe_lib.parallel.hang_detection.peers import node_name

_STORE_SECONDS = 5
_PRINTING_SECONDS = 0.5
_LONGEST_LIMIT = 30 * 86400.0  # seconds


class WorldConfig(Protocol):
    """What a config needs for a world."""

    device: str
    parallel: ParallelConfig


@dataclass(frozen=True)
class Meeting:
    """The processes of a run before they are a group: each says that it lives, and none waits for another.

    rank, size, local_rank, heartbeat: see `World`. store: where they meet; None: the group is there already.
    """

    rank: int
    size: int
    local_rank: int
    heartbeat: Heartbeat
    store: dist.Store | None = None


@contextmanager
def meet_ranks(cfg: WorldConfig) -> Iterator[Meeting]:
    """Yield the processes that torchrun's environment describes, or one alone that opens no port.

    A process group that is there already is taken over and left as it is (tests and simulations make their own).
    Otherwise `join_group` makes it, of gloo on the host, plus NCCL on GPUs, and it ends with the block. After an error
    it is left to the end of the process when there are other ranks: taking it down would wait for ranks that may never
    come.

    Raises SetupError: incomplete environment, no such device, fewer GPUs than processes. A UserError that several ranks
    raise on their own is reported by the first of them only. What one rank raises alone ends the others too, which do
    not return from here: see `heartbeat`.
    """
    timeout = cfg.parallel.heartbeat_timeout_seconds
    if dist.is_initialized():
        rank = dist.get_rank()
        size = dist.get_world_size()
        local_rank = _read_integer("LOCAL_RANK", default=0)
        is_simulated = dist.get_backend() == "fake"
        store = dist.distributed_c10d._get_default_store()
        with Heartbeat() if is_simulated else start_heartbeat(store, rank, size, timeout) as heartbeat:
            yield Meeting(rank, size, local_rank, heartbeat)
        return
    rank, size, local_rank = _read_environment()
    _check_device_count(_device_type(cfg.device), local_rank)
    store = _connect_store(rank, size, timeout)
    healthy = size == 1
    try:
        with start_heartbeat(store, rank, size, timeout) as heartbeat:
            yield Meeting(rank, size, local_rank, heartbeat, store)
        healthy = True
    except StoppedAndSaved:
        healthy = True
        raise
    except UserError as error:
        _tell_once(error, store, local_rank)
        raise
    finally:
        if healthy and dist.is_initialized():
            dist.destroy_process_group()


def _read_environment() -> tuple[int, int, int]:
    """(rank, size, local rank) from torchrun's variables; (0, 1, 0) without them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if os.environ.get(name)]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return 0, 1, 0
    if len(present) < len(names):
        missing = ", ".join(name for name in names if name not in present)
        raise SetupError(
            f"environment: found {', '.join(present)} but not {missing}; start with `tune run --nproc_per_node N` or "
            f"torchrun, or unset RANK and WORLD_SIZE to run one process"
        )
    rank, size, local_rank = (_read_integer(name) for name in names[:3])
    if not 0 <= rank < size:
        raise SetupError(f"environment: found RANK={rank} with WORLD_SIZE={size}, expected a rank from 0 to {size - 1}")
    return rank, size, local_rank


def _read_integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or (None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise SetupError(f"environment: found {name}={text}, expected an integer >= 0; torchrun sets it")
    return int(text)


def _device_type(device: str) -> str:
    """`cpu` or `cuda`, from the config's `device`."""
    available = torch.get_device_module("cuda").is_available()
    if device == "cuda" and not available:
        raise SetupError(
            "device: found cuda, but torch sees no GPU here; check the driver and that torch is a CUDA build, "
            "or use device=cpu"
        )
    if device == "auto":
        return "cuda" if available else "cpu"
    return device


def _check_device_count(device_type: str, local_rank: int) -> None:
    """One GPU for each process of this machine."""
    if device_type == "cpu":
        return
    devices = torch.get_device_module(device_type).device_count()
    processes = max(_read_integer("LOCAL_WORLD_SIZE", default=local_rank + 1), local_rank + 1)
    if processes > devices:
        raise SetupError(
            f"device: found {processes} processes and {devices} GPUs on this machine, expected a GPU for each process; "
            f"start with --nproc_per_node {devices}, or use device=cpu"
        )


def join_group(cfg: WorldConfig, ranks: Meeting) -> torch.device:
    """Join the default process group, unless it is there already; return this rank's device. Waits for all ranks."""
    device_type = _device_type(cfg.device)
    if ranks.store is not None:
        if device_type == "cuda":
            torch.get_device_module(device_type).set_device(ranks.local_rank)
            torch.get_device_module(device_type).init()  # else the mesh picks the device once more, and warns
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
        ranks.heartbeat.enter("meeting the other ranks")
        ranks.store.set_timeout(_group_limit(cfg))  # for those that still read their data
        dist.init_process_group(
            backend, store=ranks.store, rank=ranks.rank, world_size=ranks.size, timeout=_group_limit(cfg)
        )
    return torch.device(device_type, ranks.local_rank) if device_type != "cpu" else torch.device("cpu")


def set_group_limits(cfg: WorldConfig) -> None:
    """Set the limits of all process groups, ten minutes by default, to what the heartbeat comes before."""
    for group in list(dist.distributed_c10d._world.pg_names):
        dist.distributed_c10d._set_pg_timeout(_group_limit(cfg), group)


def _group_limit(cfg: WorldConfig) -> timedelta:
    timeout = cfg.parallel.heartbeat_timeout_seconds
    return timedelta(seconds=min(2 * beats.LONG_SECONDS * timeout, _LONGEST_LIMIT))


def _connect_store(rank: int, size: int, timeout: float) -> dist.Store:
    """Return the store that the ranks meet at: torchrun's, or rank 0's. `dist.rendezvous` would wait in rank 0."""
    if size == 1:
        return dist.HashStore()
    is_held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with limit_connecting(rank, size, timeout, is_made=is_held_by_torchrun):
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            _read_integer("MASTER_PORT"),
            size,
            is_master=rank == 0 and not is_held_by_torchrun,
            timeout=dist.default_pg_timeout,
            wait_for_workers=False,
            multi_tenant=not is_held_by_torchrun,
        )


def _tell_once(error: UserError, store: dist.Store, local_rank: int) -> None:
    """Takes those faults off the error that another rank of this machine tells.

    A rank with nothing left to tell waits for the machine's first one, which prints just after it leaves: a launcher
    that sees a rank end ends the others, and the line would be lost.
    """
    node = node_name()
    try:
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        error.faults = [fault for fault in error.faults if store.add(f"reported/{node}/{fault}", 1) == 1]
        if local_rank == 0:
            store.set(f"first_left/{node}", "yes")
        elif not error.faults:
            store.wait([f"first_left/{node}"])
            time.sleep(_PRINTING_SECONDS)
    except RuntimeError:
        return  # the store is gone with the rank that held it: whatever is left to report is reported


@contextmanager
def limit_connecting(rank: int, size: int, timeout: float, is_made: bool) -> Iterator[None]:
    """End this process with a line where the block, which connects to the store, takes too long.

    torch waits half an hour for a store that is not there, and for ever for one that takes a connection and is silent.
    is_made: the store is older than this rank, and has one timeout. Otherwise rank 0 makes it, and may still import.
    """
    connected = threading.Event()
    watching = Heartbeat(None, rank, size, timeout)
    threading.Thread(target=watching.wait_for_store, args=(connected, is_made), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        connected.set()
