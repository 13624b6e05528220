"""What each aten operator means for dimensions: which it keeps, unites, takes apart, sums over or blocks.

A rule gets a `Step` and returns the dimensions of each tensor that comes out. An operator without a rule is unknown:
whoever traces blocks all that it touches, which is always safe.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipe_lib.external.tensor_plan.axes import AxisNode, block, unify
from recipe_lib.external.tensor_plan.calls import tensors_in

Dims = list[AxisNode]
Rule = Callable[["OperatorCall"], list[Dims] | None]
RULES: dict[str, Rule] = {}


class OperatorCall:
    """One operator at work: its arguments by name, the dimensions of its inputs, and what it says besides its outputs.

    contractions: dimensions that it sums over, of which inputs. reductions: those of which it makes a sum or a mean,
    of which input. lookup: it picks rows by token. uniform: what comes out is the same everywhere, whatever its size.
    values: it differs from place to place, and no input has those places. ordered: it counts or sorts. added: what a
    product is added to. picked: the numbers within brackets, by place.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        place: str,
        dims: Callable[[torch.Tensor], Dims],
    ):
        self.function, self.place = function, place
        self.args, self.kwargs, self.outputs, self.dims = args, kwargs, outputs, dims
        self.name = str(function._schema.name).removeprefix("aten::")
        self.reason = f"{self.name} in {place}"
        self.contractions: list[tuple[AxisNode, torch.Tensor, torch.Tensor]] = []
        self.reductions: list[tuple[AxisNode, torch.Tensor]] = []
        self.lookup = self.uniform = self.values = self.ordered = False
        self.added: torch.Tensor | None = None
        self.picked: dict[str, Any] = {}
        self._schema = function._schema.arguments

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by the name that the operator's schema gives it."""
        if name in self.kwargs:
            return self.kwargs[name]
        for number, argument in enumerate(self._schema):
            if argument.name == name:
                if number < len(self.args):
                    return self.args[number]
                return argument.default_value if argument.has_default_value() else default
        return default

    def first(self) -> torch.Tensor:
        """The first tensor argument."""
        return next(tensors_in((self.args, self.kwargs)))

    def shape(self) -> list[int]:
        """The sizes of the first output."""
        return list(self.outputs[0].shape)

    def contract(self, left: AxisNode, right: AxisNode, left_tensor: torch.Tensor, right_tensor: torch.Tensor) -> None:
        """Sums over a dimension that both tensors have."""
        unify(left, right, self.reason)
        self.contractions.append((left, left_tensor, right_tensor))

    def join(self, left: AxisNode, right: AxisNode) -> AxisNode:
        """The dimension that comes of two under broadcasting."""
        if left.size == 1:
            return right
        if right.size != 1:
            unify(left, right, self.reason)
        return left

    def fresh(self, sizes: Sequence[int], blocked: bool = False) -> Dims:
        """New dimensions, of which nothing is known, or which cannot be cut."""
        return [AxisNode(size, blocked=self.reason if blocked else "") for size in sizes]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators by their names without namespace and overload."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def broadcast(step: OperatorCall, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> Dims:
    """The dimensions of tensors that come together element by element."""
    found: Dims = [AxisNode(1) for _ in shape]
    for tensor in tensors:
        dims = step.dims(tensor)
        offset = len(shape) - len(dims)
        for number, node in enumerate(dims):
            if shape[offset + number] == node.size:
                found[offset + number] = step.join(found[offset + number], node)
    for number, size in enumerate(shape):
        if found[number].size != size:  # no input has it
            found[number] = AxisNode(size)
    return found


def rule_of(function: Any) -> Rule | None:
    """The rule of an operator, or None."""
    name = str(function._schema.name)
    found = RULES.get(name.removeprefix("aten::"))
    if found is None and torch.Tag.pointwise in function.tags:
        return elementwise
    return found


@rule(*"_to_copy clone detach alias lift lift_fresh lift_fresh_copy copy copy_ contiguous dropout relu_ prelu".split())
@rule(
    *"native_dropout _fused_dropout floor_divide floor_divide_ masked_fill masked_fill_ where lerp fill_ zero_".split()
)
@rule(
    *"bernoulli bernoulli_ nan_to_num _conj _conj_physical normal_ uniform_ rand_like addcmul addcdiv isfinite".split()
)
@rule("_prelu_kernel", "rrelu_with_noise")
def elementwise(step: OperatorCall) -> list[Dims] | None:
    """Any operator that works element by element, under broadcasting."""
    tensors = list(tensors_in((step.args, step.kwargs)))
    step.uniform = step.name in ("fill_", "zero_")
    if step.name in ("prelu", "_prelu_kernel"):  # one weight per channel, which is the second dimension
        tensors = tensors[:1] if tensors[1].numel() == 1 else tensors
    shape = step.shape()
    dims = broadcast(step, tensors, shape)
    return [dims for _ in step.outputs]


@rule(*"zeros ones full empty empty_strided scalar_tensor zeros_like ones_like full_like empty_like".split())
@rule(*"new_zeros new_ones new_full new_empty new_empty_strided zeros_like ones_like full_like empty_like".split())
@rule(*"zeros ones full empty empty_strided scalar_tensor".split())
def uniform(step: OperatorCall) -> list[Dims]:
    """One value everywhere."""
    step.uniform = True
    if step.name.endswith("_like"):
        return [list(step.dims(step.first()))]
    return [step.fresh(step.shape())]


@rule(*"arange eye rand randn randint linspace logspace tril_indices triu_indices randperm randn_like".split())
@rule(*"histc bincount nonzero nonzero_numpy _unique2 unique_consecutive _local_scalar_dense".split())
def values(step: OperatorCall) -> list[Dims]:
    """New values, no element of which belongs to an element of an input."""
    step.values = True
    for tensor in tensors_in((step.args, step.kwargs)):
        _block_all(step, tensor)
    return [step.fresh(out.shape) for out in step.outputs]


def _block_all(step: OperatorCall, tensor: torch.Tensor) -> None:
    for node in step.dims(tensor):
        block(node, step.reason)


@rule(*"mean sum amax amin any all prod var std norm linalg_vector_norm logsumexp argmax argmin max min".split())
@rule(*"median nanmedian var_mean std_mean aminmax mode kthvalue count_nonzero nansum".split())
def reduction(step: OperatorCall) -> list[Dims]:
    """Dimensions that become one element are blocked, but for sums and means, which ranks can put together."""
    step.ordered = True
    tensor = step.first()
    dims = step.dims(tensor)
    over = step.get("dim")
    numbers = range(len(dims)) if over is None or over == [] else [over] if isinstance(over, int) else over
    gone = {number % max(len(dims), 1) for number in numbers}
    linear = step.name in ("mean", "sum") and len(gone) < len(dims) and tensor.is_floating_point()
    for number in gone if dims else ():
        if linear:
            step.reductions.append((dims[number], tensor))
        else:
            block(dims[number], step.reason)
    kept = len(step.shape()) == len(dims)
    found = [AxisNode(1) if number in gone else node for number, node in enumerate(dims) if kept or number not in gone]
    return [list(found) for _ in step.outputs]


@rule(*"_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp cummax cummin flip".split())
@rule(*"sort argsort topk roll cumsum_ renorm _weight_norm_interface".split())
def along(step: OperatorCall) -> list[Dims]:
    """What an element becomes depends on its neighbors along some dimensions: these are blocked."""
    step.ordered = True
    tensor = step.first()
    dims = list(step.dims(tensor))
    over = step.get("dim", step.get("dims"))
    numbers = [over] if isinstance(over, int) else over or list(range(len(dims)))
    for number in numbers:
        block(dims[number], step.reason)
    found = []
    for out in step.outputs:
        found.append(
            [
                node if node.size == size else step.fresh([size], True)[0]
                for node, size in zip(dims, out.shape, strict=True)
            ]
        )
    return found


@rule("tril", "triu", "tril_", "triu_")
def triangle(step: OperatorCall) -> list[Dims]:
    """Depends on the place within the last two dimensions."""
    dims = list(step.dims(step.first()))
    for node in dims[-2:]:
        block(node, step.reason)
    return [dims]


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def normalization(step: OperatorCall) -> list[Dims]:
    """Statistics over the last dimensions, which a weight and a bias share."""
    dims = list(step.dims(step.get("input")))
    count = len(step.get("normalized_shape"))
    for node in dims[len(dims) - count :]:
        block(node, step.reason)
    for name in ("weight", "bias"):
        if step.get(name) is not None:
            broadcast(step, [step.get(name), step.get("input")], step.get("input").shape)
    statistics = dims[: len(dims) - count] + [AxisNode(1)] * count
    return [dims if number == 0 else list(statistics) for number in range(len(step.outputs))]


@rule("native_group_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit")
def group_normalization(step: OperatorCall) -> list[Dims]:
    """Statistics over channels and places."""
    for tensor in tensors_in((step.args, step.kwargs)):
        _block_all(step, tensor)
    return [step.fresh(out.shape, True) for out in step.outputs]


@rule(
    "mm", "bmm", "mv", "dot", "matmul", "addmm", "baddbmm", "addmv", "linear", "_int_mm", "addmm_", "baddbmm_", "addbmm"
)
def matrix_product(step: OperatorCall) -> list[Dims] | None:
    """Sums over the last dimension of the left operand; a batch is shared."""
    tensors = list(tensors_in((step.args, step.kwargs)))
    added = tensors.pop(0) if step.name.startswith(("addm", "badd")) else None
    if len(tensors) < 2 or step.name == "addbmm":
        return None
    left, right = tensors[:2]
    ours, theirs = list(step.dims(left)), list(step.dims(right))
    if step.name == "linear":
        theirs = theirs[::-1]
        added = tensors[2] if len(tensors) > 2 else None
    if min(len(ours), len(theirs)) > 2 and len(ours) != len(theirs):
        return None
    step.contract(ours[-1], theirs[-2] if len(theirs) > 1 else theirs[0], left, right)
    batch = [step.join(one, other) for one, other in zip(ours[:-2], theirs[:-2], strict=False)]
    longer = ours if len(ours) >= len(theirs) else theirs
    batch = batch if len(batch) == len(longer) - 2 else longer[: max(len(longer) - 2, 0)]
    found = [*batch, *(ours[-2:-1] if len(ours) > 1 else []), *(theirs[-1:] if len(theirs) > 1 else [])]
    step.added = added
    if added is not None and [node.size for node in found] == step.shape():
        offset = len(found) - added.dim()
        for number, node in enumerate(step.dims(added)):
            step.join(found[offset + number], node)
    return [found]


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_product(step: OperatorCall) -> list[Dims] | None:
    """Rows sorted by group times the matrix of their group: [rows, k] x [groups, k, n]."""
    rows, matrices = list(tensors_in(step.args))[:2]
    ours, theirs = step.dims(rows), step.dims(matrices)
    if len(ours) != 2 or len(theirs) != 3:
        return None
    block(theirs[0], step.reason)
    step.contract(ours[1], theirs[1], rows, matrices)
    return [[ours[0], theirs[2]]]


@rule("embedding")
def embedding(step: OperatorCall) -> list[Dims]:
    """Rows of a matrix by number."""
    weight, numbers = step.get("weight"), step.get("indices")
    step.lookup = True
    return [[*step.dims(numbers), step.dims(weight)[1]]]


@rule("convolution")
def convolution(step: OperatorCall) -> list[Dims] | None:
    """Mixes channels unless each has its own kernel (depthwise); places are blocked."""
    data, weight, bias = step.get("input"), step.get("weight"), step.get("bias")
    ours, kernel = step.dims(data), step.dims(weight)
    for node in (*ours[2:], *kernel[2:]):
        block(node, step.reason)
    if step.get("transposed"):
        return None
    channels = kernel[0]
    if step.get("groups") == 1:
        step.contract(ours[1], kernel[1], data, weight)
    elif step.get("groups") == ours[1].size == kernel[0].size:
        channels = step.join(ours[1], kernel[0])
    else:
        block(ours[1], step.reason)
        block(kernel[0], step.reason)
    if bias is not None:
        step.join(channels, step.dims(bias)[0])
    return [[ours[0], channels, *step.fresh(step.shape()[2:], True)]]
