"""Rows of codes in [-127, 127] and a factor for each, back to numbers."""

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import fused, fuses

_PIECE_ELEMENTS = 2**23  # elements in fp32 at a time


def dequantize_rows(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """`codes [m, n] * factors [m]`, computed in fp32, of dtype; in pieces, unless it is one kernel."""
    if fuses(codes.device):
        return _dequantize(codes, factors, dtype)
    rows = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    step = max(1, _PIECE_ELEMENTS // codes.shape[1])
    for start in range(0, len(codes), step):
        piece = slice(start, start + step)
        rows[piece].copy_(codes[piece].float().mul_(factors[piece].unsqueeze(1)))
    return rows


@fused(
    "dequantize_int8(Tensor codes, Tensor factors, ScalarType dtype) -> Tensor",
    lambda codes, factors, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
def _dequantize(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """As one expression."""
    return (codes.float() * factors.unsqueeze(1)).to(dtype)
