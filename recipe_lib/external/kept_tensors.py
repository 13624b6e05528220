"""Save fewer tensors for backward in a layer that runs by an inferred tensor-parallel plan.

`plan_executor` enters `KeptTensors.around` for a model's forward and `.layer` for each layer in it,
and notes the layer's torch function calls. When a layer ends, a minimum cut chooses the fewest
bytes from which all tensors that autograd saved can be recomputed by cheap calls; others are freed.
Backward recomputes them by the same functions of the same tensors: they are equal bit for bit.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from recipe_lib.external.tensor_plan.sharding_plan import list_tensors

# Names of functions that cost less to run again than the memory of their result is worth:
# elementwise ones, norms, conversions and copies. `__add__` is under `add`.
CHEAP = frozenset(
    "to float type type_as half bfloat16 double contiguous clone reshape flatten expand repeat"
    " repeat_interleave unsqueeze squeeze view transpose permute chunk split unbind getitem cat"
    " stack add sub mul div truediv neg pow square sqrt rsqrt mean radd rmul rsub rtruediv exp log"
    " abs clamp sigmoid tanh silu gelu relu relu6 softplus mish leaky_relu elu where masked_fill"
    " layer_norm rms_norm softmax".split()
)
Function = Callable[..., Any]


class _Node:
    """One storage that a layer's calls read or make, as a node of the graph of these calls."""

    def __init__(
        self,
        tensor: Tensor,
        producer: tuple[Function, Any, Any, int] | None,
        parents: list["_Node"],
    ) -> None:
        self.tensor: Tensor | None = tensor  # a tensor that covers the storage; None: it was freed
        # (function, args, kwargs, index of this tensor in the result), with a `_View` in place of
        # each tensor among the arguments. None: it cannot be recomputed.
        self.producer = producer
        self.parents = parents  # the nodes among these arguments
        # torch counts writes into a tensor: with a later version it has other values.
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.bytes = tensor.untyped_storage().nbytes()
        # Saved tensors that backward has still to recompute through this node.
        self.num_pending = 0


class _View:
    """A tensor as a view of a node's storage, which may have been freed."""

    def __init__(self, node: _Node, tensor: Tensor) -> None:
        self.node = node
        self.geometry = (tensor.shape, tensor.stride(), tensor.storage_offset())  # `as_strided`'s

    def make_view(self, made: Tensor) -> Tensor:
        """Return the tensor as a view of `made`, the node's recomputed tensor."""
        return made.as_strided(*self.geometry)


@dataclass(eq=False)
class _SavedTensor:
    """A stand-in for a tensor that autograd saves: the tensor, or how to recompute it."""

    tensor: Tensor | None  # None: it was freed
    view: _View | None = None  # of a freed tensor: a view of a node that can be recomputed
    # The nodes that are recomputed for that.
    recomputed_nodes: list[_Node] = field(default_factory=list)


class KeptTensors:
    """The saved tensors of a model's forward.

    autograd saves what each operator asks for: of a norm its input in another type, the scale and
    the result; of a gated MLP four tensors; and every gathered copy of the tokens. Most of these
    follow from the others by calls that cost little. Layers with activation checkpointing are left
    as they are.
    """

    def __init__(self) -> None:
        # The graph of the layer that runs: id of a storage (torch's `_cdata`) -> its node.
        self._nodes: dict[int, _Node] = {}
        self._saved_tensors: list[
            _SavedTensor
        ] = []  # what autograd has saved in the layer that runs
        self._recording = False  # a layer runs
        # Arguments of `minimum_cut` -> its result: most layers are alike.
        self._chosen: dict[Any, frozenset[int]] = {}
        # Ids of storages of parameters, which are there anyway: saving them costs nothing.
        self._parameter_storages: set[int] = set()

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for a model's forward: hooks on the tensors that autograd saves."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @contextlib.contextmanager
    def layer(self) -> Iterator[None]:
        """Record the forward of a layer, which runs inside, and free tensors when it ends."""
        # If the hooks on top are not ours, they are those of activation checkpointing: the layer
        # saves nothing by itself. Private: torch has no public way to ask for the hooks on top.
        top_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if self._recording or top_hooks is None or top_hooks[0] != self._pack:
            yield
            return
        self._recording = True
        try:
            yield
            self._choose()
        finally:
            self._recording = False
            self._nodes.clear()
            self._saved_tensors.clear()
            self._parameter_storages.clear()

    def note_parameters(self, parameters: Any) -> None:
        """Note parameters that the layer uses, as this rank's parts: they are never freed here."""
        self._parameter_storages.update(
            tensor.untyped_storage()._cdata for tensor in list_tensors(parameters)
        )

    def note(
        self, function: Function, args: Any, kwargs: Any, result: Any, cheap: bool | None = None
    ) -> None:
        """Note a call and its result, within a layer; outside of one nothing is noted.

        cheap: True if it may run again in backward; None: the function's name decides (`CHEAP`).
        """
        if not self._recording:
            return
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return  # it writes in place, which `_choose` notices by the tensor's version
        if not (name.strip("_") in CHEAP if cheap is None else cheap) or "out" in kwargs:
            return
        parents: list[_Node] = []
        argument_storages = {
            tensor.untyped_storage()._cdata for tensor in list_tensors((args, kwargs))
        }
        for index, tensor in enumerate(list_tensors(result)):
            storage = tensor.untyped_storage()._cdata
            if storage in argument_storages or storage in self._nodes:
                continue  # a view, of a storage that has its node or needs none
            if not parents:
                args, kwargs = pytree.tree_map(
                    lambda value: self._link_node(value, parents), (args, kwargs)
                )
            self._nodes[storage] = _Node(tensor.detach(), (function, args, kwargs, index), parents)

    def _link_node(self, value: Any, parents: list[_Node]) -> Any:
        """Return an argument for `producer`: a tensor as a view of its node, which joins `parents`.

        Parameters stay as they are; values that are no tensors, too.
        """
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()._cdata
        if storage in self._parameter_storages:
            return value.detach()
        if storage not in self._nodes:
            self._nodes[storage] = _Node(value.detach(), None, [])
        parents.append(self._nodes[storage])
        return _View(self._nodes[storage], value)

    def _pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves in place of a tensor; `_unpack` gets it in backward."""
        if not self._recording or tensor.untyped_storage()._cdata in self._parameter_storages:
            return tensor
        kept = _SavedTensor(tensor.detach())
        self._saved_tensors.append(kept)
        return kept

    def _choose(self) -> None:
        """Free the saved tensors of the layer that can be recomputed from those that stay."""
        nodes = list(self._nodes.values())
        indices = {node: index for index, node in enumerate(nodes)}
        saved = [
            (kept, self._nodes[_get_storage_address(kept)])
            for kept in self._saved_tensors
            if _get_storage_address(kept) in self._nodes
        ]
        # In both cases the layer leaves all that autograd has saved as it is.
        if any(node.tensor is not None and node.tensor._version != node.version for node in nodes):
            return  # a tensor was written into since: recomputing would give other values
        if any(kept.tensor is not None and kept.tensor.dtype != node.dtype for kept, node in saved):
            return  # a view of another type, which `as_strided` cannot make
        # The first three arguments of `minimum_cut`.
        settings = (
            tuple(node.bytes for node in nodes),
            tuple(node.producer is None for node in nodes),
            tuple(tuple(indices[parent] for parent in node.parents) for node in nodes),
        )
        targets = frozenset(indices[node] for _, node in saved)
        key = (*settings, targets)
        if key not in self._chosen:
            self._chosen[key] = minimum_cut(*settings, targets)
        stays = {nodes[index] for index in self._chosen[key]}  # the nodes that are not freed
        for kept, node in saved:
            if node not in stays and kept.tensor is not None:
                kept.view = _View(node, kept.tensor)
                kept.tensor = None
                kept.recomputed_nodes = _list_recomputed_nodes(node, stays)
                for recomputed in kept.recomputed_nodes:
                    recomputed.num_pending += 1
        for node in nodes:
            if node not in stays:
                node.tensor = None


def _get_storage_address(kept: _SavedTensor) -> int:
    assert kept.tensor is not None
    return int(kept.tensor.untyped_storage()._cdata)


def _list_recomputed_nodes(node: _Node, stays: set[_Node]) -> list[_Node]:
    """List the nodes that have to be recomputed for one, itself included. stays: those kept."""
    recomputed: dict[_Node, None] = {}
    queue = [node]
    while queue:
        source = queue.pop()
        if source not in stays and source not in recomputed:
            recomputed[source] = None
            queue += source.parents
    return list(recomputed)


def _unpack(kept: Any) -> Tensor:
    """Return the tensor that autograd saved, recomputed if it was freed."""
    if isinstance(kept, Tensor):
        return kept
    if kept.view is None:
        return kept.tensor
    with torch.no_grad():
        tensor = kept.view.make_view(_recompute(kept.view.node))
    for node in kept.recomputed_nodes:
        node.num_pending -= 1
        if node.num_pending <= 0:
            node.tensor = None
    return tensor


def _recompute(node: _Node) -> Tensor:
    """Return a node's tensor, recomputed if it was freed, and keep it until `_unpack` frees it."""
    if node.tensor is None:
        assert node.producer is not None
        function, args, kwargs, index = node.producer
        args, kwargs = pytree.tree_map_only(
            _View, lambda view: view.make_view(_recompute(view.node)), (args, kwargs)
        )
        node.tensor = list(list_tensors(function(*args, **kwargs)))[index]
    return node.tensor


def minimum_cut(
    sizes: tuple[int, ...],
    roots: tuple[bool, ...],
    parents: tuple[tuple[int, ...], ...],
    targets: frozenset[int],
) -> frozenset[int]:
    """Return the indices of the nodes of the fewest bytes from which all targets can be made.

    sizes: bytes of each node. roots: for each node, True if it cannot be made of others. parents:
    for each node, the indices of the nodes that it is made of. targets: indices. Of equally small
    sets the one nearest to the targets is taken.
    """
    import networkx  # a dependency of torch

    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    # Each node is an edge of its bytes; edges between nodes have no capacity, which is infinite.
    for index, size in enumerate(sizes):
        graph.add_edge(("in", index), ("out", index), capacity=size)
        if roots[index]:
            graph.add_edge("source", ("in", index))
        graph.add_edges_from((("out", parent), ("in", index)) for parent in parents[index])
        if index in targets:
            graph.add_edge(("out", index), "sink")
    _, (_, sink_side) = networkx.minimum_cut(graph, "source", "sink")
    # The nodes whose edge is cut.
    return frozenset(
        index
        for index in range(len(sizes))
        if ("in", index) not in sink_side and ("out", index) in sink_side
    )
