"""What happens in a training run around the model: optimizer, schedule, clipping, seeds, stop signals and records."""

from recipe_lib.training.clipping import clip_grad_norm
from recipe_lib.training.losses import build_loss
from recipe_lib.training.metrics import step_metrics
from recipe_lib.training.numbers import derived_numbers, total_steps
from recipe_lib.training.optimizers import build_optimizer, set_learning_rate, set_numbers
from recipe_lib.training.output import check_output, check_same_data
from recipe_lib.training.run_log import RunLog
from recipe_lib.training.schedules import learning_rate
from recipe_lib.training.seeds import derive_seed, set_seeds
from recipe_lib.training.stop import StopSignal

__all__ = [
    "RunLog",
    "StopSignal",
    "build_loss",
    "build_optimizer",
    "check_output",
    "check_same_data",
    "clip_grad_norm",
    "derive_seed",
    "derived_numbers",
    "learning_rate",
    "set_learning_rate",
    "set_numbers",
    "set_seeds",
    "step_metrics",
    "total_steps",
]
