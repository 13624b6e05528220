"""The simulated world: rank r of N in one process, on a device whose tensors have no bytes.

`enter_simulated_world` gives the rank its mesh over a fake process group, whose collectives move
nothing, and `use_fake_tensors` the tensors. `pin_kernels` makes torch choose the kernels of the
planned device (attention, norm).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg

from recipe_lib.config.mesh import MESH_DIMS, compute_mesh_shape
from recipe_lib.config.precision import VARLEN_CAPABILITY
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.ops import dtensor_shards as parts
from recipe_lib.parallel.world import World, build_world
from recipe_lib.plan.simulated_world.patches import Patch, apply_patches
from recipe_lib.plan.simulated_world.simulated_device import MODULE, NAME, register_device

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer


# Methods of a DeviceMesh that compute with its ranks' numbers.
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

    One such world at a time, in a process without another group. like_cpu: kernels are those of a
    CPU; else those of a GPU with this compute capability. Raises SetupError when mesh and ranks do
    not fit.
    """
    shape = tuple(compute_mesh_shape(parallel, ranks).values())
    device = register_device()
    pin_kernels(like_cpu, capability)
    with ExitStack() as stack:
        stack.enter_context(_make_fake_group(rank, ranks))
        stack.enter_context(apply_patches(_tell_meshes_apart(hash((rank, shape)))))
        mesh = dist.device_mesh.init_device_mesh(NAME, shape, mesh_dim_names=MESH_DIMS)
        stack.enter_context(apply_patches([*_make_meshes_real(), *_use_own_streams()]))
        yield build_world(
            mesh, rank, size=ranks, local_rank=0, device=device, context=parallel.context
        )


class _SizesOnly(FakeTensorMode):
    """A fake mode for a device without kernels."""

    # `torch.tensor(..., device=...)` makes its tensor on the host and copies it, as it does for a
    # GPU that is not there; torch takes the simulated device for one that is.
    avoid_device_init = True


@contextmanager
def use_fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor without memory inside the block."""
    mode = _SizesOnly(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        # `module.to(...)` swaps fake parameters, and refuses where somebody knows one by a weak
        # reference: the fake mode does, for a table that nobody reads any more.
        no_references = SimpleNamespace(getweakrefs=lambda tensor: [])
        stack.enter_context(apply_patches([(torch.utils, "weakref", no_references)]))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mode)
        yield mode


@contextmanager
def _make_fake_group(rank: int, ranks: int) -> Iterator[None]:
    # torch has not registered its fake backend for our device.
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
    """Return the patch that makes meshes of another world unequal to those of this one.

    world: a number that no other rank and mesh shape has.
    """
    # DTensor's caches are global and go by equal meshes, but the groups of another world have other
    # names. A mesh compares `_thread_id`, which torch sets for tests alone.
    original = DeviceMesh.__init__

    def initialize(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        mesh._thread_id = world
        mesh._hash = None

    return [(DeviceMesh, "__init__", initialize)]


def _make_meshes_real() -> list[Patch]:
    """Return patches that let a mesh compute with its ranks' numbers, which need values."""

    def make_real(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return original(*args, **kwargs)

        return run

    attributes: list[tuple[Any, str]] = [
        (DeviceMesh, name) for name in _MESH_METHODS if hasattr(DeviceMesh, name)
    ]
    attributes.append((parts, "compute_local_shape_and_global_offset"))
    return [(owner, name, make_real(getattr(owner, name))) for owner, name in attributes]


def _use_own_streams() -> list[Patch]:
    """Return patches that keep streams away from C++, which does not know ours."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        MODULE.listener.use_on(tensor, stream.number)

    return [
        # FSDP asks it in one place, and it asks a C++ guard that this device does not have.
        (torch.accelerator, "current_stream", MODULE.current_stream),
        (torch.Tensor, "record_stream", record_stream),
    ]


def connect_streams(tracer: "Tracer") -> None:
    """Let a tracer hear what the device's streams and the host do, and read the current stream."""
    MODULE.listener = tracer
    tracer.get_stream = lambda: MODULE.stream_now.number


# Kernels of the simulated device, where torch would choose them by the device.
#
# On an unknown device attention falls to the path that holds scores of `[s, s]`, and the norm to a
# chain of elementwise operators. These registrations make the simulated device choose what CUDA
# chooses; for `cpu`, what a CPU does.

_KEY = "AutogradPrivateUse1"


def pin_kernels(like_cpu: bool, capability: tuple[int, int] = (8, 0)) -> None:
    """Choose the kernels of the simulated device, for the process.

    like_cpu: those of a CPU, for comparison with real runs there; else of a GPU with this compute
    capability.
    """
    MODULE.capability = capability
    MODULE.kernels = "cpu" if like_cpu else "cuda"
    _register_kernels()


@cache  # which keeps the library alive: without it torch forgets the registrations
def _register_kernels() -> torch.library.Library:
    """Register the kernels with torch, once a process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", dispatch_attention, _KEY)
    library.impl("rms_norm", _rms_norm, _KEY)
    # A kernel of its own, never called, is what makes autograd take the fused norm as one node.
    library.impl("_fused_rms_norm", _fused_rms_norm, "PrivateUse1")
    library.impl("dropout", _dropout, _KEY)
    library.impl("softmax.int", _softmax, _KEY)
    # torch has a shape rule for the fused AdamW and none for the fused SGD; both write into what
    # they are given.
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
        library.impl(name, lambda *args, **kwargs: None, "Meta")
    for name in ("silu_backward", "mish_backward"):
        library.impl(name, _fuse(getattr(torch.ops.aten, name).default), _KEY)
    return library


def dispatch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what `F.scaled_dot_product_attention` does on the planned device."""
    aten = torch.ops.aten
    if MODULE.kernels == "cpu" and query.shape[-1] == value.shape[-1] and dropout_p == 0.0:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    width = query.shape[-1]
    can_flash = (
        MODULE.kernels != "cpu"
        and query.dtype in (torch.float16, torch.bfloat16)
        and width <= 256
        and MODULE.capability >= VARLEN_CAPABILITY
    )
    if attn_mask is None and can_flash:
        # The kernel takes head widths that are a multiple of 8; the scale is that of the width as
        # it was.
        query, key, value = (_pad(tensor, 8) for tensor in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        output = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return output[..., :width]
    # The memory-efficient kernel does not share keys among query heads.
    if MODULE.kernels == "cpu" or (enable_gqa and query.shape[-3] != key.shape[-3]):
        return _run_composite(
            aten.scaled_dot_product_attention.default,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _rms_norm(
    hidden: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if MODULE.kernels == "cpu" or (weight is not None and weight.dtype != hidden.dtype):
        return _run_composite(torch.ops.aten._fused_rms_norm.default, hidden, shape, weight, eps)[0]
    return torch.ops.aten._fused_rms_norm(hidden, shape, weight, eps)[0]


def _fused_rms_norm(*args: Any) -> Any:
    return _run_composite(torch.ops.aten._fused_rms_norm.default, *args)


def _dropout(hidden: Tensor, rate: float, train: bool) -> Tensor:
    # A CPU makes its mask from several operators, CUDA has one kernel.
    if MODULE.kernels == "cpu" and train and rate > 0:
        return hidden * torch.empty_like(hidden).bernoulli_(1 - rate).div_(1 - rate)
    return _run_composite(torch.ops.aten.dropout.default, hidden, rate, train)


def _softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    # CUDA has a kernel that reads fp16 and writes fp32, without a copy of what it reads; for no
    # other type.
    if MODULE.kernels == "cuda" and scores.dtype == torch.float16 and dtype == torch.float32:
        return torch.ops.aten._softmax(scores, dim, True)
    return _run_composite(torch.ops.aten.softmax.int, scores, dim, dtype)


def _fuse(operator: Any) -> Callable[..., Tensor]:
    """Return a kernel for an operator that an unknown device takes apart; CPU and CUDA do not."""

    def run(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return run


def _run_composite(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as torch does on a device that has no kernel of its own for it."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _pad(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
