"""A mixture of experts in place of a layer's MLP (arXiv 2101.03961, 2401.04088): each token is
computed by k of E.

Of all families alike: gate and up projection of an expert are one matrix, all experts' one tensor,
whatever the files have (`recipe_lib.models.weight_names`). What the router says and sums is in
fp32.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.models.spec import DecoderSpec, MixtureSpec
from recipe_lib.ops.deferred import linear_in_dtype
from recipe_lib.ops.fused_kernels import GradientNode
from recipe_lib.ops.gated import Gate, scored_product
from recipe_lib.ops.gathered import Group, all_reduce
from recipe_lib.ops.grouped import (
    Groups,
    count_rows,
    group_tokens,
    grouped_linear,
    order_by_expert,
    sum_choices,
)
from recipe_lib.ops.real_tokens import RealTokens


class Router(nn.Linear):
    """Tokens `[n, d]` to logits `[n, E]` in fp32, which a weight in bf16 would round to few
    steps.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class; fp64 stays fp64."""
        return wide_linear(tokens, self.weight, self.bias)


def wide_linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in fp32 of operands that may be in fewer bits, of which no wider copy is kept."""
    if weight.dtype.itemsize >= 4:
        return F.linear(tokens, weight, bias)
    logits = linear_in_dtype(tokens, weight, torch.float32)
    return logits if bias is None else logits + bias


class ExpertLinear(nn.Module):
    """E linears as one: each row through that of its expert. weight `[E, o, i]`, bias `[E, o]`."""

    bias: nn.Parameter | None

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts, out_features)) if bias else None

    def forward(self, rows: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """Rows `[m, i]` to `[m, o]`, without the bias; see `grouped_linear`."""
        return grouped_linear(rows, self.weight, groups, of_tokens=of_tokens)


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        mixture = _get_mixture(spec)
        experts, inner, bias = mixture.num_experts, mixture.mlp_width, mixture.expert_bias
        self.gate_up_proj = ExpertLinear(experts, spec.width, 2 * inner, bias)
        self.down_proj = ExpertLinear(experts, inner, spec.width, bias)
        self.gate = Gate(mixture.activation, mixture.interleaved, mixture.alpha, mixture.limit)

    def forward(self, tokens: Tensor, scores: Tensor, chosen: Tensor, groups: Groups) -> Tensor:
        """Tokens `[n, d]` by the experts `chosen` `[n, k]`, each times its score `[n, k]`, summed:
        `[n, d]`.
        """
        inner = self.gate_up_proj(tokens, groups, of_tokens=True)
        if self.gate_up_proj.bias is not None:
            inner = inner + gather_row_biases(self.gate_up_proj.bias, groups)
        product = scored_product(inner, order_by_expert(scores, groups), self.gate)
        del inner
        summed = sum_choices(self.down_proj(product, groups), groups)
        return (
            summed
            if self.down_proj.bias is None
            else summed + compute_scored_bias(self.down_proj.bias, scores, chosen)
        )


def gather_row_biases(bias: Tensor, groups: Groups) -> Tensor:
    """The bias of each row's expert: `[m, o]` of `[E, o]`."""
    return cast(
        Tensor,
        GradientNode.apply(_take_biases, _add_biases, (1, 2), bias, groups.experts, bias.shape[0]),
    )


def _take_biases(bias: Tensor, experts: Tensor, count: int) -> Tensor:
    return bias.index_select(0, experts)


def _add_biases(gradient: Tensor, experts: Tensor, count: int) -> Tensor:
    """By a matmul, which sums in a fixed order."""
    numbers = torch.arange(count, device=experts.device)
    return (experts == numbers.unsqueeze(1)).to(gradient.dtype) @ gradient


def compute_scored_bias(bias: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """What the biases `[E, d]` of the chosen experts add to each token, each times its score: `[n,
    d]`.
    """
    shares = scores.new_zeros(scores.shape[0], bias.shape[0]).scatter(1, chosen, scores)
    return shares.to(bias.dtype) @ bias


@dataclass
class BalanceLoss:
    """The auxiliary loss that evens the experts' loads (arXiv 2101.03961, equation 4).

    Of a layer and a micro-batch it is E sum_e f_e P_e, with f_e the choices of expert e per token,
    and P_e the mean of its probabilities, both over tokens that are no padding. Its gradient enters
    where the scores leave the router, so that layers may be computed again, or on other ranks than
    the loss. sequences: the ranks that share sequences, of which each knows the part of the loss
    that its tokens have. weight: of one layer's, in what goes backward now.
    """

    coefficient: float
    layers: int  # of the whole model that have experts
    sequences: Group | None = None
    weight: float = 0.0

    def begin(self, parts: int) -> None:
        """The loss of the step that begins is the mean over layers, and over so many micro-batches
        of all ranks.
        """
        self.weight = self.coefficient / (self.layers * parts)


def _keep_scores(scores: Tensor, loss: Tensor, balance: BalanceLoss) -> Tensor:
    """Return scores as they are; in backward the loss gets its gradient."""
    return scores.view_as(scores)


def _differentiate_loss(gradient: Tensor, balance: BalanceLoss) -> tuple[Tensor, Tensor]:
    return gradient, gradient.new_full((), balance.weight)


class ExpertLoad:
    """What the training forwards of a step have chosen, on the device; added up in place, so that a
    forward that is computed again for backward issues the same operators, and counts twice.

    rows: int `[E]`, tokens that each expert computed, without padding. loss: sum of the balance
    losses of `calls` forwards. expected: choices that there were.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.expected = self.calls = 0

    @torch.no_grad()
    def add(self, rows: Tensor, loss: Tensor | None, choices: int) -> None:
        """Adds a forward's rows `[E]`, of so many choices."""
        self.rows.add_(rows)
        if loss is not None:
            self.loss.add_(loss)
        self.expected, self.calls = self.expected + choices, self.calls + 1

    def clear(self) -> None:
        """A step begins."""
        self.rows.zero_()
        self.loss.zero_()
        self.expected = self.calls = 0


class Mixture(nn.Module):
    """A router and its experts, called as an MLP is: `[b, s, d]` to `[b, s, d]`.

    load: what the training forwards have chosen, where that is counted. balance: the auxiliary
    loss, if there is one.
    """

    load: ExpertLoad | None = None
    balance: BalanceLoss | None = None

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        mixture = _get_mixture(spec)
        self.router = Router(spec.width, mixture.num_experts, bias=mixture.router_bias)
        self.experts = Experts(spec)
        self.top_k, self.normalized = mixture.top_k, mixture.normalized

    def forward(self, hidden: Tensor, real: RealTokens | None = None) -> Tensor:
        """Hidden `[b, s, d]` to `[b, s, d]`. real: which tokens are counted; None: all."""
        tokens = hidden.flatten(0, -2)
        logits = self.router(tokens)
        scores, chosen = self.choose(logits)
        groups = group_tokens(chosen, logits.shape[1])
        scores = self.note(logits, scores, groups, real, real)
        return cast(Tensor, self.experts(tokens, scores, chosen, groups)).view_as(hidden)

    def note(
        self,
        logits: Tensor,
        scores: Tensor,
        groups: Groups,
        real: RealTokens | None,
        own_real: RealTokens | None,
    ) -> Tensor:
        """Adds to the load, where gradients are wanted; returns the scores, with the balance loss's
        gradient to come.

        logits, scores: of tokens of this rank. groups: of these tokens, and of those of ranks that
        it shares them with. real, own_real: those of the groups' tokens, and of this rank's, that
        are counted.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return scores
        rows, loss = count_rows(groups, real), None
        if self.balance is not None:
            shared = rows
            if self.balance.sequences is not None:
                shared = all_reduce(rows, "sum", self.balance.sequences)
            # Each token has its choices, so that the rows of all ranks say how many tokens there
            # are.
            tokens = (shared.sum() / groups.choices).clamp(min=1)
            probabilities = logits.softmax(dim=-1)
            if own_real is not None:
                is_padding = ~own_real.make_mask(logits.device)
                probabilities = probabilities.masked_fill(is_padding.unsqueeze(1), 0)
            shares = shared / tokens
            loss = logits.shape[1] * (shares * probabilities.sum(dim=0)).sum() / tokens
            scores = cast(
                Tensor,
                GradientNode.apply(
                    _keep_scores, _differentiate_loss, (2,), scores, loss, self.balance
                ),
            )
        if self.load is not None:
            count = groups.tokens.shape[0] if real is None else real.total * groups.choices
            self.load.add(rows, loss, count)
        return scores

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, their numbers), `[n, k]` each, of logits `[n, E]`.

        normalized: the scores of a token are the softmax over its chosen experts, so that they add
        up to 1; else over all of them.
        """
        if self.normalized:
            best, chosen = logits.topk(self.top_k, dim=-1)
            return best.softmax(dim=-1), chosen
        scores, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        return scores, chosen


def _get_mixture(spec: DecoderSpec) -> MixtureSpec:
    assert spec.mixture is not None
    return spec.mixture
