"""What of torch and transformers is replaced while a program is simulated: what would make a trace
wrong or slow, and what no dispatch mode sees. Each function here gives some of the replacements,
`apply_patches` puts them in place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.plan.tracing.trace import WORK_WAIT, Op

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer

Patch = tuple[Any, str, Any]  # what has the attribute, its name, what stands there instead

_PROPAGATIONS = (
    "_propagate_tensor_meta_non_cached",
    "propagate_tensor_meta",
    "propagate_op_sharding_non_cached",
)
_STARTING = (
    "send", "recv", "recv_anysource", "allreduce", "broadcast", "reduce", "allgather", "_allgather_base",
    "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "gather", "scatter", "barrier",
)  # fmt: skip


@contextmanager
def apply_patches(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace attributes inside the block."""
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def hide_propagation(tracer: "Tracer") -> list[Patch]:
    """DTensor finds out shapes with tensors of the global size, which no rank ever holds."""

    def hide(original: Callable[..., Any], finds_shapes: bool) -> Callable[..., Any]:
        def run(propagator: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
            if finds_shapes and not schema.op._schema.returns:
                # Nothing to find out, and an optimizer's thousands of tensors to do it with
                return None
            tracer.muted += 1
            try:
                return original(propagator, schema, *args, **kwargs)
            finally:
                tracer.muted -= 1

        return run

    methods = [
        (name, vars(ShardingPropagator)[name])
        for name in _PROPAGATIONS
        if name in vars(ShardingPropagator)
    ]
    return [
        (ShardingPropagator, name, hide(method, "tensor_meta" in name)) for name, method in methods
    ]


def unwrap_shards(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """The arguments of an optimizer's operator over lists of shards, as the plain tensors they are
    on this rank.

    DTensor looks at each of thousands to find that they are cut alike, which takes seconds. None
    for anything else.
    """
    if func._schema.returns or not args or not isinstance(args[0], (list, tuple)):
        return None
    found = {
        (tensor.device_mesh, tensor.placements)
        for value in args
        if isinstance(value, (list, tuple))
        for tensor in value
        if isinstance(tensor, DTensor)
    }
    if len(found) != 1:
        return None

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(local(entry) for entry in value)
        return value._local_tensor if isinstance(value, DTensor) else value

    return tuple(map(local, args)), {name: local(value) for name, value in kwargs.items()}


def patch_document_search(cfg: FullFinetuneConfig, documents: int) -> list[Patch]:
    """transformers looks for documents in positions as it does in a run.

    With values it finds that a row is one document, and makes no mask; without, it takes rows for
    packed ones and makes one of b s s bytes. documents: of a packed row.
    """
    if cfg.model.implementation != "transformers":
        return []
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices

    def find(positions: Tensor) -> Tensor | None:
        found = original(positions)
        if found is None or (cfg.data.packing and documents > 1):
            return found
        (found[:, -1] == 0).all()  # what a run looks at, with the memory that it takes
        return None

    return [(masking_utils, "find_packed_sequence_indices", find)]


def follow_works(tracer: "Tracer") -> list[Patch]:
    """A tracer and its checker learn which works a fake process group returns, and of each wait for
    one.
    """
    checker = tracer.checker
    asynchronous = set[int]()
    group = dist.ProcessGroup
    work = torch._C._distributed_c10d.FakeWork
    alive: list[Any] = []  # works are known by their id, which another may have when one is gone

    def start(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = original.__get__(args[0])(*args[1:], **kwargs)
            alive.append(started)
            collective = tracer.trace.ops[-1].collective if tracer.trace.ops else None
            if collective is not None and not collective.waits:
                asynchronous.add(id(started))
            if checker is not None:
                checker.note_start(started)
            return started

        return run

    wait = work.wait

    def wait_for(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in asynchronous:
            asynchronous.discard(id(self))
            tracer.add(
                Op(WORK_WAIT, tracer.stream(), *tracer.place(), tracer.phase)
            )  # for the stream's oldest
        if checker is not None:
            checker.note_work_wait(self, tracer.stream())
        return wait(self, *args, **kwargs)

    starting = [
        (group, name, start(vars(group)[name])) for name in _STARTING if name in vars(group)
    ]
    return [(work, "wait", wait_for), *starting]
