"""`activation(gate) * up`, the middle of a gated MLP (arXiv 2002.05202)."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.fused_kernels import Node, fused

_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
# An activation, and its backward `(gradient, input)`, by the kernels that autograd takes.
ACTIVATIONS: dict[str, _Activation] = {
    "silu": (F.silu, torch.ops.aten.silu_backward.default),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward.default),
    "gelu_tanh": (
        lambda gate: F.gelu(gate, approximate="tanh"),
        lambda gradient, gate: torch.ops.aten.gelu_backward.default(gradient, gate, approximate="tanh"),
    ),
}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up` of two tensors of one shape, which keeps no more than these two for backward.

    activation: `silu`, `gelu` or `gelu_tanh`.
    """
    if torch.compiler.is_compiling():
        return gated_product(gate, up, activation)
    return cast(Tensor, Node.apply(gated_product, gated_gradients, range(3), gate, up, activation))


def _like(gate: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@fused("gated_product(Tensor gate, Tensor up, str activation) -> Tensor", _like)
def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`gated`, without a gradient; contiguous."""
    return (ACTIVATIONS[activation][0](gate) * up).contiguous()


def _like_both(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(up)


@fused("gated_gradients(Tensor gradient, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)", _like_both)
def gated_gradients(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Of gate and up, by the gradient of their product; contiguous."""
    activate, activate_backward = ACTIVATIONS[activation]
    up_grad = gradient * activate(gate)
    return activate_backward(gradient * up, gate).contiguous(), up_grad.contiguous()
