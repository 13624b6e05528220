"""The shape of a config's model without its weights: what a plan needs, and what it can have on any
machine.
"""

import atexit
import copy
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from recipe_lib.config.paths import get_configs_folder, list_presets
from recipe_lib.config.suggest import find_nearest, show
from recipe_lib.errors import ConfigError
from recipe_lib.files import replace_text
from recipe_lib.models import read_config, read_preset_config
from recipe_lib.models.families import get_text_config, read_run_spec
from recipe_lib.models.spec import ExternalSpec, ModelSpec

CONFIG_FILE = "config.json"
_SIZE = re.compile(r"(?<![\d.])\d+(?:\.\d+)?[bm]\b")  # of a model, in its lower-case name


def make_plannable(cfg: Any) -> tuple[Any, list[str]]:
    """A copy of a config that can be set up without weights and without an earlier run, and what
    was assumed for it.

    model.path becomes the model.preset of its shape: that of the folder's config.json, of the hub
    cache's, or of the shipped preset whose config names that hub id. output_dir is a new name in
    the temporary folder, not made. Raises ConfigError where the shape is not known, CheckpointError
    where config.json cannot be read or is not covered.
    """
    cfg = copy.deepcopy(cfg)
    assumed = []
    if cfg.model.path is not None:
        cfg.model.preset, how = find_shape(cfg.model.path)
        cfg.model.path = None
        assumed += [how] if how else []
    for path, preset in cfg.other_models.items():
        (section, word), (_, other) = path.split("."), preset.split(".")
        keys = getattr(cfg, section)
        if getattr(keys, word) is not None:
            shape, how = find_shape(getattr(keys, word), path, preset)
            setattr(keys, other, shape)
            setattr(keys, word, None)
            assumed += [how] if how else []
    cfg.output_dir = str(Path(_make_folder()) / "output")
    cfg.resume, cfg.overwrite_output_dir, cfg.log.trackers = None, False, []
    adapters = getattr(cfg, "lora", None)
    if (
        adapters is not None
        and adapters.adapter_path is not None
        and not Path(adapters.adapter_path).is_dir()
    ):
        assumed.append(
            f"lora.adapter_path={adapters.adapter_path} is not here: new adapters of the config's"
            " shape are planned"
        )
        adapters.adapter_path = None
    return cfg, assumed


def find_shape(name: str, key: str = "model.path", preset: str = "model.preset") -> tuple[str, str]:
    """(value for a preset's key, what was assumed or "") for a path's: a folder, or a hub id.

    Raises ConfigError where nothing on this machine says what shape it has.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        read_config(folder)  # says what is wrong with it
        return str(folder / CONFIG_FILE), ""
    cached = find_in_hub_cache(name)
    if cached is not None:
        return cached, ""
    shipped = list_shipped_shapes()
    if name in shipped:
        return (
            shipped[name],
            f"{name} is not on this machine: its shape is that of the preset {shipped[name]}",
        )
    begun = [
        known for known in shipped if name.lower().startswith(known.lower())
    ]  # `...-8B-Instruct` of `...-8B`
    of_its_size = [
        known for known in shipped if _SIZE.findall(known.lower()) == _SIZE.findall(name.lower())
    ]
    like = max(begun, key=len, default=find_nearest(name, of_its_size, cutoff=0.7))
    hint = (
        f"or plan with {key}={like} if it has the same shape"
        if like
        else f"or set {preset} to its shape"
    )
    raise ConfigError(
        f"{key}={show(name)}: found no folder, nothing in the hub cache and no shipped config of"
        f" that model; fetch it with `tune download {show(name)}`, {hint}"
    )


def find_in_hub_cache(name: str) -> str | None:
    """The config.json of a hub id, if the hub's cache on this machine has it."""
    try:
        found = try_to_load_from_cache(name, CONFIG_FILE)
    except HFValidationError:  # a path and no hub id
        return None
    return found if isinstance(found, str) else None


@cache
def list_shipped_shapes() -> dict[str, str]:
    """Return model.path -> preset, by the shipped configs: `FAMILY/SIZE_METHOD` trains the preset
    FAMILY/SIZE.

    A shipped config that starts from a preset leaves a model of that shape in its output_dir/model.
    """
    shapes = {}
    for preset in list_presets():
        for file in sorted(get_configs_folder().glob(f"{preset}_*.yaml"))[
            :1
        ]:  # all of a size have one model
            shapes[_read_yaml(file)["model"]["path"]] = preset
    for file in get_configs_folder().rglob("full.yaml"):
        config = _read_yaml(file)
        shapes[f"{config['output_dir']}/model"] = config["model"]["preset"]
    return shapes


def _read_yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def limit_layers(cfg: Any, layers: int) -> Any:
    """A copy of a plannable config whose model has so many layers, the first ones of its own.

    layers: from 1 to as many as it has, ValueError otherwise.
    """
    config = _read_config(cfg)
    word = _find_layers_key(cfg, config)
    own = config[word]
    if not 1 <= layers <= own:
        raise ValueError(f"found {layers} layers, expected 1 to {own}")
    cut: dict[str, Any] = {word: layers}
    for key, value in config.items():  # layer_types, and what else there is one of for each layer
        if (
            isinstance(value, list)
            and len(value) == own
            and (key == "layer_types" or cfg.model.implementation != "native")
        ):
            cut[key] = value[:layers]
    name = cfg.model.preset.replace(os.sep, "_")[-100:].removesuffix(".json")
    file = Path(_make_folder()) / f"{name}-{layers}-{os.getpid()}.json"
    replace_text(file, json.dumps(dict(config) | cut))
    cfg = copy.deepcopy(cfg)
    cfg.model = dataclasses.replace(cfg.model, path=None, preset=str(file))
    return cfg


def find_layer_pattern(cfg: Any) -> tuple[int, int]:
    """Return (leading layers that are never repeated, after how many the others repeat).

    cfg: a plannable config. Layers are alike where all is that its spec has one of for each of
    them: a window, an MLP in place of experts. (0, 6) for Gemma 3, (1, 1) for experts behind one
    MLP; few or no layers repeat where the sum is near the number of layers.
    """
    kinds = _list_layer_kinds(read_spec(cfg))
    for length in range(1, len(kinds) + 1):
        for period in range(1, length + 1):
            if kinds[length:] == kinds[length - period : len(kinds) - period]:
                return length - period, period
    raise AssertionError("a model has layers")


def _list_layer_kinds(spec: ModelSpec) -> list[Any]:
    """Return what each layer is, equal for those that are alike."""
    if isinstance(spec, ExternalSpec):
        return spec.list_layer_kinds()
    values = [*vars(spec).values(), *(vars(spec.mixture).values() if spec.mixture else ())]
    per_layer = [
        value for value in values if isinstance(value, tuple) and len(value) == spec.num_layers
    ]
    return list(zip(*per_layer, strict=True))


def count_layers(cfg: Any) -> int:
    """How many layers the model of a plannable config has."""
    return read_spec(cfg).num_layers


def _find_layers_key(cfg: Any, config: Mapping[str, Any]) -> str:
    """The key of config.json that says how many layers there are. Raises ConfigError for a config
    that has none.
    """
    words = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    found = next((word for word in words if isinstance(config.get(word), int)), None)
    if found is None:
        raise ConfigError(
            f"{cfg.model.preset}: found no number of layers, expected one of {', '.join(words)};"
            " plan without --depth"
        )
    return found


def _read_config(cfg: Any) -> Mapping[str, Any]:
    """The decoder's config.json, checked."""
    config = read_preset_config(cfg.model.preset)
    if cfg.model.implementation != "native":
        return config
    read_spec(cfg)
    return get_text_config(config)


def read_spec(cfg: Any) -> ModelSpec:
    """The shape of a plannable config's model."""
    return read_run_spec(cfg, read_preset_config(cfg.model.preset), cfg.model.preset)


@cache
def _make_folder() -> str:
    """A temporary folder of this process, removed when it ends."""
    folder = tempfile.mkdtemp(prefix="tune-plan-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, maker: int) -> None:
    """By the process that made it: a fork may end before."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)
