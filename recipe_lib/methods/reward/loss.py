"""Compute the losses of a score head, which is read at the last token of each sequence.

The recipe `reward_distributed` calls `compute_scores` and `compute_score_loss` for a micro-batch,
`compute_score_metrics` for the sums of a step, and `validate_scores`. An item is what the loss
counts: a pair of a chosen and a rejected answer, or a sequence with a class (`reward.loss`).
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

# Names of the sums of `compute_score_loss`, in their order, by loss.
PAIR_SUMS = ("loss", "reward_chosen", "reward_rejected", "accuracy")
CLASS_SUMS = ("loss", "accuracy")


def train_score_head(model: Decoder, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Make the score head trainable as a whole, in the dtype of the adapters.

    Call it on the meta model, after `add_adapters`, which has frozen all but the adapters. dtype:
    of the frozen weights.
    """
    assert model.score is not None
    model.score.to(build_adapter_settings(cfg, dtype).dtype).requires_grad_(True)


def compute_scores(model: Decoder, batch: Batch) -> Tensor:
    """Run the model and return the scores of a micro-batch's q sequences, fp64 `[q, n]`.

    n is 1 (a reward) or the number of classes.
    """
    return pick_sequence_scores(
        model(batch.tokens, batch.positions, batch.attention, labels=batch.labels), batch
    )


def pick_sequence_scores(scores: Tensor, batch: Batch) -> Tensor:
    """Return the scores of a micro-batch's q sequences, fp64 `[q, n]`.

    scores: of all tokens, `[b, s, n]`. A sequence's score is that at its last token, the only one
    that has a label. Raises ValueError for a batch without sequence ids.
    """
    if batch.sequence_ids is None:
        raise ValueError("this batch holds no sequences to score")
    num_sequences = batch.num_sequences
    # Tokens without a label have a sequence of their own, which is dropped.
    sequence_ids = torch.where(batch.labels == IGNORED, num_sequences, batch.sequence_ids).flatten()
    # One token of each sequence has a label: the sum over its tokens is that one's score.
    token_scores = scores.flatten(0, 1).double()
    sums = token_scores.new_zeros(num_sequences + 1, token_scores.shape[1])
    return sums.index_add(0, sequence_ids, token_scores)[:num_sequences]


def compute_score_loss(scores: Tensor, values: Tensor, cfg: RewardConfig) -> tuple[Tensor, Tensor]:
    """Return (loss, sums) of a micro-batch's items: pairs of answers, or sequences with a class.

    The loss is summed over items, fp64 `[]` with a graph; divide it by the items of the whole step:

        pairwise         -log sigmoid(r_w - r_l - m), Bradley-Terry, with r the scores of a chosen
                         and a rejected answer and m the pair's margin; plus c (r_w + r_l)^2 with
                         c = center_rewards_coefficient (arXiv 2312.09244)
        classification   -log softmax(scores)[class]

    The sums are over the same items, without a graph, in the order of `list_summed_metrics`.

    scores: `[2 p, 1]` of p pairs, chosen and rejected in turn; or `[q, n]` of q sequences. values:
    margins `[p]` of pairs, or indices of classes `[q]`.
    """
    if cfg.loss == "classification":
        classes = values.long()
        loss = F.cross_entropy(scores, classes, reduction="sum")
        num_correct = (scores.argmax(dim=1) == classes).double().sum()
        return loss, torch.stack([loss.detach(), num_correct])
    # A batch numbers the chosen and the rejected answers in turn.
    chosen = scores[0::2, 0]
    rejected = scores[1::2, 0]
    loss = -F.logsigmoid(chosen - rejected - values).sum()
    if cfg.center_rewards_coefficient is not None:
        loss = loss + cfg.center_rewards_coefficient * (chosen + rejected).square().sum()
    num_correct = (chosen > rejected).double().sum()
    sums = [loss.detach(), chosen.detach().sum(), rejected.detach().sum(), num_correct]
    return loss, torch.stack(sums)


def list_summed_metrics(cfg: RewardConfig) -> tuple[str, ...]:
    """Return the names of the sums of `compute_score_loss`, in their order."""
    return PAIR_SUMS if cfg.loss == "pairwise" else CLASS_SUMS


def compute_score_metrics(sums: Tensor, num_items: int, cfg: RewardConfig) -> dict[str, Tensor]:
    """Return the metrics of a step by name, each the mean over its items, as tensors `[]`.

    sums: those of `compute_score_loss`, added up over all ranks. num_items: of all ranks.
    """
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
    """Return the metrics of all validation items by name: means, and the number of items.

    Each item counts once; without dropout. A collective. add_sums: runs a micro-batch, and adds the
    sums of `compute_score_loss` to the tensor that it is given.
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
    count_name = "validation_pairs" if cfg.loss == "pairwise" else "validation_sequences"
    return name_validation(metrics) | {count_name: num_items}
