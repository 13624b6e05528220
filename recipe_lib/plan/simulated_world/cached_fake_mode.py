"""FakeTensorMode with a memory: an operator that was seen with the same shapes is answered without
running it.

torch's own cache builds keys and results at about 100 us an operator; a step of a 70B model has
fifty thousand. This one costs a fifth of that. What it cannot be sure of goes to FakeTensorMode as
before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# Operators whose result is more than shapes, or that change a storage.
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
# Whose operators do to shapes what they say.
_KNOWN = ("aten::", "prims::", "torch_attn::", "tune_recipes::", "fsdp::", "_c10d_functional::")
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


class NotCacheable(Exception):  # noqa: N818 - not an error: the call is made as ever
    """The call cannot be remembered."""


@dataclass(slots=True)
class _Output:
    """How to make one output. argument: index of the flat tensor argument that it is, or whose
    storage it shares.
    """

    same: int = -1
    view_of: int = -1
    constant: Any = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    elements: int = 0  # of its memory, where that is not from its first to its last one

    def make(self, tensors: list[FakeTensor], mode: FakeTensorMode) -> Any:
        if self.same >= 0:
            return tensors[self.same]
        if self.dtype is None:
            return self.constant
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
    """A remembered call. outputs: None for an operator that returns nothing. cost: what the tracer
    keeps next to it.
    """

    outputs: "_Output | list[_Output] | None"
    sequence: type | None
    cost: Any = None

    def make(self, tensors: list[FakeTensor], mode: FakeTensorMode) -> Any:
        """The result. tensors: among the arguments."""
        if self.outputs is None:
            return None
        if self.sequence is None:
            return self.outputs.make(tensors, mode)  # type: ignore[union-attr]
        return self.sequence(output.make(tensors, mode) for output in self.outputs)  # type: ignore


class CachedFakeMode:
    """`call(func, args, kwargs)` under one FakeTensorMode, which is active outside.

    calls: by operator and shapes; what is remembered is no mode's own, so that later simulations
    know it too.
    """

    def __init__(
        self, mode: FakeTensorMode, calls: dict[Any, CachedCall | None] | None = None
    ) -> None:
        self.mode = mode
        self.calls = {} if calls is None else calls
        _read_attributes.cache_clear()  # they hold the modes of earlier simulations

    def call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, CachedCall | None]:
        """The operator's result, and what is remembered of the call (None: nothing)."""
        if func.namespace == "c10d":  # fake groups do nothing, and give back what they were given
            with in_kernel_invocation_manager(self.mode):
                return func(*args, **kwargs), None
        tensors: list[FakeTensor] = []
        try:
            options = make_key(tuple(kwargs.items()), tensors) if kwargs else None
            # An operator hashes itself in Python, its number does not; it lives as long as torch.
            key = (id(func), make_key(args, tensors), options, torch.get_default_dtype())
            known = self.calls.get(key)
        except (NotCacheable, TypeError):
            return func(*args, **kwargs), None
        if known is None:
            if key in self.calls or _is_never_cached(func):
                return func(*args, **kwargs), None
            result = func(*args, **kwargs)
            self.calls[key] = call = remember(result, tensors)
            return result, call
        return known.make(tensors, self.mode), known


def wrap(meta: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """A FakeTensor as its constructor would make it, with the attributes of one that it did
    make.
    """
    fake = Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_read_attributes(mode, device))
    return fake


@cache
def _read_attributes(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    with torch._C._DisableTorchDispatch():
        element = torch.empty(0, device="meta")
    return dict(FakeTensor(mode, element, device).__dict__)


@cache
def _is_never_cached(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    custom = not func._schema.name.startswith(_KNOWN)
    tags = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    # An `out` may be resized, but not by FSDP's operators.
    writes_out = func.namespace != "fsdp" and any(
        argument.is_out for argument in func._schema.arguments
    )
    return (
        custom or writes_out or any(part in name for part in _NEVER) or bool(tags & set(func.tags))
    )


def make_key(values: Sequence[Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """What shapes and devices depend on; collects the tensors in order."""
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                raise NotCacheable  # it has a value, and so may the result
            tensors.append(value)
            parts.append(
                (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.fake_device,
                )
            )
        elif kind in _PLAIN_TYPES:
            parts.append(value if kind is not float else (kind, value))
            if kind is bool:
                parts.append("?")
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append((kind, make_key(value, tensors)))
        elif isinstance(value, Tensor):
            if not isinstance(value, FakeTensor):
                raise NotCacheable
            tensors.append(value)
            parts.append(
                (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.fake_device,
                    "p",
                )
            )
        elif isinstance(value, torch.Generator):
            parts.append("generator")
        else:
            raise NotCacheable
    return tuple(parts)


def remember(result: Any, tensors: list[FakeTensor]) -> CachedCall | None:
    """How to answer the same call again; None if that is not certain."""
    if result is None:
        return CachedCall(None, None)
    last_first = list(enumerate(tensors))[::-1]  # so that the first of several alike stays
    storages = {tensor.untyped_storage()._cdata: index for index, tensor in last_first}
    places = {id(tensor): index for index, tensor in last_first}
    made: set[int] = set()
    try:
        if isinstance(result, (list, tuple)):
            kind = list if isinstance(result, list) else tuple
            return CachedCall([_describe(value, places, storages, made) for value in result], kind)
        return CachedCall(_describe(result, places, storages, made), None)
    except NotCacheable:
        return None


def _describe(
    value: Any, places: dict[int, int], storages: dict[int, int], made: set[int]
) -> _Output:
    if value is None or isinstance(value, (int, float, bool)):
        return _Output(constant=value)
    if id(value) in places:
        return _Output(same=places[id(value)])
    if type(value) is not FakeTensor:
        raise NotCacheable
    if (
        value.constant is not None
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
    elements, rest = divmod(storage.nbytes(), value.element_size())
    if storage._cdata in made or rest:
        raise NotCacheable
    made.add(storage._cdata)
    if not value.storage_offset() and elements == compute_required_storage_length(
        value.shape, value.stride(), 0
    ):
        elements = 0
    return _Output(elements=elements, offset=value.storage_offset(), **geometry)
