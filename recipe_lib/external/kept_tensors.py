"""Keep for backward, of a layer that an inferred plan runs, only what the rest can be made of.

autograd keeps what each operator asks for: of a norm the tokens in another type, their scale and
the normed ones; of a gated MLP four tensors; and every gathered copy of the tokens. Most of that
follows from the rest by operators that cost little. So while a layer runs, its cheap calls and
gathers are noted; when it ends, the fewest bytes are chosen from which everything that autograd
asked for can be made again (a minimum cut), and the rest is let go. Backward makes it again, by the
same functions of the same tensors: to the bit what was let go.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from recipe_lib.external.tensor_plan.sharding_plan import list_tensors

# Functions that are cheaper than the memory of what they give: element by element, norms,
# conversions and copies.
CHEAP = frozenset(
    "to float type type_as half bfloat16 double contiguous clone reshape flatten expand repeat"
    " repeat_interleave unsqueeze squeeze view transpose permute chunk split unbind getitem cat"
    " stack add sub mul div truediv neg pow square sqrt rsqrt mean radd rmul rsub rtruediv exp log"
    " abs clamp sigmoid tanh silu gelu relu relu6 softplus mish leaky_relu elu where masked_fill"
    " layer_norm rms_norm softmax".split()
)
Function = Callable[..., Any]


class _Node:
    """Some memory of a layer. held: the tensor it belongs to; None where it was let go.

    made_by: the function, its arguments with nodes for tensors, and which of its results this is;
    None for what cannot be made again. waiting: kept things whose making goes through this one.
    """

    def __init__(
        self, held: Tensor, made_by: tuple[Function, Any, Any, int] | None, parents: list["_Node"]
    ) -> None:
        self.held: Tensor | None = held
        self.made_by = made_by
        self.parents = parents
        self.version = held._version
        self.dtype = held.dtype
        self.bytes = held.untyped_storage().nbytes()
        self.waiting = 0


class _View:
    """A tensor by the memory that it lies in."""

    def __init__(self, node: _Node, tensor: Tensor) -> None:
        self.node = node
        self.geometry = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def view_of(self, made: Tensor) -> Tensor:
        """Return the tensor, as it lies in what its node made."""
        return made.as_strided(*self.geometry)


@dataclass(eq=False)
class _SavedTensor:
    """A stand-in for a tensor that autograd keeps: the tensor, or how to make it."""

    tensor: Tensor | None
    view: _View | None = None
    cone: list[_Node] = field(default_factory=list)


class KeptTensors:
    """The saved tensors of one thread's forward. `layer` is entered around each layer, `around`
    around the whole model's forward.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._kept: list[_SavedTensor] = []
        self._recording = False
        self._chosen: dict[Any, frozenset[int]] = {}
        self._free: set[int] = set()

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return the hooks of the saved tensors of a model's forward, which runs inside."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @contextlib.contextmanager
    def layer(self) -> Iterator[None]:
        """Record the forward of a layer, which runs inside. One that is checkpointed keeps nothing
        by itself, and is left alone.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if self._recording or top is None or top[0] != self._pack:
            yield
            return
        self._recording = True
        try:
            yield
            self._choose()
        finally:
            self._recording = False
            self._nodes.clear()
            self._kept.clear()
            self._free.clear()

    def note_parameters(self, parameters: Any) -> None:
        """Note tensors that are there anyway."""
        self._free.update(tensor.untyped_storage()._cdata for tensor in list_tensors(parameters))

    def note(
        self, function: Function, args: Any, kwargs: Any, result: Any, cheap: bool | None = None
    ) -> None:
        """Note a call that was made; it counts within a layer. cheap: None asks the function's
        name.
        """
        if not self._recording:
            return
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return  # what it wrote into is noticed by its version
        if not (name.strip("_") in CHEAP if cheap is None else cheap) or "out" in kwargs:
            return
        parents: list[_Node] = []
        known = {tensor.untyped_storage()._cdata for tensor in list_tensors((args, kwargs))}
        for at, tensor in enumerate(list_tensors(result)):
            storage = tensor.untyped_storage()._cdata
            if storage in known or storage in self._nodes:
                continue  # a view
            if not parents:
                args, kwargs = pytree.tree_map(
                    lambda value: self._link_node(value, parents), (args, kwargs)
                )
            self._nodes[storage] = _Node(tensor.detach(), (function, args, kwargs, at), parents)

    def _link_node(self, value: Any, parents: list[_Node]) -> Any:
        """Return an argument, a tensor as a view of its node, which becomes one of the parents."""
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()._cdata
        if storage in self._free:
            return value.detach()
        if storage not in self._nodes:
            self._nodes[storage] = _Node(value.detach(), None, [])
        parents.append(self._nodes[storage])
        return _View(self._nodes[storage], value)

    def _pack(self, tensor: Tensor) -> Any:
        if not self._recording or tensor.untyped_storage()._cdata in self._free:
            return tensor
        kept = _SavedTensor(tensor.detach())
        self._kept.append(kept)
        return kept

    def _choose(self) -> None:
        """Let go of all that can be made again of the fewest bytes."""
        nodes = list(self._nodes.values())
        node_numbers = {node: number for number, node in enumerate(nodes)}
        saved = [
            (kept, self._nodes[_get_storage(kept)])
            for kept in self._kept
            if _get_storage(kept) in self._nodes
        ]
        if any(node.held is not None and node.held._version != node.version for node in nodes):
            return  # something was written into since
        if any(kept.tensor is not None and kept.tensor.dtype != node.dtype for kept, node in saved):
            return  # read as another type
        settings = (
            tuple(node.bytes for node in nodes),
            tuple(node.made_by is None for node in nodes),
            tuple(tuple(node_numbers[parent] for parent in node.parents) for node in nodes),
        )
        targets = frozenset(node_numbers[node] for _, node in saved)
        key = (*settings, targets)
        if key not in self._chosen:  # layers are mostly alike
            self._chosen[key] = minimum_cut(*settings, targets)
        stays = {nodes[at] for at in self._chosen[key]}
        for kept, node in saved:
            if node not in stays and kept.tensor is not None:
                kept.view = _View(node, kept.tensor)
                kept.tensor = None
                kept.cone = _list_recomputed_nodes(node, stays)
                for each in kept.cone:
                    each.waiting += 1
        for node in nodes:
            if node not in stays:
                node.held = None


def _get_storage(kept: _SavedTensor) -> int:
    assert kept.tensor is not None
    return int(kept.tensor.untyped_storage()._cdata)


def _list_recomputed_nodes(node: _Node, stays: set[_Node]) -> list[_Node]:
    """List all nodes that have to be made again for one, itself included."""
    recomputed: dict[_Node, None] = {}
    queue = [node]
    while queue:
        source = queue.pop()
        if source not in stays and source not in recomputed:
            recomputed[source] = None
            queue += source.parents
    return list(recomputed)


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.view is None:
        return kept.tensor
    with torch.no_grad():
        tensor = kept.view.view_of(_recompute(kept.view.node))
    for node in kept.cone:
        node.waiting -= 1
        if node.waiting <= 0:
            node.held = None
    return tensor


def _recompute(node: _Node) -> Tensor:
    """Make the tensor of a node again; it is held as long as others wait for it."""
    if node.held is None:
        assert node.made_by is not None
        function, args, kwargs, at = node.made_by
        args, kwargs = pytree.tree_map_only(
            _View, lambda view: view.view_of(_recompute(view.node)), (args, kwargs)
        )
        node.held = list(list_tensors(function(*args, **kwargs)))[at]
    return node.held


def minimum_cut(
    sizes: tuple[int, ...],
    roots: tuple[bool, ...],
    parents: tuple[tuple[int, ...], ...],
    targets: frozenset[int],
) -> frozenset[int]:
    """Return the nodes of the fewest bytes from which all targets can be made; of equal ones those
    nearest to the targets.

    roots: nodes that cannot be made of others. parents: what each of the others is made of.
    """
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for at, size in enumerate(sizes):
        graph.add_edge(("in", at), ("out", at), capacity=size)  # without a capacity an edge has any
        if roots[at]:
            graph.add_edge("source", ("in", at))
        graph.add_edges_from((("out", parent), ("in", at)) for parent in parents[at])
        if at in targets:
            graph.add_edge(("out", at), "sink")
    _, (_, reaching) = networkx.minimum_cut(graph, "source", "sink")
    return frozenset(
        at for at in range(len(sizes)) if ("in", at) not in reaching and ("out", at) in reaching
    )
