"""Seeds: reproducible, apart from each other, independent of each other's existence."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from recipe_lib.parallel.world import derive_seed, set_seeds


def test_a_seed_is_the_same_on_every_machine_and_python() -> None:
    # SHA-256 of "42", "dropout" and "3" with a zero byte between them: its first eight bytes
    # without the lowest bit
    assert derive_seed(42, "dropout", 3) == 7402298581961890487


def test_streams_differ_by_root_name_and_place_of_the_separator() -> None:
    given = (
        (1,),
        (2,),
        (1, "a"),
        (1, "b"),
        (1, "a", "b"),
        (1, "ab"),
        (1, "b", "a"),
        (1, 1),
        (11,),
        (1, "a", 0),
    )
    seeds = [derive_seed(*parts) for parts in given]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_set_seeds_repeats_for_a_rank_and_differs_between_ranks() -> None:
    def draws(rank: int, alike: bool = False, stage: int | None = None) -> tuple[float, float]:
        pipeline = None if stage is None else SimpleNamespace(rank=stage)
        # Two ranks share matrices.
        world: Any = SimpleNamespace(rank=rank, data_rank=rank // 2, pipeline=pipeline)
        set_seeds(42, world, alike=alike)
        return random.random(), float(torch.rand(()))

    first, second = draws(0), draws(1)
    assert draws(0) == first
    assert first[0] != second[0] and first[1] != second[1]
    assert draws(0, alike=True) == draws(1, alike=True) != draws(2, alike=True)
    # The layers of two stages drop other elements, with ranks that share matrices alike.
    first_stage, second_stage = (draws(0, alike=True, stage=stage) for stage in (0, 1))
    assert first_stage != second_stage and first_stage == draws(1, alike=True, stage=0)
    assert draws(0, stage=1) == first
