"""Where a run's model comes from, a checkpoint or a shape to fill at random; checked before memory is taken."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint
from recipe_lib.config.schema import ModelConfig
from recipe_lib.models import DecoderSpec, preset_config, read_config, spec_from_config


@dataclass(frozen=True)
class ModelSource:
    """name: as the user gave it. folder: the checkpoint's; None: random weights. config: what config.json holds."""

    name: str
    folder: Path | None
    config: dict[str, Any]
    spec: DecoderSpec


def find_model(cfg: ModelConfig) -> ModelSource:
    """The model that `model.path` or `model.preset` names; of a checkpoint the headers of all weights are checked.

    Raises CheckpointError.
    """
    name = cfg.path or cfg.preset or ""
    folder = find_checkpoint(name) if cfg.path else None
    config = read_config(folder) if folder else preset_config(name)
    spec = spec_from_config(config, where=str(folder or name))
    if folder:
        check_weights(spec, folder)
    return ModelSource(name, folder, config, spec)
