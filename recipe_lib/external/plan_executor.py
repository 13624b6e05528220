"""Run a model's own forward as one tensor-parallel rank, with the exchanges of an inferred plan.

`tensor_parallel.shard_module` calls `run_by_plan` for an external model that is trained,
`apply_plan` and `proven_plan` call `build_rank_forward` for any module. A plan names an exchange
(a boundary) by a module's path and the index of a torch function call in that module's forward. So
a torch function mode counts calls, as the inference did. A compiled layer runs here once, when it
is traced (`compiled_layers`). In a pipeline the modules of other ranks are left out.
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
from recipe_lib.external.tensor_plan.exchanges import (
    Entered,
    Exchanges,
    Rank,
    Ranks,
    TensorFunction,
    divide_attributes,
    get_trained_length,
)
from recipe_lib.external.tensor_plan.sharding_plan import (
    READS,
    Boundary,
    ParameterPlan,
    RunningForward,
    ShardingPlan,
    make_pattern,
)
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, start_scatter, wait
from recipe_lib.ops.kept_tensors import KeptTensors, list_tensors, note_call

# Function -> the one whose place it takes, with the same arguments: transformers' experts call the
# first one where they are compiled. Both count as the second, so that one plan is for both.
_SAME_CALL = {"grouped_mm_fallback": "_grouped_mm"}


class _Running(threading.local):
    """The state of the forwards that run in one thread.

    By thread: a checkpointed layer may run again in autograd's own thread.
    """

    def __init__(self) -> None:
        # The running forwards, the outermost first. None on top: a module's hooks run, whose calls
        # are not counted.
        self.frames: list[RunningForward | None] = []
        # Results of exchanges, such as gathered tokens, that later calls of the layer share.
        self.entered: Entered = {}
        # While one layer is traced for the compiler: (rank, tokens in a row). Else None.
        self.isolated_layer: tuple[Rank, int] | None = None
        # Paths, with `*` for numbers, of the modules that have run in the layer that runs.
        self.ran: set[str] = set()
        # A module of the layer that runs has its adapter switched off, and makes fewer calls.
        self.is_partly_off = False


def run_by_plan(
    model: Any, plan: ShardingPlan, ranks: Ranks, head: nn.Module | None, gathers_again: bool = True
) -> None:
    """Make an external model's class forward that of one rank, in place.

    Called when parameters are DTensors, and before layers are checkpointed and sharded by FSDP. A
    forward whose calls are not those of the traced one raises SetupError when it runs.

    head: the output projection, whose forward stays as it is; None: another rank of a pipeline has
    it. gathers_again: layers without activation checkpointing free what backward can recompute,
    gathered tokens among it (`kept_tensors`).
    """
    execution = _Execution(model, plan=plan, ranks=ranks, gathers_again=gathers_again)
    model.run_class_forward_by(
        execution.replace_forwards(model.class_forward, head),
        ranks.size,
        frozenset(plan.local_outputs),
    )
    model.compile_layer = execution.compiled.compile


def build_rank_forward(
    model: nn.Module,
    plan: ShardingPlan,
    ranks: Ranks,
    head: nn.Module | None,
    gathers_again: bool = True,
) -> Callable[..., Any]:
    """Return the model's forward as that of one rank; the forwards of its modules are replaced.

    The arguments are those of `run_by_plan`.
    """
    return _Execution(model, plan=plan, ranks=ranks, gathers_again=gathers_again).replace_forwards(
        model.forward, head
    )


class _Execution(TorchFunctionMode):
    """The mode that runs one model by its plan: it counts calls, and exchanges at boundaries."""

    follows_calls = True  # a scan is its operators, one by one

    def __init__(
        self, model: nn.Module, plan: ShardingPlan, ranks: Ranks, gathers_again: bool
    ) -> None:
        super().__init__()
        self.gathers_again = gathers_again
        self.model = model
        self.plan = plan
        self.ranks = ranks
        self.running = _Running()
        self.hooked = False  # True once `add_hooks` has run
        # Tokens in each row of the forward that runs; 0: ranks do not share tokens.
        self.length = 0
        # The same by (layer, shape of its input). A checkpointed layer runs again in backward, when
        # the model may have read rows of another length since.
        self.lengths: dict[tuple[str, tuple[int, ...]], int] = {}
        self.exchanges = Exchanges(
            plan,
            ranks,
            rank=lambda: (self.running.isolated_layer or (ranks.rank,))[0],
            entered=lambda: self.running.entered,
            length=lambda: (
                self.length
                if self.running.isolated_layer is None
                else self.running.isolated_layer[1]
            ),
            note=note_call,
        )
        self.compiled = CompiledLayers(
            model,
            plan,
            ranks.rank,
            length=lambda: self.length,
            isolate_layer=self.isolate_layer,
            pause_counting=self.pause_counting,
            gathers_again=gathers_again,
        )
        # (path of a module, index of a call in its forward) -> the exchanges there.
        self.boundaries: dict[tuple[str, int], list[Boundary]] = {}
        for boundary in plan.boundaries:
            # Parameters are assembled wherever they are used, not by call: a forward that trains
            # may use them at other calls than the traced one.
            if boundary.kind != "assemble":
                self.boundaries.setdefault((boundary.module, boundary.call), []).append(boundary)
        # Path of a module -> how many calls of its forward have exchanges.
        self.expected = Counter(module for module, _ in self.boundaries)
        # Path of a layer -> paths, with `*` for numbers, of the modules in it that have exchanges.
        self.must_run = {
            layer: {make_pattern(path) for path in self.expected if path.startswith(f"{layer}.")}
            for layer in list_layer_names(model)
        }
        # Parameters of which a rank computes with some segments whole, gathered for each use.
        self.assembled = [parameter for parameter in plan.parameters if parameter.whole]
        # Path of a module whose forward runs -> those of these within it, as (module that owns the
        # parameter, name there, plan). Filled as forwards run.
        self.assembled_within: dict[str, list[tuple[nn.Module, str, ParameterPlan]]] = {}

    def replace_forwards(
        self, forward: Callable[..., Any], head: nn.Module | None
    ) -> Callable[..., Any]:
        """Return the model's forward as that of one rank, and replace those of its modules.

        head: a module whose forward stays as it is.
        """
        layers = set(list_layer_names(self.model))
        for path, module in self.model.named_modules():
            self.compiled.original_forwards[path] = module.forward
            if path and module is not head:
                counting_forward = self.make_counting_forward(
                    module.forward, path, ends_sharing=path in layers, module=module
                )
                module.forward = (
                    self.compiled.make_traceable(counting_forward, path)
                    if path in layers
                    else counting_forward
                )
        # The other hooks are registered at the first forward, so that they go around FSDP's.
        self.model.register_forward_pre_hook(self.add_hooks, prepend=True)
        return self.make_counting_forward(forward, "", ends_sharing=False)

    def make_counting_forward(
        self,
        forward: Callable[..., Any],
        path: str,
        *,
        ends_sharing: bool,
        module: nn.Module | None = None,
    ) -> Callable[..., Any]:
        """Return a forward that counts its calls, for the module at `path`.

        ends_sharing: True for a layer: results of exchanges in it are not shared with later layers.
        module: asked for `is_off`. An adapter that is switched off makes only the calls of its
        frozen weight, so that later boundaries are not reached.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            running = self.running
            frame = RunningForward(path)
            outermost = not running.frames
            self._note_length(
                path,
                first=next(iter(list_tensors((args, kwargs))), None),
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
                        # In another thread a checkpointed layer may be the outermost forward.
                        stack.enter_context(
                            divide_attributes(self.model, self.plan, self.ranks.size)
                        )
                        stack.enter_context(self)
                    if ends_sharing and self.gathers_again and running.isolated_layer is None:
                        stack.enter_context(KeptTensors().layer())
                    result = forward(*args, **kwargs)
                self._check(frame, getattr(module, "is_off", False))
                return result
            finally:
                running.frames.pop()
                if outermost or ends_sharing:
                    running.entered.clear()

        return run

    def _note_length(self, path: str, first: Any, outermost: bool, is_layer: bool) -> None:
        """Set `length`, the tokens in each row, before the forward of the module at `path`.

        first: the first tensor of its arguments; in the model's forward, the token ids.
        """
        if self.running.isolated_layer is not None:
            return
        if not path:
            self.length = get_trained_length(first, self.plan, self.ranks.size)
        elif is_layer and first is not None and torch.is_grad_enabled():
            key = (path, tuple(first.shape))
            if outermost:
                self.length = self.lengths.get(key, self.length)
            else:
                self.lengths[key] = self.length

    def _check(self, frame: RunningForward, is_off: bool) -> None:
        """Raise SetupError, at the end of a forward, if it has not come to all exchanges."""
        running = self.running
        path = frame.path
        running.is_partly_off |= is_off
        if frame.reached != self.expected[path] and not is_off:
            raise self._make_other_calls_error(
                path, f"{frame.reached} of {self.expected[path]} exchanges were reached"
            )
        running.ran.add(make_pattern(path))
        # A kernel that computes in place of a module would leave out the module's exchanges.
        missing = self.must_run.get(path, set()) - running.ran
        if missing and not running.is_partly_off:
            raise self._make_other_calls_error(min(missing), f"it was not run within {path}")

    @contextmanager
    def isolate_layer(self, rank: Tensor, length: int) -> Iterator[None]:
        """Return a context in which one layer is traced, apart from the forward that runs.

        rank: a tensor `[]`, so that all ranks trace the same graph. length: tokens in a row.
        """
        running = self.running
        outer_state = vars(running).copy()
        vars(running).update(frames=[], entered={}, ran=set(), isolated_layer=(rank, length))
        try:
            yield
        finally:
            vars(running).update(outer_state)

    @contextmanager
    def pause_counting(self) -> Iterator[None]:
        """Return a context in which a compiled layer is called, and no call is counted.

        The exchanges are in its graph.
        """
        try:
            with ExitStack() as stack:
                # All modes, also those above this one: torch has no public way to leave one.
                for _ in range(torch._C._len_torch_function_stack()):
                    stack.enter_context(_pop_mode_temporarily())
                yield
        finally:
            self.running.entered.clear()

    def add_hooks(self, model: nn.Module, args: Any) -> None:
        """Put `suspend` and `resume` around all other hooks of the modules; a hook itself."""
        if not self.hooked:
            self.hooked = True
            for path, module in model.named_modules():
                if path:
                    module.register_forward_pre_hook(self.suspend, prepend=True)
                    module.register_forward_hook(self.resume, always_call=True)

    def suspend(self, module: nn.Module, args: Any) -> None:
        """Stop counting before a module's other hooks, such as FSDP's gathers of parameters.

        The module's own forward counts again, by a frame on top of this None.
        """
        if self.running.frames:
            self.running.frames.append(None)

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        """Go on counting after the module's other hooks."""
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
        reads = name in READS
        # In a layer that is traced, parameters are plain tensors: any may have to be assembled.
        compiled = self.running.isolated_layer is not None and bool(self.assembled)
        parameters = [
            value
            for value in list_tensors((args, kwargs))
            if compiled or isinstance(value, (DTensor, nn.Parameter))
        ]
        if parameters:
            plans = {
                id(value): self._find_assembled_plan(value, frame.path) for value in parameters
            }
            arguments = (args, kwargs)
            args, kwargs = self._take_local(arguments, {} if reads else plans)
            is_assembled = any(plans.values())
            # `weight.T` is made of the whole parameter, gathered; `weight.shape` needs no gather.
            if reads and is_assembled and isinstance(function(*args, **kwargs), Tensor):
                args, kwargs = self._take_local(arguments, plans)
        if reads:
            return function(*args, **kwargs)
        boundaries = self.boundaries.get((frame.path, frame.calls))
        # `_set_...` functions set autograd's state, which tracing does, and not the model.
        if boundaries is None or name.startswith("_set_"):
            result = function(*args, **kwargs)
            note_call(function, args, kwargs, result)
        else:
            if name != boundaries[0].function:
                raise self._make_other_calls_error(
                    frame.path, f"call {frame.calls} is {name}, expected {boundaries[0].function}"
                )
            frame.reached += 1
            result = self.exchanges.call(boundaries, function, args, kwargs)
        if list_tensors(result):
            frame.calls += 1
        return result

    def _make_other_calls_error(self, path: str, reason: str) -> SetupError:
        compiled = "compile=false or " if self.running.isolated_layer is not None else ""
        return SetupError(
            f"{path or 'the model'}: its forward went another way than the one that its"
            f" tensor-parallel plan was made of ({reason}); set {compiled}parallel.tensor=1"
        )

    def _find_assembled_plan(self, parameter: Tensor, path: str) -> ParameterPlan | None:
        """Return the plan of a parameter whose `whole` segments are gathered; None for others.

        path: of the module whose forward runs, which has the parameter within.
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
        """Return the arguments with DTensors replaced by this rank's part.

        plans: id of a parameter -> how its `whole` segments are gathered; None or missing: it has
        none.
        """

        def take_local_part(tensor: Tensor) -> Tensor:
            plan = plans.get(id(tensor))
            local = get_local(tensor)
            return local if plan is None else self.exchanges.assemble(local, plan)

        return pytree.tree_map_only(Tensor, take_local_part, arguments)


def build_ranks(group: Group) -> Ranks:
    """Build the collectives that exchanges use, over a process group."""
    return Ranks(
        group.rank,
        group.size,
        all_reduce=make_all_reduce(group),
        all_gather=lambda tensor: wait(start_gather(tensor, group)),
        reduce_scatter=lambda tensor: wait(start_scatter(tensor, group)),
    )


def make_all_reduce(group: Group) -> TensorFunction:
    """Return the function that sums a tensor over a group's ranks."""
    return partial(all_reduce, operation="sum", group=group)
