"""Runs a model that nobody wrote a tensor-parallel plan for by one that was inferred: the exchanges
that it names.

A plan says at which call of a torch function, in which module's forward, ranks exchange what they
have (`sharding_plan.Boundary`). While a module's forward runs, a torch function mode counts its
calls as the inference did, gives functions this rank's part of parameters (DTensors under FSDP and
before it), and exchanges where the plan says so. What hooks of modules do in between (FSDP gathers
parameters) is not counted. Parameters of which a rank needs some segments whole are assembled
wherever they are used: a forward that trains may do so otherwise than the one that was traced. A
layer that is checkpointed runs forward again in backward, perhaps in another thread: the outermost
forward of a thread enters the mode.

A layer that is compiled is traced alone (`compiled_layers`): its forward is run here once, of
tensors without values.

In a pipeline a rank runs a model of which other ranks have modules (`stage_parts`): what those
would do is not done, and calls outside of layers are counted as ever.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from recipe_lib.errors import SetupError
from recipe_lib.external.compiled_layers import CompiledLayers
from recipe_lib.external.kept_tensors import KeptTensors
from recipe_lib.external.tensor_plan.exchanges import (
    Change,
    Entered,
    Exchanges,
    Rank,
    Ranks,
    divide_attributes,
    get_trained_length,
)
from recipe_lib.external.tensor_plan.sharding_plan import (
    Boundary,
    ParameterPlan,
    ShardingPlan,
    list_tensors,
    make_pattern,
)
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, start_scatter, wait

# What a class calls in the place of another function where it is compiled, with the same arguments.
_SAME_CALL = {"grouped_mm_fallback": "_grouped_mm"}


class _RunningForward:
    """A module's forward that runs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = 0  # that it has made
        self.reached = 0  # boundaries that it came to


class _Running(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        # The forwards that run, the outermost first; None for what hooks do around one.
        self.frames: list[_RunningForward | None] = []
        self.entered: Entered = {}  # see `Exchanges`
        # Rank and length of rows of a layer that is traced by itself.
        self.alone: tuple[Rank, int] | None = None
        self.ran: set[str] = set()  # patterns of the paths of modules, in the forward of a layer
        self.is_partly_off = False  # an adapter


def run_by_plan(
    model: Any, plan: ShardingPlan, ranks: Ranks, head: nn.Module | None, gathers_again: bool = True
) -> None:
    """Make the forward of an external model's class that of one rank, in place; its parameters are
    DTensors by then.

    Called before layers are checkpointed and sharded by FSDP. head: the output projection, whose
    forward stays as it is; None: another rank of a pipeline has it. gathers_again: of what backward
    needs only that is kept which the rest cannot be made of (`kept_tensors`), in layers that are
    not checkpointed. A forward that goes another way than the one that the plan was made of raises
    SetupError.
    """
    execution = _Execution(model, plan=plan, ranks=ranks, gathers_again=gathers_again)
    model.run_class_forward_by(
        execution.frame_all(model.class_forward, head), ranks.size, frozenset(plan.local_outputs)
    )
    model.compile_layer = execution.compiled.compile


def frame_forward(
    model: nn.Module,
    plan: ShardingPlan,
    ranks: Ranks,
    head: nn.Module | None,
    gathers_again: bool = True,
) -> Callable[..., Any]:
    """Return the model's forward as that of one rank; the modules within become so in place. See
    `run_by_plan`.
    """
    return _Execution(model, plan=plan, ranks=ranks, gathers_again=gathers_again).frame_all(
        model.forward, head
    )


class _Execution(TorchFunctionMode):
    """The exchanges of one model."""

    def __init__(
        self, model: nn.Module, plan: ShardingPlan, ranks: Ranks, gathers_again: bool
    ) -> None:
        super().__init__()
        self.gathers_again = gathers_again
        self.model = model
        self.plan = plan
        self.ranks = ranks
        self.running = _Running()
        self.hooked = False
        self.length = 0  # of the rows of the forward that runs
        # By layer and the shape of what it reads: it may run again when the model has read other
        # rows since.
        self.lengths: dict[tuple[str, tuple[int, ...]], int] = {}
        self.kept = KeptTensors()
        self.exchanges = Exchanges(
            plan,
            ranks,
            rank=lambda: (self.running.alone or (ranks.rank,))[0],
            entered=lambda: self.running.entered,
            length=lambda: self.length if self.running.alone is None else self.running.alone[1],
            note=self.kept.note,
        )
        self.compiled = CompiledLayers(
            model,
            plan,
            ranks.rank,
            length=lambda: self.length,
            alone=self.alone,
            outside=self.outside,
            gathers_again=gathers_again,
        )
        # By their module, and the number of a call there.
        self.boundaries: dict[tuple[str, int], list[Boundary]] = {}
        for boundary in plan.boundaries:
            # Parameters are assembled wherever they are used: a forward that trains may do so
            # otherwise than the one that was traced.
            if boundary.kind != "assemble":
                self.boundaries.setdefault((boundary.module, boundary.call), []).append(boundary)
        self.expected = Counter(module for module, _ in self.boundaries)
        self.must_run = {
            layer: {make_pattern(path) for path in self.expected if path.startswith(f"{layer}.")}
            for layer in list_layer_names(model)
        }
        self.assembled = [each for each in plan.parameters if each.whole]
        self.assembled_within: dict[str, list[tuple[nn.Module, str, ParameterPlan]]] = {}

    def frame_all(self, forward: Callable[..., Any], head: nn.Module | None) -> Callable[..., Any]:
        """Return the forward of the model as that of one rank; those of the modules within become
        so in place.
        """
        layers = set(list_layer_names(self.model))
        for path, module in self.model.named_modules():
            self.compiled.originals[path] = module.forward
            if path and module is not head:
                framed = self.frame(
                    module.forward, path, ends_sharing=path in layers, module=module
                )
                module.forward = (
                    self.compiled.make_traceable(framed, path) if path in layers else framed
                )
        # At the first forward, so that they go around FSDP's.
        self.model.register_forward_pre_hook(self.add_hooks, prepend=True)
        return self.frame(forward, "", ends_sharing=False)

    def frame(
        self,
        forward: Callable[..., Any],
        path: str,
        *,
        ends_sharing: bool,
        module: nn.Module | None = None,
    ) -> Callable[..., Any]:
        """Return the forward of the module at `path`, its calls counted. ends_sharing: no later one
        enters its tensors.

        An adapter that is switched off makes the first of the calls alone, those of the frozen
        weight.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            running = self.running
            frame = _RunningForward(path)
            outermost = not running.frames
            self._note_length(
                path,
                first=next(list_tensors((args, kwargs)), None),
                outermost=outermost,
                is_layer=ends_sharing,
            )
            if ends_sharing:
                running.ran = set()
                running.is_partly_off = False
            running.frames.append(frame)
            try:
                with ExitStack() as stack:
                    if outermost:
                        stack.enter_context(
                            divide_attributes(self.model, self.plan, self.ranks.size)
                        )
                        stack.enter_context(self)
                    if not path and self.gathers_again:
                        stack.enter_context(self.kept.around())
                    if ends_sharing and running.alone is None:
                        stack.enter_context(self.kept.layer())
                    result = forward(*args, **kwargs)
                self._check(frame, getattr(module, "is_off", False))
                return result
            finally:
                running.frames.pop()
                if outermost or ends_sharing:
                    running.entered.clear()

        return run

    def _note_length(self, path: str, first: Any, outermost: bool, is_layer: bool) -> None:
        """Note, before a forward whose first tensor is `first`, the length of the rows that it is
        of.
        """
        if self.running.alone is not None:
            return
        if not path:
            self.length = get_trained_length(first, self.plan, self.ranks.size)
        elif is_layer and first is not None and torch.is_grad_enabled():
            key = (path, tuple(first.shape))
            if outermost:
                self.length = self.lengths.get(key, self.length)
            else:
                self.lengths[key] = self.length

    def _check(self, frame: _RunningForward, is_off: bool) -> None:
        """Check, at the end of a forward, that it came to all exchanges."""
        running = self.running
        path = frame.path
        running.is_partly_off |= is_off
        if frame.reached != self.expected[path] and not is_off:
            raise self._make_other_way_error(
                path, f"{frame.reached} of {self.expected[path]} exchanges were reached"
            )
        running.ran.add(make_pattern(path))
        # What a kernel does in the place of a module has none of the module's exchanges.
        missing = self.must_run.get(path, set()) - running.ran
        if missing and not running.is_partly_off:
            raise self._make_other_way_error(min(missing), f"it was not run within {path}")

    @contextmanager
    def alone(self, rank: Tensor, length: int) -> Iterator[None]:
        """Run the forward of one layer inside, of rows of a length, as that of a rank: nothing
        comes from before it.
        """
        running = self.running
        before = vars(running).copy()
        vars(running).update(frames=[], entered={}, ran=set(), alone=(rank, length))
        try:
            yield
        finally:
            vars(running).update(before)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Run a layer inside that does its own exchanges: no call is noted, and no later one enters
        its tensors.
        """
        try:
            with ExitStack() as stack:
                for _ in range(torch._C._len_torch_function_stack()):
                    stack.enter_context(_pop_mode_temporarily())
                yield
        finally:
            self.running.entered.clear()

    def add_hooks(self, model: nn.Module, args: Any) -> None:
        """Put `suspend` and `resume` around every other hook of every module within."""
        if not self.hooked:
            self.hooked = True
            for path, module in model.named_modules():
                if path:
                    module.register_forward_pre_hook(self.suspend, prepend=True)
                    module.register_forward_hook(self.resume, always_call=True)

    def suspend(self, module: nn.Module, args: Any) -> None:
        """Stop counting before a module's other hooks: what they do is none of the forward around
        it.
        """
        if self.running.frames:
            self.running.frames.append(None)

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        """Go on counting after them."""
        if self.running.frames:
            self.running.frames.pop()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        frame = self.running.frames[-1] if self.running.frames else None
        if frame is None:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        name = _SAME_CALL.get(name, name)
        reads = name in ("__get__", "size")
        # What compiled code reads are plain tensors, of which one may have to be assembled.
        compiled = self.running.alone is not None and bool(self.assembled)
        parameters = [
            value
            for value in list_tensors((args, kwargs))
            if compiled or isinstance(value, (DTensor, nn.Parameter))
        ]
        if parameters:
            if self.running.alone is None:
                self.kept.note_parameters([get_local(value) for value in parameters])
            plans = {
                id(value): self._find_assembled_plan(value, frame.path) for value in parameters
            }
            arguments = (args, kwargs)
            args, kwargs = self._take_local(arguments, {} if reads else plans)
            is_assembled = any(plans.values())
            if reads and is_assembled and isinstance(function(*args, **kwargs), Tensor):  # weight.T
                args, kwargs = self._take_local(arguments, plans)
        if reads:
            return function(*args, **kwargs)
        boundaries = self.boundaries.get((frame.path, frame.calls))
        if boundaries is None or name.startswith("_set_"):  # of autograd's state, as tracing sets
            result = function(*args, **kwargs)
            self.kept.note(function, args, kwargs, result)
        else:
            if name != boundaries[0].function:
                raise self._make_other_way_error(
                    frame.path, f"call {frame.calls} is {name}, expected {boundaries[0].function}"
                )
            frame.reached += 1
            result = self.exchanges.call(boundaries, function, args, kwargs)
        if next(list_tensors(result), None) is not None:
            frame.calls += 1
        return result

    def _make_other_way_error(self, path: str, reason: str) -> SetupError:
        compiled = "compile=false or " if self.running.alone is not None else ""
        return SetupError(
            f"{path or 'the model'}: its forward went another way than the one that its"
            f" tensor-parallel plan was made of ({reason}); set {compiled}parallel.tensor=1"
        )

    def _find_assembled_plan(self, parameter: Tensor, path: str) -> ParameterPlan | None:
        """Find how to assemble a parameter that the forward of the module at `path` uses, if it is
        one to be assembled.
        """
        if not self.assembled:
            return None
        if path not in self.assembled_within:
            within: list[tuple[nn.Module, str, ParameterPlan]] = []
            for plan in self.assembled:
                if not path or plan.name.startswith(f"{path}."):
                    owner_path, _, name = plan.name.rpartition(".")
                    within.append((self.model.get_submodule(owner_path), name, plan))
            self.assembled_within[path] = within
        for owner, name, plan in self.assembled_within[path]:
            if owner._parameters.get(name) is parameter:
                return plan
        return None

    def _take_local(self, arguments: Any, plans: dict[int, ParameterPlan | None]) -> Any:
        """Replace parameters among arguments by this rank's part. plans: how to assemble those that
        are to be, by id.
        """

        def take_own(tensor: Tensor) -> Tensor:
            plan = plans.get(id(tensor))
            local = get_local(tensor)
            return local if plan is None else self.exchanges.assemble(local, plan)

        return pytree.tree_map_only(Tensor, take_own, arguments)


def build_ranks(group: Group) -> Ranks:
    """Build `Ranks` of this process among the ranks of a group."""
    return Ranks(
        group.rank,
        group.size,
        total=make_total(group),
        gather=lambda tensor: wait(start_gather(tensor, group)),
        scatter=lambda tensor: wait(start_scatter(tensor, group)),
    )


def make_total(group: Group) -> Change:
    """Return the function that sums a tensor over a group's ranks."""
    return partial(all_reduce, operation="sum", group=group)
