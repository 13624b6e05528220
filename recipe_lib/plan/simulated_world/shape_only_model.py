"""Find the shape of a config's model without its weights, which is all that a plan needs.

`tune plan` calls `make_plannable`, which turns a config into one that can be set up on any machine.
For such a config `limit_layers` cuts the model to its first layers, and `find_layer_pattern`
returns which layers are alike; `simulate_deep` calls both. A shape (numbers of layers, heads, ...)
is given as `model.preset`: the name of a shipped preset, or the path of a config.json.
"""

import atexit
import copy
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
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
from recipe_lib.models import ExternalSpec, ModelSpec, read_config, read_preset_config
from recipe_lib.models.families import get_text_config, read_run_spec, settle_packing

# What tells releases of one model from each other: kinds of training, and dates as 2507.
_VARIANT = re.compile(
    r"[-_](instruct|it|pt|base|chat|hf|thinking|reasoning|coder|math|sft|dpo|bf16|\d{4})(?=$|[-_])"
)
# Last part of a hub id, in lower case -> the same, without its variant, of the shipped checkpoint
# that it was trained from.
SIBLINGS = {
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-r1-distill-qwen-1.5b": "qwen2.5-1.5b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
    "qwen3.5-27b": "qwen3.6-27b",
    "qwen3.5-35b-a3b": "qwen3.6-35b-a3b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
}
_SIZE = re.compile(r"(?<![\d.])\d+(?:\.\d+)?[bm]\b")  # parameters, as 1.5b in a lower-case name


def make_plannable(cfg: Any) -> tuple[Any, list[str]]:
    """Return (a copy of a config that can be set up without files, assumptions as sentences).

    model.path becomes a model.preset of the same shape: the folder's config.json, that of the hub's
    cache, or the shipped preset whose config names that hub id. output_dir becomes a path in the
    temporary folder that does not exist. Raises ConfigError if the shape is not known,
    CheckpointError if config.json cannot be read or describes no model that recipes know.
    """
    cfg = copy.deepcopy(cfg)
    assumptions: list[str] = []
    # other_models: the keys of further models, such as a teacher's.
    for path_key, preset_key in {"model.path": "model.preset", **cfg.other_models}.items():
        section_name, path_name = path_key.split(".")
        section = getattr(cfg, section_name)
        path = getattr(section, path_name)
        if path is not None:
            shape, assumption = find_shape(path, path_key, preset_key)
            setattr(section, preset_key.partition(".")[2], shape)
            setattr(section, path_name, None)
            assumptions += [assumption] if assumption else []
    if cfg.data.packing:
        assumptions += settle_packing(cfg, read_spec(cfg))
    cfg.output_dir = str(Path(_make_folder()) / "output")
    cfg.resume = None
    cfg.overwrite_output_dir = False
    cfg.log.trackers = []
    adapters = getattr(cfg, "lora", None)
    if (
        adapters is not None
        and adapters.adapter_path is not None
        and not Path(adapters.adapter_path).is_dir()
    ):
        assumptions.append(
            f"lora.adapter_path={adapters.adapter_path} is not here: new adapters of the config's"
            " shape are planned"
        )
        adapters.adapter_path = None
    return cfg, assumptions


def find_shape(name: str, key: str = "model.path", preset: str = "model.preset") -> tuple[str, str]:
    """Return (value for the preset's key, an assumption or "") for a checkpoint.

    name: a folder or a hub id. key: the config key that has `name`. preset: the key that gets the
    value. Raises ConfigError if nothing on this machine tells the checkpoint's shape.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        read_config(folder)  # raises where it cannot be read
        return str(folder / "config.json"), ""
    cached = find_in_hub_cache(name)
    if cached is not None:
        return cached, ""
    shipped = list_shipped_shapes()
    sibling = find_sibling(name, shipped)
    if sibling:
        text = "that" if sibling == name else f"taken for that of {sibling},"
        return (
            shipped[sibling],
            f"{name} is not on this machine: its shape is {text} of the preset {shipped[sibling]}",
        )
    # The error suggests a checkpoint of the same shape: a misspelled name is near one of that size.
    same_size = [
        shipped_name
        for shipped_name in shipped
        if _SIZE.findall(shipped_name.lower()) == _SIZE.findall(name.lower())
    ]
    similar_name = find_nearest(name, same_size, cutoff=0.7)
    hint = (
        f"or plan with {key}={similar_name} if it has the same shape"
        if similar_name
        else f"or set {preset} to its shape"
    )
    raise ConfigError(
        f"{key}={show(name)}: found no folder, nothing in the hub cache and no shipped config of"
        f" that model; fetch its shape with `tune download {show(name)} --include config.json`,"
        f" {hint}"
    )


def find_sibling(name: str, shipped: Collection[str]) -> str:
    """Return the shipped checkpoint that has the shape of another one; "": there is none.

    A model's base, instruct and thinking releases have one shape, and copies of it have the same
    name under another owner or in a folder. name: a hub id, or a folder that is not here. shipped:
    hub ids.
    """
    if name in shipped:
        return name
    core = SIBLINGS.get(name.rpartition("/")[2].lower(), _strip_variant(name))
    # Shipped names with more parts are folders that a shipped config leaves.
    hub_ids = [shipped_name for shipped_name in shipped if shipped_name.count("/") == 1]
    return next((hub_id for hub_id in hub_ids if _strip_variant(hub_id) == core), "")


def _strip_variant(name: str) -> str:
    """Return the last part of a name without what tells releases of one model from each other."""
    core = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    # Folders are named Qwen2_5-7B where the hub has Qwen2.5-7B.
    return _VARIANT.sub("", re.sub(r"(\d)_(\d)", r"\1.\2", core))


def find_in_hub_cache(name: str) -> str | None:
    """Return the path of a hub id's config.json in the hub's cache on this machine, else None."""
    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path and no hub id
        return None
    # Neither a path nor None: the cache knows that the hub has no such file.
    return file if isinstance(file, str) else None


@cache
def list_shipped_shapes() -> dict[str, str]:
    """Return model.path of each shipped config -> the preset that has the model's shape."""
    shapes = {}
    for preset in list_presets():
        # The config `FAMILY/SIZE_METHOD` trains the preset FAMILY/SIZE. All configs of a size have
        # the same model, so the first one is enough.
        for file in sorted(get_configs_folder().glob(f"{preset}_*.yaml"))[:1]:
            shapes[_read_yaml(file)["model"]["path"]] = preset
    # A shipped config that starts from a preset leaves a model of that shape in its output_dir.
    for file in get_configs_folder().rglob("full.yaml"):
        config = _read_yaml(file)
        shapes[f"{config['output_dir']}/model"] = config["model"]["preset"]
    return shapes


# Models of other libraries have other names for the number of layers.
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _read_yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def limit_layers(cfg: Any, layers: int) -> Any:
    """Return a copy of a plannable config whose model has only the first `layers` layers.

    The shorter config.json is written to the temporary folder. Raises ValueError if the model has
    fewer layers, ConfigError if its config.json has no number of layers.
    """
    config = read_preset_config(cfg.model.preset)
    if cfg.model.implementation == "native":
        read_spec(cfg)  # raises CheckpointError for a model that recipes do not know
        config = get_text_config(config)
    config = copy.deepcopy(dict(config))
    key_and_shape = _find_text_shape(config)
    if key_and_shape is None:
        raise ConfigError(
            f"{cfg.model.preset}: found no number of layers, expected one of"
            f" {', '.join(_LAYER_KEYS)}; plan without --depth"
        )
    layers_key, text_shape = key_and_shape
    num_layers = text_shape[layers_key]
    if not 1 <= layers <= num_layers:
        raise ValueError(f"found {layers} layers, expected 1 to {num_layers}")
    # These lists have an entry for each layer: `layer_types`, and in models of other libraries any
    # of this length.
    for key, value in text_shape.items():
        if (
            isinstance(value, list)
            and len(value) == num_layers
            and (key == "layer_types" or cfg.model.implementation != "native")
        ):
            text_shape[key] = value[:layers]
    text_shape[layers_key] = layers
    name = cfg.model.preset.replace(os.sep, "_")[-100:].removesuffix(".json")
    # A forked process uses the same folder, so the file's name has the id of the process.
    file = Path(_make_folder()) / f"{name}-{layers}-{os.getpid()}.json"
    replace_text(file, json.dumps(config))
    cfg = copy.deepcopy(cfg)
    cfg.model = dataclasses.replace(cfg.model, path=None, preset=str(file))
    return cfg


def _find_text_shape(config: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return (key of the number of layers, the part of config.json that has it); None: no part has.

    Of the parts of a multimodal config it is the one with the largest vocabulary: the text model's.
    """
    shapes = [
        (key, part)
        for part in _list_parts(config)
        for key in _LAYER_KEYS
        if isinstance(part.get(key), int)
    ]
    return max(shapes, key=lambda shape: shape[1].get("vocab_size") or 0, default=None)


def _list_parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the configs inside of it, outer ones first."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _list_parts(value)


def find_layer_pattern(cfg: Any) -> tuple[int, int]:
    """Return (number of leading layers that are never repeated, period of the other layers).

    After the leading ones, layer i is like layer i + period. It is (0, 6) for Gemma 3, whose layers
    differ in their windows, and (1, 1) for a model with experts in all layers but the first. Where
    the sum is near the number of layers, few or none repeat. cfg: a plannable config.
    """
    kinds = _list_layer_kinds(read_spec(cfg))
    # length: of the leading layers and one period. The smallest that fits, as it lets the most
    # layers be left out.
    for length in range(1, len(kinds) + 1):
        for period in range(1, length + 1):
            if kinds[length:] == kinds[length - period : len(kinds) - period]:
                return length - period, period
    raise AssertionError("a model has layers")


def _list_layer_kinds(spec: ModelSpec) -> list[Any]:
    """Return a value for each layer, equal for layers that are alike."""
    if isinstance(spec, ExternalSpec):
        return spec.list_layer_kinds()
    # Layers are alike if all fields of the spec, and of its experts (`mixture`), that have a value
    # for each layer are equal for them.
    values = [*vars(spec).values(), *(vars(spec.mixture).values() if spec.mixture else ())]
    per_layer = [
        value for value in values if isinstance(value, tuple) and len(value) == spec.num_layers
    ]
    return list(zip(*per_layer, strict=True))


def count_layers(cfg: Any) -> int:
    """Return how many layers the model of a plannable config has."""
    return read_spec(cfg).num_layers


def read_spec(cfg: Any) -> ModelSpec:
    """Return the shape of a plannable config's model."""
    return read_run_spec(cfg, read_preset_config(cfg.model.preset), cfg.model.preset)


@cache
def _make_folder() -> str:
    folder = tempfile.mkdtemp(prefix="tune-plan-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, maker_pid: int) -> None:
    # A forked process runs the exit handlers too, and may end before the one that made the folder.
    if os.getpid() == maker_pid:
        shutil.rmtree(folder, ignore_errors=True)
