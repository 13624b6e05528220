"""Read samples from files, tokenize them by chat templates with label masks, and make batches."""

from recipe_lib.data.batches import (
    Batch,
    StepBatches,
    check_packing_isolation,
    make_step,
    make_training_steps,
    make_validation_steps,
)
from recipe_lib.data.chat_templates import find_trained_template
from recipe_lib.data.data_plan import DataPlan, Packs, pack
from recipe_lib.data.dataset import (
    Dataset,
    TokenSequence,
    adapt_to_recipe,
    check_vocabulary,
    warn_of_overlap,
    warn_of_positions,
)
from recipe_lib.data.dataset_report import format_report_lines
from recipe_lib.data.find_format import settle_formats
from recipe_lib.data.label_masks import render_prompt, why_no_system_message
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
    "adapt_to_recipe",
    "build_dataset",
    "build_datasets",
    "build_validation_dataset",
    "check_packing_isolation",
    "check_vocabulary",
    "make_step",
    "pack",
    "render_prompt",
    "format_report_lines",
    "settle_formats",
    "make_training_steps",
    "why_no_system_message",
    "find_trained_template",
    "make_validation_steps",
    "warn_of_overlap",
    "warn_of_positions",
]
