"""Export the trained model or adapter with a model card, and log commands that use it.

Recipes end with `export_trained_model` or `export_trained_adapter`. Only commands are listed that
work with the export; `tune export` prints them too. Extra parameters are those that a recipe has
added to a model of a known family.
"""

import shlex
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from recipe_lib.adapters.peft_names import find_adapted_modules
from recipe_lib.adapters.served import Unserved, find_unserved
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.export_shards import find_carried
from recipe_lib.checkpoint.huggingface import export_model
from recipe_lib.checkpoint.peft_folders import compute_file_rank, export_adapter
from recipe_lib.checkpoint.side_files import CHAT_TEMPLATE, get_public_name, make_model_card
from recipe_lib.checkpoint.tensor_matching import log_left_out
from recipe_lib.config.local_files import ADAPTER_FOLDER, MODEL_FOLDER, resolve_base_name
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, LoraFinetuneConfig
from recipe_lib.data import find_trained_template
from recipe_lib.logs import get_logger, warn_on_first_rank
from recipe_lib.memory.qat import describe_export
from recipe_lib.models.families import FAMILIES
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.models.spec import ExternalSpec, ModelSpec
from recipe_lib.parallel import DTYPES, World
from recipe_lib.training.records import read_run_metrics
from recipe_lib.training.resolve_model import ResolvedModel, warn_of_export
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import GIB

# Stands for the export's folder in the commands of a model card, because the folder may be moved
ANYWHERE = Path("FOLDER")
_SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's `--max-lora-rank` takes
# Numbers of a validation that the card has under another name, or not at all
_KNOWN_VALIDATION = ("validation_loss", "validation_tokens")


def export_trained_model(
    cfg: FullFinetuneConfig,
    model: nn.Module,
    source: ResolvedModel,
    data: TrainingData,
    world: World,
) -> None:
    """Write output_dir/model, a Hugging Face folder with the tokenizer of training. Collective.

    source: the model before training. data: provides the tokenizer and the best step.
    """
    folder = Path(cfg.output_dir) / MODEL_FOLDER
    is_usable = _can_generate(cfg, model)
    card_commands = list_model_commands(ANYWHERE) if is_usable else []
    export_model(
        model,
        spec=source.spec,
        source_config=source.config,
        out=folder,
        tokenizer_folder=data.tokenizer_path,
        max_shard_bytes=int(cfg.checkpoint.max_shard_gib * GIB),
        world=world,
        **_find_chat_conventions(cfg, data),
        save_extra=cfg.checkpoint.extra_parameters == "save",
        card=_make_card(
            cfg, source=source, data=data, world=world, commands=card_commands, is_adapter=False
        ),
        carried=find_carried(source.spec, source.folder, carries=cfg.checkpoint.carry),
    )
    warn_of_export(model, world, folder)
    get_logger().info("model: %s", folder)
    if source.folder is not None and world.is_main:
        log_left_out(source.spec, source.folder, "export", carries=cfg.checkpoint.carry)
    _log_rounding(cfg, is_adapter=False)
    if is_usable:
        log_next_commands([*list_model_commands(folder), *list_run_commands(cfg)])


def export_trained_adapter(
    cfg: LoraFinetuneConfig,
    model: nn.Module,
    source: ResolvedModel,
    data: TrainingData,
    world: World,
) -> None:
    """Write output_dir/adapter in PEFT's layout. Collective.

    With lora.merge_on_save also write output_dir/model, with the adapter merged into the base.
    source: the model before training. data: provides the tokenizer and the best step.
    """
    folder = Path(cfg.output_dir) / ADAPTER_FOLDER
    merged_folder = Path(cfg.output_dir) / MODEL_FOLDER
    # Without a checkpoint the adapter's base has random weights, which are in no file.
    is_usable = source.folder is not None and _can_generate(cfg, model)
    chat_conventions = _find_chat_conventions(cfg, data)
    unserved = find_unserved_parts(source.spec, cfg.lora)
    list_commands = partial(
        list_adapter_commands,
        lora=cfg.lora,
        rank=compute_file_rank(source.spec, cfg.lora),
        served=not any(part.is_refused for part in unserved),
        template=chat_conventions["chat_template"] is not None,
    )
    public_base = get_public_name(source.name, source.folder)
    card_commands = list_commands(ANYWHERE, public_base) if is_usable else []
    export_adapter(
        model,
        spec=source.spec,
        cfg=cfg.lora,
        out=folder,
        base=source.name,
        world=world,
        base_folder=source.folder,
        source_config=source.config,
        tokenizer_folder=data.tokenizer_path,
        **chat_conventions,
        save_extra=cfg.checkpoint.extra_parameters == "save",
        card=_make_card(
            cfg, source=source, data=data, world=world, commands=card_commands, is_adapter=True
        ),
    )
    warn_of_export(model, world, folder)
    get_logger().info("adapter: %s", folder)
    for part in unserved:
        warn_on_first_rank("warning: adapter: %s", part.text)
    # The adapter is merged into the checkpoint's files; a random start (model.preset) has none.
    if cfg.lora.merge_on_save and source.folder is not None:
        card_commands = list_model_commands(ANYWHERE) if is_usable else []
        merge_adapter(
            source.folder,
            folder,
            merged_folder,
            quantize=cfg.lora.quantize_base,
            implementation=cfg.model.implementation,
            dtype=DTYPES[cfg.dtype],
            ranks=world,
            carries=cfg.checkpoint.carry,
            tokenizer_folder=data.tokenizer_path,
            **chat_conventions,
            max_shard_bytes=int(cfg.checkpoint.max_shard_gib * GIB),
            card=_make_card(
                cfg, source=source, data=data, world=world, commands=card_commands, is_adapter=False
            ),
        )
        get_logger().info("model: %s", merged_folder)
    _log_rounding(cfg, is_adapter=not cfg.lora.merge_on_save or source.folder is None)
    if is_usable:
        commands = list_commands(folder, source.name)
        if cfg.lora.merge_on_save:
            commands += list_model_commands(merged_folder)
        # A resumed run may find a model that was merged before: `tune export --merge` would refuse
        # to replace it.
        elif cfg.overwrite_output_dir or not merged_folder.exists():
            recipe = find_copied_recipe(cfg)
            commands.append(format_merge_command(Path(cfg.output_dir), recipe=recipe))
        log_next_commands([*commands, *list_run_commands(cfg)])


def _log_rounding(cfg: FullFinetuneConfig, *, is_adapter: bool) -> None:
    """Log how to quantize the export of quantization-aware training; nothing without it.

    is_adapter: True if an adapter alone was saved.
    """
    if cfg.qat is not None:
        get_logger().info("%s", describe_export(cfg.qat, cfg.qat_group_size, is_adapter=is_adapter))


def _find_chat_conventions(cfg: FullFinetuneConfig, data: TrainingData) -> dict[str, Any]:
    """Return arguments of the export: the samples' chat template, and the ids that end an answer.

    The tokenizer's own files may lack them, or have others. A template of None: there is none.
    """
    template = find_trained_template(cfg, data.tokenizer, data.dataset.report.chats)
    return {"chat_template": template, "stop_ids": data.tokenizer.stop_ids}


def _can_generate(cfg: FullFinetuneConfig, model: nn.Module) -> bool:
    """Return True if `tune generate` can load the export.

    It loads no model of a plugin, none with parameters that a recipe added, and none with a score
    head.
    """
    if cfg.scores_sequences or cfg.model.implementation not in ("native", "transformers"):
        return False
    return not find_extra_tensors(model, saved=True)


def _make_card(
    cfg: FullFinetuneConfig,
    source: ResolvedModel,
    data: TrainingData,
    world: World,
    *,
    commands: list[str],
    is_adapter: bool,
) -> str | None:
    """Return the text of the model card; None on ranks other than 0, which do not write it.

    commands: those that use the export.
    """
    if not world.is_main:
        return None
    return make_run_card(
        cfg,
        source.folder,
        commands,
        is_adapter=is_adapter,
        run=Path(cfg.output_dir),
        step=data.best.exported_step,
        exported=data.best.describe_outcome(data.total_steps),
    )


def make_run_card(
    cfg: FullFinetuneConfig,
    base_folder: Path | None,
    commands: list[str],
    *,
    is_adapter: bool,
    run: Path,
    step: int | None = None,
    exported: str | None = None,
) -> str:
    """Return the text of a model card: the config, how the model was trained, and the results.

    base_folder: of the model that was trained on; None: it had random weights. commands: those that
    use the export. run: the folder with the run's metrics. step: the step whose weights are
    exported; None: the last. exported: text on the choice of that step; None: no best step was
    asked for.
    """
    lines = [line for line in read_run_metrics(run) if step is None or line["step"] <= step]
    base = cfg.model.preset or ""
    if cfg.model.path and base_folder:
        base = resolve_base_name(cfg.model.path, base_folder)
    return make_model_card(
        cfg,
        base=base,
        base_folder=base_folder,
        lora=cfg.trained_adapters,
        is_adapter=is_adapter,
        commands=commands,
        plan=describe_training(cfg, lines),
        results=({"exported": exported} if exported else {}) | describe_results(lines),
    )


def describe_training(cfg: FullFinetuneConfig, lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return name -> text of the card's rows on training. lines: of metrics.jsonl."""
    last_step: dict[str, Any] = next((line for line in reversed(lines) if "loss" in line), {})
    rate_per_device = last_step.get("tokens_per_second_per_device")
    scales = f"{cfg.qat_group_size} weights" if cfg.qat == "int4" else "each row"
    texts = {
        "batch": (
            f"batch_size {cfg.batch_size} x gradient_accumulation_steps"
            f" {cfg.gradient_accumulation_steps} on each data rank"
        ),
        "sequences": (f"up to {cfg.max_seq_len:,} tokens{', packed' if cfg.data.packing else ''}"),
        "optimizer": (
            f"{cfg.optimizer.name}, learning rate {cfg.optimizer.lr:g}, then"
            f" {cfg.lr_scheduler.type}"
        ),
        "weights": cfg.dtype,
        "rounding": (
            f"linears trained in {cfg.qat}, a scale for {scales}; saved are the weights before"
            " rounding"
            if cfg.qat
            else ""
        ),
        "devices": (
            f"{round(last_step['tokens_per_second'] / rate_per_device)}" if rate_per_device else ""
        ),
        "passes over the data": f"{last_step['epoch']:.3g}" if last_step.get("epoch") else "",
    }
    return {name: text for name, text in texts.items() if text}


def describe_results(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return name -> text of the card's rows on results; empty without steps in `lines`.

    lines: of metrics.jsonl.
    """
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return {}
    losses = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    # Only peaks of a device: the resident memory of a CPU process differs from run to run, and is
    # of no use on another machine.
    peaks = [
        line["peak_memory_reserved_gib"] for line in steps if line.get("memory_kind") == "device"
    ]
    last_validation: dict[str, Any] = next(
        (line for line in reversed(lines) if "validation_loss" in line), {}
    )
    texts = {
        "optimizer steps": f"{steps[-1]['step']:,}",
        "label tokens": f"{sum(line.get('label_tokens') or 0 for line in steps):,}",
        "loss of the first step": _format_number(steps[0].get("loss")),
        "loss of the last step": _format_number(steps[-1].get("loss")),
        "validation loss at the end": _format_number(losses[-1] if losses else None),
        "peak memory of a rank, measured": f"{max(peaks):.2f} GiB" if peaks else "",
    }
    texts |= {
        name.replace("_", " "): _format_number(value)
        for name, value in last_validation.items()
        if name.startswith("validation_") and name not in _KNOWN_VALIDATION
    }
    return {name: text for name, text in texts.items() if text}


def _format_number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) and abs(value) < float("inf") else ""


def list_model_commands(folder: Path) -> list[str]:
    """Return the commands for a model folder."""
    return [_format_command("tune", "generate", folder), _format_command("vllm", "serve", folder)]


def list_adapter_commands(
    folder: Path,
    base: str,
    lora: LoraConfig,
    *,
    rank: int,
    served: bool,
    with_base: bool = False,
    template: bool = False,
) -> list[str]:
    """Return the commands for an adapter's folder.

    base: hub id or folder of the model that it was trained on. rank: of the matrices in its file,
    which may stack several adapters. served: False if a server refuses the adapter. with_base:
    True: the command must name the base, because the adapter's config does not. template: True if
    the folder has a chat template.
    """
    commands = [
        _format_command("tune", "generate", folder, *(["--base", base] if with_base else []))
    ]
    max_rank = next((allowed for allowed in _SERVED_RANKS if allowed >= rank), None)
    # vLLM loads no DoRA: no command then, rather than one that fails.
    if served and not lora.dora and max_rank is not None:
        options = ["--enable-lora", "--lora-modules", f"mine={folder}", "--max-lora-rank", max_rank]
        if template:  # else the server uses the base's template
            options += ["--chat-template", folder / CHAT_TEMPLATE]
        commands.append(_format_command("vllm", "serve", base, *options))
    return commands


def find_unserved_parts(spec: ModelSpec, lora: LoraConfig) -> list[Unserved]:
    """Find the parts of an adapter on a model that a server refuses or ignores."""
    architecture = (
        spec.architecture
        if isinstance(spec, ExternalSpec)
        else FAMILIES[spec.family].architectures[0]
    )
    return find_unserved(architecture, {module.name for module in find_adapted_modules(spec, lora)})


def list_gguf_commands(file: Path, *, is_adapter: bool = False) -> list[str]:
    """Return the commands for a GGUF file; for an adapter's with a place for its base's file."""
    if is_adapter:
        return [_format_command("llama-cli", "-m", "BASE.gguf", "--lora", file)]
    return [_format_command("llama-cli", "-m", file)]


def list_quantized_commands(folder: Path) -> list[str]:
    """Return the commands for a folder whose linears are quantized."""
    # No command of `tune`, which cannot read such a folder.
    return [_format_command("vllm", "serve", folder)]


def list_run_commands(cfg: FullFinetuneConfig) -> list[str]:
    """Return the commands for a run's output folder.

    They are `tune eval` if the run has validation samples with answers, and `tune export
    --quantize` if it has trained for that quantization (`qat`).
    """
    output = Path(cfg.output_dir)
    recipe = find_copied_recipe(cfg)
    options = [] if recipe is None else ["--recipe", recipe]
    commands = []
    if cfg.validation.source is not None and cfg.samples == "answers":
        commands.append(_format_command("tune", "eval", output, *options))
    if cfg.qat in ("int4", "int8"):
        commands.append(_format_command("tune", "export", output, "--quantize", cfg.qat, *options))
    return commands


def format_merge_command(
    checkpoint: Path, base: str | None = None, recipe: str | None = None
) -> str:
    """Return the command that merges an adapter into its base.

    checkpoint: folder of a run, or of the adapter. base: the adapter's base; None: the adapter's
    config names it. recipe: file of a copied recipe; None: the run's recipe is not a copy.
    """
    options = ["--base", base] if base else []
    if recipe:
        options += ["--recipe", recipe]
    return _format_command("tune", "export", checkpoint, "--merge", *options)


def find_copied_recipe(cfg: FullFinetuneConfig) -> str | None:
    """Return the file that defines the config's class, if that is a recipe outside of recipe_lib.

    None for recipes of the library. Commands on such a run need the file, to read its config.
    """
    module = type(cfg).__module__
    if module.startswith("recipe_lib."):
        return None
    return getattr(sys.modules.get(module), "__file__", None)


def log_next_commands(commands: Iterable[str]) -> None:
    """Log a line for each command, marked so that the log does not wrap it."""
    for command in commands:
        get_logger().info("next: %s", command, extra={"is_command": True})


def print_next_commands(commands: Iterable[str]) -> None:
    """Print a line for each command on standard output."""
    for command in commands:
        print(f"next: {command}")


def _format_command(*words: object) -> str:
    """Return a command as text for a shell, with `./` before a path that would be an option."""
    return shlex.join(
        f"./{word}" if isinstance(word, Path) and str(word)[0] == "-" else str(word)
        for word in words
    )
