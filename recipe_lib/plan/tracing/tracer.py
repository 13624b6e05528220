"""Notes every allocation, release, operator and collective of a program, simulated or real, as a `Trace`."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.memory.host_limits import pinned_bytes
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, RECORD, WAIT, Op, Storage, Sync, Trace
from recipe_lib.plan.tracing.collectives import read_collective
from recipe_lib.plan.tracing.module_tracker import Places
from recipe_lib.plan.tracing.operator_costs import Cost, cost_of, tensors_in
from recipe_lib.plan.tracing.plain_tensors import PLAIN_TENSORS, has_memory, plain_parts
from recipe_lib.plan.tracing.repeated_calls import Repeats
from recipe_lib.plan.world.cached_fake_mode import CachedFakeMode
from recipe_lib.plan.world.dtensor_patches import on_shards, propagation_unseen

# `fn(operator's name, its arguments, stream)` to [(bytes, whether they stay taken)] of an operator with arithmetic.
KernelMemory = Callable[[str, Sequence[Any], int], list[tuple[int, bool]]]


class _Held:
    """A storage of torch that is alive; its numbers in the trace change when it is resized."""

    __slots__ = ("history", "number", "reference")

    def __init__(self, number: int) -> None:
        self.number = number
        self.history = [number]
        self.reference: Any = None


class Tracer(TorchDispatchMode):
    """Traces what runs inside `with tracer.running():`.

    device_type: of the accelerator; storages elsewhere are host memory. fast: answers known calls, in a simulation.
    kernel_memory: scratch of kernels that no tensor shows.
    """

    def __init__(
        self,
        device_type: str,
        fast: CachedFakeMode | None = None,
        kernel_memory: KernelMemory | None = None,
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.device_type, self.fast, self.kernel_memory = device_type, fast, kernel_memory
        self.stream: Callable[[], int] = lambda: 0
        self.vocabulary: set[int] = set()
        self.parameter_names: dict[int, str] = {}  # of a parameter's id
        self.between_actions: Callable[[], None] = lambda: None  # of a pipeline, where gradients were made
        self.values_are_zero = False  # in a simulation: a number that is read is 0, not refused
        self._batch = self._pinned = False
        self._repeats = Repeats()
        self.groups: dict[str, str] = {}  # a process group's name -> its mesh dimension
        self._held: dict[int, _Held] = {}
        self._places = Places()
        self._muted = 0
        self.phase = -1
        self.optimizers: dict[int, Any] = {}

    # What runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traces inside the block."""
        following = self._places.following(self._label_gradients)
        with self._resizes(), propagation_unseen(self._mute), following, _no_rules_for_this_mode(), self:
            yield

    def begin_phase(self, name: str) -> None:
        """Everything from here on belongs to the phase."""
        self.trace.phases.append(name)
        self.phase = len(self.trace.phases) - 1
        self.trace.events.append((PHASE, self.phase))

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Modules are called by their dotted names from here on; embeddings tell the vocabulary's size."""
        self._places.name_modules(model, prefix)
        self.vocabulary |= {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}

    @contextmanager
    def making_batches(self) -> Iterator[None]:
        """What is made inside the block are batches."""
        self._batch = True
        try:
            yield
        finally:
            self._batch = False

    @contextmanager
    def remembering(self, module: Any, name: str) -> Iterator[None]:
        """A function of a module whose work follows from shapes alone is run once for each of them."""
        original = getattr(module, name)

        def run(*args: Any) -> Any:
            if self._muted or self.fast is None:
                return original(*args)
            return self._repeats.run(original, args, self)

        setattr(module, name, run)
        try:
            yield
        finally:
            setattr(module, name, original)

    def label(self, tensor: Tensor, kind: str, label: str) -> None:
        """Says what a tensor's memory is, now and in every size it had."""
        for part in plain_parts(tensor):
            held = self._held.get(part.untyped_storage()._cdata)
            for number in held.history if held else ():
                storage = self.trace.storages[number]
                if storage.kind == kind and storage.label not in ("", label):
                    storage.label = common_label(storage.label, label)
                else:
                    storage.kind, storage.label = kind, label

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's memory now; -1: none is known."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held.number if held else -1

    def _numbers(self, value: Any) -> tuple[int, ...]:
        """Of the memory of the tensors in a value, as far as it is known."""
        held = (self._held.get(tensor.untyped_storage()._cdata) for tensor in tensors_in(value) if has_memory(tensor))
        return tuple(one.number for one in held if one is not None)

    def alive(self, device: bool = True) -> int:
        """Bytes alive now."""
        storages = self.trace.storages
        return sum(
            storages[held.number].bytes for held in self._held.values() if storages[held.number].device == device
        )

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        for kind in types:
            if kind not in PLAIN_TENSORS:
                local = self.fast and on_shards(func, args, kwargs or {})
                if local:
                    return self.__torch_dispatch__(func, (), *local)
                return NotImplemented  # a wrapper's own operators come back here one by one
        if self.values_are_zero and self.fast is not None and func is _NUMBER:
            return 0.0 if args[0].dtype.is_floating_point else 0
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        known, self._pinned = None, func is _PIN or bool(kwargs.get("pin_memory")) or self._is_sent(func, args, kwargs)
        if self.fast is not None and func is _PIN:  # the fake mode has no answer; it is a copy on the host
            func, kwargs = _LIKE, {}
            args = args[:1]
        if self.fast is not None and func is _IS_PINNED:
            return False
        if self.fast is not None and id(func) in _PROFILER:  # no work of the device, and slow in the fake mode
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if self.fast is not None and func is _WAIT:  # the fake mode gives a copy, the real one what it waited for
            result = args[0]
        elif self.fast is not None:
            result, known = self.fast.call(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        cost = known.cost if known is not None else None
        if cost is None:
            cost = cost_of(func, args, kwargs, result)
            if known is not None:
                known.cost = cost
        self._note(func, args, kwargs, result, cost)
        return result

    def _is_sent(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it is a copy to the host that nobody waits for, whose memory torch pins."""
        return func is _TO_COPY and bool(kwargs.get("non_blocking")) and _device_of(args[0]) == self.device_type

    def _mute(self, change: int) -> None:
        self._muted += change

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, cost: Cost) -> None:
        if cost.is_view and not cost.makes_memory:
            return
        part, module = self.place()
        name = cost.name
        if cost.makes_memory:
            for tensor in tensors_in(result):
                self._see(tensor, part, module, name)
        if cost.is_view:
            return
        if cost.relabel:
            self._relabel(name, args, kwargs, result)
        stream = self.stream()
        scratch = self.kernel_memory(name, args, stream) if self.kernel_memory else ()
        for size, stays in scratch:
            number = self.new(size, True, part, module, name, "workspace")
            if not stays:
                self.trace.events.append((FREE, number))
        trace = self.trace
        collective = read_collective(name, args, self.groups) if cost.communicates else None
        op = Op(name, stream, part, module, self.phase, cost.flops, cost.bytes, cost.dtype, collective)
        op.transfer = cost.transfer
        if part in ("forward", "recompute"):
            op.reads, op.makes = (self._numbers(value) for value in ((args, tuple(kwargs.values())), result))
        trace.ops.append(op)
        if cost.transfer == "to_device" and part == "backward":
            self._label_returned(name, args)
        trace.events.append((OP, len(trace.ops) - 1))

    def place(self) -> tuple[str, str]:
        """The part of the step and the module that run now."""
        return self._places.now()

    # Memory

    def see(self, tensors: Sequence[Tensor]) -> None:
        """Notes the memory of tensors that came without an operator, if it is new."""
        part, module = self.place()
        for tensor in tensors:
            self._see(tensor, part, module, "")

    def _see(self, tensor: Tensor, part: str, module: str, name: str) -> None:
        """Notes a tensor's storage, if it is new."""
        if not has_memory(tensor):
            return
        device = _device_of(tensor)
        if device == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        kind = "temporary"
        if self._batch:
            kind = "batch"
        elif tensor.dim() >= 2 and tensor.shape[-1] in self.vocabulary:
            kind = "logits"
        size, on_device = storage.nbytes(), device == self.device_type
        if self._pinned and not on_device:
            size = pinned_bytes(size)
        self.hold(storage, self.new(size, on_device, part, module, name, kind))

    def hold(self, storage: Any, number: int) -> None:
        """The storage is that of a number, which ends with it."""
        key = storage._cdata
        held = self._held[key] = _Held(number)
        held.reference = weakref.ref(storage, lambda _: self._drop(key))

    def new(self, size: int, device: bool, part: str, module: str, name: str, kind: str) -> int:
        """Notes an allocation and returns its number."""
        storages = self.trace.storages
        storages.append(Storage(size, device, self.stream(), kind, module, "", name, part, max(self.phase, 0)))
        self.trace.events.append((ALLOC, len(storages) - 1))
        return len(storages) - 1

    def _drop(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.trace.events.append((FREE, held.number))

    def _resized(self, storage: Any, size: int) -> None:
        """FSDP frees and takes the memory of its tensors by their size."""
        held = self._held.get(storage._cdata)
        if held is None:
            return
        before = self.trace.storages[held.number]
        if before.bytes == size:
            return
        self.trace.events.append((FREE, held.number))
        part, module = self.place()
        held.number = self.new(size, before.device, part, module, "resize_", before.kind)
        self.trace.storages[held.number].label = before.label
        held.history.append(held.number)

    @contextmanager
    def _resizes(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if not self._muted:
                self._resized(storage, size)
            return result

        torch.UntypedStorage.resize_ = resized
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def _relabel(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What FSDP's own operators read and write is known by their names."""
        if name == "fsdp::all_gather_copy_in":
            self._mark(result, "communication")
        elif name == "fsdp::split_with_sizes_copy":
            self._mark(kwargs.get("out", args[-1]), "gathered")
        elif name == "fsdp::chunk_cat":
            self._mark(kwargs.get("out", args[-1]), "communication")

    def _mark(self, value: Any, kind: str) -> None:
        for tensor in tensors_in(value):
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None:
                for number in held.history:
                    self.trace.storages[number].kind = kind

    def _label_returned(self, name: str, args: Sequence[Any]) -> None:
        """What backward copies back from pinned memory that forward took is what forward kept for it."""
        tensors = tensors_in(args)
        source = self._held.get(tensors[-1].untyped_storage()._cdata)
        if name == "aten::copy_" and source is not None and self.trace.storages[source.number].part == "forward":
            self._mark(tensors[0], "activations")

    # Optimizers, streams

    def _label_gradients(self, optimizer: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.parameter_names.get(id(parameter)) or self._label_of(parameter)  # some rows of one
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradients", name)
                for value in optimizer.state.get(parameter, {}).values():  # perhaps here for this step alone
                    if isinstance(value, Tensor):
                        self.label(value, "optimizer", name)

    def _label_of(self, tensor: Tensor) -> str:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return self.trace.storages[held.number].label if held is not None else ""

    def record(self, stream: int, event: int) -> None:
        """The device's stream passed a mark."""
        self.trace.syncs.append(Sync(event, stream))
        self.trace.events.append((RECORD, len(self.trace.syncs) - 1))

    def wait(self, stream: int, event: int) -> None:
        """The device's stream waits for a mark."""
        self.trace.syncs.append(Sync(event, stream))
        self.trace.events.append((WAIT, len(self.trace.syncs) - 1))


@contextmanager
def _no_rules_for_this_mode() -> Iterator[None]:
    """torch looks at every operator whether somebody has a rule for it under this mode, at 2 us; nobody has."""
    find = simple_registry.find_torch_dispatch_rule
    simple_registry.find_torch_dispatch_rule = lambda op, kind: None if kind is Tracer else find(op, kind)
    try:
        yield
    finally:
        simple_registry.find_torch_dispatch_rule = find


# torch wraps a mode's method so that its compiler leaves it alone, at 5 us a call; nothing compiles here.
_unwrapped = getattr(Tracer.__torch_dispatch__, "__wrapped__", Tracer.__torch_dispatch__)
Tracer.__torch_dispatch__ = _unwrapped  # type: ignore[method-assign]

_DEVICE = torch.ops.prim.device.default
_NUMBER = torch.ops.aten._local_scalar_dense.default
_PIN = torch.ops.aten._pin_memory.default
_IS_PINNED = torch.ops.aten.is_pinned.default
_LIKE = torch.ops.aten.empty_like.default
_TO_COPY = torch.ops.aten._to_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_PROFILER = frozenset(
    id(overload)
    for overload in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)


def _device_of(tensor: Tensor) -> str:
    return str(tensor.fake_device.type if type(tensor) is FakeTensor else tensor.device.type)


def common_label(first: str, second: str) -> str:
    """The label of memory that two parameters share, such as the gradients of an FSDP unit: `model.layers.0.*`."""
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])
