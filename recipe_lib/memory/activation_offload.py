"""Offload activations: what layers save for backward waits in pinned host memory.

`apply_memory_levers` calls `offload_activations(model, cfg.memory, device)`, which wraps each
layer's forward. After it, what autograd saved is copied to the host while the next layer computes;
backward copies it back before it is needed (arXiv 1602.08124, by layers). The device holds the
saved tensors of `memory.activation_offload_prefetch_layers` + 1 layers.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipe_lib.config.schema import MemoryConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory.peaks import round_up_to_pinned
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.device import has_host
from recipe_lib.ops.host_copies import Copy, HostCopies, Pair
from recipe_lib.ops.kept_tensors import list_tensors

MIN_OFFLOAD_BYTES = 1024  # smaller storages stay on the device: they are not worth a copy


def offload_activations(
    model: nn.Module, memory: MemoryConfig, device: torch.device, *, is_stage: bool = False
) -> "OffloadedActivations | None":
    """Offload what each layer saves for backward to the host, in place.

    Call it when layers are checkpointed and compiled, before they are sharded. Parameters and
    buffers, gathered ones too, and what all layers are given alike (rotations, masks) stay on the
    device. Nothing is offloaded where no gradients are computed. Whole storages are copied, bit for
    bit: losses and gradients are those without offloading.

    device: where layers compute. is_stage: True if the model is a rank's part of a pipeline.
    Returns the object that moves the tensors; None, with the model left as it is, if
    `memory.activation_offload` is off or the device is a CPU. Raises ConfigError if
    `memory.activation_offload_prefetch_layers` leaves no layer to be offloaded.
    """
    if not memory.activation_offload or not has_host(device):
        return None
    modules = dict(model.named_modules())
    names = list_layer_names(model)
    ahead = memory.activation_offload_prefetch_layers
    # Backward begins with the last layers, which would come back at once: they stay. In a pipeline
    # other micro-batches run between a layer's forward and its backward, so that all are sent.
    num_resident = 0 if is_stage else ahead
    if num_resident >= len(names):
        raise ConfigError(
            f"memory.activation_offload_prefetch_layers: found {num_resident} for a model of"
            f" {len(names)} layers, of which so many at the end are not sent, expected fewer than"
            f" {len(names)}; set it lower, or remove memory.activation_offload"
        )
    offloaded = OffloadedActivations(device, ahead, len(names) - num_resident)
    for index, name in enumerate(names):
        modules[name].forward = _wrap_forward(modules[name], index, offloaded)
    return offloaded


def _wrap_forward(
    layer: nn.Module, index: int, offloaded: "OffloadedActivations"
) -> Callable[..., Any]:
    """Return the layer's forward with its saved tensors handed to `offloaded`.

    index: of the layer among the model's.
    """
    forward = layer.forward
    # (`module._parameters` or `module._buffers`, a name in it), for all modules of the layer.
    entries: list[tuple[dict[str, Any], str]] = []
    for module in layer.modules():
        for tensors in (module._parameters, module._buffers):
            entries += [(tensors, name) for name, tensor in tensors.items() if tensor is not None]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Addresses of storages. All arguments but the hidden states are the same for every layer.
        shared: set[int] = set()
        for tensor in list_tensors((args[1:], kwargs)):
            shared.update(_list_storages(tensor))

        def is_resident(storage: int) -> bool:
            """Return True for a storage, by its address, that is not offloaded."""
            # Parameters are looked up at each call: FSDP gathers them, and compiled layers exchange
            # them for their local parts, after forward begins and before anything is saved.
            current = (tensors.get(name) for tensors, name in entries)
            return storage in shared or any(
                storage in _list_storages(tensor) for tensor in current if tensor is not None
            )

        num_tokens = args[0].shape[:-1].numel() if args and isinstance(args[0], Tensor) else 0
        with offloaded.around_layer(index, is_resident, num_tokens):
            return forward(*args, **kwargs)

    return run


class SavedStorage:
    """One storage that a layer saves, as a flat tensor on the device, on the host, or on its way.

    Only autograd holds these objects, in its `PackedTensor`s. When it drops one, the memory is free
    as soon as the copy that still reads or writes it is done.
    """

    __slots__ = ("__weakref__", "copy", "on_device", "on_host", "stream")

    def __init__(self, flat: Tensor, stream: Any) -> None:
        # The whole storage, `[n]`. None: freed, the values are on the host alone.
        self.on_device: Tensor | None = flat
        self.on_host: Tensor | None = None  # None: not sent, or fetched again
        # While `on_host` is set, the copy to the host; after that the copy back. None: neither.
        self.copy: Copy | None = None
        self.stream = stream  # the computing one, which the device's memory was allocated on

    def free_device_memory(self) -> None:
        """Free the device's memory if the values are on the host, or on their way there."""
        if self.on_host is not None and self.on_device is not None and self.copy is not None:
            # The computing stream waits first: what it writes to this memory next must not
            # overwrite what the copy still reads.
            self.copy.wait(self.stream)
            self.on_device = None

    def wait_for_copy(self) -> None:
        if self.on_host is None and self.copy is not None:
            self.copy.wait(self.stream)
            self.copy = None

    def __del__(self) -> None:
        # Waits as `free_device_memory` does. When Python ends, torch's streams may be gone already.
        if self.on_device is not None and self.copy is not None and not sys.is_finalizing():
            self.copy.wait(self.stream)


class LayerCall:
    """One forward of a layer, with the storages that it saved."""

    __slots__ = ("index", "is_resident", "previous", "saved")

    def __init__(
        self, index: int, is_resident: Callable[[int], bool], previous: "LayerCall | None"
    ) -> None:
        self.index = index  # of the layer in the model
        self.is_resident = is_resident  # `fn(address of a storage)`: True: it is not offloaded
        # The last call before this one, if it is that of the layer before: backward needs it next.
        self.previous = previous if previous is not None and previous.index == index - 1 else None
        # Weak references: a strong one would keep memory that autograd has dropped.
        self.saved: list[weakref.ref[SavedStorage]] = []

    def list_alive(self) -> list[SavedStorage]:
        """Return the storages that autograd still holds."""
        return [saved for reference in self.saved if (saved := reference()) is not None]


@dataclass(slots=True)
class PackedTensor:
    """A view of a saved storage, which autograd holds in place of a saved tensor."""

    call: LayerCall  # the forward that saved the tensor
    saved: SavedStorage  # the storage that the tensor is a view of
    dtype: torch.dtype  # of the view; the storage may have been recorded in another
    shape: torch.Size
    stride: tuple[int, ...]  # in elements of dtype
    offset: int  # in elements of dtype


class OffloadedActivations:
    """Moves what layers save for backward between device and host."""

    def __init__(self, device: torch.device, ahead: int, sent: int) -> None:
        self.device = device  # where the layers compute
        # Number of layers whose tensors may be on the device besides those of the running one:
        # in forward on their way to the host, in backward on their way back.
        self.ahead = ahead
        self.sent = sent  # number of layers, from the first on, that are offloaded
        self.host_bytes: dict[int, int] = {}  # layer index -> bytes sent by its last forward
        # `fn(bytes, tokens)`, called once before anything is sent: the pinned host memory that the
        # first layer takes, and its number of tokens. It raises if that is too much.
        self.judge: Callable[[int, int], None] | None = None
        self._copies = HostCopies(device)
        # Calls whose tensors may still be on the device, the oldest first.
        self._leaving: deque[LayerCall] = deque()
        self._last_call: LayerCall | None = None  # the one whose forward ended last
        self._backward_call: LayerCall | None = None  # the one whose backward runs
        # Address of a storage on the device -> what was recorded for it. Several layers may save
        # the same storage: one layer's output is the next one's input.
        self._saved: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()

    @contextmanager
    def around_layer(
        self, index: int, is_resident: Callable[[int], bool], tokens: int = 0
    ) -> Iterator[None]:
        """Offload what is saved inside the block, which runs the forward of layer `index`.

        is_resident: True for a storage (its address) that stays on the device. tokens: number of
        tokens that the layer is given; 0: unknown.
        """
        call = LayerCall(index, is_resident, self._last_call)
        self._backward_call = None
        with saved_tensors_hooks(lambda tensor: self._pack(call, tensor), self._unpack):
            yield
        self._last_call = call
        if index < self.sent:
            self._send(call, tokens)
        self._leaving.append(call)
        while len(self._leaving) > self.ahead:
            self._free_device_memory(self._leaving.popleft())

    def _pack(self, call: LayerCall, tensor: Tensor) -> Any:
        """Return what autograd holds of a tensor: a PackedTensor, or the tensor if it stays."""
        if (
            tensor.device.type != self.device.type
            or tensor.layout != torch.strided
            or is_traceable_wrapper_subclass(tensor)
        ):
            # Detached: a node that saves its own result would keep its graph alive by it.
            return tensor.detach()
        storage = tensor.untyped_storage()
        address = storage._cdata
        num_bytes = storage.nbytes()
        if (
            num_bytes < MIN_OFFLOAD_BYTES
            or num_bytes % tensor.element_size()
            or call.is_resident(address)
        ):
            return tensor.detach()
        saved = self._saved.get(address)
        # The address may have been given to another storage since one was recorded under it.
        if (
            saved is None
            or saved.on_device is None
            or saved.on_device.untyped_storage()._cdata != address
        ):
            flat = tensor.detach().as_strided((num_bytes // tensor.element_size(),), (1,), 0)
            self._saved[address] = saved = SavedStorage(flat, self._copies.current_stream())
        if not any(reference() is saved for reference in call.saved):
            call.saved.append(weakref.ref(saved))
        return PackedTensor(
            call=call,
            saved=saved,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )

    def _unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor on the device, for the computing stream's work from here on."""
        if not isinstance(packed, PackedTensor):
            return packed
        if packed.call is not self._backward_call:
            self._begin_backward(packed.call)
        saved = packed.saved
        if saved.on_device is None:  # freed again since the layer's backward began
            self._fetch(packed.call)
        saved.wait_for_copy()
        flat = saved.on_device
        assert flat is not None
        if flat.dtype != packed.dtype:
            flat = flat.view(packed.dtype)
        return flat.as_strided(packed.shape, packed.stride, packed.offset)

    def _begin_backward(self, call: LayerCall) -> None:
        """Fetch what this layer and the next `ahead` ones in backward need, and free all else."""
        self._backward_call = call
        needed_calls: list[LayerCall] = []
        next_call: LayerCall | None = call
        while next_call is not None and len(needed_calls) <= self.ahead:
            needed_calls.append(next_call)
            next_call = next_call.previous
        # Freed before anything is fetched, so that the two are not on the device together.
        for leaving in self._leaving:
            if leaving not in needed_calls:
                self._free_device_memory(leaving)
        for needed in needed_calls:
            self._fetch(needed)

    def _send(self, call: LayerCall, tokens: int) -> None:
        """Begin to copy what a call saved to the host, each storage once.

        The copies run when all of the layer's work so far is done. tokens: as of `around_layer`.
        """
        # A storage that the layer before has saved, too, is on the host or on its way already.
        leaving = [
            saved for saved in call.list_alive() if saved.on_host is None and saved.copy is None
        ]
        sizes = [saved.on_device.nbytes for saved in leaving if saved.on_device is not None]
        self.host_bytes[call.index] = sum(sizes)
        if not leaving:
            return
        if self.judge is not None:
            judge = self.judge
            self.judge = None
            judge(sum(map(round_up_to_pinned, sizes)), tokens)

        # A generator: host memory must be allocated while the copying stream is the current one.
        def allocate() -> Iterator[Pair]:
            for saved in leaving:
                assert saved.on_device is not None
                saved.on_host = self._copies.allocate_on_host(
                    saved.on_device.shape, saved.on_device.dtype
                )
                yield saved.on_host, saved.on_device

        copy = self._copies.copy_to_host(allocate())
        for saved in leaving:
            saved.copy = copy

    def _fetch(self, call: LayerCall) -> None:
        """Begin to copy back the storages of a call that are on the host alone."""
        absent = [saved for saved in call.list_alive() if saved.on_device is None]
        if not absent:
            return
        pairs: list[Pair] = []
        for saved in absent:
            host = saved.on_host
            assert host is not None
            # Allocated on the computing stream, which has waited for the copy to the host before
            # it freed the memory that these values had.
            saved.on_device = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            pairs.append((saved.on_device, host))
            saved.on_host = None
        copy = self._copies.copy_to_device(pairs)
        for saved in absent:
            saved.copy = copy

    def _free_device_memory(self, call: LayerCall) -> None:
        for saved in call.list_alive():
            saved.free_device_memory()


def _list_storages(tensor: Tensor) -> list[int]:
    """Return the addresses of the storages of a tensor, or of those in a wrapper (DTensor)."""
    # `_cdata` is the address of the storage object: it stays the same while FSDP frees the memory
    # and allocates it again.
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()._cdata]
    addresses: list[int] = []
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            addresses += _list_storages(inner)
    return addresses
