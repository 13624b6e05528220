"""Notes every allocation, release, operator and collective of a program, simulated or real, as a `Trace`."""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.plan.collectives import read_collective
from recipe_lib.plan.fast_fake import FastFake
from recipe_lib.plan.operators import Cost, cost_of
from recipe_lib.plan.repeats import Repeats
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, RECORD, WAIT, Op, Storage, Sync, Trace

# `fn(operator's name, its arguments, stream)` to [(bytes, whether they stay taken)] of an operator with arithmetic.
KernelMemory = Callable[[str, Sequence[Any], int], list[tuple[int, bool]]]

_PLAIN_TENSORS = frozenset({FakeTensor, Tensor, nn.Parameter})
_NO_NODE = 2**63  # sequence numbers of nodes that accumulate gradients are the largest there are


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
        fast: FastFake | None = None,
        kernel_memory: KernelMemory | None = None,
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.device_type, self.fast, self.kernel_memory = device_type, fast, kernel_memory
        self.stream: Callable[[], int] = lambda: 0
        self.vocabulary: set[int] = set()
        self.parameter_names: dict[int, str] = {}  # of a parameter's id
        self.values_are_zero = False  # in a simulation: a number that is read is 0, not refused
        self._batch = False
        self._repeats = Repeats()
        self.groups: dict[str, str] = {}  # a process group's name -> its mesh dimension
        self._held: dict[int, _Held] = {}
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._sequence: list[int] = [0]
        self._sequence_module: list[str] = [""]
        self._muted = 0
        self._optimizing = 0
        self.phase = -1
        self.optimizers: dict[int, Any] = {}

    # What runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traces inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self._resizes())
            stack.enter_context(self._sharding_is_silent())
            for handle in (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
                register_optimizer_step_pre_hook(self._begin_optimizer),
                register_optimizer_step_post_hook(self._end_optimizer),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def begin_phase(self, name: str) -> None:
        """Everything from here on belongs to the phase."""
        self.trace.phases.append(name)
        self.phase = len(self.trace.phases) - 1
        self.trace.events.append((PHASE, self.phase))

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Modules are called by their dotted names from here on; embeddings tell the vocabulary's size."""
        for name, module in model.named_modules():
            self._names[id(module)] = prefix + name
            if isinstance(module, nn.Embedding):
                self.vocabulary.add(module.num_embeddings)

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
            if kind not in _PLAIN_TENSORS:
                local = self.fast and _on_shards(func, args, kwargs or {})
                if local:
                    return self.__torch_dispatch__(func, (), *local)
                return NotImplemented  # a wrapper's own operators come back here one by one
        if self.values_are_zero and self.fast is not None and func is _NUMBER:
            return 0.0 if args[0].dtype.is_floating_point else 0
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        known = None
        if self.fast is not None:
            result, known = self.fast.call(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        cost = known.cost if known is not None else None
        if cost is None:
            cost = cost_of(func, args, kwargs, result)
            if known is not None:
                known.cost = cost
        if cost is not _NOTHING:
            self._note(func, args, kwargs, result, cost)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, cost: Cost) -> None:
        part, module = self.place()
        name = cost.name
        if cost.makes_memory:
            for tensor in _tensors(result):
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
        trace.ops.append(Op(name, stream, part, module, self.phase, cost.flops, cost.bytes, cost.dtype, collective))
        trace.events.append((OP, len(trace.ops) - 1))

    def place(self) -> tuple[str, str]:
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

    _backward_module = ""

    # Memory

    def see(self, tensors: Sequence[Tensor]) -> None:
        """Notes the memory of tensors that came without an operator, if it is new."""
        part, module = self.place()
        for tensor in tensors:
            self._see(tensor, part, module, "")

    def _see(self, tensor: Tensor, part: str, module: str, name: str) -> None:
        """Notes a tensor's storage, if it is new."""
        device = tensor.fake_device.type if type(tensor) is FakeTensor else tensor.device.type
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
        self.hold(storage, self.new(storage.nbytes(), device == self.device_type, part, module, name, kind))

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

    @contextmanager
    def _sharding_is_silent(self) -> Iterator[None]:
        """DTensor finds out shapes with tensors of the global size, which no rank ever holds."""
        patched = [name for name in _PROPAGATIONS if hasattr(ShardingPropagator, name)]
        originals = {name: getattr(ShardingPropagator, name) for name in patched}

        def silent(original: Callable[..., Any], meta: bool) -> Callable[..., Any]:
            def run(propagator: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
                if meta and not schema.op._schema.returns:
                    return None  # nothing to find out, and an optimizer's thousands of tensors to do it with
                self._muted += 1
                try:
                    return original(propagator, schema, *args, **kwargs)
                finally:
                    self._muted -= 1

            return run

        for name, original in originals.items():
            setattr(ShardingPropagator, name, silent(original, "tensor_meta" in name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(ShardingPropagator, name, original)

    def _relabel(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What FSDP's own operators read and write is known by their names."""
        if name == "fsdp::all_gather_copy_in":
            self._mark(result, "communication")
        elif name == "fsdp::split_with_sizes_copy":
            self._mark(kwargs.get("out", args[-1]), "gathered")
        elif name == "fsdp::chunk_cat":
            self._mark(kwargs.get("out", args[-1]), "communication")

    def _mark(self, value: Any, kind: str) -> None:
        for tensor in _tensors(value):
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None:
                for number in held.history:
                    self.trace.storages[number].kind = kind

    # Modules, optimizers, streams

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(id(module), type(module).__name__))
        self._mark_sequence()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        self._mark_sequence()

    def _mark_sequence(self) -> None:
        """Autograd numbers its nodes in the order of forward: a node's number tells the module that made it."""
        number = torch.autograd._get_sequence_nr()
        if number == self._sequence[-1]:
            self._sequence_module[-1] = self._modules[-1] if self._modules else ""
            return
        self._sequence.append(number)
        self._sequence_module.append(self._modules[-1] if self._modules else "")

    def _begin_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizing += 1
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradients", self.parameter_names.get(id(parameter), ""))

    def _end_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizing -= 1

    def record(self, stream: int, event: int) -> None:
        """The device's stream passed a mark."""
        self.trace.syncs.append(Sync(event, stream))
        self.trace.events.append((RECORD, len(self.trace.syncs) - 1))

    def wait(self, stream: int, event: int) -> None:
        """The device's stream waits for a mark."""
        self.trace.syncs.append(Sync(event, stream))
        self.trace.events.append((WAIT, len(self.trace.syncs) - 1))


# torch wraps a mode's method so that its compiler leaves it alone, at 5 us a call; nothing compiles here.
Tracer.__torch_dispatch__ = getattr(Tracer.__torch_dispatch__, "__wrapped__", Tracer.__torch_dispatch__)

_DEVICE = torch.ops.prim.device.default
_NUMBER = torch.ops.aten._local_scalar_dense.default
_PROPAGATIONS = ("_propagate_tensor_meta_non_cached", "propagate_tensor_meta", "propagate_op_sharding_non_cached")
_NOTHING = Cost("", 0, 0, "", True, False, False, False)


def _on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of an optimizer's operator over lists of shards, as the plain tensors they are on this rank.

    DTensor looks at each of thousands to find that they are cut alike, which takes seconds. None for anything else.
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


def common_label(first: str, second: str) -> str:
    """The label of memory that two parameters share, such as the gradients of an FSDP unit: `model.layers.0.*`."""
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in what an operator returns."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return []


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: of a sharded one its local part, of a wrapper what it holds."""
    if type(tensor) not in _PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        held = (getattr(tensor, name) for name in names)
        return [part for value in held if isinstance(value, Tensor) for part in plain_parts(value)]
    return [tensor]
