"""The config that a model is evaluated with: of a run its own samples and settings, of any other model the defaults."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.recipes import recipe_for
from recipe_lib.config import load_config
from recipe_lib.config.local_files import ADAPTER_FOLDER, MODEL_FOLDER
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.schema_data import DataConfig, validation_source
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError

if TYPE_CHECKING:
    from recipe_lib.generation.source import GenerationSource

CONFIG = "config.yaml"
_BATCH = 8  # sequences, where nothing else is said
# What of a run's section `data` does not hold for held-out samples, or is said in another way.
_NOT_CARRIED = ("source", "sources", "format", "split", "columns", "max_samples", "packing", "shuffle")
# Of a run, besides its model: how its weights are computed with.
_OF_RUNS = ("dtype", "seed", "max_seq_len", "device", "qat", "qat_group_size")
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


def run_of(name: str) -> Path | None:
    """The output_dir of the run that wrote a folder: itself, or the one that its model/ or adapter/ is in."""
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    if folder.absolute().name in (MODEL_FOLDER, ADAPTER_FOLDER) and (folder.absolute().parent / CONFIG).is_file():
        return folder.absolute().parent
    return None


def eval_config(arguments: argparse.Namespace, source: "GenerationSource", run: Path | None) -> FullFinetuneConfig:
    """The config; its validation.source is what is looked at. ConfigError if there is none."""
    trained = _config_of(run, arguments.recipe)
    words = [f"tokenizer.path={_text(source.tokenizer)}"]
    words += _of_model(source, trained)
    words += _of_samples(arguments, trained)
    schema = FullFinetuneConfig if source.adapter is None else LoraFinetuneConfig
    cfg: FullFinetuneConfig = load_config([], [*words, *arguments.overrides], schema)
    return cfg


def _config_of(run: Path | None, recipe: str | None) -> FullFinetuneConfig | None:
    if run is None:
        return None
    path = run / CONFIG
    cfg: FullFinetuneConfig = load_config(path, [], recipe_for(str(path), recipe).schema())
    return cfg


def _of_model(source: "GenerationSource", trained: FullFinetuneConfig | None) -> list[str]:
    """Model, dtype, seed: of the run, or what the files say."""
    from recipe_lib.cli.inference_device import choose_dtype
    from recipe_lib.models.spec import ExternalSpec

    if trained is not None:
        model = dataclasses.asdict(trained.model)
        words = [f"model.{name}={json.dumps(value)}" for name, value in model.items() if value is not None]
        words += [f"{name}={json.dumps(getattr(trained, name))}" for name in _OF_RUNS]
        return words
    words = [f"model.path={_text(source.folder)}"]
    if isinstance(source.spec, ExternalSpec):
        words.append(f"model.implementation={source.spec.implementation}")
    found = source.dtype or str(choose_dtype("auto", source.config)).removeprefix("torch.")
    longest = min(FullFinetuneConfig().max_seq_len, source.spec.max_positions)
    return [*words, f"dtype={_NAMES.get(found, 'fp32')}", f"max_seq_len={longest}"]


def _of_samples(arguments: argparse.Namespace, trained: FullFinetuneConfig | None) -> list[str]:
    """Where the samples are, and how they become tokens."""
    words, held = [f"validation.batch_size={_BATCH}"], None
    if trained is not None:
        usual = DataConfig()
        for field in dataclasses.fields(DataConfig):
            value = getattr(trained.data, field.name)
            if field.name not in _NOT_CARRIED and value != getattr(usual, field.name):
                words.append(f"data.{field.name}={json.dumps(value)}")
        if trained.validation.batch_size is not None:
            words.append(f"validation.batch_size={trained.validation.batch_size}")
        held = validation_source(trained.data, trained.validation)
    if arguments.data:
        given = {"source": arguments.data, "format": arguments.format or "auto"}
    elif held is not None:
        given = {"source": held.source, "format": held.format, "split": held.split, "columns": held.columns}
    elif named := [word for word in arguments.overrides if word.startswith("validation.source=")]:
        given = {"source": named[-1].partition("=")[2]}
    elif arguments.lm_eval:
        return [*words, "data.source=none.jsonl"]  # tasks have samples of their own
    else:
        whose = "its config has no validation.source" if trained is not None else "is no run, which would name them"
        raise ConfigError(f"{show(arguments.what)}: {whose}; give held-out samples with --data FILE")
    words += [f"data.{name}={json.dumps(value)}" for name, value in given.items()]
    words.append(f"validation.source={json.dumps(given['source'])}")
    most = arguments.max_samples or (held.max_samples if held is not None and not arguments.data else None)
    return words if most is None else [*words, f"validation.max_samples={most}"]


def _text(path: Path) -> str:
    return json.dumps(str(path))


def settings_of(cfg: Any, arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """What an evaluation was done with, for its page."""
    found = {
        "validation.source": cfg.validation.source,
        "data.format": cfg.data.format,
        "max_seq_len": cfg.max_seq_len,
        "dtype": cfg.dtype,
        **({} if cfg.qat is None else {"qat": f"{cfg.qat}, the base's weights as they are"}),
        "ranks": ranks,
    }
    if not arguments.no_generate:
        drawn = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        found |= {name: getattr(arguments, name) for name in drawn if getattr(arguments, name) is not None}
    return found
