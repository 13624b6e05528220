"""Define the mixture of experts, in place of a layer's MLP (arXiv 2101.03961, 2401.04088).

`models.decoder.DecoderLayer` calls a `Mixture` as it calls an MLP. Each of n tokens is computed by
k of E experts; a row is a token for one of its experts, and the m = n k rows are sorted by expert
(groups, `recipe_lib.ops.mlp`). An expert's gate and up projection are one matrix, and all experts'
matrices one tensor, whatever the files have. The router computes in fp32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from recipe_lib.models.spec import DecoderSpec, MixtureSpec
from recipe_lib.ops.attention import RealTokens
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.ops.fused_kernels import call_with_gradient
from recipe_lib.ops.gathered import Group, all_reduce
from recipe_lib.ops.kept_tensors import note_cheap, run_cheap
from recipe_lib.ops.mlp import (
    Gate,
    Groups,
    count_rows,
    group_tokens,
    grouped_linear,
    linear_in_dtype,
    order_by_expert,
    scored_product,
    sum_choices,
)


class Router(nn.Linear):
    """The projection of tokens `[n, d]` to logits `[n, E]`."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[n, E]` in fp32; those of fp64 weights in fp64."""
        # In bf16 logits would be rounded to 8 significant bits.
        return wide_linear(tokens, self.weight, self.bias)


def wide_linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` in fp32 of operands that may be in fewer bits.

    The operands are saved for backward as they are given, not in fp32.
    """
    logits = linear_in_dtype(tokens, weight, torch.promote_types(weight.dtype, torch.float32))
    return logits if bias is None else logits + bias


class ExpertLinear(nn.Module):
    """The linears of all E experts as one module: each row goes through that of its expert."""

    bias: nn.Parameter | None
    transposed: bool = False  # the weight is `[E, i, o]`, as some classes of transformers have it

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.num_experts = experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))  # [E, o, i]
        self.bias = nn.Parameter(torch.empty(experts, out_features)) if bias else None  # [E, o]

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """Return rows `[m, o]`, without the bias, each multiplied by its expert's weight.

        rows: `[m, i]`, sorted by expert; with `of_tokens` the tokens `[n, i]` that they are of.
        groups: the expert and the token of each row.
        """
        weight = get_local(self.weight)
        weight = weight.transpose(1, 2) if self.transposed else weight
        return grouped_linear(rows, weight, groups, of_tokens=of_tokens)


class Experts(nn.Module):
    """All experts of a layer: gated MLPs of inner width f."""

    def __init__(self, mixture: MixtureSpec, width: int) -> None:
        super().__init__()
        num_experts = mixture.num_experts
        bias = mixture.expert_bias
        self.gate_up_proj = ExpertLinear(num_experts, width, 2 * mixture.mlp_width, bias=bias)
        self.down_proj = ExpertLinear(num_experts, mixture.mlp_width, width, bias=bias)
        self.gate = Gate(
            activation=mixture.activation,
            interleaved=mixture.interleaved,
            alpha=mixture.alpha,
            limit=mixture.limit,
        )

    def forward(self, tokens: Tensor, scores: Tensor, chosen: Tensor, groups: Groups) -> Tensor:
        """Return for each token the sum of its experts' results times their scores, `[n, d]`.

        tokens: `[n, d]`. chosen: the indices of each token's experts, `[n, k]`. scores: those of
        these experts, `[n, k]`. groups: the rows of `chosen`, from `group_tokens`.
        """
        inner = self.gate_up_proj(tokens, groups, of_tokens=True)
        if self.gate_up_proj.bias is not None:
            inner = inner + gather_row_biases(self.gate_up_proj.bias, groups)
        product = scored_product(inner, order_by_expert(scores, groups), self.gate)
        del inner  # [m, 2f]: freed before the down projection, where it is not saved for backward
        summed = sum_choices(self.down_proj(product, groups), groups)
        if self.down_proj.bias is None:
            return summed
        return summed + compute_scored_bias(self.down_proj.bias, scores, chosen)


def gather_row_biases(bias: Tensor, groups: Groups) -> Tensor:
    """Return the bias of each row's expert, `[m, o]`, of biases `[E, o]`."""
    return call_with_gradient(
        lambda bias, experts, num_experts: bias.index_select(0, experts),
        bias,
        groups.experts,
        bias.shape[0],
        differentiate=_add_biases,
        kept=(1, 2),  # the arguments that `_add_biases` gets besides the gradient
    )


def _add_biases(gradient: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Return the gradient of biases `[E, o]`, given that of their rows `[m, o]`."""
    expert_indices = torch.arange(num_experts, device=experts.device)
    # By a matmul, which sums in a fixed order, as atomic additions of an index_add would not.
    return (experts == expert_indices.unsqueeze(1)).to(gradient.dtype) @ gradient


def compute_scored_bias(bias: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return for each token the sum of its experts' biases times their scores, `[n, d]`.

    bias: `[E, d]`. scores, chosen: `[n, k]`.
    """
    return run_cheap(_spread_scores, scores, chosen, bias.shape[0], bias.dtype) @ bias


def _spread_scores(scores: Tensor, chosen: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """Return for each token its scores of all experts, `[n, E]`, 0 of those not chosen."""
    return scores.new_zeros(scores.shape[0], experts).scatter(1, chosen, scores).to(dtype)


@dataclass
class BalanceLoss:
    """The auxiliary loss that evens the experts' loads (arXiv 2101.03961, equation 4).

    For a layer and a micro-batch it is E sum_e f_e P_e, with f_e the number of choices of expert e
    per token, and P_e the mean of its probabilities, both over tokens that are no padding.
    """

    coefficient: float  # the factor of the loss
    layers: int  # number of layers with experts, in the whole model
    # The ranks that divide sequences: each has the part of the loss that its tokens have. None:
    # this rank has whole sequences.
    sequences: Group | None = None
    weight: float = 0.0  # the factor of one layer's loss of one micro-batch, in this step

    def begin(self, parts: int) -> None:
        """Set the weight for a step. parts: number of its micro-batches, those of all ranks."""
        # The loss is the mean over the layers and the micro-batches.
        self.weight = self.coefficient / (self.layers * parts)


def _keep_scores(scores: Tensor, loss: Tensor, balance: BalanceLoss) -> Tensor:
    """Return scores as they are; in backward the balance loss gets its gradient.

    So the loss is not added to the model's loss. Its gradient enters where the scores leave the
    router, also in a layer that is recomputed, or is on another rank than the model's loss.
    """
    return scores.view_as(scores)


def _differentiate_loss(gradient: Tensor, balance: BalanceLoss) -> tuple[Tensor, Tensor]:
    # Scores of classes of transformers are in the weights' dtype, the loss in fp32.
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return gradient, gradient.new_full((), balance.weight, dtype=dtype)


class ExpertLoad:
    """Counts of the experts that the training forwards of a step have chosen, on the device.

    A forward that is computed again for backward counts twice.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        # Number of tokens that each expert computed, without padding.
        self.rows = torch.zeros(num_experts, dtype=torch.int64, device=device)
        # Sum of the balance losses of `calls` forwards.
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.calls = 0  # number of forwards
        # Number of choices that routers made. It must be the sum of `rows`: the difference are
        # choices that no expert computed.
        self.expected = 0

    @torch.no_grad()
    def add(self, rows: Tensor, loss: Tensor | None, choices: int) -> None:
        """Add the counts of one forward.

        rows: of each expert, `[E]`. loss: its balance loss, `[]`; None: there is none. choices:
        number of tokens times k, without padding.
        """
        # In place, so that a forward that is computed again issues the same operators.
        self.rows.add_(rows)
        if loss is not None:
            self.loss.add_(loss)
        self.expected += choices
        self.calls += 1

    def clear(self) -> None:
        self.rows.zero_()
        self.loss.zero_()
        self.expected = self.calls = 0


def compute_sigmoid_shares(logits: Tensor) -> Tensor:
    """Return the sigmoids of logits `[n, E]`, divided by their sum for each token."""
    scores = logits.sigmoid()
    return scores / scores.sum(dim=-1, keepdim=True)


# What a router's probabilities may be -> the function that makes them of its logits `[n, E]`.
PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": compute_sigmoid_shares,
    "as the router returns them": lambda probabilities: probabilities,
}


class ChoiceCounter:
    """Counts what a router chooses in training forwards, and adds its balance loss."""

    load: ExpertLoad | None = None  # counts the choices of training forwards; None: not counted
    balance: BalanceLoss | None = None  # the auxiliary loss; None: there is none
    kind: str = "softmax"  # of the router's probabilities, a key of `PROBABILITIES`
    # Tensor-parallel ranks have the loss of their own tokens each; False: all have all tokens.
    shares_tokens: bool = True

    def record_choices(
        self,
        logits: Tensor,
        scores: Tensor,
        groups: Groups,
        *,
        real: RealTokens | None,
        own_real: RealTokens | None,
    ) -> Tensor:
        """Count a forward's choices, attach its balance loss to the scores, and return these.

        Without gradients, or in a compiled layer, nothing is counted or attached.

        logits, scores: of this rank's tokens. groups: rows of these tokens, and of those that
        tensor-parallel ranks have gathered with them. real: the tokens of `groups` that are no
        padding; None: all. own_real: the same of this rank's tokens.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return scores
        rows = count_rows(groups, real)
        loss = None
        if self.balance is not None:
            sequences = self.balance.sequences
            total_rows = rows if sequences is None else all_reduce(rows, "sum", sequences)
            wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            # A token has k rows, so that the rows of all ranks give the number of tokens; at least
            # 1, as there may be padding alone.
            num_tokens = (total_rows.sum() / groups.choices).clamp(min=1).to(wide_logits.dtype)
            # Scores save a result of their own: backward makes both of the same logits.
            probabilities = run_cheap(PROBABILITIES[self.kind], wide_logits)
            if own_real is not None:
                is_padding = ~own_real.make_mask(logits.device)
                probabilities = probabilities.masked_fill(is_padding.unsqueeze(1), 0)
            rows_per_token = total_rows / num_tokens
            loss = logits.shape[1] * (rows_per_token * probabilities.sum(dim=0)).sum() / num_tokens
            scores = call_with_gradient(
                _keep_scores,
                scores,
                loss,
                self.balance,
                differentiate=_differentiate_loss,
                kept=(2,),
            )
        if self.load is not None:
            num_choices = groups.tokens.shape[0] if real is None else real.total * groups.choices
            self.load.add(rows, loss, num_choices)
        return scores


@dataclass(frozen=True)
class Routers:
    """The routers of a model whose choices are counted."""

    # Name of a module -> number of its experts, of the whole model: also of layers that other ranks
    # of a pipeline have.
    sizes: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, ChoiceCounter] = field(default_factory=dict)  # of the same modules
    # What the P of the balance loss are, and how the class' own loss differs, for the log.
    convention: str = "softmax"


class Mixture(nn.Module, ChoiceCounter):
    """A router and its experts, called as an MLP is: `[b, s, d]` to `[b, s, d]`."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        mixture = spec.mixture
        assert mixture is not None
        self.router = Router(spec.width, mixture.num_experts, bias=mixture.router_bias)
        self.experts = Experts(mixture, spec.width)
        self.top_k = mixture.top_k  # experts of a token
        self.normalized = mixture.normalized  # True: the scores of a token's experts add up to 1

    def forward(self, hidden: Tensor, real: RealTokens | None = None) -> Tensor:
        """Return the sum of each token's experts, `[b, s, d]`, of hidden states `[b, s, d]`.

        real: the tokens that are no padding, which load and balance loss count; None: all.
        """
        tokens = hidden.flatten(0, -2)
        logits = self.router(tokens)
        scores, chosen = self.choose(logits)
        groups = group_tokens(chosen, logits.shape[1])
        scores = self.record_choices(logits, scores, groups, real=real, own_real=real)
        return cast(Tensor, self.experts(tokens, scores, chosen, groups)).view_as(hidden)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of each token's experts, and the experts' indices, `[n, k]` each.

        logits: `[n, E]`.
        """
        if self.normalized:
            # The softmax over a token's chosen experts alone, so that its scores add up to 1.
            top_logits, chosen = logits.topk(self.top_k, dim=-1)
            return top_logits.softmax(dim=-1), chosen
        probabilities = note_cheap(logits.softmax(dim=-1), torch.softmax, logits, -1)
        scores, chosen = probabilities.topk(self.top_k, dim=-1)
        return note_cheap(scores, torch.gather, probabilities, -1, chosen), chosen
