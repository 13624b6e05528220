"""Offloaded optimizer states: in pinned host memory, and on the device for the step of their parameter."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.ops.dtensor_shards import local_of, with_local
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer
from recipe_lib.optim.optimizers import step_only

_SMALL = 1024  # bytes: step counters and the like stay where the optimizer put them


class OffloadedStates:
    """Takes over `optimizer.step`: the states of a parameter come before its step, during the step of the one before,
    and go back after it.

    Two more streams copy; what has been sent back is freed when the step after the next begins, so that the states of
    three parameters are on the device at most: one leaving, one stepped, one arriving. In the
    first step, in which states are made, nothing arrives; and which parameter follows which is known from the second
    one on. What has run on a GPU: docs/measurements/on_a_gpu.md.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        instead: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """device: the one that computes; states that are elsewhere are on the host.

        instead: what is stepped in a parameter's place, itself or one on the device for one that is on the host.
        """
        self._optimizer, self._device = optimizer, device
        self._step = optimizer.step
        self._instead = instead or (lambda parameter: parameter)
        self._module = torch.get_device_module(device)
        self._inbound, self._outbound = self._module.Stream(), self._module.Stream()
        self._arrived: dict[nn.Parameter, tuple[Any, dict[str, Tensor]]] = {}  # event, and states on the device
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came after whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a checkpoint."""
        return with_local(value, self._pinned(local_of(value).shape, local_of(value))) if _is_large(value) else value

    def step(self, closure: None = None) -> None:
        """A step of every parameter that has a gradient; then nothing is on its way, and nothing on the device."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter)
        self._last = None
        self._free_all_but(0)
        for arrived, here in self._arrived.values():  # of parameters that had no gradient in this step
            self._module.current_stream().wait_event(arrived)
            here.clear()
        self._arrived.clear()

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter, whose states change places with those on the device for as long as that takes."""
        stepped, states = self._instead(parameter), self._optimizer.state
        here = self._arrive(parameter)
        hosts = states.get(parameter, {})
        moved = {key: with_local(hosts[key], value) for key, value in here.items()}
        counts = {key: self._count_to_device(value) for key, value in hosts.items() if key not in here}
        if hosts:
            states[stepped] = counts | moved
        if stepped is not parameter and isinstance(self._optimizer, ChunkedOptimizer):
            self._optimizer.add_stand_in(stepped, parameter)
        step_only(self._optimizer, parameter, self._step, stepped)
        after = states.get(stepped, {})
        if stepped is not parameter:
            states.pop(stepped, None)
        places = {
            key: hosts[key] if key in here else with_local(value, self._pinned(local_of(value).shape, value))
            for key, value in after.items()
            if self._waits(parameter, value)
        }
        if after:
            states[parameter] = after | places
        self._send({key: local_of(after[key]) for key in places}, {key: local_of(one) for key, one in places.items()})

    def _waits(self, parameter: nn.Parameter, value: Any) -> bool:
        """Return whether a state is on the host between steps; for a stand-in, whatever has its shape."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return _is_large(value) or self._instead(parameter) is not parameter

    def _count_to_device(self, value: Any) -> Any:
        """Return a state that stays; fused kernels want a count on the device, where a state that was read has none."""
        moves = isinstance(value, Tensor) and self._optimizer.defaults.get("fused")
        return value.to(self._device) if moves else value

    def _arrive(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's states on the device; those of the next one are on their way then."""
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        self._fetch(parameter)
        self._free_all_but(1)
        if (following := self._next.get(parameter)) is not None:
            self._fetch(following)
        if (found := self._arrived.pop(parameter, None)) is None:
            return {}
        arrived, here = found
        self._module.current_stream().wait_event(arrived)
        return here

    def _fetch(self, parameter: nn.Parameter) -> None:
        """Put the states of a parameter on the device, if there are any and they are not there already."""
        if parameter in self._arrived:
            return
        states = self._optimizer.state.get(parameter, {})
        hosts = {key: local_of(value) for key, value in states.items() if self._waits(parameter, value)}
        if not hosts:
            return
        # Memory of the stream that steps, not of the one that copies: the allocator keeps them apart.
        here = {key: torch.empty_like(host, device=self._device) for key, host in hosts.items()}
        # Which may still use that memory, and has waited at the end of the last step for all that was sent back in it.
        self._inbound.wait_stream(self._module.current_stream())
        with self._module.stream(self._inbound):
            for key, host in hosts.items():
                here[key].copy_(host, non_blocking=True)
            self._arrived[parameter] = self._inbound.record_event(), here

    def _send(self, here: dict[str, Tensor], places: dict[str, Tensor]) -> None:
        """Copies states back to their places, and lets go of those on the device when that is done."""
        self._outbound.wait_stream(self._module.current_stream())
        with self._module.stream(self._outbound):
            for key, place in places.items():
                place.copy_(here[key], non_blocking=True)
        self._leaving.append((self._outbound.record_event(), list(here.values())))

    def _pinned(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Host memory, pinned where there is a device besides."""
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=self._device.type != "cpu")

    def _free_all_but(self, count: int) -> None:
        """Frees what was sent back before the last `count` parameters; streams wait for it, the host does not."""
        while len(self._leaving) > count:
            sent, held = self._leaving.popleft()
            self._module.current_stream().wait_event(sent)
            held.clear()


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL
