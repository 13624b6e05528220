"""Offloaded optimizer states: in pinned host memory, and on the device for the step of their parameter or rows."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.ops.dtensor_shards import local_of, with_local
from recipe_lib.optim.row_steps import RowSteps, is_cut, step_only

_SMALL = 1024  # bytes: step counters and the like stay where the optimizer put them
Chunk = tuple[nn.Parameter, int]  # a parameter, and which piece of it


class OffloadedStates:
    """Takes over `optimizer.step`: the states of a piece come before its step, during the step of the one before, and
    go back after it. A piece is a parameter, or, of a large one that can be stepped by rows, a run of rows.

    Two more streams copy; what has been sent back is freed when the step after the next begins, so that the states of
    three pieces are on the device at most: one leaving, one stepped, one arriving. In the first step, in which states
    are made, nothing arrives; and which parameter follows which is known from the second one on. What
    has run on a GPU: docs/measurements/on_a_gpu.md.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        instead: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """device: the one that computes; states that are elsewhere are on the host. instead: see `RowSteps`."""
        self._optimizer, self._device = optimizer, device
        self._step = optimizer.step
        self._rows = RowSteps(optimizer, lambda piece, shape: self._pinned(shape, piece), instead)
        self._instead = instead or (lambda parameter: parameter)
        self._module = torch.get_device_module(device)
        self._inbound, self._outbound = self._module.Stream(), self._module.Stream()
        self._arrived: dict[Chunk, tuple[Any, dict[str, Tensor]]] = {}  # event, and states on the device
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came after whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a checkpoint."""
        return with_local(value, self._pinned(local_of(value).shape, local_of(value))) if _is_large(value) else value

    def pieces(self, parameter: nn.Parameter) -> list[slice]:
        """The runs of rows that a parameter is stepped by; none: it is stepped whole."""
        return self._rows.pieces(parameter)

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
        """A step of one parameter, with its whole gradient."""
        rows = self.pieces(parameter)
        if not rows:
            self._step_whole(parameter)
            return
        gradient = local_of(self._instead(parameter).grad)
        for number, part in enumerate(rows):
            self.step_rows(parameter, number, gradient[part])

    @torch.no_grad()
    def step_rows(self, parameter: nn.Parameter, number: int, gradient: Tensor) -> None:
        """A step of one of a parameter's pieces, with the gradient of its rows. They come in order."""
        here = self._arrive(parameter, number)
        here = self._rows.step_with(parameter, number, gradient, here)
        rows = self.pieces(parameter)[number]
        places = {key: local_of(self._rows.whole(parameter, key, value))[rows] for key, value in here.items()}
        self._send(here, places)
        self._rows.finish(parameter, number)

    def _step_whole(self, parameter: nn.Parameter) -> None:
        """The states change places with those on the device for as long as the step takes."""
        states = self._optimizer.state
        here = self._arrive(parameter, 0)
        hosts = {key: states[parameter][key] for key in here}
        for key, value in here.items():
            states[parameter][key] = with_local(hosts[key], value)
        step_only(self._optimizer, parameter, self._step)
        here = {key: local_of(value) for key, value in states.get(parameter, {}).items() if _is_large(value)}
        for key, value in here.items():
            if key not in hosts:
                hosts[key] = with_local(states[parameter][key], self._pinned(value.shape, value))
            states[parameter][key] = hosts[key]
        self._send(here, {key: local_of(hosts[key]) for key in here})

    def _arrive(self, parameter: nn.Parameter, number: int) -> dict[str, Tensor]:
        """The states of a piece, on the device; those of the next one are on their way then."""
        if number == 0:
            if self._last is not None:
                self._next[self._last] = parameter
            self._last = parameter
        self._fetch((parameter, number))
        self._free_all_but(1)
        if number + 1 < len(self.pieces(parameter)):
            self._fetch((parameter, number + 1))
        elif (following := self._next.get(parameter)) is not None:
            self._fetch((following, 0))
        if (found := self._arrived.pop((parameter, number), None)) is None:
            return {}
        arrived, here = found
        self._module.current_stream().wait_event(arrived)
        return here

    def _fetch(self, chunk: Chunk) -> None:
        """Puts the states of a piece on the device, if there are any and they are not there already."""
        if chunk in self._arrived:
            return
        parameter, number = chunk
        states = self._optimizer.state.get(parameter, {})
        if pieces := self.pieces(parameter):
            hosts = {key: local_of(value)[pieces[number]] for key, value in states.items() if is_cut(value)}
        else:
            hosts = {key: local_of(value) for key, value in states.items() if _is_large(value)}
        if not hosts:
            return
        # Memory of the stream that steps, not of the one that copies: the allocator keeps them apart.
        here = {key: torch.empty_like(host, device=self._device) for key, host in hosts.items()}
        # Which may still use that memory, and has waited at the end of the last step for all that was sent back in it.
        self._inbound.wait_stream(self._module.current_stream())
        with self._module.stream(self._inbound):
            for key, host in hosts.items():
                here[key].copy_(host, non_blocking=True)
            self._arrived[chunk] = self._inbound.record_event(), here

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
        """Frees what was sent back before the last `count` pieces; streams wait for it, the host does not."""
        while len(self._leaving) > count:
            sent, held = self._leaving.popleft()
            self._module.current_stream().wait_event(sent)
            held.clear()


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL
