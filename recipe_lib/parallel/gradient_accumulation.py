"""Add up the gradients of a step's micro-batches: when FSDP reduces them, in which precision.

`parallelize` makes a `GradientAccumulation`, which `Parallel.micro_batches` runs; a pipeline's
driver makes a `DeferredReduction` for each step. A unit is the modules whose parameters FSDP
gathers and reduces together; the root is the unit of the model itself. An action is what a stage
of a pipeline does with one micro-batch, such as its forward.
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

# FSDP2 reduces a unit's gradients in each backward, so that a rank never has the whole gradients of
# more than one unit: the least memory, and one reduction and two gathers of every unit for each
# micro-batch. `parallel.reduce_gradients: step` keeps the sums of the micro-batches whole on a
# rank, and reduces them in the last one's backward. With `parallel.reshard_after_forward: false`
# weights stay gathered too, from the first micro-batch's forward to the last one's backward.
# Weights and gradients whole and states sharded is ZeRO-1 (arXiv 1910.02054), or Megatron's
# distributed optimizer.


def reduces_once(parallel: ParallelConfig) -> bool:
    """Return True if FSDP reduces gradients once a step."""
    return parallel.reduce_gradients == "step" and parallel.strategy != "ddp"


def list_collectives_once_a_step(parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the names of the FSDP collectives that run once a step, not in each micro-batch."""
    if not reduces_once(parallel):
        return ()
    reductions = ("reduce_scatter", "all_reduce")
    return reductions if parallel.reshard_after_forward else (*reductions, "all_gather")


class GradientAccumulation:
    """Adds up a step's gradients from one micro-batch's backward to the next.

    Without a pipeline `begin` is called before each micro-batch and `add` after its backward. A
    pipeline calls `begin` once in a step, `add` after each action that makes gradients, and reduces
    the gradients of its stages itself (`DeferredReduction`). `finish` ends a step in both. All are
    called within `Parallel.micro_batches`; `all_reduce_gradients` calls `check` after it.
    """

    def __init__(
        self, model: nn.Module, parallel: ParallelConfig, device: torch.device | None = None
    ) -> None:
        """Prepare for a model that is sharded by FSDP, or left whole.

        device: the device that computes, if gradients are added up on the host, to which FSDP sends
        them. None if they stay on the device, or if the optimizer steps each one in backward.
        """
        is_sharded = isinstance(model, FSDPModule)
        self.once = is_sharded and reduces_once(parallel)  # FSDP reduces gradients once a step
        # Weights stay gathered from a step's first micro-batch to its last.
        self.keeps_weights = self.once and not parallel.reshard_after_forward
        # By parameter, this rank's part of the gradients added up so far, in fp32 or on the host.
        # Empty if they are added up in `grad`, or by FSDP.
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._model: Any = model  # Any: FSDP's methods, called if it is sharded
        # With `once` FSDP adds up the micro-batches itself, in reduce_dtype.
        self._in_fp32 = parallel.accumulate_grad_in_fp32 and not self.once
        # A recipe's loop over the micro-batches has begun, and not come to its end.
        self._is_open = False
        self._awaits_backward = False  # the loop has a micro-batch, and has not gone backward yet
        self._is_finished = False  # `finish` was called since the last `check`
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
        """Yield a step's micro-batches in order, with `begin` and `add`; without a pipeline."""
        for index, batch in enumerate(micro_batches):
            self.begin(is_last=index == len(micro_batches) - 1)
            yield batch
            # The caller asks for the next one after its backward, so the gradients are there.
            self.add()

    def lend(self, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each micro-batch to a recipe's loop, and `finish` after the last.

        Raise ConfigError for a loop that does not call `Parallel.backward` for each micro-batch.
        """
        # Without a pipeline such a loop would train on fewer tokens than it divides by. In a
        # pipeline the other ranks would wait for the micro-batch's gradient for ever.
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
        """Note that a backward begins.

        Raise ConfigError outside of the loop, and for a second backward of one micro-batch.
        """
        if not self._awaits_backward:
            raise ConfigError(
                "train_step: found a call of parallel.backward without a micro-batch of its own,"
                " expected one for each that parallel.micro_batches gives; call it once, in the"
                " loop's body, with the sum of its losses"
            )
        self._awaits_backward = False

    def begin(self, is_last: bool) -> None:
        """Begin a micro-batch: set if its backward reduces gradients and frees weights.

        With `once`, gradients are reduced in the last micro-batch of the step only; with
        `keeps_weights`, weights are freed in that one only.
        """
        if self.once:
            self._model.set_requires_gradient_sync(is_last)
        if self.keeps_weights:
            self._model.set_reshard_after_backward(is_last)
        if self._offloaded is not None:
            self._offloaded.begin()

    @torch.no_grad()
    def add(self) -> None:
        """Move the gradients that backward has made to `sums`, if they are added up there."""
        if self._offloaded is not None:
            self._offloaded.wait()
        if not self.once and (self._in_fp32 or self._offloaded is not None):
            self._move(self._model.parameters())

    @torch.no_grad()
    def _move(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move the gradients of parameters to `sums`, in fp32 or wider if asked for."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = get_local(parameter.grad)
            parameter.grad = None
            if parameter in self.sums:
                self.sums[parameter].add_(gradient)
            else:
                sum_dtype = torch.promote_types(gradient.dtype, torch.float32)
                self.sums[parameter] = (
                    gradient.to(sum_dtype, copy=True) if self._in_fp32 else gradient
                )

    @torch.no_grad()
    def finish(self) -> None:
        """End a step: make the sums the parameters' gradients, rounded once to their dtype."""
        self._is_finished = True
        while self.sums:  # one by one, so that each sum is freed as soon as it is rounded
            parameter, total = self.sums.popitem()
            parameter.grad = wrap_local(parameter, total.to(parameter.dtype))

    def check(self) -> None:
        """Raise ConfigError if a recipe has left the loop over its micro-batches before its end.

        Also raise it for a recipe that calls `loss.backward()` itself, if the config asks for one
        reduction a step or for sums in fp32, which only the loop makes. Called once a step.
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
    """Return True if a unit's weights stay gathered after the current micro-batch."""
    group = get_param_group(unit)
    return group is not None and not group.reshard_after_backward


# When the host waits for gradients that FSDP sends to it (`memory.cpu_offload`), and adds them up.
#
# FSDP by itself copies each gradient of a parameter that has one already to memory that is not
# pinned, and waits for the copy in order to add the two; and at the end of a step it waits twice.
# Here gradients go to pinned memory in every micro-batch. From the second micro-batch on, the host
# adds up the gradients of a unit while those of the next unit are being copied. So the device goes
# on, and the host holds two gradients (sum and new one) for two units at most. At the end of
# backward the host waits once for the rest.
#
# FSDP2 has no public way to this, so private parts of it are used: a unit's reduction
# (`post_backward`), the events of its copies, and what its root does at the end of backward.


class OffloadedGradients:
    """Waits for the copies of gradients to the host, unit by unit or all that are pending."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sums: Mapping[nn.Parameter, Tensor],
        add: Callable[[Iterable[nn.Parameter]], None],
        *,
        waits_at_end: bool,
    ) -> None:
        """Wrap the reductions of a sharded model's units.

        device: the one that computes gradients. sums: the gradients added up so far, by parameter.
        add: adds the gradients of parameters to `sums`. waits_at_end: True if `wait` is to end each
        backward in place of FSDP's root, as without a pipeline.
        """
        self._model: Any = model
        self._device = device
        self._sums = sums
        self._add = add
        self._waits_at_end = waits_at_end
        # FSDP's parameter group of the unit reduced last, whose copies may be pending.
        self._previous: Any = None
        groups = map(get_param_group, list_fsdp_modules(model))
        self._groups = [group for group in groups if group is not None]
        for group in self._groups:
            group.post_backward = self._wrap_reduction(group)

    def begin(self) -> None:
        """Begin a micro-batch, called before its forward."""
        if self._waits_at_end:
            # Not the last one for FSDP, so that its root does not wait at the end of backward.
            self._model.set_is_last_backward(False)

    def wait(self) -> None:
        """Wait once for all pending copies, after a micro-batch's backward."""
        if get_kernel_type(self._device) != "cpu":  # on a CPU nothing is copied
            pending_copies = [copy for group in self._groups for copy in self._take_copies(group)]
            if pending_copies:
                wait_on_host(pending_copies, self._device)
        if self._waits_at_end:
            self._model.set_is_last_backward(True)
            end_backward(self._model)
        self._previous = None

    def _wrap_reduction(self, group: Any) -> Callable[..., None]:
        """Return a unit's reduction, extended to add up the gradients of the unit reduced before.

        They are added from the second micro-batch on, when their parameters have sums. The host
        waits for their copies, which are done or nearly so by then. group: FSDP's parameter group
        of the unit.
        """
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            reduce(*unused)
            if all(entry.sharded_param.grad is None for entry in group.fsdp_params):
                return  # it has reduced nothing
            previous_group = self._previous
            self._previous = group
            if previous_group is None or previous_group is group:
                return
            parameters = [entry.sharded_param for entry in previous_group.fsdp_params]
            if any(parameter in self._sums for parameter in parameters):
                # Wait for the last copy only: all are on one stream.
                for copy in self._take_copies(previous_group)[-1:]:
                    copy.wait_on_host()
                self._add(parameters)

        return post_backward

    def _take_copies(self, group: Any) -> list[Copy]:
        """Return a unit's pending copies, and clear their events, so that FSDP does not wait.

        group: FSDP's parameter group of the unit.
        """
        copies = []
        for entry in group.fsdp_params:
            if entry.grad_offload_event is not None:
                device_module = torch.get_device_module(self._device)
                copies.append(Copy(entry.grad_offload_event, device_module))
                entry.grad_offload_event = None
        return copies


# Functions that use private parts of FSDP2, where a unit has no public methods.


def get_param_group(unit: FSDPModule) -> Any:
    """Return FSDP's parameter group of a unit, which gathers and reduces its parameters together.

    Return None for a unit without parameters.
    """
    return unit._get_fsdp_state()._fsdp_param_group


def list_param_entries(unit: FSDPModule) -> list[Any]:
    """Return the `FSDPParam` of each parameter of a unit.

    Its `sharded_param` is the model's parameter, its `_unsharded_param` the gathered one, which
    exists from the first gather on.
    """
    group = get_param_group(unit)
    return [] if group is None else group.fsdp_params


def reduce_kept_gradients(unit: FSDPModule) -> None:
    """Reduce the unsharded gradients that a unit has kept; if its gradient sync is off, keep them.

    With the sync off they are added to the unit's unsharded sums.
    """
    for entry in list_param_entries(unit):
        # Newer torch lets autograd add them up in the dtype of the reduction, and can reduce
        # gradients of several dtypes at once.
        if hasattr(entry, "accumulate_unsharded_grad_if_needed"):
            entry.accumulate_unsharded_grad_if_needed()
            if hasattr(entry, "_unsharded_param"):
                entry.to_accumulated_grad_if_needed()
    get_param_group(unit).post_backward()


def end_backward(root: FSDPModule) -> None:
    """End a backward as FSDP's root does, some time later: reduce what is left, wait for all."""
    state = root._get_fsdp_state()
    context = state._state_ctx
    # Newer torch notes when backward begins whether its caller ends it, and forgets that at the
    # end.
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    state._root_post_backward_final_callback()


# When FSDP reduces the gradients of a pipeline's stages.
#
# Zero-bubble schedules defer weight gradients: they compute them some time after the gradient of
# the input, and reduce them then, unit by unit. With `parallel.reduce_gradients: step` the
# gradients of a stage are reduced in the last of its actions that makes gradients.


class DeferredReduction:
    """Decides when each FSDP unit of a rank's stages reduces its gradients in one step.

    Without FSDP it has no units, and only computes the deferred gradients. `Pipeline` makes one for
    each training step.
    """

    def __init__(self, model: nn.Module, accumulation: GradientAccumulation | None) -> None:
        """Find the units whose linears' weight gradients may be deferred.

        accumulation: units reduce once a step if its `once` is True; None: in each micro-batch.
        """
        self._root: Any = model if isinstance(model, FSDPModule) else None
        # The accumulation of a model whose units reduce once a step, else None.
        self._once = accumulation if accumulation is not None and accumulation.once else None
        # The current action is one of those that `begin` has returned. Set by the driver.
        self.is_last = False
        # The units with a linear that is trained.
        self._units = [
            unit
            for unit in list_fsdp_modules(model)
            if any(
                isinstance(entry._module_info.module, nn.Linear)
                and entry.sharded_param.requires_grad
                for entry in list_param_entries(unit)
            )
        ]

    @contextmanager
    def postpone_reduction(self) -> Iterator[None]:
        """Let units keep the block's gradients unsharded, until `add` reduces them."""
        units = self._units if self._once is None else []  # else they do so through the whole step
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)

    def add(self, deferred: list[DeferredGradients]) -> None:
        """Compute deferred weight gradients; reduce a unit's before the next unit's are computed.

        deferred: those of one stage and micro-batch in the order of backward, the last layer's
        first; emptied here.
        """
        unit_by_parameter = {  # by the id of the unsharded parameter
            id(entry._unsharded_param): unit
            for unit in self._units
            for entry in list_param_entries(unit)
            if hasattr(entry, "_unsharded_param")
        }
        current_unit: FSDPModule | None = None
        deferred.reverse()
        while deferred:  # popped, so that the tensors of an entry are freed after it has run
            entry = deferred.pop()
            unit = unit_by_parameter.get(id(_find_parameter(entry.weights[0])), current_unit)
            if current_unit is not None and unit is not current_unit:
                reduce_kept_gradients(current_unit)
            current_unit = unit
            entry.run()
        if self._root is not None:
            # The last one, and those of which nothing was deferred.
            for unit in self._units:
                reduce_kept_gradients(unit)
            end_backward(self._root)

    def begin(self, actions: Sequence[Action]) -> set[int]:
        """Begin a step's actions; return the indices of those in which a stage reduces its sums.

        If gradients are reduced once a step, these are the last action of each stage that makes
        gradients, and until then no unit reduces. Otherwise the set is empty.
        """
        if self._once is None:
            return set()
        self._once.begin(is_last=False)
        last_indices = {
            action.stage: index
            for index, action in enumerate(actions)
            if action.kind in MAKING_GRADIENTS
        }
        return set(last_indices.values())

    def reduce_if_last(self, modules: Sequence[nn.Module]) -> None:
        """Let the units of these modules reduce, and free their weights, in the next backward.

        Nothing is done unless `is_last`. Called just before the last backward of the modules.
        """
        # Not sooner: at the end of each backward, also one of the head alone, FSDP reduces the
        # gradients of every unit that has some.
        if self.is_last:
            for unit in list_fsdp_modules(*modules):
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)

    def end(self) -> None:
        """End a step's actions: reduce the gradients of the root and of units that stages share.

        Only if gradients are reduced once a step.
        """
        if self._once is not None:
            self._root.set_requires_gradient_sync(True)
            self._root.set_reshard_after_backward(True)
            end_backward(self._root)


def list_fsdp_modules(*modules: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP gathers by themselves, among these and all within them."""
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def _find_parameter(weight: Tensor) -> Any:
    """Return the parameter that a weight is, or is a view of."""
    node = weight.grad_fn  # of a view; the node of its parameter has the parameter as `variable`
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if node.next_functions else None
    return weight if node is None else node.variable
