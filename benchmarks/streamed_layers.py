"""Imitate how Loggetta's runs stream NF4 codes from the host to the device, for the planner.

`peer_stacks.py` makes `StreamedCodes`, which registers hooks at the layers. Codes are the 4-bit
numbers of a layer's weights, two a byte. The layer in use is on the device and the next one, copied
ahead on a stream of its own. After experts4bit-qlora 0.58.1 (engines/dense_offload.py), on which
Loggetta 0.7 builds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class StreamedCodes:
    """Brings each layer's codes to the device before it runs, and gives up those behind it."""

    def __init__(self, layers: Sequence[nn.Module], modules: Sequence[Sequence[Any]]) -> None:
        """Begin to stream.

        modules: of each layer, its modules that have `codes` for a weight of `shape`.
        """
        self._modules = modules
        self._device = torch.get_device_module(modules[0][0].codes.device.type)
        self._nothing = modules[0][0].codes.new_empty(0)  # what codes on the host look like here
        self._copying = self._device.Stream()
        self._in_use: set[int] = set()  # layers whose codes are on the device
        # By layer: codes that are copied ahead, and the event after the copies.
        self._ahead: dict[int, tuple[list[Tensor], Any]] = {}
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._bring_layer(number))
            layer.register_full_backward_pre_hook(
                lambda *_, number=number: self._bring_layer(number)
            )

    def _bring_layer(self, number: int) -> None:
        """Bring a layer's codes to the device, and begin to copy the next one's.

        Called before the layer's forward, its recomputation and its backward.
        """
        if number in self._ahead:
            codes, copied = self._ahead.pop(number)
            copied.wait()
            self._bind(number, codes)
        elif number not in self._in_use:
            self._bind(number, self._copy(number))
        # Of the others only the next layer's stay, as where forward turns around into backward.
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
        # -1 outside of autograd's engine. Recomputation runs in it, and counts as backward.
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward:
            return number - 1 if number else 1
        return number + 1 if number < last else last - 1

    def _copy(self, number: int) -> list[Tensor]:
        """Allocate a layer's codes, two a byte, as a copy from the host does."""
        return [
            self._nothing.new_empty(-(-module.shape.numel() // 2))
            for module in self._modules[number]
        ]

    def _bind(self, number: int, codes: list[Tensor]) -> None:
        """Give a layer's modules their codes."""
        for module, tensor in zip(self._modules[number], codes, strict=True):
            # Allocated on the copying stream: the memory is held until the computing one is done.
            tensor.record_stream(self._device.current_stream())
            module.codes = tensor
        self._in_use.add(number)
