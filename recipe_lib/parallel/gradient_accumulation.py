"""Add up the gradients of a step's micro-batches: when FSDP reduces them, in which precision.

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

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.data import Batch
from recipe_lib.errors import ConfigError
from recipe_lib.ops.deferred import DeferredGradients
from recipe_lib.ops.device import get_kernel_type
from recipe_lib.ops.dtensor_shards import get_local, wrap_local
from recipe_lib.ops.host_copies import Copy, wait_on_host
from recipe_lib.parallel.pipeline.schedules import MAKING_GRADIENTS, Action


def reduces_once(parallel: ParallelConfig) -> bool:
    """Return True if FSDP reduces gradients once a step."""
    return parallel.reduce_gradients == "step" and parallel.strategy != "ddp"


def list_collectives_once_a_step(parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the collectives among data ranks that a step has once, whatever its micro-batches."""
    if not reduces_once(parallel):
        return ()
    reductions = ("reduce_scatter", "all_reduce")
    return reductions if parallel.reshard_after_forward else (*reductions, "all_gather")


class GradientAccumulation:
    """The handling of a model's gradients before and after each micro-batch's backward.

    Without a pipeline `begin` comes before each micro-batch and `add` after its backward. A
    pipeline calls `begin` once, `add` after each action that makes gradients, and reduces its
    stages itself. `finish` ends both. `Parallel.micro_batches` calls all of them, and `check` says
    whether a recipe has gone backward for each micro-batch.
    """

    def __init__(
        self, model: nn.Module, parallel: ParallelConfig, device: torch.device | None = None
    ) -> None:
        """Prepare for a model that is sharded by FSDP, or whole on every rank that has it.

        device: that computes gradients which FSDP sends to the host; None where they stay on it,
        and where each is stepped in backward.
        """
        is_sharded = isinstance(model, FSDPModule)
        self.once = is_sharded and reduces_once(parallel)  # FSDP reduces gradients once a step
        # Weights stay gathered from a step's first micro-batch to its last.
        self.keeps_weights = self.once and not parallel.reshard_after_forward
        # The gradients added up so far, in fp32 or on the host.
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._model: Any = model
        # With `once` FSDP sums them itself, in reduce_dtype.
        self._in_fp32 = parallel.accumulate_grad_in_fp32 and not self.once
        self._is_open = False  # a recipe is in its loop over the micro-batches, or has left it
        self._awaits_backward = False  # it has a micro-batch, and has not gone backward yet
        self._is_finished = False
        self._offloaded: OffloadedGradients | None = None
        if is_sharded and device is not None:
            self._offloaded = OffloadedGradients(
                model,
                device=device,
                sums=self.sums,
                add=self._move,
                waits_at_end=parallel.pipeline == 1,
            )

    def take_in_turn(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield a step's micro-batches one after the other, on a rank without a pipeline."""
        for number, batch in enumerate(micro_batches, start=1):
            self.begin(is_last=number == len(micro_batches))
            yield batch
            # Who asks for the next one has gone backward: the gradients are there.
            self.add()

    def lend(self, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each micro-batch to a recipe's loop, and `finish` after the last.

        Raise ConfigError for a loop that does not call `Parallel.backward` once for each of them.
        Without a pipeline it would train on other tokens than it divides by, and with one the
        other ranks would wait for its gradient.
        """
        self._is_open = True
        for batch in micro_batches:
            self._awaits_backward = True
            yield batch
            if self._awaits_backward:
                raise ConfigError(
                    "train_step: found a micro-batch without a backward, expected one call of"
                    " parallel.backward(loss) for each that parallel.micro_batches gives; call it"
                    " at the end of the loop's body"
                )
        self._is_open = False
        self.finish()

    def expect_backward(self) -> None:
        """Raise ConfigError unless a micro-batch is lent that has not gone backward yet."""
        if not self._awaits_backward:
            raise ConfigError(
                "train_step: found a call of parallel.backward without a micro-batch of its own,"
                " expected one for each that parallel.micro_batches gives; call it once, in the"
                " loop's body, with the sum of its losses"
            )
        self._awaits_backward = False

    def begin(self, is_last: bool) -> None:
        """Begin a micro-batch.

        Unless it is the last of the step, gradients stay whole from here on where they are reduced
        once, and so do weights that are kept.
        """
        if self.once:
            self._model.set_requires_gradient_sync(is_last)
        if self.keeps_weights:
            self._model.set_reshard_after_backward(is_last)
        if self._offloaded is not None:
            self._offloaded.begin()

    @torch.no_grad()
    def add(self) -> None:
        """Move the gradients that backward has made to the sums, if these are kept apart."""
        if self._offloaded is not None:
            self._offloaded.wait()
        if not self.once and (self._in_fp32 or self._offloaded is not None):
            self._move(self._model.parameters())

    @torch.no_grad()
    def _move(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = get_local(parameter.grad)
            parameter.grad = None
            if parameter in self.sums:
                self.sums[parameter].add_(gradient)
            else:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                self.sums[parameter] = gradient.to(wide, copy=True) if self._in_fp32 else gradient

    @torch.no_grad()
    def finish(self) -> None:
        """Make the sums the parameters' gradients, rounded once, after the last backward."""
        self._is_finished = True
        while self.sums:
            parameter, total = self.sums.popitem()
            parameter.grad = wrap_local(parameter, total.to(parameter.dtype))

    def check(self) -> None:
        """Raise ConfigError if a recipe has left the loop over its micro-batches before its end.

        Also if it has gone backward by itself, so that nothing of this was done. Called once a
        step.
        """
        if self._is_open:
            raise ConfigError(
                "train_step: found a loop over parallel.micro_batches that was left before its end,"
                " expected one that goes through all of them; leave out the break"
            )
        if not self._is_finished and (self.once or self._in_fp32):
            key = "reduce_gradients" if self.once else "accumulate_grad_in_fp32"
            value = "step" if self.once else "true"
            raise ConfigError(
                f"parallel.{key}: found {value} for a recipe that calls backward itself, expected"
                " one that loops over parallel.micro_batches and calls parallel.backward, which"
                f" know which micro-batch is the last; call them, or remove parallel.{key}"
            )
        self._is_finished = False


def is_kept(unit: FSDPModule) -> bool:
    """Return True if a unit's weights stay gathered from one micro-batch to the next."""
    group = get_param_group(unit)
    return group is not None and not group.reshard_after_backward


# Gradients that FSDP sends to the host (`memory.cpu_offload`): when the host waits for them and
# adds them up.
#
# Where a parameter has a gradient already, FSDP waits for each new one's copy, to memory that is
# not pinned, in order to add the two; and at the end of a step it waits twice. Here gradients go to
# pinned memory in every micro-batch. From the second one on, the host adds up those of a unit when
# the next one's are on their way, so that the device goes on and the host has no more than two
# units' twice; at the end of backward it waits once, for what is left.
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
        """Take over the reductions of the model's units.

        device: that computes gradients. sums: of them so far. add: adds the gradients of parameters
        to the sums. waits_at_end: not FSDP's root but `wait` ends a backward after `begin`.
        """
        self._model: Any = model
        self._device = device
        self._sums = sums
        self._add = add
        self._waits_at_end = waits_at_end
        self._previous: Any = None  # the unit whose gradients are on their way
        groups = [get_param_group(unit) for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._groups = [group for group in groups if group is not None]
        for group in self._groups:
            group.post_backward = self._wrap_reduction(group)

    def begin(self) -> None:
        """Begin a micro-batch."""
        if self._waits_at_end:
            self._model.set_is_last_backward(False)

    def wait(self) -> None:
        """Wait once for all that is on its way."""
        if get_kernel_type(self._device) != "cpu":
            arriving = [copy for group in self._groups for copy in self._take_copies(group)]
            if arriving:
                wait_on_host(arriving, self._device)
        if self._waits_at_end:
            self._model.set_is_last_backward(True)
            end_backward(self._model)
        self._previous = None

    def _wrap_reduction(self, group: Any) -> Callable[..., None]:
        """Return a unit's reduction that also adds up the gradients of the unit before it.

        Those of the unit before have arrived by then; they are added if they have sums.
        """
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            reduce(*unused)
            if all(entry.sharded_param.grad is None for entry in group.fsdp_params):
                return
            previous = self._previous
            self._previous = group
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


def get_param_group(unit: FSDPModule) -> Any:
    """Return what gathers and reduces a unit's parameters together; None where it has none."""
    return unit._get_fsdp_state()._fsdp_param_group


def list_param_entries(unit: FSDPModule) -> list[Any]:
    """Return FSDP's entry for each parameter of a unit, with the `sharded_param`."""
    group = get_param_group(unit)
    return [] if group is None else group.fsdp_params


def reduce_kept_gradients(unit: FSDPModule) -> None:
    """Reduce the gradients that a unit has, or add them to its sums where it is to wait."""
    for entry in list_param_entries(unit):
        # Newer torch has autograd add them up in the reduction's type, and reduces gradients of
        # several types at once.
        if hasattr(entry, "accumulate_unsharded_grad_if_needed"):
            entry.accumulate_unsharded_grad_if_needed()
            if hasattr(entry, "_unsharded_param"):
                entry.to_accumulated_grad_if_needed()
    get_param_group(unit).post_backward()


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
    """The FSDP units of a rank's stages, and when each reduces its gradients.

    Without FSDP there are none. Private parts of torch's FSDP2 are used here: a unit's reduction,
    and what its root does at the end of backward.
    """

    def __init__(self, model: nn.Module, accumulation: GradientAccumulation | None) -> None:
        """Find the units whose linears' weight gradients may be deferred.

        accumulation: says whether units reduce once a step; None: with each micro-batch.
        """
        self._root: Any = model if isinstance(model, FSDPModule) else None
        self._once = accumulation if accumulation is not None and accumulation.once else None
        self.is_last = False  # the action that runs is one of those that `begin` has returned
        self._units = [
            unit
            for unit in _list_units([model])
            if any(
                isinstance(entry._module_info.module, nn.Linear)
                and entry.sharded_param.requires_grad
                for entry in list_param_entries(unit)
            )
        ]

    @contextmanager
    def postpone_reduction(self) -> Iterator[None]:
        """Let units keep what backward makes in the block, to be reduced with what is to come."""
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
        """Compute the gradients, last layer first, and reduce a unit's before the next one's."""
        # By the id of each unsharded parameter, its unit.
        units = {
            id(entry._unsharded_param): unit
            for unit in self._units
            for entry in list_param_entries(unit)
            if hasattr(entry, "_unsharded_param")
        }
        current: FSDPModule | None = None
        later.reverse()
        while later:
            entry = later.pop()
            unit = units.get(id(_find_parameter(entry.weights[0])), current)
            if current is not None and unit is not current:
                reduce_kept_gradients(current)
            current = unit
            entry.run()
        if self._root is not None:
            for unit in self._units:
                reduce_kept_gradients(unit)
            end_backward(self._root)

    def begin(self, actions: Sequence[Action]) -> set[int]:
        """Begin a step's actions; return the places of those in which a stage reduces its sums.

        That is the last one of each stage where gradients are reduced once a step, and no unit
        reduces from here on. Elsewhere there are none.
        """
        if self._once is None:
            return set()
        self._once.begin(is_last=False)
        last_places = {
            action.stage: place
            for place, action in enumerate(actions)
            if action.kind in MAKING_GRADIENTS
        }
        return set(last_places.values())

    def reduce_if_last(self, modules: Sequence[nn.Module]) -> None:
        """Let the units of these modules reduce their sums in what follows, and free their weights.

        Only in the last action of a stage, just before the last backward of the modules.
        """
        # Not sooner: at the end of each backward, also one of the head alone, FSDP reduces what any
        # unit has.
        if self.is_last:
            for unit in _list_units(modules):
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)

    def end(self) -> None:
        """End a step's actions: reduce what is in the root and what several stages share."""
        if self._once is not None:
            self._root.set_requires_gradient_sync(True)
            self._root.set_reshard_after_backward(True)
            end_backward(self._root)


def _list_units(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def _find_parameter(weight: Tensor) -> Any:
    """Return the parameter that a weight is, or is a part of."""
    node = weight.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if node.next_functions else None
    return weight if node is None else node.variable
