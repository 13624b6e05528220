"""The run that `overwrite_output_dir=true` replaces: its known files, where they are until then, when they go.

    output_dir/model/ adapter/   stay, until the new ones are whole and are exchanged with them
               earlier/          its states, config.yaml, metrics.jsonl, summary.json, report.html and trackers/

Both go when the new run has written its model; a run that stops, diverges or is killed before leaves them. What no run
wrote is never removed: it is refused before anything changes.
"""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from recipe_lib import files
from recipe_lib.checkpoint.run_files import (
    RECORD,
    Listing,
    OutputRecord,
    describe,
    free_names,
    is_as_listed,
    list_files,
    read_record,
    unrecorded_file,
    unrecorded_states,
    write_record,
)
from recipe_lib.checkpoint.tokenizer_out import SETTINGS_FILES, TOKENIZER_FILES
from recipe_lib.checkpoint.weight_files import INDEX
from recipe_lib.config.local_files import ADAPTER_FOLDER, BEST_FOLDER, EARLIER_FOLDER, MODEL_FOLDER, STATE_FOLDER
from recipe_lib.logs import get_logger
from recipe_lib.reading import find_object, open_regular, parse_json
from recipe_lib.training.records.metrics import METRICS_FILE, SUMMARY_FILE
from recipe_lib.training.report_page import REPORT_FILE

TRACKERS_FOLDER = "trackers"
CONFIG_FILE = "config.yaml"
PUBLISHED = (MODEL_FOLDER, ADAPTER_FOLDER)
FILES = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, REPORT_FILE)

_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")
_EXPORTED = {"config.json", "adapter_config.json", INDEX, *TOKENIZER_FILES, *SETTINGS_FILES}
_TRACKED = re.compile(r"tensorboard/events\.out\.tfevents\.[^/]+|wandb/(offline-)?run-.+|wandb/(latest-run|debug[^/]*)")
_CONFIG_KEYS = {
    "recipe",
    "model",
    "data",
    "optimizer",
    "seed",
    "dtype",
    "batch_size",
    "output_dir",
    "overwrite_output_dir",
    "resume",
}


def first_unrecorded(root: Path, *, replaced: bool) -> Path | None:
    """The first path that no run wrote among those that a run writes to.

    replaced: the earlier run is replaced; otherwise the run goes on, or finds only records of one that left nothing.
    """
    record = read_record(root)
    left = record.records if record and replaced else {}
    for name in FILES:
        is_changed = name in left and (root / name).exists() and not is_as_listed(root / name, left)
        if is_changed or not is_record(root / name):
            return root / name
    for name in PUBLISHED:
        found = unrecorded_file(root / name, _listings(root, name))
        if found is not None:
            return found
    if not replaced:
        return None
    found = unrecorded_states(root / STATE_FOLDER)
    return found if found is not None else _unrecorded_tracked(root, root / TRACKERS_FOLDER)


def is_record(path: Path) -> bool:
    """Whether nothing is there, or what a run writes under this name."""
    if path.is_symlink() or path.exists() != path.is_file():
        return False
    if not path.exists():
        return True
    try:
        with open_regular(path) as file:
            begin = file.read(2**16).decode(errors="replace")
    except OSError:  # what nobody may look at is not ours to replace
        return False
    if path.name == CONFIG_FILE:  # every key, and no comment: it was not written by hand
        return _CONFIG_KEYS <= set(re.findall(r"^(\w+):", begin, re.MULTILINE)) and "\n#" not in f"\n{begin}"
    if path.name == METRICS_FILE:
        line = _table(begin.partition("\n")[0])
        torn = "\n" not in begin and begin.startswith('{"step": ')
        return not begin or torn or {"step", "tokens_per_second"} <= line.keys()
    if path.name == SUMMARY_FILE:
        summary = find_object(path)
        return {"status", "settings", "versions"} <= summary.keys() and "tune-recipes" in summary["versions"]
    marks = ('content="tune-recipes: run"', "--c0:")  # the second: of pages that earlier versions wrote
    return begin.startswith("<!DOCTYPE html>") and any(mark in begin for mark in marks)


def _table(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _listings(root: Path, name: str) -> list[Listing]:
    """What runs have published as `root/name`; of a run that kept no record what is surely that run's."""
    record = read_record(root)
    if record is not None:
        return record.folders.get(name, [])
    return _listings_without_record(root, name)


def _listings_without_record(root: Path, name: str) -> list[Listing]:
    """Of a run that has ended well: files with names of ours, each from between its first file and its last."""
    folder, begun, ended = root / name, root / CONFIG_FILE, root / SUMMARY_FILE
    if not folder.is_dir() or not (begun.is_file() and ended.is_file() and is_record(begun) and is_record(ended)):
        return []
    if find_object(ended)["status"] != "done":
        return []
    first, last = begun.stat().st_mtime_ns, ended.stat().st_mtime_ns
    if all(
        (path.name in _EXPORTED or _WEIGHTS.fullmatch(path.name))
        and path.is_file()
        and first <= path.stat().st_mtime_ns <= last
        for path in folder.iterdir()
    ):
        return [list_files(folder)]
    return []


def _unrecorded_tracked(root: Path, folder: Path) -> Path | None:
    """The first file in `trackers/` that no tracker is known to have written."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return folder
    record = read_record(root)
    known = set(record.trackers) if record else set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (not path.is_dir() or path.is_symlink()) and name not in known and not _TRACKED.fullmatch(name):
            return path
    return None


def begin_record(root: Path) -> None:
    """Makes the record of a new output folder, or of one whose run kept none; takes out what is no longer there."""
    record = read_record(root)
    found = record.folders if record else {name: _listings_without_record(root, name) for name in PUBLISHED}
    there = {name: listings for name, listings in found.items() if listings and (root / name).exists()}
    if record is None or there != record.folders or record.records:
        write_record(root, replace(record or OutputRecord(), folders=there, records={}))


def note_written(root: Path) -> None:
    """Adds to the record what trackers have written, and how the run leaves its own files."""
    folder, record = root / TRACKERS_FOLDER, read_record(root)
    if record is None:
        return
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    record.trackers = sorted(there | set(record.trackers))
    record.records = {name: describe(root / name) for name in FILES if (root / name).is_file()}
    write_record(root, record)


def remove_leftovers(root: Path) -> None:
    """Removes what killed processes left under temporary names; a model whose exchange was cut short comes back."""
    for name in PUBLISHED:
        files.restore_replaced(root, name)
    for name in (*PUBLISHED, *FILES, RECORD, STATE_FOLDER, TRACKERS_FOLDER, f"{EARLIER_FOLDER}*"):
        files.remove_leftovers(root, name)


def keep_earlier(root: Path) -> None:
    """Makes room for a run that replaces the one in `root`, which stays until `drop_earlier`."""
    record = read_record(root) or OutputRecord()
    there = [name for name in PUBLISHED if (root / name).exists()]
    has_states = any(chain((root / STATE_FOLDER).glob("step_*"), (root / STATE_FOLDER / BEST_FOLDER).glob("step_*")))
    record.earlier = there
    if has_states or (there and not record.kept):
        folder = _folder_for(root, record)
        record.kept = [*(name for name in record.kept if name != folder.name), folder.name]
        write_record(root, record)
        if not folder.exists():
            _copy_records(root, folder)
        for name in (TRACKERS_FOLDER, STATE_FOLDER):
            if (root / name).exists():
                files.rename(root / name, folder / name)
        files.flush_folder(root)
    else:
        write_record(root, record)
    for name in (METRICS_FILE, SUMMARY_FILE, REPORT_FILE):
        files.remove_file(root / name)
    places = [str(root / name) for name in (*record.earlier, *record.kept)]
    if places:
        get_logger().info(
            "overwrite_output_dir: the earlier run stays until this one's model is complete: %s", ", ".join(places)
        )


def _folder_for(root: Path, record: OutputRecord) -> Path:
    """A new folder; or the last one, if a process ended while it moved this run there."""
    last = root / (record.kept[-1] if record.kept else EARLIER_FOLDER)
    free = not any((last / name).exists() and (root / name).exists() for name in (STATE_FOLDER, TRACKERS_FOLDER))
    if last.name in record.kept and last.is_dir() and free:
        configs = [folder / CONFIG_FILE for folder in (root, last)]
        if all(path.is_file() for path in configs) and len(set(map(files.sha256_of, configs))) == 1:
            return last
    names = chain([root / EARLIER_FOLDER], free_names(root / EARLIER_FOLDER))
    return next(path for path in names if not path.exists() and not path.is_symlink())


def _copy_records(root: Path, folder: Path) -> None:
    temporary = files.temporary_path(folder)
    files.make_folder(temporary)
    for name in FILES:
        if (root / name).is_file():
            files.copy_file(root / name, temporary / name)
    files.publish_folder(temporary, folder)


def drop_earlier(root: Path) -> None:
    """Removes the run that was replaced, once this one has written its own model or adapter. StorageError."""
    record = read_record(root)
    if record is None or not (record.earlier or record.kept):
        return
    if not set(record.folders) - set(record.earlier):
        say_kept(root)
        return
    for name in record.earlier:
        unrecorded = unrecorded_file(root / name, record.folders.get(name, []))
        if _is_ours(root / name, unrecorded) and (root / name).exists():
            files.remove_folder(root / name)
            record.folders.pop(name, None)
    for name in record.kept:
        if _is_ours(root / name, _unrecorded_kept(root, root / name)) and (root / name).exists():
            files.remove_folder(root / name)
    record.earlier, record.kept = [], [name for name in record.kept if (root / name).exists()]
    write_record(root, record)


def _unrecorded_kept(root: Path, folder: Path) -> Path | None:
    """The first path in a folder of `keep_earlier` that is not of the run."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name not in (*FILES, STATE_FOLDER, TRACKERS_FOLDER):
            return path
    found = [folder / name for name in FILES if not is_record(folder / name)]
    return (
        next(iter(found), None)
        or unrecorded_states(folder / STATE_FOLDER)
        or _unrecorded_tracked(root, folder / TRACKERS_FOLDER)
    )


def _is_ours(folder: Path, unrecorded: Path | None) -> bool:
    if unrecorded is not None:
        get_logger().warning("warning: %s stays: %s was not written by a run", folder, unrecorded)
    return unrecorded is None


def say_kept(root: Path) -> None:
    """Says where a run is that was to be replaced, and was not."""
    record = read_record(root)
    places = [str(root / name) for name in (*record.earlier, *record.kept)] if record else []
    if places:
        get_logger().info(
            "overwrite_output_dir: this run has written no model; the earlier run is still there: %s", ", ".join(places)
        )
