"""KTO's estimate of the KL divergence of the policy from the reference.

It is one number for all micro-batches of all ranks, made before the first of them, so that a step
does not depend on how it is divided.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from recipe_lib.parallel.world import World


@torch.no_grad()
def estimate_kl(
    policy_logps: Iterable[Tensor | None],
    reference_logps: Iterable[Tensor | None],
    num_items: int,
    world: World,
) -> Tensor:
    """Return KTO's estimate of KL(policy || reference), a scalar fp64 on the device. A collective.

    policy_logps, reference_logps: of each mismatched micro-batch of this rank. num_items: of all
    ranks.
    """
    total = sum_log_ratios(policy_logps, reference_logps, world)
    return average_log_ratios(total, num_items, world)


def sum_log_ratios(
    policy_logps: Iterable[Tensor | None],
    reference_logps: Iterable[Tensor | None],
    world: World,
) -> Tensor:
    """Return the sum of log p - log q over this rank's mismatched answers."""
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    for policy, reference in zip(policy_logps, reference_logps, strict=True):
        if policy is not None:  # another rank of the pipeline has it
            total += (policy if reference is None else policy - reference).sum()
    return total


def average_log_ratios(total: Tensor, num_items: int, world: World) -> Tensor:
    """Return the estimate from the sums of all ranks, not below 0. A collective."""
    return (world.all_reduce_sum(total) / max(1, num_items)).clamp(min=0)
