"""Notes every allocation, release, operator and collective of a program, simulated or real, as a
`Trace`.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from recipe_lib.plan.simulated_world.patches import (
    Patch,
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

# `fn(operator's name, its arguments, stream)` to [(bytes, whether they stay taken)] of an operator
# with arithmetic.
KernelMemory = Callable[[str, Sequence[Any], int], list[tuple[int, bool]]]

# Operators of FSDP, and of what kind the memory is that they write.
_FSDP_KINDS = {
    "fsdp::all_gather_copy_in": "communication",
    "fsdp::split_with_sizes_copy": "gathered",
    "fsdp::chunk_cat": "communication",
}
# Operators known by name.
_DEVICE = torch.ops.prim.device.default
_NUMBER = torch.ops.aten._local_scalar_dense.default
_PIN = torch.ops.aten._pin_memory.default
_IS_PINNED = torch.ops.aten.is_pinned.default
_TO_COPY = torch.ops.aten._to_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Made of aten::mm and views. An operator hashes itself in Python, its number does not; it lives as
# long as torch.
_MATMULS = frozenset(map(id, (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)))
_PROFILER = frozenset(
    id(overload)
    for overload in (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)


class Tracer(TorchDispatchMode):
    """Traces what runs inside `with tracer.running():`.

    device_type: of the accelerator; storages elsewhere are host memory. fast: answers known calls,
    in a simulation. kernel_memory: scratch of kernels that no tensor shows. checker: follows all
    that happens, if there is one.
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
        self.device_type, self.cached_mode, self.kernel_memory = device_type, fast, kernel_memory
        self.stream: Callable[[], int] = lambda: 0
        self.vocabulary: set[int] = set()
        self.parameter_names: dict[int, str] = {}  # of a parameter's id
        self.between_actions: Callable[[], None] = lambda: (
            None
        )  # of a pipeline, where gradients were made
        # In a simulation: a number that is read is 0, not refused; with a checker it is 1
        self.values_are_zero = False
        self.makes_batches = False  # what is made now are batches
        self._pinned = False
        self.groups: dict[str, str] = {}  # a process group's name -> its mesh dimension
        # By the address of a storage that is alive: its numbers in the trace, one for each size it
        # had, and what hears of its end.
        self._held: dict[int, tuple[list[int], weakref.ref[Any]]] = {}
        self._places = RunningModules()
        self.place = self._places.now  # the part of the step and the module that run now
        self.muted = 0  # what runs is no part of the program, where it is not 0
        self.is_compiling: Callable[[], bool] | None = (
            None  # where code is compiled: whether it is being compiled
        )
        self.phase = -1
        self.optimizers: dict[int, Any] = {}

    # What runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traces inside the block."""
        following = self._places.following(self.label_optimizer)
        with apply_patches([*self._follow_resizes(), *hide_propagation(self)]), following, self:
            yield
        self._held.clear()  # what is released afterwards is no part of the run

    def begin_phase(self, name: str) -> None:
        """Everything from here on belongs to the phase."""
        self.trace.phases.append(name)
        self.phase = len(self.trace.phases) - 1
        self.trace.events.append((PHASE, self.phase))

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Modules are called by their dotted names from here on; embeddings tell the vocabulary's
        size.
        """
        self._places.name_modules(model, prefix)
        self.vocabulary |= {
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
        }

    def find_number(self, tensor: Tensor) -> int:
        """The number of a tensor's memory now; -1: none is known."""
        history = self._find_history(tensor)
        return history[-1] if history else -1

    def _find_history(self, tensor: Tensor) -> list[int]:
        """Return the numbers of a tensor's memory, one for each size it had; none is known: an
        empty list.
        """
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held[0] if held else []

    def numbers(self, value: Any) -> tuple[int, ...]:
        """Of the memory of the tensors in a value, as far as it is known."""
        numbers = (self.find_number(tensor) for tensor in list_tensors(value) if has_memory(tensor))
        return tuple(number for number in numbers if number >= 0)

    def alive(self, device: bool = True) -> int:
        """Bytes alive now."""
        storages = [self.trace.storages[history[-1]] for history, _ in self._held.values()]
        return sum(storage.bytes for storage in storages if storage.device == device)

    # Operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile works as if this mode were not there."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.is_compiling is not None and self.is_compiling():
            return func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.HigherOrderOperator):
            return run_higher_order_operator(self, func, args, kwargs or {})
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if self.is_compiling is not None and (inside := find_opaque_function(func)) is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        if id(func) in _MATMULS:  # inside of an operator no autograd takes them apart
            with self:
                return func.decompose(*args, **(kwargs or {}))
        for kind in types:
            if kind not in PLAIN_TENSORS:
                local = self.cached_mode and unwrap_shards(func, args, kwargs or {})
                if local:
                    return self.__torch_dispatch__(func, (), *local)
                return NotImplemented  # a wrapper's own operators come back here one by one
        reads_any = self.cached_mode is not None and (
            self.values_are_zero or self.checker is not None
        )
        if (
            reads_any
            and func is _NUMBER
            and type(args[0]) is FakeTensor
            and args[0].constant is None
        ):
            return self._read_number(args)
        kwargs = kwargs or {}
        if is_summed_in_place(func, args, kwargs):
            func = ADD_IN_PLACE
        if self.muted:
            return func(*args, **kwargs)
        call: CachedCall | None = None
        self._pinned = (
            func is _PIN or bool(kwargs.get("pin_memory")) or self._is_sent(func, args, kwargs)
        )
        if (
            self.cached_mode is not None and func is _PIN
        ):  # the fake mode has no answer; it is a copy on the host
            func, kwargs = torch.ops.aten.empty_like.default, {}
            args = args[:1]
        if self.cached_mode is not None and func is _IS_PINNED:
            return False
        if (
            self.cached_mode is not None and id(func) in _PROFILER
        ):  # no work of the device, and slow in the fake mode
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if (
            self.cached_mode is not None and func is _WAIT
        ):  # the fake mode gives a copy, the real one what it waited for
            result = args[0]
        elif self.cached_mode is not None:
            result, call = self.cached_mode.call(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        cost = call.cost if call is not None else None
        if cost is None:
            cost = compute_cost(func, args, kwargs, result)
            if call is not None:
                call.cost = cost
        self.note(func, args, kwargs, result, cost)
        return result

    def _read_number(self, args: Sequence[Any]) -> float:
        """In place of a value that there is not: 0, or what a condition is more likely to go on
        with where all waits are to be seen.
        """
        if self.checker is not None and not self.muted:
            self.checker.operator(
                _NUMBER,
                args,
                {},
                None,
                Op("aten::item", self.stream(), *self.place()),
                self.numbers,
            )
        number = int(self.checker is not None and args[0].dtype is not torch.bool)
        return float(number) if args[0].dtype.is_floating_point else number

    def _is_sent(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it is a copy to the host that nobody waits for, whose memory torch pins."""
        return (
            func is _TO_COPY
            and bool(kwargs.get("non_blocking"))
            and _get_device_type(args[0]) == self.device_type
        )

    def note(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, cost: Cost
    ) -> None:
        """Notes an operator with its results."""
        if cost.is_view and not cost.makes_memory:
            return
        part, module = self.place()
        name = cost.name
        if cost.makes_memory:
            self.see(list_tensors(result), name)
        if cost.is_view:
            return
        if name in _FSDP_KINDS:
            written = result if name == "fsdp::all_gather_copy_in" else kwargs.get("out", args[-1])
            self.set_kind(written, _FSDP_KINDS[name])
        stream = self.stream()
        scratch = self.kernel_memory(name, args, stream) if self.kernel_memory else ()
        for size, stays in scratch:
            number = self.new(size, True, name, "workspace")
            if not stays:
                self._free(number)
        trace = self.trace
        collective = read_collective(func, args, self.groups) if cost.communicates else None
        op = Op(
            name, stream, part, module, self.phase, cost.flops, cost.bytes, cost.dtype, collective
        )
        op.transfer, op.shape = cost.transfer, cost.shape
        op.on_host = cost.on_host and self.device_type != "cpu"
        if self.checker is not None and not self.makes_batches:
            self.checker.operator(func, args, kwargs, result, op, self.numbers)
        if part in ("forward", "recompute"):
            op.reads, op.makes = (
                self.numbers(value) for value in ((args, tuple(kwargs.values())), result)
            )
        self.add(op)
        if name == "aten::copy_" and cost.transfer == "to_device" and part == "backward":
            source = self.find_number(args[1])
            if (
                source >= 0 and trace.storages[source].part == "forward"
            ):  # kept there by forward for backward
                self.set_kind(args[0], "activations")
        if cost.transfer == "to_host" and is_blocking(name, args, kwargs):
            self._host_waits(stream)

    def add(self, op: Op) -> None:
        """Adds an operator to the trace."""
        self.trace.ops.append(op)
        self.trace.events.append((OP, len(self.trace.ops) - 1))

    # Memory

    def see(self, tensors: Sequence[Tensor], name: str = "") -> None:
        """Notes the memory of tensors, where it is new. name: of the operator that made it, if one
        did.
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
            if self._pinned and device != self.device_type:
                size = round_up_to_pinned(size)
            self.hold(storage, self.new(size, device == self.device_type, name, kind))

    def hold(self, storage: Any, number: int) -> None:
        """The storage is that of a number, which ends with it."""
        key = storage._cdata
        self._held[key] = [number], weakref.ref(storage, lambda _: self._drop(key))

    def new(self, size: int, device: bool, name: str, kind: str) -> int:
        """Notes an allocation and returns its number."""
        part, module = self.place()
        storages = self.trace.storages
        pinned = self._pinned and not device
        storages.append(
            Storage(
                size,
                device,
                self.stream(),
                kind,
                module,
                "",
                name,
                part,
                max(self.phase, 0),
                pinned,
            )
        )
        self.trace.events.append((ALLOC, len(storages) - 1))
        if self.checker is not None:
            self.checker.allocated(len(storages) - 1, storages[-1])
        return len(storages) - 1

    def _drop(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._free(held[0][-1])

    def _free(self, number: int) -> None:
        self.trace.events.append((FREE, number))
        if self.checker is not None:
            self.checker.freed(number)

    def _resized(self, storage: Any, size: int) -> None:
        """FSDP frees and takes the memory of its tensors by their size."""
        held = self._held.get(storage._cdata)
        before = self.trace.storages[held[0][-1]] if held else None
        if held is None or before is None or before.bytes == size:
            return
        self._free(held[0][-1])
        number = self.new(size, before.device, "resize_", before.kind)
        self.trace.storages[number].label = before.label
        held[0].append(number)

    def _follow_resizes(self) -> list[Patch]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if not self.muted:
                self._resized(storage, size)
            return result

        return [(torch.UntypedStorage, "resize_", resized)]

    # Optimizers, streams

    def label_optimizer(self, optimizer: Any) -> None:
        """Says of what an optimizer steps and holds which parameter it belongs to."""
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.parameter_names.get(id(parameter)) or self._find_label(
                    parameter
                )  # some rows of one
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradients", name)
                for value in optimizer.state.get(
                    parameter, {}
                ).values():  # perhaps here for this step alone
                    if isinstance(value, Tensor):
                        self.label(value, "optimizer", name)

    def _find_label(self, tensor: Tensor) -> str:
        number = self.find_number(tensor)
        return self.trace.storages[number].label if number >= 0 else ""

    def label(self, tensor: Tensor, kind: str, label: str) -> None:
        """Says what a tensor's memory is, now and in every size it had."""
        for part in list_plain_tensors(tensor):
            for number in self._find_history(part):
                storage = self.trace.storages[number]
                if storage.kind == kind and storage.label not in ("", label):
                    storage.label = find_common_label(storage.label, label)
                else:
                    storage.kind, storage.label = kind, label

    def set_kind(self, value: Any, kind: str) -> None:
        """Says of what kind the memory of the tensors in a value is."""
        for tensor in list_tensors(value):
            for number in self._find_history(tensor):
                self.trace.storages[number].kind = kind

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """A tensor's memory is used on another stream than its own (`record_stream`)."""
        for part in list_plain_tensors(tensor):
            number = self.find_number(part)
            if number >= 0 and not self.muted:
                self.trace.uses.append((number, stream))
                self.trace.events.append((USE, len(self.trace.uses) - 1))
                if self.checker is not None:
                    self.checker.note_record_stream(number, stream)

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

    def synchronize(self, what: str, stream: int | None, event: int | None) -> None:
        """The host waits for an event, for a stream, or for the device, which is the stream that
        computes.
        """
        if event is None:
            self._host_waits(stream or 0)
        elif event >= 0:
            self.trace.syncs.append(Sync(event, HOST))
            self.trace.events.append((WAIT, len(self.trace.syncs) - 1))
        if self.checker is not None:
            self.checker.note_synchronize(what, stream, event)

    def _host_waits(self, stream: int) -> None:
        """The host waits for all that was issued on a stream: a mark there, which it waits for."""
        syncs = self.trace.syncs
        mark = -2 - len(syncs)  # no event of the device's has such a number
        syncs += [Sync(mark, stream), Sync(mark, HOST)]
        self.trace.events += [(RECORD, len(syncs) - 2), (WAIT, len(syncs) - 1)]


# torch wraps a mode's method so that its compiler leaves it alone, at 5 us a call; nothing compiles
# here.
_unwrapped = getattr(Tracer.__torch_dispatch__, "__wrapped__", Tracer.__torch_dispatch__)
Tracer.__torch_dispatch__ = _unwrapped  # type: ignore[method-assign]


def _get_device_type(tensor: Tensor) -> str:
    return str(tensor.fake_device.type if type(tensor) is FakeTensor else tensor.device.type)


def find_common_label(first: str, second: str) -> str:
    """The label of memory that two parameters share, such as the gradients of an FSDP unit:
    `model.layers.0.*`.
    """
    shared = os.path.commonprefix([first.split("."), second.split(".")])
    return ".".join([*(part for part in shared if part != "*"), "*"])


# Where a traced program is: which part of a step, and in which module, in backward too.


_NO_NODE = 2**63  # sequence numbers of nodes that accumulate gradients are the largest there are


class RunningModules:
    """Follows modules and optimizers inside `with places.following(...)`; `now()` tells the place.

    Autograd numbers its nodes in the order in which forward makes them; so the number of the node
    that runs in backward tells the module that made it.
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
                self._backward_module = self._sequence_module[
                    bisect_right(self._sequence, number) - 1
                ]
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
