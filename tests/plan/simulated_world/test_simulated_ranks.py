"""What a simulated rank does with operators on lists of DTensors, against what a real rank does."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

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


def multiply_by_a_partial_factor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(6.0).view(2, 3)
    shard = distribute_tensor(values, mesh, [Shard(0)])
    factor = DTensor.from_local(torch.tensor(2.0), mesh, [Partial()])
    # A run reduces the factor over both ranks: a plan has to have that collective.
    assert unwrap_shards(MULTIPLY, ([shard], factor), {}) is None
    assert unwrap_shards(MULTIPLY, ([shard],), {"other": factor}) is None
    with CommDebugMode() as counter:
        MULTIPLY([shard], factor)
    assert counter.get_total_counts() == 1
    assert torch.equal(shard.full_tensor(), values * 4)


def test_only_lists_decide_whether_shards_are_unwrapped() -> None:
    run_ranks(multiply_lists, 2)


def test_shards_beside_a_tensor_that_is_not_replicated_stay_wrapped() -> None:
    run_ranks(multiply_by_a_partial_factor, 2)
