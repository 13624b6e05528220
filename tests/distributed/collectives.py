"""Wrap the collectives of a test's ranks, so that a collective ends when its tensors are let go.

gloo's threads hold a collective's tensors for a moment after its end. Bytes that are counted right
after it, or the moment of a release, would be chance: `with let_collectives_go(): ...`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from recipe_lib.ops import gathered, sequence_shards

# Of torch.distributed, those that a version of it has.
COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
)
MAX_SECONDS = 10  # for a thread of gloo to let a tensor go


def let_collectives_go() -> AbstractContextManager[None]:
    """Let each collective end when none of gloo's threads holds its tensors any more."""

    def wait(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            ]
            before = [count_holders(tensor) for tensor in tensors]
            result = operation(*args, **kwargs)
            # A Work would hold the tensors, too.
            result = result if isinstance(result, torch.Tensor) else None
            deadline = time.monotonic() + MAX_SECONDS
            while [count_holders(tensor) for tensor in tensors] != before or (
                result is not None and is_shared(result)
            ):
                assert time.monotonic() < deadline, "a collective's tensors are still held"
                time.sleep(0)
            return result

        return call

    return wrap_collectives(wait)


@contextmanager
def wrap_collectives(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the collectives of torch.distributed and of this library by what `wrap` returns."""
    places: list[tuple[Any, str]] = [(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
    places += [(gathered, "_gather")]
    places += [(sequence_shards, name) for name in ("_send_blocks", "_gather_rows")]
    # Modules import it by name: each has one of its own to replace.
    places += [
        (module, "all_reduce")
        for name, module in list(sys.modules.items())
        if name.startswith("recipe_lib.") and vars(module).get("all_reduce") is gathered.all_reduce
    ]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), operation in zip(places, originals, strict=True):
        setattr(owner, name, wrap(operation))
    try:
        yield
    finally:
        for (owner, name), operation in zip(places, originals, strict=True):
            setattr(owner, name, operation)


def is_shared(new: torch.Tensor) -> bool:
    """Return True if a tensor that was just made has another holder in C++ than its variable.

    Its memory counts, too.
    """
    return (count_holders(new)[0], count_holders(new)[2]) != (1, 2)


def count_holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return how many hold a tensor (in C++, in Python), and its memory (the same)."""
    storage = tensor.untyped_storage()
    num_storage_holders = torch._C._storage_Use_Count(storage._cdata)
    return (
        tensor._use_count(),
        sys.getrefcount(tensor),
        num_storage_holders,
        sys.getrefcount(storage),
    )
