"""Compute the losses of preference optimization, KTO's estimate of the KL divergence, validation.

The recipe `dpo_distributed` calls `compute_preference_loss` with the answers' log-probabilities of
a micro-batch, `estimate_kl` before it for KTO, `compute_step_metrics` for the sums of a step, and
`validate_preference`. In formulas p is the policy, q the reference; an answer's log-probability
(logp) is the sum over its trained tokens, or for ipo and simpo the mean.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.data import Batch
from recipe_lib.methods.dpo.config import DpoConfig
from recipe_lib.parallel import Parallel, World
from recipe_lib.training import TrainingData, get_values, name_validation, sum_over_validation

# Yields for each micro-batch, as it is asked for, the log-probabilities of its answers,
# `[number of answers]`; None if another rank of the pipeline has them, or there is no reference.
ComputeLogps = Callable[[Sequence[Batch]], Iterator[Any]]

# Names of the sums that the losses return beside the loss, in their order.
PAIR_SUMS = ("loss", "reward_chosen", "reward_rejected", "reward_accuracy")
SINGLE_ANSWER_SUMS = ("loss", "reward_chosen", "reward_rejected", "num_chosen", "num_rejected")


def compute_preference_loss(
    policy_logps: Tensor,
    reference_logps: Tensor | None,
    batch: Batch,
    kl: Tensor | None,
    cfg: DpoConfig,
) -> tuple[Tensor, Tensor]:
    """Return (loss, sums) of a micro-batch's items: pairs of answers, or single answers.

    The loss is summed over items, a scalar with a graph; divide it by the items of the whole step.
    The sums have no graph; `compute_step_metrics` reads them.

    policy_logps, reference_logps: of each answer, `[number of answers]`; a reference of None finds
    all answers equally likely. kl: KTO's estimate, see `estimate_kl`; None: 0.
    """
    if cfg.takes_single_answers:
        return compute_single_answer_loss(
            policy_logps=policy_logps,
            reference_logps=reference_logps,
            labels=get_values(batch),
            kl=kl,
            cfg=cfg,
        )
    return compute_pair_loss(policy_logps, reference_logps, cfg)


def compute_pair_loss(
    policy_logps: Tensor, reference_logps: Tensor | None, cfg: DpoConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over p pairs, a scalar with a graph, and PAIR_SUMS without one `[4]`.

    The reward of an answer is r = beta (log p - log q). policy_logps, reference_logps: `[2 p]`,
    chosen and rejected in turn, from `training.compute_answer_logps`; a reference of None finds
    both answers equally likely. Divide the loss by the pairs of the whole step.
    """
    # Without a reference, q is the same for all answers: log q drops out of the differences.
    log_ratios = policy_logps if reference_logps is None else policy_logps - reference_logps
    rewards = cfg.beta * log_ratios
    # A batch numbers the chosen and the rejected answers in turn.
    chosen = rewards[0::2]
    rejected = rewards[1::2]
    loss = _compute_pair_losses(chosen - rejected, cfg).sum()
    num_correct = (chosen > rejected).to(loss.dtype).sum()
    sums = [loss.detach(), chosen.detach().sum(), rejected.detach().sum(), num_correct]
    return loss, torch.stack(sums)


def _compute_pair_losses(margins: Tensor, cfg: DpoConfig) -> Tensor:
    """Return the loss of each pair, `[p]`, with m its margin.

        sigmoid  -log sigmoid(m)                  DPO, arXiv 2305.18290; with e = label_smoothing
                 -(1 - e) log sigmoid(m) - e log sigmoid(-m)    conservative DPO
        ipo      (m / beta - 1 / (2 beta))^2      arXiv 2310.12036
        simpo    -log sigmoid(m - simpo_gamma)    arXiv 2405.14734, without a reference

    margins: the chosen answer's reward minus the rejected one's, `[p]`.
    """
    if cfg.loss == "ipo":  # of log-ratios, without beta
        return (margins / cfg.beta - 1 / (2 * cfg.beta)).square()
    if cfg.loss == "simpo":
        return -F.logsigmoid(margins - cfg.simpo_gamma)
    smoothing = cfg.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


def compute_single_answer_loss(
    policy_logps: Tensor,
    reference_logps: Tensor | None,
    labels: Tensor,
    kl: Tensor | None,
    cfg: DpoConfig,
) -> tuple[Tensor, Tensor]:
    """Return (loss, sums) of n answers: the loss summed over them, and SINGLE_ANSWER_SUMS `[5]`.

    The loss is a scalar with a graph, the sums have none. Divide the loss by the answers of the
    whole step. With s = 1 for a desirable answer and -1 for an undesirable one, and w its weight:

        kto                w (1 - sigmoid(s beta (log p - log q - kl)))    arXiv 2402.01306
        apo_zero_unpaired  the same with kl = 0                            arXiv 2408.06266

    policy_logps, reference_logps: `[n]`; a reference of None finds all answers equally likely.
    labels: `[n]`, 1: desirable, 0: undesirable. kl: of `estimate_kl`, `[]`; None: 0.
    """
    log_ratios = policy_logps if reference_logps is None else policy_logps - reference_logps
    is_desirable = labels > 0
    margins = cfg.beta * (log_ratios if kl is None else log_ratios - kl)
    # 1 - sigmoid(x) = sigmoid(-x)
    losses = F.sigmoid(torch.where(is_desirable, -margins, margins))
    # Sums and counts of both kinds: a micro-batch, or a rank, may have none of one.
    desirable = is_desirable.to(losses.dtype)
    undesirable = 1 - desirable
    rewards = cfg.beta * log_ratios.detach()  # for the log
    weights = cfg.desirable_weight * desirable + cfg.undesirable_weight * undesirable
    loss = (weights * losses).sum()
    sums = [
        loss.detach(),
        (desirable * rewards).sum(),
        (undesirable * rewards).sum(),
        desirable.sum(),
        undesirable.sum(),
    ]
    return loss, torch.stack(sums)


def count_sums(cfg: DpoConfig) -> int:
    """Return the number of sums that `compute_preference_loss` returns."""
    return len(SINGLE_ANSWER_SUMS if cfg.takes_single_answers else PAIR_SUMS)


def compute_step_metrics(
    sums: Tensor, num_items: int, kl: Tensor | None, cfg: DpoConfig
) -> dict[str, Tensor]:
    """Return the metrics of a step by name: the mean loss, the mean rewards and their difference.

    For pairs also the share of pairs whose chosen answer has the larger reward, for KTO also `kl`.
    The mean reward is 0 if there are no answers of its kind. sums: those of
    `compute_preference_loss`, added up over all ranks. num_items: pairs or answers, of all ranks.
    kl: of `estimate_kl`; None: the loss has none.
    """
    if cfg.takes_single_answers:
        # Each reward is divided by the number of its answers, of which a step may have none.
        metrics = {
            "loss": sums[0] / max(1, num_items),
            "reward_chosen": sums[1] / sums[3].clamp(min=1),
            "reward_rejected": sums[2] / sums[4].clamp(min=1),
        }
    else:
        metrics = dict(zip(PAIR_SUMS, sums / max(1, num_items), strict=True))
    metrics["reward_margin"] = metrics["reward_chosen"] - metrics["reward_rejected"]
    if kl is not None:
        metrics["kl"] = kl
    return metrics


@torch.no_grad()
def estimate_kl(
    policy_logps: Iterable[Tensor | None],
    reference_logps: Iterable[Tensor | None],
    num_items: int,
    world: World,
) -> Tensor:
    """Return KTO's estimate of KL(policy || reference), fp64 `[]` on the device. A collective.

    It is the mean of log p - log q over all samples of the step, each prompt with the answer of the
    sample before it (of the first, the last one's), and 0 at the least. No gradient goes through
    it.

    policy_logps, reference_logps: of each mismatched micro-batch of this rank, in which a prompt is
    followed by another sample's answer. None: another rank of the pipeline has it, or there is no
    reference. num_items: number of answers of all ranks.
    """
    # One number for all micro-batches of all ranks, made before the first of them: a step does not
    # depend on how it is divided.
    total = sum_log_ratios(policy_logps, reference_logps, world)
    return average_log_ratios(total, num_items, world)


def sum_log_ratios(
    policy_logps: Iterable[Tensor | None],
    reference_logps: Iterable[Tensor | None],
    world: World,
) -> Tensor:
    """Return the sum of log p - log q over this rank's mismatched answers, fp64 `[]`."""
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    for policy, reference in zip(policy_logps, reference_logps, strict=True):
        if policy is not None:  # another rank of the pipeline has it
            total += (policy if reference is None else policy - reference).sum()
    return total


def average_log_ratios(total: Tensor, num_items: int, world: World) -> Tensor:
    """Return the mean over all ranks' answers of a rank's sum, and 0 at the least. A collective."""
    return (world.all_reduce_sum(total) / max(1, num_items)).clamp(min=0)


def validate_preference(
    model: nn.Module,
    parallel: Parallel,
    compute_policy_logps: ComputeLogps,
    compute_reference_logps: ComputeLogps,
    cfg: DpoConfig,
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Return the metrics of all validation pairs or answers by name: means, and their number.

    Each counts once; the models run without dropout. A collective.
    """
    kl = None
    if cfg.loss == "kto":  # over all samples: a pass before the one that takes the losses
        log_ratios = torch.zeros((), device=world.device, dtype=torch.float64)

        def add_log_ratios(mismatched: Sequence[Batch]) -> list[Tensor]:
            policy_logps = compute_policy_logps(mismatched)
            # One sum for all of them: `sum_over_validation` takes any number.
            return [sum_log_ratios(policy_logps, compute_reference_logps(mismatched), world)]

        _, num_items = sum_over_validation(
            model,
            parallel,
            data,
            compute_sums=add_log_ratios,
            sums=log_ratios,
            take=attrgetter("mismatched"),
        )
        kl = average_log_ratios(log_ratios, num_items, world)

    def compute_sums(micro_batches: Sequence[Batch]) -> Iterator[Tensor | None]:
        reference_logps = compute_reference_logps(micro_batches)
        policy_logps = compute_policy_logps(micro_batches)
        for batch, policy in zip(micro_batches, policy_logps, strict=True):
            if policy is not None:  # another rank of the pipeline has it
                # Nothing keeps the loss or the sums while the next micro-batch runs.
                yield compute_preference_loss(
                    policy_logps=policy,
                    reference_logps=next(reference_logps),
                    batch=batch,
                    kl=kl,
                    cfg=cfg,
                )[1]

    sums = torch.zeros(count_sums(cfg), device=world.device, dtype=torch.float64)
    _, num_items = sum_over_validation(model, parallel, data, compute_sums=compute_sums, sums=sums)
    metrics = compute_step_metrics(
        sums=world.all_reduce_sum(sums), num_items=num_items, kl=kl, cfg=cfg
    )
    count_name = "validation_samples" if cfg.takes_single_answers else "validation_pairs"
    return name_validation(metrics) | {count_name: num_items}
