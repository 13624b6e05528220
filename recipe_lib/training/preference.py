"""Losses over pairs of answers, one chosen and one rejected, from the log-probabilities of their
tokens.

With w and l for the chosen and the rejected answer, p the model and q the reference:

    reward r = beta * (log p - log q)                        of a whole answer: the sum over its trained tokens
    sigmoid    -log sigmoid(r_w - r_l)                       DPO, arXiv 2305.18290; with label_smoothing e (cDPO):
               -(1 - e) log sigmoid(r_w - r_l) - e log sigmoid(r_l - r_w)
    ipo        ((r_w - r_l) / beta - 1 / (2 beta))^2         arXiv 2310.12036; with means over tokens in place of sums
    simpo      -log sigmoid(r_w - r_l - gamma)               arXiv 2405.14734; with means, and q = 1

Sums are made in fp64: an answer's log-probability is in the hundreds, and what counts are
differences of such.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters import is_adapter
from recipe_lib.config.recipes.dpo_distributed import DpoConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.optim.optimizers import count_local_bytes
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.micro_batches import result_of_each
from recipe_lib.training.scores import check_pairs, values_of
from recipe_lib.training.training_data import TrainingData
from recipe_lib.training.validation import name_validation, sum_over_validation
from recipe_lib.units import format_bytes

_MEANS = ("ipo", "simpo")  # losses of the mean over an answer's tokens
NUMBERS = ("loss", "reward_chosen", "reward_rejected", "reward_accuracy")
SUMS = ("loss", "reward_chosen", "reward_rejected", "chosen", "rejected")  # of single answers
References = Callable[[Sequence[Batch]], Iterator[Any]]


def answer_log_probs(log_probs: Tensor, batch: Batch, cfg: DpoConfig) -> Tensor:
    """Log-probability of each answer of a micro-batch, fp64: of pairs `[2 p]`, chosen and rejected
    by turns.

    log_probs: `[b, s]` of the tokens, 0 where there is no label. The sum over an answer; for ipo
    and simpo the mean.
    """
    if batch.sequence_ids is None:
        raise ValueError("this batch holds no pairs")
    answers = batch.num_sequences
    places = torch.where(
        batch.sequence_ids < 0, answers, batch.sequence_ids
    ).flatten()  # padding has one of its own

    def by_answer(values: Tensor) -> Tensor:
        return values.new_zeros(answers + 1).index_add(0, places, values.flatten())[:answers]

    sums = by_answer(log_probs.double())
    return (
        sums / by_answer((batch.labels != IGNORED).double()).clamp(min=1)
        if cfg.loss in _MEANS
        else sums
    )


def preference_loss(
    policy: Tensor, reference: Tensor | None, cfg: DpoConfig
) -> tuple[Tensor, Tensor]:
    """The loss summed over p pairs, a scalar with a graph, and the sums of NUMBERS without one
    `[4]`.

    policy, reference: `[2 p]`, from `answer_log_probs`; no reference: it finds both answers equally
    likely. To be divided by the pairs of the whole step.
    """
    rewards = cfg.beta * (policy if reference is None else policy - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    loss = _pair_losses(chosen - rejected, cfg).sum()
    right = (chosen > rejected).to(loss.dtype).sum()
    return loss, torch.stack([loss.detach(), chosen.detach().sum(), rejected.detach().sum(), right])


def _pair_losses(margin: Tensor, cfg: DpoConfig) -> Tensor:
    """margin: the chosen answer's reward minus the rejected one's `[p]`."""
    if cfg.loss == "ipo":
        return (margin / cfg.beta - 1 / (2 * cfg.beta)).square()
    if cfg.loss == "simpo":
        return -F.logsigmoid(margin - cfg.simpo_gamma)
    wrong = cfg.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


def loss_of_answers(
    policy: Tensor, reference: Tensor | None, batch: Batch, point: Tensor | None, cfg: DpoConfig
) -> tuple[Tensor, Tensor]:
    """The loss summed over the items of a micro-batch, and what `step_numbers` reads: of pairs, or
    of single answers, as the loss takes them. point: KTO's point of reference.
    """
    if not cfg.takes_single_answers:
        return preference_loss(policy, reference, cfg)
    return unpaired_loss(policy, reference, values_of(batch), point, cfg)


def count_of_numbers(cfg: DpoConfig) -> int:
    """How many numbers `loss_of_answers` gives."""
    return len(SUMS if cfg.takes_single_answers else NUMBERS)


def step_numbers(
    sums: Tensor, items: int, point: Tensor | None, cfg: DpoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a step, and what it records besides: mean rewards, their difference,
    and how often it is above 0; of single answers (0 where there are none of a kind) the estimate
    of the KL divergence.

    sums: of the numbers, over all ranks.
    """
    if cfg.takes_single_answers:
        chosen, rejected = sums[1] / sums[3].clamp(min=1), sums[2] / sums[4].clamp(min=1)
        named = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
        }
        return sums[0] / max(1, items), named if point is None else named | {"kl": point}
    means = sums / items
    named = dict(zip(NUMBERS[1:], means[1:], strict=True))
    return means[0], named | {"reward_margin": named["reward_chosen"] - named["reward_rejected"]}


def describe_reference(cfg: DpoConfig, reference: nn.Module | None) -> str:
    """One line for the log: what the model is compared with. reference: a second model, if there is
    one.
    """
    if not cfg.needs_reference:
        return (
            f"reference: none, dpo.{'loss=simpo' if cfg.loss == 'simpo' else 'reference_free=true'}"
        )
    if reference is None:
        return "reference: the model without its adapters"
    return f"reference: a frozen copy, {format_bytes(count_local_bytes(reference.parameters()))} per rank"


def check_reference(cfg: DpoConfig, model: nn.Module, reference: nn.Module | None) -> None:
    """SetupError if the model without its adapters is to be the reference, and more of it is
    trained than those.
    """
    if reference is not None or not cfg.needs_reference:
        return
    moving = [
        name
        for name, value in model.named_parameters()
        if value.requires_grad and not is_adapter(name)
    ]
    if moving:
        raise SetupError(
            f"{moving[0]}: is trained and part of no adapter, so that the reference, which is the"
            " model without its adapters, would change with it; freeze it, or set"
            " dpo.trainable=all or dpo.reference_free=true"
        )


def check_answers(data: TrainingData, cfg: DpoConfig) -> None:
    """ConfigError unless the samples are what the loss takes."""
    if cfg.takes_single_answers:
        check_labels(data, cfg)
    else:
        check_pairs(data, "train with lora_finetune_distributed")


def validation_preference(
    model: nn.Module,
    parallel: Parallel,
    answers: Callable[[Batch], Tensor],
    references_of: References,
    cfg: DpoConfig,
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Return means over all validation pairs, or single answers, each counted once; without
    dropout. Collective.

    answers: the model's log-probabilities of a micro-batch. references_of: the reference's of each.
    """
    point = None
    if cfg.loss == "kto":  # over all samples: a pass before the one that takes the losses
        total = torch.zeros((), device=world.device, dtype=torch.float64)

        def sum_mismatched(mismatched: Sequence[Batch]) -> list[Tensor]:
            return [_sum_ratios(parallel, answers, references_of, mismatched, world)]

        _, items = sum_over_validation(
            model, parallel, data, sum_mismatched, total, batches_of=attrgetter("mismatched")
        )
        point = _estimate_kl(total, items, world)

    def compare(micro_batches: Sequence[Batch]) -> Iterator[Any]:
        references = references_of(micro_batches)

        def numbers_of(batch: Batch) -> Tensor:
            return loss_of_answers(answers(batch), next(references), batch, point, cfg)[1]

        return result_of_each(parallel, numbers_of, micro_batches)

    sums = torch.zeros(count_of_numbers(cfg), device=world.device, dtype=torch.float64)
    _, items = sum_over_validation(model, parallel, data, compare, sums)
    loss, numbers = step_numbers(world.all_reduce_sum(sums), max(1, items), point, cfg)
    counted = "validation_samples" if cfg.takes_single_answers else "validation_pairs"
    return name_validation({"loss": loss} | numbers) | {counted: items}


# Losses of single answers that are wanted or not, from the log-probabilities of their tokens (KTO,
# arXiv 2402.01306).
#
# With p the model, q the reference, reward r = beta * (log p - log q) of a whole answer, and s = 1
# for an answer that is wanted, -1 for one that is not:
#
# kto w * (1 - sigmoid(s * (r - beta * z))) w: desirable_weight or undesirable_weight
# apo_zero_unpaired the same with z = 0 arXiv 2408.06266
#
# z, the point of reference, is an estimate of the KL divergence of p from q: the mean of log p -
# log q over all samples of the step, each prompt with the answer of the sample before it (of the
# first, the last one's), and 0 at the least. No gradient goes through it. It is one number for all
# micro-batches of all ranks, made before the first of them, so that a step does not depend on how
# it is divided.


def unpaired_loss(
    policy: Tensor, reference: Tensor | None, wanted: Tensor, point: Tensor | None, cfg: DpoConfig
) -> tuple[Tensor, Tensor]:
    """The loss summed over n answers, a scalar with a graph, and SUMS without one `[5]`.

    policy, reference: log-probabilities `[n]`; no reference: all answers are equally likely.
    wanted: `[n]`, 1 or 0. point: the point of reference, a scalar; None: 0. To be divided by the
    answers of the whole step.
    """
    ratios = policy if reference is None else policy - reference
    is_wanted = wanted > 0
    distance = cfg.beta * (ratios if point is None else ratios - point)
    losses = F.sigmoid(torch.where(is_wanted, -distance, distance))  # 1 - sigmoid(x) = sigmoid(-x)
    wanted, rewards = is_wanted.to(losses.dtype), cfg.beta * ratios.detach()
    loss = ((cfg.desirable_weight * wanted + cfg.undesirable_weight * (1 - wanted)) * losses).sum()
    each = [
        loss.detach(),
        (wanted * rewards).sum(),
        ((1 - wanted) * rewards).sum(),
        wanted.sum(),
        (1 - wanted).sum(),
    ]
    return loss, torch.stack(each)


@torch.no_grad()
def reference_point(
    parallel: Parallel,
    answers: Callable[[Batch], Tensor],
    references_of: References,
    batches: StepBatches,
    world: World,
) -> Tensor | None:
    """KTO's point of reference, a scalar fp64 on the device, from a step's mismatched answers; None
    for a loss that asks for none. Collective.

    answers: the model's log-probabilities of a micro-batch. references_of: the reference's of each.
    """
    if not batches.mismatched:
        return None
    total = _sum_ratios(parallel, answers, references_of, batches.mismatched, world)
    return _estimate_kl(total, batches.num_items, world)


def _sum_ratios(
    parallel: Parallel,
    answers: Callable[[Batch], Tensor],
    references_of: References,
    mismatched: Sequence[Batch],
    world: World,
) -> Tensor:
    """The sum of log p - log q over this rank's mismatched answers."""
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    found = result_of_each(parallel, answers, mismatched)
    for policy, reference in zip(found, references_of(mismatched), strict=True):
        if policy is not None:  # another rank of the pipeline has it
            total += (policy if reference is None else policy - reference).sum()
    return total


def _estimate_kl(total: Tensor, items: int, world: World) -> Tensor:
    return (world.all_reduce_sum(total) / max(1, items)).clamp(min=0)


def check_labels(data: TrainingData, cfg: DpoConfig) -> None:
    """ConfigError for training samples of one label alone, and for steps of one sample, which no
    other can be compared with.
    """
    values = data.dataset.values
    wanted = int((values > 0).sum())
    if wanted in (0, len(values)):
        what = "true" if wanted else "false"
        raise ConfigError(
            f"data.source: found {len(values)} answers, all with the label {what}, expected some"
            " that are wanted and some that are not; add the others, or train on the answers"
            " themselves with lora_finetune_distributed"
        )
    if cfg.loss == "kto" and data.global_batch_size == 1 and len(data.plan.slots(0)[0]) == 1:
        raise ConfigError(
            "batch_size: found steps of one sample, expected two or more: dpo.loss=kto compares"
            " each prompt with the answer of another sample of the step; raise batch_size or"
            " gradient_accumulation_steps"
        )
