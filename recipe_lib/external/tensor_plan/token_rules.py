"""Whether an operator can work on a rank's tokens alone: its rule once more, with the tokens of its inputs marked.

The rules say what an operator does to dimensions. Here all dimensions of its inputs are new, and the tokens of those
that are shared out are one axis. If that axis is neither blocked, summed over nor taken apart, and comes out once, what
a rank makes of its tokens is its tokens of what the whole would be; and whatever else has the axis has to be cut.
"""

from math import prod
from typing import NamedTuple

import torch

from recipe_lib.external.tensor_plan.axes import AxisNode, carries, factors, find, leaves, product
from recipe_lib.external.tensor_plan.operator_rules import OperatorCall, rule_of
from recipe_lib.external.tensor_plan.tracing import FunctionCall, Record, Traced


class TokenDim(NamedTuple):
    """Where a tensor has its tokens. dim: the dimension; with others in it, the tokens are last there, or `first`."""

    dim: int
    first: bool = False


Layouts = dict[Traced, TokenDim]
OF_ANOTHER_TYPE = frozenset(("type_as", "to"))  # an argument says no more than a type


class TokenWise(NamedTuple):
    """outputs: where what comes out has tokens. demands: inputs of which all have to be cut, and where."""

    outputs: Layouts
    demands: Layouts


def shape_of(tensor: Traced) -> list[int]:
    """The sizes of a tensor."""
    return [node.size for node in tensor.dims]


def candidates(tensor: Traced, length: int) -> list[TokenDim]:
    """Where a tensor could have rows of `length` tokens."""
    found = []
    for number, size in enumerate(shape_of(tensor)):
        if size % length == 0:
            found.append(TokenDim(number))
            if size > length:
                found.append(TokenDim(number, True))
    return found


def call_on_tokens(call: FunctionCall, layouts: Layouts, length: int) -> TokenWise | None:
    """A call whose arguments in `layouts` are a rank's tokens; None if it cannot work on these alone."""
    here = dict(layouts)
    demands: Layouts = {}
    given = {tensor for _, tensor, _ in call.arguments}
    read = {each for record in call.records for each in record.inputs} | set(call.outputs)
    if call.function not in OF_ANOTHER_TYPE and any(each not in read for each in given & layouts.keys()):
        return None  # its shape is read, within the call
    for record in call.records:
        if not any(each in here for each in (*record.inputs, *record.outputs)):
            continue
        if any(each in record.inputs for each in record.outputs) and not _safe_in_place(record, here):
            return None
        found = _record_on_tokens(record, here, length)
        if found is None:
            return None
        for tensor, layout in found.demands.items():
            if tensor not in given or demands.get(tensor, layout) != layout:
                return None
            demands[tensor] = here[tensor] = layout
        here.update(found.outputs)
    return TokenWise({each: here[each] for each in call.outputs if each in here}, demands)


def _safe_in_place(record: Record, here: Layouts) -> bool:
    """True where a tensor that is written into is a rank's tokens already, and no view of another one."""
    return all(each in here and each.root.call == each.call for each in record.outputs if each in record.inputs)


def _record_on_tokens(record: Record, layouts: Layouts, length: int) -> TokenWise | None:
    step = record.step
    assert step is not None
    rule = rule_of(step.function)
    if rule is None or record.values:
        return None
    tokens = AxisNode(length)
    fresh: dict[Traced, list[AxisNode]] = {}

    def dims(tensor: torch.Tensor) -> list[AxisNode]:
        known = record.held[id(tensor)]
        if known not in fresh:
            fresh[known] = _fresh(shape_of(known), layouts.get(known), tokens, length)
        return fresh[known]

    again = OperatorCall(step.function, step.args, step.kwargs, step.outputs, step.place, dims)
    for known in record.inputs:
        fresh.setdefault(known, _fresh(shape_of(known), layouts.get(known), tokens, length))
    made = rule(again)
    if made is None or find(tokens).kind != "leaf" or find(tokens).blocked:
        return None
    if any(carries(node, tokens) for node, *_ in (*again.contractions, *again.reductions)):
        return None
    outputs: Layouts = {}
    for traced, nodes in zip(record.outputs, made, strict=True):
        where = _place_of(nodes, tokens)
        if where is not None:
            outputs[traced] = where
        elif _has(nodes, tokens) or not record.uniform:
            return None
    demands: Layouts = {}
    for known in record.inputs:
        if known in layouts:
            if _place_of(fresh[known], tokens) != layouts[known]:
                return None
        elif _has(fresh[known], tokens):
            where = _place_of(fresh[known], tokens)
            if where is None:
                return None
            demands[known] = where
    return TokenWise(outputs, demands)


def _fresh(shape: list[int], layout: TokenDim | None, tokens: AxisNode, length: int) -> list[AxisNode]:
    found = [AxisNode(size) for size in shape]
    if layout is not None:
        others = AxisNode(shape[layout.dim] // length)
        found[layout.dim] = product([tokens, others] if layout.first else [others, tokens])
    return found


def _has(nodes: list[AxisNode], tokens: AxisNode) -> bool:
    return any(carries(node, tokens) for node in nodes)


def _place_of(nodes: list[AxisNode], tokens: AxisNode) -> TokenDim | None:
    """Where the tokens lie, if they do so once and at the end or the beginning of a dimension."""
    root = find(tokens)
    if sum(leaf is root for node in nodes for leaf in leaves(node)) != 1:
        return None
    number, node = next((number, node) for number, node in enumerate(nodes) if carries(node, tokens))
    within = factors(node)
    if within and within[-1] is root:
        return TokenDim(number)
    return TokenDim(number, True) if within and within[0] is root else None


def local_dims(tensor: Traced, layout: TokenDim | None, size: int) -> list[int]:
    """The sizes of a rank's part of `size`, if it has its tokens there."""
    shape = shape_of(tensor)
    if layout is not None:
        shape[layout.dim] //= size
    return shape


def elements(tensor: Traced) -> int:
    """How many numbers a tensor has."""
    return prod(shape_of(tensor))
