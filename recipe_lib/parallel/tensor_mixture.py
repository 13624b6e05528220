"""A mixture of experts shared by the ranks of a tensor-parallel group: each has some channels of every expert.

The router works on a rank's n tokens; tokens, scores and choices are then gathered, each rank's channels compute all N
tokens' rows, and what they add up to is summed over the ranks, n tokens for each. Gate and up projection are one
matrix, which is cut within each of the two (of gpt-oss, where they take turns, as it stands).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from recipe_lib.adapters.expert_layers import AdaptedExpertModule, AdaptedRouter, QuantizedExperts
from recipe_lib.adapters.layers import cast_linear
from recipe_lib.models.decoder import WidthNorm
from recipe_lib.models.mixture import ExpertLinear, Experts, Mixture, bias_of_rows, scored_bias, wide_linear
from recipe_lib.models.spec import MixtureSpec
from recipe_lib.ops.dtensor_shards import Runs, local
from recipe_lib.ops.expert_gated import scored_product
from recipe_lib.ops.gathered import Group, gather, scatter, start_gather, wait
from recipe_lib.ops.grouped import Groups, group_tokens, grouped_linear, rows_of_choices, sum_choices
from recipe_lib.ops.real_tokens import RealTokens

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def expert_placement(name: str) -> Placement | None:
    """How a parameter of a mixture lies on the group; None: it is no mixture's.

    Of dimensions `[E, o, i]` gate and up are cut by o, down by i.
    """
    pieces = name.split(".")
    if ".mlp.router." in name:
        return Replicate()
    inside = "lora_A" in pieces or "lora_B" in pieces
    if f".{GATE_UP}." in name:
        whole = "lora_A" in pieces or pieces[-1] == "weight_factors"
        return Replicate() if whole else Shard(1)
    if f".{DOWN}." in name:
        if "lora_A" in pieces or (pieces[-1] == "weight" and not inside):
            return Shard(2)
        return Shard(1) if pieces[-1] in ("weight_codes", "weight_scales") else Replicate()
    return None


def expert_runs(model: nn.Module, mixture: MixtureSpec, size: int) -> dict[str, Runs]:
    """The parameters that hold gate above up, of which each rank has a part of either: dimension and runs."""
    if mixture.interleaved:
        return {}
    width = mixture.mlp_width
    part = width // size
    runs = tuple(
        (half * width + rank * part, half * width + (rank + 1) * part) for rank in range(size) for half in range(2)
    )
    cut = ("weight", "bias", "lora_B.weight")
    return {
        name: (1, runs)
        for name, _ in model.named_parameters()
        if f".{GATE_UP}." in name and name.partition(f"{GATE_UP}.")[2] in cut
    }


def share_quantized(module: QuantizedExperts, name: str, group: Group, mixture: MixtureSpec) -> None:
    """Tells quantized experts which part of their weights this rank computes with."""
    if name.endswith(DOWN):
        count = module.in_features // group.size
        module.take_part((0, module.out_features), (group.rank * count, (group.rank + 1) * count))
    else:
        module.take_rows_of_runs(module.num_experts * (1 if mixture.interleaved else 2), group.rank, group.size)


def shared_mixture(
    module: Mixture, group: Group, hidden: Tensor, norm: nn.Module, real: RealTokens | None = None
) -> Tensor:
    """Turn the stream's tokens `[n, d]` of this rank to what the experts add to them, `[n, d]`. real: of all N
    tokens."""
    shard = norm(hidden)
    logits = _logits(module.router, shard)
    scores, chosen = module.choose(logits)
    groups = group_tokens(wait(start_gather(chosen, group)), logits.shape[1])
    count, own_real = shard.shape[0], None
    if real is not None:
        own_real = real.take(slice(group.rank * count, (group.rank + 1) * count), real.count)
    scores = module.note(logits, scores, groups, real, own_real)
    tokens, all_scores = gather(shard, group), gather(scores, group)
    partial, bias = module.experts(tokens, all_scores, groups, scores, chosen)
    summed = scatter(partial, group)
    return summed if bias is None else summed + bias


def _logits(router: Any, tokens: Tensor) -> Tensor:
    logits = wide_linear(tokens, local(router.weight), local(router.bias))
    if not isinstance(router, AdaptedRouter) or router.is_off:
        return logits
    narrow = cast_linear(tokens, local(router.lora_A.weight)) * router.settings.scaling
    return (logits + nn.functional.linear(narrow, local(router.lora_B.weight))).to(logits.dtype)


def part_of_experts(
    experts: Experts, tokens: Tensor, scores: Tensor, groups: Groups, own_scores: Tensor, own_chosen: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What this rank's channels of the experts make of all tokens `[N, d]`, and what the biases of down add to its own
    tokens `[n, d]`. scores: of all tokens, and of its own. A call of the module, which FSDP gathers for it."""
    inner = _rows(experts.gate_up_proj, tokens, groups, of_tokens=True)
    if experts.gate_up_proj.bias is not None:
        inner = inner + bias_of_rows(local(experts.gate_up_proj.bias), groups)
    product = scored_product(inner, rows_of_choices(scores, groups), experts.gate)
    del inner
    summed = sum_choices(_rows(experts.down_proj, product, groups, of_tokens=False), groups)
    bias = experts.down_proj.bias
    return summed, None if bias is None else scored_bias(local(bias), own_scores, own_chosen)


def _rows(module: Any, rows: Tensor, groups: Groups, *, of_tokens: bool) -> Tensor:
    """Rows through a rank's part of the experts' matrices, with their adapters."""
    if isinstance(module, QuantizedExperts):
        plain = module.grouped_product(rows, groups, of_tokens)
    else:
        plain = grouped_linear(rows, local(cast(ExpertLinear, module).weight), groups, of_tokens=of_tokens)
    if not isinstance(module, AdaptedExpertModule):
        return plain
    factors = local(module.lora_A.weight), local(module.lora_B.weight)
    return module.with_factors(plain, rows, groups, of_tokens, *factors)


def shared_width_norm(norm: WidthNorm, group: Group, heads: Tensor) -> Tensor:
    """A norm over the channels of all heads `[..., h / t, e]`, of which each rank has some; the mean is over all."""
    flat, weight = heads.flatten(-2), local(norm.weight)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    rows = wide.square().sum(dim=-1, keepdim=True).flatten(0, -2)
    total = gather(scatter(rows, group), group).view(*flat.shape[:-1], 1)  # an all-reduce, in backward too
    width = flat.shape[-1]
    part = weight[group.rank * width : (group.rank + 1) * width]
    normed = (wide * torch.rsqrt(total / weight.shape[0] + norm.eps)).to(flat.dtype)
    return (normed * part).view_as(heads)
