"""Keys and values of the tokens already read, so that decoding computes each token once."""

import torch
from torch import Tensor

from recipe_lib.models.spec import DecoderSpec


class KVCache:
    """Room for `max_len` tokens in each of `batch` rows; `length` says how many are filled, the same in all rows."""

    def __init__(
        self, spec: DecoderSpec, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (2, batch, spec.num_kv_heads, max_len, spec.head_width)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.max_len = max_len
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new k, v `[b, k, s, e]` to those of `layer`; returns all, `[b, k, length + s, e]`.

        The decoder moves `length` on when every layer has its own. Raises ValueError when there is no room left.
        """
        end = self.length + k.shape[2]
        if end > self.max_len:
            raise ValueError(f"the cache has room for {self.max_len} tokens, {end} are needed")
        kept = self.layers[layer]
        kept[0, :, :, self.length : end] = k
        kept[1, :, :, self.length : end] = v
        return kept[0, :, :, :end], kept[1, :, :, :end]
