"""The output folder of a run: whether it may be used, and what is in it.

output_dir/config.yaml     every value that was used     metrics.jsonl   one JSON object a step
           state/step_N/   to go on from                 summary.json    how it ended
           model/          the Hugging Face folder       report.html     the curves
           adapter/        PEFT's layout, where adapters were trained
           written.json    what the run has written, which it or a later one may replace
           earlier/        what is left of a run that this one replaces, until its model is complete
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe_lib import files
from recipe_lib.config.describe import to_yaml
from recipe_lib.config.keys import read_schema
from recipe_lib.config.load import check_no_secrets
from recipe_lib.config.local_files import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    STATE_FOLDER,
    check_earlier_run,
    check_folder,
)
from recipe_lib.config.registry import loaded_plugins
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.training import previous_run
from recipe_lib.training.previous_run import (
    CONFIG_FILE,
    EARLIER_FOLDER,
    FILES,
    PUBLISHED,
    TRACKERS_FOLDER,
)

__all__ = [
    "ADAPTER_FOLDER",
    "MODEL_FOLDER",
    "STATE_FOLDER",
    "check_output",
    "check_same_data",
    "lock_output",
    "open_output",
    "unlock_output",
]
_NOT_READ = ("output_dir", "resume", "data.cache_dir")


def check_output(cfg: FullFinetuneConfig) -> None:
    """ConfigError if output_dir holds what this run would mix with, read, or replace though no run wrote it.

    Nothing is written.
    """
    check_no_secrets(cfg)  # config.yaml is what was used, to the letter
    folder = Path(cfg.output_dir)
    check_folder(folder)
    if not folder.is_dir():
        return
    unlock_output(_lock(folder, fcntl.LOCK_SH))
    check_inputs(cfg)
    check_earlier_run(cfg)
    _check_ours(cfg, folder)


def _check_ours(cfg: FullFinetuneConfig, folder: Path) -> None:
    unrecorded = previous_run.first_unrecorded(folder, replaced=cfg.overwrite_output_dir)
    if unrecorded is not None:
        raise ConfigError(
            f"output_dir: {unrecorded} is not, or no longer, what a run wrote, and would be replaced; move it away, or "
            "choose another output_dir"
        )


def lock_output(cfg: FullFinetuneConfig) -> int | None:
    """Makes the folder and keeps other runs out of it until `unlock_output`, or until this process ends.

    ConfigError if another run is in it. StorageError.
    """
    folder = Path(cfg.output_dir)
    with files.storage_faults():
        folder.mkdir(parents=True, exist_ok=True)
    return _lock(folder, fcntl.LOCK_EX)


def unlock_output(lock: int | None) -> None:
    """Lets other runs in again."""
    if lock is not None:
        os.close(lock)


def _lock(folder: Path, kind: int) -> int | None:
    """A locked descriptor of the folder itself, so that no file is left; None where the file system has no locks."""
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        unlock_output(descriptor)
        raise ConfigError(
            f"output_dir: {folder} is in use by a run that is still going on; wait for its end, or choose another "
            "output_dir"
        ) from None
    except OSError:
        unlock_output(descriptor)
        return None
    return descriptor


def open_output(cfg: FullFinetuneConfig) -> None:
    """Makes the folder, clears what killed runs left, and writes config.yaml. On one rank. ConfigError, StorageError.

    The run that `overwrite_output_dir` replaces stays, out of the way, until `previous_run.drop_earlier`.
    """
    folder = Path(cfg.output_dir)
    with files.storage_faults():
        folder.mkdir(parents=True, exist_ok=True)
        _check_ours(cfg, folder)  # again, now that nobody else is in the folder
        previous_run.remove_leftovers(folder)
        previous_run.begin_record(folder)
        if cfg.overwrite_output_dir:
            previous_run.keep_earlier(folder)
        text = to_yaml(
            dataclasses.replace(cfg, overwrite_output_dir=False, resume=None)
        )  # those are of this start only
        files.replace_text(folder / CONFIG_FILE, text)


def check_same_data(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """CheckpointError unless a step means the same sequences now as in the run that saved the state at `path`."""
    if saved["seed"] != now["seed"]:
        raise CheckpointError(
            f"{path}: was saved with seed={saved['seed']}, found seed={now['seed']}; the order of the sequences "
            f"follows from it: set seed={saved['seed']}"
        )
    if saved["global_batch_size"] != now["global_batch_size"]:
        raise CheckpointError(
            f"{path}: was saved with a global batch of {saved['global_batch_size']} sequences, found "
            f"{now['global_batch_size']}; make batch_size x gradient_accumulation_steps x ranks "
            f"{saved['global_batch_size']} again"
        )
    for key, was in saved["order"].items():
        if was != now["order"][key]:
            raise CheckpointError(
                f"{path}: was saved with {key}={json.dumps(was)}, found {key}={json.dumps(now['order'][key])}; the "
                f"order of the sequences follows from it: set {key} as it was"
            )
    if saved["data"] != now["data"]:
        raise CheckpointError(
            f"{path}: was saved with other data (fingerprint {saved['data'][:12]}, found {now['data'][:12]}); resume "
            "with the data, tokenizer and max_seq_len of the saved run, or start over in another output_dir"
        )


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
