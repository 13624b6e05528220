"""Find the ranks of a run, and divide a model among them.

The names that recipes and other packages import from here: `start_world` gives the ranks,
`parallelize` divides a model, `materialize` allocates it.
"""

from recipe_lib.parallel.ddp import DTYPES
from recipe_lib.parallel.fsdp import Unit, materialize, resolve_wrapping, shard_model
from recipe_lib.parallel.parallelize import (
    Parallel,
    all_reduce_gradients,
    describe_units,
    parallelize,
    split_pipeline,
)
from recipe_lib.parallel.tensor import check_tensor, shard_tensors
from recipe_lib.parallel.world import World, derive_seed, make_world, meet_ranks, start_world

__all__ = [
    "DTYPES",
    "Parallel",
    "Unit",
    "World",
    "all_reduce_gradients",
    "check_tensor",
    "derive_seed",
    "describe_units",
    "make_world",
    "materialize",
    "meet_ranks",
    "parallelize",
    "resolve_wrapping",
    "shard_model",
    "shard_tensors",
    "split_pipeline",
    "start_world",
]
