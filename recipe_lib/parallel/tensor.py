"""Shard a decoder over tensor-parallel groups, with sequence parallelism (arXiv 2205.05198).

`parallelize` calls `shard_tensors` on the meta model; the forwards are in `tensor_forwards`.
Between layers each of t ranks has n = N / t of a micro-batch's N tokens, `[n, d]`. Attention and
MLP gather all N, compute a part of the heads and channels, and reduce-scatter their outputs. A
mixture is an MLP of experts. A fault is one line of an error.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from recipe_lib.adapters.layers import QuantizedExperts
from recipe_lib.adapters.quantized import QuantizedLinear, can_cut, can_quantize
from recipe_lib.config.schema import MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DecoderLayer,
    Norm,
    SandwichLayer,
    WidthNorm,
)
from recipe_lib.models.language_model import find_own_forwards
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.models.mixture import Experts, Mixture
from recipe_lib.models.spec import DecoderSpec, ExternalSpec, MixtureSpec
from recipe_lib.ops.dtensor_shards import Runs
from recipe_lib.ops.gathered import Group
from recipe_lib.parallel import tensor_forwards as forwards
from recipe_lib.parallel.world import World

# Parameters become DTensors under their own names. Norms, the biases of row-parallel linears, and
# the halves of adapters that work on the n tokens are whole on every rank. Each rank has a summand
# of their gradients, which `all_reduce_gradients` sums.

# Linears of a layer by their name in it.
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # some outputs on a rank
ROW_PARALLEL = ("o_proj", "down_proj")  # some inputs on a rank
# All matrices that are divided. Those behind ROW_PARALLEL are divided by outputs (rows):
# `gate_up_proj` of the experts, the embedding and the output head by entries of the vocabulary.
_MATRICES = (*COLUMN_PARALLEL, *ROW_PARALLEL, "gate_up_proj", "embed_tokens", "lm_head")
# The forwards of decoder modules that `tensor_forwards` has a replacement for.
_REPLACED_FORWARDS = tuple(
    kind.forward
    for kind in (Attention, MLP, Mixture, Experts, DecoderLayer, SandwichLayer, Norm, WidthNorm)
)


def shard_tensors(
    model: Decoder, parallel: ParallelConfig, memory: MemoryConfig, world: World
) -> dict[str, str]:
    """Shard a meta model's matrices and tokens over each tensor-parallel group, in place.

    Called before layers are checkpointed, compiled and sharded by FSDP. The model then takes
    micro-batches whose number of tokens is a multiple of the group's size.

    Return by parameter name the kind of its gradient on a rank: `sharded`, the gradient of this
    rank's part, or `partial`, a summand of the whole gradient. Without tensor parallelism the dict
    is empty and the model left as it is. Raise ConfigError for a model that the ranks cannot share
    evenly (`check_tensor`).
    """
    if world.tensor is None:
        return {}
    if isinstance(model.spec, ExternalSpec):
        return model.spec.shard_tensors(model, parallel, world)
    spec = model.spec
    group = world.tensor
    # "nf4" or "int8", one for all linears of a model.
    quantized_kinds = [
        module.kind for module in model.modules() if isinstance(module, QuantizedLinear)
    ]
    check_tensor(spec, parallel, min(quantized_kinds, default="none"))
    # Where there are more ranks than kv heads, each rank has the weights of all of them, and
    # computes one.
    copies_kv_heads = spec.num_kv_heads % group.size != 0
    keep_gathered = parallel.tensor_regather_in_backward == "false"
    if parallel.tensor_regather_in_backward == "auto":
        # A checkpointed layer keeps gathered tokens only from its second forward to its backward.
        keep_gathered = memory.activation_checkpointing != "none"
    kv_head = group.rank * spec.num_kv_heads // group.size if copies_kv_heads else None
    sharing = forwards.Sharing(group, keep_gathered, kv_head)
    # Quantized modules are told which part they compute with. Their parameters are divided with
    # all others, below.
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts) and spec.mixture is not None:
            _share_quantized_experts(module, name=name, group=group, mixture=spec.mixture)
        elif isinstance(module, QuantizedLinear):
            head = kv_head if name.endswith(("k_proj", "v_proj")) else None
            _take_part(
                module,
                group=group,
                is_row_parallel=name.endswith(ROW_PARALLEL),
                kv_head=head,
                head_width=spec.head_width,
            )
    gradients = _place_parameters(
        model, world.mesh["tensor"], ("k_proj", "v_proj") if copies_kv_heads else ()
    )
    if spec.mixture is not None:
        # For loading and saving: the ranges of a full tensor that the ranks' shards consist of.
        model.runs = _list_expert_runs(model, spec.mixture, group.size)
    # Derived classes stand before their bases, as the first match counts.
    replacements: tuple[tuple[type[nn.Module], Callable[..., Any]], ...] = (
        (WidthNorm, _bind_settings(forwards.run_width_norm, group)),
        (Norm, forwards.run_norm),
        (Mixture, _bind_settings(forwards.run_mixture, group)),
        (Experts, forwards.run_experts),
        (SandwichLayer, forwards.run_sandwich_layer),
        (DecoderLayer, forwards.run_layer),
        (Attention, _bind_settings(forwards.run_attention, sharing)),
        (MLP, _bind_settings(forwards.run_mlp, sharing, spec.activation)),
    )
    for module in model.modules():
        forward = next(
            (forward for kind, forward in replacements if isinstance(module, kind)), None
        )
        if forward is not None:
            _replace_forward(module, forward)
    for outer_module, run in (
        (model.model.embed_tokens, forwards.run_embedding),
        (model.lm_head, forwards.run_head),
        (model.score, forwards.run_score_head),
    ):
        if outer_module is not None:  # else another stage of a pipeline has it
            _replace_forward(outer_module, _bind_settings(run, group))
    model.forward = forwards.restore_rows(model.forward)  # type: ignore[method-assign]
    return gradients


def refuse_for_tensor(model: Decoder) -> None:
    """Raise ConfigError for a model that a recipe has changed in ways that the ranks cannot share.

    These are parameters of a recipe's own, forwards of its own, and hooks in attention and MLPs.
    They would be replaced or skipped, or see inputs of other shapes: a part of the tokens, heads
    and channels. Called before `split_pipeline` and `shard_tensors`, which give modules forwards.
    """
    additions = [*find_extra_tensors(model), *_list_changes(model)]
    if additions:
        raise ConfigError(
            f"parallel.tensor: found {additions[0]}, which the recipe added, expected a model as it"
            " is built: ranks that share matrices have a part of the tokens each, and run forwards"
            " of their own; set parallel.tensor=1"
        )


def _list_changes(model: Decoder) -> list[str]:
    """Return the words for each forward that a recipe has replaced, and each hook to be skipped."""
    changes = []
    own_forwards = set(find_own_forwards(model))
    # Ids of attention, MLPs and the modules in them: `tensor_forwards` uses the weights of most
    # without calling the module, so hooks would not run.
    skipped_ids: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MLP, Mixture)):
            skipped_ids |= {id(child) for child in module.modules()}
        is_skipped = id(module) in skipped_ids
        if is_skipped and (module._forward_hooks or module._forward_pre_hooks):
            changes.append(f"a hook of {name}")
        # A layer that stands in this library, but not here, is not ours to replace either.
        is_replaced = isinstance(module, (Attention, MLP, Mixture, Experts, DecoderLayer, Norm))
        # What a recipe adds outside of attention and MLPs, without parameters, runs as it is.
        is_ours = is_skipped or next(module.parameters(), None) is not None
        if (is_ours and name in own_forwards) or (
            is_replaced and type(module).forward not in _REPLACED_FORWARDS
        ):
            changes.append(f"another forward of {name or 'the model'}")
    return changes


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module run another forward; its parameters and hooks stay as they are."""
    # A method of one function for all modules of a kind: with a callable object for each module
    # torch.compile would compile each layer anew.
    module.forward = MethodType(forward, module)


def _bind_settings(function: Callable[..., Any], *settings: Any) -> Callable[..., Any]:
    """Return a forward that calls `function(module, *settings, *inputs)`."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *settings, *args, **kwargs)

    return forward


def _take_part(
    linear: QuantizedLinear,
    group: Group,
    is_row_parallel: bool,
    *,
    kv_head: int | None,
    head_width: int,
) -> None:
    """Tell a quantized linear which part of its weight this rank computes with.

    kv_head: index of the only head that this rank computes of a k or v projection whose weight it
    has whole; None: the rank's even part of the rows or columns. head_width: rows of a head.
    """
    rows = (0, linear.out_features)
    columns = (0, linear.in_features)
    if kv_head is not None:
        rows = (kv_head * head_width, (kv_head + 1) * head_width)
    elif is_row_parallel:
        columns = _get_part(linear.in_features, group)
    else:
        rows = _get_part(linear.out_features, group)
    linear.take_part(rows, columns)


def _get_part(length: int, group: Group) -> tuple[int, int]:
    """Return start and end (exclusive) of this rank's even part of a dimension."""
    part_length = length // group.size
    return group.rank * part_length, (group.rank + 1) * part_length


def _place_parameters(
    model: nn.Module, mesh: DeviceMesh, copied: tuple[str, ...]
) -> dict[str, str]:
    """Make each parameter a DTensor over the group; one that several modules own stays one.

    copied: names of matrices that every rank has whole. Return the kinds of gradients, as
    `shard_tensors` does.
    """
    new_parameters: dict[int, nn.Parameter] = {}  # by the id of the old one
    gradient_kinds = {}  # by parameter name
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in new_parameters:
                placement = _choose_placement(
                    f"{path}.{name}", copied, getattr(module, "kind", None)
                )
                new_parameters[id(parameter)] = place_parameter(parameter, placement, mesh)
                gradient_kinds[f"{path}.{name}"] = (
                    "partial" if placement.is_replicate() else "sharded"
                )
            setattr(module, name, new_parameters[id(parameter)])
    return gradient_kinds


def _choose_placement(name: str, copied: tuple[str, ...], kind: str | None) -> Placement:
    """Return the placement of a parameter over the group, by the matrix that it belongs to.

    Matrices are `[o, i]`, those of experts `[E, o, i]`: sharded along their outputs o, those of
    ROW_PARALLEL along their inputs i. A quantized weight is parameters `weight_codes`,
    `weight_scales` and `weight_factors`. name: dotted. copied: names of matrices that every rank
    has whole. kind: "nf4" or "int8" of a quantized module, else None.
    """
    parts = name.split(".")
    leaf = parts[-1]
    if leaf == "sinks":  # attention sinks, one for each head
        return Shard(0)
    matrix = next((part for part in parts if part in _MATRICES), None)
    if matrix is None or matrix in copied:
        return Replicate()
    is_of_experts = "experts" in parts
    output_dim = 1 if is_of_experts else 0
    if matrix not in ROW_PARALLEL:
        # Whole are the adapter's A, which works on the n tokens of the rank, and the factors of
        # NF4, which are few.
        is_whole = "lora_A" in parts or (leaf == "weight_factors" and kind == "nf4")
        return Replicate() if is_whole else Shard(output_dim)
    is_base = parts[-2] == matrix  # a parameter of the linear itself, not of its adapter
    if "lora_A" in parts or (is_base and leaf == "weight"):
        return Shard(output_dim + 1)
    return Shard(1) if is_base and leaf in ("weight_codes", "weight_scales") else Replicate()


def place_parameter(
    parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh
) -> nn.Parameter:
    """Return a meta parameter as a DTensor over the group; a rank's shard is an even part of it."""
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] //= mesh.size()
    local = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False), parameter.requires_grad
    )


def _list_expert_runs(model: nn.Module, mixture: MixtureSpec, size: int) -> dict[str, Runs]:
    """Return by name of the experts' gate and up parameters the dimension and ranges of the shards.

    Gate stands above up, and each rank has a part of either, so a rank's shard is two ranges
    (start, end) of the whole dimension. They are listed rank by rank. size: number of ranks.
    """
    if mixture.interleaved:  # rows of gate and up alternate, so a rank's part is one range
        return {}
    width = mixture.mlp_width
    part = width // size
    runs = tuple(
        (half * width + rank * part, half * width + (rank + 1) * part)
        for rank in range(size)
        for half in range(2)
    )
    suffixes = tuple(
        f".experts.gate_up_proj.{leaf}" for leaf in ("weight", "bias", "lora_B.weight")
    )
    return {name: (1, runs) for name, _ in model.named_parameters() if name.endswith(suffixes)}


def _share_quantized_experts(
    module: QuantizedExperts, name: str, group: Group, mixture: MixtureSpec
) -> None:
    """Tell quantized experts which part of their weights this rank computes with.

    name: of the module, to tell `down_proj` from `gate_up_proj`.
    """
    if name.endswith("experts.down_proj"):
        module.take_part((0, module.out_features), _get_part(module.in_features, group))
    else:
        # A run is the rows of one expert, or if not interleaved of its gate or its up: each rank
        # has a part of every run.
        module.take_part_of_runs(
            module.num_experts * (1 if mixture.interleaved else 2), group.rank, group.size
        )


# Checks by the sizes of a model: which sizes of a group can divide it.


def check_tensor(spec: DecoderSpec, parallel: ParallelConfig, quantize: str = "none") -> None:
    """Raise ConfigError for a model that `parallel.tensor` ranks cannot share evenly.

    The error has a line for each size of the model that they do not divide, with the group sizes
    that fit. quantize: `lora.quantize_base`; its blocks of weights cannot be divided among ranks.
    """
    size = parallel.tensor
    counts = {  # sizes that the ranks have to divide, by their names in the error
        "attention heads": spec.num_heads,
        "tokens of the vocabulary": spec.vocab_size,
        **_get_widths(spec),
    }
    # Norms over the channels of all heads would count a copied head several times.
    copies = parallel.tensor_replicate_kv_heads and not spec.width_norms
    fitting_sizes = [
        ranks
        for ranks in range(1, spec.num_heads + 1)
        if all(count % ranks == 0 for count in counts.values())
        and (spec.num_kv_heads % ranks == 0 or _copies_kv_heads(spec, copies, ranks))
        and not _list_uncuttable(spec, quantize=quantize, size=ranks, copies=copies)
    ]
    if not _copies_kv_heads(spec, copies, size):
        counts["key and value heads"] = spec.num_kv_heads
    sizes = f"sizes that fit: {', '.join(map(str, fitting_sizes))}"
    faults = [
        f"parallel.tensor={size}: the model has {count} {name}, which {size} ranks cannot share"
        f" evenly; {sizes}"
        for name, count in counts.items()
        if count % size
    ]
    helps_to_copy = not copies and not spec.width_norms and _copies_kv_heads(spec, True, size)
    if helps_to_copy and spec.num_kv_heads % size and spec.num_heads % size == 0:
        # The last fault is that of the kv heads, the last entry of `counts`.
        faults[-1] += "; parallel.tensor_replicate_kv_heads=true gives every rank their weights"
    uncuttable = (
        [] if faults else _list_uncuttable(spec, quantize=quantize, size=size, copies=copies)
    )
    if uncuttable:
        faults.append(
            f"parallel.tensor={size}: lora.quantize_base={quantize} does not cut"
            f" {' and '.join(uncuttable)}, whose blocks of numbers stay whole; {sizes}; or set"
            " another lora.quantize_base"
        )
    if faults:
        raise ConfigError(*faults)


def _get_widths(spec: DecoderSpec) -> dict[str, int]:
    """Return the channels of MLPs, of an expert, or of both, by their names in messages."""
    mixture = spec.mixture
    widths = {} if mixture is not None and all(mixture.layers) else {"MLP channels": spec.mlp_width}
    return widths if mixture is None else widths | {"channels of an expert": mixture.mlp_width}


def _copies_kv_heads(spec: DecoderSpec, copies: bool, size: int) -> bool:
    """Return True if each of `size` ranks may have all kv heads, and computes one of them.

    The size has to be a multiple of their number. copies: `parallel.tensor_replicate_kv_heads`.
    """
    return copies and size % spec.num_kv_heads == 0


def _list_uncuttable(spec: DecoderSpec, quantize: str, size: int, copies: bool) -> list[str]:
    """Return the names of a layer's linears whose quantized weight `size` ranks cannot divide.

    quantize: `lora.quantize_base`. copies: True if each rank may have all kv heads.
    """
    if quantize == "none" or size == 1:
        return []
    q_width = spec.num_heads * spec.head_width
    kv_width = spec.num_kv_heads * spec.head_width
    # Features that differ from the default: the model's width, and for outputs the MLP's.
    inputs = {"o_proj": q_width, "down_proj": spec.mlp_width}
    outputs = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    uncuttable = _list_uncuttable_experts(spec, quantize, size)
    has_mlps = "MLP channels" in _get_widths(spec)
    for matrix in (*COLUMN_PARALLEL, *ROW_PARALLEL):
        if matrix in ("gate_proj", "up_proj", "down_proj") and not has_mlps:
            continue
        out_features = spec.width if matrix in ROW_PARALLEL else outputs.get(matrix, spec.mlp_width)
        in_features = inputs.get(matrix, spec.width)
        parts = (
            spec.num_kv_heads
            if _copies_kv_heads(spec, copies, size) and matrix in ("k_proj", "v_proj")
            else size
        )
        if can_quantize(in_features, out_features, quantize) and not can_cut(
            in_features,
            out_features=out_features,
            kind=quantize,
            parts=parts,
            by_columns=matrix in ROW_PARALLEL,
        ):
            uncuttable.append(matrix)
    return uncuttable


def _list_uncuttable_experts(spec: DecoderSpec, quantize: str, size: int) -> list[str]:
    """Return the names of the experts' matrices that `size` ranks cannot divide.

    quantize: `lora.quantize_base`.
    """
    mixture = spec.mixture
    if mixture is None or not can_quantize(spec.width, mixture.mlp_width, quantize):
        return []
    can_cut_down = can_cut(
        mixture.mlp_width, out_features=spec.width, kind=quantize, parts=size, by_columns=True
    )
    # Rows of a run: gate and up are divided one by one, or together where their rows alternate.
    height = mixture.mlp_width * (2 if mixture.interleaved else 1)
    can_cut_gate_up = can_cut(
        spec.width, out_features=height, kind=quantize, parts=size, by_columns=False
    )
    return [
        name
        for name, is_cuttable in (
            ("experts.gate_up_proj", can_cut_gate_up),
            ("experts.down_proj", can_cut_down),
        )
        if not is_cuttable
    ]
