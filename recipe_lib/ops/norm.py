"""Root-mean-square norm (arXiv 1910.07467), in its two spellings."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden [..., d] / rms(hidden) * weight [d]`; statistics in fp32, the result in the dtype of
    `hidden`.
    """
    return F.rms_norm(hidden, weight.shape, weight, eps)


def offset_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden [..., d] / rms(hidden) * (1 + weight [d])`, all of it in fp32 (Gemma); back in the
    dtype of `hidden`.

    1 + weight is not representable in bf16 for the small weights that Gemma has, hence fp32 up to
    the end.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.rms_norm(hidden.to(wide), weight.shape, 1 + weight.to(wide), eps).to(hidden.dtype)
