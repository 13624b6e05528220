"""Compile the layers of a model that runs by an inferred tensor-parallel plan.

The plan (`ShardingPlan`) names the torch function calls at which ranks exchange tensors (its
boundaries). `plan_executor` runs it, and makes one `CompiledLayers` a model: `make_traceable` wraps
each layer's forward while the model is set up, `compile` is the model's `compile_layer`.
`RegatheringPartitioner` decides what a compiled layer keeps for backward.
"""

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from recipe_lib.errors import SetupError, UserError
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.models.language_model import Entry, replace_entries
from recipe_lib.ops.dtensor_shards import get_local

# (the rank's index, a tensor `[]`; tokens in a row) -> a context for the forward of one layer.
_IsolateLayer = Callable[[Tensor, Any], AbstractContextManager[None]]
# A module's dict of parameters or buffers, and a name in it.
_TensorPlace = tuple[dict[str, Any], str]
_TENSOR = object()  # stands for a tensor among the arguments or outputs of a call
# Attributes that number layers. Alike layers differ in them, so they must not be read where one
# layer is traced for several (`_UnreadableNumber`).
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number")
# Attributes of every nn.Module, which are compared by other means or not at all.
_IGNORED_ATTRIBUTES = frozenset(vars(nn.Module())) | {"forward", *LAYER_NUMBERS}


@dataclass
class _Call:
    """One way in which a layer is called, which has a graph of its own."""

    path: str  # of the layer that is traced
    leaves: list[Any]  # its arguments, flattened by pytree, with `_TENSOR` for each tensor
    spec: pytree.TreeSpec  # that puts the arguments together again
    length: int  # tokens in a row of the whole model's forward
    # `length` divided by the tokens in a row of the layer's input: 1, or the number of ranks where
    # these share a row's tokens. 0: the input does not tell, and `length` is part of the graph.
    row_parts: int
    outputs: list[Any] = field(default_factory=list)  # as `leaves`; known once it is traced
    outputs_spec: pytree.TreeSpec | None = None  # as `spec`; None: it is not traced yet


class CompiledLayers:
    """The compiled layers of one model.

    A torch function mode counts the calls at which ranks exchange, and dynamo cannot trace such a
    mode. So to dynamo a layer is one call, into which AOTAutograd traces
    (`torch._dynamo.nonstrict_trace`): the plan runs the layer's forward once, on tensors without
    values, and its collectives are in the graph, forward and backward. Activation checkpointing is
    around that call, and compiled with it.

    Layers that are alike (`find_alike_layers`) share the graph of the first of them, each with its
    own tensors, unless a forward reads the number of its layer.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        rank: int,
        *,
        length: Callable[[], int],
        isolate_layer: _IsolateLayer,
        pause_counting: Callable[[], AbstractContextManager[None]],
        gathers_again: bool,
    ) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank  # index in the tensor-parallel group
        self.gathers_again = gathers_again  # gathered tokens are not kept for backward
        self.length = length  # returns the tokens in a row of the forward that runs
        self.isolate_layer = isolate_layer  # a context in which a layer is traced by the plan
        # A context in which a compiled layer is called, and no calls are counted.
        self.pause_counting = pause_counting
        # Path of a layer -> its forward as the plan runs it.
        self.planned_forwards: dict[str, Callable[..., Any]] = {}
        # Path of any module -> its forward before the plan ran it. The plan's executor fills it in
        # before the first forward.
        self.original_forwards: dict[str, Callable[..., Any]] = {}
        # Path -> layer, of those that are compiled. Kept, because the stages of a pipeline swap
        # modules, and the model may have another one at that path later.
        self.layers: dict[str, nn.Module] = {}
        self.compiled_forwards: dict[str, Callable[..., list[Tensor]]] = {}  # by path
        self.first_alike: dict[str, str] = {}  # path -> path of the first layer that is alike
        # Path -> where a layer has its parameters and buffers, in the order of the arguments.
        self.tensor_places: dict[str, list[_TensorPlace]] = {}
        self.graph_keys: dict[Any, str] = {}  # all that a graph depends on -> its key
        self.calls: dict[str, _Call] = {}  # key -> the way of calling a layer
        # Device -> the rank's index, `[]`. A graph takes it as a tensor, so that all ranks have the
        # same graph: inductor orders collectives, and ranks that order them in different ways wait
        # for each other forever.
        self.rank_tensors: dict[torch.device, Tensor] = {}
        self.traced: Callable[..., Any] = self._trace  # from the first `compile` on wrapped

    def make_traceable(self, forward: Callable[..., Any], path: str) -> Callable[..., Any]:
        """Return a layer's forward that can also be traced.

        Arguments that begin with a graph's key, a str, are those of `_trace`; others are the
        layer's.
        """
        self.planned_forwards[path] = forward

        def run(*args: Any, **kwargs: Any) -> Any:
            is_traced = bool(args) and isinstance(args[0], str)
            return self.traced(*args) if is_traced else forward(*args, **kwargs)

        return run

    def compile(self, path: str, backend: Any) -> None:
        """Compile a layer's forward in place, with activation checkpointing if it has that.

        backend: of torch.compile.
        """
        # Wrapped once for all layers, and not before one is compiled, as this imports dynamo. `==`,
        # since bound methods are equal, not identical.
        if self.traced == self._trace:
            self.traced = torch._dynamo.nonstrict_trace(self._trace)
        layer: Any = self.model.get_submodule(path)
        self.layers[path] = layer
        # The partitioner is an option of inductor, which other backends do not know.
        regathers = backend == "inductor" and self.gathers_again
        options = {"custom_partitioner_fn": RegatheringPartitioner()} if regathers else None
        self.compiled_forwards[path] = torch.compile(
            _copy_with_own_code(layer.forward, path),
            backend=backend,
            options=options,
            fullgraph=True,
        )
        tensor_dicts = [
            tensors
            for module in layer.modules()
            for tensors in (module._parameters, module._buffers)
        ]
        self.tensor_places[path] = [
            (tensors, name)
            for tensors in tensor_dicts
            for name in tensors
            if tensors[name] is not None
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.pause_counting():
                return self._call(path, layer=layer, args=args, kwargs=kwargs)

        layer.forward = run

    def _call(self, path: str, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a compiled layer as its forward is called, by the graph of the first one alike."""
        if not self.first_alike:  # only now are all layers compiled that will be
            self.first_alike = find_alike_layers(self.layers, self.plan, self.original_forwards)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # FSDP exchanges the entries of these dicts, so they are looked up at every call.
        layer_tensors = [get_local(tensors[name]) for tensors, name in self.tensor_places[path]]
        first_path = self.first_alike[path]
        # A mode of training or an adapter may have been switched in one of the two alone.
        is_alike = _list_module_states(self.layers[first_path]) == _list_module_states(layer)
        key = self._get_key(
            first_path if is_alike else path, layer=layer, leaves=leaves, spec=spec, first=inputs[0]
        )
        try:
            tensors = iter(self._run(key, inputs, layer_tensors))
        except _LayerNumberIsReadError:
            # From now on each layer is traced for itself alone.
            self.first_alike = {name: name for name in self.first_alike}
            key = self._get_key(path, layer=layer, leaves=leaves, spec=spec, first=inputs[0])
            tensors = iter(self._run(key, inputs, layer_tensors))
        call = self.calls[key]
        assert call.outputs_spec is not None
        return pytree.tree_unflatten(
            [next(tensors) if leaf is _TENSOR else leaf for leaf in call.outputs], call.outputs_spec
        )

    def _run(self, key: str, inputs: list[Tensor], layer_tensors: list[Tensor]) -> list[Tensor]:
        """Run the graph of this key; return the tensors among the layer's outputs.

        inputs: the tensors among the layer's arguments. layer_tensors: its parameters and buffers.
        Raises SetupError, with the reason, for a layer that cannot be traced.
        """
        path = self.calls[key].path
        device = inputs[0].device
        if device not in self.rank_tensors:
            self.rank_tensors[device] = torch.tensor(self.rank, device=device)
        try:
            return self.compiled_forwards[path](
                key, self.rank_tensors[device], *layer_tensors, *inputs
            )
        except torch._dynamo.exc.TorchDynamoException as error:
            # dynamo wraps what the forward raises. An error for the user is raised as it is, of any
            # other the message names the first cause.
            causes: list[BaseException] = [error]
            while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
                causes.append(cause)
            for cause in causes:
                if isinstance(cause, UserError):
                    raise cause from None
            reason = f"{type(causes[-1]).__name__}: {' '.join(str(causes[-1]).split())[:200]}"
            raise SetupError(
                f"compile: {path} cannot be traced as its tensor-parallel plan runs it ({reason});"
                " set compile=false or parallel.tensor=1"
            ) from error

    def _get_key(
        self, path: str, layer: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, first: Tensor
    ) -> str:
        """Return the key of the graph for a call of the layer at `path`.

        A graph depends on the arguments that are no tensors, on how ranks share a row's tokens, on
        gradients, and on which modules train or have their adapter switched off. leaves, spec: the
        arguments, flattened. first: the first tensor among them.
        """
        length = self.length()
        # A rank has all tokens of a row of hidden states `[batch, tokens, width]`, or its part.
        row_parts = (
            length // first.shape[1] if first.dim() == 3 and length % first.shape[1] == 0 else 0
        )
        arguments = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        dependencies = (
            path,
            str(spec),
            row_parts or -length,  # a ratio serves any length; negative: a length, not a ratio
            torch.is_grad_enabled(),
            *_list_module_states(layer),
            *map(_make_comparable, arguments),
        )
        key = self.graph_keys.setdefault(dependencies, f"{path} {len(self.graph_keys)}")
        if key not in self.calls:
            self.calls[key] = _Call(
                path, leaves=arguments, spec=spec, length=length, row_parts=row_parts
            )
        return key

    def _trace(self, key: str, rank: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Run the forward of a layer while it is traced; return the tensors among its outputs.

        tensors: the layer's parameters and buffers, then the tensors that it is called with.
        """
        call = self.calls[key]
        places = self.tensor_places[call.path]
        layer_tensors = tensors[: len(places)]
        inputs = iter(tensors[len(places) :])
        args, kwargs = pytree.tree_unflatten(
            [next(inputs) if leaf is _TENSOR else leaf for leaf in call.leaves], call.spec
        )
        # The first input is `[batch, tokens, width]` where `row_parts` is known.
        length = call.row_parts * tensors[len(places)].shape[1] if call.row_parts else call.length
        entries: list[Entry] = [
            (*place, tensor) for place, tensor in zip(places, layer_tensors, strict=True)
        ]
        if list(self.first_alike.values()).count(call.path) > 1:  # traced for several layers
            attribute_dicts = [vars(module) for module in self.layers[call.path].modules()]
            entries += [
                (attributes, name, _UnreadableNumber())
                for attributes in attribute_dicts
                for name in LAYER_NUMBERS
                if name in attributes
            ]
        with replace_entries(entries), self.isolate_layer(rank, length):
            outputs, call.outputs_spec = pytree.tree_flatten(
                self.planned_forwards[call.path](*args, **kwargs)
            )
        call.outputs = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        return [leaf for leaf in outputs if isinstance(leaf, Tensor)]


class _LayerNumberIsReadError(UserError):
    """Raised where a layer's forward reads the number of the layer."""


class _UnreadableNumber:
    """Stands for a layer's number while one layer is traced for several; any use of it raises.

    A forward that computes with its number would do something else in another layer.
    """

    # Every operator of the class is this method.
    def _read(self, *asked: Any) -> Any:
        raise _LayerNumberIsReadError("a layer's number is read")


# fmt: off
for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "bool", "index", "int", "float", "neg",
    "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv", "truediv", "rtruediv",
    "str", "repr", "format", "hash", "getattr",
):
    setattr(_UnreadableNumber, f"__{_name}__", _UnreadableNumber._read)
# fmt: on


def _copy_with_own_code(forward: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Return a copy of a function with code of its own, named after `path`.

    torch counts compilations, and the shapes of each function, by its code and name.
    """

    def run(*args: Any) -> Any:
        return forward(*args)

    code = run.__code__.replace(co_name=path.replace(".", "_"))
    return FunctionType(code, globals(), code.co_name, closure=run.__closure__)


def _list_module_states(layer: nn.Module) -> list[tuple[bool, bool]]:
    """List what may change between calls, for each module: (training, adapter switched off)."""
    return [(module.training, getattr(module, "is_off", False)) for module in layer.modules()]


def find_alike_layers(
    layers: Mapping[str, nn.Module], plan: ShardingPlan, forwards: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """Return name of each layer -> name of the first layer that is alike, perhaps itself.

    Alike are layers of the same code with the same settings, and with exchanges at the same calls:
    what one does to its tensors, another one does to its own. Settings are compared by `==`, so an
    object of a layer's own makes it alike to no other.

    layers: by name, in order. forwards: of modules by name, as they were before a plan ran them.
    """
    alike: dict[str, str] = {}
    kinds: list[tuple[Any, str]] = []
    for name, layer in layers.items():
        description = _describe_layer(layer, path=name, plan=plan, forwards=forwards)
        first = next((first for kind, first in kinds if kind == description), None)
        if first is None:
            kinds.append((description, name))
        alike[name] = first or name
    return alike


def _describe_layer(
    layer: nn.Module, path: str, plan: ShardingPlan, forwards: Mapping[str, Callable[..., Any]]
) -> Any:
    """Return all that a layer's forward depends on apart from its tensors; equal for alike layers.

    forwards: as in `find_alike_layers`.
    """
    modules = []
    for name, module in layer.named_modules():
        forward = forwards.get(f"{path}.{name}" if name else path)
        settings = {
            key: _make_comparable(value)
            for key, value in vars(module).items()
            if key not in _IGNORED_ATTRIBUTES
        }
        tensor_names = [
            key
            for key, tensor in (module._parameters | module._buffers).items()
            if tensor is not None
        ]
        # Hooks of the layer itself do not count: they run around its forward, outside the graph.
        hooks = (
            [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] if name else []
        )
        modules.append(
            (
                name,
                type(module),
                getattr(forward, "__func__", forward),
                settings,
                tensor_names,
                hooks,
            )
        )
    return modules, _list_exchanges(path, plan)


def _make_comparable(value: Any) -> Any:
    """Return a value that compares equal only to that of the same setting.

    Containers compare by their items, numbers by type and value, tensors by identity.
    """
    if isinstance(value, (list, tuple)):
        return type(value), [_make_comparable(item) for item in value]
    if isinstance(value, dict):
        return {key: _make_comparable(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    return id(value) if isinstance(value, Tensor) or type(value).__hash__ is None else value


def _list_exchanges(path: str, plan: ShardingPlan) -> Any:
    """Return the plan's boundaries, gathered parameters and divided attributes in a layer.

    Names and numbers are those within the layer. Fields that change no exchange are left empty:
    numbers of axes, the parameters of a product, sources and reasons.
    """
    prefix = f"{path}."
    # Number in the plan -> number within the layer; -1, which stands for none, stays.
    activations = {-1: -1}
    boundaries = [
        replace(
            boundary,
            module=boundary.module.removeprefix(path),
            activation=activations.setdefault(boundary.activation, len(activations)),
            axes=(),
            parameters=(),
            source="",
        )
        for boundary in plan.boundaries
        if boundary.module == path or boundary.module.startswith(prefix)
    ]
    # `whole`: numbers of the segments that a rank gathers for each use.
    gathered_parameters = [
        replace(parameter, name=parameter.name.removeprefix(prefix), axis=0, reason="")
        for parameter in plan.parameters
        if parameter.whole and parameter.name.startswith(prefix)
    ]
    rewrites = [
        replace(rewrite, module=rewrite.module.removeprefix(path), axes=())
        for rewrite in plan.rewrites
        if rewrite.module == path or rewrite.module.startswith(prefix)
    ]
    return boundaries, gathered_parameters, rewrites


_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_ATEN = torch.ops.aten
# Operators between a gather and the gathered tokens: its wait, views and copies.
_COPIES = frozenset(
    {
        torch.ops._c10d_functional.wait_tensor.default,
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN.reshape.default,
        _ATEN.clone.default,
        _ATEN.alias.default,
        _ATEN.permute.default,
        _ATEN.transpose.int,
        _ATEN.expand.default,
        _ATEN.unsqueeze.default,
        _ATEN.squeeze.dim,
        operator.getitem,
    }
)


def _find_gathered_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the gathers of forward in a joint graph, with their views and copies.

    Nodes of backward, which depend on a tangent, are not among them.
    """
    gathered: dict[fx.Node, None] = {}
    of_backward: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or of_backward.intersection(inputs):
            of_backward.add(node)
        elif node.target is _GATHER or (
            node.target in _COPIES and not gathered.keys().isdisjoint(inputs)
        ):
            gathered[node] = None
    return list(gathered)


class RegatheringPartitioner(CustomPartitionerFn):
    """torch's partitioner, but a compiled layer keeps no gathered tokens for backward.

    For inductor's option `custom_partitioner_fn`. torch's own merges the gather of the same tokens
    in backward with that in forward, and keeps the result: the tokens of all ranks, where each rank
    could keep its own.
    """

    # (the joint graph of a layer, ...) -> (graph of forward, graph of backward)
    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        # Imported here, as it imports 366 modules in 0.2 s, and few runs compile.
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        gathered_nodes = _find_gathered_nodes(gm.graph)
        # Marked as torch marks what activation checkpointing recomputes.
        for node in gathered_nodes:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
        # Backward's matmuls read gathered tokens, and by default torch does not recompute what an
        # operator that cannot be fused reads.
        with functorch_config.patch(ban_recompute_materialized_backward=not gathered_nodes):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    # The key of this partitioner in inductor's cache of graphs.
    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
