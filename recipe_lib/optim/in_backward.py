"""When parameters are stepped, and where the optimizer's states are in the meantime.

Of AdamW's memory gradients and states are three times the parameters. A gradient can go as soon as it is there, if its
parameter is stepped at once (as LOMO does, arXiv 2306.09782), and states can wait in host memory, if each parameter's
are fetched for its step (ZeRO-Offload, arXiv 2101.06840, sends gradients to the host instead, and steps there).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.config.schema import MemoryConfig
from recipe_lib.ops.device import has_host
from recipe_lib.optim.clipping import GradNormsInBackward
from recipe_lib.optim.offloaded_states import OffloadedStates
from recipe_lib.optim.optimizers import step_only
from recipe_lib.parallel.parallelize import Parallel


@dataclass(frozen=True)
class OptimizerLevers:
    """What `memory.optimizer_in_backward` and `memory.optimizer_offload` came to.

    norms: of gradients that are gone when `clip_grad_norm` is called; None: none are. place_state: a state's memory
    where it waits, without values; None: next to its parameter.
    """

    norms: GradNormsInBackward | None = None
    place_state: Callable[[Tensor], Tensor] | None = None


def apply_optimizer_levers(
    optimizer: Optimizer, model: nn.Module, parallel: Parallel, memory: MemoryConfig, device: torch.device
) -> OptimizerLevers:
    """Says when the optimizer steps each parameter, and where its states wait; call it once, after `build_optimizer`.

    `memory.optimizer_offload`: states are in pinned host memory, and `optimizer.step()` takes the parameters one after
    the other, each with its states on the device. On a CPU nothing changes.

    `memory.optimizer_in_backward`: a parameter is stepped when backward has made its gradient, which is freed. A
    sharded parameter's is there when FSDP has summed it. Parameters whose gradients are not whole at that moment are
    left for `optimizer.step()` after backward: a tied embedding's come twice, and those that every rank of a
    tensor-parallel group has are summed once a step. There may be one backward a step.
    """
    streamed = parallel.layers
    instead = streamed.stepped if streamed is not None else None
    offloaded = OffloadedStates(optimizer, device, instead) if memory.optimizer_offload and has_host(device) else None
    place = offloaded.placed if offloaded is not None else None
    if not memory.optimizer_in_backward:
        return OptimizerLevers(place_state=place)
    norms = GradNormsInBackward()
    step_one: Callable[[nn.Parameter], Any] = offloaded.step_one if offloaded else lambda one: step_only(optimizer, one)

    def step(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:  # torch calls hooks also where backward has given none
            step_in_place_of(parameter, parameter)

    def step_in_place_of(owner: nn.Parameter, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.device.type != device.type:  # offloaded by FSDP: torch 2.11 does not wait for the copy
            torch.get_device_module(device).current_stream().synchronize()
        norms.add(parameter)
        step_one(owner)
        parameter.grad = None

    if streamed is not None:
        streamed.step_with(step_in_place_of)
    for parameter in _made_at_once(optimizer, model, parallel.tensor_gradients):
        if instead is None or instead(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(step)
    return OptimizerLevers(norms, place)


def _made_at_once(
    optimizer: Optimizer, model: nn.Module, tensor_gradients: Mapping[str, str]
) -> Sequence[nn.Parameter]:
    """The optimizer's parameters whose gradient is whole when backward gives it, once."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if len(names[id(parameter)]) == 1 and tensor_gradients.get(names[id(parameter)][0]) != "partial"
    ]
