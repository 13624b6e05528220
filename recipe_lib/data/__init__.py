"""Datasets: samples out of files, chat templates and label masks, the order of samples, batches."""

from recipe_lib.data.batches import (
    Batch,
    StepBatches,
    check_packing_isolation,
    make_step,
    step_batches,
    validation_steps,
)
from recipe_lib.data.chat_templates import trained_template
from recipe_lib.data.data_plan import DataPlan, Packs, pack
from recipe_lib.data.dataset import (
    Dataset,
    TokenSequence,
    as_trained,
    check_vocabulary,
    warn_of_overlap,
    warn_of_positions,
)
from recipe_lib.data.dataset_report import report_lines
from recipe_lib.data.find_format import settle_formats
from recipe_lib.data.label_masks import render_prompt, system_fault
from recipe_lib.data.tokenize_dataset import (
    PreparedData,
    build_dataset,
    build_datasets,
    build_validation_dataset,
)

__all__ = [
    "PreparedData",
    "Batch",
    "DataPlan",
    "Dataset",
    "Packs",
    "TokenSequence",
    "StepBatches",
    "as_trained",
    "build_dataset",
    "build_datasets",
    "build_validation_dataset",
    "check_packing_isolation",
    "check_vocabulary",
    "make_step",
    "pack",
    "render_prompt",
    "report_lines",
    "settle_formats",
    "step_batches",
    "system_fault",
    "trained_template",
    "validation_steps",
    "warn_of_overlap",
    "warn_of_positions",
]
