"""Record every allocation, release, operator and collective of a run in a `Trace`.

`trace_rank` runs a recipe inside `with Tracer(...).activate():`, on fake tensors for a plan or on a
CPU's real ones. The planner computes the memory and time of a step from the trace. The simulated
device (a stand-in for the GPU whose tensors have no bytes) calls the tracer for streams and waits.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.memory.peaks import round_up_to_pinned
from recipe_lib.ops.kept_tensors import list_tensors
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
    read_collective,
)
from recipe_lib.plan.tracing.running_modules import RunningModules
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

# Function of (operator's name, its arguments, number of the stream) that returns the scratch memory
# of the operator's kernel besides its outputs: [(bytes, True if they stay taken after the kernel)].
KernelMemory = Callable[[str, Sequence[Any], int], list[tuple[int, bool]]]

# Operators of FSDP -> kind (of `trace.STORAGE_KINDS`) of the memory that they write: buffers of a
# gather, the gathered parameters, and gradients laid out for the reduce-scatter.
_FSDP_KINDS = {
    "fsdp::all_gather_copy_in": "communication",
    "fsdp::split_with_sizes_copy": "gathered",
    "fsdp::chunk_cat": "communication",
}
# Operators that the mode does not run as others, see `__torch_dispatch__`.
_DEVICE = torch.ops.prim.device.default
_NUMBER = torch.ops.aten._local_scalar_dense.default  # what `.item()` calls
_PIN = torch.ops.aten._pin_memory.default
_IS_PINNED = torch.ops.aten.is_pinned.default
_TO_COPY = torch.ops.aten._to_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Composites of aten::mm and views. A set of ids, as an operator hashes itself in Python, which is
# slow. Operators live as long as torch, so that no other object has such an id.
_MATMULS = frozenset(map(id, (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)))
_PROFILER = frozenset(  # operators of `torch.profiler.record_function`
    id(overload)
    for overload in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)


class Tracer(TorchDispatchMode):
    """A dispatch mode that fills `self.trace` inside `with tracer.activate():`.

    Call `begin_phase` first: what is noted belongs to the phase that has begun.
    """

    def __init__(
        self,
        device_type: str,
        cached_mode: CachedFakeMode | None = None,
        kernel_memory: KernelMemory | None = None,
        checker: StreamChecker | None = None,
    ) -> None:
        """Make a tracer.

        device_type: of the accelerator; memory elsewhere is the host's. cached_mode: returns the
        fake results of a simulation's operators, from its cache where it can; None for a real run.
        kernel_memory: None: no scratch is noted. checker: finds races between streams; it is told
        of each operator, allocation, release, event and wait. None: streams are not checked.
        """
        super().__init__()
        # Read by torch: without it, torch refuses to pass them to this mode.
        self.supports_higher_order_operators = True
        self.checker = checker
        self.trace = Trace()
        self.device_type = device_type
        self.cached_mode = cached_mode
        self.kernel_memory = kernel_memory
        self.get_stream: Callable[[], int] = lambda: 0  # returns the number of the current stream
        self.vocabulary: set[int] = set()  # rows of embeddings; logits have such a last dimension
        self.parameter_names: dict[int, str] = {}  # id of a parameter -> its name
        # Called after each action of a pipeline (one micro-batch's forward or backward in a stage)
        # that made gradients.
        self.between_actions: Callable[[], None] = lambda: None
        # True: `.item()` of a fake tensor returns 0 instead of raising. With a checker it never
        # raises: it returns 1, or 0 for a bool.
        self.values_are_zero = False
        self.makes_batches = False  # True: memory taken now is of the kind `batch`
        self._pinned = False  # True: host memory taken now is pinned
        self.groups: dict[str, str] = {}  # name of a process group -> its mesh dimension
        # Address of a storage that is alive -> its indices into `Trace.storages`, one for each size
        # that it had, and a weak reference whose callback notes its release.
        self._storages: dict[int, tuple[list[int], weakref.ref[Any]]] = {}
        self._running = RunningModules()
        self.locate = self._running.locate  # returns (part of the step, module's name) that run now
        self.muted = 0  # above 0, operators run without being noted: the recipe did not issue them
        # Returns True while torch.compile compiles; None where nothing is compiled.
        self.is_compiling: Callable[[], bool] | None = None
        self.phase = -1  # index into `Trace.phases`; -1: none has begun
        self.optimizers: dict[int, Any] = {}  # id -> optimizer, all that have stepped

    @contextmanager
    def activate(self) -> Iterator[None]:
        # FSDP frees and takes memory by resizing storages, which no operator shows.
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
        self.phase = self.trace.add(PHASE, name)

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Set the names of a model's modules (`prefix` + dotted name), and note its vocabulary.

        prefix: tells the models of a recipe apart; "" for the one that is trained.
        """
        self._running.name_modules(model, prefix)
        self.vocabulary |= {
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
        }

    def find_storage_index(self, tensor: Tensor) -> int:
        """Return the index into `Trace.storages` of a tensor's storage; -1: it was not noted."""
        history = self._find_history(tensor)
        return history[-1] if history else -1

    def _find_history(self, tensor: Tensor) -> list[int]:
        """Return the indices of a tensor's storage, one for each size it had; []: not noted."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else []

    def list_storage_indices(self, value: Any) -> tuple[int, ...]:
        """Return the indices into `Trace.storages` of the tensors in (nested lists of) a value."""
        indices = (
            self.find_storage_index(tensor) for tensor in list_tensors(value) if has_memory(tensor)
        )
        return tuple(index for index in indices if index >= 0)

    def count_alive_bytes(self) -> int:
        """Return the bytes of storages that are alive on the accelerator now."""
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
        # What the compiler runs to find shapes is no work of the recipe.
        if self.is_compiling is not None and self.is_compiling():
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            return run_higher_order_operator(self, func=func, args=args, kwargs=kwargs)
        if func is _DEVICE and type(args[0]) is FakeTensor:  # no work: `tensor.device`
            return args[0].fake_device
        # Compiled code calls an operator of this project as a whole. With `with self` the operators
        # in its Python function come back to this mode, to be noted one by one.
        if self.is_compiling is not None and (function := find_opaque_function(func)) is not None:
            with self:
                return function(*args, **kwargs)
        # Autograd takes them apart. They come here whole from inside of an operator, where it does
        # not run.
        if id(func) in _MATMULS:
            with self:
                return func.decompose(*args, **kwargs)
        if not PLAIN_TENSORS.issuperset(types):
            # (args, kwargs) of a fused optimizer, with local shards in place of its DTensors.
            local_call = self.cached_mode and unwrap_shards(func, args, kwargs)
            # NotImplemented: the wrapper class runs it, and its inner operators come back here.
            return self.__torch_dispatch__(func, (), *local_call) if local_call else NotImplemented
        if (
            func is _NUMBER
            and self.cached_mode is not None
            and (self.values_are_zero or self.checker is not None)
            and type(args[0]) is FakeTensor
            and args[0].constant is None
        ):
            return self._invent_number(args)
        # Autograd's engine adds gradients in place where no dispatch mode is there.
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
        elif func is _IS_PINNED:  # a question and no work
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
        """Return a number for `.item()` of a fake tensor, which has no value.

        args: the arguments of the operator, the tensor alone.
        """
        if self.checker is not None and not self.muted:
            self.checker.check_operator(
                _NUMBER,
                args=args,
                kwargs={},
                result=None,
                op=Op("aten::item", self.get_stream(), *self.locate()),
                list_storage_indices=self.list_storage_indices,
            )
        # A checker is to see all waits: a condition on a number is more likely to go on with 1, one
        # on a bool with False.
        value = int(self.checker is not None and args[0].dtype is not torch.bool)
        return float(value) if args[0].dtype.is_floating_point else value

    def note_operator(
        self,
        func: Any,
        *,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        cost: Cost,
    ) -> None:
        """Note an operator with its results and the scratch of its kernel.

        func, args, kwargs, result: the operator, its arguments and what it returned. cost: of this
        call. A view is not noted, as it does no work.
        """
        name = cost.name
        if cost.makes_memory:
            self.note_memory(list_tensors(result), name)
        if cost.is_view:
            return
        if name in _FSDP_KINDS:
            # all_gather_copy_in returns the buffer, the others write into their last argument.
            written = result if name == "fsdp::all_gather_copy_in" else kwargs.get("out", args[-1])
            self.set_kind(written, _FSDP_KINDS[name])
        part, module = self.locate()
        stream = self.get_stream()
        scratch = self.kernel_memory(name, args, stream) if self.kernel_memory else ()
        for num_bytes, stays in scratch:
            index = self.note_allocation(num_bytes, device=True, name=name, kind="workspace")
            if not stays:
                self._note_free(index)
        # `on_host` is False in a real run: there the CPU is the accelerator.
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
                list_storage_indices=self.list_storage_indices,
            )
        # They take time, and serve only to find the modules of activations.
        if part in ("forward", "recompute"):
            op.reads = self.list_storage_indices((args, tuple(kwargs.values())))
            op.makes = self.list_storage_indices(result)
        self.trace.add(OP, op)
        if name == "aten::copy_" and cost.transfer == "to_device" and part == "backward":
            source = self.find_storage_index(args[1])
            # Memory of forward is copied back in backward: it was an offloaded activation.
            if source >= 0 and self.trace.storages[source].part == "forward":
                self.set_kind(args[0], "activations")
        if cost.transfer == "to_host" and is_blocking(name, args, kwargs):
            self.note_host_wait(stream)

    # Memory

    def note_memory(self, tensors: Sequence[Tensor], name: str = "") -> None:
        """Note the allocations of those tensors whose storage was not noted before.

        name: of the operator that made them; "": none did. Meta tensors are left out.
        """
        for tensor in tensors:
            device_type = _get_device_type(tensor)
            if not has_memory(tensor) or device_type == "meta" or self._find_history(tensor):
                continue
            kind = "temporary"
            if self.makes_batches:
                kind = "batch"
            elif tensor.dim() >= 2 and tensor.shape[-1] in self.vocabulary:
                kind = "logits"
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            is_device = device_type == self.device_type
            if self._pinned and not is_device:
                num_bytes = round_up_to_pinned(num_bytes)
            index = self.note_allocation(num_bytes, device=is_device, name=name, kind=kind)
            self.follow_storage(storage, index)

    def follow_storage(self, storage: Any, index: int) -> None:
        """Note a release when the `UntypedStorage` ends. index: into `Trace.storages`."""
        key = storage._cdata  # address of the storage in C++, which no other has while it is alive
        self._storages[key] = [index], weakref.ref(storage, lambda _: self._drop_storage(key))

    def note_allocation(self, size: int, *, device: bool, name: str, kind: str) -> int:
        """Note an allocation and return its index into `Trace.storages`.

        size: bytes. device: True on the accelerator, False on the host. name: of the operator that
        makes it. kind: one of `trace.STORAGE_KINDS`.
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
            phase=max(self.phase, 0),  # what is taken before the first phase counts to it
            pinned=self._pinned and not device,
        )
        index = self.trace.add(ALLOC, storage)
        if self.checker is not None:
            self.checker.note_allocation(index, storage)
        return index

    def _drop_storage(self, key: int) -> None:
        # key: of `_storages`, which `activate` has cleared at its end.
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._note_free(entry[0][-1])

    def _note_free(self, index: int) -> None:
        self.trace.events.append((FREE, index))
        if self.checker is not None:
            self.checker.note_free(index)

    def _note_resize(self, storage: Any, size: int) -> None:
        """Note `storage.resize_(size)`, in bytes, as a release and an allocation.

        Where it has memory before and after, of the same size too, torch copies: the release is
        then the second of the two.
        """
        entry = self._storages.get(storage._cdata)
        if entry is None:
            return
        before = self.trace.storages[entry[0][-1]]
        if not (before.bytes and size):
            self._note_free(entry[0][-1])
        index = self.note_allocation(size, device=before.device, name="resize_", kind=before.kind)
        if before.bytes and size:
            self._note_free(entry[0][-1])
        self.trace.storages[index].label = before.label
        entry[0].append(index)

    # Optimizers, streams

    def label_optimizer(self, optimizer: Any) -> None:
        """Label gradients and states of an optimizer with the names of their parameters."""
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # A parameter without a name is a slice of rows, made to step a large parameter in
                # pieces. It has the memory of that parameter, and so its label.
                index = self.find_storage_index(parameter)
                label = self.trace.storages[index].label if index >= 0 else ""
                name = self.parameter_names.get(id(parameter), label)
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradients", name)
                # States that are offloaded may be on the device for this step alone.
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        self.label(value, "optimizer", name)

    def label(self, tensor: Tensor, kind: str, label: str) -> None:
        """Set the kind and the label (a parameter's name) of a tensor's memory, in all its sizes.

        kind: one of `trace.STORAGE_KINDS`. Memory that several parameters share gets their common
        label.
        """
        for plain_tensor in list_plain_tensors(tensor):
            for index in self._find_history(plain_tensor):
                storage = self.trace.storages[index]
                if storage.kind == kind and storage.label not in ("", label):
                    storage.label = find_common_label(storage.label, label)
                else:
                    storage.kind = kind
                    storage.label = label

    def set_kind(self, value: Any, kind: str) -> None:
        """Set the kind of memory of the tensors in a value to one of `trace.STORAGE_KINDS`."""
        for tensor in list_tensors(value):
            for index in self._find_history(tensor):
                self.trace.storages[index].kind = kind

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """Note that a tensor's memory is used on another stream than its own (`record_stream`).

        stream: number of the other stream.
        """
        for plain_tensor in list_plain_tensors(tensor):
            index = self.find_storage_index(plain_tensor)
            if index >= 0 and not self.muted:
                self.trace.add(USE, (index, stream))
                if self.checker is not None:
                    self.checker.note_record_stream(index, stream)

    def record(self, stream: int, event: int) -> None:
        """Note that an event is recorded on a stream; its number is new each time."""
        self.trace.add(RECORD, Sync(event, stream))
        if self.checker is not None:
            self.checker.note_record(stream, event)

    def wait(self, stream: int, event: int) -> None:
        """Note that a stream waits for an event; below 0: the event was never recorded."""
        if event >= 0:
            self.trace.add(WAIT, Sync(event, stream))
        if self.checker is not None:
            self.checker.note_wait(stream, event)

    def synchronize(self, call: str, stream: int | None, event: int | None) -> None:
        """Note that the host waits for an event, for a stream, or for the device (both None).

        call: the call that waits, such as `Event.synchronize`. stream, event: numbers; event -1:
        never recorded.
        """
        if event is None:
            # The stream that computes is number 0. It stands for all streams of a device.
            self.note_host_wait(stream or 0)
        elif event >= 0:
            self.trace.add(WAIT, Sync(event, HOST))
        if self.checker is not None:
            self.checker.note_synchronize(call, stream, event)

    def note_host_wait(self, stream: int) -> None:
        """Note that the host waits until a stream has done all that was issued on it."""
        event = -2 - len(self.trace.syncs)  # new, and below -1: events of the device count from 0
        self.trace.add(RECORD, Sync(event, stream))
        self.trace.add(WAIT, Sync(event, HOST))


# torch wraps `__torch_dispatch__` of a mode to hide it from torch.compile, at 5 us a call. The
# compiler never sees this one (`ignore_compile_internals`), so the wrapper is taken off.
Tracer.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    Tracer.__torch_dispatch__, "__wrapped__", Tracer.__torch_dispatch__
)


def _get_device_type(tensor: Tensor) -> str:
    return str(tensor.fake_device.type if type(tensor) is FakeTensor else tensor.device.type)


def is_host_wait(sync: Sync) -> bool:
    """Return True for an event, recorded or waited for, of `Tracer.note_host_wait`."""
    return sync.event < -1


def find_common_label(first: str, second: str) -> str:
    """Return the label of memory that two parameters share, such as `model.layers.0.*`.

    It has the leading components that both names have in common.
    """
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])
