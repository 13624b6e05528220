"""Save fewer tensors for backward: what is cheap to compute is computed again.

A layer's forward runs inside `KeptTensors.layer`, and the functions that are cheap tell it of their
results: `note_cheap` in our own layers, a torch function mode in those of other libraries. When the
layer ends, a minimum cut chooses the fewest bytes from which all tensors that autograd saved can be
computed; others are freed. Backward computes them by the same functions of the same tensors, once
for all that read them: they are equal bit for bit.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
)

from recipe_lib.ops.deferred import Switch

# Names of torch's functions that cost less to run again than the memory of their result is worth:
# elementwise ones, norms, conversions and copies. None is random. `__add__` is under `add`. Those
# that only return views, such as `transpose`, need no name.
CHEAP = frozenset(
    "to float type type_as half bfloat16 double contiguous clone reshape flatten repeat"
    " repeat_interleave getitem cat stack add sub mul div truediv neg pow square sqrt rsqrt mean"
    " radd rmul rsub rtruediv exp log abs clamp sigmoid tanh silu gelu relu relu6 softplus mish"
    " leaky_relu elu where masked_fill layer_norm rms_norm softmax".split()
)
# The modules of these functions; methods have none. A function of another library, or a custom
# operator, may have a name of theirs and do something else.
_MODULES = frozenset(
    {"torch", "torch._tensor", "torch.functional", "torch.nn.functional", "torch._C._nn"}
)
# Subclasses may give a function another meaning. A plan runs with fake tensors.
_TENSOR_TYPES = frozenset({Tensor, nn.Parameter, FakeTensor})
# A layer may be a loop over tokens or experts: of one with more nodes than that, the calls of its
# beginning are noted. A cut of 500 nodes takes a tenth of a second.
_MAX_NODES = 500
Function = Callable[..., Any]
_Pack = Callable[[Any], Any]
# A storage, by torch's `_cdata`, read in one type: a view in another type is a node of its own.
_Key = tuple[int, torch.dtype]
_Result = TypeVar("_Result")


class _Node:
    """One storage that a layer's calls read or make, as a node of the graph of these calls."""

    def __init__(
        self,
        tensor: Tensor,
        producer: tuple[Function, list[Any], TreeSpec, int] | None,
        parents: list["_Node"],
    ) -> None:
        # A tensor that covers the storage. None: freed, or autograd holds it, see `source`.
        self.tensor: Tensor | None = tensor
        # (function, leaves and structure of its arguments, index of this tensor in the result); a
        # `_View` stands for each tensor among the leaves. None: it cannot be recomputed.
        self.producer = producer
        self.parents = parents  # the nodes among these arguments
        # torch counts writes into a tensor: with a later version it has other values.
        self.version = tensor._version
        self.bytes = tensor.untyped_storage().nbytes()
        # A saved tensor that covers the storage in order, from which a node that is kept is read.
        # None: it is freed.
        self.source: _SavedTensor | None = None
        # Saved tensors that backward has still to recompute through this node.
        self.num_pending = 0


class _View:
    """A tensor as a view of a node's storage, which may have been freed."""

    def __init__(self, node: _Node, tensor: Tensor) -> None:
        self.node = node
        self.geometry = (tensor.shape, tensor.stride(), tensor.storage_offset())  # `as_strided`'s

    def read(self) -> Tensor:
        """Return the tensor, of a node that was kept or has been recomputed."""
        shape, stride, offset = self.geometry
        if self.node.source is None:
            assert self.node.tensor is not None
            return self.node.tensor.as_strided(shape, stride, offset)
        kept = self.node.source.read().contiguous()
        # Hooks may have returned it as a part of a larger storage.
        return kept.as_strided(shape, stride, offset + kept.storage_offset())


@dataclass(eq=False)
class _SavedTensor:
    """A stand-in for a tensor that autograd saves: the tensor, or how to recompute it."""

    packed: Any  # what the hooks around the layer's made of the tensor; None: it was freed
    unpack: _Pack | None  # the hook that gets the tensor from `packed`; None: `packed` is it
    version: int  # the tensor's when it was saved
    # The tensor, while the layer runs; in backward, once it is read from `packed`.
    tensor: Tensor | None = None
    view: _View | None = None  # of a freed tensor: a view of a node that can be recomputed
    # The nodes that are recomputed for that.
    recomputed_nodes: list[_Node] = field(default_factory=list)

    def read(self) -> Tensor:
        """Return the tensor of one that was not freed."""
        if self.unpack is None:
            # torch's own check, which it leaves out where there are hooks.
            if self.packed._version != self.version:
                raise RuntimeError(
                    "a tensor that backward needs has been modified by an in-place operation since"
                    " it was saved, or since what is made of it was freed"
                    " (memory.recompute_cheap=false frees nothing)"
                )
            return self.packed  # type: ignore[no-any-return]
        if self.tensor is None:
            # Once, and held until autograd reads it too: checkpointing gives a tensor only once.
            self.tensor = self.unpack(self.packed)
        return self.tensor


class KeptTensors:
    """The saved tensors of a model's layers.

    autograd saves what each operator asks for: the input of a linear, though it is the result of a
    norm whose input is saved, too; of a gated MLP three or four tensors; and every gathered copy of
    the tokens. Most of these follow from the others by calls that cost little.

    Hooks around a layer, such as those of offloading, get all that is saved, and lose what is freed
    again when the layer ends.
    """

    def __init__(self) -> None:
        self._nodes: dict[_Key, _Node] = {}  # the graph of the layer's calls
        self._saved_tensors: list[_SavedTensor] = []  # what autograd has saved in the layer
        # The hooks around those of the layer; None: there are none.
        self._outer_pack: _Pack | None = None
        self._outer_unpack: _Pack | None = None

    @contextlib.contextmanager
    def layer(self, notes_calls: bool = False) -> Iterator[None]:
        """Record the forward of a layer, which runs inside, and free tensors when it ends.

        Once for an object. A layer within a layer is recorded as a part of it. A layer with
        activation checkpointing is left as it is: it is computed again as a whole. notes_calls:
        True for a layer that does not say itself what in it is cheap.
        """
        # torch calls the innermost hooks alone, so that these have to call the next ones. Private:
        # torch has no public way to ask for the hooks on top.
        outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_checkpointed = outer_hooks and outer_hooks[0].__module__ == checkpoint.__module__
        if _recorder.get() is not None or not torch.is_grad_enabled() or is_checkpointed:
            yield
            return
        self._outer_pack, self._outer_unpack = outer_hooks or (None, None)
        token = _recorder.set(self)
        try:
            with (
                _NotedCalls() if notes_calls else contextlib.nullcontext(),
                torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack),
            ):
                yield
            self._choose()
        finally:
            _recorder.reset(token)
            # From here on they are read from `packed`, or freed. Also where an exception ends the
            # forward, as that of checkpointing which ends a recomputation: an operator that saved
            # its own result would keep its graph alive by it.
            holders: list[_SavedTensor | _Node] = [*self._saved_tensors, *self._nodes.values()]
            for holder in holders:
                holder.tensor = None

    def note(
        self, function: Function, args: Any, kwargs: Any, result: Any, cheap: bool = False
    ) -> None:
        """Note a call of the layer and its result.

        cheap: True if it may run again in backward; False: the function's name decides (`CHEAP`).
        """
        name = getattr(function, "__name__", "").strip("_")
        # How many elements a mask selects is read on the host, which would wait for the device.
        selects = (name == "where" and len(args) == 1) or (
            name == "getitem" and any(index.dtype == torch.bool for index in list_tensors(args[1:]))
        )
        is_cheap = cheap or (
            name in CHEAP and getattr(function, "__module__", "torch") in _MODULES and not selects
        )
        # Without gradients, as inside of an autograd.Function, nothing is saved. Backward runs
        # outside of autocast, where a call may give another type.
        is_noted = torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled()
        if not is_cheap or not is_noted or len(self._nodes) > _MAX_NODES:
            return
        parents: list[_Node] = []
        leaves, structure = tree_flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = list_tensors(result)
        if not all(map(_has_plain_storage, arguments + results)):
            return
        argument_storages = {tensor.untyped_storage()._cdata for tensor in arguments}
        for index, tensor in enumerate(results):
            key = _get_key(tensor)
            if key[0] in argument_storages or key in self._nodes:
                continue  # a view, or written into: its storage has a node or needs none
            if not parents:
                leaves = [
                    self._link_node(leaf, parents) if isinstance(leaf, Tensor) else leaf
                    for leaf in leaves
                ]
            self._nodes[key] = _Node(tensor, (function, leaves, structure, index), parents)

    def _link_node(self, tensor: Tensor, parents: list[_Node]) -> Any:
        """Return a tensor as a view of its node, which joins `parents`, for a `producer`."""
        key = _get_key(tensor)
        if key not in self._nodes:
            self._nodes[key] = _Node(tensor, None, [])
        parents.append(self._nodes[key])
        return _View(self._nodes[key], tensor)

    def _pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves in place of a tensor; `_unpack` gets it in backward."""
        if self._outer_pack is not None:
            packed = self._outer_pack(tensor)
        else:
            # Detached: an operator that saves its own result would keep its graph alive by it.
            packed = tensor if tensor.is_leaf else tensor.detach()
        saved = _SavedTensor(packed, self._outer_unpack, tensor._version)
        if _has_plain_storage(tensor):
            saved.tensor = tensor
            self._saved_tensors.append(saved)
        return saved

    def _choose(self) -> None:
        """Free the saved tensors of the layer that can be recomputed from those that stay."""
        nodes = list(self._nodes.values())
        if any(
            node.tensor is None
            or node.tensor._version != node.version
            or _get_key(node.tensor) != key
            or node.tensor.untyped_storage().nbytes() != node.bytes
            for key, node in self._nodes.items()
        ):
            # A tensor was written into since, or given another storage, or FSDP has freed the
            # weight of a module in the layer that it wraps: recomputing would give other values.
            # What autograd saved stays as it is.
            return
        # Of the nodes' storages: (saved tensor, the tensor, node)
        saved_of_nodes: list[tuple[_SavedTensor, Tensor, _Node]] = []
        for saved in self._saved_tensors:
            assert saved.tensor is not None
            if _get_key(saved.tensor) in self._nodes:
                saved_of_nodes.append((saved, saved.tensor, self._nodes[_get_key(saved.tensor)]))
        indices = {node: index for index, node in enumerate(nodes)}
        kept_indices = minimum_cut(
            sizes=tuple(node.bytes for node in nodes),
            roots=tuple(node.producer is None for node in nodes),
            parents=tuple(tuple(indices[parent] for parent in node.parents) for node in nodes),
            targets=frozenset(indices[node] for _, _, node in saved_of_nodes),
        )
        stays = {nodes[index] for index in kept_indices}
        # Of each node, those that are computed for it, in this order: parents are noted first. No
        # recursion, as a layer may be a loop over its tokens.
        recomputed_nodes: dict[_Node, list[_Node]] = {}
        for node in nodes:
            of_parents = itertools.chain(*(recomputed_nodes[parent] for parent in node.parents))
            recomputed_nodes[node] = (
                [] if node in stays else list(dict.fromkeys([*of_parents, node]))
            )
        for saved, tensor, node in saved_of_nodes:
            if node in stays:
                # The first: backward reads it last, after what is computed from it. Hooks may give
                # it back with other strides, and of its storage no more than it covers.
                if node.source is None and tensor.nbytes == node.bytes and tensor.is_contiguous():
                    node.source = saved
                continue
            saved.view = _View(node, tensor)
            saved.packed = None
            saved.recomputed_nodes = recomputed_nodes[node]
            for recomputed in saved.recomputed_nodes:
                recomputed.num_pending += 1
        # The nodes from which others are computed.
        sources = {
            parent
            for saved, _, _ in saved_of_nodes
            for node in saved.recomputed_nodes
            for parent in node.parents
            if parent in stays
        }
        for node in nodes:
            if node in sources and node.source is None and node.tensor is not None:
                # Not saved by autograd, but less than what is computed from it.
                num_elements = node.bytes // node.tensor.element_size()
                node.source = self._pack(node.tensor.detach().as_strided((num_elements,), (1,), 0))


class _NotedCalls(TorchFunctionMode):
    """The mode that notes the calls of torch's functions for the layer that runs."""

    def __torch_function__(
        self, function: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        note_call(function, args, kwargs or {}, result)
        return result


def has_others_function(tensor: Tensor) -> bool:
    """Return True if torch's functions of the tensor go through a mode or class of others."""
    modes = _get_current_function_mode_stack()
    return type(tensor) not in _TENSOR_TYPES or any(type(mode) is not _NotedCalls for mode in modes)


def is_keeping_results() -> bool:
    """Return True where selective checkpointing keeps the results of operators, or gives them."""
    # torch's own modes, by private names: it has no public way to ask for them.
    mode = _get_current_dispatch_mode()
    return isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))


# Of the layer that runs in this thread.
_recorder: ContextVar[KeptTensors | None] = ContextVar("recorder", default=None)
_tagging = Switch(False)  # see `use_cheap_tags`


def use_cheap_tags(wanted: bool) -> None:
    """Let compiled code compute the results of `run_cheap` again, from here on in this process."""
    _tagging.value = wanted


def run_cheap(function: Callable[..., _Result], *args: Any) -> _Result:
    """Return `function(*args)`, which is cheap: backward may compute it again.

    Without side effects: it gives the same values when it is called again.
    """
    if not torch.compiler.is_compiling():
        return note_cheap(function(*args), function, *args)
    if not _tagging.value:
        return function(*args)
    # The compiler does not save what comes out of a checkpointed function, but computes it again.
    return cast(_Result, checkpoint(function, *args, use_reentrant=False))


def note_cheap(result: _Result, function: Function, *args: Any) -> _Result:
    """Return `result`, which is `function(*args)` and may be computed again in backward.

    function: cheap, and without side effects: it gives the same values when it is called again.
    """
    note_call(function, args, {}, result, cheap=True)
    return result


def note_call(function: Function, args: Any, kwargs: Any, result: Any, cheap: bool = False) -> None:
    """Note a call for the layer that runs, see `KeptTensors.note`; outside of one do nothing."""
    # A compiler chooses by itself what it computes again, see `run_cheap`.
    recorder = None if torch.compiler.is_compiling() else _recorder.get()
    if recorder is not None:
        # Not seen by a torch function mode that numbers the calls of a forward.
        with torch._C.DisableTorchFunction():
            recorder.note(function, args, kwargs, result, cheap)


def drop_out(hidden: Tensor, rate: float) -> Tensor:
    """Return hidden states with dropout; backward makes them again from the mask."""
    scale = 1 / (1 - rate)
    dropped, mask = torch.native_dropout(hidden, rate, True)
    if torch.compiler.is_compiling():
        # Nobody reads `dropped`, which the compiler then leaves out.
        return run_cheap(_apply_mask, hidden, mask, scale)
    return note_cheap(dropped, _apply_mask, hidden, mask, scale)


def _apply_mask(hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    # As dropout's forward rounds. A GPU's multiplies in fp32, as its backward does; a CPU's scales
    # the mask in hidden's dtype.
    return (
        hidden * mask.to(hidden.dtype).mul_(scale)
        if hidden.device.type == "cpu"
        else torch.ops.aten.native_dropout_backward.default(hidden, mask, scale)
    )


def _has_plain_storage(tensor: Tensor) -> bool:
    """Return True if the tensor's values are those of its storage."""
    return (
        type(tensor) in _TENSOR_TYPES
        and tensor.layout == torch.strided
        # Conjugates and negatives may be views that are marked as such.
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        # torch does not count writes into tensors of inference mode.
        and not (tensor.is_inference() or is_functorch_wrapped_tensor(tensor))
    )


def _get_key(tensor: Tensor) -> _Key:
    return tensor.untyped_storage()._cdata, tensor.dtype


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = list(vars(value).values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in list_tensors(item)]
    return []


def _unpack(saved: _SavedTensor) -> Tensor:
    """Return the tensor that autograd saved, recomputed if it was freed."""
    if saved.view is None:
        tensor = saved.read()
        saved.tensor = None
        return tensor
    with torch.no_grad():
        for node in saved.recomputed_nodes:
            if node.tensor is None:  # else kept for other readers, until the last of them
                assert node.producer is not None
                function, leaves, structure, index = node.producer
                values = [leaf.read() if isinstance(leaf, _View) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(values, structure)
                node.tensor = list_tensors(function(*args, **kwargs))[index]
        tensor = saved.view.read()
    for node in saved.recomputed_nodes:
        node.num_pending -= 1
        if node.num_pending <= 0:
            node.tensor = None
    return tensor


@lru_cache(maxsize=256)  # most layers are alike
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
