"""Tokens through the experts that were chosen for them: sorted by expert, one matmul over many
weights, summed again.

n tokens with k choices each are m = n k rows, sorted by expert. No token is dropped, so sizes are
the same whatever is chosen. A row's input is its token's: it is gathered where it is needed, in
backward again, and never kept.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops import deferred
from recipe_lib.ops.fused_kernels import GradientNode, make_operator
from recipe_lib.ops.real_tokens import RealTokens

_ALIGNED = 16  # bytes that rows of a grouped matmul's operands begin at multiples of


@dataclass(frozen=True)
class Groups:
    """Which row is whose. experts, tokens: int64 `[m]`, of each row in expert order. places: int64
    `[m]`, the row of each token's first choice, its second, ... ends: int32 `[E]`, the row after
    each expert's last. choices: k.
    """

    experts: Tensor
    tokens: Tensor
    places: Tensor
    ends: Tensor
    choices: int


def group_tokens(chosen: Tensor, num_experts: int) -> Groups:
    """The rows of tokens whose experts are `chosen` `[n, k]`, in the order of experts and then of
    tokens.
    """
    experts, order = chosen.flatten().sort(stable=True)
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )
    numbers = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    choices = chosen.shape[1]
    return Groups(experts, order // choices, places, ends, choices)


def count_rows(groups: Groups, real: RealTokens | None) -> Tensor:
    """Return how many rows each expert has, int64 `[E]`. real: the tokens whose rows are counted;
    None: all.
    """
    if real is None:
        return groups.ends.diff(prepend=groups.ends.new_zeros(1)).long()
    is_counted = real.make_mask(groups.tokens.device).index_select(0, groups.tokens)
    return groups.tokens.new_zeros(groups.ends.shape[0]).index_add_(
        0, groups.experts, is_counted.long()
    )


def order_by_expert(values: Tensor, groups: Groups) -> Tensor:
    """Numbers `[n, k]` of each token's choices in the order of rows `[m]`."""
    return cast(
        Tensor, GradientNode.apply(_permute, _permute_back, (1,), values.flatten(), groups.places)
    )


def _permute(values: Tensor, places: Tensor) -> Tensor:
    """Row i of the result is the one whose place is i."""
    return torch.empty_like(values).scatter_(0, places, values)


def _permute_back(gradient: Tensor, places: Tensor) -> Tensor:
    return gradient.index_select(0, places)


def sum_token_rows(
    rows: Tensor, places: Tensor, choices: int, tokens: Tensor | None = None
) -> Tensor:
    """`[m, d]` to `[n, d]`: the rows of a token's choices together. tokens: whose row is whose, for
    a gradient.
    """
    return rows.index_select(0, places).unflatten(0, (-1, choices)).sum(dim=1)


def sum_choices(rows: Tensor, groups: Groups) -> Tensor:
    """Rows `[m, d]` summed over the choices of each token: `[n, d]`. Keeps nothing of them."""
    places = (groups.places, groups.choices, groups.tokens)
    return cast(Tensor, GradientNode.apply(sum_token_rows, _permute_back, (3,), rows, *places))


def grouped_linear(
    rows: Tensor, weight: Tensor, groups: Groups, *, of_tokens: bool = False
) -> Tensor:
    """Each expert's rows through its own matrix: `[m, i]` and weights `[E, o, i]` to `[m, o]`.

    of_tokens: `rows` are the tokens `[n, i]`, from which the rows are gathered. A frozen weight
    keeps no rows; a trained one keeps `rows` as they are given. Computed in the weights' type.
    """
    choices = groups.choices if of_tokens else 0
    return cast(
        Tensor,
        _GroupedLinear.apply(rows, weight, groups.tokens, groups.places, groups.ends, choices),
    )


class _GroupedLinear(torch.autograd.Function):
    """choices: of a token whose rows are gathered; 0: rows are given as they are."""

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
        ctx.save_for_backward(rows if trained else None, weight, tokens, places, ends)
        ctx.choices, ctx.dtype = choices, rows.dtype
        # What checkpointing gives back of a saved tensor has no way to the parameter.
        ctx.later = weight if trained and deferred.is_split_backward_enabled() else None
        return grouped_matmul(
            take_rows(rows, tokens, choices).to(weight.dtype), weight.transpose(1, 2), ends
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, tokens, places, ends = ctx.saved_tensors
        gradient, choices = gradients[0].contiguous(), ctx.choices
        rows_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = grouped_matmul(gradient, weight, ends)
            rows_grad = (sum_token_rows(rows_grad, places, choices) if choices else rows_grad).to(
                ctx.dtype
            )
        if not ctx.needs_input_grad[1]:
            return rows_grad, None, None, None, None, None
        rows = (
            rows.detach()
        )  # where it is deferred, its graph would keep the stage's input until then

        def of_weight() -> Tensor:
            return grouped_weight_gradient(
                gradient, take_rows(rows, tokens, choices).to(gradient.dtype), ends
            )

        if ctx.later is not None and deferred.is_deferring():
            deferred.defer_gradients([ctx.later], lambda: [of_weight()])
        else:
            weight_grad = of_weight()
        return rows_grad, weight_grad, None, None, None, None


def take_rows(rows: Tensor, tokens: Tensor, choices: int) -> Tensor:
    """The rows of tokens that choose so many experts; 0: rows are given as they are. No
    gradient.
    """
    return rows.index_select(0, tokens) if choices else rows


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows `[m, i]` of each expert times its matrix of `[E, i, o]`: `[m, o]`. No gradient."""
    if rows.dtype != torch.bfloat16:
        return _matmul_loop(rows, weight, ends)
    wide, multiple = weight.shape[2], _ALIGNED // rows.element_size()
    if rows.shape[1] % multiple or wide % multiple:
        inner, outer = -rows.shape[1] % multiple, -wide % multiple
        rows, weight = F.pad(rows, (0, inner)), F.pad(weight, (0, outer, 0, inner))
        return F.grouped_mm(rows, weight, offs=ends)[:, :wide].contiguous()
    return F.grouped_mm(rows, weight, offs=ends)


def grouped_weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """`[E, o, i]`: of each expert's rows `[., o]` and `[., i]` the product over them; 0 for one
    without rows.
    """
    if rows.dtype != torch.bfloat16:
        return _gradient_loop(gradient, rows, ends)
    (outer, inner), multiple = (gradient.shape[1], rows.shape[1]), _ALIGNED // rows.element_size()
    if outer % multiple or inner % multiple:
        gradient, rows = (
            F.pad(gradient, (0, -outer % multiple)),
            F.pad(rows, (0, -inner % multiple)),
        )
        return F.grouped_mm(gradient.t(), rows, offs=ends)[:, :outer, :inner].contiguous()
    return F.grouped_mm(gradient.t(), rows, offs=ends)


# For types that torch's grouped matmul does not have on every device (fp64 on none, fp32 not on
# all): an operator each, as a simulated device has no values to loop by. On a GPU the host waits
# for the numbers of rows.


def _multiply_one_by_one(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    found = rows.new_empty(rows.shape[0], weight.shape[2])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        torch.mm(rows[first:last], weight[expert], out=found[first:last])
        first = last
    return found


def _differentiate_one_by_one(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    found = rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        torch.mm(gradient[first:last].t(), rows[first:last], out=found[expert])
        first = last
    return found


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
