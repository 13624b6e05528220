"""Compute the root-mean-square norm (arXiv 1910.07467), times its weight or 1 + weight.

The norms of decoder layers call these. eps is added to the mean of squares.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.device import get_kernel_type
from recipe_lib.ops.fused_kernels import call_with_gradient
from recipe_lib.ops.kept_tensors import note_cheap


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden [..., d] / rms(hidden) * weight [d]` in the dtype of `hidden`.

    Statistics are in fp32.
    """
    return _differentiate_once(_norm, hidden, weight, eps, 0)


def offset_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden [..., d] / rms(hidden) * (1 + weight [d])` in its dtype (Gemma)."""
    return _differentiate_once(_offset_norm, hidden, weight, eps, 1)


def _norm(hidden: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
    return F.rms_norm(hidden, weight.shape, weight, eps)


def _offset_norm(hidden: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
    # All of it in fp32: with weights as small as Gemma's, 1 + weight is not representable in bf16.
    wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
    return F.rms_norm(
        # What a kernel saves of it, backward converts again. Without a name, it is freed before
        # the result is converted.
        note_cheap(hidden.to(wide_dtype), torch.Tensor.to, hidden, wide_dtype),
        weight.shape,
        offset + weight.to(wide_dtype),
        eps,
    ).to(hidden.dtype)


def _differentiate_once(
    norm: Callable[..., Tensor], hidden: Tensor, weight: Tensor, eps: float, offset: int
) -> Tensor:
    """Return `norm(hidden, weight, eps, offset)` by a node that saves hidden and weight alone."""
    # A GPU has a kernel that does. A CPU has a chain of operators, each of which saves its own.
    if torch.compiler.is_compiling() or get_kernel_type(hidden.device) != "cpu":
        return norm(hidden, weight, eps, offset)
    return call_with_gradient(
        norm, hidden, weight, eps, offset, differentiate=_compute_gradients, kept=range(4)
    )


def _compute_gradients(
    gradient: Tensor, hidden: Tensor, weight: Tensor, eps: float, offset: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight, computed in fp32, given that of the norm."""
    wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
    wide = hidden.to(wide_dtype)
    gradient = gradient.to(wide_dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    normed = wide * scale
    weight_grad = (gradient * normed).flatten(0, -2).sum(dim=0)
    gradient = gradient * (weight.to(wide_dtype) + offset)
    # The scale depends on all channels.
    mean = (gradient * normed).mean(dim=-1, keepdim=True)
    hidden_grad = (gradient - normed * mean) * scale
    return hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype)
