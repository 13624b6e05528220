"""Resolve the model of a run, from a checkpoint or a preset, and check it before it is built.

A preset is an architecture with random weights. A recipe calls `resolve_model`, and `prepare_data`
also `validate_parallelism`. `run_recipe` calls `check_models` and
`check_extra_parameters_are_stepped` for the extra parameters, those that a recipe adds to a model
of a known family: a checkpoint may lack their values, and an export may lose them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recipe_lib.adapters import add_adapters
from recipe_lib.adapters.peft_names import find_adapted_modules
from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint
from recipe_lib.checkpoint.model_export import find_extra_fault
from recipe_lib.config.local_files import ADAPTER_CONFIG, resolve_base_name
from recipe_lib.config.schema import EXPERTS, FullFinetuneConfig, ModelConfig
from recipe_lib.errors import CheckpointError, ConfigError, SetupError
from recipe_lib.logs import warn_on_first_rank
from recipe_lib.models import (
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    build_meta,
    build_scored_spec,
    read_config,
    read_preset_config,
    read_run_spec,
    read_spec,
)
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import check_extra, find_extra_tensors
from recipe_lib.parallel import DTYPES, World, check_tensor
from recipe_lib.parallel.context import check_context
from recipe_lib.parallel.pipeline.balance import split_layers


@dataclass(frozen=True)
class ResolvedModel:
    """The model that a config names."""

    name: str  # name of a preset, hub id, or full path of a folder
    folder: Path | None  # folder of the checkpoint; None: random weights
    config: dict[str, Any]  # contents of config.json
    spec: ModelSpec  # shape of the model as plain numbers, from that config


def resolve_model(
    cfg: ModelConfig, *, scored: bool = False, num_labels: int | None = None
) -> ResolvedModel:
    """Return the model that `model.path` or `model.preset` names.

    scored: True: give it a score head in place of the output head. num_labels: rows of that head;
    None: as many as the checkpoint's has. Raise CheckpointError for a checkpoint or a config.json
    that is not found, broken or not supported. A model of another library may also raise SetupError
    or ConfigError, if that library or a plugin is missing.
    """
    name = cfg.path or cfg.preset or ""
    folder = find_checkpoint(name) if cfg.path else None
    if folder and (folder / "config.json").is_file() and (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: has a model and an adapter ({ADAPTER_CONFIG}), expected one of them; set"
            " model.path to a folder of the model alone, and lora.adapter_path to one of the"
            " adapter if it is to be trained on"
        )
    config = read_config(folder) if folder else read_preset_config(name)
    # Not `read_run_spec`, which takes the config of a run: a teacher has a ModelConfig alone.
    if scored:
        spec: ModelSpec = build_scored_spec(config, str(folder or name), num_labels)
    else:
        spec = read_spec(config, str(folder or name), cfg.implementation)
    if folder:
        # Reads the headers of all files, so that a broken checkpoint is reported before any memory
        # is allocated.
        check_weights(spec, folder)
    return ResolvedModel(
        # The files of a trained adapter name the model: a relative path would be wrong elsewhere.
        name=resolve_base_name(name, folder) if folder else name,
        folder=folder,
        config=config,
        spec=spec,
    )


def validate_parallelism(cfg: FullFinetuneConfig, spec: ModelSpec) -> None:
    """Raise ConfigError if `parallel` or `lora` of the config does not fit the model.

    The ranks may be unable to divide it, or it may lack modules that adapters are to be added to.
    """
    adapters = cfg.trained_adapters
    if adapters is not None:
        # Adapters are added to a model on the meta device, only for the errors that this raises.
        dtype = DTYPES[cfg.dtype]
        add_adapters(build_meta(spec, dtype), adapters, dtype)
        find_adapted_modules(spec, adapters)  # raises for adapters that PEFT's files cannot express
    if isinstance(spec, DecoderSpec):
        quantize = "none" if adapters is None else adapters.quantize_base
        check_tensor(spec, cfg.parallel, quantize)
        check_context(spec, cfg.parallel)
    elif cfg.dtype == "fp64" and cfg.parallel.tensor > 1 and spec.layout().experts:
        is_plain = adapters is None or adapters.quantize_base == "none"
        if is_plain and (adapters is None or EXPERTS not in adapters.target_modules):
            # Their class multiplies by other calls then than those that a tensor plan follows.
            raise ConfigError(
                f"dtype=fp64: tensor-parallel ranks do not divide experts of {spec.family} in it;"
                " set dtype=fp32 or parallel.tensor=1"
            )
    if cfg.parallel.pipeline > 1:
        # Raises for fewer layers than stages, and for pipeline_layers_per_stage that do not fit.
        split_layers(spec, cfg)


def check_local_model(cfg: FullFinetuneConfig, folder: Path | None, *, reads_weights: bool) -> None:
    """Raise what a run would raise about its model, as far as files on this disk tell.

    These are a model that is not known, tensors and shapes that are not its own, ranks that cannot
    share it, adapters that it cannot have, and packed documents that it cannot keep apart. Nothing
    is downloaded.

    folder: of the checkpoint; None: a preset, or a model that is not here. reads_weights: check the
    headers of its files.
    """
    if folder is None and cfg.model.path:
        return
    if folder is not None and not (folder / "config.json").is_file():
        return
    config = read_config(folder) if folder else read_preset_config(cfg.model.preset or "")
    spec = read_run_spec(cfg, config, str(folder or cfg.model.preset))
    if folder is not None and reads_weights:
        check_weights(spec, folder)
    validate_parallelism(cfg, spec)
    if not isinstance(spec, ExternalSpec):
        return
    if not cfg.checkpoint.carry and spec.is_multimodal() and spec.find_text_model() is None:
        raise ConfigError(
            f"checkpoint.carry: found false, expected true: transformers has no class for the text"
            f" model of {spec.architecture} alone; leave the key out"
        )
    if cfg.data.packing is True:  # not `auto`
        spec.check_packing(cfg.parallel.tensor, compiled=cfg.compile)


def collect_models(recipe: Any) -> dict[str, nn.Module]:
    """Return name -> model, of a recipe's attributes that are modules, each module once."""
    # Keyed by identity: a recipe may hold one module under two names.
    models: dict[int, tuple[str, nn.Module]] = {}
    for name, value in vars(recipe).items():
        if isinstance(value, nn.Module):
            models.setdefault(id(value), (name, value))
    return dict(models.values())


def check_models(recipe: Any, cfg: FullFinetuneConfig, world: World) -> None:
    """Check, before weights are read, that extra parameters are initialized and exported.

    Collective. Raise SetupError for extra parameters that nothing initializes. With
    `checkpoint.extra_parameters: error` raise ConfigError for those that the export would lose.
    """
    check_each_model(recipe, world, check_extra)
    for model in collect_models(recipe).values():
        # A pipeline rank has a part of the names; the error is raised on all ranks, with all names.
        fault = find_extra_fault(cfg.checkpoint, _merge_stages(world, _count_extra_elements(model)))
        if fault is not None:
            raise ConfigError(fault)


def check_extra_parameters_are_stepped(recipe: Any, world: World) -> None:
    """Raise SetupError on all ranks if no optimizer steps an extra parameter that is trained.

    Collective.
    """
    stepped: set[int] = set()
    for value in vars(recipe).values():
        if isinstance(value, Optimizer):
            for group in value.param_groups:
                stepped.update(map(id, group["params"]))

    def check_model_parameters(model: nn.Module) -> None:
        if not any(id(parameter) in stepped for parameter in model.parameters()):
            return  # no optimizer trains this model: a frozen reference, for example
        for name, tensor in find_extra_tensors(model).items():
            if tensor.requires_grad and id(tensor) not in stepped:
                raise SetupError(
                    f"{name}: requires a gradient, and no optimizer has it; give build_optimizer"
                    " every parameter that requires one, or freeze it by requires_grad_(False)"
                )

    check_each_model(recipe, world, check_model_parameters)


def check_each_model(recipe: Any, world: World, check: Callable[[nn.Module], None]) -> None:
    """Run a check on each model of the recipe; an error is raised on all ranks. Collective."""
    with world.raise_together():
        for model in collect_models(recipe).values():
            check(model)


def describe_extra_parameters(model: nn.Module, world: World) -> list[str]:
    """Return log lines on the extra parameters and buffers, and where their values come from.

    Collective in a pipeline.
    """
    loaded_names = model.loaded_extras if isinstance(model, LanguageModel) else frozenset()
    counts = _count_extra_elements(model)
    lines = []
    for is_loaded, origin in (
        (False, "start from reset_parameters, no checkpoint has them"),
        (True, "are read"),
    ):
        # Called even if this rank has no extra parameters: gathering is a collective.
        merged = _merge_stages(
            world,
            {name: count for name, count in counts.items() if (name in loaded_names) == is_loaded},
        )
        if merged:
            lines.append(
                f"extra parameters: {sum(merged.values()):,} numbers {origin}:"
                f" {shorten_names(merged)}"
            )
    return lines


def warn_of_export(model: nn.Module, world: World, folder: Path) -> None:
    """Warn of exported tensors that other programs ignore. Collective in a pipeline."""
    saved_extra = _merge_stages(world, _count_extra_elements(model, saved=True))
    if saved_extra:
        warn_on_first_rank(
            "warning: %s: transformers and other programs ignore its extra parameters, and so"
            " compute something else; a recipe that adds them reads them: %s",
            folder,
            shorten_names(saved_extra),
        )


def shorten_names(names: Iterable[str]) -> str:
    """Return names as text, those that differ in the layer as one: `layers.*.mlp.x.weight (5)`."""
    counts = Counter(
        ".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names
    )
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


def _count_extra_elements(model: nn.Module, *, saved: bool = False) -> dict[str, int]:
    """Return name -> number of elements of each extra tensor. saved: only those in files."""
    return {name: tensor.numel() for name, tensor in find_extra_tensors(model, saved=saved).items()}


def _merge_stages(world: World, local_counts: dict[str, int]) -> dict[str, int]:
    """Return the counts of all pipeline ranks together; without a pipeline those that are given.

    Other ranks have the same tensors. Collective in a pipeline.
    """
    if world.pipeline is None:
        return local_counts
    return reduce(or_, world.gather_json(local_counts))
