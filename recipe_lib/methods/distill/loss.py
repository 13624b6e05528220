"""The loss of distillation: the means that a step logs, and those of a validation.

The loss of a token is `ops.distillation.Distillation`, a head loss.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipe_lib.data import Batch
from recipe_lib.methods.distill.config import DistillConfig
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.losses import add_to_each, name_validation, sum_over_validation
from recipe_lib.training.training_data import TrainingData


def compute_distillation_means(
    sums: Tensor, num_label_tokens: int, keys: DistillConfig, world: World
) -> dict[str, Tensor]:
    """Return loss, divergence and cross-entropy, means over label tokens. A collective.

    sums: `[2]`, of this rank's tokens. num_label_tokens: of all ranks.
    """
    sums = world.all_reduce_sum(world.sum_over_sequence(sums))
    divergence, cross_entropy = sums / max(1, num_label_tokens)
    loss = keys.weight * divergence + (1 - keys.weight) * cross_entropy
    return {"loss": loss, "divergence": divergence, "cross_entropy": cross_entropy}


def validate_distillation(
    model: nn.Module,
    parallel: Parallel,
    add_sums: Callable[[Batch, Tensor], Tensor],
    data: TrainingData,
    keys: DistillConfig,
    world: World,
) -> dict[str, float]:
    """Return means over the label tokens of all validation sequences, each counted once; without
    dropout. Collective.

    add_sums: runs a micro-batch, and adds its divergence and its cross-entropy to a tensor `[2]`.
    """
    sums = torch.zeros(2, device=world.device, dtype=torch.float64)
    num_label_tokens, _ = sum_over_validation(
        model,
        parallel,
        data,
        compute_sums=add_to_each(parallel, add_sums, sums),
        sums=sums,
    )
    means = compute_distillation_means(
        sums, num_label_tokens=num_label_tokens, keys=keys, world=world
    )
    return name_validation(means) | {"validation_tokens": num_label_tokens}
