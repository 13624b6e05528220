"""The ranks of a run and how a model is divided among them."""

from recipe_lib.parallel.fsdp import DTYPES, materialize, shard_model
from recipe_lib.parallel.fsdp_wrap_policy import Unit, describe_units, resolve_wrapping
from recipe_lib.parallel.pipeline.stages import split_pipeline
from recipe_lib.parallel.tensor import shard_tensors, sum_replicated_gradients
from recipe_lib.parallel.tensor_sizes import check_tensor
from recipe_lib.parallel.world import World, start_world

__all__ = [
    "DTYPES",
    "Unit",
    "World",
    "check_tensor",
    "describe_units",
    "materialize",
    "resolve_wrapping",
    "shard_model",
    "shard_tensors",
    "split_pipeline",
    "start_world",
    "sum_replicated_gradients",
]
