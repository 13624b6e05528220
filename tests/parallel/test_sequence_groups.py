"""The ranks that share sequences: where they are in the mesh, which groups they make, what counts
once of theirs.
"""

import itertools
from typing import Any

import pytest
import torch

from recipe_lib.config.mesh import add_context_dim, compute_mesh_shape, split_context_coordinate
from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.parallel.world import start_world
from tests.distributed.ranks import run_ranks

SHARING = [
    ({"context": 2}, 4, {"data_shard": 2, "context": 2}),
    (
        {"context": 2, "data_replicate": 2, "tensor": 2},
        8,
        {"data_replicate": 2, "context": 2, "tensor": 2},
    ),
    ({"context": 2, "strategy": "ddp"}, 4, {"data_replicate": 2, "context": 2}),
    ({"context": 2, "pipeline": 2}, 8, {"pipeline": 2, "data_shard": 2, "context": 2}),
    ({"context": 4}, 4, {"context": 4}),
]


@pytest.mark.parametrize(("parallel", "size", "several"), SHARING)
def test_ranks_that_share_sequences_are_neighbors_with_a_batch_of_their_own(
    parallel: dict[str, Any], size: int, several: dict[str, int]
) -> None:
    """Each rank's place by counting through all of them, the last dimension first."""
    cfg = ParallelConfig(**parallel)
    mesh = compute_mesh_shape(cfg, size)
    shape = add_context_dim(cfg, mesh)
    assert {name: ranks for name, ranks in shape.items() if ranks > 1} == several
    places = [
        dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))
    ]
    found = [split_context_coordinate(cfg, place) for place in places]
    assert found == [
        dict(zip(shape, at, strict=True)) for at in itertools.product(*map(range, shape.values()))
    ]


def sequences_of(parallel: dict[str, Any]) -> tuple[int, int, int, list[int]]:
    """This rank's data rank of how many, its place in its group, and the group's ranks, of which
    each adds its own.
    """
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**parallel))
    with start_world(cfg) as world:
        assert world.context is not None
        own = torch.zeros(world.size)
        own[world.rank] = 1
        world.sum_over_sequence(own)
        once = world.all_reduce_sum(torch.tensor(float(10**world.data_rank)))
        assert once == sum(
            10.0**number for number in range(world.data_ranks)
        )  # each batch counts once
        return (
            world.data_rank,
            world.data_ranks,
            world.context.rank,
            own.nonzero().flatten().tolist(),
        )


def test_groups_that_share_sequences() -> None:
    assert run_ranks(sequences_of, 4, {"context": 2}) == [
        (0, 2, 0, [0, 1]), (0, 2, 1, [0, 1]), (1, 2, 0, [2, 3]), (1, 2, 1, [2, 3]),
    ]  # fmt: skip
    assert run_ranks(sequences_of, 4, {"context": 2, "tensor": 2}) == [
        (0, 1, 0, [0, 2]), (0, 1, 0, [1, 3]), (0, 1, 1, [0, 2]), (0, 1, 1, [1, 3]),
    ]  # fmt: skip
