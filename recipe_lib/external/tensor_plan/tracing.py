"""Trace one forward of a model: its operators, their dimensions, the torch functions that run them.

`infer.infer_plan` calls `trace`. Two modes of torch watch the forward. A function mode sees calls
of torch functions, at which ranks can exchange tensors later. A dispatch mode sees the ATen
operators that these run, and applies each one's rule: what it does to the dimensions of tensors.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.errors import SetupError
from recipe_lib.external.tensor_plan.axes import AxisNode, block
from recipe_lib.external.tensor_plan.forward_trace import (
    Argument,
    CallKey,
    ForwardTrace,
    FunctionCall,
    OperatorCall,
    Rule,
    TracedTensor,
    get_short_name,
)
from recipe_lib.external.tensor_plan.sharding_plan import (
    READS,
    RunningForward,
    get_output_values,
    list_places,
)
from recipe_lib.external.tensor_plan.sourced_integers import (
    Decision,
    Size,
    Sourced,
    make_attributes_sourced,
)
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.kept_tensors import list_tensors


class _Watch(TorchFunctionMode):
    """The function mode: it numbers the calls of each module's forward that return a tensor.

    Calls that a torch function makes itself are not seen. `plan_executor` counts in the same way
    when it runs the plan (`RunningForward`), so a change here has to be made there, too.
    """

    follows_calls = True  # a scan is its operators, one by one

    def __init__(
        self,
        model: torch.nn.Module,
        trace: ForwardTrace,
        get_traced: Callable[[torch.Tensor], TracedTensor],
    ):
        super().__init__()
        self.model = model
        self.trace = trace  # is filled in
        self.get_traced = get_traced  # returns what is known of a tensor
        self.current = -1  # number of the call that is running
        self.last = ""  # path of the module that made the latest call; for errors
        self.inside = tuple(f"{name}." for name in list_layer_names(model))  # prefixes in layers
        self._running = [RunningForward("")]  # the outermost first
        self._hooks: list[Any] = []

    @property
    def module(self) -> str:
        """Return the path of the module whose forward is running; empty: the model itself."""
        return self._running[-1].path

    def note(self, decision: Decision) -> None:
        """Keep a comparison of integers, with the module and the number of its next call."""
        forward = self._running[-1]
        self.trace.decisions.append(decision._replace(module=forward.path, call=forward.calls))

    def __enter__(self) -> "_Watch":
        for path, module in self.model.named_modules():
            if path:

                def open_frame(module: torch.nn.Module, args: Any, path: str = path) -> None:
                    self._running.append(RunningForward(path))

                self._hooks.append(module.register_forward_pre_hook(open_frame))
                self._hooks.append(
                    module.register_forward_hook(self._close_frame, always_call=True)
                )
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _close_frame(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Note a module's output, and go back to the module that called it; a forward hook."""
        first = next(iter(list_tensors(output)), None)
        if first is not None and not self.module.startswith(self.inside):
            # `get_traced` may read a shape, which this mode would take for a read of the model's.
            with torch._C.DisableTorchFunction():
                self.trace.module_outputs[self.module] = self.get_traced(first)
        self._running.pop()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        if name in READS:
            return self._read(function, args, kwargs)
        forward = self._running[-1]
        self.last = forward.path
        call = FunctionCall(CallKey(forward.path, forward.calls), name, _describe_source())
        for place, value in list_places(args, kwargs):
            if isinstance(value, torch.Tensor):
                call.arguments.append(Argument(place, self.get_traced(value), value.requires_grad))
            elif isinstance(value, (int, slice, type(...), type(None), str)):
                call.non_tensor_args[place] = value
        self.current = len(self.trace.calls)
        self.trace.calls.append(call)
        result = function(*args, **kwargs)
        call.outputs = [self.get_traced(tensor) for tensor in list_tensors(result)]
        self.current = -1
        forward.calls += bool(call.outputs)
        return result

    def _read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Read an attribute of a tensor; sizes become integers that know their dimension."""
        value = function(*args, **kwargs)
        if isinstance(value, torch.Size):
            traced = self.get_traced(args[0])
            return torch.Size(
                [
                    Sourced(size, Size(traced, at), self.trace.size_decisions.append)
                    for at, size in enumerate(value)
                ]
            )
        if type(value) is int and getattr(function, "__name__", "") == "size":
            dimension = args[1] if len(args) > 1 else kwargs["dim"]
            size = Size(self.get_traced(args[0]), dimension % args[0].dim())
            return Sourced(value, size, self.trace.size_decisions.append)
        return value


class _Operators(TorchDispatchMode):
    """The dispatch mode: it applies the rule of each operator as it runs, and records it."""

    def __init__(self, trace: ForwardTrace, find_rule: Callable[[Any], Rule | None]):
        super().__init__()
        self.trace = trace
        self.find_rule = find_rule
        self.watch: _Watch | None = None  # set by `trace`; each mode needs the other
        # By a tensor's id. The tensor is kept, so that no later one gets its id.
        self._known: dict[int, tuple[TracedTensor, torch.Tensor]] = {}

    def get_traced(self, tensor: torch.Tensor) -> TracedTensor:
        """Return what is known of a tensor; a new one, made by no operator, is a constant."""
        if id(tensor) not in self._known:
            self.remember(tensor, TracedTensor([AxisNode(size) for size in tensor.shape]))
        return self._known[id(tensor)][0]

    def remember(self, tensor: torch.Tensor, traced: TracedTensor) -> TracedTensor:
        self._known[id(tensor)] = (traced, tensor)
        return traced

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        assert self.watch is not None
        module_path = self.watch.module or "the model itself"
        result = _make_up_result(function, args, kwargs)
        if result is not None:
            name = get_short_name(function)
            if name != "_grouped_mm":  # its result is made up for its size alone
                self.trace.assumed.append(f"{name} in {module_path}")
        else:
            result = function(*args, **kwargs)
        outputs = list(list_tensors(result))
        if not outputs:
            return result
        step = OperatorCall(
            function,
            args,
            kwargs,
            results=outputs,
            module_path=module_path,
            get_traced=self.get_traced,
        )
        step.call_index = self.watch.current
        # An index tensor has no values on meta; the arguments of the call have them.
        if step.call_index >= 0 and self.trace.calls[step.call_index].function == "__getitem__":
            step.picked = self.trace.calls[step.call_index].non_tensor_args
        step.rule = self.find_rule(function)
        dims = step.rule(step) if step.rule is not None else None
        sizes = [[node.size for node in nodes] for nodes in dims or ()]
        # A rule whose dimensions have other sizes than the results does not cover this case.
        if dims is None or sizes != [list(output.shape) for output in outputs]:
            self.trace.unknown[step.name] = module_path
            block(
                f"{step.name}, for which there is no rule, in {module_path}",
                *(node for traced in step.inputs for node in traced.dims),
            )
            dims = [[AxisNode(size, blocked=step.reason) for size in out.shape] for out in outputs]
        self._record(step, dims)
        return result

    def _record(self, step: OperatorCall, dims: list[Any]) -> None:
        """Record an operator and what is known of its results. dims: of each result."""
        activation = any(traced.root.is_activation for traced in step.inputs)
        sources = () if activation else step.inputs
        names = frozenset[str]().union(*(traced.parameters for traced in sources))
        # The schema says of a result whether it shares memory with an argument.
        views = any(result.alias_info is not None for result in step.function._schema.returns)
        for tensor, sizes in zip(step.results, dims, strict=True):
            if id(tensor) in step.traced_by_id:
                # Written in place: the tensor that owns the memory has new values, too.
                traced = self.get_traced(tensor)
                traced.root.is_activation |= activation
                traced.is_activation |= activation
                traced.parameters = traced.parameters | names
            else:
                is_by_one = (
                    tensor.dtype in (torch.int64, torch.int32)
                    and not step.makes_values
                    and not step.mixes_elements
                )
                traced = self.remember(
                    tensor,
                    TracedTensor(
                        sizes,
                        names,
                        activation,
                        is_token_ids=is_by_one
                        and any(argument.is_token_ids for argument in step.inputs),
                        base=step.inputs[0] if views and step.inputs else None,
                        call_index=step.call_index,
                    ),
                )
            step.outputs.append(traced)
        self.trace.records.append(step)
        if step.call_index >= 0:
            self.trace.calls[step.call_index].records.append(step)


def trace(
    model: torch.nn.Module, inputs: dict[str, Any], find_rule: Callable[[Any], Rule | None]
) -> ForwardTrace:
    """Run one forward of the model on `inputs`, and return what it did.

    The model is not changed. It and the inputs are on one device, which may be meta. Values that a
    forward asks a meta tensor for are made up. Every floating point parameter counts as trained, so
    that a plan does not depend on what is frozen. inputs: keyword arguments, token ids first.
    find_rule: returns the rule of an operator, or None. Raises SetupError where the forward fails.
    """
    forward = ForwardTrace()
    operators = _Operators(forward, find_rule)
    watch = operators.watch = _Watch(model, forward, operators.get_traced)
    frozen = torch.nn.ParameterList(
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    )
    for name, parameter in model.named_parameters():
        traced = TracedTensor([AxisNode(size) for size in parameter.shape], frozenset([name]))
        forward.parameters[name] = operators.remember(parameter, traced)
    for number, tensor in enumerate(list_tensors(inputs)):
        first = not number and not tensor.is_floating_point()
        forward.num_tokens = tensor.numel() if first else forward.num_tokens
        sizes = [AxisNode(size) for size in tensor.shape]
        traced = operators.remember(
            tensor, TracedTensor(sizes, is_activation=True, is_token_ids=first)
        )
        forward.ids = traced if first and tensor.dim() == 2 else forward.ids
    training = model.training
    try:
        frozen.requires_grad_(True)
        model.eval()
        with torch.enable_grad(), make_attributes_sourced(model, watch.note), watch, operators:
            output = model(**inputs)
    except Exception as error:
        raise SetupError(
            f"{type(model).__name__}: the forward failed at {watch.last or 'the model itself'}"
            f" while it was traced ({type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else ''}), expected one that runs on the"
            " meta device: pass inputs that it takes, or a small copy of the model on the CPU"
        ) from error
    finally:
        model.train(training)
        frozen.requires_grad_(False)
    forward.outputs = [
        operators.get_traced(tensor) for tensor in list_tensors(get_output_values(output))
    ]
    return forward


# Folders of code that is none of the model's: torch and this package.
_NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def _describe_source() -> str:
    """Return `file:line` of the model's code that runs: the innermost such frame."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _make_up_result(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make up the result of an operator that needs values of a meta tensor.

    None for other operators. What is made up: 0 or False for a value that Python reads (`item`), 3
    indices for `nonzero`, zeros for a copy to another device.
    """
    name = get_short_name(function)
    tensors = list(list_tensors((args, kwargs)))
    if not tensors or tensors[0].device.type != "meta":
        return None
    first = tensors[0]
    if name == "_local_scalar_dense":  # what `item` runs
        return False if first.dtype is torch.bool else 0.0 if first.is_floating_point() else 0
    if name == "nonzero":
        return first.new_zeros((3, first.dim()), dtype=torch.long)
    if name == "equal":
        return False
    if name == "_to_copy" and torch.device(kwargs.get("device") or "meta").type != "meta":
        return torch.zeros(
            first.shape, dtype=kwargs.get("dtype") or first.dtype, device=kwargs["device"]
        )
    if name == "_grouped_mm":  # the meta kernel takes bfloat16 alone
        return first.new_empty((first.shape[0], args[1].shape[-1]))
    if name == "bincount":
        return first.new_zeros((max(kwargs.get("minlength", 0), 1),))
    return None
