"""Shard a model over the data ranks with FSDP2, and allocate its parameters.

`parallelize` calls `shard_model`; code that loads or initializes weights calls `materialize`. A
unit is a module, or modules that share a parameter, whose parameters FSDP gathers and frees
together. The root is the unit of the model itself, with all other parameters. Data ranks are those
that have batches of their own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from recipe_lib.adapters import is_adapter
from recipe_lib.adapters.layers import AdaptedEmbedding, AdaptedHead
from recipe_lib.config.schema import MemoryConfig, ParallelConfig
from recipe_lib.config.suggest import did_you_mean, find_nearest, quote
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.memory.layer_stream import list_streamed_parameters
from recipe_lib.models.decoder import Decoder, LinearHead, OutputHead, ScaledEmbedding
from recipe_lib.models.language_model import (
    LanguageModel,
    get_modules_elsewhere,
    list_layer_names,
    replace_entries,
)
from recipe_lib.models.meta_init import allocate, find_extra_tensors
from recipe_lib.models.mixture import Experts
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.ops.head_losses import makes_gradients_in_forward
from recipe_lib.parallel.ddp import DTYPES
from recipe_lib.parallel.gradient_accumulation import is_kept, list_fsdp_modules, reduces_once
from recipe_lib.parallel.world import World

# A unit's parameters are gathered just before it runs and freed just after, so the largest unit
# sets how many whole parameters are alive at once. What is in no unit is in the root: gathered at
# the first forward, freed at the end of backward, its gradients whole until then. For Llama 3 8B in
# bf16 embedding and output projection are 0.98 GiB each, a layer is 0.41 GiB: in the root
# (`layers`) they hold 1.96 GiB throughout the step, and their gradients 1.96 GiB more during
# backward; as units of their own (`memory_efficient`) each is there only while it runs.


POLICIES = ("auto", "layers", "memory_efficient")  # of `resolve_wrapping`


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered and freed as one."""

    # Dotted names; several only when the modules share a parameter.
    names: tuple[str, ...]
    # Of the gathered parameters, without those of units inside this one.
    bytes: int


def resolve_wrapping(
    model: nn.Module, wrapping: str | Iterable[str], *, whole_layers: bool = False
) -> list[Unit]:
    """Return the FSDP units of a model, in module order, without the root.

    wrapping: one of these policies, or a list of patterns:

    - `layers`: a unit for each layer.
    - `memory_efficient`: also one for each module outside the layers that owns a matrix, in a
      decoder the embedding and the output projection (one unit if tied), and one for the experts
      of a layer if they are most of it, inside of the layer's unit.
    - `auto`: `memory_efficient` if one of those matrices is larger than the largest layer, or
      experts are most of a layer; else `layers`.
    - patterns over module names, matched part by part (`model.layers.*` is every layer, without the
      modules inside it). A unit may be inside another.

    whole_layers: True to leave experts in their layer's unit under any policy. Raise ConfigError
    for an unknown policy, for a policy and a model without a list of layers, for an empty list of
    patterns, and for a pattern that matches no module that can be a unit.
    """
    if isinstance(wrapping, str):
        if wrapping not in POLICIES:
            raise ConfigError(
                f"parallel.fsdp_wrap_policy: found {quote(wrapping)}, expected"
                f" {', '.join(POLICIES)} or a list of module-name patterns such as"
                f" [model.layers.*]{did_you_mean(wrapping, POLICIES)}"
            )
        return _choose_units(model, wrapping, whole_layers)
    return _make_units(model, _match_all(model, list(wrapping)))


def count_parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters as FSDP gathers them, shared ones counted once.

    The parameters may be on the meta device.
    """
    return sum(
        count_whole_elements(parameter) * parameter.element_size()
        for parameter in module.parameters()
    )


def count_whole_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter as FSDP gathers it, also if it is sharded.

    Of a parameter that a tensor-parallel group divides, FSDP gathers one rank's part.
    """
    if isinstance(parameter, DTensor):
        dims = parameter.device_mesh.mesh_dim_names or ()
        if "tensor" in dims and parameter.placements[dims.index("tensor")].is_shard():
            # Rounded up: the first ranks have the larger parts.
            return -(-parameter.numel() // parameter.device_mesh.size(dims.index("tensor")))
    return parameter.numel()


def _choose_units(model: nn.Module, policy: str, whole_layers: bool) -> list[Unit]:
    """Return the units of a policy, one of `POLICIES`; see `resolve_wrapping`."""
    layers = list_layer_names(model)
    if not layers:
        raise ConfigError(
            f"parallel.fsdp_wrap_policy: found {policy}, but the model has no list of layers; name"
            f" its units by patterns, such as [{_list_patterns(model)[0]}]"
        )
    matrices = [] if policy == "layers" else _list_outer_matrices(model, layers)
    experts = [] if policy == "layers" or whole_layers else _list_large_experts(model, layers)
    units = _make_units(model, layers + matrices + experts)
    if policy == "auto":
        # Without units for experts, so that a layer's bytes are those of all of it.
        candidates = _make_units(model, layers + matrices)
        largest_layer_bytes = max(
            unit.bytes for unit in candidates if set(unit.names) & set(layers)
        )
        if not experts and all(unit.bytes <= largest_layer_bytes for unit in candidates):
            return _make_units(model, layers)
    return units


def _list_large_experts(model: nn.Module, layers: list[str]) -> list[str]:
    """Return the names of the experts' modules that are more than half of their layer.

    As a unit of their own they are gathered while the layer's attention runs. While they run, only
    the attention of the next layer is gathered: never the experts of two layers at a time.
    """
    large_experts = []
    for name, module in model.named_modules():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if (
            isinstance(module, Experts)
            and layer is not None
            and count_parameter_bytes(module)
            > count_parameter_bytes(model.get_submodule(layer)) / 2
        ):
            large_experts.append(name)
    return large_experts


def _list_outer_matrices(model: nn.Module, layers: list[str]) -> list[str]:
    """Return the names of modules outside the layers that own a matrix: embedding and output.

    Modules inside one of them, such as those of its adapter, are gathered with it and not listed.
    """
    matrices: list[str] = []
    for name, module in model.named_modules():
        is_inside = name.startswith(tuple(f"{outer}." for outer in layers + matrices))
        has_matrix = any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
        if name and name not in layers and not is_inside and has_matrix:
            matrices.append(name)
    return matrices


def _match_all(model: nn.Module, patterns: list[str]) -> list[str]:
    """Return the names of the modules that the patterns match, in module order.

    Raise ConfigError for an empty list, and for a pattern that matches no module of any stage of a
    pipeline.
    """
    if not patterns:
        raise ConfigError(
            "parallel.fsdp_wrap_policy: found an empty list, expected patterns such as"
            " [model.layers.*], or one of " + ", ".join(POLICIES)
        )
    modules = [name for name, module in model.named_modules() if name and _can_be_unit(module)]
    elsewhere = get_modules_elsewhere(model)  # names of modules of other stages of a pipeline
    matched: set[str] = set()
    for pattern in patterns:
        names = [name for name in modules if _is_match(name, str(pattern))]
        if not names and not any(_is_match(name, str(pattern)) for name in elsewhere):
            existing_patterns = _list_patterns(model)
            nearest = find_nearest(str(pattern), existing_patterns)
            suggestions = [nearest] if nearest else []
            suggestions += [name for name in existing_patterns if name != nearest]
            raise ConfigError(
                f"parallel.fsdp_wrap_policy: pattern {quote(str(pattern))} matches no unit; "
                f"{'nearest' if nearest else 'there are'}: {', '.join(suggestions[:5])}"
            )
        matched.update(names)
    return [name for name in modules if name in matched]


def _is_match(name: str, pattern: str) -> bool:
    """Return True if each dotted part of a module's name matches the same part of the pattern."""
    parts = name.split(".")
    pattern_parts = pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def _list_patterns(model: nn.Module) -> list[str]:
    """Return patterns that match a module, for error messages; those of larger modules first.

    They are the names of all modules that can be units, with `*` for the index in a list.
    """
    largest_bytes: dict[str, int] = {}  # by pattern, of the largest module that it matches
    for name, module in model.named_modules():
        if name and _can_be_unit(module):
            template = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            largest_bytes[template] = max(
                largest_bytes.get(template, 0), count_parameter_bytes(module)
            )
    return sorted(largest_bytes, key=lambda template: -largest_bytes[template])


def _make_units(model: nn.Module, names: list[str]) -> list[Unit]:
    """Return the units of the modules of these names, in module order.

    Modules that share a parameter become one unit, since FSDP manages a parameter in one unit.
    """
    modules = dict(model.named_modules())
    # By module name, the parameters that its unit manages. Over `modules`, so in module order.
    owned = {
        name: _list_own_parameters(modules[name], name, names)
        for name in modules
        if name in set(names)
    }
    in_units = {id(parameter) for parameter in chain.from_iterable(owned.values())}
    covered = tuple(f"{name}." for name in owned)
    for name, module in modules.items():
        # A module of the root that shares a unit's parameter joins the unit.
        if name and name not in owned and not name.startswith(covered):
            parameters = list(module.parameters(recurse=False))
            if any(id(parameter) in in_units for parameter in parameters):
                owned[name] = parameters
    # Of each unit, its module names and its parameters by id.
    groups: list[tuple[list[str], dict[int, Tensor]]] = []
    for name in [name for name in modules if name in owned]:  # in module order
        by_id = {id(parameter): parameter for parameter in owned[name]}
        group = next((group for group in groups if group[1].keys() & by_id.keys()), None)
        if group is None:
            group = ([], {})
            groups.append(group)
        group[0].append(name)
        group[1].update(by_id)
    return [
        Unit(
            names=tuple(members),
            bytes=sum(
                count_whole_elements(tensor) * tensor.element_size() for tensor in by_id.values()
            ),
        )
        for members, by_id in groups
    ]


def _list_own_parameters(module: nn.Module, name: str, unit_names: list[str]) -> list[nn.Parameter]:
    """Return the parameters of a unit's module that no unit inside it holds."""
    inner_prefixes = tuple(f"{inner}." for inner in unit_names if inner.startswith(f"{name}."))
    return [
        parameter
        for local_name, parameter in module.named_parameters(remove_duplicate=False)
        if not f"{name}.{local_name}".startswith(inner_prefixes)
    ]


def _can_be_unit(module: nn.Module) -> bool:
    """Return True for a module with parameters and a forward; a list of modules has no forward."""
    is_container = (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )
    return not is_container and next(module.parameters(), None) is not None


# Modules whose weight need not be gathered for backward. Compared by type(), so that derived
# classes are left out: their backward might read the weight after it was freed, and crash.
_EMBEDDINGS = (nn.Embedding, ScaledEmbedding, AdaptedEmbedding)  # backward reads tokens only
_HEADS = (OutputHead, AdaptedHead, LinearHead)  # with labels they make gradients in forward


def shard_model(
    model: nn.Module,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    world: World,
    *,
    whole_layers: bool = False,
) -> list[Unit]:
    """Shard a model with FSDP2, in place; return its units, without the root.

    It is sharded over the mesh's `data_shard` dimension and replicated over `data_replicate`;
    context-parallel ranks are neighbors in these. Parameters, frozen ones too, become DTensors of
    the same names and dtypes. Gradients are SUMS over these ranks, made in `parallel.reduce_dtype`:
    divide a loss by the number of label tokens of the global batch.

    The model is left as it is, and the list is empty, with `parallel.strategy: ddp`, and with one
    data rank without `memory.cpu_offload`. Parameters that `memory.stream_layers` keeps on the host
    stay whole on each rank.

    whole_layers: True to leave experts in their layer's unit, for layers that are compiled or that
    run their MLP for some of the tokens at a time. Raise ConfigError for a
    `parallel.fsdp_wrap_policy` that does not fit the model, and with `parallel.pipeline` for a
    model that was not divided into stages.
    """
    if world.pipeline is not None and not get_modules_elsewhere(model):
        raise ConfigError(
            f"parallel.pipeline: found {world.pipeline.size} for a recipe that leaves its model"
            " whole, expected one that divides it; call parallelize(model, cfg, world), or set"
            " parallel.pipeline=1"
        )
    streamed = set(list_streamed_parameters(model))  # those kept on the host
    units = resolve_wrapping(
        model, parallel.fsdp_wrap_policy, whole_layers=whole_layers or bool(streamed)
    )
    if streamed:
        units = [_leave_out_streamed(unit, model, streamed) for unit in units]
        units = [unit for unit in units if unit.bytes]
    # After the units are resolved, so that a wrong policy is refused here too.
    if parallel.strategy == "ddp" or (world.copies == 1 and not memory.cpu_offload):
        return []
    is_replicated = world.mesh["data_replicate"].size() > 1
    mesh = world.mesh["data_replicate", "data_shard"] if is_replicated else world.mesh["data_shard"]
    reduce_dtype = DTYPES[parallel.reduce_dtype] if parallel.reduce_dtype else None
    if parallel.accumulate_grad_in_fp32 and reduces_once(parallel):
        reduce_dtype = torch.float32  # FSDP also adds up the micro-batches in this dtype
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
            if memory.cpu_offload
            else OffloadPolicy()
        ),
        "ignored_params": streamed or None,
    }
    modules = dict(model.named_modules())
    embeddings = [module for module in modules.values() if type(module) in _EMBEDDINGS]
    tie_heads: list[Callable[[], None]] = []
    # Innermost first: fully_shard leaves out the parameters of units inside that exist already.
    for unit in sorted(units, key=lambda unit: -max(name.count(".") for name in unit.names)):
        members = [modules[name] for name in unit.names]
        if _is_tied_pair(members):
            tie_heads.append(_shard_tied_pair(members, parallel.reshard_after_forward, options))
        elif len(members) > 1:
            fully_shard(members, reshard_after_forward=parallel.reshard_after_forward, **options)
        else:
            _shard_module(members[0], parallel.reshard_after_forward, options)
    fully_shard(model, **options)
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if isinstance(model, Decoder) and is_frozen:
        # A frozen model, such as a teacher, is called in parts (`evaluate_in_parts`).
        register_fsdp_forward_method(model, "hidden_states")
    model.register_forward_hook(_free_after_evaluation)
    if world.pipeline is not None or is_frozen:
        model.register_forward_hook(_forget_order)
    for tie_head in tie_heads:
        tie_head()
    for fsdp_module in list_fsdp_modules(model):
        # Sums of gradients, not means.
        fsdp_module.set_gradient_divide_factor(1.0)
        # A plain sum is exact, and every backend has it.
        fsdp_module.set_force_sum_reduction_for_comms(True)
    for module in embeddings:
        if isinstance(module, FSDPModule):
            module.set_unshard_in_backward(False)  # its backward does not read the weight
    return units


def _leave_out_streamed(unit: Unit, model: nn.Module, streamed: set[nn.Parameter]) -> Unit:
    """Return a unit whose bytes leave out those of `streamed`, the parameters kept on the host."""
    parameters = [model.get_submodule(name).parameters() for name in unit.names]
    hosted_bytes = sum(
        locate_local_part(parameter)[0].nbytes
        for parameter in streamed.intersection(chain.from_iterable(parameters))
    )
    return replace(unit, bytes=unit.bytes - hosted_bytes)


def materialize(model: nn.Module, memory: MemoryConfig, device: torch.device) -> None:
    """Allocate a meta model's parameters and buffers on `device`, without setting their values.

    With `memory.cpu_offload` all parameters are on the host, else those of the layers that
    `memory.stream_layers` keeps there. Beside a GPU those on the host are pinned: their memory is
    taken now. Tied parameters stay tied. Only buffers that were computed when their module was
    made, in an external model or by a recipe off the meta device, have values afterwards.

    Raise SetupError for a parameter that a recipe made off the meta device: its values could differ
    from rank to rank.
    """
    extras = find_extra_tensors(model)  # by name, tensors that no checkpoint of its family has
    for name, parameter in model.named_parameters():
        if name in extras and parameter.device.type != "meta":
            raise SetupError(
                f"{name}: found values on {parameter.device.type} before load_weights, expected"
                " none; make the module on the meta device (with torch.device('meta')), and give"
                " it its values in reset_parameters"
            )
    if isinstance(model, LanguageModel):
        computed = {
            name: buffer.detach().clone()
            for name, buffer in model.named_buffers()
            if name in extras and buffer.device.type != "meta"
        }
        model.computed_buffers = {**model.computed_buffers, **computed}
    parameter_device = torch.device("cpu") if memory.cpu_offload else device
    streamed_ids = {id(parameter) for parameter in list_streamed_parameters(model)}
    buffer_ids = {id(buffer) for buffer in model.buffers()}

    def make_empty(tensor: Tensor) -> Tensor:
        if id(tensor) in streamed_ids:  # pinned, so that copies from it do not wait
            return torch.empty_like(tensor, device="cpu", pin_memory=device.type != "cpu")
        return torch.empty_like(
            tensor, device=device if id(tensor) in buffer_ids else parameter_device
        )

    # With `memory.cpu_offload` FSDP pins the parameters of each unit in its own `_apply`, where an
    # unpinned tensor would take its memory when it is first written.
    allocate(model, device, make_empty)


def _shard_module(module: nn.Module, reshard_after_forward: bool, options: dict[str, Any]) -> None:
    """Make one module a unit; embedding and output projection are gathered as late as possible."""
    is_head = type(module) in _HEADS  # before fully_shard changes the module's class
    is_embedding = type(module) in _EMBEDDINGS
    fully_shard(module, reshard_after_forward=reshard_after_forward, **options)
    if is_head:
        module.register_forward_pre_hook(_plan_backward_gather, with_kwargs=True)
    if is_head or is_embedding:
        module.register_forward_pre_hook(_gather_now, prepend=True)


def _plan_backward_gather(unit: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set if the head's weight is gathered for backward; a forward pre-hook with kwargs.

    For a sum of losses it is not: the head makes their gradients in its forward. For logits, for
    log-probabilities of single tokens, and for a recipe's own head_loss it is gathered.
    """
    is_logits = kwargs.get("labels") is None
    unit.set_unshard_in_backward(
        is_logits or not makes_gradients_in_forward(kwargs.get("head_loss"))
    )


def _gather_now(module: FSDPModule, args: tuple[Any, ...]) -> None:
    """Gather a unit on the stream that computes, before FSDP would; a forward pre-hook.

    The gather's buffer is then free when this returns. FSDP by itself gathers on another stream and
    keeps the buffer until the next unit has gathered. For the output projection that would be a
    third tensor of the size of its weight, next to the weight and its gradient.
    """
    module.unshard()


def _free_after_evaluation(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Free the units that are still gathered after a forward without gradients; a forward hook.

    The root is always one of them, as FSDP frees it in backward only. A unit whose weights stay
    gathered through a step (`is_kept`) is left to that step's last backward.
    """
    if not torch.is_grad_enabled():
        for module in list_fsdp_modules(model):
            if not is_kept(module):
                module.reshard()


@contextmanager
def evaluate_in_parts(model: Decoder, *, head: bool = False) -> Iterator[None]:
    """Let a block call a model's `hidden_states` or its output head by itself, without gradients.

    At the end of the block the gathered parameters are freed, as after a forward of the model.
    head: True if the block calls the head. Its weight is gathered first if it is in the root, which
    only a forward of the model would gather.
    """
    root = model if isinstance(model, FSDPModule) else None
    if root is not None and head:
        output = model.lm_head
        embedding = model.model.embed_tokens
        is_second_use = isinstance(embedding, FSDPModule) and output.weight is embedding.weight
        if not (isinstance(output, FSDPModule) or is_second_use):  # else its call gathers it
            root.unshard()
    try:
        yield
    finally:
        if root is not None:
            _free_after_evaluation(model, (), None)
            _forget_order(model, (), None)


def _forget_order(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Clear FSDP's record of the order in which units ran forward; a forward hook.

    Backward prefetches by it. In a frozen model, such as a reference model, no backward takes
    entries off, and the record would grow with every forward. In a pipeline the unit that ran
    before may be another stage's, whose backward is not next: it would be gathered for nothing, and
    its memory freed (FSDP's `finalize_backward`) while the gather may still write it. FSDP2 has no
    public way to clear it.
    """
    for module in list_fsdp_modules(model):
        state = module._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()


def _is_tied_pair(members: list[nn.Module]) -> bool:
    """Return True for an embedding and the head of the same matrix, with adapters at most."""
    if len(members) != 2 or type(members[0]) not in _EMBEDDINGS or type(members[1]) not in _HEADS:
        return False
    named = chain.from_iterable(member.named_parameters() for member in members)
    return {id(parameter) for name, parameter in named if not is_adapter(name)} == {
        id(members[0].weight)
    }


def _shard_tied_pair(
    members: list[nn.Module], reshard_after_forward: bool, options: dict[str, Any]
) -> Callable[[], None]:
    """Make the shared matrix one unit that runs twice in a forward: as embedding and as output.

    members: embedding and head. Return a function that ties the head to the embedding's sharded
    parameter again, to be called after the root is sharded. An adapter of the embedding is in its
    unit, one of the head in the root.
    """
    # One unit of both modules, as FSDP supports it, would keep the matrix gathered from the
    # embedding to the head and from the head to the end of backward, and its gradient unsharded
    # meanwhile: 2.6 GiB each for Gemma 3 27B in bf16. Here the head's forward is a second forward
    # method of the embedding's unit, so the matrix is gathered for each use and freed in between.
    # The head's gradient is reduced as soon as it is made, where autograd would hold it until the
    # embedding's gradient is there. It costs one more gather and one more reduction of the matrix.
    embedding: Any = members[0]
    head: Any = members[1]
    del head.weight
    project = head.forward

    # Run the head on the gathered matrix.
    def project_with_embedding(*args: Any, **kwargs: Any) -> Tensor:
        gathered = embedding.weight
        # A leaf of its own, so that its gradient is there when the head's backward ends.
        weight = nn.Parameter(gathered.detach(), requires_grad=gathered.requires_grad)
        if torch.is_grad_enabled() and gathered.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: _hand_over(weight, gathered))
        with replace_entries([(head._parameters, "weight", weight)]):
            return project(*args, **kwargs)

    fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
    embedding.register_forward_pre_hook(_gather_now, prepend=True)
    embedding.run_as_output = project_with_embedding
    register_fsdp_forward_method(embedding, "run_as_output")

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        _plan_backward_gather(embedding, args, kwargs)
        embedding.unshard()  # as `_gather_now` does
        return embedding.run_as_output(*args, **kwargs)

    head.forward = forward

    def tie() -> None:
        head.weight = embedding.weight

    return tie


def _hand_over(weight: Any, gathered: Any) -> None:
    """Move the head's gradient to the parameter whose gradient FSDP reduces.

    weight: the leaf that the head has read, whose gradient has just been made. gathered: the unit's
    unsharded parameter.
    """
    if gathered.grad is not None:
        gathered.grad.add_(weight.grad)  # in place, as autograd adds: it is as large as the matrix
    else:
        # Newer torch keeps gradients that wait for their reduction in the dtype of the reduction.
        gathered.grad = weight.grad.to(getattr(gathered, "grad_dtype", None) or weight.grad.dtype)
    weight.grad = None
