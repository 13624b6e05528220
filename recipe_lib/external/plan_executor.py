"""Runs a model that nobody wrote a tensor-parallel plan for by one that was inferred: the exchanges that it names.

A plan says at which call of a torch function, in which module's forward, ranks exchange what they have
(`sharding_plan.Boundary`). While a module's forward runs, a torch function mode counts its calls as the inference did,
gives functions this rank's part of parameters (DTensors under FSDP and before it), and exchanges where the plan says
so. What hooks of modules do in between (FSDP gathers parameters) is not counted. A layer that is checkpointed runs
forward again in backward, perhaps in another thread: the outermost forward of a thread enters the mode.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from recipe_lib.external.kept_tensors import KeptTensors
from recipe_lib.external.tensor_plan.calls import tensors_in
from recipe_lib.external.tensor_plan.exchanges import Collectives, Entered, Exchanges, Total, rewritten, trained_length
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.models.find_layers import layer_names
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, start_scatter, wait


class _RunningForward:
    """A forward that runs: of which module, how many calls it has made, and at how many boundaries it was."""

    def __init__(self, path: str) -> None:
        self.path, self.calls, self.reached = path, 0, 0


class _Running(threading.local):
    """Of one thread. frames: the forwards that run, None for what happens around one. entered: see `Exchanges`."""

    def __init__(self) -> None:
        self.frames: list[_RunningForward | None] = []
        self.entered: Entered = {}


def run_by_plan(model: Any, plan: ShardingPlan, group: Group, head: nn.Module, gathers_again: bool = True) -> None:
    """Makes the forward of an external model's class that of one rank, in place; its parameters are DTensors by then.

    Called before layers are checkpointed and sharded by FSDP. head: the output projection, whose forward stays as it
    is. gathers_again: of what backward needs only that is kept which the rest cannot be made of (`kept_tensors`), in
    layers that are not checkpointed. A forward that goes another way than the one that the plan was made of raises
    RuntimeError.
    """
    model.run_class_forward_by(framed_forward(model, plan, group, head, model.class_forward, gathers_again))


def framed_forward(
    model: nn.Module,
    plan: ShardingPlan,
    group: Group,
    head: nn.Module,
    forward: Callable[..., Any],
    gathers_again: bool = True,
) -> Callable[..., Any]:
    """`forward`, the model's own, as that of one rank; the modules within become so in place. See `run_by_plan`."""
    execution = _Execution(model, plan, group, gathers_again)
    layers = set(layer_names(model))
    for path, module in model.named_modules():
        if path and module is not head:
            module.forward = execution.framed(module.forward, path, ends_sharing=path in layers, module=module)
    # At the first forward, so that they go around FSDP's.
    model.register_forward_pre_hook(execution.add_hooks, prepend=True)
    return execution.framed(forward, "", ends_sharing=False)


class _Execution(TorchFunctionMode):
    """The exchanges of one model."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, group: Group, gathers_again: bool) -> None:
        super().__init__()
        self.gathers_again = gathers_again
        self.model, self.plan, self.group = model, plan, group
        self.running = _Running()
        self.hooked = False
        self.length = 0  # of the rows of the model's latest forward
        self.exchanges = Exchanges(
            *(plan, group.rank, group.size, collectives_of(group)),
            entered=lambda: self.running.entered,
            length=lambda: self.length,
            note=self._note,
        )
        self.kept = KeptTensors()
        self.boundaries = plan.boundaries_by_call()
        self.expected = Counter(module for module, _ in self.boundaries)

    def framed(
        self, forward: Callable[..., Any], path: str, *, ends_sharing: bool, module: nn.Module | None = None
    ) -> Callable[..., Any]:
        """The forward of the module at `path`, its calls counted. ends_sharing: no later one enters its tensors.

        An adapter that is switched off makes the first of the calls alone, those of the frozen weight.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            running, frame = self.running, _RunningForward(path)
            outermost = not running.frames
            if not path:
                self.length = trained_length(next(tensors_in((args, kwargs)), None), self.plan, self.group.size)
            running.frames.append(frame)
            try:
                with ExitStack() as stack:
                    if outermost:
                        stack.enter_context(rewritten(self.model, self.plan, self.group.size))
                        stack.enter_context(self)
                    if not path and self.gathers_again:
                        stack.enter_context(self.kept.around())
                    if ends_sharing:
                        stack.enter_context(self.kept.layer())
                    result = forward(*args, **kwargs)
                if frame.reached != self.expected[path] and not getattr(module, "is_off", False):
                    raise _other_way(path, f"{frame.reached} of {self.expected[path]} exchanges were reached")
                return result
            finally:
                running.frames.pop()
                if outermost or ends_sharing:
                    running.entered.clear()

        return run

    def _note(self, *call: Any) -> None:
        if self.kept.recording:
            self.kept.note(*call)

    def add_hooks(self, model: nn.Module, args: Any) -> None:
        """Puts `suspend` and `resume` around every other hook of every module within."""
        if not self.hooked:
            self.hooked = True
            for path, module in model.named_modules():
                if path:
                    module.register_forward_pre_hook(self.suspend, prepend=True)
                    module.register_forward_hook(self.resume, always_call=True)

    def suspend(self, module: nn.Module, args: Any) -> None:
        """Before a module's other hooks: what they do is none of the forward around it."""
        if self.running.frames:
            self.running.frames.append(None)

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        """After them."""
        if self.running.frames:
            self.running.frames.pop()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = self.running.frames[-1] if self.running.frames else None
        if frame is None:
            return function(*args, **kwargs)
        held = [value.to_local() for value in tensors_in((args, kwargs)) if isinstance(value, DTensor)]
        if held:
            args, kwargs = _local(args), _local(kwargs)
            self.kept.note_parameters(held)
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "size"):
            return function(*args, **kwargs)
        here = self.boundaries.get((frame.path, frame.calls))
        if here is None:
            result = function(*args, **kwargs)
            self._note(function, args, kwargs, result)
        else:
            if name != here[0].function:
                raise _other_way(frame.path, f"call {frame.calls} is {name}, expected {here[0].function}")
            frame.reached += 1
            result = self.exchanges.call(here, function, args, kwargs)
        if next(tensors_in(result), None) is not None:
            frame.calls += 1
        return result


def collectives_of(group: Group) -> Collectives:
    """What a group's ranks do together."""
    return Collectives(
        total_over(group),
        gather=lambda tensor: wait(start_gather(tensor, group)),
        scatter=lambda tensor: wait(start_scatter(tensor, group)),
    )


def total_over(group: Group) -> Total:
    """The sum of a tensor over a group's ranks."""
    return partial(all_reduce, operation="sum", group=group)


def _local(value: Any) -> Any:
    """Arguments with this rank's part of parameters."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, (tuple, list)) and any(isinstance(each, DTensor) for each in tensors_in(value)):
        return type(value)(_local(each) for each in value)
    if isinstance(value, dict):
        return {key: _local(each) for key, each in value.items()}
    return value


def _other_way(path: str, found: str) -> RuntimeError:
    return RuntimeError(
        f"{path or 'the model'}: its forward went another way than the one that its tensor-parallel plan was made of "
        f"({found}); set parallel.tensor=1"
    )
