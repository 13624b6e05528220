"""How many ranks each dimension of a run's mesh has. No torch: a wrong number is told before anything starts."""

import math

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import SetupError

# Outermost first: neighbors share matrices; the stages of a pipeline, which exchange the least, are furthest apart.
MESH_DIMS = ("pipeline", "data_replicate", "data_shard", "tensor")
DATA_DIMS = ("data_replicate", "data_shard")  # along these, ranks have different batches
MODEL_DIMS = tuple(name for name in MESH_DIMS if name not in DATA_DIMS)  # along these, the same one


def mesh_shape(parallel: ParallelConfig, size: int) -> dict[str, int]:
    """Ranks by MESH_DIMS, in their order, for `size` ranks; SetupError names the numbers when they do not fit."""
    sizes = {name: getattr(parallel, name) for name in MODEL_DIMS}
    inner = math.prod(sizes.values())
    if size % inner:
        several = [str(ranks) for ranks in sizes.values() if ranks > 1]
        product = f"{' x '.join(several)} = {inner}" if len(several) > 1 else str(inner)
        raise SetupError(
            f"{' x '.join(_dividing(parallel))}: found {product} for {size} rank{'s' if size > 1 else ''}, expected "
            f"a divisor of {size}; start a multiple of {inner} ranks (--nproc_per_node)"
        )
    sizes |= dict(zip(DATA_DIMS, _data_shape(parallel, size // inner, inner), strict=True))
    return {name: sizes[name] for name in MESH_DIMS}


def _dividing(parallel: ParallelConfig) -> list[str]:
    """The keys by which several ranks have the same batch."""
    return [f"parallel.{name}" for name in MODEL_DIMS if getattr(parallel, name) > 1]


def _data_shape(parallel: ParallelConfig, size: int, inner: int) -> tuple[int, int]:
    """(data_replicate, data_shard) for `size` different batches, of `inner` ranks each."""
    replicate, shard = parallel.data_replicate, parallel.data_shard
    if parallel.strategy == "ddp":
        return size, 1
    fitting = [str(number) for number in range(1, size + 1) if size % number == 0]
    possible = f"one of {', '.join(fitting)}" if size > 1 else "1"
    divided = f" (of {size * inner}, by {' and '.join(_dividing(parallel))})" if inner > 1 else ""
    ranks = f"{size} rank{'s' if size > 1 else ''}{divided}"
    if shard == -1:
        if size % replicate:
            raise SetupError(
                f"parallel.data_replicate: found {replicate} copies for {ranks}, expected a divisor of {size}; "
                f"use {possible}, or start a multiple of {replicate * inner} ranks (--nproc_per_node)"
            )
        return replicate, size // replicate
    if shard < 1:
        raise SetupError(f"parallel.data_shard: found {shard}, expected -1 or an integer >= 1")
    if replicate * shard != size:
        remedy = f"parallel.data_replicate to {possible} and parallel.data_shard=-1"
        if size % replicate == 0:
            remedy = f"parallel.data_shard={size // replicate} or -1"
        raise SetupError(
            f"parallel: found data_replicate {replicate} x data_shard {shard} = {replicate * shard} for {ranks}; "
            f"set {remedy}, or start {replicate * shard * inner} ranks (--nproc_per_node)"
        )
    return replicate, shard
