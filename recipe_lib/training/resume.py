"""Resumable states of a run: model, optimizer and place in the data, saved and gone on from."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from recipe_lib.checkpoint.manifest import read_manifest
from recipe_lib.checkpoint.state import find_state, load_state, save_state
from recipe_lib.checkpoint.state_folders import BEST_RECORD
from recipe_lib.config.local_files import STATE_FOLDER
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import get_logger
from recipe_lib.optim.in_backward import OptimizerLevers
from recipe_lib.optim.optimizers import set_numbers
from recipe_lib.training.output import check_same_data
from recipe_lib.training.training_data import TrainingData

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


def resume_run(
    cfg: FullFinetuneConfig,
    model: nn.Module,
    optimizer: Optimizer,
    levers: OptimizerLevers,
    data: TrainingData,
    world: "World",
) -> int:
    """Loads the state that `resume` asks for into model and optimizer; returns its step, 0 without one. Collective.

    Raises CheckpointError if there is none whole, if it is of another model, other data or another seed, or of a later
    step than this run's last.
    """
    root = Path(cfg.output_dir) / STATE_FOLDER
    found = find_state(root, cfg.resume, world) if cfg.resume else None
    if found is None:
        return 0
    check_steps_left(read_manifest(found).step, data.total_steps, found)
    saved = load_state(found, model, optimizer, world, levers.place_state)
    set_numbers(optimizer, cfg.optimizer)  # a changed config is what the run goes on with
    check_same_data(saved, data.identity(), found)
    data.best.restore(saved, found, world)
    get_logger().info("resume: %s, %d of %d steps done", found, saved["step"], data.total_steps)
    if saved["step"] == data.total_steps and data.best.folder is not None:
        get_logger().info("resume: no step is left to train; the best step is exported")
    elif saved["step"] == data.total_steps:
        get_logger().info("resume: no step is left to train; the model of that state is exported as it is")
    return saved["step"]


def check_steps_left(saved: int, total: int, path: Path) -> None:
    """CheckpointError if the state at `path` is of a later step than the run has.

    A run that is as long as what is done trains nothing and exports; a shorter one would pass the later weights off
    as those of its own last step.
    """
    if saved > total:
        raise CheckpointError(
            f"{path}: was saved after step {saved}, found a run of {total} steps (epochs, max_steps); set max_steps to "
            f"{saved} or more, or resume from an earlier state"
        )


def save_run(
    cfg: FullFinetuneConfig, step: int, model: nn.Module, optimizer: Optimizer, data: TrainingData, world: "World"
) -> Path:
    """Saves output_dir/state/step_N: what is trained, the optimizer, and where in the data we are. Collective."""
    extra = {"step": step, **data.identity(), BEST_RECORD: data.best.record()}
    path = save_state(
        Path(cfg.output_dir) / STATE_FOLDER, step, model, optimizer, extra, world, cfg.checkpoint.keep_last_n
    )
    data.best.remove_others(world)
    return path
