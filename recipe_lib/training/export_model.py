"""What a run leaves for others: the trained model, or an adapter and perhaps the model with it
merged in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.huggingface import export_model
from recipe_lib.checkpoint.peft_folders import compute_file_rank, export_adapter
from recipe_lib.checkpoint.side_files import get_public_name, make_model_card
from recipe_lib.checkpoint.tensor_matching import log_left_out
from recipe_lib.config.local_files import ADAPTER_FOLDER, MODEL_FOLDER, resolve_base_name
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.data import find_trained_template
from recipe_lib.logs import get_logger
from recipe_lib.memory.qat import describe_export
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.parallel import DTYPES
from recipe_lib.parallel.world import World
from recipe_lib.training.added_parameters import warn_of_export
from recipe_lib.training.metrics import METRICS_FILE, read_metrics
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


def export_trained_model(
    cfg: FullFinetuneConfig,
    model: nn.Module,
    source: ResolvedModel,
    data: TrainingData,
    world: World,
) -> None:
    """Write output_dir/model, a Hugging Face folder with the tokenizer it was trained with.
    Collective.
    """
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
        card=_card(
            cfg, source, data, world, model_commands(ANYWHERE) if usable else [], is_adapter=False
        ),
    )
    warn_of_export(model, world, folder)
    get_logger().info("model: %s", folder)
    if source.folder is not None and world.is_main:
        log_left_out(source.spec, source.folder, "export")
    _tell_rounding(cfg, is_adapter=False)
    if usable:
        tell_next([*model_commands(folder), *run_commands(cfg)])


def export_trained_adapter(
    cfg: LoraFinetuneConfig,
    model: nn.Module,
    source: ResolvedModel,
    data: TrainingData,
    world: World,
) -> None:
    """Write output_dir/adapter as PEFT does; with lora.merge_on_save also output_dir/model, merged.
    Collective.

    The model is merged from the checkpoint's files: weights of a random start (model.preset) are in
    none.
    """
    folder = Path(cfg.output_dir) / ADAPTER_FOLDER
    beside, usable = (
        _trained_with(cfg, data),
        source.folder is not None and _can_generate(cfg, model),
    )
    shown = get_public_name(source.name, source.folder)

    def commands(adapter: Path, base: str) -> list[str]:
        rank, has_template = (
            compute_file_rank(source.spec, cfg.lora),
            beside["chat_template"] is not None,
        )
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
        card=_card(
            cfg, source, data, world, commands(ANYWHERE, shown) if usable else [], is_adapter=True
        ),
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
            card=_card(
                cfg,
                source,
                data,
                world,
                model_commands(ANYWHERE) if usable else [],
                is_adapter=False,
            ),
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
    """Return what the tokenizer's own files may not say: the template of the samples, and what ends
    an answer.
    """
    template = find_trained_template(cfg, data.tokenizer, data.dataset.report.chats)
    return {"chat_template": template, "stop_ids": data.tokenizer.stop_ids}


def _card(
    cfg: FullFinetuneConfig,
    source: ResolvedModel,
    data: TrainingData,
    world: World,
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
    """Return True if `tune generate` loads what was written: no model of a plugin, none with
    parameters of a recipe, and none with a score head.
    """
    if cfg.scores_sequences:
        return False
    return cfg.model.implementation in ("native", "transformers") and not find_extra_tensors(
        model, saved=True
    )


def _shard_bytes(cfg: FullFinetuneConfig) -> int:
    return int(cfg.checkpoint.max_shard_gib * GIB)


# The card of a run's export: its config, how it was trained, and the results that metrics.jsonl has
# of it.


def run_card(
    cfg: FullFinetuneConfig,
    base_folder: Path | None,
    commands: list[str],
    *,
    is_adapter: bool,
    run: Path,
    step: int | None = None,
    exported: str | None = None,
) -> str:
    """Return the text. commands: what to do with the export. run: the folder with the run's
    metrics. step: the last one of what is exported; None: the run's. exported: why it is that one,
    where a best step was looked for.
    """
    path = run / METRICS_FILE
    lines = [
        line
        for line in (read_metrics(path) if path.is_file() else [])
        if step is None or line["step"] <= step
    ]
    return make_model_card(
        cfg,
        base=(
            resolve_base_name(cfg.model.path, base_folder)
            if cfg.model.path and base_folder
            else cfg.model.preset or ""
        ),
        base_folder=base_folder,
        lora=cfg.trained_adapters,
        is_adapter=is_adapter,
        commands=commands,
        plan=plan_of(cfg, lines),
        results=({"exported": exported} if exported else {}) | results_of(lines),
    )


def plan_of(cfg: FullFinetuneConfig, lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return how it was trained, in words. lines: of metrics.jsonl."""
    steps = [line for line in lines if "loss" in line]
    many = cfg.gradient_accumulation_steps
    found = {
        "batch": (
            f"batch_size {cfg.batch_size} x gradient_accumulation_steps {many} on each data rank"
        )
    }
    found["sequences"] = f"up to {cfg.max_seq_len:,} tokens" + (
        ", packed" if cfg.data.packing else ""
    )
    found["optimizer"] = (
        f"{cfg.optimizer.name}, learning rate {cfg.optimizer.lr:g}, then {cfg.lr_scheduler.type}"
    )
    found["weights"] = cfg.dtype
    if cfg.qat is not None:
        scales = f"{cfg.qat_group_size} weights" if cfg.qat == "int4" else "each row"
        found["rounding"] = (
            f"linears trained in {cfg.qat}, a scale for {scales}; saved are the weights before"
            " rounding"
        )
    last: Mapping[str, Any] = steps[-1] if steps else {}
    if last.get("tokens_per_second_per_device"):
        found["devices"] = (
            f"{round(last['tokens_per_second'] / last['tokens_per_second_per_device'])}"
        )
    if last.get("epoch"):
        found["passes over the data"] = f"{last['epoch']:.3g}"
    return found


_KNOWN = ("validation_loss", "validation_tokens")


def results_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return what the run has come to, in words; empty without its metrics. lines: of
    metrics.jsonl.
    """
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return {}
    losses = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    # Of devices only: the resident memory of a CPU process differs from run to run and tells
    # another machine nothing.
    peaks = [
        line["peak_memory_reserved_gib"] for line in steps if line.get("memory_kind") == "device"
    ]
    last: Mapping[str, Any] = next(
        (line for line in reversed(lines) if "validation_loss" in line), {}
    )
    checked = [name for name in last if name.startswith("validation_") and name not in _KNOWN]
    found = {
        "optimizer steps": f"{steps[-1]['step']:,}",
        "label tokens": f"{sum(line.get('label_tokens') or 0 for line in steps):,}",
        "loss of the first step": _number(steps[0].get("loss")),
        "loss of the last step": _number(steps[-1].get("loss")),
        "validation loss at the end": _number(losses[-1] if losses else None),
        "peak memory of a rank, measured": f"{max(peaks):.2f} GiB" if peaks else "",
    } | {name.replace("_", " "): _number(last[name]) for name in checked}
    return {name: text for name, text in found.items() if text}


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) and abs(value) < float("inf") else ""
