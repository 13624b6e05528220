"""What a simulated rank does with operators on lists of DTensors, against what a real rank does."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from recipe_lib.plan.simulated_world.simulated_ranks import unwrap_shards
from tests.distributed.ranks import run_ranks

MULTIPLY = torch.ops.aten._foreach_mul_.Tensor


def multiply_lists() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(6.0).view(2, 3)
    factor = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    shard = distribute_tensor(values, mesh, [Shard(0)])
    # A list of shards beside a replicated factor is multiplied part by part.
    unwrapped = unwrap_shards(MULTIPLY, ([shard], factor), {})
    assert unwrapped is not None
    MULTIPLY(*unwrapped[0])
    assert not any(isinstance(value, DTensor) for value in (unwrapped[0][0][0], unwrapped[0][1]))
    assert torch.equal(shard.full_tensor(), values * 2)
    # A plain list beside a DTensor is an error in a run, and has to be one in a plan.
    assert unwrap_shards(MULTIPLY, ([values], factor), {}) is None
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        MULTIPLY([values], factor)


def test_only_lists_decide_whether_shards_are_unwrapped() -> None:
    run_ranks(multiply_lists, 2)
