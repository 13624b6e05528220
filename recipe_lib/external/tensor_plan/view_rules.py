"""Rules for operators that move elements: views, cuts, concatenations, picks by number; and attention in one go."""

from math import prod

import torch

from recipe_lib.external.tensor_plan.axes import AxisNode, block, concatenation, cut, product, regroup, unify
from recipe_lib.external.tensor_plan.calls import tensors_in
from recipe_lib.external.tensor_plan.operator_rules import Dims, OperatorCall, broadcast, rule


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy", "flatten", "unflatten")
def view(step: OperatorCall) -> list[Dims] | None:
    """The same elements under other sizes: dimensions are joined and taken apart."""
    tensor = step.first()
    if tensor.shape == step.outputs[0].shape:
        return [list(step.dims(tensor))]
    if not tensor.numel():
        return None
    dims, shape = step.dims(tensor), step.shape()
    found: Dims = []
    start = stop = 0
    while start < len(dims) or stop < len(shape):  # the shortest groups whose products agree
        ours, theirs = [*dims[start : start + 1]], [*shape[stop : stop + 1]]
        start, stop = start + 1, stop + 1
        while (left := prod(node.size for node in ours)) != (right := prod(theirs)):
            if left < right:
                ours.append(dims[start])
                start += 1
            else:
                theirs.append(shape[stop])
                stop += 1
        found += ours if len(ours) == len(theirs) == 1 else regroup(ours, theirs, step.reason)
    return [found]


@rule("t", "transpose", "permute", "numpy_T", "adjoint", "transpose_", "t_")
def permutation(step: OperatorCall) -> list[Dims]:
    """Dimensions in another order."""
    dims = list(step.dims(step.first()))
    if step.name in ("transpose", "transpose_"):
        one, other = step.get("dim0"), step.get("dim1")
        if dims:
            dims[one], dims[other] = dims[other], dims[one]
        return [dims]
    if step.name == "permute":
        return [[dims[number] for number in step.get("dims")]]
    return [dims[::-1]]


@rule("expand", "expand_copy")
def expand(step: OperatorCall) -> list[Dims]:
    """Dimensions of one element are repeated, new ones come in front."""
    dims, shape = step.dims(step.first()), step.shape()
    dims = [AxisNode(1)] * (len(shape) - len(dims)) + list(dims)
    return [[node if node.size == size else AxisNode(size) for node, size in zip(dims, shape, strict=True)]]


@rule("unsqueeze", "squeeze", "unsqueeze_", "squeeze_")
def squeeze(step: OperatorCall) -> list[Dims]:
    """Dimensions of one element come and go."""
    dims = list(step.dims(step.first()))
    if step.name.startswith("unsqueeze"):
        dims.insert(step.get("dim") % (len(dims) + 1), AxisNode(1))
        return [dims]
    over = step.get("dim")
    numbers = range(len(dims)) if over is None else [over] if isinstance(over, int) else over
    gone = {number % len(dims) for number in numbers if dims}
    return [[node for number, node in enumerate(dims) if number not in gone or node.size != 1]]


@rule("slice", "narrow")
def slice_(step: OperatorCall) -> list[Dims]:
    """One stretch of a dimension."""
    tensor = step.first()
    dims = list(step.dims(tensor))
    number = step.get("dim", 0) % len(dims)
    size, length = dims[number].size, step.shape()[number]
    if length == size:
        return [dims]
    stride, first = step.get("step", 1), step.get("start") or 0
    if stride > 1 and size % stride == 0 and 0 <= first < stride and length == size // stride:
        dims[number], within = regroup([dims[number]], [length, stride], step.reason)  # every other one, as gate and up
        block(within, step.reason)
        return [dims]
    if stride != 1 or not length:
        block(dims[number], step.reason)
        dims[number] = step.fresh([length], True)[0]
        return [dims]
    start = step.get("start") or 0
    start = max(start + size, 0) if start < 0 else start
    pieces = cut(dims[number], [start, length, size - start - length], step.reason)
    dims[number] = pieces[1 if start else 0]
    return [dims]


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "split_copy", "split_with_sizes_copy")
def split(step: OperatorCall) -> list[Dims]:
    """A dimension cut into several; unbinding cuts it into single elements, which blocks it."""
    dims = list(step.dims(step.first()))
    number = step.get("dim", 0) % len(dims)
    if step.name == "unbind":
        block(dims[number], step.reason)
        return [dims[:number] + dims[number + 1 :] for _ in step.outputs]
    lengths = [out.shape[number] for out in step.outputs]
    if not all(lengths):
        block(dims[number], step.reason)
        return [[*dims[:number], *step.fresh([length], True), *dims[number + 1 :]] for length in lengths]
    pieces = cut(dims[number], lengths, step.reason)
    return [[*dims[:number], piece, *dims[number + 1 :]] for piece in pieces]


@rule("select")
def select(step: OperatorCall) -> list[Dims]:
    """One element of a dimension, which cannot be cut then."""
    dims = list(step.dims(step.first()))
    block(dims[step.get("dim")], step.reason)
    del dims[step.get("dim")]
    return [dims]


@rule("cat", "stack", "concat")
def cat(step: OperatorCall) -> list[Dims]:
    """Tensors one after the other along a dimension, old or new."""
    tensors = [tensor for tensor in tensors_in(step.args[0]) if tensor.numel() or tensor.dim() > 1]
    shape = step.shape()
    number = step.get("dim", 0) % len(shape)
    held = [list(step.dims(tensor)) for tensor in tensors]
    if step.name == "stack":
        joined = AxisNode(shape[number], blocked=step.reason)
        for dims in held:
            dims.insert(number, joined)
    else:
        joined = concatenation(dims[number] for dims in held)
    found = held[0]
    for dims in held[1:]:
        for place, node in enumerate(dims):
            if place != number:
                unify(found[place], node, step.reason)
    found[number] = joined
    return [found]


@rule("repeat")
def repeat(step: OperatorCall) -> list[Dims]:
    """Copies of the whole, one after the other, along each dimension."""
    repeats = step.get("repeats")
    dims = list(step.dims(step.first()))
    dims = [AxisNode(1)] * (len(repeats) - len(dims)) + dims
    return [[product([AxisNode(times), node]) for times, node in zip(repeats, dims, strict=True)]]


@rule("constant_pad_nd", "reflection_pad1d", "replication_pad1d")
def pad(step: OperatorCall) -> list[Dims]:
    """Padded dimensions are blocked."""
    dims, shape = step.dims(step.first()), step.shape()
    found = []
    for node, size in zip(dims, shape, strict=True):
        if node.size != size:
            block(node, step.reason)
        found.append(node if node.size == size else step.fresh([size], True)[0])
    return [found]


@rule("unfold", "as_strided", "diagonal", "view_as_real", "view_as_complex", "diagonal_copy", "diag_embed")
def opaque_view(step: OperatorCall) -> list[Dims]:
    """Dimensions whose sizes stay in front are kept; the others are blocked."""
    dims, shape = list(step.dims(step.first())), step.shape()
    keeps = step.name in ("view_as_real", "view_as_complex", "unfold")
    same = 0
    while keeps and same < min(len(dims), len(shape)) and dims[same].size == shape[same]:
        if step.name == "unfold" and same == step.get("dimension") % len(dims):
            break
        same += 1
    for node in dims[same:]:
        block(node, step.reason)
    return [dims[:same] + step.fresh(shape[same:], True)]


@rule("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index(step: OperatorCall) -> list[Dims]:
    """Picks, or puts, elements by numbers along some dimensions, which are blocked; others are kept."""
    tensor = step.first()
    dims = list(step.dims(tensor))
    picks = list(step.get("indices"))
    single = _from_the_end(step, picks)
    if single is not None:
        at, element = single
        start = dims[at].size + element
        dims[at] = cut(dims[at], [start, 1, -element - 1], step.reason)[1 if start else 0]
        return [dims]
    spent: Dims = []
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
    target = step.get("values") if "put" in step.name else step.outputs[0]
    count = len(torch.broadcast_shapes(*shapes)) if given and not masks else 1
    if "put" in step.name:
        whole = [*kept[:front], *(AxisNode(1) for _ in range(count)), *kept[front:]]
        offset = len(whole) - target.dim()
        for place, node in enumerate(step.dims(target)):
            if place + offset >= 0 and node.size == whole[place + offset].size:
                step.join(whole[place + offset], node)
        return [dims]
    picked = list(target.shape[front : front + count])
    spent = step.fresh(picked) if masks else broadcast(step, given, picked)
    return [[*kept[:front], *spent, *kept[front:]]]


def _from_the_end(step: OperatorCall, picks: list[torch.Tensor | None]) -> tuple[int, int] | None:
    """The dimension and the number of `x[..., [-1], :]`, which is a slice of one element; None for other picks."""
    given = [number for number, pick in enumerate(picks) if pick is not None]
    listed = [value for place, value in step.picked.items() if place.count(".") == 2 and isinstance(value, int)]
    if "put" in step.name or len(given) != 1 or len(listed) != 1 or listed[0] >= 0:
        return None
    pick = picks[given[0]]
    return (given[0], listed[0]) if pick is not None and tuple(pick.shape) == (1,) else None


@rule("index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_")
def index_along(step: OperatorCall) -> list[Dims]:
    """Picks, or adds, slices by number along one dimension, which is blocked."""
    dims = list(step.dims(step.first()))
    number = step.get("dim") % max(len(dims), 1)
    block(dims[number], step.reason)
    if step.name == "index_select":
        dims[number] = step.dims(step.get("index"))[0]
        return [dims]
    source = step.get("source")
    for place, node in enumerate(step.dims(source) if source is not None else ()):
        if place != number:
            unify(dims[place], node, step.reason)
    return [dims]


@rule("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def gather(step: OperatorCall) -> list[Dims]:
    """Picks, or puts, elements by numbers along one dimension; the numbers lie where the elements do."""
    dims = list(step.dims(step.first()))
    number = step.get("dim") % max(len(dims), 1)
    block(dims[number], step.reason)
    others = [step.dims(tensor) for tensor in (step.get("index"), step.get("src")) if isinstance(tensor, torch.Tensor)]
    for other in others:
        for place, node in enumerate(other):
            if place == number:
                block(node, step.reason)
            elif node.size == dims[place].size:
                unify(dims[place], node, step.reason)
            else:
                block(dims[place], step.reason)
                block(node, step.reason)
    return [others[0] if step.name == "gather" else dims]


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "scaled_dot_product_attention")
@rule("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math")
def attention(step: OperatorCall) -> list[Dims]:
    """softmax(q k^T) v over [b, h, s, e]; fewer heads of keys and values than of queries stand for groups."""
    query, key, value = (step.get(name) for name in ("query", "key", "value"))
    ours, keys, held = step.dims(query), step.dims(key), step.dims(value)
    groups = query.shape[-3] // key.shape[-3]
    for theirs in (keys, held):
        for one, other in zip(ours[:-3], theirs[:-3], strict=True):
            step.join(one, other)
        unify(ours[-3], product([theirs[-3], AxisNode(groups)]), step.reason)
    unify(keys[-2], held[-2], step.reason)
    for node in (ours[-1], keys[-1], keys[-2], ours[-2]):
        block(node, step.reason)
    unify(ours[-1], keys[-1], step.reason)
    mask = step.get("attn_mask", step.get("attn_bias"))
    if mask is not None:
        broadcast(step, [mask], [*(node.size for node in ours[:-1]), keys[-2].size])
        offset = len(ours) - mask.dim()
        for place, node in enumerate(step.dims(mask)[:-2]):
            step.join(ours[offset + place], node)
    found: list[Dims] = [[*ours[:-1], held[-1]]]
    for out in step.outputs[1:]:
        same = out.dim() == 3 and out.shape[:2] == query.shape[:2]
        found.append([*ours[:2], *step.fresh(out.shape[2:], True)] if same else step.fresh(out.shape, True))
    return found
