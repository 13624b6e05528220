"""Works of collectives in a simulation."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipe_lib.plan.simulated_world.simulated_ranks import apply_patches, follow_works


def test_process_groups_are_as_they_were_afterwards() -> None:
    """pybind's methods bind to their group only as they are in the class, not as the class gives
    them.
    """
    tracer: Any = SimpleNamespace(checker=None, trace=SimpleNamespace(ops=[]))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with apply_patches(follow_works(tracer)):
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    finally:
        dist.destroy_process_group()
