"""Losses of a score head, which is read at the last token of each sequence: of pairs of answers,
and over classes; and validation.

    pairwise         -log sigmoid(r_w - r_l - m), Bradley-Terry, with r the scores of a chosen and a
                     rejected answer and m the pair's margin; plus c (r_w + r_l)^2 (arXiv
                     2312.09244)
    classification   -log softmax(scores)[class]
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.adapters.lora import build_adapter_settings
from recipe_lib.config.schema import LoraConfig
from recipe_lib.data import Batch
from recipe_lib.methods.reward.config import RewardConfig
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.parallel import Parallel, World
from recipe_lib.training import TrainingData, add_to_each, name_validation, sum_over_validation

PAIR_SUMS = ("loss", "reward_chosen", "reward_rejected", "accuracy")
CLASS_SUMS = ("loss", "accuracy")


def train_score_head(model: Decoder, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Train the head whole next to adapters, in their type; call it on the meta model, after
    `add_adapters`.
    """
    assert model.score is not None
    model.score.to(build_adapter_settings(cfg, dtype).dtype).requires_grad_(True)


def compute_scores(model: Decoder, batch: Batch) -> Tensor:
    """Return the scores `[q, n]` in fp64 of a micro-batch's q sequences, by calling the model."""
    return pick_sequence_scores(
        model(batch.tokens, batch.positions, batch.attention, labels=batch.labels), batch
    )


def pick_sequence_scores(scores: Tensor, batch: Batch) -> Tensor:
    """Return the scores `[q, n]` in fp64 of a micro-batch's q sequences, out of those of its tokens
    `[b, s, n]`: each at the token that has its label, the last one.
    """
    if batch.sequence_ids is None:
        raise ValueError("this batch holds no sequences to score")
    num_sequences = batch.num_sequences
    # Tokens without a label have a sequence of their own, which is dropped.
    sequence_ids = torch.where(batch.labels == IGNORED, num_sequences, batch.sequence_ids).flatten()
    # One token of each sequence has a label: the sum over its tokens is that one's score.
    wide = scores.flatten(0, 1).double()
    sums = wide.new_zeros(num_sequences + 1, wide.shape[1])
    return sums.index_add(0, sequence_ids, wide)[:num_sequences]


def compute_score_loss(scores: Tensor, values: Tensor, cfg: RewardConfig) -> tuple[Tensor, Tensor]:
    """Return the loss summed over items, a scalar with a graph, and without one the sums that
    `list_summed_metrics` names.

    scores: `[2 p, 1]`, chosen and rejected by turns, and values `[p]`, the margins; or `[q, n]`,
    and classes `[q]`. The loss is to be divided by the items of the whole step.
    """
    if cfg.loss == "classification":
        classes = values.long()
        loss = F.cross_entropy(scores, classes, reduction="sum")
        num_right = (scores.argmax(dim=1) == classes).double().sum()
        return loss, torch.stack([loss.detach(), num_right])
    # By turns, as a batch numbers its sequences.
    chosen = scores[0::2, 0]
    rejected = scores[1::2, 0]
    loss = -F.logsigmoid(chosen - rejected - values).sum()
    if cfg.center_rewards_coefficient is not None:
        loss = loss + cfg.center_rewards_coefficient * (chosen + rejected).square().sum()
    num_right = (chosen > rejected).double().sum()
    sums = [loss.detach(), chosen.detach().sum(), rejected.detach().sum(), num_right]
    return loss, torch.stack(sums)


def list_summed_metrics(cfg: RewardConfig) -> tuple[str, ...]:
    """Return the names of what `compute_score_loss` sums up."""
    return PAIR_SUMS if cfg.loss == "pairwise" else CLASS_SUMS


def compute_score_metrics(sums: Tensor, num_items: int, cfg: RewardConfig) -> dict[str, Tensor]:
    """Return the mean `loss` of a step, and what it records besides. sums: over all ranks."""
    metrics = dict(zip(list_summed_metrics(cfg), sums / max(1, num_items), strict=True))
    if cfg.loss == "pairwise":
        metrics["reward_margin"] = metrics["reward_chosen"] - metrics["reward_rejected"]
    return metrics


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
        model,
        parallel,
        data,
        compute_sums=add_to_each(parallel, add_sums, sums),
        sums=sums,
    )
    metrics = compute_score_metrics(world.all_reduce_sum(sums), num_items, cfg)
    counted = "validation_pairs" if cfg.loss == "pairwise" else "validation_sequences"
    return name_validation(metrics) | {counted: num_items}
