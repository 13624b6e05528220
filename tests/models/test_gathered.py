"""Parameters that FSDP has cut within the parts of a tensor-parallel group are put together again,
with no warning.
"""

import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from recipe_lib.ops.dtensor_shards import gather_full, locate_local_part
from tests.distributed.ranks import run_ranks

PLACEMENTS = (Shard(0), Shard(1), Replicate())


@pytest.mark.slow
def test_parts_make_the_whole() -> None:
    """Rows that divide evenly and not, and ranks that have none of them; two copies, and two
    shards.
    """

    def check(mesh: DeviceMesh, weight: torch.Tensor, placement: Placement) -> list[bool]:
        part = weight
        if isinstance(placement, Shard):
            part = weight.chunk(2, dim=placement.dim)[mesh["tensor"].get_local_rank()].contiguous()
        module = nn.Module()
        module.weight = nn.Parameter(
            DTensor.from_local(part.clone(), mesh["tensor"], [placement], run_check=False)
        )
        fully_shard(module, mesh=mesh["copies", "data"])
        local, offset = locate_local_part(module.weight)
        own = weight[
            tuple(
                slice(first, first + size) for first, size in zip(offset, local.shape, strict=True)
            )
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            whole = gather_full(local.detach(), module.weight)
            of_rows = (
                gather_full(local.detach()[:, 0], module.weight, whole.shape[:1])
                if placement != Shard(1)
                else None
            )
        found = [torch.equal(local, own), torch.equal(whole, weight)]
        return found if of_rows is None else [*found, torch.equal(of_rows, weight[:, 0])]

    def check_all() -> list[bool]:
        weights = [torch.arange(rows * 4.0).view(rows, 4) for rows in (8, 10, 2)]
        found = []
        for dims in ((1, 2, 2), (2, 1, 2)):
            mesh = init_device_mesh("cpu", dims, mesh_dim_names=("copies", "data", "tensor"))
            for weight, placement in product(weights, PLACEMENTS):
                found += check(mesh, weight, placement)
        return found

    assert all(all(found) for found in run_ranks(check_all, 4))
