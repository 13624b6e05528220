"""Where a run's model comes from, a checkpoint or a shape to fill at random; checked before memory
is taken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.adapters import add_adapters
from recipe_lib.adapters.peft_names import find_adapted_modules
from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint
from recipe_lib.config.local_files import ADAPTER_CONFIG, find_downloaded_model, resolve_base_name
from recipe_lib.config.schema import FullFinetuneConfig, ModelConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, read_config, read_preset_config, read_spec
from recipe_lib.models.families import build_scored_spec, read_run_spec
from recipe_lib.models.spec import DecoderSpec, ModelSpec
from recipe_lib.parallel import DTYPES
from recipe_lib.parallel.context import check_context
from recipe_lib.parallel.pipeline.balance import split_layers
from recipe_lib.parallel.tensor import check_tensor


@dataclass(frozen=True)
class ResolvedModel:
    """name: of a preset, a hub id, or the full path of a folder. folder: the checkpoint's; None:
    random weights. config: what config.json holds.
    """

    name: str
    folder: Path | None
    config: dict[str, Any]
    spec: ModelSpec


def resolve_model(
    cfg: ModelConfig, *, scored: bool = False, num_labels: int | None = None
) -> ResolvedModel:
    """Return the model that `model.path` or `model.preset` names; of a checkpoint the headers of
    all weights are checked.

    scored: with a score head of num_labels rows, None: as many as the checkpoint's has. Raises
    CheckpointError; for a model that is not native also SetupError and ConfigError.
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
    if scored:
        spec: ModelSpec = build_scored_spec(config, str(folder or name), num_labels)
    else:
        spec = read_spec(config, str(folder or name), cfg.implementation)
    if folder:
        check_weights(spec, folder)
    return ResolvedModel(resolve_base_name(name, folder) if folder else name, folder, config, spec)


def validate_parallelism(cfg: FullFinetuneConfig, spec: ModelSpec) -> None:
    """Refuse a model that the ranks of `parallel.tensor` and `parallel.context` cannot share, or
    whose layers are too few for the stages of `parallel.pipeline` or others than
    `parallel.pipeline_balance` lists, and adapters that it would not have where the config says.
    Raise ConfigError, with what fits.
    """
    adapters = cfg.trained_adapters
    if adapters is not None:
        dtype = DTYPES[cfg.dtype]
        add_adapters(build_meta(spec, dtype), adapters, dtype)
        find_adapted_modules(spec, adapters)  # refuses what an adapter file cannot say
    if isinstance(spec, DecoderSpec):
        quantize = "none" if adapters is None else adapters.quantize_base
        check_tensor(spec, cfg.parallel, quantize)
        check_context(spec, cfg.parallel)
    if cfg.parallel.pipeline > 1:
        split_layers(spec, cfg)


def validate_parallelism_if_local(cfg: FullFinetuneConfig) -> None:
    """As `validate_parallelism`, if the model's config.json is on this machine's disk; no weight is
    looked at.
    """
    if cfg.model.implementation != "native":
        return
    named = Path(cfg.model.path).expanduser() if cfg.model.path else None
    folder = (
        named if named is None or named.is_dir() else find_downloaded_model(str(cfg.model.path))
    )
    if cfg.model.path and (folder is None or not (folder / "config.json").is_file()):
        return
    config = read_config(folder) if folder else read_preset_config(cfg.model.preset or "")
    validate_parallelism(cfg, read_run_spec(cfg, config, str(folder or cfg.model.preset)))
