"""Compute the product between the linears of a gated MLP, and the steps of a mixture of experts.

`models.decoder.MLP` calls `gated_activation` (arXiv 2002.05202). `models.mixture` calls, in this
order, `group_tokens`, which sorts tokens by expert, `grouped_linear`, one matmul over the weights
of all experts, `scored_product`, an expert's `gated_activation`, `grouped_linear` again, and
`sum_choices`, which sums the results of a token's experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops import deferred
from recipe_lib.ops.attention import RealTokens
from recipe_lib.ops.fused_kernels import (
    call_with_gradient,
    make_operator,
    register_fused,
    run_cheap_node,
)
from recipe_lib.ops.kept_tensors import note_cheap

# Shapes: n tokens that each chose k of E experts are m = n k rows, sorted by expert. No token is
# dropped, so sizes are the same whatever is chosen. d channels of the model, f of an MLP or expert,
# i and o those of a matrix's input and output.

_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
# Name -> (activation, its backward `fn(gradient, input)`), the kernels that autograd uses.
ACTIVATIONS: dict[str, _Activation] = {
    "silu": (F.silu, torch.ops.aten.silu_backward.default),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward.default),
    "gelu_tanh": (
        lambda gate: F.gelu(gate, approximate="tanh"),
        lambda gradient, gate: torch.ops.aten.gelu_backward.default(
            gradient, gate, approximate="tanh"
        ),
    ),
}


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return `activation(gate) * up`, contiguous; nothing but gate and up is saved for backward.

    gate, up: of one shape. activation: a key of `ACTIVATIONS`.
    """
    # kept: the indices of the arguments that are saved.
    return run_cheap_node(
        compute_gated_product,
        gate,
        up,
        activation,
        differentiate=compute_gated_product_gradients,
        kept=range(3),
    )


def _make_contiguous_like(gate: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


# `register_fused`, here and below: one kernel, by torch.compile, on a GPU with Triton; it is given
# the schema of an operator and a function that makes empty tensors like the results.
@register_fused(
    "gated_product(Tensor gate, Tensor up, str activation) -> Tensor", _make_contiguous_like
)
def compute_gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return the result of `gated_activation`, contiguous, without a backward of its own."""
    return (ACTIVATIONS[activation][0](gate) * up).contiguous()


@register_fused(
    "gated_gradients(Tensor gradient, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    lambda gradient, gate, up, activation: (_make_contiguous_like(gate), _make_contiguous_like(up)),
)
def compute_gated_product_gradients(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous, given that of their product."""
    activate, activate_backward = ACTIVATIONS[activation]
    up_grad = gradient * activate(gate)
    return activate_backward(gradient * up, gate).contiguous(), up_grad.contiguous()


def linear_in_dtype(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `hidden [.., i] @ weight.T [i, o]`, computed in `dtype`.

    The operands may be in other dtypes, in which they are saved for backward, which converts them
    again. The weight's gradient is never deferred.
    """
    return call_with_gradient(
        lambda hidden, weight, dtype: F.linear(hidden.to(dtype), weight.to(dtype)),
        hidden,
        weight,
        dtype,
        differentiate=_differentiate_linear,
        kept=range(3),
    )


def _differentiate_linear(
    gradient: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows = hidden.to(dtype).flatten(0, -2)
    return (
        (gradient @ weight.to(dtype)).to(hidden.dtype),
        (gradient.flatten(0, -2).t() @ rows).to(weight.dtype),
    )


# The product between the linears of an expert: that of a gated MLP, times the router's score, with
# which the token chose the expert.
#
# The score is multiplied in before the down projection: to f channels, where after it there would
# be d, and backward computes the score's gradient without the expert's output. Saved for backward
# are the inner channels `[m, 2f]` and the scores.


CLAMPED = "clamped_swiglu"  # the value of `Gate.activation` for gpt-oss


@dataclass(frozen=True)
class Gate:
    """How an expert's inner channels `[m, 2f]`, gate and up, become `[m, f]`."""

    # A key of `ACTIVATIONS`, or `clamped_swiglu` (gpt-oss): `(up + 1) * gate * sigmoid(alpha *
    # gate)`, with gate clamped to at most `limit`, and up to [-limit, limit].
    activation: str
    # True: gate and up alternate among the channels; False: the gate is the first half.
    interleaved: bool = False
    alpha: float = 1.0  # of clamped_swiglu
    limit: float = float("inf")  # of clamped_swiglu


def scored_product(inner: Tensor, scores: Tensor, gate: Gate) -> Tensor:
    """Return the gated product of inner channels `[m, 2f]` times each row's score, `[m, f]`.

    scores: the router's, `[m]`.
    """
    settings = (gate.activation, gate.interleaved, gate.alpha, gate.limit)
    return run_cheap_node(
        compute_scored_product,
        inner,
        scores,
        *settings,
        differentiate=compute_scored_product_gradients,
        kept=range(6),
    )


def _split_gate_up(inner: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up, `[m, f]` each, as views of the inner channels."""
    if interleaved:
        return inner[:, ::2], inner[:, 1::2]
    half = inner.shape[1] // 2
    return inner[:, :half], inner[:, half:]


def _activate(
    gate: Tensor, up: Tensor, activation: str, *, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the activated gate, and the factor computed from `up` that multiplies it."""
    if activation != CLAMPED:
        return ACTIVATIONS[activation][0](gate), up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * alpha), up.clamp(-limit, limit) + 1


@register_fused(
    "scored_product(Tensor inner, Tensor scores, str activation, bool interleaved, float alpha,"
    " float limit) -> Tensor",
    lambda inner, *_: inner.new_empty(inner.shape[0], inner.shape[1] // 2),
)
def compute_scored_product(
    inner: Tensor, scores: Tensor, activation: str, interleaved: bool, alpha: float, limit: float
) -> Tensor:
    """Return the result of `scored_product` in inner's dtype, without a backward of its own."""
    gate, up = _split_gate_up(inner, interleaved)
    activated, factor = _activate(gate, up, activation, alpha=alpha, limit=limit)
    return (activated * factor * scores.unsqueeze(1)).to(inner.dtype)


@register_fused(
    "scored_product_gradients(Tensor gradient, Tensor inner, Tensor scores, str activation, bool"
    " interleaved, float alpha, float limit) -> (Tensor, Tensor)",
    lambda gradient, inner, scores, *_: (torch.empty_like(inner), torch.empty_like(scores)),
)
def compute_scored_product_gradients(
    gradient: Tensor,
    inner: Tensor,
    scores: Tensor,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the inner channels and of the scores, given that of the product."""
    gate, up = _split_gate_up(inner, interleaved)
    activated, factor = _activate(gate, up, activation, alpha=alpha, limit=limit)
    score_grad = (gradient * activated * factor).sum(dim=1, dtype=scores.dtype)
    scored_grad = (gradient * scores.unsqueeze(1)).to(inner.dtype)
    if activation == CLAMPED:
        clamped = gate.clamp(max=limit)
        sigmoid = torch.sigmoid(clamped * alpha)
        # d x*sigmoid(alpha x) / dx = sigmoid * (1 + alpha x (1 - sigmoid)); a clamp lets no
        # gradient through beyond its limit.
        gate_grad = scored_grad * factor * sigmoid * (1 + alpha * clamped * (1 - sigmoid))
        gate_grad = gate_grad * (gate <= limit)
        up_grad = scored_grad * activated * (up.abs() <= limit)
    else:
        gate_grad = ACTIVATIONS[activation][1](scored_grad * factor, gate)
        up_grad = scored_grad * activated
    if interleaved:
        return torch.stack((gate_grad, up_grad), -1).flatten(1), score_grad
    return torch.cat((gate_grad, up_grad), 1), score_grad


# Gathering of tokens by expert, the experts' matmuls, and the sum over a token's experts.


# torch's grouped matmul takes only operands whose rows begin at multiples of so many bytes.
_ALIGNED = 16


@dataclass(frozen=True)
class Groups:
    """The expert and token of each of the m rows, which are sorted by expert."""

    experts: Tensor  # int64 [m], the expert of each row
    tokens: Tensor  # int64 [m], the token of each row
    # int64 [m], the row of each choice: the first token's choices, then the second's, ...
    places: Tensor
    ends: Tensor  # int32 [E], the index after each expert's last row
    choices: int  # k, the number of experts of a token


def group_tokens(chosen: Tensor, num_experts: int) -> Groups:
    """Sort the choices of tokens by expert.

    chosen: the indices of the experts that each token chose, int64 `[n, k]`.
    """
    # Stable: within an expert rows stay in the order of tokens.
    sorted_experts, order = chosen.flatten().sort(stable=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    choices = chosen.shape[1]
    # Backward makes experts and tokens of the choices and their rows, without sorting again.
    experts = note_cheap(sorted_experts, _scatter_rows, chosen.flatten(), places)
    tokens = note_cheap(order // choices, _find_tokens, places, choices)
    expert_indices = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, expert_indices, right=True, out_int32=True)
    return Groups(experts=experts, tokens=tokens, places=places, ends=ends, choices=choices)


def _scatter_rows(values: Tensor, places: Tensor) -> Tensor:
    """Return values of choices, `[m]`, in the order of rows; places: of `Groups`."""
    return torch.empty_like(values).scatter_(0, places, values)


def _find_tokens(places: Tensor, choices: int) -> Tensor:
    return _scatter_rows(torch.arange(places.shape[0], device=places.device) // choices, places)


def count_rows(groups: Groups, real: RealTokens | None) -> Tensor:
    """Return the number of rows of each expert, int64 `[E]`.

    real: the tokens that are no padding, whose rows are counted; None: all rows are.
    """
    if real is None:
        return groups.ends.diff(prepend=groups.ends.new_zeros(1)).long()
    is_counted = real.make_mask(groups.tokens.device).index_select(0, groups.tokens)
    return groups.tokens.new_zeros(groups.ends.shape[0]).index_add_(
        0, groups.experts, is_counted.long()
    )


def order_by_expert(values: Tensor, groups: Groups) -> Tensor:
    """Return values of each token's choices, `[n, k]`, in the order of rows, `[m]`."""
    # A permutation: its backward gathers by the same indices.
    return run_cheap_node(
        _scatter_rows, values.flatten(), groups.places, differentiate=_permute_back, kept=(1,)
    )


def _permute_back(gradient: Tensor, places: Tensor) -> Tensor:
    return gradient.index_select(0, places)


def sum_token_rows(
    rows: Tensor, places: Tensor, choices: int, tokens: Tensor | None = None
) -> Tensor:
    """Return the sum `[n, d]` of the rows `[m, d]` of each token's choices.

    places, choices, tokens: of `Groups`. tokens is not read: `sum_choices` passes it as an argument
    that its backward is given.
    """
    return rows.index_select(0, places).unflatten(0, (-1, choices)).sum(dim=1)


def sum_choices(rows: Tensor, groups: Groups) -> Tensor:
    """Return rows `[m, d]` summed over the choices of each token, `[n, d]`; no row is saved."""
    order = (groups.places, groups.choices, groups.tokens)
    # A row's gradient is that of its token: argument 3, `tokens`, is all that backward needs.
    return call_with_gradient(sum_token_rows, rows, *order, differentiate=_permute_back, kept=(3,))


def grouped_linear(
    rows: Tensor, weight: Tensor, groups: Groups, *, of_tokens: bool = False
) -> Tensor:
    """Return each row times the matrix of its expert, `[m, o]`, computed in the weight's dtype.

    rows: `[m, i]`; with of_tokens the tokens `[n, i]`, from which the rows are gathered. weight:
    the matrices, `[E, o, i]`. `rows` are saved as they are given if the weight is trained, else
    not at all. The weight's gradient may be deferred, see `ops.deferred`: a pipeline's schedule
    computes it after backward.
    """
    choices = groups.choices if of_tokens else 0
    order = (groups.tokens, groups.places, groups.ends)
    return cast(Tensor, _GroupedLinear.apply(rows, weight, *order, choices))


class _GroupedLinear(torch.autograd.Function):
    """The autograd node of `grouped_linear`.

    choices: 0: `rows` are rows `[m, i]`; k: they are tokens `[n, i]`, of which each has k rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        tokens: Tensor,
        places: Tensor,
        ends: Tensor,
        choices: int,
    ) -> Tensor:
        trained = ctx.needs_input_grad[1]
        # The rows as they are given: gathered they are k times as many, and backward gathers again.
        ctx.save_for_backward(rows if trained else None, weight, tokens, places, ends)
        ctx.settings = (choices, rows.dtype)
        # Held besides: what checkpointing gives back for a saved tensor is not the parameter, to
        # which a deferred gradient is added.
        ctx.parameter = weight if trained and deferred.is_split_backward_enabled() else None
        return grouped_matmul(
            take_rows(rows, tokens, choices).to(weight.dtype), weight.transpose(1, 2), ends
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, tokens, places, ends = ctx.saved_tensors
        choices, dtype = ctx.settings
        out_grad = out_grad.contiguous()
        rows_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = grouped_matmul(out_grad, weight, ends)
            if choices:
                rows_grad = sum_token_rows(rows_grad, places, choices)
            rows_grad = rows_grad.to(dtype)
        if not ctx.needs_input_grad[1]:
            return rows_grad, None, None, None, None, None
        # Detached: while the gradient is deferred, their graph would keep the stage's input.
        rows = rows.detach()

        def compute_weight_gradient() -> list[Tensor]:
            gathered_rows = take_rows(rows, tokens, choices).to(out_grad.dtype)
            return [grouped_weight_gradient(out_grad, gathered_rows, ends)]

        if ctx.parameter is not None and deferred.is_deferring():
            deferred.defer_gradients([ctx.parameter], compute_weight_gradient)
        else:
            (weight_grad,) = compute_weight_gradient()
        return rows_grad, weight_grad, None, None, None, None


def take_rows(rows: Tensor, tokens: Tensor, choices: int) -> Tensor:
    """Return the rows `[m, i]` of tokens `[n, i]`; with choices 0 return `rows` as they are.

    tokens: the token of each row, of `Groups`.
    """
    return rows.index_select(0, tokens) if choices else rows


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return rows `[m, i]` times the matrix of their expert, of `[E, i, o]`: `[m, o]`.

    ends: of `Groups`. Call it inside an autograd.Function: it is not always differentiable.
    """
    if rows.dtype != torch.bfloat16:
        return _matmul_loop(rows, weight, ends)
    out_features = weight.shape[2]
    multiple = _ALIGNED // rows.element_size()
    if rows.shape[1] % multiple or out_features % multiple:
        # torch's kernel takes aligned rows alone, see `_ALIGNED`.
        padding = -rows.shape[1] % multiple
        rows = F.pad(rows, (0, padding))
        weight = F.pad(weight, (0, -out_features % multiple, 0, padding))
        return F.grouped_mm(rows, weight, offs=ends)[:, :out_features].contiguous()
    return F.grouped_mm(rows, weight, offs=ends)


def grouped_weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient `[E, o, i]` of the experts' matrices, 0 for an expert without rows.

    gradient: of the products, `[m, o]`. rows: that the matrices were multiplied with, `[m, i]`.
    """
    if rows.dtype != torch.bfloat16:
        return _gradient_loop(gradient, rows, ends)
    multiple = _ALIGNED // rows.element_size()
    out_features, in_features = (tensor.shape[1] for tensor in (gradient, rows))
    if out_features % multiple or in_features % multiple:
        gradient = F.pad(gradient, (0, -out_features % multiple))
        rows = F.pad(rows, (0, -in_features % multiple))
        padded = F.grouped_mm(gradient.t(), rows, offs=ends)
        return padded[:, :out_features, :in_features].contiguous()
    return F.grouped_mm(gradient.t(), rows, offs=ends)


# A loop over the experts, for dtypes that torch's grouped matmul does not have on every device
# (fp64 on none, fp32 not on all). It is an operator, as the simulated device of `tune plan` has no
# values in `ends` to loop by. On a GPU the host waits for `ends`.


def _multiply_one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `grouped_matmul` by one matmul for each expert."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        torch.mm(rows[first:last], weight[expert], out=out[first:last])
        first = last
    return out


def _differentiate_one_by_one(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return `grouped_weight_gradient` by one matmul for each expert."""
    weight_grad = rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        torch.mm(gradient[first:last].t(), rows[first:last], out=weight_grad[expert])
        first = last
    return weight_grad


_matmul_loop = make_operator(
    "grouped_matmul_loop",
    _multiply_one_by_one,
    lambda rows, weight, ends: rows.new_empty(rows.shape[0], weight.shape[2]),
)
_gradient_loop = make_operator(
    "grouped_gradient_loop",
    _differentiate_one_by_one,
    lambda gradient, rows, ends: rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1]),
)
