"""`activation(gate) * up`, the middle of a gated MLP (arXiv 2002.05202)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.fused_kernels import call_with_gradient, register_fused

_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
# An activation, and its backward `(gradient, input)`, by the kernels that autograd takes.
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
    """Return `activation(gate) * up` of two tensors of one shape, which are all it keeps.

    activation: `silu`, `gelu` or `gelu_tanh`.
    """
    if torch.compiler.is_compiling():
        return compute_gated_product(gate, up, activation)
    return call_with_gradient(
        compute_gated_product,
        gate,
        up,
        activation,
        differentiate=compute_gated_product_gradients,
        kept=range(3),
    )


def _make_contiguous_like(gate: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@register_fused(
    "gated_product(Tensor gate, Tensor up, str activation) -> Tensor", _make_contiguous_like
)
def compute_gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return `gated_activation`, without a gradient; contiguous."""
    return (ACTIVATIONS[activation][0](gate) * up).contiguous()


@register_fused(
    "gated_gradients(Tensor gradient, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    lambda gradient, gate, up, activation: (_make_contiguous_like(gate), _make_contiguous_like(up)),
)
def compute_gated_product_gradients(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, by that of their product; contiguous."""
    activate, activate_backward = ACTIVATIONS[activation]
    up_grad = gradient * activate(gate)
    return activate_backward(gradient * up, gate).contiguous(), up_grad.contiguous()


# The middle of an expert: a gated product of its inner channels, times the score with which its
# token chose it.
#
# The score is multiplied in before the down projection: f channels, where after it there would be
# d, and backward finds the score's gradient without the expert's output. Kept for backward are the
# inner channels `[m, 2f]` and the scores.


CLAMPED = "clamped_swiglu"


@dataclass(frozen=True)
class Gate:
    """The gate by which an expert's inner channels `[m, 2f]` become `[m, f]`."""

    # of the gate, one of `ACTIVATIONS`, or `clamped_swiglu` (gpt-oss): `(up + 1) * gate *
    # sigmoid(alpha * gate)`, with gate at most, and up within, `limit`
    activation: str
    # gate and up take turns among the channels; else the gate is the first half
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = float("inf")


def scored_product(inner: Tensor, scores: Tensor, gate: Gate) -> Tensor:
    """Return the gated product of `inner` `[m, 2f]` times each row's score `[m]`: `[m, f]`."""
    settings = (gate.activation, gate.interleaved, gate.alpha, gate.limit)
    if torch.compiler.is_compiling():
        return compute_scored_product(inner, scores, *settings)
    return call_with_gradient(
        compute_scored_product,
        inner,
        scores,
        *settings,
        differentiate=compute_scored_product_gradients,
        kept=range(6),
    )


def _split_gate_up(inner: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return inner[:, ::2], inner[:, 1::2]
    half = inner.shape[1] // 2
    return inner[:, :half], inner[:, half:]


def _activate(
    gate: Tensor, up: Tensor, activation: str, *, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the activated gate, and the factor that it is multiplied by."""
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
    """Return `scored_product`, without a gradient, in the type of `inner`."""
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
    """Return the gradients of the inner channels and of the scores, by that of the product."""
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
