"""Simulate rank r of N in one process, on a device whose tensors have no bytes.

`trace_rank.simulate` enters `enter_simulated_world`, which gives the rank its mesh over a fake
process group, whose collectives move nothing, and `use_fake_tensors`. Meanwhile functions of torch
and transformers are replaced that would make a trace (what the rank allocates and runs) wrong or
slow: functions here return such patches, and `apply_patches` applies them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_map_only

from recipe_lib.config.mesh import MESH_DIMS, compute_mesh_shape
from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.ops import dtensor_shards
from recipe_lib.ops.kept_tensors import list_tensors
from recipe_lib.parallel.world import World, build_world
from recipe_lib.plan.simulated_world.simulated_device import (
    MODULE,
    NAME,
    pin_kernels,
    register_device,
)
from recipe_lib.plan.tracing.trace import OP, WORK_WAIT, Op

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer

Patch = tuple[Any, str, Any]  # (object or class, name of its attribute, the replacement)

# Methods of a DeviceMesh that read the values of its tensor of ranks, which a fake one has not.
_MESH_METHODS = (
    "__init__",
    "__getitem__",
    "_concatenate",
    "get_group",
    "get_local_rank",
    "get_coordinate",
    "_flatten",
)


@contextmanager
def enter_simulated_world(
    parallel: ParallelConfig,
    rank: int,
    ranks: int,
    *,
    like_cpu: bool = False,
    capability: tuple[int, int] = (8, 0),
) -> Iterator[World]:
    """Make this process rank `rank` of `ranks` on the simulated device inside the block.

    A process can be in one such world at a time, and in no other process group. parallel: sizes of
    the mesh. like_cpu: True: kernels are those of a CPU. False: those of a GPU with this compute
    capability. Raises SetupError if the mesh does not fit the number of ranks.
    """
    shape = tuple(compute_mesh_shape(parallel, ranks).values())
    device = register_device()
    pin_kernels(like_cpu, capability)
    with _make_fake_group(rank, ranks), apply_patches(_tell_meshes_apart(hash((rank, shape)))):
        mesh = dist.device_mesh.init_device_mesh(NAME, shape, mesh_dim_names=MESH_DIMS)
        # torch's C++ does not know the streams of this device. MODULE stands for `torch.cuda`, its
        # listener is the tracer.
        stream_patches: list[Patch] = [
            # FSDP calls it, and it would call a C++ guard that this device does not have.
            (torch.accelerator, "current_stream", MODULE.current_stream),
            (Tensor, "record_stream", lambda t, stream: MODULE.listener.use_on(t, stream.number)),
        ]
        with apply_patches([*_make_meshes_real(), *stream_patches]):
            yield build_world(
                mesh, rank, size=ranks, local_rank=0, device=device, context=parallel.context
            )


class _SizesOnly(FakeTensorMode):
    """A FakeTensorMode for a device that is not there."""

    # `torch.tensor(..., device=...)` makes its tensor on the host and copies it, as it does for a
    # GPU that is not there; torch takes the simulated device for one that is.
    avoid_device_init = True


@contextmanager
def use_fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every new tensor a fake one, without memory, inside the block."""
    # `module.to(...)` swaps fake parameters, and refuses where there is a weak reference to one.
    # The fake mode has some, in a table that is not read again.
    no_references = SimpleNamespace(getweakrefs=lambda tensor: [])
    with (
        apply_patches([(torch.utils, "weakref", no_references)]),
        torch.autograd.set_multithreading_enabled(False),
        _SizesOnly(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


@contextmanager
def _make_fake_group(rank: int, ranks: int) -> Iterator[None]:
    # Collectives of torch's fake process group return at once. Importing `fake_pg` registers its
    # backend, but not for the simulated device.
    if NAME not in dist.Backend.backend_capability.get("fake", []):
        dist.Backend.register_backend(
            "fake", fake_pg._create_fake_pg, extended_api=True, devices=["cpu", NAME]
        )
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tell_meshes_apart(world: int) -> list[Patch]:
    """Return the patch that makes this world's meshes unequal to those of other worlds.

    world: a number for the rank and the shape of the mesh.
    """
    # DTensor's caches are global, with meshes in their keys, but the process groups of another
    # world have other names. Meshes are compared by `_thread_id` too, which torch sets only in
    # tests.
    original = DeviceMesh.__init__

    def initialize(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        mesh._thread_id = world
        mesh._hash = None

    return [(DeviceMesh, "__init__", initialize)]


def _make_meshes_real() -> list[Patch]:
    """Return patches that run a mesh's methods without the fake mode: they need real ranks."""

    def make_real(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return original(*args, **kwargs)

        return run

    attributes: list[tuple[Any, str]] = [
        (DeviceMesh, name) for name in _MESH_METHODS if hasattr(DeviceMesh, name)
    ]
    attributes.append((dtensor_shards, "compute_local_shape_and_global_offset"))
    return [(owner, name, make_real(getattr(owner, name))) for owner, name in attributes]


def connect_streams(tracer: "Tracer") -> None:
    """Let the device tell a tracer of its streams' events, and the tracer ask for the stream."""
    MODULE.listener = tracer
    tracer.get_stream = lambda: MODULE.stream_now.number


# Patches for as long as a program is traced.

# Methods of DTensor's ShardingPropagator that run operators.
_PROPAGATIONS = (
    "_propagate_tensor_meta_non_cached",
    "propagate_tensor_meta",
    "propagate_op_sharding_non_cached",
)
# Methods of a process group that start a collective or a message and return a `Work`. Not all of
# them are in every version of torch.
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
    """Replace attributes inside the block, in the order of the patches."""
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def hide_propagation(tracer: "Tracer") -> list[Patch]:
    """Return patches that keep DTensor's sharding propagation out of a trace.

    It runs operators on tensors of the global size, which no rank ever holds. While
    `tracer.muted` is above 0 operators are not noted.
    """

    # finds_shapes: True: the method finds the shapes of an operator's results.
    def hide(original: Callable[..., Any], finds_shapes: bool) -> Callable[..., Any]:
        def run(propagator: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
            # An operator without results has no shapes to find out. That of a fused optimizer would
            # be run on thousands of tensors.
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
    """Return the (args, kwargs) of an operator on lists, with local tensors in place of DTensors.

    Such operators step a fused or foreach optimizer, in place. Return None for an operator that
    returns something or whose first argument is no list, and where the lists hold no DTensors or
    such that are not sharded alike, or a DTensor beside them is not replicated.
    """
    if func._schema.returns or not args or not isinstance(args[0], (list, tuple)):
        return None
    # DTensor's own dispatch compares the sharding of thousands of tensors, which takes seconds.
    # A DTensor beside plain lists is left to that dispatch, which refuses the mixture as in a run.
    # So is one beside the lists that is not replicated: a run makes it so, with a collective.
    lists = [value for value in args if isinstance(value, (list, tuple))]
    shards = [tensor for tensor in list_tensors(lists) if isinstance(tensor, DTensor)]
    tensors_beside = [value for value in (*args, *kwargs.values()) if isinstance(value, DTensor)]
    if (
        len({tensor.device_mesh for tensor in (*shards, *tensors_beside)}) != 1
        or len({shard.placements for shard in shards}) != 1
        or not all(set(tensor.placements) == {Replicate()} for tensor in tensors_beside)
    ):
        return None
    local_arguments: tuple[Any, Any] = tree_map_only(
        DTensor, lambda shard: shard._local_tensor, (tuple(args), dict(kwargs))
    )
    return local_arguments


def patch_document_search(cfg: FullFinetuneConfig, documents: int) -> list[Patch]:
    """Return the patch that lets transformers find packed documents where a run has some.

    documents: how many a packed sequence has. Return [] for models that are not of transformers.
    """
    if cfg.model.implementation != "transformers":
        return []
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices

    # The original reads positions. In a run it finds that a sequence is one document, and makes no
    # mask. Without values it would take sequences for packed ones and make a mask `[b, s, s]`.
    def find(positions: Tensor) -> Tensor | None:
        document_ids = original(positions)
        if document_ids is None or (cfg.data.packing and documents > 1):
            return document_ids
        (document_ids[:, -1] == 0).all()  # a run computes this too, which takes memory
        return None

    return [(masking_utils, "find_packed_sequence_indices", find)]


def follow_works(tracer: "Tracer") -> list[Patch]:
    """Return patches that note waits for asynchronous collectives (`Work.wait`) in the trace.

    The tracer's checker (it finds races between streams), if it has one, is told of all `Work`
    objects and waits.
    """
    checker = tracer.checker
    asynchronous = set[int]()  # ids of `Work` objects of asynchronous collectives not waited for
    fake_work = torch._C._distributed_c10d.FakeWork
    # Works are known by id. They are kept alive, as another object may get the id of one that ends.
    alive: list[Any] = []

    def follow_start(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            work = original.__get__(args[0])(*args[1:], **kwargs)
            alive.append(work)
            # The call has just run the collective's operator, which the tracer noted.
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
            # It stands for a wait for the oldest collective that its stream has not waited for.
            part, module = tracer.locate()
            tracer.trace.add(
                OP,
                Op(
                    WORK_WAIT,
                    stream=tracer.get_stream(),
                    part=part,
                    module=module,
                    phase=tracer.phase,
                ),
            )
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
