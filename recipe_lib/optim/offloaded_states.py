"""Keep optimizer states in pinned host memory, on the device only while a parameter is stepped.

With `memory.optimizer_offload`, `optim.optimizers.apply_optimizer_levers` makes `OffloadedStates`,
which replaces `optimizer.step` by one that steps one parameter after another. The states of three
parameters at most are on the device. (ZeRO-Offload, arXiv 2101.06840, sends gradients to the host
instead, and steps there.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.models.language_model import Entry, replace_entries
from recipe_lib.ops.dtensor_shards import get_detached_local, wrap_local
from recipe_lib.ops.host_copies import HostCopies, Pair, Prefetch
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer

_MIN_BYTES = 1024  # smaller states, such as step counters, stay where the optimizer put them


def step_parameter(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    step: Callable[[], Any] | None = None,
    stand_in: nn.Parameter | None = None,
) -> None:
    """Step one parameter of an optimizer, and leave the others as they are.

    step: the optimizer's original one, if `optimizer.step` has been replaced; None: it has not.
    stand_in: stepped in place of the parameter, with the hyperparameters of its group; None: the
    parameter itself is stepped.
    """
    # torch's optimizers step all parameters of their groups: the others are taken out meanwhile.
    stepped = [parameter if stand_in is None else stand_in]
    entries: list[Entry] = [
        # By identity: `in` would compare the tensors' values.
        (group, "params", stepped if any(member is parameter for member in group["params"]) else [])
        for group in optimizer.param_groups
    ]
    with replace_entries(entries):
        (step or optimizer.step)()


class OffloadedStates:
    """The states of an optimizer, copied to the device for a parameter's step, and back after it.

    They are prefetched during the step of the parameter before, and freed on the device when the
    step after the next one begins. So at any time the states of one parameter are sent back, those
    of one are in use, and those of one arrive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        get_stand_in: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """Replace `optimizer.step` by this object's `step`.

        device: the one that computes. get_stand_in: returns the parameter on the device that is
        stepped in place of one on the host (`memory.stream_layers`), or the parameter itself; None:
        always the parameter itself.
        """
        self._optimizer = optimizer
        self._step = optimizer.step  # the original one
        self._get_stand_in = get_stand_in or (lambda parameter: parameter)
        self._copies = HostCopies(device)
        # Parameter -> its states on the device, by key in `optimizer.state[parameter]`: of the next
        # one or two parameters.
        self._on_device: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._prefetch = Prefetch(self._copies, self._allocate, self._on_device.pop)
        # Parameter -> the one that was stepped after it. Learned in the first step of the
        # optimizer, which therefore prefetches nothing.
        self._next: dict[nn.Parameter, nn.Parameter] = {}
        self._last: nn.Parameter | None = None  # the one stepped last, in this step
        optimizer.step = self.step  # type: ignore[method-assign]

    def allocate_state(self, value: Tensor) -> Tensor:
        """Return memory like a state's, without values, on the host; a small state itself.

        A checkpoint's states are loaded into it.
        """
        return self._allocate_on_host(value) if _is_large(value) else value

    def step(self, closure: None = None) -> None:
        """Step every parameter that has a gradient, and leave no offloaded state on the device.

        closure: not called.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter)
        self._last = None
        self._prefetch.drop_all()  # states of parameters that had no gradient in this step, too

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter) -> None:
        states = self._optimizer.state
        stepped = self._get_stand_in(parameter)
        on_device = self._fetch(parameter)
        hosts = states.get(parameter, {})
        # States that are not offloaded: the step count, and small ones.
        counts = {key: value for key, value in hosts.items() if key not in on_device}
        # torch's fused kernels need the step count on the device; a checkpoint's is on the host.
        if self._optimizer.defaults.get("fused"):
            counts = {
                key: value.to(self._copies.device) if isinstance(value, Tensor) else value
                for key, value in counts.items()
            }
        if hosts:
            moved = {key: wrap_local(hosts[key], value) for key, value in on_device.items()}
            states[stepped] = counts | moved
        if stepped is not parameter and isinstance(self._optimizer, ChunkedOptimizer):
            self._optimizer.add_stand_in(stepped, parameter)
        step_parameter(self._optimizer, parameter=parameter, step=self._step, stand_in=stepped)
        after = states.get(stepped, {})
        if stepped is not parameter:
            states.pop(stepped, None)
        # The first step makes states on the device: they get memory on the host here.
        targets = {
            key: hosts[key] if key in on_device else self._allocate_on_host(value)
            for key, value in after.items()
            if self._is_offloaded(parameter, value)
        }
        if after:
            states[parameter] = after | targets
        pairs = [
            (get_detached_local(target), get_detached_local(after[key]))
            for key, target in targets.items()
        ]
        # The list holds the device's tensors until they are copied.
        self._copies.copy_to_host(pairs, free=pairs.clear)

    def _is_offloaded(self, parameter: nn.Parameter, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        # A stand-in has no memory between steps: all its states wait, whatever their size.
        return _is_large(value) or self._get_stand_in(parameter) is not parameter

    def _fetch(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's states on the device, by key, and begin to copy the next one's."""
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        self._copies.free_sent(keep=1)
        self._prefetch.use(parameter, self._next.get(parameter))
        # Out of the prefetch, which would free them: that happens when they have been sent back.
        self._prefetch.on_device.pop(parameter, None)
        return self._on_device.pop(parameter, {})

    def _allocate(self, parameter: nn.Parameter) -> list[Pair]:
        """Allocate a parameter's states on the device; return (device, host) pairs to be copied."""
        hosts = {
            key: get_detached_local(value)
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if self._is_offloaded(parameter, value)
        }
        if not hosts:
            return []
        on_device = {
            key: torch.empty_like(host, device=self._copies.device) for key, host in hosts.items()
        }
        self._on_device[parameter] = on_device
        return [(on_device[key], host) for key, host in hosts.items()]

    def _allocate_on_host(self, like: Tensor) -> Tensor:
        local = get_detached_local(like)
        return wrap_local(like, self._copies.allocate_on_host(local.shape, local.dtype))


def _is_large(value: Any) -> bool:
    """Return True for a tensor of at least _MIN_BYTES; of a DTensor the full tensor counts."""
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _MIN_BYTES
