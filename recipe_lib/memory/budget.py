"""Choose what each layer keeps for backward, so that a given number of bytes saves most time.

`memory.activation_checkpointing: budget` comes here: `measure_layer_costs` runs each kind of layer
on the meta device and records its operators, `choose_kept_operators` picks among them. Next to its
input a layer can keep the results of matmuls, attention and sums over ranks. Those that save most
seconds a byte are kept first; with bytes left, layers are not checkpointed at all.
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

# Of no card in particular, so that every rank and every plan chooses alike: only the order of the
# operators' seconds a byte matters. 130 operations a byte are common. That a matmul is worth more
# than attention over a short row, and less than over a long one, follows from operations alone.
FLOPS = 2e14  # operations a second
BANDWIDTH = 1.5e12  # bytes of memory a second
LINK = 2e10  # bytes between ranks a second

# Kinds of operators, each with its index among those of its kind in the layer.
KeptOperators = frozenset[tuple[str, int]]
# What may be on the device at once: for each such moment, by stage, the micro-batches whose
# forward is done and whose backward is not.
MicroBatchesInFlight = Sequence[dict[int, int]]


@dataclass(frozen=True)
class Operator:
    """An operator whose results a layer can keep."""

    kind: str
    number: int  # its index among those of its kind in the layer
    bytes: int  # of its results
    seconds: float  # to compute it again

    @property
    def key(self) -> tuple[str, int]:
        """Return what a set of KeptOperators names it by."""
        return self.kind, self.number


@dataclass(frozen=True)
class LayerCost:
    """The bytes and seconds of one layer's forward."""

    name: str
    stage: int  # of a pipeline
    input_bytes: int  # of its hidden states, which a checkpointed layer always keeps
    operators: tuple[Operator, ...]  # can be kept, and are computed again otherwise
    unchecked_bytes: int  # kept without checkpointing, input included
    other_seconds: float  # to compute again what cannot be kept alone


@dataclass
class BudgetChoice:
    """The operators that each layer keeps under a budget."""

    # By layer name; None: the layer is not checkpointed, it keeps everything.
    kept: dict[str, KeptOperators | None] = field(default_factory=dict)
    bytes: int = 0  # kept at once, at most
    seconds: float = 0.0  # of recomputation in a micro-batch
    full_seconds: float = 0.0  # of recomputation if only inputs were kept

    def describe(self) -> str:
        """Return `layers keep 3.97 GiB: ...` in one line."""
        num_unchecked = sum(kept is None for kept in self.kept.values())
        counts: Counter[str] = Counter()
        for kept in self.kept.values():
            counts.update(kind for kind, _ in kept or ())
        names = {
            ATTENTION: "attention",
            MATMUL: "matmul",
            INTEGER_MATMUL: "integer matmul",
            SUM: "sum over ranks",
        }
        parts = [f"{counts[kind]} x {name}" for kind, name in names.items() if counts[kind]]
        parts += [f"everything of {num_unchecked} layers"] if num_unchecked else []
        share = self.seconds / self.full_seconds if self.full_seconds else 0.0
        return (
            f"layers keep {format_bytes(self.bytes)}: their"
            f" inputs{''.join(f', {part}' for part in parts)}; about {share:.0%} of what"
            " checkpointing=full computes is computed again"
        )


def choose_kept_operators(
    layers: Sequence[LayerCost], budget: float, in_flight: MicroBatchesInFlight
) -> BudgetChoice:
    """Return what each layer keeps, under `budget` GiB at every moment.

    Raises ConfigError for a budget that the layers' inputs alone do not fit in.
    """
    reserved = _ByteBudget(int(budget * GIB), in_flight)
    inputs: Counter[int] = Counter()
    for layer in layers:
        inputs[layer.stage] += layer.input_bytes
    if not reserved.try_reserve(inputs):
        least = reserved.compute_peak(inputs)
        raise ConfigError(
            f"memory.activation_budget_gib: found {budget:g} GiB, expected at least"
            f" {least / GIB:.3g}, which the layers' inputs take (checkpointing `full`); raise it,"
            " or make batch_size or max_seq_len smaller"
        )
    operators = [(layer, operator) for layer in layers for operator in layer.operators]
    choice = BudgetChoice(
        full_seconds=sum(
            layer.other_seconds + sum(operator.seconds for operator in layer.operators)
            for layer in layers
        )
    )
    choice.seconds = choice.full_seconds
    kept: dict[str, set[tuple[str, int]]] = {layer.name: set() for layer in layers}
    # Most seconds saved a byte first; sorting is stable, so of equals the first layer's.
    operators.sort(key=lambda pair: -pair[1].seconds / pair[1].bytes)
    for layer, operator in operators:
        if reserved.try_reserve({layer.stage: operator.bytes}):
            kept[layer.name].add(operator.key)
            choice.seconds -= operator.seconds
    choice.kept = {name: frozenset(keys) for name, keys in kept.items()}
    for layer in layers:
        kept_keys = kept[layer.name]
        kept_bytes = sum(
            operator.bytes for operator in layer.operators if operator.key in kept_keys
        )
        more_bytes = layer.unchecked_bytes - layer.input_bytes - kept_bytes
        if reserved.try_reserve({layer.stage: more_bytes}):
            choice.kept[layer.name] = None
            choice.seconds -= layer.other_seconds + sum(
                operator.seconds for operator in layer.operators if operator.key not in kept_keys
            )
    choice.bytes = reserved.compute_peak({})
    return choice


@dataclass
class _ByteBudget:
    """Bytes that the layers of each stage keep, against a budget at every moment."""

    limit: int  # bytes
    in_flight: MicroBatchesInFlight
    kept: Counter[int] = field(default_factory=Counter)  # by stage, of one micro-batch

    def compute_peak(self, more: dict[int, int]) -> int:
        """Return the most bytes at once if each stage kept so many more."""
        kept = self.kept + Counter(more)
        return max(
            (
                sum(count * kept[stage] for stage, count in moment.items())
                for moment in self.in_flight
            ),
            default=0,
        )

    def try_reserve(self, more: dict[int, int]) -> bool:
        """Reserve the bytes if they fit; return False, and change nothing, if not."""
        if self.compute_peak(more) > self.limit:
            return False
        self.kept.update(more)
        return True


MATMUL = "matmul"
INTEGER_MATMUL = "integer matmul"
ATTENTION = "attention"
SUM = "sum"

# By name, as it depends on torch's release which of the operators exist.
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

# Matmuls of the rows of each expert (`recipe_lib.ops.mlp`): torch's, and ours for other types
# than bf16.
GROUPED = frozenset(
    {
        "aten::_grouped_mm",
        "tune_recipes::grouped_matmul_loop",
        "tune_recipes::grouped_gradient_loop",
    }
)


def count_grouped_flops(args: Sequence[Any], result: Tensor) -> int:
    """Return the operations of a grouped matmul: each row counts once, whatever its expert is."""
    left, right = args[:2]
    if right.dim() == 2:  # the weight gradient, which sums over rows
        return 2 * int(right.shape[0]) * int(result.shape[-2]) * int(result.shape[-1])
    return 2 * left.numel() * int(right.shape[-1])


def get_operator_kind(operator: Any) -> str | None:
    """Return the kind of an operator that a dispatch mode sees; None: it is never kept."""
    return _KINDS.get(
        operator.name().partition(".")[0]
        if isinstance(operator, torch._ops.OpOverload)
        else str(operator)
    )


_RANDOM_STATE = 128  # bytes at most that a GPU's attention kernel keeps of random numbers


@dataclass
class _ForwardRecord:
    """The operators that one forward of a layer ran, and the storages that it kept."""

    # In order: kind or None, bytes of the results, seconds.
    operators: list[tuple[str | None, int, float]] = field(default_factory=list)
    # So many operators had begun when the last tensor was kept; a recomputation ends there.
    needed: int = 0
    kept: dict[int, int] = field(default_factory=dict)  # bytes by the storage's address
    alive: list[Any] = field(default_factory=list)  # so that no storage's address is used twice


class PipelineStages(Protocol):
    """The stages of this rank, as memory is counted by them."""

    layers: dict[int, range]  # by stage, the indices of its layers

    def list_in_flight(self, micro_batches: int) -> list[dict[int, int]]:
        """Return what this rank may keep at once, see MicroBatchesInFlight."""


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
    """Return the costs of a decoder's layers, in order, for micro-batches of `[b, s]` tokens.

    model: on the meta device, with adapters, sharding and MLP tiles as its layers will run.
    num_sequences, length: b and s. tensor_ranks, context_ranks: ranks that share the tokens.
    kernels: `cuda` or `cpu`, whose norms and attention keep different tensors. pipeline: runs the
    model's stages. fused: True where a chain of operators is one kernel, which keeps less
    (`recipe_lib.ops.fused_kernels`).
    """
    trunk = cast(Any, model.model)
    width = cast(Any, model.spec).width
    local_length = length // context_ranks
    shape = (num_sequences, local_length)
    if tensor_ranks > 1:  # sequence parallel: tokens are flattened before they are divided
        shape = (num_sequences * local_length // tensor_ranks,)  # type: ignore[assignment]
    stages = {0: range(len(trunk.layers))} if pipeline is None else pipeline.layers
    records: dict[Any, _ForwardRecord] = {}
    costs = []
    with (
        _disable_current_modes(),
        exchange_parameters(find_parameters(model.modules(), lambda parameter: True), _make_plain),
        fuse_on_meta(fused),
    ):
        dtype = next(
            parameter.dtype for parameter in trunk.parameters() if parameter.is_floating_point()
        )
        trains_embedding = trunk.embed_tokens is not None and any(
            parameter.requires_grad for parameter in trunk.embed_tokens.parameters()
        )
        for stage, layer_indices in stages.items():
            for index in layer_indices:
                layer = trunk.layers.get_submodule(str(index))
                # The first layer's input needs no gradient where the embedding is frozen.
                trained = stage > 0 or index > 0 or trains_embedding
                hidden = torch.empty(
                    *shape, width, dtype=dtype, device="meta", requires_grad=trained
                )
                key = (trained, *_describe_layer(layer))
                if key not in records:
                    with _record_forward(layer, kernels) as records[key]:
                        tokens = torch.Size((num_sequences, length))
                        trunk.run_layers(
                            hidden, shape=tokens, positions=None, info=None, layers=[index]
                        )
                costs.append(
                    _build_layer_cost(
                        f"model.layers.{index}",
                        stage=stage,
                        input_bytes=hidden.nbytes,
                        record=records[key],
                    )
                )
    return costs


def _describe_layer(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers that keep and compute the same."""
    parameters = tuple(
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in layer.named_parameters()
    )
    attend = getattr(getattr(layer, "self_attn", None), "attend", None)
    return repr(layer), parameters, repr(getattr(attend, "keywords", None))


def _build_layer_cost(name: str, stage: int, input_bytes: int, record: _ForwardRecord) -> LayerCost:
    counts: Counter[str] = Counter()
    operators = []
    other_seconds = 0.0
    for kind, size, seconds in record.operators[: record.needed]:
        if kind is None:
            other_seconds += seconds
            continue
        operators.append(Operator(kind, number=counts[kind], bytes=size, seconds=seconds))
        counts[kind] += 1
    return LayerCost(
        name=name,
        stage=stage,
        input_bytes=input_bytes,
        operators=tuple(operators),
        unchecked_bytes=sum(record.kept.values()),
        other_seconds=other_seconds,
    )


def _make_plain(parameter: Tensor) -> Tensor:
    """Return a parameter of a plain meta tensor: in a simulation it is a subclass of Tensor."""
    return nn.Parameter(_make_plain_meta(parameter.detach()), parameter.requires_grad)


def _make_plain_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = _make_plain_meta(tensor.to_local())
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _record_forward(layer: nn.Module, kernels: str) -> Iterator[_ForwardRecord]:
    """Record the forward that the layer runs inside the block."""
    record = _ForwardRecord()
    forward = layer.forward
    parameters = {_get_storage(parameter)._cdata for parameter in layer.parameters()}

    def run(hidden: Tensor, *arguments: Any) -> Any:
        # What all layers share (rotations, masks) is no layer's own to keep.
        shared = parameters | {
            _get_storage(leaf)._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)
        }
        recorder = _OperatorRecorder(record)

        def pack(tensor: Tensor) -> Tensor:
            record.needed = len(record.operators)
            storage = _get_storage(tensor)
            if storage._cdata not in shared:
                record.kept[storage._cdata] = storage.nbytes()
                record.alive.append(storage)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, _DeviceKernels(recorder, kernels), recorder:
            return forward(hidden, *arguments)

    layer.forward = run
    try:
        yield record
    finally:
        layer.forward = forward
        record.alive.clear()


def _get_storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


class _OperatorRecorder(TorchDispatchMode):
    """Records operators, their results' bytes and their seconds."""

    def __init__(self, record: _ForwardRecord) -> None:
        super().__init__()
        self.record = record
        self.muted = 0  # above 0 nothing is recorded

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = operator(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self.muted or operator.is_view or not results:
            return output
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind = get_operator_kind(operator)
        written_bytes = sum(leaf.nbytes for leaf in results)
        moved_bytes = written_bytes + sum(leaf.nbytes for leaf in read)
        flops = _count_flops(operator, args=args, kwargs=kwargs or {}, output=output)
        seconds = max(flops / FLOPS, moved_bytes / (LINK if kind == SUM else BANDWIDTH))
        # A piece of a tiled MLP is computed again in any case.
        self.record.operators.append(
            (None if is_computing_piece() else kind, written_bytes, seconds)
        )
        return output


def _count_flops(operator: Any, args: Any, kwargs: Any, output: Any) -> int:
    if operator._schema.name in GROUPED:
        return count_grouped_flops(args, output)
    count = flop_registry.get(operator.overloadpacket)
    return int(count(*args, **kwargs, out_val=output)) if count else 0


class _DeviceKernels(TorchFunctionMode):
    """Runs attention, and on a GPU norms, as one kernel that keeps what the device's would."""

    # On the meta device torch takes other paths, which keep other tensors.

    def __init__(self, recorder: _OperatorRecorder, kernels: str) -> None:
        super().__init__()
        self.recorder = recorder
        self.kernels = kernels

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
            # Two products of 2 operations a pair and channel; causal: half of the pairs.
            return self._run(_Attention, (q, k, v), ATTENTION, 2 * pairs * q.shape[3])
        if function is F.rms_norm and self.kernels != "cpu":
            weight = kwargs["weight"] if "weight" in kwargs else args[2]
            return self._run(_FusedNorm, (args[0], weight))
        return function(*args, **kwargs)

    def _run(
        self,
        function: Any,
        tensors: tuple[Tensor, ...],
        kind: str | None = None,
        flops: float = 0.0,
    ) -> Tensor:
        record = self.recorder.record
        self.recorder.muted += 1
        try:
            out, statistics = function.apply(*tensors)
        finally:
            self.recorder.muted -= 1
        written_bytes = out.nbytes + statistics.nbytes
        if kind == ATTENTION and self.kernels != "cpu":
            written_bytes += _RANDOM_STATE
            # No tensor here has that storage: a negative key is no storage's address.
            record.kept[-len(record.operators)] = _RANDOM_STATE
        moved_bytes = written_bytes + sum(tensor.nbytes for tensor in tensors)
        record.operators.append((kind, written_bytes, max(flops / FLOPS, moved_bytes / BANDWIDTH)))
        if out.requires_grad:  # the results are kept when the operator is done, not when it begins
            record.needed = len(record.operators)
        return out


def _make_statistics(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.promote_types(tensor.dtype, torch.float32))


class _Attention(torch.autograd.Function):
    """Keeps what a flash kernel keeps: q, k, v, its output, and log-sum-exps `[b, h, s]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        statistics = _make_statistics(q, *q.shape[:3])
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.mark_non_differentiable(statistics)
        return out, statistics


class _FusedNorm(torch.autograd.Function):
    """Keeps what a fused norm keeps: its input, its weight, and one number for each token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        statistics = _make_statistics(hidden, *hidden.shape[:-1], 1)
        ctx.save_for_backward(hidden, weight, statistics)
        ctx.mark_non_differentiable(statistics)
        return torch.empty_like(hidden), statistics
