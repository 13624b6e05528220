"""What each layer of a meta model keeps and computes in a forward: it is run without numbers, and watched."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from recipe_lib.memory.aten_names import ATTENTION, GROUPED, SUM, grouped_flops, kind_of
from recipe_lib.memory.budget import BANDWIDTH, FLOPS, LINK, LayerCost, Operator
from recipe_lib.memory.mlp_tiles import computes_pieces
from recipe_lib.ops.fused_kernels import fused_on_meta

_RANDOM_STATE = 128  # bytes at most that a GPU's kernel of attention keeps of random numbers


@dataclass
class _Watched:
    """operators: in order, (kind or None, bytes of the results, seconds). needed: so many of them, from the first on,
    have begun when the last tensor is kept; a recomputation ends there. kept: bytes by storage."""

    operators: list[tuple[str | None, int, float]] = field(default_factory=list)
    needed: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # so that no storage's address is used twice


class PipelineStages(Protocol):
    """What memory is counted by in a pipeline. layers: by stage of this rank, the numbers of its layers."""

    layers: dict[int, range]

    def in_flight(self, micro_batches: int) -> list[dict[int, int]]:
        """What this rank may keep at once: by stage, the micro-batches between their forward and their backward."""


def layer_costs(
    model: nn.Module,
    rows: int,
    length: int,
    tensor: int,
    kernels: str,
    pipeline: PipelineStages | None = None,
    *,
    context: int = 1,
    fused: bool = False,
) -> list[LayerCost]:
    """The costs of a decoder's layers, in order, for a micro-batch of `rows` rows of `length` tokens.

    model: on the meta device, as its layers will run: with adapters, shared out, in pieces. tensor, context: ranks
    that share its tokens. kernels: `cuda` or `cpu`, whose norms and attention keep other things. pipeline: what runs
    its stages. fused: whether chains are one kernel each (`recipe_lib.ops.fused_kernels`), which keep less.
    """
    trunk, width = cast(Any, model.model), cast(Any, model.spec).width
    own = length // context
    shape = (rows * own // tensor,) if tensor > 1 else (rows, own)
    stages = {0: range(len(trunk.layers))} if pipeline is None else pipeline.layers
    watched: dict[Any, _Watched] = {}
    found = []
    with _disable_current_modes(), _plain_parameters(model), fused_on_meta(fused):
        dtype = next(parameter.dtype for parameter in trunk.parameters() if parameter.is_floating_point())
        for stage, numbers in stages.items():
            first = () if stage or trunk.embed_tokens is None else trunk.embed_tokens.parameters()
            for number in numbers:
                layer = trunk.layers.get_submodule(str(number))
                trained = stage > 0 or number > 0 or any(parameter.requires_grad for parameter in first)
                hidden = torch.empty(*shape, width, dtype=dtype, device="meta", requires_grad=trained)
                kind = (trained, *_kind(layer))
                if kind not in watched:
                    with _watching(layer, kernels) as watched[kind]:
                        trunk.run_layers(hidden, torch.Size((rows, length)), None, None, layers=[number])
                found.append(_cost(f"model.layers.{number}", stage, hidden.nbytes, watched[kind]))
    return found


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that keep and compute the same."""
    parameters = [(name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters()]
    attend = getattr(getattr(layer, "self_attn", None), "attend", None)
    return repr(layer), tuple(parameters), repr(getattr(attend, "keywords", None))


def _cost(name: str, stage: int, inputs: int, watched: _Watched) -> LayerCost:
    counts: Counter[str] = Counter()
    operators, other = [], 0.0
    for kind, size, seconds in watched.operators[: watched.needed]:
        if kind is None:
            other += seconds
            continue
        operators.append(Operator(kind, counts[kind], size, seconds))
        counts[kind] += 1
    return LayerCost(name, stage, inputs, tuple(operators), sum(watched.kept.values()), other)


@contextmanager
def _plain_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, parameters are meta tensors and nothing else: in a simulation they are more."""
    places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
    own = [(place, name, parameter) for place, name in places if (parameter := place[name]) is not None]
    try:
        for place, name, parameter in own:
            place[name] = nn.Parameter(_plain(parameter.detach()), parameter.requires_grad)
        yield
    finally:
        for place, name, parameter in own:
            place[name] = parameter


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = _plain(tensor.to_local())
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _watching(layer: nn.Module, kernels: str) -> Iterator[_Watched]:
    """Inside, the layer's forward is noted."""
    note, forward = _Watched(), layer.forward
    parameters = {_storage_of(parameter)._cdata for parameter in layer.parameters()}

    def run(hidden: Tensor, *others: Any) -> Any:
        given = parameters | {_storage_of(leaf)._cdata for leaf in tree_leaves(others) if isinstance(leaf, Tensor)}
        counter = _Counter(note)

        def pack(tensor: Tensor) -> Tensor:
            note.needed = len(note.operators)
            storage = _storage_of(tensor)
            if storage._cdata not in given:
                note.kept[storage._cdata] = storage.nbytes()
                note.alive.append(storage)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, _Kernels(counter, kernels), counter:
            return forward(hidden, *others)

    layer.forward = run
    try:
        yield note
    finally:
        layer.forward = forward
        note.alive.clear()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


class _Counter(TorchDispatchMode):
    """Notes operators, their results' bytes and their seconds."""

    def __init__(self, note: _Watched) -> None:
        super().__init__()
        self.note, self.muted = note, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        if self.muted:
            return found
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if operator.is_view or not results:
            return found
        made, kind = sum(leaf.nbytes for leaf in results), kind_of(operator)
        flops = _flops(operator, args, kwargs or {}, found)
        moved = made + sum(leaf.nbytes for leaf in given)
        link = moved / LINK if kind == SUM else 0.0
        self.note.operators.append(
            (None if computes_pieces() else kind, made, max(flops / FLOPS, moved / BANDWIDTH, link))
        )
        return found


def _flops(operator: Any, args: Any, kwargs: Any, found: Any) -> int:
    if operator._schema.name in GROUPED:
        return grouped_flops(args, found)
    count = flop_registry.get(operator.overloadpacket)
    return int(count(*args, **kwargs, out_val=found)) if count else 0


class _Kernels(TorchFunctionMode):
    """Attention, and on a GPU norms, as the kernels of a device do them; a meta tensor has others."""

    def __init__(self, counter: _Counter, kernels: str) -> None:
        super().__init__()
        self.counter, self.kernels = counter, kernels

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
            return self._run(_Attention, ATTENTION, 2 * pairs * q.shape[3], q, k, v)  # causal: half of the pairs
        if function is F.rms_norm and self.kernels != "cpu":
            return self._run(_FusedNorm, None, 0, args[0], kwargs["weight"] if "weight" in kwargs else args[2])
        return function(*args, **kwargs)

    def _run(self, function: Any, kind: str | None, flops: float, *tensors: Tensor) -> Tensor:
        note = self.counter.note
        self.counter.muted += 1
        try:
            out, statistics = function.apply(*tensors)
        finally:
            self.counter.muted -= 1
        made = out.nbytes + statistics.nbytes
        if kind == ATTENTION and self.kernels != "cpu":
            made += _RANDOM_STATE
            note.kept[-len(note.operators)] = _RANDOM_STATE
        moved = made + sum(tensor.nbytes for tensor in tensors)
        note.operators.append((kind, made, max(flops / FLOPS, moved / BANDWIDTH)))
        note.needed = len(note.operators) if out.requires_grad else note.needed
        return out


def _statistics(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.promote_types(tensor.dtype, torch.float32))


class _Attention(torch.autograd.Function):
    """What a flash kernel keeps: q, k, v, its output, and the log-sum-exp of each query `[b, h, s]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, statistics = torch.empty_like(q), _statistics(q, *q.shape[:3])
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.mark_non_differentiable(statistics)
        return out, statistics


class _FusedNorm(torch.autograd.Function):
    """What a fused norm keeps: its input, its weight, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        statistics = _statistics(hidden, *hidden.shape[:-1], 1)
        ctx.save_for_backward(hidden, weight, statistics)
        ctx.mark_non_differentiable(statistics)
        return torch.empty_like(hidden), statistics
