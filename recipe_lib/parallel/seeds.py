"""Seeds: one root in the config, one stream for each use, apart from each other."""

import hashlib
import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


def derive_seed(root: int, *names: str | int) -> int:
    """A seed in [0, 2^63) for the stream that `names` tell, e.g. `derive_seed(42, "dropout", rank)`.

    Streams of different names are unrelated, and none changes when another is added: SHA-256 of root and names.
    """
    text = "\0".join(str(part) for part in (root, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seeds(seed: int, world: "World", *, alike: bool = False) -> None:
    """Seeds the default generators of Python and torch (host and device) with this rank's dropout stream.

    No two ranks have the same, those that share matrices neither: each drops of what it alone has, its part of the
    tokens before a matrix that is cut by rows, its part of the channels before one that is cut by columns. alike: the
    ranks that share matrices have the same stream, because all of them have all tokens (external models).
    Weights and data order draw from streams of their own, derived by name; they do not touch these generators.
    """
    stream = derive_seed(seed, "dropout", world.data_rank if alike else world.rank)
    random.seed(stream)
    torch.manual_seed(stream)
