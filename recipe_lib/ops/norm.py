"""Root-mean-square norm (arXiv 1910.07467), in its two spellings."""

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
    # All of it in fp32: for the small weights that Gemma has, 1 + weight is not representable in
    # bf16.
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.rms_norm(hidden.to(wide), weight.shape, 1 + weight.to(wide), eps).to(hidden.dtype)
