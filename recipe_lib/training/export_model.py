"""What a run leaves for others: the trained model, or an adapter and perhaps the model with it merged in."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from recipe_lib.checkpoint.adapter_out import export_adapter
from recipe_lib.checkpoint.huggingface import export_model
from recipe_lib.checkpoint.merged import merge_adapter
from recipe_lib.config.local_files import ADAPTER_FOLDER, MODEL_FOLDER
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.logs import get_logger
from recipe_lib.parallel import DTYPES
from recipe_lib.training.added_parameters import warn_of_export
from recipe_lib.training.resolve_model import ResolvedModel
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import GIB

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


def export_trained_model(
    cfg: FullFinetuneConfig, model: nn.Module, source: ResolvedModel, data: TrainingData, world: "World"
) -> None:
    """Writes output_dir/model, a Hugging Face folder with the tokenizer it was trained with. Collective."""
    folder = Path(cfg.output_dir) / MODEL_FOLDER
    export_model(
        model,
        source.spec,
        source.config,
        folder,
        tokenizer_folder=data.tokenizer_path,
        max_shard_bytes=_shard_bytes(cfg),
        world=world,
        chat_template=data.chat_template,
        stop_ids=data.tokenizer.stop_ids,
        save_extra=cfg.checkpoint.extra_parameters == "save",
    )
    warn_of_export(model, world, folder)
    get_logger().info("model: %s", folder)


def export_trained_adapter(
    cfg: LoraFinetuneConfig, model: nn.Module, source: ResolvedModel, data: TrainingData, world: "World"
) -> None:
    """Writes output_dir/adapter as PEFT does; with lora.merge_on_save also output_dir/model, merged. Collective.

    The model is merged from the checkpoint's files: weights of a random start (model.preset) are in none.
    """
    folder = Path(cfg.output_dir) / ADAPTER_FOLDER
    export_adapter(
        model,
        source.spec,
        cfg.lora,
        folder,
        base=source.name,
        world=world,
        base_folder=source.folder,
        source_config=source.config,
        tokenizer_folder=data.tokenizer_path,
        chat_template=data.chat_template,
        stop_ids=data.tokenizer.stop_ids,
        save_extra=cfg.checkpoint.extra_parameters == "save",
    )
    warn_of_export(model, world, folder)
    get_logger().info("adapter: %s", folder)
    if cfg.lora.merge_on_save and source.folder is not None:
        merged = Path(cfg.output_dir) / MODEL_FOLDER
        merge_adapter(
            source.folder,
            folder,
            merged,
            quantize=cfg.lora.quantize_base,
            dtype=DTYPES[cfg.dtype],
            ranks=world,
            tokenizer_folder=data.tokenizer_path,
            chat_template=data.chat_template,
            stop_ids=data.tokenizer.stop_ids,
            max_shard_bytes=_shard_bytes(cfg),
        )
        get_logger().info("model: %s", merged)


def _shard_bytes(cfg: FullFinetuneConfig) -> int:
    return int(cfg.checkpoint.max_shard_gib * GIB)
