"""Gradients that FSDP sends to the host (`memory.cpu_offload`): when the host waits for them and adds them up.

Where a parameter has a gradient already, FSDP waits for each new one's copy, to memory that is not pinned, in order to
add the two; and at the end of a step it waits twice. Here gradients go to pinned memory in every micro-batch. From the
second one on, the host adds up those of a unit when the next one's are on their way, so that the device goes on and the
host has no more than two units' twice; at the end of backward it waits once, for what is left and for the numbers that
are logged.

Private parts of torch's FSDP2 are used here: a unit's reduction (`post_backward`), the events of its copies, and what
its root does at the end of backward.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.ops.device import kernels_of
from recipe_lib.ops.host_copies import Copy, wait_on_host
from recipe_lib.parallel.fsdp_parts import end_backward, group_of


class OffloadedGradients:
    """Waits for the gradients of a sharded model, of a unit or of all that are on their way."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sums: Mapping[nn.Parameter, Tensor],
        add: Callable[[Iterable[nn.Parameter]], None],
        *,
        waits_at_end: bool,
    ) -> None:
        """device: that computes them. sums: so far. add: adds gradients of parameters to them. waits_at_end: not FSDP's
        root but `wait` ends a backward, between `begin` and itself."""
        self._model: Any = model
        self._device, self._sums, self._add, self._waits_at_end = device, sums, add, waits_at_end
        self._previous: Any = None
        self._sends_numbers = False
        groups = [group_of(unit) for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._groups = [group for group in groups if group is not None]
        for group in self._groups:
            group.post_backward = self._following(group)

    def begin(self) -> None:
        """A micro-batch begins."""
        if self._waits_at_end:
            self._model.set_is_last_backward(False)

    def send(self, numbers: Tensor) -> Tensor:
        """Numbers of the device, on their way to the host: the next `wait` is for them, too."""
        self._sends_numbers = True
        return numbers.to("cpu", non_blocking=True)

    def wait(self) -> None:
        """Waits once for all that is on its way."""
        if kernels_of(self._device) != "cpu":
            arriving = [copy for group in self._groups for copy in self._take_copies(group)]
            if arriving or self._sends_numbers:
                wait_on_host(arriving, self._device)
        self._sends_numbers = False
        if self._waits_at_end:
            self._model.set_is_last_backward(True)
            end_backward(self._model)
        self._previous = None

    def _following(self, group: Any) -> Callable[..., None]:
        """A unit's reduction, after which the gradients of the unit before it are added up, if they have sums."""
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            reduce(*unused)
            if all(entry.sharded_param.grad is None for entry in group.fsdp_params):
                return
            previous, self._previous = self._previous, group
            if previous is None or previous is group:
                return
            parameters = [entry.sharded_param for entry in previous.fsdp_params]
            if any(parameter in self._sums for parameter in parameters):
                for copy in self._take_copies(previous)[-1:]:  # all are of one stream
                    copy.wait_on_host()
                self._add(parameters)

        return post_backward

    def _take_copies(self, group: Any) -> list[Copy]:
        """Return a unit's copies, which nothing else waits for then."""
        copies = []
        for entry in group.fsdp_params:
            if entry.grad_offload_event is not None:
                module = torch.get_device_module(self._device)
                copies.append(Copy(entry.grad_offload_event, module))
                entry.grad_offload_event = None
        return copies
