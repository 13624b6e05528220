"""The simulated world: rank r of N on a device of sizes, in one process, with collectives that move nothing.

Everything that touches torch's private parts for this is in here, in `device`, `kernels` and in `fast_fake`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg

from recipe_lib.config.mesh import MESH_DIMS, mesh_shape
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.ops import dtensor_shards as parts
from recipe_lib.parallel.world import World, world_of
from recipe_lib.plan.world.kernel_choice import pin_kernels
from recipe_lib.plan.world.patches import Patch, patched
from recipe_lib.plan.world.simulated_device import MODULE, NAME, register_device

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer

_MESH_METHODS = ("__init__", "__getitem__", "_concatenate", "get_group", "get_local_rank", "get_coordinate", "_flatten")


@contextmanager
def simulated_world(
    parallel: ParallelConfig, rank: int, ranks: int, *, like_cpu: bool = False, capability: tuple[int, int] = (8, 0)
) -> Iterator[World]:
    """Rank `rank` of `ranks` on the simulated device. One such world at a time, in a process without another group.

    like_cpu: kernels are those of a CPU; else those of a GPU with this compute capability. Raises SetupError when mesh
    and ranks do not fit.
    """
    shape = tuple(mesh_shape(parallel, ranks).values())
    device = register_device()
    pin_kernels(like_cpu, capability)
    with ExitStack() as stack:
        stack.enter_context(_fake_group(rank, ranks))
        stack.enter_context(patched(_tell_meshes_apart(hash((rank, shape)))))
        mesh = dist.device_mesh.init_device_mesh(NAME, shape, mesh_dim_names=MESH_DIMS)
        stack.enter_context(patched([*_make_meshes_real(), *_use_own_streams()]))
        yield world_of(mesh, rank, ranks, 0, device, parallel.context)


class _SizesOnly(FakeTensorMode):
    """avoid_device_init: `torch.tensor(..., device=...)` makes its tensor on the host and copies it, as it does for a
    GPU that is not there; torch takes the simulated device, which has no kernels, for one that is."""

    avoid_device_init = True


@contextmanager
def tensors_without_bytes() -> Iterator[FakeTensorMode]:
    """Inside the block every tensor is made without memory."""
    mode = _SizesOnly(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        # `module.to(...)` swaps fake parameters, and refuses where somebody knows one by a weak reference: the fake
        # mode does, for a table that nobody reads any more.
        nobody = SimpleNamespace(getweakrefs=lambda tensor: [])
        stack.enter_context(patched([(torch.utils, "weakref", nobody)]))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mode)
        yield mode


@contextmanager
def _fake_group(rank: int, ranks: int) -> Iterator[None]:
    devices = ["cpu", NAME]
    dist.Backend.register_backend("fake", fake_pg._create_fake_pg, extended_api=True, devices=devices) if (
        NAME not in dist.Backend.backend_capability.get("fake", [])
    ) else None
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tell_meshes_apart(world: int) -> list[Patch]:
    """What DTensor remembers of a mesh holds for the equal mesh of another world too, whose groups have other names.

    world: a number that no other rank and shape has. A mesh compares its thread's, which torch sets for tests alone.
    """
    original = DeviceMesh.__init__

    def begin(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        mesh._thread_id = world
        mesh._hash = None

    return [(DeviceMesh, "__init__", begin)]


def _make_meshes_real() -> list[Patch]:
    """A mesh computes with its own ranks' numbers, which must have values."""

    def real(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return original(*args, **kwargs)

        return run

    places: list[tuple[Any, str]] = [(DeviceMesh, name) for name in _MESH_METHODS if hasattr(DeviceMesh, name)]
    places.append((parts, "compute_local_shape_and_global_offset"))
    return [(owner, name, real(getattr(owner, name))) for owner, name in places]


def _use_own_streams() -> list[Patch]:
    """FSDP asks torch.accelerator for a stream in one place, and so a C++ guard that this device does not have; and
    `record_stream` takes streams of C++."""

    def record(tensor: torch.Tensor, stream: Any) -> None:
        MODULE.listener.use_on(tensor, stream.number)

    return [(torch.accelerator, "current_stream", MODULE.current_stream), (torch.Tensor, "record_stream", record)]


def connect_streams(tracer: "Tracer") -> None:
    """Tells a tracer what the device's streams and the host do, and which stream is the current one."""
    MODULE.listener = tracer
    tracer.stream = lambda: MODULE.stream_now.number
