"""Define for each aten operator a rule: what it does to the dimensions of its tensors.

A dimension is an `AxisNode`; dimensions that are united are one axis, which ranks may share. A rule
unites dimensions, takes them apart, notes which are summed over, and blocks those that no rank can
compute a part of. `tracing` asks `find_rule` for the rule of each operator of a forward. What an
operator without a rule touches is blocked by `tracing`, which is always safe.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from recipe_lib.external.tensor_plan.axes import (
    AxisNode,
    block,
    cut,
    make_concatenation,
    make_product,
    regroup,
    unify,
)
from recipe_lib.external.tensor_plan.forward_trace import Dims, OperatorCall, Rule, get_short_name
from recipe_lib.ops.kept_tensors import list_tensors

RULES: dict[str, Rule] = {}  # name of an operator -> its rule; `register_rule` fills it


# A rule gets the call of an operator (`step`), writes what it finds into the fields of `step`, and
# returns the dimensions of each result; None: the operator is treated as one without a rule.


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule by names without namespace and overload."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def broadcast(step: OperatorCall, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> Dims:
    """Unite the dimensions of tensors that are combined element by element, and return them.

    shape: the common shape, as torch broadcasts the tensors to it.
    """
    joined_dims: Dims = [AxisNode(1) for _ in shape]
    for tensor in tensors:
        dims = step.get_dims(tensor)
        offset = len(shape) - len(dims)
        for dim, node in enumerate(dims):
            if shape[offset + dim] == node.size:
                joined_dims[offset + dim] = step.join(joined_dims[offset + dim], node)
    # A dimension that no input has is new.
    return [
        node if node.size == size else AxisNode(size)
        for node, size in zip(joined_dims, shape, strict=True)
    ]


def find_rule(function: Any) -> Rule | None:
    """Return the rule of an operator (an `OpOverload`), None if it has none."""
    registered = RULES.get(get_short_name(function))
    # Every operator that torch itself marks as pointwise needs no entry.
    if registered is None and torch.Tag.pointwise in function.tags:
        return trace_elementwise
    return registered


@register_rule(
    *"_to_copy clone detach alias lift lift_fresh lift_fresh_copy copy copy_ contiguous dropout"
    " relu_ prelu".split()
)
@register_rule(
    *"native_dropout _fused_dropout floor_divide floor_divide_ masked_fill masked_fill_ where lerp"
    " fill_ zero_".split()
)
@register_rule(
    *"bernoulli bernoulli_ nan_to_num _conj _conj_physical normal_ uniform_ rand_like addcmul"
    " addcdiv isfinite".split()
)
@register_rule("_prelu_kernel", "rrelu_with_noise")
def trace_elementwise(step: OperatorCall) -> list[Dims] | None:
    """Trace any operator that works element by element, under broadcasting."""
    tensors = list(list_tensors((step.args, step.kwargs)))
    step.is_uniform = step.name in ("fill_", "zero_")
    if step.name in ("prelu", "_prelu_kernel"):
        # One weight per channel, which is the second dimension.
        tensors = tensors[:1] if tensors[1].numel() == 1 else tensors
    dims = broadcast(step, tensors, step.get_shape())
    return [dims for _ in step.results]


@register_rule(
    *"zeros ones full empty empty_strided scalar_tensor zeros_like ones_like full_like empty_like"
    " new_zeros new_ones new_full new_empty new_empty_strided".split()
)
def trace_uniform(step: OperatorCall) -> list[Dims]:
    """Trace an operator that fills its result with one value: any part of it is like the whole."""
    step.is_uniform = True
    if step.name.endswith("_like"):
        return [list(step.get_dims(step.get_first_tensor()))]
    return [step.make_dims(step.get_shape())]


@register_rule(
    *"arange eye rand randn randint linspace logspace tril_indices triu_indices randperm"
    " randn_like".split()
)
@register_rule(
    *"histc bincount nonzero nonzero_numpy _unique2 unique_consecutive _local_scalar_dense".split()
)
def trace_values(step: OperatorCall) -> list[Dims]:
    """Trace an operator whose results do not correspond to its inputs element by element."""
    step.makes_values = True
    for tensor in list_tensors((step.args, step.kwargs)):
        block(step.reason, *step.get_dims(tensor))
    return [step.make_dims(out.shape) for out in step.results]


@register_rule(
    *"mean sum amax amin any all prod var std norm linalg_vector_norm logsumexp argmax argmin"
    " max min".split()
)
@register_rule(
    *"median nanmedian var_mean std_mean aminmax mode kthvalue count_nonzero nansum".split()
)
def trace_reduction(step: OperatorCall) -> list[Dims]:
    """Trace a reduction. The dimensions that it reduces are blocked.

    Those of sums and means are noted instead: ranks can add up what each of them has.
    """
    step.mixes_elements = True
    tensor = step.get_first_tensor()
    dims = step.get_dims(tensor)
    gone = _list_given_dims(step, len(dims))
    linear = step.name in ("mean", "sum") and len(gone) < len(dims) and tensor.is_floating_point()
    for dim in gone if dims else ():
        if linear:
            step.reductions.append((dims[dim], step.get_traced(tensor)))
        else:
            block(step.reason, dims[dim])
    keepdim = len(step.get_shape()) == len(dims)
    output_dims = [
        AxisNode(1) if dim in gone else node
        for dim, node in enumerate(dims)
        if keepdim or dim not in gone
    ]
    return [list(output_dims) for _ in step.results]


def _list_given_dims(step: OperatorCall, count: int) -> set[int]:
    """Return the `dim` argument as numbers from 0. Without one, it is all `count` dimensions."""
    argument = step.get_arg("dim")
    dims = [argument] if isinstance(argument, int) else argument or range(count)
    return {dim % max(count, 1) for dim in dims}


@register_rule(
    *"_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp cummax"
    " cummin flip".split()
)
@register_rule(
    *"sort argsort topk roll cumsum_ renorm _weight_norm_interface tril triu tril_ triu_".split()
)
@register_rule("constant_pad_nd", "reflection_pad1d", "replication_pad1d")
def trace_along(step: OperatorCall) -> list[Dims]:
    """Trace an operator that works along some dimensions, and block these.

    An element of the result depends there on its neighbors, or on where it lies.
    """
    dims = list(step.get_dims(step.get_first_tensor()))
    step.mixes_elements = not step.name.startswith(("tri", "constant_pad"))
    argument = step.get_arg("dim", step.get_arg("dims"))
    along = [argument] if isinstance(argument, int) else argument or list(range(len(dims)))
    if step.name.startswith("tri"):
        along = [-2, -1]
    elif "_pad" in step.name:
        along = [dim for dim, size in enumerate(step.get_shape()) if size != dims[dim].size]
    block(step.reason, *(dims[dim] for dim in along))
    return [_keep_equal_dims(step, dims, out) for out in step.results]


def _keep_equal_dims(step: OperatorCall, dims: Dims, out: torch.Tensor) -> Dims:
    """Return dimensions of a result: the input's where sizes are equal, new blocked ones elsewhere.

    out: the result.
    """
    return [
        node if node.size == size else step.make_dims([size], True)[0]
        for node, size in zip(dims, out.shape, strict=True)
    ]


@register_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def trace_normalization(step: OperatorCall) -> list[Dims]:
    """Trace a norm: the last dimensions, over which it takes statistics, are blocked.

    The statistics are results, too, with one element in these dimensions.
    """
    dims = list(step.get_dims(step.get_arg("input")))
    count = len(step.get_arg("normalized_shape"))
    block(step.reason, *dims[len(dims) - count :])
    for name in ("weight", "bias"):
        if step.get_arg(name) is not None:
            broadcast(step, [step.get_arg(name), step.get_arg("input")], step.get_shape())
    statistics = dims[: len(dims) - count] + [AxisNode(1)] * count
    return [dims if index == 0 else list(statistics) for index in range(len(step.results))]


@register_rule(
    *"mm bmm mv dot matmul addmm baddbmm addmv linear _int_mm addmm_ baddbmm_ addbmm".split()
)
def trace_matrix_product(step: OperatorCall) -> list[Dims] | None:
    """Trace `[..., n, k] x [..., k, m]`, which sums over k; an addend is joined to the result."""
    tensors = list(list_tensors((step.args, step.kwargs)))
    # `addmm` and `baddbmm` take the addend first, `linear` last.
    added = tensors.pop(0) if step.name.startswith(("addm", "badd")) else None
    if len(tensors) < 2 or step.name == "addbmm":  # addbmm sums over the batch, too
        return None
    left, right = tensors[:2]
    left_dims, right_dims = map(step.get_dims, (left, right))
    if step.name == "linear":
        right_dims = right_dims[::-1]
        added = tensors[2] if len(tensors) > 2 else None
    if min(len(left_dims), len(right_dims)) > 2 and len(left_dims) != len(right_dims):
        return None
    rows = right_dims[-2] if len(right_dims) > 1 else right_dims[0]
    step.add_contraction(left_dims[-1], right=rows, left_tensor=left, right_tensor=right)
    batch = [
        step.join(left_node, right_node)
        for left_node, right_node in zip(left_dims[:-2], right_dims[:-2], strict=False)
    ]
    # An operand without batch dimensions meets the other's.
    longer = left_dims if len(left_dims) >= len(right_dims) else right_dims
    batch = batch if len(batch) == len(longer) - 2 else longer[: max(len(longer) - 2, 0)]
    product_dims = [
        *batch,
        *(left_dims[-2:-1] if len(left_dims) > 1 else []),
        *(right_dims[-1:] if len(right_dims) > 1 else []),
    ]
    step.added = None if added is None else step.get_traced(added)
    if added is not None and [node.size for node in product_dims] == step.get_shape():
        offset = len(product_dims) - added.dim()
        for dim, node in enumerate(step.get_dims(added)):
            step.join(product_dims[offset + dim], node)
    return [product_dims]


@register_rule(
    "_grouped_mm", "transformers::grouped_mm_fallback", "tune_recipes::grouped_matmul_loop"
)
def trace_grouped_product(step: OperatorCall) -> list[Dims] | None:
    """Trace rows, sorted by group, times their group's matrix: `[rows, k] x [groups, k, n]`."""
    rows, matrices = list(list_tensors(step.args))[:2]
    row_dims, matrix_dims = map(step.get_dims, (rows, matrices))
    if len(row_dims) != 2 or len(matrix_dims) != 3:
        return None
    block(step.reason, matrix_dims[0])
    step.add_contraction(row_dims[1], right=matrix_dims[1], left_tensor=rows, right_tensor=matrices)
    return [[row_dims[0], matrix_dims[2]]]


@register_rule("embedding")
def trace_embedding(step: OperatorCall) -> list[Dims]:
    """Trace a look-up: rows of a matrix that are picked by number."""
    step.is_lookup = True
    return [[*step.get_dims(step.get_arg("indices")), step.get_dims(step.get_arg("weight"))[1]]]


@register_rule("convolution")
def trace_convolution(step: OperatorCall) -> list[Dims] | None:
    """Trace a convolution of `[b, channels, ...]`; the dimensions that it slides over are blocked.

    It sums over channels, unless each channel has its own kernel (depthwise). Channels in groups
    are blocked.
    """
    data, weight, bias = map(step.get_arg, ("input", "weight", "bias"))
    data_dims, kernel_dims = map(step.get_dims, (data, weight))
    block(step.reason, *data_dims[2:], *kernel_dims[2:])
    if step.get_arg("transposed"):
        return None
    channels = kernel_dims[0]
    if step.get_arg("groups") == 1:
        step.add_contraction(
            data_dims[1], right=kernel_dims[1], left_tensor=data, right_tensor=weight
        )
    elif step.get_arg("groups") == data_dims[1].size == kernel_dims[0].size:
        channels = step.join(data_dims[1], kernel_dims[0])
    else:
        block(step.reason, data_dims[1], kernel_dims[0])
    if bias is not None:
        step.join(channels, step.get_dims(bias)[0])
    return [[data_dims[0], channels, *step.make_dims(step.get_shape()[2:], True)]]


# Rules of operators that move elements: views, slices, concatenations, picks by number. At the end
# stands fused attention.


@register_rule(
    "view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy", "flatten", "unflatten"
)
def trace_view(step: OperatorCall) -> list[Dims] | None:
    """Trace the same elements in another shape: dimensions are joined and taken apart."""
    tensor = step.get_first_tensor()
    if tensor.shape == step.results[0].shape:
        return [list(step.get_dims(tensor))]
    if not tensor.numel():
        return None
    dims = list(step.get_dims(tensor))
    sizes = step.get_shape()
    viewed: Dims = []
    while dims or sizes:  # the shortest groups, from the front, whose products agree
        old = [dims.pop(0)] if dims else []
        new = [sizes.pop(0)] if sizes else []
        while (elements := prod(node.size for node in old)) != prod(new):
            if elements < prod(new):
                old.append(dims.pop(0))
            else:
                new.append(sizes.pop(0))
        viewed += old if len(old) == len(new) == 1 else regroup(old, new, step.reason)
    return [viewed]


@register_rule("t", "transpose", "permute", "numpy_T", "adjoint", "transpose_", "t_")
def trace_permutation(step: OperatorCall) -> list[Dims]:
    """Trace dimensions in another order."""
    dims = list(step.get_dims(step.get_first_tensor()))
    if step.name in ("transpose", "transpose_"):
        first, second = map(step.get_arg, ("dim0", "dim1"))
        if dims:
            dims[first], dims[second] = dims[second], dims[first]
        return [dims]
    if step.name == "permute":
        return [[dims[number] for number in step.get_arg("dims")]]
    return [dims[::-1]]


@register_rule("expand", "expand_copy")
def trace_expand(step: OperatorCall) -> list[Dims]:
    """Trace an expansion: a dimension that becomes longer, or comes in front, is a new one."""
    return [broadcast(step, [step.get_first_tensor()], step.get_shape())]


@register_rule("unsqueeze", "squeeze", "unsqueeze_", "squeeze_")
def trace_squeeze(step: OperatorCall) -> list[Dims]:
    """Trace dimensions of one element that are added or removed."""
    dims = list(step.get_dims(step.get_first_tensor()))
    if step.name.startswith("unsqueeze"):
        dims.insert(step.get_arg("dim") % (len(dims) + 1), AxisNode(1))
        return [dims]
    # An empty list of dimensions removes none, no list at all removes every one of size 1.
    removable = set() if step.get_arg("dim") == [] else _list_given_dims(step, len(dims))
    return [[node for dim, node in enumerate(dims) if dim not in removable or node.size != 1]]


@register_rule("slice", "narrow")
def trace_slice(step: OperatorCall) -> list[Dims]:
    """Trace a slice of one dimension: it cuts the dimension into parts, of which it keeps one."""
    dims = list(step.get_dims(step.get_first_tensor()))
    sliced_dim = step.get_arg("dim", 0) % len(dims)
    size = dims[sliced_dim].size
    length = step.get_shape()[sliced_dim]
    if length == size:
        return [dims]
    stride = step.get_arg("step", 1)
    start = step.get_arg("start") or 0
    if stride > 1 and size % stride == 0 and 0 <= start < stride and length == size // stride:
        # Such as `x[..., ::2]` of a gate and an up projection that alternate.
        dims[sliced_dim], within = regroup([dims[sliced_dim]], [length, stride], step.reason)
        block(step.reason, within)
        return [dims]
    if stride != 1 or not length:
        block(step.reason, dims[sliced_dim])
        dims[sliced_dim] = step.make_dims([length], True)[0]
        return [dims]
    start = max(start + size, 0) if start < 0 else start
    pieces = cut(dims[sliced_dim], [start, length, size - start - length], step.reason)
    # `cut` leaves out parts without elements.
    dims[sliced_dim] = pieces[1 if start else 0]
    return [dims]


@register_rule(
    *"split split_with_sizes chunk unbind select tensor_split split_copy"
    " split_with_sizes_copy".split()
)
def trace_split(step: OperatorCall) -> list[Dims]:
    """Trace a dimension that is cut into several; picks of single elements (`unbind`) block it."""
    dims = list(step.get_dims(step.get_first_tensor()))
    split_dim = step.get_arg("dim", 0) % len(dims)
    if step.name in ("unbind", "select"):
        block(step.reason, dims[split_dim])
        return [dims[:split_dim] + dims[split_dim + 1 :] for _ in step.results]
    lengths = [out.shape[split_dim] for out in step.results]
    if not all(lengths):
        block(step.reason, dims[split_dim])
        return [
            [*dims[:split_dim], *step.make_dims([length], True), *dims[split_dim + 1 :]]
            for length in lengths
        ]
    return [
        [*dims[:split_dim], piece, *dims[split_dim + 1 :]]
        for piece in cut(dims[split_dim], lengths, step.reason)
    ]


@register_rule("cat", "stack", "concat")
def trace_cat(step: OperatorCall) -> list[Dims]:
    """Trace tensors put together along a dimension they have (`cat`) or a new one (`stack`)."""
    # torch ignores tensors of shape [0] here, whatever the shape of the others.
    tensors = [
        tensor for tensor in list_tensors(step.args[0]) if tensor.numel() or tensor.dim() > 1
    ]
    shape = step.get_shape()
    cat_dim = step.get_arg("dim", 0) % len(shape)
    dims_by_tensor = [list(step.get_dims(tensor)) for tensor in tensors]
    if step.name == "stack":
        joined = AxisNode(shape[cat_dim], blocked=step.reason)
        for dims in dims_by_tensor:
            dims.insert(cat_dim, joined)
    else:
        joined = make_concatenation(dims[cat_dim] for dims in dims_by_tensor)
    output_dims = dims_by_tensor[0]
    for dims in dims_by_tensor[1:]:
        for dim, node in enumerate(dims):
            if dim != cat_dim:
                unify(output_dims[dim], node, step.reason)
    output_dims[cat_dim] = joined
    return [output_dims]


@register_rule("repeat")
def trace_repeat(step: OperatorCall) -> list[Dims]:
    """Trace `Tensor.repeat`: a dimension becomes (copies x itself), copies outermost."""
    repeats = step.get_arg("repeats")
    dims = list(step.get_dims(step.get_first_tensor()))
    dims = [AxisNode(1)] * (len(repeats) - len(dims)) + dims
    return [
        [make_product([AxisNode(times), node]) for times, node in zip(repeats, dims, strict=True)]
    ]


@register_rule(
    *"unfold as_strided diagonal view_as_real view_as_complex diagonal_copy diag_embed".split()
)
@register_rule(
    *"native_group_norm native_batch_norm _native_batch_norm_legit_no_training"
    " _native_batch_norm_legit".split()
)
def trace_opaque(step: OperatorCall) -> list[Dims]:
    """Block all dimensions of an operator that is not followed.

    Only views of known kinds keep the first dimensions, as long as their sizes stay.
    """
    shape = step.get_shape()
    dims = list(step.get_dims(step.get_first_tensor()))
    keeps_some = step.name in ("view_as_real", "view_as_complex", "unfold")
    kept = 0  # how many
    while keeps_some and kept < min(len(dims), len(shape)) and dims[kept].size == shape[kept]:
        if step.name == "unfold" and kept == step.get_arg("dimension") % len(dims):
            break
        kept += 1
    block(step.reason, *dims[kept:], *(node for other in step.inputs[1:] for node in other.dims))
    return [dims[:kept] + step.make_dims(out.shape[kept:], True) for out in step.results]


@register_rule(
    "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"
)
def trace_index(step: OperatorCall) -> list[Dims]:
    """Trace `x[indices]`, or a write there; the dimensions that are indexed are blocked.

    An index is a mask, which stands for as many dimensions as it has, or numbers, which stand for
    one. Indices of neighboring dimensions leave their common shape there, others leave it in front.
    """
    dims = list(step.get_dims(step.get_first_tensor()))
    indices = list(step.get_arg("indices"))  # None: a dimension that is not indexed
    single = _find_negative_pick(step, indices)
    if single is not None:
        single_dim, element = single
        start = dims[single_dim].size + element
        dims[single_dim] = cut(dims[single_dim], [start, 1, -element - 1], step.reason)[
            1 if start else 0
        ]
        return [dims]
    indexed = []  # numbers of the dimensions that are indexed
    dim = 0
    shapes = []
    for index in indices:
        count = 1
        if index is not None:
            count = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
            indexed += list(range(dim, dim + count))
            # A mask gives one dimension, of any size; 3 stands for it, only the length counts.
            shapes.append((3,) if count > 1 or index.dtype is torch.bool else tuple(index.shape))
        dim += count
    block(step.reason, *(dims[number] for number in indexed))
    has_mask = any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices
    )
    given = [index for index in indices if index is not None]
    kept = [node for number, node in enumerate(dims) if number not in indexed]
    # Where the dimensions of the indices lie in the result.
    first = indexed[0] if indexed and indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    target = step.get_arg("values") if "put" in step.name else step.results[0]
    count = len(torch.broadcast_shapes(*shapes)) if given and not has_mask else 1
    if "put" in step.name:
        put_dims = [*kept[:first], *(AxisNode(1) for _ in range(count)), *kept[first:]]
        offset = len(put_dims) - target.dim()
        for number, node in enumerate(step.get_dims(target)):
            if number + offset >= 0 and node.size == put_dims[number + offset].size:
                step.join(put_dims[number + offset], node)
        return [dims]
    index_shape = list(target.shape[first : first + count])
    index_dims = step.make_dims(index_shape) if has_mask else broadcast(step, given, index_shape)
    return [[*kept[:first], *index_dims, *kept[first:]]]


def _find_negative_pick(
    step: OperatorCall, indices: list[torch.Tensor | None]
) -> tuple[int, int] | None:
    """Return (dimension, index) of `x[..., [-1], :]`, which is a slice of one element.

    None for other indices. indices: one for each dimension, None for a dimension without.
    """
    indexed_dims = [dim for dim, index in enumerate(indices) if index is not None]
    # A place such as `1.1.0`: an item of a list within the brackets.
    listed = [
        value
        for place, value in step.picked.items()
        if place.count(".") == 2 and isinstance(value, int)
    ]
    if "put" in step.name or len(indexed_dims) != 1 or len(listed) != 1 or listed[0] >= 0:
        return None
    index = indices[indexed_dims[0]]
    return (
        (indexed_dims[0], listed[0]) if index is not None and tuple(index.shape) == (1,) else None
    )


@register_rule(
    *"index_select index_add index_add_ index_copy index_copy_ index_fill index_fill_".split()
)
def trace_index_along(step: OperatorCall) -> list[Dims]:
    """Trace slices that are picked, or written, by number along one dimension, which is blocked."""
    dims = list(step.get_dims(step.get_first_tensor()))
    indexed_dim = step.get_arg("dim") % max(len(dims), 1)
    block(step.reason, dims[indexed_dim])
    if step.name == "index_select":
        dims[indexed_dim] = step.get_dims(step.get_arg("index"))[0]
        return [dims]
    source = step.get_arg("source")
    for dim, node in enumerate(step.get_dims(source) if source is not None else ()):
        if dim != indexed_dim:
            unify(dims[dim], node, step.reason)
    return [dims]


@register_rule(
    *"gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split()
)
def trace_gather(step: OperatorCall) -> list[Dims]:
    """Trace elements that are picked, or written, by an index tensor along one dimension.

    That dimension is blocked; the index has the others, too.
    """
    dims = list(step.get_dims(step.get_first_tensor()))
    indexed_dim = step.get_arg("dim") % max(len(dims), 1)
    block(step.reason, dims[indexed_dim])
    dims_by_tensor = [
        step.get_dims(tensor)
        for tensor in (step.get_arg("index"), step.get_arg("src"))
        if isinstance(tensor, torch.Tensor)
    ]
    for tensor_dims in dims_by_tensor:
        for dim, node in enumerate(tensor_dims):
            if dim == indexed_dim:
                block(step.reason, node)
            elif node.size == dims[dim].size:
                unify(dims[dim], node, step.reason)
            else:
                block(step.reason, dims[dim], node)
    return [dims_by_tensor[0] if step.name == "gather" else dims]


@register_rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@register_rule(
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "scaled_dot_product_attention",
)
@register_rule(
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math"
)
def trace_attention(step: OperatorCall) -> list[Dims]:
    """Trace softmax(q k^T) v over `[b, heads, s, head width]`: it sums over s and the width.

    There may be fewer heads of keys and values than of queries: each serves a group of these.
    """
    query, key, value = map(step.get_arg, ("query", "key", "value"))
    query_dims, key_dims, value_dims = map(step.get_dims, (query, key, value))
    group_size = query.shape[-3] // key.shape[-3]
    for dims in (key_dims, value_dims):
        for query_batch, batch in zip(query_dims[:-3], dims[:-3], strict=True):
            step.join(query_batch, batch)
        unify(query_dims[-3], make_product([dims[-3], AxisNode(group_size)]), step.reason)
    unify(key_dims[-2], value_dims[-2], step.reason)
    block(step.reason, query_dims[-1], key_dims[-1], key_dims[-2], query_dims[-2])
    unify(query_dims[-1], key_dims[-1], step.reason)
    mask = step.get_arg("attn_mask", step.get_arg("attn_bias"))
    if mask is not None:
        broadcast(step, [mask], [*(node.size for node in query_dims[:-1]), key_dims[-2].size])
        offset = len(query_dims) - mask.dim()
        for dim, node in enumerate(step.get_dims(mask)[:-2]):
            step.join(query_dims[offset + dim], node)
    output_dims: list[Dims] = [[*query_dims[:-1], value_dims[-1]]]
    for out in step.results[1:]:
        # One number for each query of a head, such as log-sum-exps.
        kept = query_dims[:2] if out.dim() == 3 and out.shape[:2] == query.shape[:2] else []
        output_dims.append([*kept, *step.make_dims(out.shape[len(kept) :], True)])
    return output_dims
