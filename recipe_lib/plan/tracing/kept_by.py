"""Which module a kept tensor belongs to, where a parent's forward does its children's work. No torch in here.

A fused function, or a parent that shards its children's matrices, calls no child: all that is kept would be the
parent's. So a kept tensor goes to the child whose output it is, or else to the one whose input it is. It never leaves
the module that made it, so that the sums of parents stay what they are.
"""

from collections import defaultdict

from recipe_lib.plan.trace import OP, Op, Storage, Trace

_WEIGHTS = ("parameters", "gathered")


def give_to_children(trace: Trace) -> None:
    """Changes `module` of activations that forward and recomputation made.

    Output: made from a child's weight, or from what is that child's alone, as queries are turned. Input: read by
    products with one child's weights alone, its adapter's among them. A tensor that several children read, such as
    gathered tokens, stays.
    """
    owners = {_owner(storage) for storage in trace.storages} - {""}
    made: dict[int, str] = {}
    readers: dict[int, set[str]] = defaultdict(set)
    for kind, number in trace.events:
        op = trace.ops[number] if kind == OP else None
        if op is None or not op.makes:
            continue
        weights = {_owner(trace.storages[read]) for read in op.reads} - {""}
        if op.flops and weights:
            for read in op.reads:
                readers[read] |= weights
        child = _child_of(op, trace.storages, weights, made, owners)
        if child:
            made |= dict.fromkeys(op.makes, child)
    for number, storage in enumerate(trace.storages):
        if storage.kind != "activations" or storage.part not in ("forward", "recompute"):
            continue
        read_by = {_below(storage.module, reader) for reader in readers[number]}
        found = made.get(number) or (read_by.pop() if len(read_by) == 1 else "")
        if found in owners and _below(storage.module, found):
            storage.module = found


def _owner(storage: Storage) -> str:
    """The module of a parameter; empty for other memory, and for memory that several parameters share."""
    if storage.kind not in _WEIGHTS or storage.label.endswith("*"):
        return ""
    return storage.label.rpartition(".")[0]


def _child_of(op: Op, storages: list[Storage], weights: set[str], made: dict[int, str], owners: set[str]) -> str:
    """The only child of the running module, with parameters of its own, that an operator's arguments come from.

    Without a weight of it, they have to be more than what else is read: a sum with the stream is not a norm's. What
    modules around the running one made for all layers, such as rotations, does not count.
    """
    children = {child for weight in weights if (child := _below(op.module, weight))}
    others = 0
    for read in op.reads:
        if _owner(storages[read]):
            continue
        if child := _below(op.module, made.get(read) or storages[read].module):
            children.add(child)
        elif not _below(storages[read].module, op.module) and storages[read].module:
            others = max(others, storages[read].bytes)
    only = children.pop() if len(children) == 1 else ""
    if only not in owners or not only:
        return ""
    small = weights or others < max(storages[made_now].bytes for made_now in op.makes)
    return only if small else ""


def _below(module: str, inside: str) -> str:
    """The child of a module that another one is or lies in."""
    if not module or not inside.startswith(f"{module}."):
        return ""
    return f"{module}.{inside[len(module) + 1 :].partition('.')[0]}"
