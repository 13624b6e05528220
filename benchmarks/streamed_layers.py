"""Stream NF4 codes from the host to the device one layer ahead, as Loggetta's runs do.

Used by peer_stacks.py. From experts4bit-qlora 0.58.1 (engines/dense_offload.py), on which Loggetta
0.7 builds: the layer in use is on the device, and the one after it, in backward the one before; the
copy is on a stream of its own, and `record_stream` says of each tensor that layers compute with it,
so that its memory is held until the device has come that far.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class StreamedCodes:
    """The codes of layers, which are on the host from here on."""

    def __init__(self, layers: Sequence[nn.Module], modules: Sequence[Sequence[Any]]) -> None:
        """Begin to stream. modules: of each layer, those with `codes` for a weight of `shape`."""
        self._modules = modules
        self._device = torch.get_device_module(modules[0][0].codes.device.type)
        self._nothing = modules[0][0].codes.new_empty(0)
        self._copying = self._device.Stream()
        self._in_use: set[int] = set()  # layers whose codes are on the device
        # By layer: its codes, and the event after their copies.
        self._ahead: dict[int, tuple[list[Tensor], Any]] = {}
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._bring_layer(number))
            layer.register_full_backward_pre_hook(
                lambda *_, number=number: self._bring_layer(number)
            )

    def _bring_layer(self, number: int) -> None:
        """Bring a layer's codes to the device, and begin with the next one's.

        Called before its forward, its recomputation and its backward.
        """
        if number in self._ahead:
            codes, copied = self._ahead.pop(number)
            copied.wait()
            self._bind(number, codes)
        elif number not in self._in_use:
            self._bind(number, self._copy(number))
        following = self._find_following(number)
        for past in self._in_use - {number, following}:
            for module in self._modules[past]:
                module.codes = self._nothing
        self._in_use &= {number, following}
        self._ahead = {layer: copy for layer, copy in self._ahead.items() if layer == following}
        if following not in self._in_use and following not in self._ahead:
            with self._device.stream(self._copying):
                codes = self._copy(following)
            copied = self._device.Event()
            copied.record(self._copying)
            self._ahead[following] = codes, copied

    def _find_following(self, number: int) -> int:
        """Return the layer that is used after this one.

        Forward turns around at the last layer, backward at the first.
        """
        last = len(self._modules) - 1
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward:
            return number - 1 if number else 1
        return number + 1 if number < last else last - 1

    def _copy(self, number: int) -> list[Tensor]:
        return [
            self._nothing.new_empty(-(-module.shape.numel() // 2))
            for module in self._modules[number]
        ]

    def _bind(self, number: int, codes: list[Tensor]) -> None:
        for module, tensor in zip(self._modules[number], codes, strict=True):
            tensor.record_stream(self._device.current_stream())
            module.codes = tensor
        self._in_use.add(number)
