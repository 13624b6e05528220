"""Attributes of torch and transformers that are replaced while a program is traced.

They would make a trace wrong or slow, or do what no dispatch mode sees. Each function here returns
some of the replacements; `apply_patches` puts them in place.
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

Patch = tuple[Any, str, Any]  # the owner of an attribute, its name, its replacement

# Methods of DTensor's ShardingPropagator that run operators.
_PROPAGATIONS = (
    "_propagate_tensor_meta_non_cached",
    "propagate_tensor_meta",
    "propagate_op_sharding_non_cached",
)
# Methods of a process group that return a work.
_STARTING = (
    "send",
    "recv",
    "recv_anysource",
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "gather",
    "scatter",
    "barrier",
)


@contextmanager
def apply_patches(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace attributes inside the block, in order."""
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def hide_propagation(tracer: "Tracer") -> list[Patch]:
    """Return patches that keep DTensor's sharding propagation out of a trace.

    It runs operators on tensors of the global size, which no rank ever holds.
    """

    def hide(original: Callable[..., Any], finds_shapes: bool) -> Callable[..., Any]:
        def run(propagator: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
            # An operator without results has no shapes to find out, and an optimizer's would do it
            # with thousands of tensors.
            if finds_shapes and not schema.op._schema.returns:
                return None
            tracer.muted += 1
            try:
                return original(propagator, schema, *args, **kwargs)
            finally:
                tracer.muted -= 1

        return run

    methods = vars(ShardingPropagator)
    return [
        (ShardingPropagator, name, hide(methods[name], "tensor_meta" in name))
        for name in _PROPAGATIONS
        if name in methods  # a version of torch may lack one of these private methods
    ]


def unwrap_shards(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """Return an optimizer's arguments, lists of DTensors that are sharded alike, as local tensors.

    None for any other operator.
    """
    if func._schema.returns or not args or not isinstance(args[0], (list, tuple)):
        return None
    # DTensor itself looks at each of thousands of tensors to find out that they are sharded alike,
    # which takes seconds.
    shardings = set()
    for value in args:
        for tensor in value if isinstance(value, (list, tuple)) else ():
            if isinstance(tensor, DTensor):
                shardings.add((tensor.device_mesh, tensor.placements))
    if len(shardings) != 1:
        return None

    def unwrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(unwrap(entry) for entry in value)
        return value._local_tensor if isinstance(value, DTensor) else value

    return tuple(map(unwrap, args)), {name: unwrap(value) for name, value in kwargs.items()}


def patch_document_search(cfg: FullFinetuneConfig, documents: int) -> list[Patch]:
    """Return the patch that lets transformers find as many documents as it does in a run.

    documents: of a packed sequence.
    """
    if cfg.model.implementation != "transformers":
        return []
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices

    # It reads positions. In a run it finds that a sequence is one document, and makes no mask;
    # without values it takes sequences for packed ones and makes a mask of b s s bytes.
    def find(positions: Tensor) -> Tensor | None:
        document_ids = original(positions)
        if document_ids is None or (cfg.data.packing and documents > 1):
            return document_ids
        (document_ids[:, -1] == 0).all()  # what a run looks at, with the memory that it takes
        return None

    return [(masking_utils, "find_packed_sequence_indices", find)]


def follow_works(tracer: "Tracer") -> list[Patch]:
    """Return patches that tell a tracer and its checker of collectives' works and waits for them.

    A work is what an asynchronous collective of a fake process group returns.
    """
    checker = tracer.checker
    asynchronous = set[int]()  # ids of works that nobody has waited for
    fake_work = torch._C._distributed_c10d.FakeWork
    alive: list[Any] = []  # works are known by their id, which another may have when one is gone

    def follow_start(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            work = original.__get__(args[0])(*args[1:], **kwargs)
            alive.append(work)
            collective = tracer.trace.ops[-1].collective if tracer.trace.ops else None
            if collective is not None and not collective.waits:
                asynchronous.add(id(work))
            if checker is not None:
                checker.note_start(work)
            return work

        return run

    original_wait = fake_work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in asynchronous:
            asynchronous.discard(id(self))
            # It stands for a wait for the oldest collective of its stream.
            part, module = tracer.locate()
            tracer.add_op(Op(WORK_WAIT, tracer.get_stream(), part, module, phase=tracer.phase))
        if checker is not None:
            checker.note_work_wait(self, tracer.get_stream())
        return original_wait(self, *args, **kwargs)

    methods = vars(dist.ProcessGroup)
    return [
        (fake_work, "wait", wait),
        *(
            (dist.ProcessGroup, name, follow_start(methods[name]))
            for name in _STARTING
            if name in methods
        ),
    ]
