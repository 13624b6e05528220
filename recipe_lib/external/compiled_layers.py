"""torch.compile for layers that exchange by an inferred plan.

The plan's exchanges are at calls that a torch function mode counts, which dynamo cannot read. So to
dynamo a layer is one call, into which AOTAutograd traces (`torch._dynamo.nonstrict_trace`): the
plan runs the layer's forward once, of tensors without values, and its collectives are in the graph,
forward and backward. Whatever is not the same at every call goes in as an argument: parameters and
buffers, which FSDP exchanges, and the number of the rank. As a tensor, so that all ranks have the
same graph: inductor orders collectives, and ranks that do so in different ways wait for each other
forever. Activation checkpointing is around that call, and compiled with it.

Layers that are alike (`find_alike_layers`) are traced as the first of them, with their own tensors,
unless its forward reads which layer it is: layers of the same code with the same settings, and
exchanges at the same calls.

What one of them does to its tensors is then what another one does to its own, so that a compiler
has to look at one alone. Only what compares equal counts: settings that are objects of a layer's
own make it one of a kind.

What a compiled layer keeps for backward holds no gathered tokens (`RegatheringPartitioner`):
torch's partitioner takes the second gather of the same tokens, which backward makes, for the first
one, and keeps what that gave: as many tokens as all ranks have, where each could keep its own.
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

_Alone = Callable[[Tensor, Any], AbstractContextManager[None]]
_Place = tuple[dict[str, Any], str]
_TENSOR = object()
# Attributes that number layers; whoever runs one in the place of another one sees to it that they
# are not read.
NUMBERS = ("layer_idx", "layer_id", "layer_number")
_OF_ALL = frozenset(vars(nn.Module())) | {"forward", *NUMBERS}


@dataclass
class _Call:
    """One way in which a layer is called."""

    path: str
    # Its arguments, put together by spec, with `_TENSOR` for each tensor.
    leaves: list[Any]
    spec: pytree.TreeSpec
    # Tokens in a row, and how many times those that the layer reads; 0: length alone is known.
    length: int
    times: int
    # What it gives, which is known when it has been traced.
    outputs: list[Any] = field(default_factory=list)
    outputs_spec: pytree.TreeSpec | None = None


class CompiledLayers:
    """The compiled layers of one model. length: of the rows of the forward that runs. alone,
    outside: contexts of a layer that is traced, and of one that is called. gathers_again: gathered
    tokens are not kept for backward.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        rank: int,
        *,
        length: Callable[[], int],
        alone: _Alone,
        outside: Callable[[], AbstractContextManager[None]],
        gathers_again: bool,
    ) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self.gathers_again = gathers_again
        self.length = length
        self.alone = alone
        self.outside = outside
        self.forwards: dict[str, Callable[..., Any]] = {}
        # Of all modules, before the plan ran them.
        self.originals: dict[str, Callable[..., Any]] = {}
        # Those that are compiled; the stages of a pipeline swap modules.
        self.layers: dict[str, nn.Module] = {}
        self.compiled: dict[str, Callable[..., list[Tensor]]] = {}
        self.like: dict[str, str] = {}
        self.places: dict[str, list[_Place]] = {}
        self.keys: dict[Any, str] = {}
        self.calls: dict[str, _Call] = {}
        self.ranks: dict[torch.device, Tensor] = {}
        self.traced: Callable[..., Any] = self._trace

    def make_traceable(self, forward: Callable[..., Any], path: str) -> Callable[..., Any]:
        """Make a layer's forward take what `compile` calls it with, too: a text, the rank's number,
        and tensors.
        """
        self.forwards[path] = forward

        def run(*args: Any, **kwargs: Any) -> Any:
            is_traced = bool(args) and isinstance(args[0], str)
            return self.traced(*args) if is_traced else forward(*args, **kwargs)

        return run

    def compile(self, path: str, backend: Any) -> None:
        """Compile a layer's forward, checkpointing included if it is there. backend: of
        torch.compile.
        """
        if self.traced == self._trace:
            self.traced = torch._dynamo.nonstrict_trace(self._trace)
        layer: Any = self.model.get_submodule(path)
        self.layers[path] = layer
        regathers = backend == "inductor" and self.gathers_again
        options = {"custom_partitioner_fn": RegatheringPartitioner()} if regathers else None
        self.compiled[path] = torch.compile(
            _copy_with_own_code(layer.forward, path),
            backend=backend,
            options=options,
            fullgraph=True,
        )
        held = [
            tensors
            for module in layer.modules()
            for tensors in (module._parameters, module._buffers)
        ]
        self.places[path] = [
            (tensors, name) for tensors in held for name in tensors if tensors[name] is not None
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.outside():
                return self._call(path, layer=layer, args=args, kwargs=kwargs)

        layer.forward = run

    def _call(self, path: str, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.like:
            self.like = find_alike_layers(self.layers, self.plan, self.originals)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [each for each in leaves if isinstance(each, Tensor)]
        held_tensors = [get_local(tensors[name]) for tensors, name in self.places[path]]
        like = self.like[path]
        is_like = _list_module_states(self.layers[like]) == _list_module_states(layer)
        key = self._get_key(
            like if is_like else path, layer=layer, leaves=leaves, spec=spec, first=given[0]
        )
        try:
            tensors = iter(self._run(key, given, held_tensors))
        except _LayerNumberIsReadError:
            self.like = {name: name for name in self.like}
            key = self._get_key(path, layer=layer, leaves=leaves, spec=spec, first=given[0])
            tensors = iter(self._run(key, given, held_tensors))
        call = self.calls[key]
        assert call.outputs_spec is not None
        return pytree.tree_unflatten(
            [next(tensors) if each is _TENSOR else each for each in call.outputs], call.outputs_spec
        )

    def _run(self, key: str, given: list[Tensor], held: list[Tensor]) -> list[Tensor]:
        """Run a compiled layer. Raises SetupError for one that cannot be traced, with what is wrong
        with it.
        """
        path = self.calls[key].path
        device = given[0].device
        if device not in self.ranks:
            self.ranks[device] = torch.tensor(self.rank, device=device)
        try:
            return self.compiled[path](key, self.ranks[device], *held, *given)
        except torch._dynamo.exc.TorchDynamoException as error:
            chain: list[BaseException] = [error]
            while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
                chain.append(before)
            if (
                own := next((each for each in chain if isinstance(each, UserError)), None)
            ) is not None:
                raise own from None
            said = f"{type(chain[-1]).__name__}: {' '.join(str(chain[-1]).split())[:200]}"
            raise SetupError(
                f"compile: {path} cannot be traced as its tensor-parallel plan runs it ({said});"
                " set compile=false or parallel.tensor=1"
            ) from error

    def _get_key(
        self, path: str, layer: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, first: Tensor
    ) -> str:
        """Return the key of the graph of a call: other arguments, rows of another kind or adapters
        switched off have another.
        """
        length = self.length()
        # Rows are as long as those that the layer reads, or have all ranks' tokens.
        times = length // first.shape[1] if first.dim() == 3 and length % first.shape[1] == 0 else 0
        others = [_TENSOR if isinstance(each, Tensor) else each for each in leaves]
        said = (
            path,
            str(spec),
            times or -length,
            torch.is_grad_enabled(),
            *_list_module_states(layer),
            *map(_make_comparable, others),
        )
        key = self.keys.setdefault(said, f"{path} {len(self.keys)}")
        if key not in self.calls:
            self.calls[key] = _Call(path, leaves=others, spec=spec, length=length, times=times)
        return key

    def _trace(self, key: str, rank: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Run the forward of a layer while it is traced. tensors: what it holds, and what it is
        called with.
        """
        call = self.calls[key]
        places = self.places[call.path]
        held_tensors = tensors[: len(places)]
        given = iter(tensors[len(places) :])
        args, kwargs = pytree.tree_unflatten(
            [next(given) if each is _TENSOR else each for each in call.leaves], call.spec
        )
        length = call.times * tensors[len(places)].shape[1] if call.times else call.length
        entries: list[Entry] = [
            (*place, tensor) for place, tensor in zip(places, held_tensors, strict=True)
        ]
        if list(self.like.values()).count(call.path) > 1:  # it is traced for others, too
            attributes = [vars(module) for module in self.layers[call.path].modules()]
            entries += [
                (held, name, _NoNumber()) for held in attributes for name in NUMBERS if name in held
            ]
        with replace_entries(entries), self.alone(rank, length):
            outputs, call.outputs_spec = pytree.tree_flatten(
                self.forwards[call.path](*args, **kwargs)
            )
        call.outputs = [_TENSOR if isinstance(each, Tensor) else each for each in outputs]
        return [each for each in outputs if isinstance(each, Tensor)]


class _LayerNumberIsReadError(UserError):
    """The forward of a layer depends on which one it is."""


class _NoNumber:
    """In the place of a layer's number: whoever does anything with it would do something else in
    another layer.
    """

    def _read(self, *asked: Any) -> Any:
        raise _LayerNumberIsReadError("a layer's number is read")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = (
        __float__
    ) = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = (
        __floordiv__
    ) = _read
    __truediv__ = __rtruediv__ = __neg__ = __str__ = __repr__ = __format__ = __hash__ = (
        __getattr__
    ) = _read


def _copy_with_own_code(forward: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Copy a function so that it is not compiled together with others: torch counts compilations,
    and shapes, by code and name.
    """

    def run(*args: Any) -> Any:
        return forward(*args)

    code = run.__code__.replace(co_name=path.replace(".", "_"))
    return FunctionType(code, globals(), code.co_name, closure=run.__closure__)


def _list_module_states(layer: nn.Module) -> list[tuple[bool, bool]]:
    """List what changes in modules between calls."""
    return [(module.training, getattr(module, "is_off", False)) for module in layer.modules()]


def find_alike_layers(
    layers: Mapping[str, nn.Module], plan: ShardingPlan, forwards: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """Find for each layer the first one that it is like, by name. forwards: of modules by name,
    before a plan ran them.
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
    """Return all that a layer's forward depends on apart from its tensors."""
    modules = []
    for name, module in layer.named_modules():
        forward = forwards.get(f"{path}.{name}" if name else path)
        settings = {
            key: _make_comparable(value)
            for key, value in vars(module).items()
            if key not in _OF_ALL
        }
        held_names = [
            key
            for tensors in (module._parameters, module._buffers)
            for key in tensors
            if tensors[key] is not None
        ]
        hooks = (
            [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] if name else []
        )
        modules.append(
            (name, type(module), getattr(forward, "__func__", forward), settings, held_names, hooks)
        )
    return modules, _list_exchanges(path, plan)


def _make_comparable(value: Any) -> Any:
    """Return what compares equal only to the same setting: containers by what is in them, tensors
    and others by identity.
    """
    if isinstance(value, (list, tuple)):
        return type(value), [_make_comparable(each) for each in value]
    if isinstance(value, dict):
        return {key: _make_comparable(each) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    return id(value) if isinstance(value, Tensor) or type(value).__hash__ is None else value


def _list_exchanges(path: str, plan: ShardingPlan) -> Any:
    """Return the plan's boundaries, parameters to assemble and rewrites in a layer, by names within
    it.
    """
    inside = f"{path}."
    activations = {-1: -1}  # numbered anew within the layer
    boundaries = [
        replace(
            each,
            module=each.module.removeprefix(path),
            activation=activations.setdefault(each.activation, len(activations)),
            axes=(),
            parameters=(),
            source="",
        )
        for each in plan.boundaries
        if each.module == path or each.module.startswith(inside)
    ]
    assembled = [
        replace(each, name=each.name.removeprefix(inside), axis=0, reason="")
        for each in plan.parameters
        if each.whole and each.name.startswith(inside)
    ]
    divided = [
        replace(each, module=each.module.removeprefix(path), axes=())
        for each in plan.rewrites
        if each.module == path or each.module.startswith(inside)
    ]
    return boundaries, assembled, divided


_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_ATEN = torch.ops.aten
# What makes gathered tokens of what a gather gives: wait, views and copies.
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
    """Return what forward gathers, with its views and copies."""
    gathered: dict[fx.Node, None] = {}
    of_backward: set[fx.Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or of_backward.intersection(read):
            of_backward.add(node)
        elif node.target is _GATHER or (
            node.target in _COPIES and not gathered.keys().isdisjoint(read)
        ):
            gathered[node] = None
    return list(gathered)


class RegatheringPartitioner(CustomPartitionerFn):
    """torch's partitioner, as inductor's setting `custom_partitioner_fn` takes one; what is
    gathered is not kept.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a layer's joint graph into its forward and its backward."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        again = _find_gathered_nodes(gm.graph)
        for node in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
        with functorch_config.patch(ban_recompute_materialized_backward=not again):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return what inductor's cache of graphs knows it by."""
        return get_hash_for_files((__file__,))
