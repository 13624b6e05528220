"""Register a device without memory with torch, as `sim`, and choose its kernels.

`enter_simulated_world` calls `register_device` before a recipe is planned on fake tensors, and
`pin_kernels`, which makes torch choose the kernels (attention, norm) of the device that is planned
for. Streams and events are Python objects that report to `MODULE.listener`, a tracer. torch knows
one such device a process and does not forget it: a plan is made in a separate process.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from recipe_lib.config.precision import VARLEN_CAPABILITY

# A fake `cuda` device aborts the process on a CPU build of torch, and raises in backward on a CUDA
# build without a driver. A backend behind the PrivateUse1 key (torch.utils.backend_registration)
# works on both.
NAME = "sim"  # the device type, as in `torch.device("sim")`


class Stream:
    """A stream of the device, as `torch.cuda.Stream`; number 0 is the one that computes."""

    # From torch 2.15 on FSDP reads these two, to hand on which stream reads a gradient.
    device_index = 0
    device_type = 20  # PrivateUse1 in c10/core/DeviceType.h

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        # `device` and `stream_id` are names of torch's; `number` is what the tracer is told.
        self.device = torch.device(NAME, 0)
        self.number = self.stream_id = next(MODULE.streams)
        # Streams that were current before each open `with` block of this one, the innermost last.
        self._before: list[Stream] = []

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        other.record_event().wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        MODULE.listener.synchronize("Stream.synchronize", self.number, None)

    def query(self) -> bool:
        return True  # all is done, as nothing runs

    def is_capturing(self) -> bool:
        """Return False: no CUDA graph is captured. torch's optimizers ask from 2.15 on."""
        return False

    def __enter__(self) -> "Stream":
        self._before.append(MODULE.stream_now)
        MODULE.stream_now = self
        return self

    def __exit__(self, *exception: Any) -> None:
        MODULE.stream_now = self._before.pop()


class Event:
    """An event on a stream, as `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        # Number of its last record, -1 before the first. Each record has another number: a wait is
        # for the last record before it.
        self.number = -1

    def record(self, stream: Stream | None = None) -> None:
        self.number = next(MODULE.events)
        MODULE.listener.record((stream or MODULE.stream_now).number, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        MODULE.listener.wait((stream or MODULE.stream_now).number, self.number)

    def synchronize(self) -> None:
        MODULE.listener.synchronize("Event.synchronize", None, self.number)

    def query(self) -> bool:
        return True  # all is done, as nothing runs

    def elapsed_time(self, other: "Event") -> float:
        return 0.0  # no time passes


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method of the device or of a listener."""


class SimulatedModule(_DummyBackendModule):  # type: ignore[misc]
    """The part of torch.cuda's interface that recipes and FSDP use.

    `torch.get_device_module("sim")` returns its only instance, `MODULE`. torch's base class answers
    that there is one device, which is ready.
    """

    __name__ = NAME  # torch.compile asks a device's module for its name

    def __init__(self) -> None:
        # torch looks these two up as attributes of the module.
        self.Stream = Stream
        self.Event = Event
        self.streams = itertools.count()  # gives the numbers of streams
        self.events = itertools.count()  # gives the numbers of records of events
        self.holds_values = False  # tensors have no values; read by `ops.device.holds_values`
        self.kernels = "cuda"  # "cuda" or "cpu": the device whose kernels are chosen
        self.capability = (8, 0)  # compute capability of the GPU that it stands for
        self.stream_now: Any = None  # the stream that operators are issued on
        # A Tracer. Its methods are called for every event that a stream records or waits for, each
        # `Tensor.record_stream`, and each wait of the host.
        self.listener: Any = SimpleNamespace(
            **dict.fromkeys(("record", "wait", "use_on", "synchronize"), _do_nothing)
        )

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]
        self.stream_now = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self.stream_now

    def stream(self, stream: Stream | None) -> Any:
        """Return a context that issues operators on `stream`; None: on the current one."""
        return stream or nullcontext()

    def device(self, device: Any) -> Any:
        return nullcontext()  # there is one device

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability

    def synchronize(self, device: Any = None) -> None:
        self.listener.synchronize("synchronize", None, None)

    # They have no effect: there is one device, nothing is cached or random, and peaks of memory are
    # read from the trace.
    set_device = empty_cache = manual_seed = set_rng_state = reset_peak_memory_stats = _do_nothing

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a state of 16 bytes, as long as that of CUDA's generator."""
        return torch.zeros(16, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]  # as on CUDA


MODULE = SimulatedModule()


def is_registered() -> bool:
    """Return True if this process has registered the device, as every simulation does."""
    return torch._C._get_privateuse1_backend_name() == NAME


def register_device() -> torch.device:
    """Register the device with torch, once a process, reset its state, and return it."""
    if not is_registered():
        _setup_privateuseone_for_python_backend(NAME, MODULE, hook=_Hook())
    MODULE.reset()
    return torch.device(NAME, 0)


# Functions that torch's C++ calls for the device. Generators are the CPU's: no number is drawn.
class _Hook(_DummyPrivateUse1Hook):  # type: ignore[misc]
    def get_default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    def get_new_generator(self, index: int) -> torch.Generator:
        return torch.Generator()


# Kernels of the simulated device, where torch would choose them by the device.
#
# On a device that torch does not know, attention takes the path that keeps scores `[s, s]`, and the
# norm a chain of elementwise operators. These registrations make the simulated device choose the
# kernels that CUDA chooses, or with `kernels = "cpu"` those that a CPU does.


def pin_kernels(like_cpu: bool, capability: tuple[int, int] = (8, 0)) -> None:
    """Set which kernels the simulated device has from here on.

    like_cpu: True: those of a CPU, for comparison with real runs there. False: those of a GPU with
    this compute capability.
    """
    MODULE.capability = capability
    MODULE.kernels = "cpu" if like_cpu else "cuda"
    _register_kernels()


@cache  # which keeps the library alive: without it torch forgets the registrations
def _register_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "scaled_dot_product_attention": dispatch_attention,
        "rms_norm": _rms_norm,
        "dropout": _dropout,
        "softmax.int": _softmax,
        "silu_backward": _fuse(torch.ops.aten.silu_backward.default),
        "mish_backward": _fuse(torch.ops.aten.mish_backward.default),
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
    # Autograd takes the fused norm as one node only if the device has a kernel for it, though this
    # one is never called.
    library.impl("_fused_rms_norm", _fused_rms_norm, "PrivateUse1")
    # torch has a shape rule (a meta kernel) for the fused AdamW and none for the fused SGD. It has
    # nothing to do, as they write into their arguments.
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
        library.impl(name, lambda *args, **kwargs: None, "Meta")
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
    """Run `F.scaled_dot_product_attention` by the kernel that torch picks on the planned device.

    query `[b, h, s, d]`, key and value `[b, h or fewer, t, d]`; arguments as of that function.
    """
    aten = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # As torch does before its kernels, in each layer: scores get 0 or -inf.
        attn_mask = torch.where(attn_mask, query.new_zeros(()), query.new_full((), -torch.inf))
    if MODULE.kernels == "cpu" and query.shape[-1] == value.shape[-1] and dropout_p == 0.0:
        # The first result is the output, here and below; the others are for backward.
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    width = query.shape[-1]
    can_flash = (
        MODULE.kernels != "cpu"
        and query.dtype in (torch.float16, torch.bfloat16)
        and width <= 256  # the largest that FlashAttention 2 has
        and MODULE.capability >= VARLEN_CAPABILITY
    )
    if attn_mask is None and can_flash:
        # The kernel takes head widths that are a multiple of 8. The default scale is that of the
        # width before padding.
        query, key, value = (_pad(tensor, 8) for tensor in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        output = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )[0]
        return output[..., :width]
    # The memory-efficient kernel cannot share keys among query heads (GQA).
    if MODULE.kernels == "cpu" or (enable_gqa and query.shape[-3] != key.shape[-3]):
        return _run_composite(
            aten.scaled_dot_product_attention.default,
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (query, key, value)
    )
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        attn_bias=attn_mask,
        compute_log_sumexp=needs_gradient,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )[0]


def _rms_norm(
    hidden: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    # Runs the fused norm, or its parts where the planned device has no fused one: on a CPU, and for
    # a weight of another type than the hidden states.
    if MODULE.kernels == "cpu" or (weight is not None and weight.dtype != hidden.dtype):
        return _run_composite(torch.ops.aten._fused_rms_norm.default, hidden, shape, weight, eps)[0]
    return torch.ops.aten._fused_rms_norm(hidden, shape, weight, eps)[0]


def _fused_rms_norm(*args: Any) -> Any:
    # Runs a norm by its parts. It is never called, see `_register_kernels`.
    return _run_composite(torch.ops.aten._fused_rms_norm.default, *args)


def _dropout(hidden: Tensor, rate: float, train: bool) -> Tensor:
    # Runs dropout: a CPU makes its mask from several operators, CUDA has one kernel.
    if MODULE.kernels == "cpu" and train and rate > 0:
        return hidden * torch.empty_like(hidden).bernoulli_(1 - rate).div_(1 - rate)
    return _run_composite(torch.ops.aten.dropout.default, hidden, rate, train)


def _softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    # Runs a softmax: CUDA has a kernel that reads fp16 and writes fp32, without a copy in fp32. It
    # has none for other types.
    if MODULE.kernels == "cuda" and scores.dtype == torch.float16 and dtype == torch.float32:
        return torch.ops.aten._softmax(scores, dim, True)
    return _run_composite(torch.ops.aten.softmax.int, scores, dim, dtype)


def _fuse(operator: Any) -> Callable[..., Tensor]:
    """Return a kernel that runs an operator as one, where an unknown device would decompose it."""

    def run(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return run


def _run_composite(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator by its decomposition, as on a device that has no kernel for it."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _pad(tensor: Tensor, multiple: int) -> Tensor:
    # Returns the tensor with zeros at the end of its last dimension, up to a multiple.
    num_missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, num_missing)) if num_missing else tensor
