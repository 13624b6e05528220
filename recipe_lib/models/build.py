"""A decoder without memory, and random weights that depend on the seed alone, not on who holds which part."""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recipe_lib.models.decoder import Decoder
from recipe_lib.models.spec import DecoderSpec

_BLOCK_ELEMENTS = 2**22  # random numbers are drawn 16 MiB at a time


def build_meta(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """The decoder with parameters of `dtype` on the meta device: shapes, no bytes."""
    with torch.device("meta"):
        return Decoder(spec).to(dtype)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, spec: DecoderSpec) -> None:
    """Fills materialised parameters in place: normal with `spec.init_std`; norms neutral, biases 0.

    A parameter's values follow from (seed, its name, its full shape) alone. Each rank draws only the blocks of rows
    that its shard overlaps and keeps its part of them; nothing is communicated, and no more than a block is held.
    """
    for name, parameter in model.named_parameters():
        local, offset = local_part(parameter)
        if name.endswith("norm.weight"):
            local.fill_(0.0 if spec.norm_offset else 1.0)
        elif name.endswith(".bias"):
            local.zero_()
        else:
            _fill_normal(local, offset, parameter.shape, f"{seed}/{name}", spec.init_std)


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter (it shares memory with it), and where it begins in the full tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offset)


def _fill_normal(local: Tensor, offset: tuple[int, ...], shape: torch.Size, key: str, std: float) -> None:
    """Writes the part at `offset` of a normal tensor of `shape`; each of its row blocks has a generator of its own."""
    if local.numel() == 0:
        return
    block_rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    first, last = offset[0], offset[0] + local.shape[0]
    columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    for block in range(first // block_rows, -(-last // block_rows)):
        top, bottom = block * block_rows, min((block + 1) * block_rows, shape[0])
        digest = hashlib.sha256(f"{key}/{block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        values = torch.empty((bottom - top, *shape[1:]), dtype=torch.float32).normal_(0.0, std, generator=generator)
        start, stop = max(top, first), min(bottom, last)
        local[start - first : stop - first].copy_(values[(slice(start - top, stop - top), *columns)])
