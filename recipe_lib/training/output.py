"""Check, lock and open the output folder of a run, and keep the run that it replaces until the end.

`prepare_data` calls `check_output`; `RunLog` calls `lock_output` and `open_output` when the steps
begin, and `drop_earlier` or `log_kept_run` when the run is over. Published folders (model, adapter)
are those that a run ends with.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from recipe_lib import files
from recipe_lib.checkpoint.run_files import (
    RECORD,
    OutputRecord,
    describe_file,
    find_free,
    find_unlisted_file,
    find_unrecorded_file,
    find_unrecorded_in_states,
    is_as_listed,
    read_record,
    write_record,
)
from recipe_lib.config import FullFinetuneConfig, list_loaded_plugins
from recipe_lib.config.describe import format_config
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.load import check_no_secrets
from recipe_lib.config.local_files import (
    ADAPTER_FOLDER,
    BEST_FOLDER,
    CONFIG_FILE,
    EARLIER_FOLDER,
    MODEL_FOLDER,
    STATE_FOLDER,
    check_earlier_run,
    check_folder,
)
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.logs import get_logger
from recipe_lib.reading import find_object, open_regular
from recipe_lib.training.records import METRICS_FILE, REPORT_FILE, SUMMARY_FILE, parse_object

# output_dir/config.yaml    every value that was used     metrics.jsonl   one JSON object a step
#            state/step_N/  to resume from                summary.json    how the run ended
#            model/         the Hugging Face folder       report.html     the curves
#            adapter/       PEFT's layout, where adapters were trained
#            trackers/      files that trackers write
#            written.json   the record: what a run has written, and it or a later one may replace
#            earlier/       what is left of a run that is replaced, until the model is complete

TRACKERS_FOLDER = "trackers"
PUBLISHED = (MODEL_FOLDER, ADAPTER_FOLDER)  # folders that a run ends with
# Files at the top of output_dir, besides written.json
FILES = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, REPORT_FILE)

# Paths in `trackers/` of files that trackers write. They tell the files of a run that was killed
# before it recorded them from files of the user.
_TRACKER_FILES = re.compile(
    r"tensorboard/events\.out\.tfevents\.[^/]+|wandb/(offline-)?run-.+|wandb/(latest-run|debug[^/]*)"
)
# Keys that every config.yaml has which a run wrote
_CONFIG_KEYS = {
    "recipe", "model", "data", "optimizer", "seed", "dtype", "batch_size", "output_dir",
    "overwrite_output_dir", "resume",
}  # fmt: skip
_NOT_READ = ("output_dir", "resume", "data.cache_dir")  # path keys that are no inputs of a run


def check_output(cfg: FullFinetuneConfig) -> None:
    """Raise ConfigError if this run may not use output_dir. Writes nothing.

    It may not use one with an earlier run, unless that is resumed or replaced, nor one in which it
    would replace its own inputs or files that no run wrote.
    """
    check_no_secrets(cfg)  # config.yaml will hold every value as it is
    folder = Path(cfg.output_dir)
    check_folder(folder)
    if not folder.is_dir():
        return
    unlock_output(_lock_folder(folder, fcntl.LOCK_SH))
    check_inputs(cfg)
    check_earlier_run(cfg)
    _check_ours(cfg, folder)


def _check_ours(cfg: FullFinetuneConfig, folder: Path) -> None:
    """Raise ConfigError if the run would replace a file that no run wrote."""
    unrecorded = find_unrecorded(folder, replaced=cfg.overwrite_output_dir)
    if unrecorded is not None:
        raise ConfigError(
            f"output_dir: {unrecorded} is not, or no longer, what a run wrote, and would be"
            " replaced; move it away, or choose another output_dir"
        )


def lock_output(cfg: FullFinetuneConfig) -> int | None:
    """Make the folder and lock it, until `unlock_output` or the end of this process.

    Return the descriptor that holds the lock; None where the file system has no locks. Raise
    ConfigError if another run is in the folder, and StorageError if the folder cannot be made.
    """
    folder = Path(cfg.output_dir)
    with files.report_storage_faults():
        folder.mkdir(parents=True, exist_ok=True)
    return _lock_folder(folder, fcntl.LOCK_EX)


def unlock_output(lock: int | None) -> None:
    """Release the lock of `lock_output`; None: there is none."""
    if lock is not None:
        os.close(lock)


def _lock_folder(folder: Path, kind: int) -> int | None:
    """Return a locked descriptor of the folder; None where the file system has no locks.

    kind: fcntl.LOCK_EX or LOCK_SH. Raise ConfigError if another run holds a lock that excludes it.
    """
    # The folder itself is locked, so that no lock file is left.
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        unlock_output(descriptor)
        raise ConfigError(
            f"output_dir: {folder} is in use by a run that is still going on; wait for its end, or"
            " choose another output_dir"
        ) from None
    except OSError:
        unlock_output(descriptor)
        return None
    return descriptor


def open_output(cfg: FullFinetuneConfig) -> None:
    """Make the folder, clear what killed runs left, and write config.yaml. Called on one rank.

    The run that `overwrite_output_dir` replaces is moved aside until `drop_earlier`. Raise
    ConfigError if a file would be replaced that no run wrote, and StorageError if the disk refuses.
    """
    folder = Path(cfg.output_dir)
    with files.report_storage_faults():
        folder.mkdir(parents=True, exist_ok=True)
        _check_ours(cfg, folder)  # again, now that the lock keeps others out of the folder
        remove_leftovers(folder)
        begin_record(folder)
        if cfg.overwrite_output_dir:
            keep_earlier(folder)
        # These two keys are about this start, not about the run.
        written = replace(cfg, overwrite_output_dir=False, resume=None)
        files.replace_text(folder / CONFIG_FILE, format_config(written))


def check_same_data(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless steps take the same sequences as in the run of a saved state.

    saved, now: `TrainingData.identity` of that run and of this one. path: the state's folder.
    """
    if saved["global_batch_size"] != now["global_batch_size"]:
        raise CheckpointError(
            f"{path}: was saved with a global batch of {saved['global_batch_size']} sequences,"
            f" found {now['global_batch_size']}; make batch_size x gradient_accumulation_steps x"
            f" ranks {saved['global_batch_size']} again"
        )
    settings = {"seed": now["seed"]} | now["order"]
    for key, was in ({"seed": saved["seed"]} | saved["order"]).items():
        if was != settings[key]:
            raise CheckpointError(
                f"{path}: was saved with {key}={json.dumps(was)}, found"
                f" {key}={json.dumps(settings[key])}; the order of the sequences follows from it:"
                f" set {key}={json.dumps(was)}"
            )
    if saved["data"] != now["data"]:
        raise CheckpointError(
            f"{path}: was saved with other data (fingerprint {saved['data'][:12]}, found"
            f" {now['data'][:12]}); resume with the data, tokenizer and max_seq_len of the saved"
            " run, or start over in another output_dir"
        )


def check_inputs(cfg: FullFinetuneConfig) -> None:
    """Raise ConfigError if an input of the run lies in a part of output_dir that runs replace.

    Links are followed, and relative paths resolved.
    """
    root = Path(cfg.output_dir).resolve()
    names = (
        *PUBLISHED,
        STATE_FOLDER,
        TRACKERS_FOLDER,
        *FILES,
        *(path.name for path in root.glob(f"{EARLIER_FOLDER}*")),
    )
    replaced_paths = [root / name for name in names if (root / name).exists()]
    replaced_paths += [path.resolve() for path in replaced_paths]
    for key, text in list_input_paths(cfg):
        for read_path in _resolve_links(key, os.path.expanduser(text)):
            for path in replaced_paths:
                if path in (read_path, *read_path.parents):
                    raise ConfigError(
                        f"{key}: {show(text)} is read from {path}, which a run in this output_dir"
                        " replaces; copy it elsewhere, or choose another output_dir"
                    )


def list_input_paths(cfg: FullFinetuneConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of all paths that a run reads, each path as the config has it."""
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    for name, key in read_schema(config_class).keys.items():
        value: Any = attrgetter(name)(cfg)
        if key.section_class is not None:
            item_keys = read_schema(key.section_class).keys.items()
            path_names = [item_name for item_name, item in item_keys if item.limits.get("path")]
            for number, section in enumerate(value):
                for path_name in path_names:
                    yield f"{name}[{number}].{path_name}", str(getattr(section, path_name))
        # A preset is a name, or the path of a config.json.
        elif name not in _NOT_READ and value and (key.limits.get("path") or name == "model.preset"):
            yield name, str(value)
    yield from (("--plugin", str(path)) for path in list_loaded_plugins())


def _resolve_links(key: str, path: str) -> Iterator[Path]:
    """Yield what a path leads to: the resolved file or folder, and the targets of links in it.

    key: of the path in the config. Of a folder of data all files are yielded as well.
    """
    yield Path(os.path.realpath(path))
    if os.path.isdir(path):
        is_data = key.startswith(("data.", "validation."))
        with suppress(OSError):  # the code that reads the folder will report the error
            for entry in os.scandir(path):
                if entry.is_symlink() or (is_data and entry.is_file()):
                    yield Path(os.path.realpath(entry.path))


# Where the run that `overwrite_output_dir=true` replaces is kept while the new one trains:
#
#     output_dir/model/ adapter/   stay, until the new ones are complete and are exchanged with them
#                earlier/          its states, config.yaml, metrics.jsonl, summary.json,
#                                  report.html and trackers/
#
# Both are removed when the new run has written its model. A run that stops, diverges or is killed
# before leaves them. Files that no run wrote are never removed: the new run is refused before
# anything changes.


def find_unrecorded(root: Path, *, replaced: bool) -> Path | None:
    """Return the first path that a run would write to and that no run wrote; None: there is none.

    root: the output folder. replaced: True: the new run replaces an earlier one. Otherwise it
    resumes one, or finds only records of a run that left no state and no model.
    """
    record = read_record(root)
    # Name -> size and hash of the files of `FILES`, as the earlier run left them.
    listing = record.records if record and replaced else {}
    for path in (root / name for name in FILES):
        is_changed = path.name in listing and path.exists() and not is_as_listed(path, listing)
        if is_changed or not is_record(path):
            return path
    unrecorded = next(filter(None, (find_unrecorded_file(root, name) for name in PUBLISHED)), None)
    if unrecorded is not None or not replaced:
        return unrecorded
    return find_unrecorded_in_states(root / STATE_FOLDER) or _find_unrecorded_tracker_file(
        root, root / TRACKERS_FOLDER
    )


def is_record(path: Path) -> bool:
    """Return True if nothing is at the path, or a file such as runs write under its name.

    path: of a name in `FILES`. The content decides: the run may have been killed before it
    recorded what it had written.
    """
    if path.is_symlink() or path.exists() != path.is_file():
        return False
    if not path.exists():
        return True
    try:
        with open_regular(path) as file:
            begin = file.read(2**16).decode(errors="replace")
    except OSError:  # a file that we may not read is not ours to replace
        return False
    if path.name == CONFIG_FILE:  # every key, and no comment: it was not written by hand
        return (
            _CONFIG_KEYS <= set(re.findall(r"^(\w+):", begin, re.MULTILINE))
            and "\n#" not in f"\n{begin}"
        )
    if path.name == METRICS_FILE:
        is_torn = "\n" not in begin and begin.startswith('{"step": ')
        return (
            not begin
            or is_torn
            or {"step", "tokens_per_second"} <= parse_object(begin.partition("\n")[0]).keys()
        )
    if path.name == SUMMARY_FILE:
        summary = find_object(path)
        return (
            {"status", "settings"} <= summary.keys()
            and isinstance(summary.get("versions"), dict)
            and "tune-recipes" in summary["versions"]
        )
    # Pages that earlier versions wrote have only the second mark.
    has_mark = 'content="tune-recipes: run"' in begin or "--c0:" in begin
    return begin.startswith("<!DOCTYPE html>") and has_mark


def _find_unrecorded_tracker_file(root: Path, folder: Path) -> Path | None:
    """Return the first file in `trackers/` that no tracker is known to have written.

    None: there is none. root: the output folder. folder: its `trackers/`, or an earlier run's.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return folder
    record = read_record(root)
    known = set(record.trackers) if record else set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (
            (not path.is_dir() or path.is_symlink())
            and name not in known
            and not _TRACKER_FILES.fullmatch(name)
        ):
            return path
    return None


def begin_record(root: Path) -> None:
    """Write the record (written.json) of a new output folder, or update that of an old one.

    Folders that no longer exist are dropped from it, and so are the contents of the run's files,
    which this run will change.
    """
    old = read_record(root)
    record = old or OutputRecord()
    folders = {
        name: listings
        for name, listings in record.folders.items()
        if listings and (root / name).exists()
    }
    new = replace(record, folders=folders, records={})
    if new != old:
        write_record(root, new)


def record_written_files(root: Path) -> None:
    """Record the files that trackers have written, and the final contents of the run's own."""
    record = read_record(root)
    if record is None:
        return
    folder = root / TRACKERS_FOLDER
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    record.trackers = sorted(names | set(record.trackers))
    record.records = {name: describe_file(root / name) for name in FILES if (root / name).is_file()}
    write_record(root, record)


def remove_leftovers(root: Path) -> None:
    """Remove temporary files of killed processes.

    A model that was moved away to be replaced, and was not, is put back first.
    """
    for name in PUBLISHED:
        files.restore_replaced(root, name)
    for name in (*PUBLISHED, *FILES, RECORD, STATE_FOLDER, TRACKERS_FOLDER, f"{EARLIER_FOLDER}*"):
        files.remove_leftovers(root, name)


def keep_earlier(root: Path) -> None:
    """Move the run in `root` aside for one that replaces it, until `drop_earlier`."""
    record = read_record(root) or OutputRecord()
    record.earlier = [name for name in PUBLISHED if (root / name).exists()]
    states = root / STATE_FOLDER
    has_states = any(chain(states.glob("step_*"), (states / BEST_FOLDER).glob("step_*")))
    if has_states or (record.earlier and not record.kept):
        folder = find_free(root / EARLIER_FOLDER)
        record.kept = [*(name for name in record.kept if name != folder.name), folder.name]
        # The record is written first: if the process is killed here, the folder is in the record.
        write_record(root, record)
        _copy_records(root, folder)
        for name in (TRACKERS_FOLDER, STATE_FOLDER):
            if (root / name).exists():
                files.rename(root / name, folder / name)
        files.flush_folder(root)
    else:
        write_record(root, record)
    for name in (METRICS_FILE, SUMMARY_FILE, REPORT_FILE):
        files.remove_file(root / name)
    _log_earlier_run(root, record, "the earlier run stays until this one's model is complete")


def _copy_records(root: Path, folder: Path) -> None:
    """Copy the files of `FILES` from the output folder to a new folder.

    They are copied under a temporary name first, so that `folder` has all or does not exist.
    """
    temporary = files.make_temporary_path(folder)
    files.make_folder(temporary)
    for name in FILES:
        if (root / name).is_file():
            files.copy_file(root / name, temporary / name)
    files.publish_folder(temporary, folder)


def drop_earlier(root: Path) -> None:
    """Remove the run that was replaced, once this one has written its own model or adapter.

    Otherwise log where the earlier run is. Raise StorageError if the disk refuses.
    """
    record = read_record(root)
    if record is None or not (record.earlier or record.kept):
        return
    if not set(record.folders) - set(record.earlier):
        log_kept_run(root)
        return
    for name in record.earlier:
        unrecorded = find_unlisted_file(root / name, record.folders.get(name, []))
        if _remove_unless(unrecorded, root / name):
            record.folders.pop(name, None)
    for name in record.kept:
        _remove_unless(_find_unrecorded_earlier(root, root / name), root / name)
    record.earlier = []
    record.kept = [name for name in record.kept if (root / name).exists()]
    write_record(root, record)


def _find_unrecorded_earlier(root: Path, folder: Path) -> Path | None:
    """Return the first path in a folder of `keep_earlier` that no run wrote; None: there is none.

    root: the output folder that it lies in.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name not in (*FILES, STATE_FOLDER, TRACKERS_FOLDER):
            return path
    return (
        next((folder / name for name in FILES if not is_record(folder / name)), None)
        or find_unrecorded_in_states(folder / STATE_FOLDER)
        or _find_unrecorded_tracker_file(root, folder / TRACKERS_FOLDER)
    )


def _remove_unless(unrecorded: Path | None, folder: Path) -> bool:
    """Remove a folder, and return True if it was removed.

    unrecorded: a path in it that no run wrote, because of which it stays; None: there is none.
    """
    if unrecorded is not None:
        get_logger().warning("warning: %s stays: %s was not written by a run", folder, unrecorded)
        return False
    if not folder.exists():
        return False
    files.remove_folder(folder)
    return True


def log_kept_run(root: Path) -> None:
    """Log where the earlier run is that this one was to replace and has not."""
    record = read_record(root) or OutputRecord()
    _log_earlier_run(root, record, "this run has written no model; the earlier run is still there")


def _log_earlier_run(root: Path, record: OutputRecord, sentence: str) -> None:
    paths = [str(root / name) for name in (*record.earlier, *record.kept)]
    if paths:
        get_logger().info("overwrite_output_dir: %s: %s", sentence, ", ".join(paths))
