"""Check the samples and the reference model of preference optimization before its first step.

The recipe `dpo_distributed` calls `check_answers` when its samples are open, `check_reference` when
its models are built, and writes the line of `describe_reference` to the log.
"""

from torch import nn

from recipe_lib.adapters import is_adapter
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.methods.dpo.config import DpoConfig
from recipe_lib.optim.optimizers import count_local_bytes
from recipe_lib.training.training_data import TrainingData, check_pairs
from recipe_lib.units import format_bytes


def check_answers(data: TrainingData, cfg: DpoConfig) -> None:
    """Raise ConfigError unless the loss can train on these samples: pairs, or labeled answers.

    For labeled answers see `check_labels`.
    """
    if cfg.takes_single_answers:
        check_labels(data, cfg)
    else:
        check_pairs(data, "train with lora_finetune_distributed")


def check_labels(data: TrainingData, cfg: DpoConfig) -> None:
    """Raise ConfigError if all training answers have the same label.

    For `dpo.loss=kto` also if a step has one sample only: KTO's estimate of the KL divergence takes
    each prompt with the answer of another sample of the step.
    """
    labels = data.dataset.values  # `[number of answers]`, 1: desirable, 0: undesirable
    num_desirable = int((labels > 0).sum())
    if num_desirable in (0, len(labels)):
        label = "true" if num_desirable else "false"
        raise ConfigError(
            f"data.source: found {len(labels)} answers, all with the label {label}, expected some"
            " that are wanted and some that are not; add the others, or train on the answers"
            " themselves with lora_finetune_distributed"
        )
    # With packing a batch of one may be a pack of several samples, so that step 0's are counted.
    first_slot = data.plan.list_slots(step=0)[0]  # indices of the samples in it
    if cfg.loss == "kto" and data.global_batch_size == 1 and len(first_slot) == 1:
        raise ConfigError(
            "batch_size: found steps of one sample, expected two or more: dpo.loss=kto compares"
            " each prompt with the answer of another sample of the step; raise batch_size or"
            " gradient_accumulation_steps"
        )


def check_reference(cfg: DpoConfig, model: nn.Module, reference: nn.Module | None) -> None:
    """Raise SetupError if the reference would change in training.

    reference: a frozen second model; None: the reference is `model` without its adapters. Then no
    other parameter may be trained.
    """
    if reference is not None or not cfg.needs_reference:
        return
    # A copied recipe may have added or unfrozen parameters.
    trained_base_names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_adapter(name)
    ]
    if trained_base_names:
        raise SetupError(
            f"{trained_base_names[0]}: is trained and part of no adapter, so that the reference,"
            " which is the model without its adapters, would change with it; freeze it, or set"
            " dpo.trainable=all or dpo.reference_free=true"
        )


def describe_reference(cfg: DpoConfig, reference: nn.Module | None) -> str:
    """Return a line for the log that says which reference the policy is compared with.

    reference: a frozen second model; None: there is none.
    """
    if not cfg.needs_reference:
        key = "loss=simpo" if cfg.loss == "simpo" else "reference_free=true"
        return f"reference: none, dpo.{key}"
    if reference is None:
        return "reference: the model without its adapters"
    memory = format_bytes(count_local_bytes(reference.parameters()))
    return f"reference: a frozen copy, {memory} per rank"
