"""What a run reads, and that none of it lies where the run writes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe_lib.config.keys import read_schema
from recipe_lib.config.registry import loaded_plugins
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError
from recipe_lib.training.previous_run import EARLIER_FOLDER, FILES, PUBLISHED, STATE_FOLDER, TRACKERS_FOLDER

_NOT_READ = ("output_dir", "resume", "data.cache_dir")


def check_inputs(cfg: FullFinetuneConfig) -> None:
    """ConfigError if an input lies in a part of output_dir that runs replace; links and relative paths are followed."""
    root = Path(cfg.output_dir).resolve()
    names = (
        *PUBLISHED,
        STATE_FOLDER,
        TRACKERS_FOLDER,
        *FILES,
        *(path.name for path in root.glob(f"{EARLIER_FOLDER}*")),
    )
    places = [root / name for name in names if (root / name).exists()]
    places += [place.resolve() for place in places]
    for key, text in input_paths(cfg):
        for read in _read_through(key, os.path.expanduser(text)):
            inside = next((place for place in places if read == place or place in read.parents), None)
            if inside is not None:
                raise ConfigError(
                    f"{key}: {show(text)} is read from {inside}, which a run in this output_dir replaces; copy it "
                    "elsewhere, or choose another output_dir"
                )


def input_paths(cfg: FullFinetuneConfig) -> Iterator[tuple[str, str]]:
    """(key, path) of everything that a config's run reads from the disk, as it was written."""
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    for name, key in read_schema(config_class).keys.items():
        value: Any = cfg
        for word in name.split("."):
            value = getattr(value, word)
        if key.section_class is not None:
            inner = [word for word, each in read_schema(key.section_class).keys.items() if each.limits.get("path")]
            for number, item in enumerate(value):
                yield from ((f"{name}[{number}].{word}", str(getattr(item, word))) for word in inner)
        elif name not in _NOT_READ and value and (key.limits.get("path") or name == "model.preset"):
            yield name, str(value)
    yield from (("--plugin", str(path)) for path in loaded_plugins())


def _read_through(key: str, path: str) -> Iterator[Path]:
    """Where a path leads; of a folder also where its files lie, as they may be links (data folders: all of them)."""
    yield Path(os.path.realpath(path))
    if os.path.isdir(path):
        is_data = key.startswith(("data.", "validation."))
        with suppress(OSError):  # whoever reads the folder says why it cannot be read
            for entry in os.scandir(path):
                if entry.is_symlink() or (is_data and entry.is_file()):
                    yield Path(os.path.realpath(entry.path))
