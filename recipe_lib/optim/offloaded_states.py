"""Offloaded optimizer states: in pinned host memory, on the device for their parameter's step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.ops.dtensor_shards import local_of, with_local
from recipe_lib.ops.host_copies import HostCopies, Pair, Prefetch
from recipe_lib.optim.row_steps import RowSteps, is_cut, step_only

_SMALL = 1024  # bytes: step counters and the like stay where the optimizer put them
Chunk = tuple[nn.Parameter, int]  # a parameter, and which piece of it


class OffloadedStates:
    """Takes over `optimizer.step`: the states of a piece come before its step, during the step of
    the one before, and go back after it. A piece is a parameter, or, of a large one that can be
    stepped by rows, a run of rows.

    What has been sent back is freed when the step after the next begins, so that the states of
    three pieces are on the device at most: one leaving, one stepped, one arriving. In the first
    step, in which states are made, nothing arrives; and which parameter follows which is known from
    the second one on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        instead: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """device: the one that computes; states that are elsewhere are on the host. instead: see `RowSteps`."""
        self._optimizer = optimizer
        self._step = optimizer.step
        self._copies = HostCopies(device)
        self._on_device: dict[Chunk, dict[str, Tensor]] = {}  # states for the steps that come next
        self._prefetch = Prefetch(self._copies, self._allocate, self._on_device.pop)
        self._rows = RowSteps(optimizer, self._allocate_on_host, instead)
        self._instead = instead or (lambda parameter: parameter)
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came after whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a checkpoint."""
        if not _is_large(value):
            return value
        return with_local(value, self._allocate_on_host(value, local_of(value).shape))

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
        self._prefetch.drop_all()  # states of parameters that had no gradient in this step, too

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
        states = self._take(parameter, number)
        states = self._rows.step_with(parameter, number, gradient, states)
        rows = self.pieces(parameter)[number]
        pairs = []
        for key, value in states.items():
            host = self._rows.whole(parameter, key, value)
            pairs.append((local_of(host)[rows], value))
        self._copies.copy_to_host(pairs, free=pairs.clear)
        self._rows.finish(parameter, number)

    def _step_whole(self, parameter: nn.Parameter) -> None:
        """The states change places with those on the device for as long as the step takes."""
        states = self._optimizer.state
        on_device = self._take(parameter, 0)
        hosts = {key: states[parameter][key] for key in on_device}
        for key, value in on_device.items():
            states[parameter][key] = with_local(hosts[key], value)
        step_only(self._optimizer, parameter, self._step)
        pairs = []
        for key, value in states.get(parameter, {}).items():
            if _is_large(value):
                if key not in hosts:  # made in this step
                    host = self._allocate_on_host(value, local_of(value).shape)
                    hosts[key] = with_local(value, host)
                states[parameter][key] = hosts[key]
                pairs.append((local_of(hosts[key]), local_of(value)))
        self._copies.copy_to_host(pairs, free=pairs.clear)

    def _take(self, parameter: nn.Parameter, number: int) -> dict[str, Tensor]:
        """Return the states of a piece, on the device; those of the next one are on their way then."""
        if number == 0:
            if self._last is not None:
                self._next[self._last] = parameter
            self._last = parameter
        following: Chunk | None = None
        if number + 1 < len(self.pieces(parameter)):
            following = (parameter, number + 1)
        elif parameter in self._next:
            following = (self._next[parameter], 0)
        self._copies.free_sent(keep=1)
        self._prefetch.use((parameter, number), following)
        self._prefetch.on_device.pop((parameter, number), None)  # freed when it has been sent back
        return self._on_device.pop((parameter, number), {})

    def _allocate(self, chunk: Chunk) -> list[Pair]:
        """Give the states of a piece memory on the device; return what is copied there."""
        parameter, number = chunk
        pieces = self.pieces(parameter)
        moves = is_cut if pieces else _is_large
        on_device: dict[str, Tensor] = {}
        pairs = []
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if moves(value):
                host = local_of(value)[pieces[number]] if pieces else local_of(value)
                on_device[key] = torch.empty_like(host, device=self._copies.device)
                pairs.append((on_device[key], host))
        if pairs:
            self._on_device[chunk] = on_device
        return pairs

    def _allocate_on_host(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self._copies.allocate_on_host(shape, like.dtype)


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL
