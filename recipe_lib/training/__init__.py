"""Provide what a recipe calls around its model: data, optimizer, losses, loop, resume and export.

A recipe, a file with a model's setup and its training step, calls these as `training.NAME`. In
order, they are `resolve_model`, `TrainingData`, `build_optimizer`, `resume_run`, `TrainingLoop` and
`export_trained_model`; the file ends with `run_recipe`. A lever, in names here, is a config key
that trades memory for time or precision.
"""

from typing import TYPE_CHECKING, Any

from recipe_lib.errors import ConfigError

# Functions of the optimizer and `derive_seed` are exported from here as well, so that a recipe, and
# a user's copy of one, finds all that it calls under the one name `training`.
from recipe_lib.optim.optimizers import (
    OptimizerLevers,
    apply_optimizer_levers,
    build_optimizer,
    clip_grad_norm,
    set_learning_rate,
)
from recipe_lib.parallel.world import derive_seed
from recipe_lib.training.export_model import export_trained_adapter, export_trained_model
from recipe_lib.training.loop import Step, TrainingLoop, build_lr_schedule, resume_run
from recipe_lib.training.losses import (
    add_to_each,
    build_head_loss,
    compute_answer_logps,
    compute_validation_loss,
    evaluate_micro_batches,
    get_values,
    name_validation,
    sum_over_validation,
)
from recipe_lib.training.output import check_output
from recipe_lib.training.resolve_model import ResolvedModel, resolve_model, validate_parallelism
from recipe_lib.training.run import run_recipe
from recipe_lib.training.run_description import check_host_memory, list_derived_numbers
from recipe_lib.training.training_data import TrainingData

__all__ = [
    "OptimizerLevers",
    "ResolvedModel",
    "Step",
    "TrainingData",
    "TrainingLoop",
    "add_to_each",
    "apply_optimizer_levers",
    "build_head_loss",
    "build_lr_schedule",
    "build_optimizer",
    "check_host_memory",
    "check_output",
    "clip_grad_norm",
    "compute_answer_logps",
    "compute_validation_loss",
    "derive_seed",
    "evaluate_micro_batches",
    "export_trained_adapter",
    "export_trained_model",
    "get_values",
    "list_derived_numbers",
    "name_validation",
    "resolve_model",
    "resume_run",
    "run_recipe",
    "set_learning_rate",
    "sum_over_validation",
    "validate_parallelism",
]

_LOOP = (
    "a loop in train_step, `for micro_batch in self.parallel.micro_batches(batches)`, with"
    " `self.parallel.backward(loss)` in its body"
)
# Names that copies of earlier recipes call -> what to call in place of them, for the error's line.
_EARLIER_NAMES = {
    "sum_gradients": _LOOP,
    "backward_each": _LOOP,
    "derived_numbers": "training.list_derived_numbers",
    "result_of_each": "training.evaluate_micro_batches",
    "validation_loss": "training.compute_validation_loss",
}

if not TYPE_CHECKING:  # mypy would take any name of this module for an Any

    def __getattr__(name: str) -> Any:
        if name in _EARLIER_NAMES:
            # No AttributeError: the command shows a ConfigError as one line, without a traceback.
            # So `hasattr(training, name)` raises too, for these names alone.
            raise ConfigError(
                f"training.{name}: found a recipe that was copied from an earlier version, expected"
                f" {_EARLIER_NAMES[name]}; copy the recipe anew with `tune cp`, or change the call"
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
