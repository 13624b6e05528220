"""Offloaded optimizer states: in pinned host memory, on the device for their parameter's step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.ops.dtensor_shards import local_of, with_local
from recipe_lib.ops.host_copies import HostCopies, Pair, Prefetch
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer
from recipe_lib.optim.optimizers import step_only

_SMALL = 1024  # bytes: step counters and the like stay where the optimizer put them


class OffloadedStates:
    """Takes over `optimizer.step`: the states of a parameter come before its step, during the step
    of the one before, and go back after it.

    What has been sent back is freed when the step after the next begins, so that the states of
    three parameters are on the device at most: one leaving, one stepped, one arriving. In the first
    step, in which states are made, nothing arrives; and which parameter follows which is known from
    the second one on. What has run on a GPU: docs/measurements/on_a_gpu.md.
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
        self._optimizer = optimizer
        self._step = optimizer.step
        self._instead = instead or (lambda parameter: parameter)
        self._copies = HostCopies(device)
        self._on_device: dict[nn.Parameter, dict[str, Tensor]] = {}  # states for the steps that come next
        self._prefetch = Prefetch(self._copies, self._allocate, self._on_device.pop)
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # whose step came after whose
        self._last: nn.Parameter | None = None
        optimizer.step = self.step  # type: ignore[method-assign]

    def placed(self, value: Tensor) -> Tensor:
        """A state's memory where it waits, without values: of one that is being read from a checkpoint."""
        return self._allocate_on_host(value) if _is_large(value) else value

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
        """Step one parameter, whose states change places with those on the device for as long as that takes."""
        stepped, states = self._instead(parameter), self._optimizer.state
        on_device = self._take(parameter)
        hosts = states.get(parameter, {})
        moved = {key: with_local(hosts[key], value) for key, value in on_device.items()}
        counts = {key: self._count_to_device(value) for key, value in hosts.items() if key not in on_device}
        if hosts:
            states[stepped] = counts | moved
        if stepped is not parameter and isinstance(self._optimizer, ChunkedOptimizer):
            self._optimizer.add_stand_in(stepped, parameter)
        step_only(self._optimizer, parameter, self._step, stepped)
        after = states.get(stepped, {})
        if stepped is not parameter:
            states.pop(stepped, None)
        places = {
            key: hosts[key] if key in on_device else self._allocate_on_host(value)
            for key, value in after.items()
            if self._waits(parameter, value)
        }
        if after:
            states[parameter] = after | places
        pairs = [(local_of(place), local_of(after[key])) for key, place in places.items()]
        self._copies.copy_to_host(pairs, free=pairs.clear)

    def _waits(self, parameter: nn.Parameter, value: Any) -> bool:
        """Return whether a state is on the host between steps; for a stand-in, whatever has its shape."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return _is_large(value) or self._instead(parameter) is not parameter

    def _count_to_device(self, value: Any) -> Any:
        """Return a state that stays; fused kernels want a count on the device, where a state that was read has none."""
        moves = isinstance(value, Tensor) and self._optimizer.defaults.get("fused")
        return value.to(self._copies.device) if moves else value

    def _take(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's states on the device; those of the next one are on their way then."""
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        self._copies.free_sent(keep=1)
        self._prefetch.use(parameter, self._next.get(parameter))
        self._prefetch.on_device.pop(parameter, None)  # freed when it has been sent back
        return self._on_device.pop(parameter, {})

    def _allocate(self, parameter: nn.Parameter) -> list[Pair]:
        """Give the states of a parameter memory on the device; return what is copied there."""
        states = self._optimizer.state.get(parameter, {})
        hosts = {key: local_of(value) for key, value in states.items() if self._waits(parameter, value)}
        if not hosts:
            return []
        on_device = {key: torch.empty_like(host, device=self._copies.device) for key, host in hosts.items()}
        self._on_device[parameter] = on_device
        return [(on_device[key], host) for key, host in hosts.items()]

    def _allocate_on_host(self, like: Tensor) -> Tensor:
        local = local_of(like)
        return with_local(like, self._copies.allocate_on_host(local.shape, local.dtype))


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL
