"""Compute the root-mean-square norm (arXiv 1910.07467), times its weight or 1 + weight.

The norms of decoder layers call these. eps is added to the mean of squares.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden [..., d] / rms(hidden) * weight [d]` in the dtype of `hidden`.

    Statistics are in fp32.
    """
    return F.rms_norm(hidden, weight.shape, weight, eps)


def offset_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden [..., d] / rms(hidden) * (1 + weight [d])` in its dtype (Gemma)."""
    # All of it in fp32: with weights as small as Gemma's, 1 + weight is not representable in bf16.
    wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
    return F.rms_norm(hidden.to(wide_dtype), weight.shape, 1 + weight.to(wide_dtype), eps).to(
        hidden.dtype
    )
