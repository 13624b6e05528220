"""Notes every allocation, release, operator and collective of a program, simulated or real, as a `Trace`."""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.memory.peaks import pinned_bytes
from recipe_lib.plan.streams.read_values import largest_result, lists_of_ones
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, RECORD, USE, WAIT, Op, Storage, Sync, Trace
from recipe_lib.plan.tracing import known_operators as known
from recipe_lib.plan.tracing.collectives import read_collective
from recipe_lib.plan.tracing.compiled_kernels import around_operator
from recipe_lib.plan.tracing.host_marks import copy_blocks, host_waits
from recipe_lib.plan.tracing.operator_costs import Cost, cost_of, tensors_in
from recipe_lib.plan.tracing.plain_tensors import PLAIN_TENSORS, has_memory, plain_parts
from recipe_lib.plan.tracing.summed_gradients import ADD_IN_PLACE, is_summed_in_place
from recipe_lib.plan.world.cached_fake_mode import CachedCall, CachedFakeMode
from recipe_lib.plan.world.compiled_code import inside_of
from recipe_lib.plan.world.dtensor_patches import no_rules_under, on_shards, propagation_unseen

# `fn(operator's name, its arguments, stream)` to [(bytes, whether they stay taken)] of an operator with arithmetic.
KernelMemory = Callable[[str, Sequence[Any], int], list[tuple[int, bool]]]


class Tracer(TorchDispatchMode):
    """Traces what runs inside `with tracer.running():`.

    device_type: of the accelerator; storages elsewhere are host memory. fast: answers known calls, in a simulation.
    kernel_memory: scratch of kernels that no tensor shows. checker: follows all that happens, if there is one.
    """

    def __init__(
        self,
        device_type: str,
        fast: CachedFakeMode | None = None,
        kernel_memory: KernelMemory | None = None,
        checker: StreamChecker | None = None,
    ) -> None:
        super().__init__()
        self.supports_higher_order_operators = True
        self.checker = checker
        self.trace = Trace()
        self.device_type, self.fast, self.kernel_memory = device_type, fast, kernel_memory
        self.stream: Callable[[], int] = lambda: 0
        self.vocabulary: set[int] = set()
        self.parameter_names: dict[int, str] = {}  # of a parameter's id
        self.between_actions: Callable[[], None] = lambda: None  # of a pipeline, where gradients were made
        self.values_are_zero = False  # in a simulation: a number that is read is 0, not refused
        self._batch = self._pinned = False
        self.groups: dict[str, str] = {}  # a process group's name -> its mesh dimension
        self._held: dict[int, HeldStorage] = {}
        self.labels = MemoryLabels(lambda: self.trace, self._held)
        self._places = Places()
        self.muted = 0  # what runs is no part of the program, where it is not 0
        self.is_compiling: Callable[[], bool] | None = None  # where code is compiled: whether it is being compiled
        self.phase = -1
        self.optimizers: dict[int, Any] = {}

    # What runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traces inside the block."""
        following = self._places.following(self._label_gradients)
        with self._resizes(), propagation_unseen(self._mute), following, no_rules_under(Tracer), self:
            yield
        self._held.clear()  # what is released afterwards is no part of the run

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
    def reading_numbers(self) -> Iterator[None]:
        """Inside, a number that is read is 1, and a checker counts such waits."""
        assert self.checker is not None
        self.checker.counts, self.values_are_zero, self.checker.phase = True, True, self.trace.phases[self.phase]
        try:
            with lists_of_ones():
                yield
        finally:
            self.checker.counts = self.values_are_zero = False

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's memory now; -1: none is known."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held.number if held else -1

    def numbers(self, value: Any) -> tuple[int, ...]:
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

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile works as if this mode were not there."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.is_compiling is not None and self.is_compiling():
            return func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.HigherOrderOperator):
            return around_operator(self, func, args, kwargs or {})
        if func is known.DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if self.is_compiling is not None and (inside := inside_of(func)) is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        if id(func) in known.MATMULS:  # inside of an operator no autograd takes them apart
            with self:
                return func.decompose(*args, **(kwargs or {}))
        for kind in types:
            if kind not in PLAIN_TENSORS:
                local = self.fast and on_shards(func, args, kwargs or {})
                if local:
                    return self.__torch_dispatch__(func, (), *local)
                return NotImplemented  # a wrapper's own operators come back here one by one
        if self.values_are_zero and self.fast is not None and func is known.NUMBER and _has_no_value(args[0]):
            return self._number_read(func, args)
        kwargs = kwargs or {}
        if is_summed_in_place(func, args, kwargs):
            func = ADD_IN_PLACE
        if self.muted:
            return func(*args, **kwargs)
        call: CachedCall | None = None
        self._pinned = func is known.PIN or bool(kwargs.get("pin_memory")) or self._is_sent(func, args, kwargs)
        if self.fast is not None and func is known.PIN:  # the fake mode has no answer; it is a copy on the host
            func, kwargs = known.LIKE, {}
            args = args[:1]
        if self.fast is not None and func is known.IS_PINNED:
            return False
        if self.fast is not None and id(func) in known.PROFILER:  # no work of the device, and slow in the fake mode
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if self.fast is not None and func is known.WAIT:  # the fake mode gives a copy, the real one what it waited for
            result = args[0]
        elif self.values_are_zero and self.checker and (largest := largest_result(func, args, kwargs)) is not None:
            result = largest
        elif self.fast is not None:
            result, call = self.fast.call(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        cost = call.cost if call is not None else None
        if cost is None:
            cost = cost_of(func, args, kwargs, result)
            if call is not None:
                call.cost = cost
        self.note(func, args, kwargs, result, cost)
        return result

    def _number_read(self, func: Any, args: Sequence[Any]) -> float:
        """In place of a value that there is not: 0, or what a condition is more likely to go on with where all waits
        are to be seen."""
        if self.checker is not None and not self.muted:
            op = Op("aten::item", self.stream(), *self.place())
            self.checker.operator(func, args, {}, None, op, self.number_of)
        number = int(self.checker is not None and args[0].dtype is not torch.bool)
        return float(number) if args[0].dtype.is_floating_point else number

    def _is_sent(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it is a copy to the host that nobody waits for, whose memory torch pins."""
        return func is known.TO_COPY and bool(kwargs.get("non_blocking")) and _device_of(args[0]) == self.device_type

    def _mute(self, change: int) -> None:
        self.muted += change

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, cost: Cost) -> None:
        """Notes an operator with its results."""
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
            self.labels.of_operator(name, args, kwargs, result)
        stream = self.stream()
        scratch = self.kernel_memory(name, args, stream) if self.kernel_memory else ()
        for size, stays in scratch:
            number = self.new(size, True, part, module, name, "workspace")
            if not stays:
                self._free(number)
        trace = self.trace
        collective = read_collective(func, args, self.groups) if cost.communicates else None
        op = Op(name, stream, part, module, self.phase, cost.flops, cost.bytes, cost.dtype, collective)
        op.transfer, op.shape = cost.transfer, cost.shape
        op.on_host = cost.on_host and self.device_type != "cpu"
        if self.checker is not None and not self._batch:
            self.checker.operator(func, args, kwargs, result, op, self.number_of)
        if part in ("forward", "recompute"):
            op.reads, op.makes = (self.numbers(value) for value in ((args, tuple(kwargs.values())), result))
        trace.ops.append(op)
        if cost.transfer == "to_device" and part == "backward":
            self.labels.of_returned(name, args)
        trace.events.append((OP, len(trace.ops) - 1))
        if copy_blocks(cost, args, kwargs):
            host_waits(trace, stream)

    def place(self) -> tuple[str, str]:
        """The part of the step and the module that run now."""
        return self._places.now()

    # Memory

    def see(self, tensors: Sequence[Tensor], name: str = "") -> None:
        """Notes the memory of tensors that came without an operator, if it is new. name: of what made it."""
        part, module = self.place()
        for tensor in tensors:
            self._see(tensor, part, module, name)

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
        held = self._held[key] = HeldStorage(number)
        held.reference = weakref.ref(storage, lambda _: self._drop(key))

    def new(self, size: int, device: bool, part: str, module: str, name: str, kind: str) -> int:
        """Notes an allocation and returns its number."""
        storages = self.trace.storages
        pinned = self._pinned and not device
        storages.append(Storage(size, device, self.stream(), kind, module, "", name, part, max(self.phase, 0), pinned))
        self.trace.events.append((ALLOC, len(storages) - 1))
        if self.checker is not None:
            self.checker.allocated(len(storages) - 1, storages[-1])
        return len(storages) - 1

    def _drop(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._free(held.number)

    def _free(self, number: int) -> None:
        self.trace.events.append((FREE, number))
        if self.checker is not None:
            self.checker.freed(number)

    def _resized(self, storage: Any, size: int) -> None:
        """FSDP frees and takes the memory of its tensors by their size."""
        held = self._held.get(storage._cdata)
        if held is None:
            return
        before = self.trace.storages[held.number]
        if before.bytes == size:
            return
        self._free(held.number)
        part, module = self.place()
        held.number = self.new(size, before.device, part, module, "resize_", before.kind)
        self.trace.storages[held.number].label = before.label
        held.history.append(held.number)

    @contextmanager
    def _resizes(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if not self.muted:
                self._resized(storage, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    # Optimizers, streams

    def _label_gradients(self, optimizer: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.parameter_names.get(id(parameter)) or self.labels.of_tensor(parameter)  # some rows of one
                if parameter.grad is not None:
                    self.labels.label(parameter.grad, "gradients", name)
                for value in optimizer.state.get(parameter, {}).values():  # perhaps here for this step alone
                    if isinstance(value, Tensor):
                        self.labels.label(value, "optimizer", name)

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """A tensor's memory is used on another stream than its own (`record_stream`)."""
        for part in plain_parts(tensor):
            number = self.number_of(part)
            if number >= 0 and not self.muted:
                self.trace.uses.append((number, stream))
                self.trace.events.append((USE, len(self.trace.uses) - 1))
                if self.checker is not None:
                    self.checker.recorded_stream(number, stream)

    def record(self, stream: int, event: int) -> None:
        """The device's stream passed a mark."""
        self.trace.syncs.append(Sync(event, stream))
        self.trace.events.append((RECORD, len(self.trace.syncs) - 1))
        if self.checker is not None:
            self.checker.recorded(stream, event)

    def wait(self, stream: int, event: int) -> None:
        """The device's stream waits for a mark; one below 0 was never set."""
        if event >= 0:
            self.trace.syncs.append(Sync(event, stream))
            self.trace.events.append((WAIT, len(self.trace.syncs) - 1))
        if self.checker is not None:
            self.checker.waited(stream, event)


# torch wraps a mode's method so that its compiler leaves it alone, at 5 us a call; nothing compiles here.
_unwrapped = getattr(Tracer.__torch_dispatch__, "__wrapped__", Tracer.__torch_dispatch__)
Tracer.__torch_dispatch__ = _unwrapped  # type: ignore[method-assign]


def _has_no_value(tensor: Tensor) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None


def _device_of(tensor: Tensor) -> str:
    return str(tensor.fake_device.type if type(tensor) is FakeTensor else tensor.device.type)


# What memory is: labels and kinds that are known when it is there already.


class HeldStorage:
    """A storage of torch that is alive; its numbers in the trace change when it is resized."""

    __slots__ = ("history", "number", "reference")

    def __init__(self, number: int) -> None:
        self.number = number
        self.history = [number]
        self.reference: Any = None


class MemoryLabels:
    """Labels storages of the present trace. held: those that are alive, by their address."""

    def __init__(self, trace: Callable[[], Trace], held: dict[int, HeldStorage]) -> None:
        self._trace, self._held = trace, held

    def label(self, tensor: Tensor, kind: str, label: str) -> None:
        """Says what a tensor's memory is, now and in every size it had."""
        for part in plain_parts(tensor):
            held = self._held.get(part.untyped_storage()._cdata)
            for number in held.history if held else ():
                storage = self._trace().storages[number]
                if storage.kind == kind and storage.label not in ("", label):
                    storage.label = common_label(storage.label, label)
                else:
                    storage.kind, storage.label = kind, label

    def of_operator(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What FSDP's own operators read and write is known by their names."""
        if name == "fsdp::all_gather_copy_in":
            self.mark(result, "communication")
        elif name == "fsdp::split_with_sizes_copy":
            self.mark(kwargs.get("out", args[-1]), "gathered")
        elif name == "fsdp::chunk_cat":
            self.mark(kwargs.get("out", args[-1]), "communication")

    def mark(self, value: Any, kind: str) -> None:
        for tensor in tensors_in(value):
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None:
                for number in held.history:
                    self._trace().storages[number].kind = kind

    def of_returned(self, name: str, args: Sequence[Any]) -> None:
        """What backward copies back from pinned memory that forward took is what forward kept for it."""
        tensors = tensors_in(args)
        source = self._held.get(tensors[-1].untyped_storage()._cdata)
        if name == "aten::copy_" and source is not None and self._trace().storages[source.number].part == "forward":
            self.mark(tensors[0], "activations")

    def of_tensor(self, tensor: Tensor) -> str:
        held = self._held.get(tensor.untyped_storage()._cdata)
        return self._trace().storages[held.number].label if held is not None else ""


def common_label(first: str, second: str) -> str:
    """The label of memory that two parameters share, such as the gradients of an FSDP unit: `model.layers.0.*`."""
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])


# Where a traced program is: which part of a step, and in which module, in backward too.


_NO_NODE = 2**63  # sequence numbers of nodes that accumulate gradients are the largest there are


class Places:
    """Follows modules and optimizers inside `with places.following(...)`; `now()` tells the place.

    Autograd numbers its nodes in the order in which forward makes them; so the number of the node that runs in backward
    tells the module that made it.
    """

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._sequence: list[int] = [0]
        self._sequence_module: list[str] = [""]
        self._backward_module = ""
        self._optimizing = 0

    @contextmanager
    def following(self, before_optimizer: Callable[[Any], None]) -> Iterator[None]:
        """before_optimizer: called with each optimizer whose step begins."""

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizing += 1
            before_optimizer(optimizer)

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizing -= 1

        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(begin),
                register_optimizer_step_post_hook(end),
            ):
                stack.callback(handle.remove)
            yield

    def name_modules(self, model: nn.Module, prefix: str) -> None:
        """Modules are called by their dotted names from here on."""
        self._names |= {id(module): prefix + name for name, module in model.named_modules()}

    def now(self) -> tuple[str, str]:
        """The part of the step and the module that run now."""
        modules = self._modules
        if torch._C._current_graph_task_id() == -1:
            if self._optimizing:
                return "optimizer", ""
            return ("forward", modules[-1]) if modules else ("other", "")
        if modules:
            return "recompute", modules[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if 0 <= number < _NO_NODE:
                self._backward_module = self._sequence_module[bisect_right(self._sequence, number) - 1]
        return "backward", self._backward_module

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code calls no modules
            return
        self._modules.append(self._names.get(id(module), type(module).__name__))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._modules:
            self._modules.pop()
        self._mark()

    def _mark(self) -> None:
        number = torch.autograd._get_sequence_nr()
        module = self._modules[-1] if self._modules else ""
        if number == self._sequence[-1]:
            self._sequence_module[-1] = module
            return
        self._sequence.append(number)
        self._sequence_module.append(module)
