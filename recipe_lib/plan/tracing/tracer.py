"""A dispatch mode that notes every allocation, release, operator and collective as a `Trace`.

What it sees may be simulated (`CachedFakeMode` then answers operators without values) or real.
Streams, waits and `record_stream` are told to it by the simulated device (`connect_streams`). The
part of a step and the module that run it learns from `RunningModules`.

    tracer = Tracer(device_type)
    with tracer.activate():
        tracer.begin_phase("step")
        ...
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.memory.peaks import round_up_to_pinned
from recipe_lib.plan.simulated_world.cached_fake_mode import CachedCall, CachedFakeMode
from recipe_lib.plan.simulated_world.compiled_code import (
    find_opaque_function,
    run_higher_order_operator,
)
from recipe_lib.plan.simulated_world.simulated_ranks import (
    apply_patches,
    hide_propagation,
    unwrap_shards,
)
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.operator_costs import (
    ADD_IN_PLACE,
    PLAIN_TENSORS,
    Cost,
    compute_cost,
    has_memory,
    is_blocking,
    is_summed_in_place,
    list_plain_tensors,
    list_tensors,
    read_collective,
)
from recipe_lib.plan.tracing.trace import (
    ALLOC,
    FREE,
    HOST,
    OP,
    PHASE,
    RECORD,
    USE,
    WAIT,
    Op,
    Storage,
    Sync,
    Trace,
)

_NO_NODE = 2**63  # nodes that accumulate gradients have larger numbers than any that a module made


class RunningModules:
    """The modules and optimizers that run inside `with running.follow(...)`.

    Hooks on them tell it in forward and in the optimizer's step. Backward runs no modules: there
    the number of the autograd node that runs tells which module made it.
    """

    def __init__(self) -> None:
        self._modules: list[str] = []  # names of those that run, the innermost last
        self._names: dict[int, str] = {}  # id of a module -> its dotted name
        # Autograd numbers its nodes in the order in which forward makes them. Nodes from number
        # `_sequence[i]` on were made in the module `_sequence_module[i]`.
        self._sequence: list[int] = [0]
        self._sequence_module: list[str] = [""]
        self._backward_module = ""
        self._num_optimizers = 0  # whose step runs

    @contextmanager
    def follow(self, before_optimizer: Callable[[Any], None]) -> Iterator[None]:
        """Follow what runs inside the block.

        before_optimizer: called with each optimizer whose step begins.
        """

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._num_optimizers += 1
            before_optimizer(optimizer)

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._num_optimizers -= 1

        # A handle is a context that removes its hook.
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ):
            yield

    def name_modules(self, model: nn.Module, prefix: str) -> None:
        """Call a model's modules by their dotted names from here on."""
        self._names |= {id(module): prefix + name for name, module in model.named_modules()}

    def locate(self) -> tuple[str, str]:
        """Return the part of the step and the name of the module that run now."""
        modules = self._modules
        if torch._C._current_graph_task_id() == -1:  # no backward runs
            if self._num_optimizers:
                return "optimizer", ""
            return ("forward", modules[-1]) if modules else ("other", "")
        if modules:
            return "recompute", modules[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            # Between two numbered nodes, as for hooks on gradients, the module stays the last one.
            if 0 <= number < _NO_NODE:
                index = bisect_right(self._sequence, number) - 1
                self._backward_module = self._sequence_module[index]
        return "backward", self._backward_module

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code calls no modules
            return
        self._modules.append(self._names.get(id(module), type(module).__name__))
        self._mark_sequence()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._modules:
            self._modules.pop()
        self._mark_sequence()

    def _mark_sequence(self) -> None:
        """Note that nodes made from here on belong to the innermost module."""
        number = torch.autograd._get_sequence_nr()
        module = self._modules[-1] if self._modules else ""
        if number == self._sequence[-1]:  # the module before made no node
            self._sequence_module[-1] = module
            return
        self._sequence.append(number)
        self._sequence_module.append(module)


# `fn(operator's name, its arguments, stream)` returns [(bytes, whether they stay taken)]: what the
# operator's kernel takes besides its outputs.
KernelMemory = Callable[[str, Sequence[Any], int], list[tuple[int, bool]]]

# Operators of FSDP -> the kind of the memory that they write.
_FSDP_KINDS = {
    "fsdp::all_gather_copy_in": "communication",
    "fsdp::split_with_sizes_copy": "gathered",
    "fsdp::chunk_cat": "communication",
}
_DEVICE = torch.ops.prim.device.default
_NUMBER = torch.ops.aten._local_scalar_dense.default  # what `.item()` calls
_PIN = torch.ops.aten._pin_memory.default
_IS_PINNED = torch.ops.aten.is_pinned.default
_TO_COPY = torch.ops.aten._to_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Made of aten::mm and views. They are known by id: an operator hashes itself in Python, which is
# slow, and it lives as long as torch, so its id is no other's.
_MATMULS = frozenset(map(id, (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)))
_PROFILER = frozenset(
    id(overload)
    for overload in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)


class Tracer(TorchDispatchMode):
    """A dispatch mode whose `trace` has what runs inside `with tracer.activate():`."""

    def __init__(
        self,
        device_type: str,
        cached_mode: CachedFakeMode | None = None,
        kernel_memory: KernelMemory | None = None,
        checker: StreamChecker | None = None,
    ) -> None:
        """Make a tracer.

        device_type: of the accelerator; memory elsewhere is the host's. cached_mode: answers the
        operators of a simulation; None for a real run. kernel_memory: scratch of kernels that no
        tensor shows. checker: is told all that happens.
        """
        super().__init__()
        self.supports_higher_order_operators = True
        self.checker = checker
        self.trace = Trace()
        self.device_type = device_type
        self.cached_mode = cached_mode
        self.kernel_memory = kernel_memory
        self.get_stream: Callable[[], int] = lambda: 0  # the number of the current stream
        self.vocabulary: set[int] = set()  # sizes of embeddings, by which logits are known
        self.parameter_names: dict[int, str] = {}  # id of a parameter -> its name
        # Called between two actions of a pipeline, where the first one made gradients.
        self.between_actions: Callable[[], None] = lambda: None
        # In a simulation, a number that is read is 0 and not refused; with a checker it is 1.
        self.values_are_zero = False
        self.makes_batches = False  # memory that is taken now is the batches'
        self._pinned = False  # host memory that is taken now is pinned
        self.groups: dict[str, str] = {}  # name of a process group -> its mesh dimension
        # Address of a storage that is alive -> its numbers in the trace, one for each size that it
        # had, and a weak reference whose callback hears of its end.
        self._storages: dict[int, tuple[list[int], weakref.ref[Any]]] = {}
        self._running = RunningModules()
        self.locate = self._running.locate  # the part of the step and the module that run now
        self.muted = 0  # above 0, what runs is no part of the program
        # Where code is compiled: returns whether it is being compiled now.
        self.is_compiling: Callable[[], bool] | None = None
        self.phase = -1
        self.optimizers: dict[int, Any] = {}  # by id, all that have stepped

    # What runs

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Trace inside the block."""
        # FSDP frees and takes the memory of its tensors by their size, which no operator shows.
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if not self.muted:
                self._note_resize(storage, size)
            return result

        patches = [(torch.UntypedStorage, "resize_", resize_and_note), *hide_propagation(self)]
        with apply_patches(patches), self._running.follow(self.label_optimizer), self:
            yield
        self._storages.clear()  # what is released afterwards is no part of the run

    def begin_phase(self, name: str) -> None:
        """Count everything from here on to a phase."""
        self.phase = self.trace.add(PHASE, name)

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Call a model's modules by their dotted names from here on, and note its vocabulary."""
        self._running.name_modules(model, prefix)
        self.vocabulary |= {
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
        }

    def find_number(self, tensor: Tensor) -> int:
        """Return the number of the storage that a tensor has now; -1: none is known."""
        history = self._find_history(tensor)
        return history[-1] if history else -1

    def _find_history(self, tensor: Tensor) -> list[int]:
        """Return the numbers of a tensor's storage, one for each size it had; [] if unknown."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else []

    def list_numbers(self, value: Any) -> tuple[int, ...]:
        """Return the numbers of the known storages of the tensors in a value."""
        numbers = (self.find_number(tensor) for tensor in list_tensors(value) if has_memory(tensor))
        return tuple(number for number in numbers if number >= 0)

    def count_alive_bytes(self) -> int:
        """Return the bytes that are alive on the device now."""
        storages = [self.trace.storages[history[-1]] for history, _ in self._storages.values()]
        return sum(storage.bytes for storage in storages if storage.device)

    # Operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work as if this mode were not there."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_compiling is not None and self.is_compiling():
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            return run_higher_order_operator(self, func=func, args=args, kwargs=kwargs)
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if self.is_compiling is not None and (function := find_opaque_function(func)) is not None:
            with self:
                return function(*args, **kwargs)
        if id(func) in _MATMULS:  # inside of an operator no autograd takes them apart
            with self:
                return func.decompose(*args, **kwargs)
        if not PLAIN_TENSORS.issuperset(types):
            local = self.cached_mode and unwrap_shards(func, args, kwargs)
            # A wrapper's own operators come back here one by one.
            return self.__torch_dispatch__(func, (), *local) if local else NotImplemented
        if (
            func is _NUMBER
            and self.cached_mode is not None
            and (self.values_are_zero or self.checker is not None)
            and type(args[0]) is FakeTensor
            and args[0].constant is None
        ):
            return self._invent_number(args)
        if is_summed_in_place(func, args, kwargs):
            func = ADD_IN_PLACE
        if self.muted:
            return func(*args, **kwargs)
        self._pinned = (
            func is _PIN
            or bool(kwargs.get("pin_memory"))
            # torch pins the memory of a copy to the host that is `non_blocking`.
            or (
                func is _TO_COPY
                and bool(kwargs.get("non_blocking"))
                and _get_device_type(args[0]) == self.device_type
            )
        )
        call: CachedCall | None = None
        if self.cached_mode is None:
            result = func(*args, **kwargs)
        elif func is _IS_PINNED:
            return False
        elif id(func) in _PROFILER:  # no work of the device, and slow in the fake mode
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        elif func is _WAIT:
            # The fake mode would make a copy; a real group returns the tensor that it waited for.
            result = args[0]
        else:
            if func is _PIN:  # the fake mode has no answer to it; it is a copy on the host
                func = torch.ops.aten.empty_like.default
                args = args[:1]
                kwargs = {}
            result, call = self.cached_mode.call(func, args, kwargs)
        cost = call.cost if call is not None else None
        if cost is None:
            cost = compute_cost(func, args=args, kwargs=kwargs, result=result)
            if call is not None:
                call.cost = cost
        self.note_operator(func, args=args, kwargs=kwargs, result=result, cost=cost)
        return result

    def _invent_number(self, args: Sequence[Any]) -> float:
        """Return a number in place of a value that does not exist."""
        if self.checker is not None and not self.muted:
            self.checker.check_operator(
                _NUMBER,
                args=args,
                kwargs={},
                result=None,
                op=Op("aten::item", self.get_stream(), *self.locate()),
                list_numbers=self.list_numbers,
            )
        # A checker is to see all waits: a condition on a number is more likely to go on with 1, one
        # on a bool with False.
        number = int(self.checker is not None and args[0].dtype is not torch.bool)
        return float(number) if args[0].dtype.is_floating_point else number

    def note_operator(
        self,
        func: Any,
        *,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        cost: Cost,
    ) -> None:
        """Note an operator with its results and the scratch of its kernel."""
        name = cost.name
        if cost.makes_memory:
            self.note_memory(list_tensors(result), name)
        if cost.is_view:
            return
        if name in _FSDP_KINDS:
            written = result if name == "fsdp::all_gather_copy_in" else kwargs.get("out", args[-1])
            self.set_kind(written, _FSDP_KINDS[name])
        part, module = self.locate()
        stream = self.get_stream()
        scratch = self.kernel_memory(name, args, stream) if self.kernel_memory else ()
        for size, stays in scratch:
            number = self.note_allocation(size, device=True, name=name, kind="workspace")
            if not stays:
                self._note_free(number)
        op = Op(
            name=name,
            stream=stream,
            part=part,
            module=module,
            phase=self.phase,
            flops=cost.flops,
            bytes=cost.bytes,
            dtype=cost.dtype,
            collective=read_collective(func, args, self.groups) if cost.communicates else None,
            transfer=cost.transfer,
            shape=cost.shape,
            on_host=cost.on_host and self.device_type != "cpu",
        )
        if self.checker is not None and not self.makes_batches:
            self.checker.check_operator(
                func,
                args=args,
                kwargs=kwargs,
                result=result,
                op=op,
                list_numbers=self.list_numbers,
            )
        if part in ("forward", "recompute"):
            op.reads = self.list_numbers((args, tuple(kwargs.values())))
            op.makes = self.list_numbers(result)
        self.trace.add(OP, op)
        if name == "aten::copy_" and cost.transfer == "to_device" and part == "backward":
            source = self.find_number(args[1])
            # Forward has offloaded it for backward, which now fetches it.
            if source >= 0 and self.trace.storages[source].part == "forward":
                self.set_kind(args[0], "activations")
        if cost.transfer == "to_host" and is_blocking(name, args, kwargs):
            self._note_host_wait(stream)

    # Memory

    def note_memory(self, tensors: Sequence[Tensor], name: str = "") -> None:
        """Note the memory of tensors, where it is new.

        name: of the operator that made it, if one did.
        """
        for tensor in tensors:
            device = _get_device_type(tensor)
            if not has_memory(tensor) or device == "meta" or self._find_history(tensor):
                continue
            kind = "temporary"
            if self.makes_batches:
                kind = "batch"
            elif tensor.dim() >= 2 and tensor.shape[-1] in self.vocabulary:
                kind = "logits"
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            is_device = device == self.device_type
            if self._pinned and not is_device:
                size = round_up_to_pinned(size)
            number = self.note_allocation(size, device=is_device, name=name, kind=kind)
            self.follow_storage(storage, number)

    def follow_storage(self, storage: Any, number: int) -> None:
        """Note the end of a storage of torch's, which has this number in the trace."""
        key = storage._cdata
        self._storages[key] = [number], weakref.ref(storage, lambda _: self._drop_storage(key))

    def note_allocation(self, size: int, *, device: bool, name: str, kind: str) -> int:
        """Note an allocation and return its number.

        size: bytes. device: on the accelerator, else on the host. name: of its operator.
        """
        part, module = self.locate()
        storage = Storage(
            bytes=size,
            device=device,
            stream=self.get_stream(),
            kind=kind,
            module=module,
            op=name,
            part=part,
            phase=max(self.phase, 0),
            pinned=self._pinned and not device,
        )
        number = self.trace.add(ALLOC, storage)
        if self.checker is not None:
            self.checker.note_allocation(number, storage)
        return number

    def _drop_storage(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._note_free(entry[0][-1])

    def _note_free(self, number: int) -> None:
        self.trace.events.append((FREE, number))
        if self.checker is not None:
            self.checker.note_free(number)

    def _note_resize(self, storage: Any, size: int) -> None:
        """Note that a storage has another size, as a release and an allocation."""
        entry = self._storages.get(storage._cdata)
        before = self.trace.storages[entry[0][-1]] if entry else None
        if entry is None or before is None or before.bytes == size:
            return
        self._note_free(entry[0][-1])
        number = self.note_allocation(size, device=before.device, name="resize_", kind=before.kind)
        self.trace.storages[number].label = before.label
        entry[0].append(number)

    # Optimizers, streams

    def label_optimizer(self, optimizer: Any) -> None:
        """Label what an optimizer steps and holds with the names of its parameters."""
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # A parameter without a name is some rows of one that has one.
                number = self.find_number(parameter)
                label = self.trace.storages[number].label if number >= 0 else ""
                name = self.parameter_names.get(id(parameter), label)
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradients", name)
                # States that are offloaded may be on the device for this step alone.
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        self.label(value, "optimizer", name)

    def label(self, tensor: Tensor, kind: str, label: str) -> None:
        """Set the kind and the label of a tensor's memory, now and in every size it had."""
        for part in list_plain_tensors(tensor):
            for number in self._find_history(part):
                storage = self.trace.storages[number]
                if storage.kind == kind and storage.label not in ("", label):
                    storage.label = find_common_label(storage.label, label)
                else:
                    storage.kind = kind
                    storage.label = label

    def set_kind(self, value: Any, kind: str) -> None:
        """Set the kind of the memory of the tensors in a value."""
        for tensor in list_tensors(value):
            for number in self._find_history(tensor):
                self.trace.storages[number].kind = kind

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """Note that a tensor's memory is used on another stream than its own (`record_stream`)."""
        for part in list_plain_tensors(tensor):
            number = self.find_number(part)
            if number >= 0 and not self.muted:
                self.trace.add(USE, (number, stream))
                if self.checker is not None:
                    self.checker.note_record_stream(number, stream)

    def record(self, stream: int, event: int) -> None:
        """Note that an event is recorded on a stream."""
        self.trace.add(RECORD, Sync(event, stream))
        if self.checker is not None:
            self.checker.note_record(stream, event)

    def wait(self, stream: int, event: int) -> None:
        """Note that a stream waits for an event; one below 0 was never recorded."""
        if event >= 0:
            self.trace.add(WAIT, Sync(event, stream))
        if self.checker is not None:
            self.checker.note_wait(stream, event)

    def synchronize(self, call: str, stream: int | None, event: int | None) -> None:
        """Note that the host waits for an event, for a stream, or for the device (both None).

        call: how it waits, in words.
        """
        if event is None:
            self._note_host_wait(stream or 0)  # the stream that computes is number 0
        elif event >= 0:
            self.trace.add(WAIT, Sync(event, HOST))
        if self.checker is not None:
            self.checker.note_synchronize(call, stream, event)

    def _note_host_wait(self, stream: int) -> None:
        """Note that the host waits for all that was issued on a stream."""
        event = -2 - len(self.trace.syncs)  # no event of the device's has such a number
        self.trace.add(RECORD, Sync(event, stream))
        self.trace.add(WAIT, Sync(event, HOST))


# torch wraps a mode's method so that its compiler leaves it alone, at 5 us a call. That compiler
# never sees this method: `ignore_compile_internals`.
Tracer.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    Tracer.__torch_dispatch__, "__wrapped__", Tracer.__torch_dispatch__
)


def _get_device_type(tensor: Tensor) -> str:
    return str(tensor.fake_device.type if type(tensor) is FakeTensor else tensor.device.type)


def find_common_label(first: str, second: str) -> str:
    """Return the label of memory that two parameters share, such as `model.layers.0.*`."""
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])
