"""The activations among the storages of a trace, and the modules that they belong to. No torch.

A tensor belongs to the module that was running when it was made. A fused function, or a parent that
shards its children's matrices, calls no child: all that is kept would be the parent's. So
`give_to_children` gives it to the child whose output it is, or else to the one whose input it is.
It stays inside the module that made it, so that the sums of parents do not change.
"""

from collections import defaultdict

from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, Op, Storage, Trace

_WEIGHTS = ("parameters", "gathered")


def classify_activations(trace: Trace) -> None:
    """Mark as activations what forward or recomputation made and backward finds when it begins."""
    waiting: dict[int, None] = {}
    for kind, number in trace.events:
        if kind == ALLOC:
            storage = trace.storages[number]
            if storage.kind == "temporary" and storage.part in ("forward", "recompute"):
                waiting[number] = None
        elif kind == FREE:
            waiting.pop(number, None)
        elif kind == OP and trace.ops[number].part == "backward":
            for activation in waiting:
                trace.storages[activation].kind = "activations"
            waiting.clear()
        elif kind == PHASE:
            waiting.clear()


def give_to_children(trace: Trace) -> None:
    """Change `module` of activations to the child module that they belong to.

    A child's output is made from its weight, or from what is that child's alone, such as queries
    before they are rotated. Its input is read by products with its weights alone, its adapter's
    among them. A tensor that several children read, such as gathered tokens, stays the parent's.
    """
    owners = {_find_owner(storage) for storage in trace.storages} - {""}
    makers: dict[int, str] = {}  # number of a storage -> the child whose output it is
    readers: dict[int, set[str]] = defaultdict(set)  # -> modules whose weights it is multiplied by
    for kind, number in trace.events:
        op = trace.ops[number] if kind == OP else None
        if op is None or not op.makes:
            continue
        weights = {_find_owner(trace.storages[read]) for read in op.reads} - {""}
        if op.flops and weights:
            for read in op.reads:
                readers[read] |= weights
        child = _find_child(op, trace.storages, weights=weights, makers=makers, owners=owners)
        if child:
            makers |= dict.fromkeys(op.makes, child)
    for number, storage in enumerate(trace.storages):
        if storage.kind != "activations" or storage.part not in ("forward", "recompute"):
            continue
        read_by = {_find_child_above(storage.module, reader) for reader in readers[number]}
        child = makers.get(number) or (read_by.pop() if len(read_by) == 1 else "")
        if child in owners and _find_child_above(storage.module, child):
            storage.module = child


def _find_owner(storage: Storage) -> str:
    """Return the module of a parameter, "" for other memory."""
    # A label that ends in `*` is that of memory which several parameters share.
    if storage.kind not in _WEIGHTS or storage.label.endswith("*"):
        return ""
    return storage.label.rpartition(".")[0]


def _find_child(
    op: Op,
    storages: list[Storage],
    *,
    weights: set[str],
    makers: dict[int, str],
    owners: set[str],
) -> str:
    """Return the only child of the running module that an operator's arguments come from, or "".

    weights: modules of the weights among its arguments. makers: as in `give_to_children`. owners:
    modules that have parameters; a child is one of them.
    """
    children = {child for weight in weights if (child := _find_child_above(op.module, weight))}
    largest_other = 0
    for read in op.reads:
        storage = storages[read]
        if _find_owner(storage):
            continue
        if child := _find_child_above(op.module, makers.get(read) or storage.module):
            children.add(child)
        # What modules around the running one made for all layers, such as rotations, does not
        # count.
        elif not _find_child_above(storage.module, op.module) and storage.module:
            largest_other = max(largest_other, storage.bytes)
    only_child = children.pop() if len(children) == 1 else ""
    if only_child not in owners or not only_child:
        return ""
    # Without a weight of the child, its tensors have to be more than what else is read: a sum with
    # the residual stream is not the norm's.
    smallest_result = min(storages[result].bytes for result in op.makes)
    return only_child if weights or largest_other < smallest_result else ""


def _find_child_above(module: str, inside: str) -> str:
    """Return the child of `module` that `inside` is or lies in; "" if it does not lie in it."""
    if not module or not inside.startswith(f"{module}."):
        return ""
    return f"{module}.{inside[len(module) + 1 :].partition('.')[0]}"
