"""Validation of preference optimization: the metrics of a step, over all validation samples."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.data import Batch
from recipe_lib.methods.dpo.config import DpoConfig
from recipe_lib.methods.dpo.kl import average_log_ratios, sum_log_ratios
from recipe_lib.methods.dpo.loss import compute_preference_loss, compute_step_metrics, count_sums
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.training_data import TrainingData
from recipe_lib.training.validation import name_validation, sum_over_validation

# From micro-batches to the log-probabilities of the answers of each, when they are asked for; None
# where another rank of the pipeline has them, or there is no reference.
ComputeLogps = Callable[[Sequence[Batch]], Iterator[Any]]


def validate_preference(
    model: nn.Module,
    parallel: Parallel,
    compute_policy_logps: ComputeLogps,
    compute_reference_logps: ComputeLogps,
    cfg: DpoConfig,
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Return means over all validation pairs, or single answers, each counted once; without
    dropout. Collective.
    """
    kl = None
    if cfg.loss == "kto":  # over all samples: a pass before the one that takes the losses
        log_ratios = torch.zeros((), device=world.device, dtype=torch.float64)

        def add_log_ratios(mismatched: Sequence[Batch]) -> list[Tensor]:
            policy_logps = compute_policy_logps(mismatched)
            return [sum_log_ratios(policy_logps, compute_reference_logps(mismatched), world)]

        _, num_items = sum_over_validation(
            model, parallel, data, add_log_ratios, log_ratios, take=attrgetter("mismatched")
        )
        kl = average_log_ratios(log_ratios, num_items, world)

    def compute_sums(micro_batches: Sequence[Batch]) -> Iterator[Tensor | None]:
        reference_logps = compute_reference_logps(micro_batches)
        policy_logps = compute_policy_logps(micro_batches)
        for batch, policy in zip(micro_batches, policy_logps, strict=True):
            if policy is not None:  # another rank of the pipeline has it
                yield compute_preference_loss(policy, next(reference_logps), batch, kl, cfg)[1]

    sums = torch.zeros(count_sums(cfg), device=world.device, dtype=torch.float64)
    _, num_items = sum_over_validation(model, parallel, data, compute_sums, sums)
    metrics = compute_step_metrics(world.all_reduce_sum(sums), num_items, kl, cfg)
    counted = "validation_samples" if cfg.takes_single_answers else "validation_pairs"
    return name_validation(metrics) | {counted: num_items}
