"""Tensor and sequence parallel for the decoder: each rank of a group holds a part of every matrix
and of the tokens.

Between layers a rank has n of the N = n t tokens of a micro-batch, `[n, d]`, in the order of the
flattened batch. Norms and residual sums work on these. Attention and MLP gather the tokens, work
with h / t heads and f / t channels, and sum what comes out of them back to the n tokens of each
rank (`recipe_lib.ops.gathered`).

Parameters become DTensors under their own names: q, k, v, gate, up, embedding and output are cut by
rows, o and down by columns; norms, the biases of o and down, and the halves of adapters that work
on the n tokens are on every rank, whose gradients are each a part of the sum: see
`all_reduce_gradients`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from recipe_lib.adapters.layers import (
    AdaptedExpertModule,
    AdaptedMatrix,
    AdaptedRouter,
    QuantizedExperts,
    cast_linear,
)
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DecoderLayer,
    Norm,
    OutputHead,
    SandwichLayer,
    ScoreHead,
    WidthNorm,
)
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.models.mixture import (
    ExpertLinear,
    Experts,
    Mixture,
    compute_scored_bias,
    gather_row_biases,
    wide_linear,
)
from recipe_lib.models.spec import ExternalSpec, MixtureSpec
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.deferred import linear as linear_of
from recipe_lib.ops.dtensor_shards import Runs, get_local
from recipe_lib.ops.gated import gated_activation, scored_product
from recipe_lib.ops.gathered import (
    Group,
    NormedFrom,
    gated_linear,
    gather,
    gather_linears,
    scatter,
    start_gather,
    wait,
)
from recipe_lib.ops.grouped import (
    Groups,
    group_tokens,
    grouped_linear,
    order_by_expert,
    sum_choices,
)
from recipe_lib.ops.head_losses import HeadLoss, run_head_loss
from recipe_lib.ops.norm import offset_rms_norm
from recipe_lib.ops.real_tokens import RealTokens
from recipe_lib.ops.rope import apply_rotation
from recipe_lib.ops.sequence_shards import gather_tokens
from recipe_lib.parallel.tensor_sizes import COLUMN, ROW, check_tensor
from recipe_lib.parallel.world import World

Rotation = tuple[Tensor, Tensor]
_MATRICES = (*COLUMN, *ROW, "gate_up_proj", "embed_tokens", "lm_head")
_KNOWN = tuple(
    kind.forward for kind in (Attention, MLP, Mixture, DecoderLayer, SandwichLayer, Norm, WidthNorm)
)


@dataclass(frozen=True)
class _Sharing:
    """keep_gathered: gathered tokens stay for backward. kv_head: the only one this rank computes;
    None: its share.
    """

    group: Group
    keep_gathered: bool
    kv_head: int | None


def shard_tensors(
    model: Decoder, parallel: ParallelConfig, memory: MemoryConfig, world: World
) -> dict[str, str]:
    """Shard a meta model's matrices and tokens over the ranks of each tensor-parallel group, in
    place.

    Called before layers are checkpointed, compiled and sharded by FSDP. The model then takes
    micro-batches whose tokens the group's size divides. A world without such groups leaves the
    model as it is. Returns what each parameter's gradient is on a rank: `sharded`, that of its
    part; `partial`, a part of the sum. Raises ConfigError: see `check_tensor`, `refuse_for_tensor`.
    """
    if world.tensor is None:
        return {}
    refuse_for_tensor(model)
    if isinstance(model.spec, ExternalSpec):
        return model.spec.shard_tensors(model, parallel, world)
    spec, group = model.spec, world.tensor
    quantized = [module.kind for module in model.modules() if isinstance(module, QuantizedLinear)]
    check_tensor(spec, parallel, min(quantized, default="none"))
    copied = spec.num_kv_heads % group.size != 0
    recompute = parallel.tensor_regather_in_backward
    keep = (
        memory.activation_checkpointing != "none" if recompute == "auto" else recompute == "false"
    )
    sharing = _Sharing(
        group, keep, group.rank * spec.num_kv_heads // group.size if copied else None
    )
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts) and spec.mixture is not None:
            share_quantized_experts(module, name, group, spec.mixture)
        elif isinstance(module, QuantizedLinear):
            head = sharing.kv_head if name.endswith(("k_proj", "v_proj")) else None
            _take_part(module, group, name.endswith(ROW), head, spec.head_width)
    gradients = _place_parameters(
        model, world.mesh["tensor"], ("k_proj", "v_proj") if copied else ()
    )
    if spec.mixture is not None:
        model.runs = list_expert_runs(model, spec.mixture, group.size)
    forwards: tuple[
        tuple[type[nn.Module], Callable[..., Any]], ...
    ] = (  # the more special class first
        (WidthNorm, _bind_settings(run_width_norm, group)),
        (Norm, _run_norm),
        (Mixture, _bind_settings(run_mixture, group)),
        (Experts, run_experts),
        (SandwichLayer, _run_sandwich_layer),
        (DecoderLayer, _run_layer),
        (Attention, _bind_settings(_run_attention, sharing)),
        (MLP, _bind_settings(_run_mlp, sharing, spec.activation)),
    )
    for module in model.modules():
        forward = next((forward for kind, forward in forwards if isinstance(module, kind)), None)
        if forward is not None:
            _replace_forward(module, forward)
    if model.model.embed_tokens is not None:  # else another stage of a pipeline has it
        _replace_forward(model.model.embed_tokens, _bind_settings(_run_embedding, group))
    if model.lm_head is not None:
        _replace_forward(model.lm_head, _bind_settings(_run_head, group))
    if model.score is not None:
        _replace_forward(model.score, _bind_settings(_run_score_head, group))
    model.forward = _restore_rows(model.forward)  # type: ignore[method-assign]
    return gradients


def refuse_for_tensor(model: Decoder) -> None:
    """ConfigError for extra parameters, and for forwards and hooks that tensor parallel would not
    call, or otherwise.

    A rank has a part of the tokens, heads and channels there, and inputs of other shapes.
    """
    found = next(iter(find_extra_tensors(model)), None) or next(iter(_list_changes(model)), None)
    if found is not None:
        raise ConfigError(
            f"parallel.tensor: found {found}, which the recipe added, expected a model as it is"
            " built: ranks that share matrices have a part of the tokens each, and run forwards of"
            " their own; set parallel.tensor=1"
        )


def _list_changes(model: Decoder) -> list[str]:
    inside: set[int] = set()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MLP, Mixture)):
            inside |= {id(child) for child in module.modules()}
        if id(module) in inside and (module._forward_hooks or module._forward_pre_hooks):
            found.append(f"a hook of {name}")
        if isinstance(module, (Attention, MLP, Mixture, DecoderLayer, Norm)):
            own = "forward" in vars(module) or type(module).forward not in _KNOWN
            found += [f"another forward of {name}"] if own else []
    return found


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """The module, its parameters and its hooks stay what they are.

    A method of one function for all alike: of an object for each, torch.compile would compile each
    layer anew.
    """
    module.forward = MethodType(forward, module)


def _bind_settings(function: Callable[..., Any], *settings: Any) -> Callable[..., Any]:
    """The function, which takes a module and settings first, as one of the module and what a
    forward takes.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *settings, *args, **kwargs)

    return forward


def _take_part(
    linear: QuantizedLinear, group: Group, by_columns: bool, kv_head: int | None, head_width: int
) -> None:
    """Tell a quantized linear which part of its weight this rank computes with."""
    whole_rows, whole_columns = (0, linear.out_features), (0, linear.in_features)
    if kv_head is not None:
        linear.take_part((kv_head * head_width, (kv_head + 1) * head_width), whole_columns)
        return
    count = (linear.in_features if by_columns else linear.out_features) // group.size
    part = (group.rank * count, (group.rank + 1) * count)
    linear.take_part(*(whole_rows, part) if by_columns else (part, whole_columns))


def _place_parameters(
    model: nn.Module, mesh: DeviceMesh, copied: tuple[str, ...]
) -> dict[str, str]:
    """Make each parameter a DTensor over the group; one that several modules own stays one.

    Returns what each one's gradient is on a rank: `sharded`, that of its part; `partial`, a part of
    the sum.
    """
    placed: dict[int, nn.Parameter] = {}
    gradients = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in placed:
                placement = _choose_placement(
                    f"{path}.{name}", copied, getattr(module, "kind", None)
                )
                placed[id(parameter)] = place_parameter(parameter, placement, mesh)
                gradients[f"{path}.{name}"] = "partial" if placement.is_replicate() else "sharded"
            setattr(module, name, placed[id(parameter)])
    return gradients


def _choose_placement(name: str, copied: tuple[str, ...], kind: str | None) -> Placement:
    """Return how a parameter lies on the group, by the matrix that it belongs to. kind: of a
    quantized linear.

    Matrices are `[o, i]`, those of experts `[E, o, i]`: cut by their outputs o, or in ROW by their
    inputs i.
    """
    pieces = name.split(".")
    leaf = pieces[-1]
    if leaf == "sinks":
        return Shard(0)
    matrix = next((piece for piece in pieces if piece in _MATRICES), None)
    if matrix is None or matrix in copied:
        return Replicate()
    of_experts = "experts" in pieces
    outputs = 1 if of_experts else 0
    if matrix not in ROW:
        is_whole = "lora_A" in pieces or (
            leaf == "weight_factors" and (of_experts or kind == "nf4")
        )
        return Replicate() if is_whole else Shard(outputs)
    is_own = pieces[-2] == matrix
    if "lora_A" in pieces or (is_own and leaf == "weight"):
        return Shard(outputs + 1)
    return Shard(1) if is_own and leaf in ("weight_codes", "weight_scales") else Replicate()


def place_parameter(
    parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh
) -> nn.Parameter:
    """Return a parameter on the meta device as a DTensor over the group, which cuts it evenly."""
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] //= mesh.size()
    local = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False), parameter.requires_grad
    )


# The forwards, on this rank's tokens `[n, d]`.


def _run_norm(module: Norm, hidden: Tensor) -> Tensor:
    return module.norm(hidden, get_local(module.weight), module.eps)


def _run_layer(
    layer: DecoderLayer, hidden: Tensor, turn: Rotation, info: AttentionInfo, cache: None = None
) -> Tensor:
    hidden = hidden + layer.self_attn(hidden, turn, info, layer.input_layernorm)
    return hidden + layer.mlp(hidden, layer.post_attention_layernorm, info.real)


def _run_sandwich_layer(
    layer: SandwichLayer, hidden: Tensor, turn: Rotation, info: AttentionInfo, cache: None = None
) -> Tensor:
    attended = layer.self_attn(hidden, turn, info, layer.input_layernorm)
    hidden = hidden + layer.post_attention_layernorm(attended)
    return hidden + layer.post_feedforward_layernorm(
        layer.mlp(hidden, layer.pre_feedforward_layernorm, info.real)
    )


def _run_attention(
    module: Attention,
    sharing: _Sharing,
    hidden: Tensor,
    turn: Rotation,
    info: AttentionInfo,
    norm: Norm,
) -> Tensor:
    rows, length = turn[0].shape[:2]
    projected = _run_column_parallel(
        [module.q_proj, module.k_proj, module.v_proj], hidden, norm, sharing, module.head_width
    )
    width = (
        module.head_width
    )  # the heads from it, since for -1 a compiled layer of dynamic lengths has no number
    q, k, v = (part.view(rows, length, part.shape[1] // width, width) for part in projected)
    q = apply_rotation(module.clamp(module.q_norm(q)), *turn).transpose(1, 2)
    k = apply_rotation(module.clamp(module.k_norm(k)), *turn).transpose(1, 2)
    v = module.clamp(v).transpose(1, 2)
    q, k, v, sinks = module.to_heads(q, k, v, get_local(module.sinks))
    attended = module.to_tokens(module.attend(q, k, v, info, sinks=sinks))
    return _run_row_parallel(
        module.o_proj, attended.transpose(1, 2).reshape(rows * length, -1), sharing.group
    )


def _run_mlp(
    module: MLP,
    sharing: _Sharing,
    activation: str,
    hidden: Tensor,
    norm: Norm,
    real: RealTokens | None = None,
) -> Tensor:
    gate, up = _run_column_parallel([module.gate_proj, module.up_proj], hidden, norm, sharing)
    down, group = module.down_proj, sharing.group
    if isinstance(down, QuantizedLinear):
        plain = scatter(down.product(gated_activation(gate, up, activation)), group)
    else:
        plain = scatter(gated_linear(gate, up, get_local(down.weight), activation), group)
    plain = plain if down.bias is None else plain + get_local(down.bias)
    if not _is_adapted(down):
        return plain
    rate = down.settings.dropout if down.training else 0.0
    if rate or down.settings.dtype != gate.dtype:
        narrow = cast_linear(
            F.dropout(gated_activation(gate, up, activation), rate), get_local(down.lora_A.weight)
        )
    else:
        narrow = gated_linear(gate, up, get_local(down.lora_A.weight), activation)
    return _add_lora_up(down, plain, scatter(narrow, group))


def _run_column_parallel(
    linears: list[Any], hidden: Tensor, norm: Norm, sharing: _Sharing, head_width: int = 0
) -> list[Tensor]:
    """Normed tokens through linears that are cut by rows: `[N, o / t]` each. head_width: of copied
    kv heads.
    """
    group, shard = sharing.group, norm(hidden)
    cut = [_choose_rows(linear, sharing, head_width) for linear in linears]
    if not any(_is_adapted(linear) or isinstance(linear, QuantizedLinear) for linear in linears):
        kind = "offset" if norm.norm is offset_rms_norm else "rms"
        normed = NormedFrom(hidden.detach(), get_local(norm.weight).detach(), norm.eps, kind)
        weights = [rows(linear.weight) for linear, rows in zip(linears, cut, strict=True)]
        biases = [rows(linear.bias) for linear, rows in zip(linears, cut, strict=True)]
        return gather_linears(
            shard, weights, biases, group, keep_gathered=sharing.keep_gathered, normed=normed
        )
    gathered = gather(shard, group)
    plain = [_run_frozen(linear, gathered, rows) for linear, rows in zip(linears, cut, strict=True)]
    adapted = [linear for linear in linears if _is_adapted(linear)]
    if not adapted:
        return plain
    narrow = torch.cat([_apply_lora_down(linear, shard) for linear in adapted], dim=-1)
    parts = iter(gather(narrow, group).split([linear.settings.rank for linear in adapted], dim=-1))
    return [
        _add_lora_up(linear, out, next(parts), rows) if _is_adapted(linear) else out
        for linear, out, rows in zip(linears, plain, cut, strict=True)
    ]


def _run_row_parallel(linear: Any, inputs: Tensor, group: Group) -> Tensor:
    """Inputs `[N, i / t]` through a linear that is cut by columns, summed over the group: `[n,
    d]`.
    """
    quantized = isinstance(linear, QuantizedLinear)
    plain = scatter(
        linear.product(inputs) if quantized else linear_of(inputs, get_local(linear.weight)), group
    )
    plain = plain if linear.bias is None else plain + get_local(linear.bias)
    return (
        _add_lora_up(linear, plain, scatter(_apply_lora_down(linear, inputs), group))
        if _is_adapted(linear)
        else plain
    )


def _choose_rows(linear: Any, sharing: _Sharing, head_width: int) -> Callable[[Tensor | None], Any]:
    """Return what takes a rank's rows of a parameter: its part, or, of kv heads that all ranks
    have, the one it computes.
    """
    head = sharing.kv_head
    quantized = isinstance(linear, QuantizedLinear)
    held = linear.count_local_rows() if quantized else get_local(linear.weight).shape[0]
    if head is None or held != linear.out_features:
        return get_local
    rows = slice(head * head_width, (head + 1) * head_width)
    return lambda parameter: None if parameter is None else get_local(parameter)[rows]


def _run_frozen(linear: Any, whole: Tensor, rows: Callable[[Tensor | None], Any]) -> Tensor:
    """Return what a linear that is cut by rows makes of all tokens, without its adapter."""
    if isinstance(linear, QuantizedLinear):
        return linear.product(whole, rows(linear.bias))
    return F.linear(whole, rows(linear.weight), rows(linear.bias))


def _is_adapted(linear: nn.Module) -> bool:
    return isinstance(linear, AdaptedMatrix) and not linear.is_off


def _apply_lora_down(linear: AdaptedMatrix, hidden: Tensor) -> Tensor:
    """Hidden `[..., in]` through the adapter's A: `[..., r]`."""
    rate = linear.settings.dropout
    dropped = F.dropout(hidden, rate) if rate and linear.training else hidden
    return cast_linear(dropped, get_local(linear.lora_A.weight))


def _add_lora_up(
    linear: AdaptedMatrix,
    plain: Tensor,
    narrow: Tensor,
    rows: Callable[[Tensor | None], Any] = get_local,
) -> Tensor:
    """Return what the frozen part gave, and what the adapter's B makes of `narrow` next to it."""
    update = F.linear(narrow * linear.settings.scaling, rows(linear.lora_B.weight))
    return (plain + update).to(plain.dtype)


def _run_embedding(module: Any, group: Group, tokens: Tensor) -> Tensor:
    """Tokens `[b, s]` to this rank's part of their embeddings `[n, d]`: each rank looks up what it
    has.
    """
    weight = get_local(module.weight)
    if tokens.numel() % group.size:
        raise ValueError(
            f"{tokens.numel()} tokens cannot be shared evenly among {group.size} ranks"
        )
    rows = tokens.flatten() - group.rank * weight.shape[0]
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    found = F.embedding(rows.masked_fill_(elsewhere, 0), weight)
    hidden = scatter(found.masked_fill(elsewhere.unsqueeze(1), 0), group)
    scale = getattr(module, "scale", None)
    return hidden if scale is None else hidden * hidden.new_full((), scale)


def _run_head(
    head: OutputHead,
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: HeadLoss | None = None,
) -> Tensor:
    """As `OutputHead.forward`, of `[n, d]`. Without labels all ranks get all logits `[N, v]`: for
    short texts.
    """
    weight = get_local(head.weight)
    if labels is None:
        logits = F.linear(gather(hidden, group), weight)
        return head.finish(gather(logits.t(), group).t())
    return run_head_loss(head_loss, hidden, weight, labels, softcap=head.softcap, group=group)


def _run_score_head(
    head: ScoreHead,
    group: Group,
    hidden: Tensor,
    *,
    labels: Tensor | None = None,
    head_loss: object = None,
) -> Tensor:
    """As `ScoreHead.forward`, of `[n, d]`: scores of all N tokens, of which each rank made its own,
    in labels' rows.
    """
    weight = get_local(head.weight)
    found = gather_tokens(F.linear(hidden.to(weight.dtype), weight).unsqueeze(0), group).squeeze(0)
    return found if labels is None else found.view(*labels.shape, -1)


def _restore_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Logits `[N, v]` as `[b, s, v]`."""

    def run(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = forward(tokens, *args, **kwargs)
        return (
            found.view(*tokens.shape, -1)
            if found.dim() == 2 and found.shape[0] == tokens.numel()
            else found
        )

    return run


# A mixture of experts shared by the ranks of a tensor-parallel group: each has some channels of
# every expert.
#
# The router works on a rank's n tokens; tokens, scores and choices are then gathered, each rank's
# channels compute all N tokens' rows, and what they add up to is summed over the ranks, n tokens
# for each. Gate and up projection are one matrix, which is cut within each of the two (of gpt-oss,
# where they take turns, as it stands).


GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def list_expert_runs(model: nn.Module, mixture: MixtureSpec, size: int) -> dict[str, Runs]:
    """Return the parameters that hold gate above up, of which each rank has a part of either:
    dimension and runs.
    """
    if mixture.interleaved:
        return {}
    width = mixture.mlp_width
    part = width // size
    runs = tuple(
        (half * width + rank * part, half * width + (rank + 1) * part)
        for rank in range(size)
        for half in range(2)
    )
    cut = ("weight", "bias", "lora_B.weight")
    return {
        name: (1, runs)
        for name, _ in model.named_parameters()
        if f".{GATE_UP}." in name and name.partition(f"{GATE_UP}.")[2] in cut
    }


def share_quantized_experts(
    module: QuantizedExperts, name: str, group: Group, mixture: MixtureSpec
) -> None:
    """Tell quantized experts which part of their weights this rank computes with."""
    if name.endswith(DOWN):
        count = module.in_features // group.size
        module.take_part((0, module.out_features), (group.rank * count, (group.rank + 1) * count))
    else:
        module.take_part_of_runs(
            module.num_experts * (1 if mixture.interleaved else 2), group.rank, group.size
        )


def run_mixture(
    module: Mixture, group: Group, hidden: Tensor, norm: nn.Module, real: RealTokens | None = None
) -> Tensor:
    """Turn the stream's tokens `[n, d]` of this rank to what the experts add to them, `[n, d]`.
    real: of all N tokens.
    """
    shard = norm(hidden)
    logits = _compute_router_logits(module.router, shard)
    scores, chosen = module.choose(logits)
    groups = group_tokens(wait(start_gather(chosen, group)), logits.shape[1])
    count, own_real = shard.shape[0], None
    if real is not None:
        own_real = real.take(slice(group.rank * count, (group.rank + 1) * count), real.count)
    scores = module.record_choices(logits, scores, groups, real=real, own_real=own_real)
    tokens, all_scores = gather(shard, group), gather(scores, group)
    partial, bias = module.experts(tokens, all_scores, groups, scores, chosen)
    summed = scatter(partial, group)
    return summed if bias is None else summed + bias


def _compute_router_logits(router: Any, tokens: Tensor) -> Tensor:
    logits = wide_linear(tokens, get_local(router.weight), get_local(router.bias))
    if not isinstance(router, AdaptedRouter) or router.is_off:
        return logits
    narrow = cast_linear(tokens, get_local(router.lora_A.weight)) * router.settings.scaling
    return (logits + nn.functional.linear(narrow, get_local(router.lora_B.weight))).to(logits.dtype)


def run_experts(
    experts: Experts,
    tokens: Tensor,
    scores: Tensor,
    groups: Groups,
    own_scores: Tensor,
    own_chosen: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return what this rank's channels of the experts make of all tokens `[N, d]`, and what the
    biases of down add to its own tokens `[n, d]`. scores: of all tokens, and of its own. A call of
    the module, which FSDP gathers for it.
    """
    inner = _run_expert_matrix(experts.gate_up_proj, tokens, groups, of_tokens=True)
    if experts.gate_up_proj.bias is not None:
        inner = inner + gather_row_biases(get_local(experts.gate_up_proj.bias), groups)
    product = scored_product(inner, order_by_expert(scores, groups), experts.gate)
    del inner
    summed = sum_choices(
        _run_expert_matrix(experts.down_proj, product, groups, of_tokens=False), groups
    )
    bias = experts.down_proj.bias
    return summed, None if bias is None else compute_scored_bias(
        get_local(bias), own_scores, own_chosen
    )


def _run_expert_matrix(module: Any, rows: Tensor, groups: Groups, *, of_tokens: bool) -> Tensor:
    """Rows through a rank's part of the experts' matrices, with their adapters."""
    if isinstance(module, QuantizedExperts):
        plain = module.grouped_product(rows, groups, of_tokens)
    else:
        plain = grouped_linear(
            rows, get_local(cast(ExpertLinear, module).weight), groups, of_tokens=of_tokens
        )
    if not isinstance(module, AdaptedExpertModule):
        return plain
    factors = get_local(module.lora_A.weight), get_local(module.lora_B.weight)
    return module.add_update(plain, rows, groups, of_tokens, *factors)


def run_width_norm(norm: WidthNorm, group: Group, heads: Tensor) -> Tensor:
    """Return a norm over the channels of all heads `[..., h / t, e]`, of which each rank has some;
    the mean is over all.
    """
    flat, weight = heads.flatten(-2), get_local(norm.weight)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    rows = wide.square().sum(dim=-1, keepdim=True).flatten(0, -2)
    total = gather(scatter(rows, group), group).view(
        *flat.shape[:-1], 1
    )  # an all-reduce, in backward too
    width = flat.shape[-1]
    part = weight[group.rank * width : (group.rank + 1) * width]
    normed = (wide * torch.rsqrt(total / weight.shape[0] + norm.eps)).to(flat.dtype)
    return (normed * part).view_as(heads)
