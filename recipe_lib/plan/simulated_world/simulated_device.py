"""A device without memory, registered with torch from Python as `sim`, and the kernels it chooses.

A fake `cuda` device aborts the process on a CPU build of torch and raises in backward on a CUDA
build without a driver; a backend behind the PrivateUse1 key (torch.utils.backend_registration)
works on both. Its streams and events are ours, so a tracer sees on which stream memory was taken
and which stream waits for which. torch knows one such device a process and does not forget it: a
plan is made in a separate process. `pin_kernels` makes torch choose the kernels (attention, norm)
of the device that is planned for.
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

NAME = "sim"


class Stream:
    """A queue of the device; number 0 is the one that computes."""

    # From torch 2.15 on FSDP reads these two, to hand on which stream reads a gradient.
    device_index = 0
    device_type = 20  # PrivateUse1 in c10/core/DeviceType.h

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device(NAME, 0)
        self.number = self.stream_id = next(MODULE.streams)
        # Streams that were current when a block of this one began, the innermost block's last.
        self._before: list[Stream] = []

    def wait_event(self, event: "Event") -> None:
        """Let what is issued on this stream later wait for the event."""
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        """Let it wait for all that was issued on another stream."""
        other.record_event().wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that comes when all that was issued here is done."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Tell the listener that the host would wait; nothing runs."""
        MODULE.listener.synchronize("Stream.synchronize", self.number, None)

    def query(self) -> bool:
        """Return True: all is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph of kernels is recorded; from 2.15 on torch's optimizers ask."""
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
        # Of its last record, -1 before the first. An event that is recorded again has another
        # number, so that those who wait for it wait for the right record.
        self.number = -1

    def record(self, stream: Stream | None = None) -> None:
        """Record the event behind what was issued on the stream."""
        self.number = next(MODULE.events)
        MODULE.listener.record((stream or MODULE.stream_now).number, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        MODULE.listener.wait((stream or MODULE.stream_now).number, self.number)

    def synchronize(self) -> None:
        """Tell the listener that the host would wait; nothing runs."""
        MODULE.listener.synchronize("Event.synchronize", None, self.number)

    def query(self) -> bool:
        """Return True: all is done."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Return 0: no time passes."""
        return 0.0


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: there is no device."""


class SimulatedModule(_DummyBackendModule):  # type: ignore[misc]
    """The part of torch.cuda's interface that recipes and FSDP use.

    `torch.get_device_module("sim")` returns it. torch's own class says that there is one device,
    which is ready.
    """

    __name__ = NAME  # by which torch.compile speaks of a device's module

    def __init__(self) -> None:
        # torch looks these two up as attributes of the module.
        self.Stream = Stream
        self.Event = Event
        self.streams = itertools.count()  # numbers of streams
        self.events = itertools.count()  # numbers of records of events
        self.holds_values = False
        self.kernels = "cuda"  # whose kernels it has, for code that goes by the device; or "cpu"
        self.capability = (8, 0)  # compute capability of the GPU that it stands for
        self.stream_now: Any = None  # the stream that operators are issued on
        # A tracer. It hears of every event that a stream records or waits for, each use of a tensor
        # on another stream that `record_stream` names, and each time that the host waits.
        self.listener: Any = SimpleNamespace(
            **dict.fromkeys(("record", "wait", "use_on", "synchronize"), _do_nothing)
        )

    def reset(self) -> None:
        """Begin anew: one stream, no events, nobody who listens."""
        self.__init__()  # type: ignore[misc]
        self.stream_now = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream that operators are issued on."""
        return self.stream_now

    def stream(self, stream: Stream | None) -> Any:
        """Return a context that issues operators on another stream; None: on the current one."""
        return stream or nullcontext()

    def device(self, device: Any) -> Any:
        """Return a context that does nothing: there is one device."""
        return nullcontext()

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability of the GPU that it stands for."""
        return self.capability

    def synchronize(self, device: Any = None) -> None:
        """Tell the listener that the host would wait; nothing runs."""
        self.listener.synchronize("synchronize", None, None)

    # There is one device; nothing is cached, nothing is random, and the trace has the peaks.
    set_device = empty_cache = manual_seed = set_rng_state = reset_peak_memory_stats = _do_nothing

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a state of the size that CUDA's generator has."""
        return torch.zeros(16, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that CUDA supports."""
        return [torch.float16, torch.bfloat16]


MODULE = SimulatedModule()


def register_device() -> torch.device:
    """Register the device with torch, once a process, and return it with nothing issued on it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, MODULE, hook=_Hook())
    MODULE.reset()
    return torch.device(NAME, 0)


class _Hook(_DummyPrivateUse1Hook):  # type: ignore[misc]
    def get_default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    def get_new_generator(self, index: int) -> torch.Generator:
        return torch.Generator()


# Kernels of the simulated device, where torch would choose them by the device.
#
# On an unknown device attention falls to the path that holds scores of `[s, s]`, and the norm to a
# chain of elementwise operators. These registrations make the simulated device choose what CUDA
# chooses; for `cpu`, what a CPU does.


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
    # A kernel of its own, never called, is what makes autograd take the fused norm as one node.
    library.impl("_fused_rms_norm", _fused_rms_norm, "PrivateUse1")
    # torch has a shape rule for the fused AdamW and none for the fused SGD; both write into what
    # they are given.
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
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )[0]
        return output[..., :width]
    # The memory-efficient kernel does not share keys among query heads.
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
