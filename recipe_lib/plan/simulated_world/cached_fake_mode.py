"""Cache FakeTensorMode's results: an operator is run once for each kind of arguments.

A plan's tracer calls `CachedFakeMode.call` for each operator of a simulated run. A call with the
shapes, types and devices of an earlier one is answered from that one; a call whose result may
depend on more goes to FakeTensorMode. torch's own cache takes about 100 us an operator, and a step
of a 70B model has fifty thousand; this one takes a fifth of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# Parts of names of operators that are not cached: the result depends on more than shapes, or the
# storage of an argument changes.
_NEVER = (
    "set_",
    "resize_",
    "as_strided_",
    "lift_fresh",
    "_local_scalar_dense",
    "nonzero",
    "unique",
    "item",
    "_to_cpu",
)
# Namespaces whose operators are cached: they alias and change only what their schemas say.
_KNOWN = ("aten::", "prims::", "torch_attn::", "tune_recipes::", "fsdp::", "_c10d_functional::")
# Operators that FakeTensorMode runs on meta tensors as they are where arguments are on one device.
# It looks for other ways first, which takes ten times as long, and a scan's loop has hundreds of
# shapes. By id, see `CachedFakeMode.call`.
_PLAIN_META = frozenset(
    id(overload)
    for overload in (
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.select.int,
        torch.ops.aten.transpose.int,
        torch.ops.aten.expand.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.t.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
    )
)
# Types of arguments whose values are a part of a call's key.
_PLAIN_TYPES = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)


class NotCacheable(Exception):  # noqa: N818 - not an error: the call is made without the cache
    """Raised for a call whose result may depend on more than its key (see `make_key`)."""


@dataclass(slots=True)
class _Output:
    """A description from which one output of an operator is made."""

    same: int = -1  # index of the tensor argument that it is; -1: it is none
    view_of: int = -1  # index of the tensor argument whose storage it shares; -1: of none
    constant: Any = None  # an output that is no tensor; `dtype` is then None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()  # in elements
    offset: int = 0  # elements before its first one in its storage
    dtype: torch.dtype | None = None  # None: it is no tensor
    device: torch.device | None = None  # the fake device; None: it is no tensor
    elements: int = 0  # size of a new storage in elements; 0: as shape and stride need

    def make(self, tensors: list[FakeTensor], mode: FakeTensorMode) -> Any:
        # Returns the output. tensors: the tensors among the arguments of the call, in order.
        if self.same >= 0:
            return tensors[self.same]
        if self.dtype is None:
            return self.constant
        # Without dispatch modes: the tracer is not to see these operators.
        with torch._C._DisableTorchDispatch():
            if self.elements:
                memory = torch.empty(self.elements, dtype=self.dtype, device="meta")
                empty = memory.as_strided(self.shape, self.stride, self.offset)
            else:
                empty = torch.empty_strided(
                    self.shape, self.stride, dtype=self.dtype, device="meta"
                )
            if self.view_of >= 0:
                empty.set_(
                    tensors[self.view_of].untyped_storage(), self.offset, self.shape, self.stride
                )
        assert self.device is not None
        return wrap(empty, mode, self.device)


@dataclass(slots=True)
class CachedCall:
    """A remembered call of an operator."""

    outputs: "_Output | list[_Output] | None"  # None: it returns None
    sequence: type | None  # `list` or `tuple` if it returns one; None: it returns one value
    cost: Any = None  # `Cost` of the call, set by the tracer; None: not computed yet

    def make(self, tensors: list[FakeTensor], mode: FakeTensorMode) -> Any:
        """Return the result. tensors: the tensors among the arguments, in order."""
        if self.outputs is None:
            return None
        if self.sequence is None:
            return self.outputs.make(tensors, mode)  # type: ignore[union-attr]
        return self.sequence(output.make(tensors, mode) for output in self.outputs)  # type: ignore


class CachedFakeMode:
    """Calls operators under one FakeTensorMode, which the caller has entered, with a cache."""

    def __init__(
        self, mode: FakeTensorMode, calls: dict[Any, CachedCall | None] | None = None
    ) -> None:
        """Make a cache.

        calls: the cache, by operator and shapes; None: an empty one. Entries hold nothing of a
        mode, so several simulations may share them.
        """
        self.mode = mode
        self.calls = {} if calls is None else calls  # value None: this call cannot be cached
        _read_attributes.cache_clear()  # they hold the modes of earlier simulations

    def call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, CachedCall | None]:
        """Return (the operator's result, the entry of the cache or None for a call without one)."""
        # Collectives of the simulation's fake process group do nothing and return their arguments.
        if func.namespace == "c10d":
            with in_kernel_invocation_manager(self.mode):
                return func(*args, **kwargs), None
        tensors: list[FakeTensor] = []
        try:
            options = make_key(tuple(kwargs.items()), tensors) if kwargs else None
            # By id, as an operator hashes itself in Python, which is slow. Operators live as long
            # as torch, so that no other object has such an id.
            key = (id(func), make_key(args, tensors), options, torch.get_default_dtype())
            call = self.calls.get(key)
        except (NotCacheable, TypeError):  # TypeError: the key cannot be hashed
            return func(*args, **kwargs), None
        if call is not None:
            return call.make(tensors, self.mode), call
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Without data it takes bf16 alone; a device multiplies other types in a loop.
            factors = [factor.to(torch.bfloat16) for factor in args[:2]]
            result = func(*factors, *args[2:], **kwargs).to(args[0].dtype)
        elif id(func) in _PLAIN_META and (device := _find_one_device(tensors)) is not None:
            with in_kernel_invocation_manager(self.mode):
                meta = func(*args, **kwargs)
            result = wrap(meta, self.mode, device)
        else:
            result = func(*args, **kwargs)
        if key not in self.calls and not _is_never_cached(func):
            # None says for later calls that this one cannot be remembered.
            self.calls[key] = call = remember(result, tensors)
        return result, call


def _find_one_device(tensors: list[FakeTensor]) -> torch.device | None:
    """Return the device of plain fake tensors; None: they are on several, or of other classes."""
    devices = {tensor.fake_device for tensor in tensors if type(tensor) is FakeTensor}
    is_plain = all(type(tensor) is FakeTensor for tensor in tensors)
    return devices.pop() if is_plain and len(devices) == 1 else None


def wrap(meta: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Return a FakeTensor over a meta tensor, as its constructor would make it.

    device: that the fake tensor says it is on.
    """
    # Faster than the constructor: attributes are copied from a tensor that it has made once.
    fake = Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_read_attributes(mode, device))
    return fake


@cache
def _read_attributes(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    # Returns the attributes that FakeTensor's constructor sets, from an empty tensor.
    with torch._C._DisableTorchDispatch():
        element = torch.empty(0, device="meta")
    return dict(FakeTensor(mode, element, device).__dict__)


@cache
def _is_never_cached(func: Any) -> bool:
    """Return True if an operator's result may depend on more than the shapes of its arguments."""
    schema = func._schema
    tags = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    # An `out` argument may be resized, but FSDP's operators do not.
    writes_out = func.namespace != "fsdp" and any(argument.is_out for argument in schema.arguments)
    return (
        writes_out
        or not schema.name.startswith(_KNOWN)
        or any(part in schema.name.partition("::")[2] for part in _NEVER)
        or bool(tags & set(func.tags))
    )


def make_key(values: Sequence[Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """Return what the shapes and devices of a result depend on: a key for calls that are alike.

    values: the arguments. tensors: the tensors among them are appended to it, in order. Raises
    NotCacheable for a value of an unknown type, or a tensor that has a value.
    """
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN_TYPES:
            # 1, 1.0 and True are equal, but lead to results of different types.
            parts.append(value if kind is not float else (kind, value))
            if kind is bool:
                parts.append("?")  # tells True from 1
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append((kind, make_key(value, tensors)))
        elif isinstance(value, FakeTensor):
            if kind is FakeTensor and value.constant is not None:
                raise NotCacheable  # it has a value, and so may the result
            tensors.append(value)
            parts.append(
                (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.fake_device,
                    kind is FakeTensor,  # else a subclass, such as a parameter
                )
            )
        elif isinstance(value, torch.Generator):
            parts.append("generator")  # its state decides values, not shapes
        else:
            raise NotCacheable
    return tuple(parts)


def remember(result: Any, tensors: list[FakeTensor]) -> CachedCall | None:
    """Return an entry that answers the same call again; None if it might answer wrongly.

    result: of the call. tensors: the tensors among its arguments, as `make_key` appends them.
    """
    if result is None:
        return CachedCall(None, None)
    # Last first, so that the dicts have the first index of a tensor that is passed twice.
    last_first = list(enumerate(tensors))[::-1]
    arguments = {id(tensor): index for index, tensor in last_first}
    storages = {tensor.untyped_storage()._cdata: index for index, tensor in last_first}
    new_storages: set[int] = set()
    try:
        if isinstance(result, (list, tuple)):
            kind = list if isinstance(result, list) else tuple
            outputs = [
                _describe(value, arguments=arguments, storages=storages, new_storages=new_storages)
                for value in result
            ]
            return CachedCall(outputs, kind)
        return CachedCall(
            _describe(result, arguments=arguments, storages=storages, new_storages=new_storages),
            None,
        )
    except NotCacheable:
        return None


def _describe(
    value: Any, arguments: dict[int, int], storages: dict[int, int], new_storages: set[int]
) -> _Output:
    """Return the description of an output. Raises NotCacheable if there is none.

    arguments: id of a tensor argument -> its index. storages: address of its storage -> its index.
    new_storages: addresses of the new storages of earlier outputs; this one's is added.
    """
    if value is None or isinstance(value, (int, float, bool)):
        return _Output(constant=value)
    if id(value) in arguments:
        return _Output(same=arguments[id(value)])
    if (
        type(value) is not FakeTensor
        or value.constant is not None
        or value.layout != torch.strided
        or value.is_conj()
        or value.is_neg()
    ):
        raise NotCacheable
    storage = value.untyped_storage()
    geometry = {
        "shape": tuple(value.shape),
        "stride": value.stride(),
        "dtype": value.dtype,
        "device": value.fake_device,
    }
    if storage._cdata in storages:
        return _Output(view_of=storages[storage._cdata], offset=value.storage_offset(), **geometry)
    elements, remainder = divmod(storage.nbytes(), value.element_size())
    if storage._cdata in new_storages or remainder:
        raise NotCacheable  # outputs share new memory, or it is no whole number of elements
    new_storages.add(storage._cdata)
    # Most outputs fill their storage: `make` is faster for 0.
    if not value.storage_offset() and elements == compute_required_storage_length(
        value.shape, value.stride(), 0
    ):
        elements = 0
    return _Output(elements=elements, offset=value.storage_offset(), **geometry)
