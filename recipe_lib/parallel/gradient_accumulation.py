"""How the gradients of a step's micro-batches are added up: when FSDP reduces them, and in which
precision.

FSDP2 reduces a unit's gradients in each backward, so that a rank never has more than one unit's
whole: the least memory, and one reduction and two gathers of every unit for each micro-batch.
`parallel.reduce_gradients: step` keeps the sums of the micro-batches whole on a rank, and reduces
them with the last one. With `parallel.reshard_after_forward: false` beside it weights stay gathered
meanwhile too, from the first micro-batch's forward to the last one's backward: weights and
gradients whole, states sharded, which is ZeRO-1 (arXiv 1910.02054) and Megatron's distributed
optimizer.

Gradients that are sent to the host are added up there (`offloaded_gradients`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.ops.deferred import DeferredGradients
from recipe_lib.ops.device import get_kernel_type
from recipe_lib.ops.dtensor_shards import wrap_local
from recipe_lib.ops.host_copies import Copy, wait_on_host
from recipe_lib.parallel.pipeline.schedules import MAKING_GRADIENTS, Action


def reduces_once(parallel: ParallelConfig) -> bool:
    """Whether FSDP reduces gradients once a step."""
    return parallel.reduce_gradients == "step" and parallel.strategy != "ddp"


def once_a_step(parallel: ParallelConfig) -> tuple[str, ...]:
    """The collectives among data ranks that a step has once, however many micro-batches it has."""
    if not reduces_once(parallel):
        return ()
    return (
        "reduce_scatter",
        "all_reduce",
        *(() if parallel.reshard_after_forward else ("all_gather",)),
    )


class GradientAccumulation:
    """What happens to a model's gradients before and after the backward of each micro-batch of a
    step.

    Without a pipeline `begin` comes before each micro-batch and `add` after its backward. A
    pipeline calls `begin` once, `add` after each action that makes gradients, and reduces its
    stages itself. `finish` ends both.

    once: FSDP reduces gradients once a step. keeps_weights: they stay gathered as long. sums: so
    far, in fp32 or on the host.
    """

    def __init__(
        self, model: nn.Module, parallel: ParallelConfig, device: torch.device | None = None
    ) -> None:
        """model: sharded by FSDP, or whole on every rank that has it. device: that computes
        gradients which FSDP sends to the host; None where they stay on it, and where each is
        stepped in backward.
        """
        sharded = isinstance(model, FSDPModule)
        self.once = sharded and reduces_once(parallel)
        self.keeps_weights = self.once and not parallel.reshard_after_forward
        self._model: Any = model
        self._in_fp32 = (
            parallel.accumulate_grad_in_fp32 and not self.once
        )  # else FSDP sums them, in reduce_dtype
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._done = False
        self._offloaded: OffloadedGradients | None = None
        if sharded and device is not None:
            waits_at_end = parallel.pipeline == 1
            self._offloaded = OffloadedGradients(
                model, device, self.sums, self._move, waits_at_end=waits_at_end
            )

    def begin(self, is_last: bool) -> None:
        """A micro-batch begins. Unless it is the last of the step, gradients stay whole from here
        on where they are reduced once, and so do weights that are kept.
        """
        if self.once:
            self._model.set_requires_gradient_sync(is_last)
        if self.keeps_weights:
            self._model.set_reshard_after_backward(is_last)
        if self._offloaded is not None:
            self._offloaded.begin()

    @torch.no_grad()
    def add(self) -> None:
        """Gradients that backward has made are moved to the sums, if there are sums in fp32 or on
        the host.
        """
        if self._offloaded is not None:
            self._offloaded.wait()
        if not self.once and (self._in_fp32 or self._offloaded is not None):
            self._move(self._model.parameters())

    def send(self, numbers: Tensor) -> Tensor:
        """Numbers of the device for the log, on their way to the host if gradients are: the next
        `add` waits for both. As they are if not.
        """
        return numbers if self._offloaded is None else self._offloaded.send(numbers)

    @torch.no_grad()
    def _move(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = (
                parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            )
            parameter.grad = None
            if parameter in self.sums:
                self.sums[parameter].add_(gradient)
            else:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self.sums[parameter] = gradient.to(wide, copy=True) if self._in_fp32 else gradient

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward: sums become the parameters' gradients, rounded once to their
        type.
        """
        self._done = True
        while self.sums:
            parameter, total = self.sums.popitem()
            parameter.grad = wrap_local(parameter, total.to(parameter.dtype))

    def check(self) -> None:
        """ConfigError if a recipe has gone backward by itself, so that nothing of this was done;
        once a step.
        """
        if not self._done and (self.once or self._in_fp32):
            key = "reduce_gradients" if self.once else "accumulate_grad_in_fp32"
            found = "step" if self.once else "true"
            raise ConfigError(
                f"parallel.{key}: found {found} for a recipe that calls backward itself, expected"
                " one that calls training.sum_gradients or training.backward_each, which say which"
                f" micro-batch is the last; call one of them, or remove parallel.{key}"
            )
        self._done = False


def is_kept(unit: FSDPModule) -> bool:
    """Whether a unit's weights stay gathered from one micro-batch to the next."""
    group = group_of(unit)
    return group is not None and not group.reshard_after_backward


# Gradients that FSDP sends to the host (`memory.cpu_offload`): when the host waits for them and
# adds them up.
#
# Where a parameter has a gradient already, FSDP waits for each new one's copy, to memory that is
# not pinned, in order to add the two; and at the end of a step it waits twice. Here gradients go to
# pinned memory in every micro-batch. From the second one on, the host adds up those of a unit when
# the next one's are on their way, so that the device goes on and the host has no more than two
# units' twice; at the end of backward it waits once, for what is left and for the numbers that are
# logged.
#
# Private parts of torch's FSDP2 are used here: a unit's reduction (`post_backward`), the events of
# its copies, and what its root does at the end of backward.


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
        """device: that computes them. sums: so far. add: adds gradients of parameters to them.
        waits_at_end: not FSDP's root but `wait` ends a backward, between `begin` and itself.
        """
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
        if get_kernel_type(self._device) != "cpu":
            arriving = [copy for group in self._groups for copy in self._take_copies(group)]
            if arriving or self._sends_numbers:
                wait_on_host(arriving, self._device)
        self._sends_numbers = False
        if self._waits_at_end:
            self._model.set_is_last_backward(True)
            end_backward(self._model)
        self._previous = None

    def _following(self, group: Any) -> Callable[..., None]:
        """A unit's reduction, after which the gradients of the unit before it are added up, if they
        have sums.
        """
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


# Private parts of torch's FSDP2, which a unit has no public way to.


def group_of(unit: FSDPModule) -> Any:
    """What gathers and reduces a unit's parameters together; None where it has none."""
    return unit._get_fsdp_state()._fsdp_param_group


def entries_of(unit: FSDPModule) -> list[Any]:
    """FSDP's entry for each parameter of a unit, with the `sharded_param`."""
    group = group_of(unit)
    return [] if group is None else group.fsdp_params


def reduce_kept_gradients(unit: FSDPModule) -> None:
    """Reduce the gradients that a unit has, or add them to its sums where it is to wait."""
    for entry in entries_of(unit):
        # Newer torch has autograd add them up in the reduction's type, and reduces gradients of
        # several types at once.
        if hasattr(entry, "accumulate_unsharded_grad_if_needed"):
            entry.accumulate_unsharded_grad_if_needed()
            if hasattr(entry, "_unsharded_param"):
                entry.to_accumulated_grad_if_needed()
    group_of(unit).post_backward()


def end_backward(root: FSDPModule) -> None:
    """Do what FSDP's root does at the end of backward, after a backward that has ended before."""
    state = root._get_fsdp_state()
    context = state._state_ctx
    # Newer torch notes when backward begins whether its caller ends it, and forgets that at the
    # end.
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    state._root_post_backward_final_callback()


# When FSDP reduces the gradients of a pipeline's stages.
#
# Deferred weight gradients are made after backward, and reduced after it too, unit by unit.
# Gradients that are reduced once a step (`parallel.reduce_gradients`) are with the last action of
# their stage.


class DeferredReduction:
    """The FSDP units of a rank's stages, and those of them whose weights' gradients are deferred;
    without FSDP none.

    is_last: whether the action that runs is one of those that `begin` has returned.

    Private parts of torch's FSDP2 are used here: a unit's reduction, and what its root does at the
    end of backward.
    """

    def __init__(self, model: nn.Module, accumulation: GradientAccumulation | None) -> None:
        """model: sharded, or not. accumulation: whether units reduce once a step; None: with each
        micro-batch.
        """
        self._root: Any = model if isinstance(model, FSDPModule) else None
        self._once = accumulation if accumulation is not None and accumulation.once else None
        self.is_last = False
        units = _units_in([model])
        self._units = []
        for unit in units:
            linears = [
                one for one in entries_of(unit) if isinstance(one._module_info.module, nn.Linear)
            ]
            if any(one.sharded_param.requires_grad for one in linears):
                self._units.append(unit)

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        """Inside, these units keep the gradients that backward makes whole, to be reduced with
        those to come.
        """
        if self._once is not None:  # they do anyway
            yield
            return
        for unit in self._units:
            unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for unit in self._units:
                unit.set_requires_gradient_sync(True, recurse=False)

    def add(self, later: list[DeferredGradients]) -> None:
        """Computes the gradients, last layer first, and reduces those of a unit before the next
        one's are made.
        """
        units = self._places() if self._root is not None else {}
        current: FSDPModule | None = None
        later.reverse()
        while later:
            entry = later.pop()
            unit = units.get(id(_parameter_of(entry.weights[0])), current)
            if current is not None and unit is not current:
                reduce_kept_gradients(current)
            current = unit
            entry.run()
        if self._root is not None:
            for unit in self._units:
                reduce_kept_gradients(unit)
            end_backward(self._root)

    def begin(self, actions: Sequence[Action]) -> set[int]:
        """Before a step's actions. Where gradients are reduced once a step none is from here on,
        and the places of the actions that do are returned: of each stage the last one.
        """
        if self._once is None:
            return set()
        self._once.begin(is_last=False)
        return set(
            {
                one.stage: at for at, one in enumerate(actions) if one.kind in MAKING_GRADIENTS
            }.values()
        )

    def reduce_if_last(self, modules: Sequence[nn.Module]) -> None:
        """In an action that is the last of its stage: what follows is the last backward of these
        modules, whose units reduce their sums in it, and free their weights.

        Not sooner: at the end of each backward, also one of the head alone, FSDP reduces what any
        unit has.
        """
        if self.is_last:
            for unit in _units_in(modules):
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)

    def end(self) -> None:
        """After a step's actions: reduces what no stage has, what is in the root and what several
        stages share.
        """
        if self._once is not None:
            self._root.set_requires_gradient_sync(True)
            self._root.set_reshard_after_backward(True)
            end_backward(self._root)

    def _places(self) -> dict[int, FSDPModule]:
        """The unit of each whole parameter, by its id."""
        entries = [(unit, entry) for unit in self._units for entry in entries_of(unit)]
        return {
            id(entry._unsharded_param): unit
            for unit, entry in entries
            if hasattr(entry, "_unsharded_param")
        }


def _units_in(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def _parameter_of(weight: Tensor) -> Any:
    """The parameter that a weight is, or is a part of."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if node.next_functions else None
    return weight if node is None else node.variable
