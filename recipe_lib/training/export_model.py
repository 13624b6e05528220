"""What a run leaves for others: the trained model, or an adapter and perhaps the model with it merged in."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from recipe_lib.checkpoint.adapter_out import export_adapter, file_rank
from recipe_lib.checkpoint.huggingface import export_model
from recipe_lib.checkpoint.merged import merge_adapter
from recipe_lib.checkpoint.model_card import public_name
from recipe_lib.checkpoint.weight_accounts import tell_left_out
from recipe_lib.config.local_files import ADAPTER_FOLDER, MODEL_FOLDER
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import trained_template
from recipe_lib.logs import get_logger
from recipe_lib.memory.qat import describe_export
from recipe_lib.models.meta_init import extra_tensors
from recipe_lib.parallel import DTYPES
from recipe_lib.training.added_parameters import warn_of_export
from recipe_lib.training.card import run_card
from recipe_lib.training.next_commands import (
    ANYWHERE,
    adapter_commands,
    merge_command,
    model_commands,
    own_recipe,
    run_commands,
    tell_next,
)
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
    usable = _can_generate(cfg, model)
    export_model(
        model,
        source.spec,
        source.config,
        folder,
        tokenizer_folder=data.tokenizer_path,
        max_shard_bytes=_shard_bytes(cfg),
        world=world,
        **_trained_with(cfg, data),
        save_extra=cfg.checkpoint.extra_parameters == "save",
        card=_card(cfg, source, data, world, model_commands(ANYWHERE) if usable else [], is_adapter=False),
    )
    warn_of_export(model, world, folder)
    get_logger().info("model: %s", folder)
    if source.folder is not None and world.is_main:
        tell_left_out(source.spec, source.folder, "export")
    _tell_rounding(cfg, is_adapter=False)
    if usable:
        tell_next([*model_commands(folder), *run_commands(cfg)])


def export_trained_adapter(
    cfg: LoraFinetuneConfig, model: nn.Module, source: ResolvedModel, data: TrainingData, world: "World"
) -> None:
    """Writes output_dir/adapter as PEFT does; with lora.merge_on_save also output_dir/model, merged. Collective.

    The model is merged from the checkpoint's files: weights of a random start (model.preset) are in none.
    """
    folder = Path(cfg.output_dir) / ADAPTER_FOLDER
    beside, usable = _trained_with(cfg, data), source.folder is not None and _can_generate(cfg, model)
    shown = public_name(source.name, source.folder)

    def commands(adapter: Path, base: str) -> list[str]:
        rank, has_template = file_rank(source.spec, cfg.lora), beside["chat_template"] is not None
        return adapter_commands(adapter, base, cfg.lora, rank=rank, template=has_template)

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
        **beside,
        save_extra=cfg.checkpoint.extra_parameters == "save",
        card=_card(cfg, source, data, world, commands(ANYWHERE, shown) if usable else [], is_adapter=True),
    )
    warn_of_export(model, world, folder)
    get_logger().info("adapter: %s", folder)
    merged = Path(cfg.output_dir) / MODEL_FOLDER
    if cfg.lora.merge_on_save and source.folder is not None:
        merge_adapter(
            source.folder,
            folder,
            merged,
            quantize=cfg.lora.quantize_base,
            implementation=cfg.model.implementation,
            dtype=DTYPES[cfg.dtype],
            ranks=world,
            tokenizer_folder=data.tokenizer_path,
            **beside,
            max_shard_bytes=_shard_bytes(cfg),
            card=_card(cfg, source, data, world, model_commands(ANYWHERE) if usable else [], is_adapter=False),
        )
        get_logger().info("model: %s", merged)
    _tell_rounding(cfg, is_adapter=not cfg.lora.merge_on_save or source.folder is None)
    if usable:
        merge = [merge_command(Path(cfg.output_dir), recipe=own_recipe(cfg))]
        stays = merged.exists() and not cfg.overwrite_output_dir  # of a run that is gone on with
        then = model_commands(merged) if cfg.lora.merge_on_save else [] if stays else merge
        tell_next([*commands(folder, source.name), *then, *run_commands(cfg)])


def _tell_rounding(cfg: FullFinetuneConfig, *, is_adapter: bool) -> None:
    if cfg.qat is not None:
        get_logger().info("%s", describe_export(cfg.qat, cfg.qat_group_size, is_adapter=is_adapter))


def _trained_with(cfg: FullFinetuneConfig, data: TrainingData) -> dict[str, Any]:
    """What the tokenizer's own files may not say: the template of the samples, and what ends an answer."""
    template = trained_template(cfg, data.tokenizer, data.dataset.report.chats)
    return {"chat_template": template, "stop_ids": data.tokenizer.stop_ids}


def _card(
    cfg: FullFinetuneConfig,
    source: ResolvedModel,
    data: TrainingData,
    world: "World",
    commands: list[str],
    *,
    is_adapter: bool,
) -> str | None:
    """On rank 0, which has the records of the run and writes the export."""
    if not world.is_main:
        return None
    return run_card(
        cfg,
        source.folder,
        commands,
        is_adapter=is_adapter,
        run=Path(cfg.output_dir),
        step=data.best.exported_step,
        exported=data.best.sentence(data.total_steps),
    )


def _can_generate(cfg: FullFinetuneConfig, model: nn.Module) -> bool:
    """Whether `tune generate` loads what was written: no model of a plugin, none with parameters of a recipe, and none
    with a score head."""
    if cfg.scores_sequences:
        return False
    return cfg.model.implementation in ("native", "transformers") and not extra_tensors(model, saved=True)


def _shard_bytes(cfg: FullFinetuneConfig) -> int:
    return int(cfg.checkpoint.max_shard_gib * GIB)
