"""What layers keep for backward, in pinned host memory in the meantime.

When a layer's forward has ended, what autograd kept of it is copied to the host on a separate
stream, during the next layer's work; when a layer's backward begins, what the layers before it kept
is copied back on another stream. On the device there are then, besides what other levers leave
there, at most `ahead` + 1 layers' kept bytes, where there were those of all layers: the one that
runs, and `ahead` on their way out (forward) or back already (backward). The last `ahead` layers are
not sent: backward begins with them. It is the virtual memory of vDNN (arXiv 1602.08124), by layers.

Copies are of whole storages, bit for bit: losses and gradients are those without the lever. How
copies and waits are ordered: `recipe_lib/ops/host_copies.py`.
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
from torch.utils._pytree import tree_leaves

from recipe_lib.config.schema import MemoryConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory.peaks import round_up_to_pinned
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.device import has_host
from recipe_lib.ops.host_copies import Copy, HostCopies, Pair

MIN_OFFLOAD_BYTES = 1024  # bytes; less is not worth a copy


def offload_activations(
    model: nn.Module, memory: MemoryConfig, device: torch.device, *, is_stage: bool = False
) -> "Window | None":
    """Sends what each layer keeps for backward to the host, and fetches it before it is needed, in
    place.

    Call it when layers are checkpointed and compiled, before they are sharded. With checkpointing
    what a layer keeps is its input. Parameters, buffers, what is gathered of them, and what all
    layers are given alike (rotations, masks) stay where they are. Without gradients nothing is
    kept, and nothing happens. On a CPU the model is left as it is. is_stage: the model is a rank's
    part of a pipeline. Returns what moves the tensors. ConfigError where `ahead` leaves no layer to
    be sent.
    """
    if not memory.activation_offload or not has_host(device):
        return None
    modules = dict(model.named_modules())
    names = list_layer_names(model)
    # In a pipeline other micro-batches come between the last layer's forward and its backward.
    resident = 0 if is_stage else memory.activation_offload_prefetch_layers
    if resident >= len(names):
        raise ConfigError(
            f"memory.activation_offload_prefetch_layers: found {resident} for a model of"
            f" {len(names)} layers, of which so many at the end are not sent, expected fewer than"
            f" {len(names)}; set it lower, or remove memory.activation_offload"
        )
    window = OffloadedActivations(
        device, memory.activation_offload_prefetch_layers, len(names) - resident
    )
    for number, name in enumerate(names):
        modules[name].forward = _wrap_forward(modules[name], number, window)
    return window


def _wrap_forward(layer: nn.Module, number: int, window: "Window") -> Callable[..., Any]:
    """The layer's forward, of which the window keeps what autograd would."""
    forward = layer.forward
    owned: list[
        tuple[dict[str, Any], str]
    ] = []  # `module._parameters` or `module._buffers`, and a name there
    for module in layer.modules():
        for tensors in (module._parameters, module._buffers):
            owned += [(tensors, name) for name, tensor in tensors.items() if tensor is not None]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        shared: set[int] = set()
        for tensor in _iterate_tensors((args[1:], kwargs)):
            shared.update(_list_storages(tensor))

        def is_staying(address: int) -> bool:
            # Parameters and buffers as they are at the moment: FSDP gathers them, and compiled
            # layers see their own parts of them, between the begin of a forward and what is saved
            # in it.
            held = (tensors.get(name) for tensors, name in owned)
            return address in shared or any(
                address in _list_storages(tensor) for tensor in held if tensor is not None
            )

        tokens = args[0].shape[:-1].numel() if args and isinstance(args[0], Tensor) else 0
        with window.around_layer(number, is_staying, tokens):
            return forward(*args, **kwargs)

    return run


class SavedStorage:
    """One storage that a layer keeps, as a flat tensor: on the device, on the host, or on its way.

    `moved` is behind the copy to the host while there is one there, and behind the copy back
    afterwards. Autograd alone holds these objects: what it drops is gone, after a copy that still
    reads or writes it.
    """

    __slots__ = ("__weakref__", "moved", "on_device", "on_host", "stream")

    def __init__(self, whole: Tensor, stream: Any) -> None:
        self.on_device: Tensor | None = whole
        self.on_host: Tensor | None = None
        self.moved: Copy | None = None
        self.stream = stream  # the one that computes, which the device's memory belongs to

    def free_device_memory(self) -> None:
        """Gives the device's memory back, when the host has all of it."""
        if self.on_host is not None and self.on_device is not None and self.moved is not None:
            self.moved.wait(self.stream)
            self.on_device = None

    def wait_for_copy(self) -> None:
        """What is issued from here on finds the values on the device."""
        if self.on_host is None and self.moved is not None:
            self.moved.wait(self.stream)
            self.moved = None

    def __del__(self) -> None:
        if self.on_device is not None and self.moved is not None and not sys.is_finalizing():
            self.moved.wait(self.stream)


class LayerCall:
    """One forward of a layer: what it keeps (known weakly), and the forward of the layer before it,
    if that came directly before.
    """

    __slots__ = ("kept", "number", "previous", "staying")

    def __init__(
        self, number: int, staying: Callable[[int], bool], previous: "Call | None"
    ) -> None:
        self.number, self.staying = number, staying
        self.previous = previous if previous is not None and previous.number == number - 1 else None
        self.kept: list[weakref.ref[SavedStorage]] = []

    def alive(self) -> list[SavedStorage]:
        """What of it autograd still holds."""
        return [kept for reference in self.kept if (kept := reference()) is not None]


@dataclass(slots=True)
class PackedTensor:
    """What autograd holds in place of a tensor: where it lies in which storage."""

    call: LayerCall
    kept: SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedActivations:
    """Moves what layers keep between device and host.

    device: where the layers compute. ahead: layers that may be on their way, or back, besides the
    present one. sent: layers with this number or a higher one are not sent. host_bytes: sent by the
    last forward of each layer.
    """

    def __init__(self, device: torch.device, ahead: int, sent: int) -> None:
        self.device, self.ahead, self.sent = device, ahead, sent
        self.host_bytes: dict[int, int] = {}
        self._copies = HostCopies(device)
        self._leaving: deque[LayerCall] = deque()  # calls whose tensors may still be on the device
        self._last: LayerCall | None = None
        self._present: LayerCall | None = None  # whose backward runs
        # Before the first layer's tensors are sent, `judge(bytes of the host that they take,
        # tokens)` may refuse.
        self.judge: Callable[[int, int], None] | None = None
        self._known: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()

    @contextmanager
    def around_layer(
        self, number: int, staying: Callable[[int], bool], tokens: int = 0
    ) -> Iterator[None]:
        """Around a layer's forward. staying: whether a storage (by its address) is none of the
        layer's to send. tokens: that the layer is given; 0: not known.
        """
        call = LayerCall(number, staying, self._last)
        self._present = None
        with saved_tensors_hooks(lambda tensor: self._pack(call, tensor), self._unpack):
            yield
        self._last = call
        if number < self.sent:
            self._send(call, tokens)
        self._leaving.append(call)
        while len(self._leaving) > self.ahead:
            self._let_go(self._leaving.popleft())

    def _pack(self, call: LayerCall, tensor: Tensor) -> Any:
        if (
            tensor.device.type != self.device.type
            or tensor.layout != torch.strided
            or is_traceable_wrapper_subclass(tensor)
        ):
            return tensor.detach()  # itself, if it is a result, would hold the graph that holds it
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size < MIN_OFFLOAD_BYTES or size % tensor.element_size() or call.staying(key):
            return tensor.detach()
        kept = self._known.get(key)
        if kept is None or kept.on_device is None or kept.on_device.untyped_storage()._cdata != key:
            whole = tensor.detach().as_strided((size // tensor.element_size(),), (1,), 0)
            self._known[key] = kept = SavedStorage(whole, self._copies.current_stream())
        if not any(reference() is kept for reference in call.kept):
            call.kept.append(weakref.ref(kept))
        return PackedTensor(
            call, kept, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, PackedTensor):
            return packed
        if packed.call is not self._present:
            self._begin_backward(packed.call)
        kept = packed.kept
        if kept.on_device is None:  # let go again since backward of the layer began
            self._fetch(packed.call)
        kept.wait_for_copy()
        assert kept.on_device is not None
        flat = (
            kept.on_device
            if kept.on_device.dtype == packed.dtype
            else kept.on_device.view(packed.dtype)
        )
        return flat.as_strided(packed.shape, packed.stride, packed.offset)

    def _begin_backward(self, call: LayerCall) -> None:
        """Fetches what this layer and the next ones in backward need, and lets go of everything
        else.
        """
        self._present = call
        wanted: list[LayerCall] = []
        one: LayerCall | None = call
        while one is not None and len(wanted) <= self.ahead:
            wanted.append(one)
            one = one.previous
        for other in self._leaving:
            if other not in wanted:
                self._let_go(other)
        for needed in wanted:
            self._fetch(needed)

    def _send(self, call: LayerCall, tokens: int) -> None:
        """Copies what a call keeps to the host, once; the copies begin when all of the layer's work
        so far is done.
        """
        leaving = [kept for kept in call.alive() if kept.on_host is None and kept.moved is None]
        sizes = [kept.on_device.nbytes for kept in leaving if kept.on_device is not None]
        self.host_bytes[call.number] = sum(sizes)
        if not leaving:
            return
        if self.judge is not None:
            judge, self.judge = self.judge, None
            judge(sum(map(round_up_to_pinned, sizes)), tokens)

        def allocate() -> Iterator[Pair]:
            for kept in leaving:
                tensor = kept.on_device
                assert tensor is not None
                kept.on_host = self._copies.allocate_on_host(tensor.shape, tensor.dtype)
                yield kept.on_host, tensor

        sent = self._copies.copy_to_host(allocate())
        for kept in leaving:
            kept.moved = sent

    def _fetch(self, call: LayerCall) -> None:
        """Copies what of a call is on the host alone back. The memory is the computing stream's,
        from here on, which waited for the copy to the host before it freed the old one.
        """
        away = [kept for kept in call.alive() if kept.on_device is None]
        if not away:
            return
        pairs: list[Pair] = []
        for kept in away:
            host = kept.on_host
            assert host is not None
            kept.on_device = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            pairs.append((kept.on_device, host))
            kept.on_host = None
        fetched = self._copies.copy_to_device(pairs)
        for kept in away:
            kept.moved = fetched

    def _let_go(self, call: LayerCall) -> None:
        for kept in call.alive():
            kept.free_device_memory()


def _list_storages(tensor: Tensor) -> list[int]:
    """Of the storages that a tensor consists of; a wrapper, such as a sharded parameter, has those
    of what it holds.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        held = [getattr(tensor, name) for name in names]
        return [
            address for part in held if isinstance(part, Tensor) for address in _list_storages(part)
        ]
    return [tensor.untyped_storage()._cdata]


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments: in sequences, mappings, and objects that hold them as
    attributes.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from _iterate_tensors(vars(leaf))
