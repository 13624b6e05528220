"""Datasets: rows out of files, chat templates and label masks, the order of rows, batches."""

from recipe_lib.data.batches import Batch, StepBatches, make_step, validation_steps
from recipe_lib.data.checks import check_vocabulary, warn_of_positions
from recipe_lib.data.dataset import Dataset, Row, build_dataset, build_validation_dataset
from recipe_lib.data.order import global_rows, steps_per_epoch
from recipe_lib.data.templates import render_prompt

__all__ = [
    "Batch",
    "Dataset",
    "Row",
    "StepBatches",
    "build_dataset",
    "build_validation_dataset",
    "check_vocabulary",
    "global_rows",
    "make_step",
    "render_prompt",
    "steps_per_epoch",
    "validation_steps",
    "warn_of_positions",
]
