"""What is checked and said of preference optimization before a run: its samples, its reference."""

from torch import nn

from recipe_lib.adapters import is_adapter
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.methods.dpo.config import DpoConfig
from recipe_lib.optim.optimizers import count_local_bytes
from recipe_lib.training.training_data import TrainingData, check_pairs
from recipe_lib.units import format_bytes


def check_answers(data: TrainingData, cfg: DpoConfig) -> None:
    """Raise ConfigError unless the samples are what the loss takes."""
    if cfg.takes_single_answers:
        check_labels(data, cfg)
    else:
        check_pairs(data, "train with lora_finetune_distributed")


def check_labels(data: TrainingData, cfg: DpoConfig) -> None:
    """Raise ConfigError for training samples of one label alone, and for steps of one sample, which
    no other can be compared with.
    """
    values = data.dataset.values  # 1 for an answer that is wanted, else 0
    num_desirable = int((values > 0).sum())
    if num_desirable in (0, len(values)):
        label = "true" if num_desirable else "false"
        raise ConfigError(
            f"data.source: found {len(values)} answers, all with the label {label}, expected some"
            " that are wanted and some that are not; add the others, or train on the answers"
            " themselves with lora_finetune_distributed"
        )
    # With packing a step of one pack has several samples.
    if cfg.loss == "kto" and data.global_batch_size == 1 and len(data.plan.slots(0)[0]) == 1:
        raise ConfigError(
            "batch_size: found steps of one sample, expected two or more: dpo.loss=kto compares"
            " each prompt with the answer of another sample of the step; raise batch_size or"
            " gradient_accumulation_steps"
        )


def check_reference(cfg: DpoConfig, model: nn.Module, reference: nn.Module | None) -> None:
    """Raise SetupError if the model without its adapters is to be the reference, and more of it is
    trained than those.
    """
    if reference is not None or not cfg.needs_reference:
        return
    # Such as what a copied recipe adds, or unfreezes.
    moving = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_adapter(name)
    ]
    if moving:
        raise SetupError(
            f"{moving[0]}: is trained and part of no adapter, so that the reference, which is the"
            " model without its adapters, would change with it; freeze it, or set"
            " dpo.trainable=all or dpo.reference_free=true"
        )


def describe_reference(cfg: DpoConfig, reference: nn.Module | None) -> str:
    """Return a line for the log: what the policy is compared with. reference: a second model, if
    there is one.
    """
    if not cfg.needs_reference:
        key = "loss=simpo" if cfg.loss == "simpo" else "reference_free=true"
        return f"reference: none, dpo.{key}"
    if reference is None:
        return "reference: the model without its adapters"
    memory = format_bytes(count_local_bytes(reference.parameters()))
    return f"reference: a frozen copy, {memory} per rank"
