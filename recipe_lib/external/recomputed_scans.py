"""Keep the arguments of a scan alone for backward, and run it again there.

The state of a gated delta net or of Mamba-2 runs along the sequence. Where their kernels are not
installed, transformers computes it in torch's operators (`SCANS`), whose results take ten times
the memory of what goes in: the scan is small beside that. `recompute_scan` makes a function of one
that keeps the arguments, as the kernels do. A checkpointed layer, which backward computes
again, keeps them all from there to its own backward: no scan runs a third time. A plan traces a
scan once for all layers.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import _get_current_function_mode_stack

from recipe_lib.ops.fused_kernels import Unfinished, register_shaped_work
from recipe_lib.ops.kept_tensors import is_keeping_results

# Names of transformers' functions.
SCANS = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}
# Arguments by which generation begins with a state, or asks for the one after the last token.
_STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states")


@dataclass(frozen=True)
class Scan:
    """A scan, and those of its arguments that are no tensors."""

    function: Callable[..., Any]
    names: tuple[str, ...]  # of the tensors among its arguments
    settings: tuple[tuple[str, Any], ...]  # name -> value, of all others

    def __call__(self, *tensors: Tensor) -> Tensor:
        arguments = dict(self.settings) | dict(zip(self.names, tensors, strict=True))
        outputs = self.function(**arguments)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    def decide(self, *tensors: Tensor | Sequence[bool]) -> Sequence[Any]:
        """Return what decides the operators: the scan by name, and all arguments."""
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return (name, self.names, self.settings, *tensors)


@register_shaped_work(Scan.decide)
def compute(scan: Scan, *tensors: Tensor) -> Tensor:
    """Return a scan's output, without a graph."""
    with torch.no_grad():
        return scan(*tensors)


def _decide_beginning(scan: Scan, needs: Sequence[bool], *tensors: Tensor) -> Sequence[Any]:
    return scan.decide(needs, *tensors)


@register_shaped_work(_decide_beginning)
def begin(scan: Scan, needs: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, Unfinished]:
    """Return a scan's output, and (the tensors that need a gradient, the graph from them to it).

    needs: for each tensor, True if it needs a gradient.
    """
    pairs = zip(tensors, needs, strict=True)
    leaves = [tensor.detach().requires_grad_(is_needed) for tensor, is_needed in pairs]
    # Hooks of its own: those of a checkpointed layer are to see the arguments alone. Detached: an
    # operator that saves its own result would keep its graph alive by it.
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        output = scan(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    # The edge, not the output, whose memory others free.
    return output.detach(), Unfinished((wanted, torch.autograd.graph.get_gradient_edge(output)))


@register_shaped_work()
def finish(unfinished: Unfinished, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the tensors that need one. gradient: of the output, contiguous."""
    wanted, edge = unfinished.value
    unfinished.value = None
    return torch.autograd.grad((edge,), wanted, (gradient,))


class _OpenGraphs:
    """Graphs of scans from the recomputation of a layer to its backward, which follows at once."""

    def __init__(self) -> None:
        # Where a scan's arguments lie in memory -> its graph. The nodes of backward are those of
        # the first forward: all that they have of the second one is the arguments that it saved.
        self.graphs: dict[Any, Unfinished] = {}

    def run_forward(self, scan: Scan, needs: Sequence[bool], tensors: Sequence[Tensor]) -> Tensor:
        """Return the output, and leave the graph for `take` where backward runs this forward."""
        if torch._C._current_graph_task_id() < 0:  # torch has no public way to ask for a backward
            self.graphs.clear()  # of a backward that an error ended
            return compute(scan, *tensors)
        if not any(needs):  # the first layer's, below all that is trained: it has no backward
            return compute(scan, *tensors)
        output, self.graphs[_locate(tensors)] = begin(scan, needs, *tensors)
        return output

    def take(self, scan: Scan, needs: Sequence[bool], tensors: Sequence[Tensor]) -> Unfinished:
        """Return the graph of a scan with these arguments, made now if its forward left none."""
        return self.graphs.pop(_locate(tensors), None) or begin(scan, needs, *tensors)[1]


def _locate(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.untyped_storage()._cdata, tensor.storage_offset()) for tensor in tensors)


open_graphs = _OpenGraphs()


class _Recomputed(torch.autograd.Function):
    """The autograd node of a scan."""

    @staticmethod
    def forward(ctx: Any, scan: Scan, *tensors: Tensor) -> Tensor:
        ctx.scan = scan
        ctx.save_for_backward(*tensors)
        return open_graphs.run_forward(scan, ctx.needs_input_grad[1:], tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        tensors = ctx.saved_tensors
        unfinished = open_graphs.take(ctx.scan, needs, tensors)
        gradients = iter(finish(unfinished, gradient.contiguous()))
        return (None, *(next(gradients) if is_needed else None for is_needed in needs))


def _follows_calls() -> bool:
    """Return True where tensor parallelism follows the calls of a class by a plan of them."""
    modes = _get_current_function_mode_stack()
    return any(getattr(mode, "follows_calls", False) for mode in modes)


def recompute_scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scan of `SCANS` that keeps its arguments alone, and computes the same bits."""
    signature = inspect.signature(function)
    returns_state = "initial_state" in signature.parameters  # as fla's kernels do, if only None

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        is_generating = any(arguments.get(name) not in (None, False) for name in _STATES)
        is_compiling = torch.compiler.is_compiling()
        # Selective checkpointing counts operators, of which a graph has a few more.
        is_counted = is_keeping_results() or _follows_calls()
        if is_generating or is_compiling or is_counted or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        settings = tuple(item for item in arguments.items() if item[0] not in tensors)
        output = _Recomputed.apply(Scan(function, tuple(tensors), settings), *tensors.values())
        return (output, None) if returns_state else output

    return run
