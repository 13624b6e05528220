"""What the ranks tell each other around a checkpoint: JSON values, decisions of rank 0, and failures.

Values travel as JSON in byte tensors on the CPU. Without a process group (a world of one) nothing travels.
"""

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from recipe_lib.checkpoint.files import describe_fault
from recipe_lib.errors import CheckpointError, ConfigError, DataError, SetupError, StorageError, UserError

Result = TypeVar("Result")

_KINDS = (UserError, CheckpointError, ConfigError, DataError, SetupError, StorageError)
_ERRORS: dict[str, type[UserError]] = {kind.__name__: kind for kind in _KINDS}


class Ranks(Protocol):
    """The part of a world that checkpoints need."""

    rank: int
    size: int
    device: torch.device


def gather_json(value: Any, world: Ranks) -> list[Any]:
    """Every rank's JSON value, by rank, on every rank. Collective."""
    if world.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[:length].numpy())) for part, length in zip(parts, lengths, strict=True)]


def together(world: Ranks, action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank and returns its own result; if it fails anywhere, every rank raises. Collective.

    A user error, or a disk that refuses, is raised on all ranks alike; anything else keeps its traceback on the
    rank where it happened, and the others raise a RuntimeError that names this rank.
    """
    result, failure, fault = None, None, None
    try:
        result = action()
    except UserError as error:
        failure, fault = error, {"kind": type(error).__name__, "faults": error.faults}
    except OSError as error:
        failure, fault = error, {"kind": "StorageError", "faults": [describe_fault(error)]}
    except Exception as error:  # reaches the other ranks before the next collective, then raised as it is
        failure, fault = error, {"kind": "", "faults": [f"{type(error).__name__}: {error}"]}
    faults = gather_json(fault, world)
    if fault and not fault["kind"]:
        raise failure
    for rank, found in enumerate(faults):
        if found:
            if found["kind"] not in _ERRORS:
                raise RuntimeError(f"rank {rank} failed: {found['faults'][0]}")
            raise _ERRORS[found["kind"]](*found["faults"]) from failure
    return result  # type: ignore[return-value]


def decide(world: Ranks, action: Callable[[], Any]) -> Any:
    """Runs `action` on rank 0 alone and returns its JSON result on every rank; its failure is raised on all."""
    result = together(world, action if world.rank == 0 else lambda: None)
    return gather_json(result, world)[0]
