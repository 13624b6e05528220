"""The ranks that share a model have the same batches: the check that they read the same."""

import hashlib
from typing import TYPE_CHECKING

from recipe_lib.data import StepBatches
from recipe_lib.errors import SetupError

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


def check_same_batches(batches: StepBatches, world: "World") -> None:
    """Compares the batches of a step over the ranks that have to have the same ones, by their hash. A collective.

    Those are the ranks of a tensor-parallel group, and of a pipeline: batches that differ would train silently on a
    mixture of them. Raises SetupError on every rank.
    """
    if world.size == world.data_ranks:
        return
    digest = hashlib.sha256()
    for batch in batches.micro_batches:
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.segments):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode() + tensor.cpu().numpy().tobytes())
    found: dict[int, set[str]] = {}
    for data_rank, text in world.gather_json([world.data_rank, digest.hexdigest()]):
        found.setdefault(data_rank, set()).add(text)
    differing = [data_rank for data_rank, texts in found.items() if len(texts) > 1]
    if differing:
        kinds = ["of a pipeline"] * (world.pipeline is not None) + ["that share matrices"] * (world.tensor is not None)
        raise SetupError(
            f"data: the {world.size // world.data_ranks} ranks {' and '.join(kinds)} that have data rank "
            f"{differing[0]} found different batches for the same step, expected the same; see that every machine "
            "has the same data, tokenizer and version"
        )
