"""Which rows of a checkpoint's embedding were never trained: read from the file, a few rows at a time."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from recipe_lib.checkpoint.converted import Reader
from recipe_lib.checkpoint.weight_accounts import read_headers
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.models.weight_names import weight_map

SAMPLE = 512  # rows that say what is usual
TINY = 1e-2  # a row of a hundredth of the usual length was left as it was initialized, or is zero


def untrained_embeddings(
    spec: DecoderSpec, folder: Path, tokens: Collection[int], special: Collection[int]
) -> list[int]:
    """The ids among `tokens` whose embedding is next to zero, or the very same as that of another special token.

    Vocabularies are padded with rows that no text ever reached: they are zeros, tiny, or copies of one vector.
    special: ids of all special tokens. Raises CheckpointError.
    """
    headers = read_headers(folder)
    entry = next(entry for entry in weight_map(spec, headers) if entry.our_name == "model.embed_tokens.weight")
    with Reader(headers) as read:
        rows, size = read.opened(entry, torch.float32), headers[entry.file_name].entry.shape[0]
        sample = np.unique(np.linspace(0, size - 1, min(SAMPLE, size)).astype(int)).tolist()
        usual = torch.stack([rows[at : at + 1].float().flatten() for at in sample]).norm(dim=1).median()
        own = {token: rows[token : token + 1].float().flatten() for token in {*tokens, *special} if token < size}
    same = Counter(row.numpy().tobytes() for row in own.values())
    return sorted(
        token
        for token in tokens
        if token in own and (own[token].norm() < TINY * usual or same[own[token].numpy().tobytes()] > 1)
    )
