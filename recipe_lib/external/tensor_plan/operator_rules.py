"""Rules: what each aten operator means for dimensions, which it keeps, unites, takes apart, sums
over or blocks.

A rule gets an `OperatorCall` and returns the dimensions of each tensor that comes out; `tracing`
asks `find_rule` for it. An operator without a rule is unknown: whoever traces blocks all that it
touches, which is always safe.
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
from recipe_lib.external.tensor_plan.sharding_plan import list_tensors

RULES: dict[str, Rule] = {}


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by their names without namespace and overload."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def broadcast(step: OperatorCall, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> Dims:
    """Return the dimensions of tensors that come together element by element."""
    joined: Dims = [AxisNode(1) for _ in shape]
    for tensor in tensors:
        dims = step.get_dims(tensor)
        offset = len(shape) - len(dims)
        for number, node in enumerate(dims):
            if shape[offset + number] == node.size:
                joined[offset + number] = step.join(joined[offset + number], node)
    # A dimension that no input has is new.
    return [
        node if node.size == size else AxisNode(size)
        for node, size in zip(joined, shape, strict=True)
    ]


def find_rule(function: Any) -> Rule | None:
    """Return the rule of an operator, or None."""
    registered = RULES.get(get_short_name(function))
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
    step.uniform = step.name in ("fill_", "zero_")
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
    """Trace an operator that gives one value everywhere."""
    step.uniform = True
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
    """Trace an operator that gives new values, no element of which belongs to one of an input."""
    step.values = True
    for tensor in list_tensors((step.args, step.kwargs)):
        for node in step.get_dims(tensor):
            block(node, step.reason)
    return [step.make_dims(out.shape) for out in step.results]


@register_rule(
    *"mean sum amax amin any all prod var std norm linalg_vector_norm logsumexp argmax argmin"
    " max min".split()
)
@register_rule(
    *"median nanmedian var_mean std_mean aminmax mode kthvalue count_nonzero nansum".split()
)
def trace_reduction(step: OperatorCall) -> list[Dims]:
    """Block dimensions that become one element, but for sums and means, which ranks can put
    together.
    """
    step.ordered = True
    tensor = step.get_first_tensor()
    dims = step.get_dims(tensor)
    gone = _list_given_dims(step, len(dims))
    linear = step.name in ("mean", "sum") and len(gone) < len(dims) and tensor.is_floating_point()
    for number in gone if dims else ():
        if linear:
            step.reductions.append((dims[number], step.known(tensor)))
        else:
            block(dims[number], step.reason)
    kept = len(step.get_shape()) == len(dims)
    kept_dims = [
        AxisNode(1) if number in gone else node
        for number, node in enumerate(dims)
        if kept or number not in gone
    ]
    return [list(kept_dims) for _ in step.results]


def _list_given_dims(step: OperatorCall, count: int) -> set[int]:
    """Return the numbers of the dimensions that an operator is told, of `count`; none: all."""
    over = step.get("dim")
    numbers = [over] if isinstance(over, int) else over or range(count)
    return {number % max(count, 1) for number in numbers}


@register_rule(
    *"_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp cummax"
    " cummin flip".split()
)
@register_rule(
    *"sort argsort topk roll cumsum_ renorm _weight_norm_interface tril triu tril_ triu_".split()
)
@register_rule("constant_pad_nd", "reflection_pad1d", "replication_pad1d")
def trace_along(step: OperatorCall) -> list[Dims]:
    """Block the dimensions along which what an element becomes depends on its neighbors, or its
    place.
    """
    dims = list(step.get_dims(step.get_first_tensor()))
    step.ordered = not step.name.startswith(("tri", "constant_pad"))
    over = step.get("dim", step.get("dims"))
    numbers = [over] if isinstance(over, int) else over or list(range(len(dims)))
    if step.name.startswith("tri"):
        numbers = [-2, -1]
    elif "_pad" in step.name:
        numbers = [
            number for number, size in enumerate(step.get_shape()) if size != dims[number].size
        ]
    for number in numbers:
        block(dims[number], step.reason)
    return [_keep_equal_dims(step, dims, out) for out in step.results]


def _keep_equal_dims(step: OperatorCall, dims: Dims, out: torch.Tensor) -> Dims:
    """Keep the dimensions that are as long as before; others become new ones, which cannot be
    cut.
    """
    return [
        node if node.size == size else step.make_dims([size], True)[0]
        for node, size in zip(dims, out.shape, strict=True)
    ]


@register_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def trace_normalization(step: OperatorCall) -> list[Dims]:
    """Trace statistics over the last dimensions, which a weight and a bias share."""
    dims = list(step.get_dims(step.get("input")))
    count = len(step.get("normalized_shape"))
    for node in dims[len(dims) - count :]:
        block(node, step.reason)
    for name in ("weight", "bias"):
        if step.get(name) is not None:
            broadcast(step, [step.get(name), step.get("input")], step.get("input").shape)
    statistics = dims[: len(dims) - count] + [AxisNode(1)] * count
    return [dims if number == 0 else list(statistics) for number in range(len(step.results))]


@register_rule(
    *"mm bmm mv dot matmul addmm baddbmm addmv linear _int_mm addmm_ baddbmm_ addbmm".split()
)
def trace_matrix_product(step: OperatorCall) -> list[Dims] | None:
    """Trace a product: it sums over the last dimension of the left operand; a batch is shared."""
    tensors = list(list_tensors((step.args, step.kwargs)))
    added = tensors.pop(0) if step.name.startswith(("addm", "badd")) else None
    if len(tensors) < 2 or step.name == "addbmm":
        return None
    left, right = tensors[:2]
    ours, theirs = map(step.get_dims, (left, right))
    if step.name == "linear":
        theirs = theirs[::-1]
        added = tensors[2] if len(tensors) > 2 else None
    if min(len(ours), len(theirs)) > 2 and len(ours) != len(theirs):
        return None
    rows = theirs[-2] if len(theirs) > 1 else theirs[0]
    step.contract(ours[-1], right=rows, left_tensor=left, right_tensor=right)
    batch = [step.join(one, other) for one, other in zip(ours[:-2], theirs[:-2], strict=False)]
    longer = ours if len(ours) >= len(theirs) else theirs
    batch = batch if len(batch) == len(longer) - 2 else longer[: max(len(longer) - 2, 0)]
    product_dims = [
        *batch,
        *(ours[-2:-1] if len(ours) > 1 else []),
        *(theirs[-1:] if len(theirs) > 1 else []),
    ]
    step.added = None if added is None else step.known(added)
    if added is not None and [node.size for node in product_dims] == step.get_shape():
        offset = len(product_dims) - added.dim()
        for number, node in enumerate(step.get_dims(added)):
            step.join(product_dims[offset + number], node)
    return [product_dims]


@register_rule("_grouped_mm", "transformers::grouped_mm_fallback")
def trace_grouped_product(step: OperatorCall) -> list[Dims] | None:
    """Trace rows sorted by group times the matrix of their group: [rows, k] x [groups, k, n]."""
    rows, matrices = list(list_tensors(step.args))[:2]
    ours, theirs = map(step.get_dims, (rows, matrices))
    if len(ours) != 2 or len(theirs) != 3:
        return None
    block(theirs[0], step.reason)
    step.contract(ours[1], right=theirs[1], left_tensor=rows, right_tensor=matrices)
    return [[ours[0], theirs[2]]]


@register_rule("embedding")
def trace_embedding(step: OperatorCall) -> list[Dims]:
    """Trace the rows of a matrix that are picked by number."""
    step.lookup = True
    return [[*step.get_dims(step.get("indices")), step.get_dims(step.get("weight"))[1]]]


@register_rule("convolution")
def trace_convolution(step: OperatorCall) -> list[Dims] | None:
    """Trace a convolution: it mixes channels unless each has its own kernel (depthwise); places are
    blocked.
    """
    data, weight, bias = map(step.get, ("input", "weight", "bias"))
    ours, kernel = map(step.get_dims, (data, weight))
    for node in (*ours[2:], *kernel[2:]):
        block(node, step.reason)
    if step.get("transposed"):
        return None
    channels = kernel[0]
    if step.get("groups") == 1:
        step.contract(ours[1], right=kernel[1], left_tensor=data, right_tensor=weight)
    elif step.get("groups") == ours[1].size == kernel[0].size:
        channels = step.join(ours[1], kernel[0])
    else:
        block(ours[1], step.reason)
        block(kernel[0], step.reason)
    if bias is not None:
        step.join(channels, step.get_dims(bias)[0])
    return [[ours[0], channels, *step.make_dims(step.get_shape()[2:], True)]]


# What moves elements: views, cuts, concatenations, picks by number; and attention in one go.


@register_rule(
    "view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy", "flatten", "unflatten"
)
def trace_view(step: OperatorCall) -> list[Dims] | None:
    """Trace the same elements under other sizes: dimensions are joined and taken apart."""
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
        first, second = map(step.get, ("dim0", "dim1"))
        if dims:
            dims[first], dims[second] = dims[second], dims[first]
        return [dims]
    if step.name == "permute":
        return [[dims[number] for number in step.get("dims")]]
    return [dims[::-1]]


@register_rule("expand", "expand_copy")
def trace_expand(step: OperatorCall) -> list[Dims]:
    """Trace repeated dimensions of one element, and new ones in front."""
    shape = step.get_shape()
    dims = step.get_dims(step.get_first_tensor())
    dims = [AxisNode(1)] * (len(shape) - len(dims)) + list(dims)
    return [
        [
            node if node.size == size else AxisNode(size)
            for node, size in zip(dims, shape, strict=True)
        ]
    ]


@register_rule("unsqueeze", "squeeze", "unsqueeze_", "squeeze_")
def trace_squeeze(step: OperatorCall) -> list[Dims]:
    """Trace dimensions of one element that come and go."""
    dims = list(step.get_dims(step.get_first_tensor()))
    if step.name.startswith("unsqueeze"):
        dims.insert(step.get("dim") % (len(dims) + 1), AxisNode(1))
        return [dims]
    gone = set() if step.get("dim") == [] else _list_given_dims(step, len(dims))
    return [[node for number, node in enumerate(dims) if number not in gone or node.size != 1]]


@register_rule("slice", "narrow")
def trace_slice(step: OperatorCall) -> list[Dims]:
    """Trace one stretch of a dimension."""
    dims = list(step.get_dims(step.get_first_tensor()))
    number = step.get("dim", 0) % len(dims)
    size = dims[number].size
    length = step.get_shape()[number]
    if length == size:
        return [dims]
    stride = step.get("step", 1)
    start = step.get("start") or 0
    if stride > 1 and size % stride == 0 and 0 <= start < stride and length == size // stride:
        # Every other one, as of gate and up.
        dims[number], within = regroup([dims[number]], [length, stride], step.reason)
        block(within, step.reason)
        return [dims]
    if stride != 1 or not length:
        block(dims[number], step.reason)
        dims[number] = step.make_dims([length], True)[0]
        return [dims]
    start = max(start + size, 0) if start < 0 else start
    pieces = cut(dims[number], [start, length, size - start - length], step.reason)
    dims[number] = pieces[1 if start else 0]
    return [dims]


@register_rule(
    *"split split_with_sizes chunk unbind select tensor_split split_copy"
    " split_with_sizes_copy".split()
)
def trace_split(step: OperatorCall) -> list[Dims]:
    """Trace a dimension that is cut into several; single elements, as of `unbind`, block it."""
    dims = list(step.get_dims(step.get_first_tensor()))
    number = step.get("dim", 0) % len(dims)
    if step.name in ("unbind", "select"):
        block(dims[number], step.reason)
        return [dims[:number] + dims[number + 1 :] for _ in step.results]
    lengths = [out.shape[number] for out in step.results]
    if not all(lengths):
        block(dims[number], step.reason)
        return [
            [*dims[:number], *step.make_dims([length], True), *dims[number + 1 :]]
            for length in lengths
        ]
    return [
        [*dims[:number], piece, *dims[number + 1 :]]
        for piece in cut(dims[number], lengths, step.reason)
    ]


@register_rule("cat", "stack", "concat")
def trace_cat(step: OperatorCall) -> list[Dims]:
    """Trace tensors one after the other along a dimension, old or new."""
    tensors = [
        tensor for tensor in list_tensors(step.args[0]) if tensor.numel() or tensor.dim() > 1
    ]
    shape = step.get_shape()
    number = step.get("dim", 0) % len(shape)
    dims_by_tensor = [list(step.get_dims(tensor)) for tensor in tensors]
    if step.name == "stack":
        joined = AxisNode(shape[number], blocked=step.reason)
        for dims in dims_by_tensor:
            dims.insert(number, joined)
    else:
        joined = make_concatenation(dims[number] for dims in dims_by_tensor)
    dims_of_all = dims_by_tensor[0]
    for dims in dims_by_tensor[1:]:
        for place, node in enumerate(dims):
            if place != number:
                unify(dims_of_all[place], node, step.reason)
    dims_of_all[number] = joined
    return [dims_of_all]


@register_rule("repeat")
def trace_repeat(step: OperatorCall) -> list[Dims]:
    """Trace copies of the whole, one after the other, along each dimension."""
    repeats = step.get("repeats")
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
    """Keep dimensions of a view whose sizes stay in front; block all others."""
    shape = step.get_shape()
    dims = list(step.get_dims(step.get_first_tensor()))
    keeps = step.name in ("view_as_real", "view_as_complex", "unfold")
    same = 0
    while keeps and same < min(len(dims), len(shape)) and dims[same].size == shape[same]:
        if step.name == "unfold" and same == step.get("dimension") % len(dims):
            break
        same += 1
    for node in (*dims[same:], *(node for other in step.inputs[1:] for node in other.dims)):
        block(node, step.reason)
    return [dims[:same] + step.make_dims(out.shape[same:], True) for out in step.results]


@register_rule(
    "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"
)
def trace_index(step: OperatorCall) -> list[Dims]:
    """Trace elements that are picked, or put, by numbers along some dimensions, which are
    blocked.
    """
    dims = list(step.get_dims(step.get_first_tensor()))
    picks = list(step.get("indices"))
    single = _find_negative_pick(step, picks)
    if single is not None:
        at, element = single
        start = dims[at].size + element
        dims[at] = cut(dims[at], [start, 1, -element - 1], step.reason)[1 if start else 0]
        return [dims]
    used = []  # numbers of the dimensions that are picked from
    number = 0
    shapes = []
    for pick in picks:
        count = 1
        if pick is not None:
            count = pick.dim() if pick.dtype in (torch.bool, torch.uint8) else 1
            used += list(range(number, number + count))
            shapes.append((3,) if count > 1 or pick.dtype is torch.bool else tuple(pick.shape))
        number += count
    for place in used:
        block(dims[place], step.reason)
    masks = any(pick is not None and pick.dtype in (torch.bool, torch.uint8) for pick in picks)
    given = [pick for pick in picks if pick is not None]
    kept = [node for place, node in enumerate(dims) if place not in used]
    front = used[0] if used and used == list(range(used[0], used[-1] + 1)) else 0
    target = step.get("values") if "put" in step.name else step.results[0]
    count = len(torch.broadcast_shapes(*shapes)) if given and not masks else 1
    if "put" in step.name:
        put_dims = [*kept[:front], *(AxisNode(1) for _ in range(count)), *kept[front:]]
        offset = len(put_dims) - target.dim()
        for place, node in enumerate(step.get_dims(target)):
            if place + offset >= 0 and node.size == put_dims[place + offset].size:
                step.join(put_dims[place + offset], node)
        return [dims]
    picked = list(target.shape[front : front + count])
    spent = step.make_dims(picked) if masks else broadcast(step, given, picked)
    return [[*kept[:front], *spent, *kept[front:]]]


def _find_negative_pick(
    step: OperatorCall, picks: list[torch.Tensor | None]
) -> tuple[int, int] | None:
    """Return the dimension and the number of `x[..., [-1], :]`, which is a slice of one element;
    None for other picks.
    """
    given = [number for number, pick in enumerate(picks) if pick is not None]
    listed = [
        value
        for place, value in step.picked.items()
        if place.count(".") == 2 and isinstance(value, int)
    ]
    if "put" in step.name or len(given) != 1 or len(listed) != 1 or listed[0] >= 0:
        return None
    pick = picks[given[0]]
    return (given[0], listed[0]) if pick is not None and tuple(pick.shape) == (1,) else None


@register_rule(
    *"index_select index_add index_add_ index_copy index_copy_ index_fill index_fill_".split()
)
def trace_index_along(step: OperatorCall) -> list[Dims]:
    """Trace slices that are picked, or added, by number along one dimension, which is blocked."""
    dims = list(step.get_dims(step.get_first_tensor()))
    number = step.get("dim") % max(len(dims), 1)
    block(dims[number], step.reason)
    if step.name == "index_select":
        dims[number] = step.get_dims(step.get("index"))[0]
        return [dims]
    source = step.get("source")
    for place, node in enumerate(step.get_dims(source) if source is not None else ()):
        if place != number:
            unify(dims[place], node, step.reason)
    return [dims]


@register_rule(
    *"gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split()
)
def trace_gather(step: OperatorCall) -> list[Dims]:
    """Trace elements that are picked, or put, by numbers along one dimension, which lie where the
    elements do.
    """
    dims = list(step.get_dims(step.get_first_tensor()))
    number = step.get("dim") % max(len(dims), 1)
    block(dims[number], step.reason)
    other_dims = [
        step.get_dims(tensor)
        for tensor in (step.get("index"), step.get("src"))
        if isinstance(tensor, torch.Tensor)
    ]
    for other in other_dims:
        for place, node in enumerate(other):
            if place == number:
                block(node, step.reason)
            elif node.size == dims[place].size:
                unify(dims[place], node, step.reason)
            else:
                block(dims[place], step.reason)
                block(node, step.reason)
    return [other_dims[0] if step.name == "gather" else dims]


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
    """Trace softmax(q k^T) v over [b, h, s, e]; fewer heads of keys and values than of queries
    stand for groups.
    """
    query, key, value = map(step.get, ("query", "key", "value"))
    ours, keys, values = map(step.get_dims, (query, key, value))
    groups = query.shape[-3] // key.shape[-3]
    for theirs in (keys, values):
        for one, other in zip(ours[:-3], theirs[:-3], strict=True):
            step.join(one, other)
        unify(ours[-3], make_product([theirs[-3], AxisNode(groups)]), step.reason)
    unify(keys[-2], values[-2], step.reason)
    for node in (ours[-1], keys[-1], keys[-2], ours[-2]):
        block(node, step.reason)
    unify(ours[-1], keys[-1], step.reason)
    mask = step.get("attn_mask", step.get("attn_bias"))
    if mask is not None:
        broadcast(step, [mask], [*(node.size for node in ours[:-1]), keys[-2].size])
        offset = len(ours) - mask.dim()
        for place, node in enumerate(step.get_dims(mask)[:-2]):
            step.join(ours[offset + place], node)
    output_dims: list[Dims] = [[*ours[:-1], values[-1]]]
    for out in step.results[1:]:
        # Rows of the queries' heads, such as log-sum-exps.
        kept = ours[:2] if out.dim() == 3 and out.shape[:2] == query.shape[:2] else []
        output_dims.append([*kept, *step.make_dims(out.shape[len(kept) :], True)])
    return output_dims
