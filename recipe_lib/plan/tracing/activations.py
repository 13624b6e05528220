"""Find the activations in a complete trace, and the modules that keep them.

`trace_rank` calls `classify_activations` on what it has traced, and then `give_to_children`.
Activations are the memory that forward, or its recomputation, keeps for backward.
"""

from collections import defaultdict

from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, Op, Storage, Trace


def classify_activations(trace: Trace) -> None:
    """Set the kind `activations` of what forward or recomputation keeps for backward.

    It is the memory of the kind `temporary` that is alive when the next operator of backward runs.
    """
    alive: dict[int, None] = {}  # indices of such storages, as an ordered set
    for kind, index in trace.events:
        if kind == ALLOC:
            storage = trace.storages[index]
            if storage.kind == "temporary" and storage.part in ("forward", "recompute"):
                alive[index] = None
        elif kind == FREE:
            alive.pop(index, None)
        elif kind == OP and trace.ops[index].part == "backward":
            for activation in alive:
                trace.storages[activation].kind = "activations"
            alive.clear()
        elif kind == PHASE:
            alive.clear()


# A tensor belongs to the module that was running when it was made. But a fused function, or a
# parent that multiplies by its children's weights itself, calls no child: all that is kept would be
# the parent's. So a tensor is given to the child whose output it is, or else to the one whose input
# it is. A child lies inside the parent, so that sums over the parent do not change.


def give_to_children(trace: Trace) -> None:
    """Change `module` of activations to the child module that they belong to.

    An output of a child is made from its weight, or from tensors of that child alone, such as
    queries before they are rotated. An input of a child is multiplied only by that child's weights,
    an adapter's among them. A tensor that several children read stays the parent's.
    """
    owners = {_find_owner(storage) for storage in trace.storages} - {""}  # modules with parameters
    makers: dict[int, str] = {}  # index of a storage -> the child whose output it is
    # Index of a storage -> the modules whose weights it is multiplied by.
    readers: dict[int, set[str]] = defaultdict(set)
    for kind, index in trace.events:
        op = trace.ops[index] if kind == OP else None
        if op is None or not op.makes:
            continue
        # Modules whose weights are among the arguments.
        weights = {_find_owner(trace.storages[read]) for read in op.reads} - {""}
        if op.flops and weights:  # a matmul: its arguments are inputs of these modules
            for read in op.reads:
                readers[read] |= weights
        child = _find_child(op, trace.storages, weights=weights, makers=makers, owners=owners)
        if child:
            makers |= dict.fromkeys(op.makes, child)
    for index, storage in enumerate(trace.storages):
        if storage.kind != "activations" or storage.part not in ("forward", "recompute"):
            continue
        read_by = {_find_child_above(storage.module, reader) for reader in readers[index]}
        child = makers.get(index) or (read_by.pop() if len(read_by) == 1 else "")
        if child in owners and _find_child_above(storage.module, child):
            storage.module = child


def _find_owner(storage: Storage) -> str:
    """Return the module whose parameter a storage holds; "": it holds none, or that of several."""
    # A label that ends in `*` is that of memory which several parameters share.
    has_owner = storage.kind in ("parameters", "gathered") and not storage.label.endswith("*")
    return storage.label.rpartition(".")[0] if has_owner else ""


def _find_child(
    op: Op,
    storages: list[Storage],
    *,
    weights: set[str],
    makers: dict[int, str],
    owners: set[str],
) -> str:
    """Return the only child of the running module that an operator's arguments come from, or "".

    They are its weights, or tensors that it made. weights: modules of the weights among the
    arguments. makers: as in `give_to_children`. owners: modules that have parameters; the child has
    to be one of them.
    """
    children = {child for weight in weights if (child := _find_child_above(op.module, weight))}
    largest_other = 0
    for read in op.reads:
        storage = storages[read]
        if _find_owner(storage):
            continue
        if child := _find_child_above(op.module, makers.get(read) or storage.module):
            children.add(child)
        # Tensors that modules around the running one made for all layers, such as cosines and sines
        # of rotary embeddings, do not count.
        elif not _find_child_above(storage.module, op.module) and storage.module:
            largest_other = max(largest_other, storage.bytes)
    only_child = children.pop() if len(children) == 1 else ""
    if only_child not in owners or not only_child:
        return ""
    # Without a weight of the child, the result has to be larger than the other tensors read: a sum
    # of a norm's output and the residual stream is not the norm's.
    smallest_result = min(storages[result].bytes for result in op.makes)
    return only_child if weights or largest_other < smallest_result else ""


def _find_child_above(module: str, inside: str) -> str:
    """Return the child of `module` that `inside` is or lies in; "" if `inside` is not in `module`.

    Both are dotted paths.
    """
    if not module or not inside.startswith(f"{module}."):
        return ""
    return f"{module}.{inside[len(module) + 1 :].partition('.')[0]}"
