"""What happens in a training run around the model: data, loop, resume, stop signals and records."""

from recipe_lib.optim.optimizers import (
    OptimizerLevers,
    apply_optimizer_levers,
    build_optimizer,
    clip_grad_norm,
)
from recipe_lib.parallel.world import derive_seed
from recipe_lib.training.derived_numbers import derived_numbers
from recipe_lib.training.export_model import export_trained_adapter, export_trained_model
from recipe_lib.training.host_memory import check_host_memory
from recipe_lib.training.loop import Step, TrainingLoop, resume_run
from recipe_lib.training.micro_batches import (
    backward_each,
    build_head_loss,
    result_of_each,
    sum_gradients,
)
from recipe_lib.training.output import check_output
from recipe_lib.training.resolve_model import ResolvedModel, resolve_model, validate_parallelism
from recipe_lib.training.run import run_recipe
from recipe_lib.training.training_data import TrainingData
from recipe_lib.training.validation import validation_loss

__all__ = [
    "OptimizerLevers",
    "ResolvedModel",
    "Step",
    "TrainingData",
    "TrainingLoop",
    "apply_optimizer_levers",
    "backward_each",
    "build_head_loss",
    "build_optimizer",
    "check_host_memory",
    "check_output",
    "validate_parallelism",
    "clip_grad_norm",
    "derive_seed",
    "derived_numbers",
    "export_trained_adapter",
    "export_trained_model",
    "resolve_model",
    "result_of_each",
    "resume_run",
    "run_recipe",
    "sum_gradients",
    "validation_loss",
]
