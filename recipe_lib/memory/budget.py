"""What each layer keeps for backward so that most time is saved with so many bytes.

Next to its input, which it always keeps, a layer can keep what matmuls, attention and its sums over
ranks gave; each of these is so many bytes, and so many seconds less of recomputation. Taken are
those that save most time a byte, for the first layers if there is not room for all; then layers
that keep everything, and compute nothing again. The seconds are those of a plain roofline, the same
for every device, so that every rank and every plan chooses alike: only their order matters, and
that a matmul is worth more than attention over a short row, and less than over a long one, follows
from operations alone.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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

from recipe_lib.errors import ConfigError
from recipe_lib.memory.mlp_tiles import exchange_parameters, find_parameters, is_computing_piece
from recipe_lib.ops.fused_kernels import fuse_on_meta
from recipe_lib.units import GIB, format_bytes

FLOPS, BANDWIDTH, LINK = (
    2e14,
    1.5e12,
    2e10,
)  # a second, of no card in particular: 130 operations a byte is common

KeptOperators = frozenset[
    tuple[str, int]
]  # kinds of operators, and which of their kind in the layer, from 0


@dataclass(frozen=True)
class Operator:
    """One that can be kept. number: which of its kind in its layer. bytes: of its results. seconds:
    to do it again.
    """

    kind: str
    number: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class LayerCost:
    """A layer's forward. stage: of a pipeline. input: bytes of its hidden states. operators: those
    that can be kept and are computed again otherwise. everything: bytes that it keeps without
    checkpointing, input included. other: seconds of what cannot be kept alone and is computed
    again.
    """

    name: str
    stage: int
    input: int
    operators: tuple[Operator, ...]
    everything: int
    other: float


@dataclass
class BudgetChoice:
    """kept: by layer, the operators that it keeps; None: everything, it is not checkpointed. bytes:
    at once, at most. seconds: of recomputation in a micro-batch, by the roofline; full: if only
    inputs were kept.
    """

    kept: dict[str, KeptOperators | None] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    full: float = 0.0

    def describe(self) -> str:
        """`keeps 3.97 of 4.00 GiB ...` in one line."""
        whole = sum(chosen is None for chosen in self.kept.values())
        counts = Counter(kind for chosen in self.kept.values() for kind, _ in chosen or ())
        names = {
            ATTENTION: "attention",
            MATMUL: "matmul",
            INTEGER_MATMUL: "integer matmul",
            SUM: "sum over ranks",
        }
        parts = [f"{counts[kind]} x {name}" for kind, name in names.items() if counts[kind]]
        parts += [f"everything of {whole} layers"] if whole else []
        share = self.seconds / self.full if self.full else 0.0
        return (
            f"layers keep {format_bytes(self.bytes)}: their"
            f" inputs{''.join(f', {part}' for part in parts)}; about {share:.0%} of what"
            " checkpointing=full computes is computed again"
        )


MicroBatchesInFlight = Sequence[
    dict[int, int]
]  # what may be there at once: by stage, the micro-batches that its layers keep


def choose_kept_operators(
    layers: Sequence[LayerCost], budget: float, moments: MicroBatchesInFlight
) -> BudgetChoice:
    """What each layer keeps, under `budget` GiB at every moment.

    Raises ConfigError for a budget that the layers' inputs alone do not fit in.
    """
    room = _ByteBudget(int(budget * GIB), moments)
    least = room.after(_count_input_bytes(layers))
    if least > room.budget:
        raise ConfigError(
            f"memory.activation_budget_gib: found {budget:g} GiB, expected at least"
            f" {least / GIB:.3g}, which the layers' inputs take (checkpointing `full`); raise it,"
            " or make batch_size or max_seq_len smaller"
        )
    room.take(_count_input_bytes(layers))
    choice = BudgetChoice(
        full=sum(layer.other + sum(one.seconds for one in layer.operators) for layer in layers)
    )
    choice.seconds = choice.full
    taken: dict[str, set[tuple[str, int]]] = {layer.name: set() for layer in layers}
    pairs = [(layer, one) for layer in layers for one in layer.operators]
    # What saves most seconds a byte first; of equals, the first layer's.
    for layer, one in sorted(pairs, key=lambda pair: -pair[1].seconds / pair[1].bytes):
        if room.take({layer.stage: one.bytes}):
            taken[layer.name].add((one.kind, one.number))
            choice.seconds -= one.seconds
    choice.kept = {name: frozenset(chosen) for name, chosen in taken.items()}
    for layer in layers:
        more = (
            layer.everything
            - layer.input
            - sum(
                one.bytes for one in layer.operators if (one.kind, one.number) in taken[layer.name]
            )
        )
        if room.take({layer.stage: more}):
            again = sum(
                one.seconds
                for one in layer.operators
                if (one.kind, one.number) not in taken[layer.name]
            )
            choice.kept[layer.name] = None
            choice.seconds -= layer.other + again
    choice.bytes = room.after({})
    return choice


def _count_input_bytes(layers: Sequence[LayerCost]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for layer in layers:
        found[layer.stage] += layer.input
    return found


class _ByteBudget:
    """Bytes of each stage's layers, against the budget at every moment."""

    def __init__(self, budget: int, moments: MicroBatchesInFlight) -> None:
        self.budget, self._moments = budget, moments
        self._bytes: Counter[int] = Counter()

    def after(self, more: dict[int, int]) -> int:
        """The most bytes at once if there were more."""
        return max(
            (
                sum(
                    count * (self._bytes[stage] + more.get(stage, 0))
                    for stage, count in moment.items()
                )
                for moment in self._moments
            ),
            default=0,
        )

    def take(self, more: dict[int, int]) -> bool:
        """Takes it if there is room."""
        if self.after(more) > self.budget:
            return False
        for stage, size in more.items():
            self._bytes[stage] += size
        return True


# The operators that checkpointing tells apart, by their name: which of them exist depends on
# torch's release.


MATMUL, INTEGER_MATMUL, ATTENTION, SUM = "matmul", "integer matmul", "attention", "sum"

_KINDS = {
    "aten::mm": MATMUL,
    "aten::addmm": MATMUL,
    "aten::_scaled_mm": MATMUL,
    "aten::_int_mm": INTEGER_MATMUL,  # twice as large as what is made of it
    "aten::_scaled_dot_product_flash_attention": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": ATTENTION,
    "aten::_scaled_dot_product_fused_attention_overrideable": ATTENTION,
    "aten::_flash_attention_forward": ATTENTION,
    "aten::_efficient_attention_forward": ATTENTION,
    "torch_attn::_varlen_attn": ATTENTION,
    "flex_attention": ATTENTION,
    # Sums over the ranks that share a layer's matrices. What is gathered for them is kept by no
    # mode: it is as large as all ranks' hidden states; nor what FSDP gathers (`c10d::`), which
    # would undo the sharding.
    "_c10d_functional::reduce_scatter_tensor": SUM,
    "_c10d_functional::all_reduce": SUM,
}

# Matmuls of the rows of each expert (`recipe_lib.ops.grouped`): torch's, and ours for other types
# than bf16.
GROUPED = frozenset(
    {
        "aten::_grouped_mm",
        "tune_recipes::grouped_matmul_loop",
        "tune_recipes::grouped_gradient_loop",
    }
)


def count_grouped_flops(args: Sequence[Any], result: Tensor) -> int:
    """Operations of a grouped matmul, each of its rows once: they are the same whatever a row's
    expert is.
    """
    left, right = args[:2]
    if right.dim() == 2:
        return 2 * int(right.shape[0]) * int(result.shape[-2]) * int(result.shape[-1])
    return 2 * left.numel() * int(right.shape[-1])


def get_operator_kind(operator: Any) -> str | None:
    """The kind of an operator of a dispatch mode; None: one that is never kept."""
    return _KINDS.get(
        operator.name().partition(".")[0]
        if isinstance(operator, torch._ops.OpOverload)
        else str(operator)
    )


# What each layer of a meta model keeps and computes in a forward: it is run without numbers, and
# watched.


_RANDOM_STATE = 128  # bytes at most that a GPU's kernel of attention keeps of random numbers


@dataclass
class _ForwardRecord:
    """operators: in order, (kind or None, bytes of the results, seconds). needed: so many of them,
    from the first on, have begun when the last tensor is kept; a recomputation ends there. kept:
    bytes by storage.
    """

    operators: list[tuple[str | None, int, float]] = field(default_factory=list)
    needed: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # so that no storage's address is used twice


class PipelineStages(Protocol):
    """What memory is counted by in a pipeline. layers: by stage of this rank, the numbers of its
    layers.
    """

    layers: dict[int, range]

    def in_flight(self, micro_batches: int) -> list[dict[int, int]]:
        """What this rank may keep at once: by stage, the micro-batches between their forward and
        their backward.
        """


def measure_layer_costs(
    model: nn.Module,
    num_sequences: int,
    length: int,
    tensor_ranks: int,
    kernels: str,
    pipeline: PipelineStages | None = None,
    *,
    context_ranks: int = 1,
    fused: bool = False,
) -> list[LayerCost]:
    """The costs of a decoder's layers, in order, for a micro-batch of `num_sequences` rows of `length`
    tokens.

    model: on the meta device, as its layers will run: with adapters, shared out, in pieces. tensor,
    context_ranks: ranks that share its tokens. kernels: `cuda` or `cpu`, whose norms and attention keep
    other things. pipeline: what runs its stages. fused: whether chains are one kernel each
    (`recipe_lib.ops.fused_kernels`), which keep less.
    """
    trunk, width = cast(Any, model.model), cast(Any, model.spec).width
    own = length // context_ranks
    shape = (num_sequences * own // tensor_ranks,) if tensor_ranks > 1 else (num_sequences, own)
    stages = {0: range(len(trunk.layers))} if pipeline is None else pipeline.layers
    watched: dict[Any, _ForwardRecord] = {}
    found = []
    parameters = find_parameters(model.modules(), lambda parameter: True)
    with (
        _disable_current_modes(),
        exchange_parameters(parameters, _make_plain),
        fuse_on_meta(fused),
    ):
        dtype = next(
            parameter.dtype for parameter in trunk.parameters() if parameter.is_floating_point()
        )
        for stage, numbers in stages.items():
            first = () if stage or trunk.embed_tokens is None else trunk.embed_tokens.parameters()
            for number in numbers:
                layer = trunk.layers.get_submodule(str(number))
                trained = (
                    stage > 0 or number > 0 or any(parameter.requires_grad for parameter in first)
                )
                hidden = torch.empty(
                    *shape, width, dtype=dtype, device="meta", requires_grad=trained
                )
                # Equal for layers that keep and compute the same.
                own_parameters = [
                    (name, p.shape, p.dtype, p.requires_grad)
                    for name, p in layer.named_parameters()
                ]
                attend = getattr(getattr(layer, "self_attn", None), "attend", None)
                kind = (
                    trained,
                    repr(layer),
                    tuple(own_parameters),
                    repr(getattr(attend, "keywords", None)),
                )
                if kind not in watched:
                    with _record_forward(layer, kernels) as watched[kind]:
                        trunk.run_layers(
                            hidden, torch.Size((num_sequences, length)), None, None, layers=[number]
                        )
                found.append(
                    _build_layer_cost(f"model.layers.{number}", stage, hidden.nbytes, watched[kind])
                )
    return found


def _build_layer_cost(name: str, stage: int, inputs: int, watched: _ForwardRecord) -> LayerCost:
    counts: Counter[str] = Counter()
    operators, other = [], 0.0
    for kind, size, seconds in watched.operators[: watched.needed]:
        if kind is None:
            other += seconds
            continue
        operators.append(Operator(kind, counts[kind], size, seconds))
        counts[kind] += 1
    return LayerCost(name, stage, inputs, tuple(operators), sum(watched.kept.values()), other)


def _make_plain(parameter: Tensor) -> Tensor:
    """Return a parameter of a meta tensor and nothing else: in a simulation they are more."""
    return nn.Parameter(_make_plain_meta(parameter.detach()), parameter.requires_grad)


def _make_plain_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = _make_plain_meta(tensor.to_local())
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _record_forward(layer: nn.Module, kernels: str) -> Iterator[_ForwardRecord]:
    """Inside, the layer's forward is noted."""
    note, forward = _ForwardRecord(), layer.forward
    parameters = {_get_storage(parameter)._cdata for parameter in layer.parameters()}

    def run(hidden: Tensor, *others: Any) -> Any:
        given = parameters | {
            _get_storage(leaf)._cdata for leaf in tree_leaves(others) if isinstance(leaf, Tensor)
        }
        counter = _OperatorRecorder(note)

        def pack(tensor: Tensor) -> Tensor:
            note.needed = len(note.operators)
            storage = _get_storage(tensor)
            if storage._cdata not in given:
                note.kept[storage._cdata] = storage.nbytes()
                note.alive.append(storage)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, _DeviceKernels(counter, kernels), counter:
            return forward(hidden, *others)

    layer.forward = run
    try:
        yield note
    finally:
        layer.forward = forward
        note.alive.clear()


def _get_storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


class _OperatorRecorder(TorchDispatchMode):
    """Notes operators, their results' bytes and their seconds."""

    def __init__(self, note: _ForwardRecord) -> None:
        super().__init__()
        self.note, self.muted = note, 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = operator(*args, **(kwargs or {}))
        if self.muted:
            return found
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if operator.is_view or not results:
            return found
        made, kind = sum(leaf.nbytes for leaf in results), get_operator_kind(operator)
        flops = _count_flops(operator, args, kwargs or {}, found)
        moved = made + sum(leaf.nbytes for leaf in given)
        link = moved / LINK if kind == SUM else 0.0
        self.note.operators.append(
            (
                None if is_computing_piece() else kind,
                made,
                max(flops / FLOPS, moved / BANDWIDTH, link),
            )
        )
        return found


def _count_flops(operator: Any, args: Any, kwargs: Any, found: Any) -> int:
    if operator._schema.name in GROUPED:
        return count_grouped_flops(args, found)
    count = flop_registry.get(operator.overloadpacket)
    return int(count(*args, **kwargs, out_val=found)) if count else 0


class _DeviceKernels(TorchFunctionMode):
    """Attention, and on a GPU norms, as the kernels of a device do them; a meta tensor has
    others.
    """

    def __init__(self, counter: _OperatorRecorder, kernels: str) -> None:
        super().__init__()
        self.counter, self.kernels = counter, kernels

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
            return self._run(
                _Attention, ATTENTION, 2 * pairs * q.shape[3], q, k, v
            )  # causal: half of the pairs
        if function is F.rms_norm and self.kernels != "cpu":
            return self._run(
                _FusedNorm, None, 0, args[0], kwargs["weight"] if "weight" in kwargs else args[2]
            )
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


def _make_statistics(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.promote_types(tensor.dtype, torch.float32))


class _Attention(torch.autograd.Function):
    """What a flash kernel keeps: q, k, v, its output, and the log-sum-exp of each query `[b, h,
    s]`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, statistics = torch.empty_like(q), _make_statistics(q, *q.shape[:3])
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.mark_non_differentiable(statistics)
        return out, statistics


class _FusedNorm(torch.autograd.Function):
    """What a fused norm keeps: its input, its weight, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        statistics = _make_statistics(hidden, *hidden.shape[:-1], 1)
        ctx.save_for_backward(hidden, weight, statistics)
        ctx.mark_non_differentiable(statistics)
        return torch.empty_like(hidden), statistics
