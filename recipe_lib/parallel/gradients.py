"""Gradients of parameters that several ranks have, summed once a step."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.parallel.ddp import sum_gradients_of_replicas
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World


def all_reduce_gradients(model: nn.Module, parallel: Parallel, world: World) -> None:
    """Sums the gradients of parameters that several ranks have over these, in place. A collective.

    Once a step, after the last backward and before clipping. Those are an embedding that is the output head of another
    stage of a pipeline; all of them where every data rank has the whole model; and what every rank of a tensor-parallel
    group has, such as norms. FSDP has summed the others in backward.
    """
    if parallel.accumulation is not None:
        parallel.accumulation.check()
    if parallel.pipeline is not None:
        parallel.pipeline.sum_tied_gradients()
    if parallel.replicas is not None:
        sum_gradients_of_replicas(model, parallel.replicas, world)
    if world.tensor is not None:
        _sum_partial_gradients(model, parallel, world)


@torch.no_grad()
def _sum_partial_gradients(model: nn.Module, parallel: Parallel, world: World) -> None:
    """Each rank of a tensor-parallel group has the gradient of its own tokens, or heads: summed in fp32 (fp64), all of
    one type and device at once. ValueError for a trained parameter that was added after `parallelize`."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in parallel.tensor_gradients:
            raise ValueError(f"{name} is trained and was added after parallelize(); add it before")
        if parallel.tensor_gradients[name] == "partial" and parameter.grad is not None:
            local = cast(DTensor, parameter.grad).to_local()
            buckets.setdefault((local.dtype, local.device), []).append(local)
    for (dtype, _), gradients in buckets.items():
        wide = torch.cat([gradient.reshape(-1).to(torch.promote_types(dtype, torch.float32)) for gradient in gradients])
        torch.distributed.all_reduce(wide, group=world.mesh.get_group("tensor"))
        for gradient, total in zip(gradients, wide.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))
