"""Choose what each layer keeps for backward, so that a given number of bytes saves most time.

With `memory.activation_checkpointing: budget`, `apply_activation_checkpointing` calls
`measure_layer_costs`, which records the operators of each kind of layer, then
`choose_kept_operators`. Next to its input a layer can keep the results of matmuls, attention and
sums over ranks: first those that save most seconds of recomputation a byte.
"""

import weakref
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

# Rates of no GPU in particular, so that every rank and every plan chooses alike. Only the order of
# the operators matters, by seconds that a kept byte saves. GPUs commonly compute some 130
# operations while they move a byte. That a matmul comes before attention over a short sequence, and
# after attention over a long one, follows from their operations at any rates.
FLOPS = 2e14  # operations a second
BANDWIDTH = 1.5e12  # bytes a second, read and written in the device's memory
LINK = 2e10  # bytes a second between ranks

# The operators that a layer keeps: (kind, index among the operators of this kind in the layer).
KeptOperators = frozenset[tuple[str, int]]
# The moments of a step at which a rank may keep most. Each is: pipeline stage of the rank -> number
# of micro-batches whose forward through it is done and whose backward is not. Without a pipeline:
# [{0: 1}].
MicroBatchesInFlight = Sequence[dict[int, int]]


@dataclass(frozen=True)
class Operator:
    """An operator whose results a layer can keep."""

    kind: str  # MATMUL, INTEGER_MATMUL, ATTENTION or SUM
    number: int  # its index among the operators of its kind in the layer
    bytes: int  # of its results
    seconds: float  # to compute it again

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.number


@dataclass(frozen=True)
class LayerCost:
    """The bytes and seconds of one layer's forward of one micro-batch."""

    name: str  # in the model: `model.layers.0`
    stage: int  # of the pipeline, 0 without one
    input_bytes: int  # of its hidden states, which a checkpointed layer always keeps
    operators: tuple[Operator, ...]  # in the order of forward: each is kept, or computed again
    unchecked_bytes: int  # kept for backward without checkpointing, input included
    other_seconds: float  # to compute again all operators that are none of `operators`


@dataclass
class BudgetChoice:
    """The operators that each layer keeps under a budget."""

    # By layer name; None: the layer is not checkpointed, it keeps everything.
    kept: dict[str, KeptOperators | None] = field(default_factory=dict)
    bytes: int = 0  # the most that all layers keep at once
    seconds: float = 0.0  # of recomputation in a micro-batch, by the rates above
    full_seconds: float = 0.0  # the same if layers kept nothing but their inputs

    def describe(self) -> str:
        num_unchecked = sum(operators is None for operators in self.kept.values())
        counts: Counter[str] = Counter()
        for operators in self.kept.values():
            counts.update(kind for kind, _ in operators or ())
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
    """Choose what each layer keeps, at most `budget` GiB at every moment.

    layers: of this rank, from `measure_layer_costs`. in_flight: the moments at which it keeps most.
    Raises ConfigError if the layers' inputs alone take more than the budget.
    """
    byte_budget = _ByteBudget(int(budget * GIB), in_flight)
    input_bytes: Counter[int] = Counter()
    for layer in layers:
        input_bytes[layer.stage] += layer.input_bytes
    if not byte_budget.try_reserve(input_bytes):
        needed_bytes = byte_budget.compute_peak(input_bytes)
        raise ConfigError(
            f"memory.activation_budget_gib: found {budget:g} GiB, expected at least"
            f" {needed_bytes / GIB:.3g}, which the layers' inputs take (checkpointing `full`);"
            " raise it, or make batch_size or max_seq_len smaller"
        )
    operators = [(layer, operator) for layer in layers for operator in layer.operators]
    choice = BudgetChoice(
        full_seconds=sum(
            layer.other_seconds + sum(operator.seconds for operator in layer.operators)
            for layer in layers
        )
    )
    choice.seconds = choice.full_seconds
    kept_by_layer: dict[str, set[tuple[str, int]]] = {layer.name: set() for layer in layers}
    # Most seconds saved a byte first. Sorting is stable: of equal ones an earlier layer's is first.
    operators.sort(key=lambda pair: -pair[1].seconds / pair[1].bytes)
    for layer, operator in operators:
        if byte_budget.try_reserve({layer.stage: operator.bytes}):
            kept_by_layer[layer.name].add(operator.key)
            choice.seconds -= operator.seconds
    choice.kept = {name: frozenset(keys) for name, keys in kept_by_layer.items()}
    # Bytes that are left go to whole layers, from the first on: one that fits keeps everything, and
    # is not checkpointed.
    for layer in layers:
        kept_keys = kept_by_layer[layer.name]
        kept_bytes = sum(
            operator.bytes for operator in layer.operators if operator.key in kept_keys
        )
        remaining_bytes = layer.unchecked_bytes - layer.input_bytes - kept_bytes
        if byte_budget.try_reserve({layer.stage: remaining_bytes}):
            choice.kept[layer.name] = None
            choice.seconds -= layer.other_seconds + sum(
                operator.seconds for operator in layer.operators if operator.key not in kept_keys
            )
    choice.bytes = byte_budget.compute_peak({})
    return choice


@dataclass
class _ByteBudget:
    """Bytes that the layers of each stage keep, within a limit at every moment."""

    limit: int  # bytes
    in_flight: MicroBatchesInFlight
    kept: Counter[int] = field(default_factory=Counter)  # stage -> bytes of one micro-batch

    def compute_peak(self, additional_bytes: dict[int, int]) -> int:
        """Return the most bytes that are kept at once, with additional ones.

        additional_bytes: stage -> bytes that it would keep of one micro-batch, besides `kept`.
        """
        stage_bytes = self.kept + Counter(additional_bytes)
        return max(
            (
                sum(
                    num_micro_batches * stage_bytes[stage]
                    for stage, num_micro_batches in moment.items()
                )
                for moment in self.in_flight
            ),
            default=0,
        )

    def try_reserve(self, additional_bytes: dict[int, int]) -> bool:
        """Add bytes to `kept` if they fit; return False, and change nothing, if they do not.

        additional_bytes: see `compute_peak`.
        """
        if self.compute_peak(additional_bytes) > self.limit:
            return False
        self.kept.update(additional_bytes)
        return True


# The kinds of operators whose results can be kept. An integer matmul is a kind of its own because
# `selective` checkpointing counts the MATMULs, of which it keeps every second.
MATMUL = "matmul"
INTEGER_MATMUL = "integer matmul"
ATTENTION = "attention"
SUM = "sum"  # over tensor-parallel ranks

# Operator's name -> kind. Names, because not every release of torch has all of these operators.
_KINDS = {
    "aten::mm": MATMUL,
    "aten::addmm": MATMUL,
    "aten::_scaled_mm": MATMUL,
    "aten::_int_mm": INTEGER_MATMUL,  # int32, twice as large as the bf16 that is made of it
    "aten::_scaled_dot_product_flash_attention": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": ATTENTION,
    "aten::_scaled_dot_product_fused_attention_overrideable": ATTENTION,
    "aten::_flash_attention_forward": ATTENTION,
    "aten::_efficient_attention_forward": ATTENTION,
    "torch_attn::_varlen_attn": ATTENTION,
    "flex_attention": ATTENTION,
    # Gathered tensors are none of these, and are never kept. Hidden states that are gathered over
    # tensor-parallel ranks are as large as those of all ranks, and parameters that FSDP gathers
    # (`c10d::`) would undo the sharding.
    "_c10d_functional::reduce_scatter_tensor": SUM,
    "_c10d_functional::all_reduce": SUM,
}

# Operators that multiply each expert's rows with its weight: torch's, and those of
# `recipe_lib.ops.mlp` for other dtypes than bf16.
GROUPED = frozenset(
    {
        "aten::_grouped_mm",
        "tune_recipes::grouped_matmul_loop",
        "tune_recipes::grouped_gradient_loop",
    }
)


def count_grouped_flops(args: Sequence[Any], result: Tensor) -> int:
    """Return the number of operations of a grouped matmul, an operator of GROUPED.

    args: its arguments. The first two are rows `[n, i]` and the experts' weights `[E, i, o]`; for
    the weight gradient they are two matrices with a dimension of rows. Each row counts once.
    """
    left, right = args[:2]
    if right.dim() == 2:  # the weight gradient, which sums over rows
        return 2 * int(right.shape[0]) * int(result.shape[-2]) * int(result.shape[-1])
    return 2 * left.numel() * int(right.shape[-1])


def get_operator_kind(operator: Any) -> str | None:
    """Return the kind of an operator that a dispatch mode sees; None: it is never kept."""
    # An overload's name is `aten::mm.default`; flex_attention is a higher-order operator.
    return _KINDS.get(
        operator.name().partition(".")[0]
        if isinstance(operator, torch._ops.OpOverload)
        else str(operator)
    )


# Bytes, at the most, that a GPU's attention kernel keeps as the state of its random numbers.
_RANDOM_STATE = 128


@dataclass
class _ForwardRecord:
    """The operators that one forward of a layer ran, and the storages that it kept."""

    # In the order of forward: (kind or None: cannot be kept, bytes of its results, seconds).
    operators: list[tuple[str | None, int, float]] = field(default_factory=list)
    # Number of operators that had begun when autograd saved its last tensor, where a recomputation
    # ends.
    needed: int = 0
    kept: dict[int, int] = field(default_factory=dict)  # address of a saved storage -> its bytes


class PipelineStages(Protocol):
    """The pipeline stages of this rank: which layers they run, and how many micro-batches wait."""

    layers: dict[int, range]  # stage -> the indices of its layers

    def list_in_flight(self, micro_batches: int) -> list[dict[int, int]]:
        """Return the moments of a step of so many micro-batches, see MicroBatchesInFlight."""


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
    """Measure the costs of a decoder's layers, in order, for micro-batches of `[b, s]` tokens.

    Nothing is computed: each kind of layer runs forward once, on the meta device.

    model: with adapters, sharding and MLP tiles as its layers will run, on any device. Its
    parameters are exchanged for meta tensors meanwhile. num_sequences, length: b and s.
    tensor_ranks, context_ranks: number of ranks that share the tokens of a micro-batch by tensor
    and by context parallelism. kernels: `cuda` or `cpu`; norms and attention of the two keep
    different tensors. pipeline: the stages whose layers are measured; None: all layers are one
    stage. fused: True if chains of operators run as one kernel, which keeps less
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
        _disable_current_modes(),  # those of a plan's simulation: this run is no part of its step
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
                # The first layer's input needs no gradient if the embedding is frozen.
                needs_grad = stage > 0 or index > 0 or trains_embedding
                hidden = torch.empty(
                    *shape, width, dtype=dtype, device="meta", requires_grad=needs_grad
                )
                key = (needs_grad, *_describe_layer(layer))
                if key not in records:
                    # Run by the trunk, which makes the rotations and masks that a layer is given.
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
    """Return a key that is equal for layers that compute and keep the same."""
    parameters = tuple(
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in layer.named_parameters()
    )
    # A partial, whose arguments hold the layer's window; no module, so repr(layer) lacks them.
    attend = getattr(getattr(layer, "self_attn", None), "attend", None)
    return repr(layer), parameters, repr(getattr(attend, "keywords", None))


def _build_layer_cost(name: str, stage: int, input_bytes: int, record: _ForwardRecord) -> LayerCost:
    counts: Counter[str] = Counter()
    operators = []
    other_seconds = 0.0
    for kind, num_bytes, seconds in record.operators[: record.needed]:
        if kind is None:
            other_seconds += seconds
            continue
        operators.append(Operator(kind, number=counts[kind], bytes=num_bytes, seconds=seconds))
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
    """Return a parameter like this one on the meta device, as a plain tensor or a DTensor.

    In a plan's simulation parameters are of another subclass of Tensor.
    """
    return nn.Parameter(_make_plain_meta(parameter.detach()), parameter.requires_grad)


def _make_plain_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = _make_plain_meta(tensor.to_local())
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _record_forward(layer: nn.Module, kernels: str) -> Iterator[_ForwardRecord]:
    """Record the forward that the layer runs inside the block.

    kernels: `cuda` or `cpu`, see `measure_layer_costs`.
    """
    record = _ForwardRecord()
    forward = layer.forward
    # `_cdata` is the address of the storage itself: on the meta device `data_ptr` is always 0.
    parameters = {_get_storage(parameter)._cdata for parameter in layer.parameters()}

    def run(hidden: Tensor, *arguments: Any) -> Any:
        # Rotations and masks are the same tensors for all layers: no layer's choice frees them.
        shared = parameters | {
            _get_storage(leaf)._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)
        }
        recorder = _OperatorRecorder(record)
        # What autograd saves. The layer drops what it computes again (`ops.kept_tensors`).
        saved: list[weakref.ref[Tensor]] = []

        def pack(tensor: Tensor) -> Tensor:
            record.needed = len(record.operators)
            saved_tensor = tensor.detach()
            saved.append(weakref.ref(saved_tensor))
            return saved_tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, _DeviceKernels(recorder, kernels), recorder:
            output = forward(hidden, *arguments)
        alive = [tensor for reference in saved if (tensor := reference()) is not None]
        for storage in map(_get_storage, alive):
            if storage._cdata not in shared:
                record.kept[storage._cdata] = storage.nbytes()
        return output

    layer.forward = run
    try:
        yield record
    finally:
        layer.forward = forward


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
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind = get_operator_kind(operator)
        written_bytes = sum(result.nbytes for result in results)
        moved_bytes = written_bytes + sum(tensor.nbytes for tensor in inputs)
        flops = _count_flops(operator, args=args, kwargs=kwargs or {}, output=output)
        seconds = max(flops / FLOPS, moved_bytes / (LINK if kind == SUM else BANDWIDTH))
        # A piece of a tiled MLP is computed again in any case.
        self.record.operators.append(
            (None if is_computing_piece() else kind, written_bytes, seconds)
        )
        return output


def _count_flops(operator: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the operations of an operator by torch's formulas; 0 for one without a formula."""
    if operator._schema.name in GROUPED:
        return count_grouped_flops(args, output)
    count = flop_registry.get(operator.overloadpacket)
    return int(count(*args, **kwargs, out_val=output)) if count else 0


class _DeviceKernels(TorchFunctionMode):
    """Runs attention, and for a GPU norms, as one kernel that keeps what the device's would.

    On the meta device torch would take other paths, which keep other tensors.
    """

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
            # Two products of 2 operations a pair and channel; half of the pairs are masked.
            return self._run(_Attention, (q, k, v), ATTENTION, 2 * pairs * q.shape[3])
        if function is F.rms_norm:
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
        """Run an autograd function on tensors, and record it as one operator.

        function: its forward returns (result, what else a kernel keeps). kind: of the operator;
        None: its result cannot be kept. flops: its operations.
        """
        record = self.recorder.record
        self.recorder.muted += 1
        try:
            out, statistics = function.apply(self.kernels, *tensors)
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
    """Return a tensor for log-sum-exps or a norm's factors, which kernels keep in fp32.

    For a tensor in fp64 they are in fp64.
    """
    return tensor.new_empty(shape, dtype=torch.promote_types(tensor.dtype, torch.float32))


class _Attention(torch.autograd.Function):
    """Keeps what a flash kernel keeps: q, k, v, its output, and log-sum-exps `[b, h, s]`."""

    @staticmethod
    def forward(ctx: Any, kernels: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        statistics = _make_statistics(q, *q.shape[:3])
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.mark_non_differentiable(statistics)
        return out, statistics


class _FusedNorm(torch.autograd.Function):
    """Keeps what a norm keeps: its input, on a GPU also its weight and a number for each token."""

    @staticmethod
    def forward(ctx: Any, kernels: str, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        statistics = _make_statistics(hidden, *hidden.shape[:-1], 1)
        # The node for a CPU (`ops.norm`) computes the number again, and has the parameter itself.
        ctx.save_for_backward(hidden, *((weight, statistics) if kernels != "cpu" else ()))
        ctx.mark_non_differentiable(statistics)
        return torch.empty_like(hidden), statistics
