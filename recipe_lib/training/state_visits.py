"""Optimizer states that wait in pinned host memory and visit the device one parameter at a time."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_SMALL = 1024  # bytes: step counters and the like stay where the optimizer put them


def step_only(optimizer: Optimizer, parameter: nn.Parameter, step: Callable[[], Any] | None = None) -> None:
    """A step of one of the optimizer's parameters. step: the optimizer's own, where `optimizer.step` is another."""
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = [parameter] if any(one is parameter for one in parameters) else []
        (step or optimizer.step)()
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters


class StateVisits:
    """Takes over `optimizer.step`: states of a parameter come before its step, beside the step of the one before, and
    go back after it.

    Two more streams copy; what has been sent back is freed when the step after the next begins, so that the states of
    three parameters are on the device at most: one leaving, one stepped, one arriving. In the first step, in which
    states are made, and after resuming, nothing arrives. Never run on a GPU so far; on a simulated device it is.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        """device: the one that computes; states that are elsewhere are on the host."""
        self._optimizer, self._device = optimizer, device
        self._step = optimizer.step
        self._module = torch.get_device_module(device)
        self._inbound, self._outbound = self._module.Stream(), self._module.Stream()
        self._arrived: dict[nn.Parameter, Any] = {}  # parameter -> event, of states that were fetched
        self._hosts: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came behind whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]
        optimizer.place_state = self.placed  # type: ignore[attr-defined]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a checkpoint."""
        return _with_local(value, _pinned_like(_local(value))) if _is_large(value) else value

    def step(self, closure: None = None) -> None:
        """A step of every parameter that has a gradient; then nothing is on its way, and nothing on the device."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter)
        self._last = None
        self._free_all_but(0)

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter) -> None:
        """A step of one parameter; the states of that which came behind it in the last step are fetched beside it."""
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        self._fetch(parameter)
        self._free_all_but(1)
        following = self._next.get(parameter)
        if following is not None:
            self._fetch(following)
        now = self._module.current_stream()
        if (arrived := self._arrived.pop(parameter, None)) is not None:
            now.wait_event(arrived)
        step_only(self._optimizer, parameter, self._step)
        self._send(parameter)

    def _fetch(self, parameter: nn.Parameter) -> None:
        """Puts the states of a parameter on the device, if there are any and they are not there already."""
        state = self._optimizer.state.get(parameter)
        if not state or parameter in self._arrived:
            return
        hosts = self._hosts.setdefault(parameter, {})
        for key, value in state.items():
            if _is_large(value) and (value is hosts.get(key) or _local(value).device.type != self._device.type):
                hosts[key] = value
                # Memory of the stream that steps, not of the one that copies: the allocator keeps them apart.
                state[key] = _with_local(value, torch.empty_like(_local(value), device=self._device))
        self._inbound.wait_stream(self._module.current_stream())  # which may still use that memory
        with self._module.stream(self._inbound):
            for key, host in hosts.items():
                _local(state[key]).copy_(_local(host), non_blocking=True)
            self._arrived[parameter] = self._inbound.record_event()

    def _send(self, parameter: nn.Parameter) -> None:
        """Copies the states of a parameter back, and lets go of those on the device when that is done."""
        state = self._optimizer.state[parameter]
        hosts = self._hosts.setdefault(parameter, {})
        gone = [key for key, value in state.items() if _is_large(value)]
        self._outbound.wait_stream(self._module.current_stream())
        held = []
        with self._module.stream(self._outbound):
            for key in gone:
                value = state[key]
                if key not in hosts:
                    hosts[key] = _with_local(value, _pinned_like(_local(value)))
                _local(hosts[key]).copy_(_local(value), non_blocking=True)
                held.append(_local(value))
                state[key] = hosts[key]
        self._leaving.append((self._outbound.record_event(), held))

    def _free_all_but(self, count: int) -> None:
        """Frees what was sent back before the last `count` parameters; streams wait for it, the host does not."""
        while len(self._leaving) > count:
            sent, held = self._leaving.popleft()
            self._module.current_stream().wait_event(sent)
            held.clear()


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _with_local(value: Tensor, local: Tensor) -> Tensor:
    """The tensor with this as its memory, or this rank's part of it; `DTensor.from_local` would move it to the mesh."""
    if not isinstance(value, DTensor):
        return local
    return DTensor(local, value._spec, requires_grad=False)  # type: ignore[call-arg]


def _pinned_like(local: Tensor) -> Tensor:
    return torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type != "cpu")
