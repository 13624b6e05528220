"""Resumable states of a run: model, optimizer and place in the data, saved and gone on from."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from recipe_lib.checkpoint.state import find_state, load_state, save_state
from recipe_lib.config.output_folder import STATE_FOLDER
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.logs import get_logger
from recipe_lib.training.data import TrainingData
from recipe_lib.training.optimizers import set_numbers
from recipe_lib.training.output import check_same_data

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


def resume_run(
    cfg: FullFinetuneConfig, model: nn.Module, optimizer: Optimizer, data: TrainingData, world: "World"
) -> int:
    """Loads the state that `resume` asks for into model and optimizer; returns its step, 0 without one. Collective.

    Raises CheckpointError if there is none whole, or if it is of another model, other data or another seed.
    """
    root = Path(cfg.output_dir) / STATE_FOLDER
    found = find_state(root, cfg.resume, world) if cfg.resume else None
    if found is None:
        return 0
    saved = load_state(found, model, optimizer, world)
    set_numbers(optimizer, cfg.optimizer)  # a changed config is what the run goes on with
    check_same_data(saved, data.identity(), found)
    get_logger().info("resume: %s, %d of %d steps done", found, saved["step"], data.total_steps)
    return saved["step"]


def save_run(
    cfg: FullFinetuneConfig, step: int, model: nn.Module, optimizer: Optimizer, data: TrainingData, world: "World"
) -> Path:
    """Saves output_dir/state/step_N: what is trained, the optimizer, and where in the data we are. Collective."""
    extra = {"step": step, **data.identity()}
    return save_state(Path(cfg.output_dir) / STATE_FOLDER, step, model, optimizer, extra, world, cfg.checkpoint.keep)
