"""Validation of reward models and classifiers: the metrics of a step, over all validation items."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipe_lib.data import Batch
from recipe_lib.methods.reward.config import RewardConfig
from recipe_lib.methods.reward.loss import compute_score_metrics, list_summed_metrics
from recipe_lib.models.decoder import Decoder
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.training_data import TrainingData
from recipe_lib.training.validation import add_to_each, name_validation, sum_over_validation


def validate_scores(
    model: Decoder,
    parallel: Parallel,
    add_sums: Callable[[Batch, Tensor], Any],
    cfg: RewardConfig,
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Return means over all validation items, each counted once; without dropout. Collective.

    add_sums: runs a micro-batch, and adds what `list_summed_metrics` names to a tensor.
    """
    sums = torch.zeros(len(list_summed_metrics(cfg)), device=world.device, dtype=torch.float64)
    _, num_items = sum_over_validation(
        model, parallel, data, add_to_each(parallel, add_sums, sums), sums
    )
    metrics = compute_score_metrics(world.all_reduce_sum(sums), num_items, cfg)
    counted = "validation_pairs" if cfg.loss == "pairwise" else "validation_sequences"
    return name_validation(metrics) | {counted: num_items}
