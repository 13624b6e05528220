"""The folders of saved states: which there are, which are removed, and those that hold the weights of a best step.

    output_dir/state/step_40/        a state to resume from; the newest `checkpoint.keep_last_n` stay
               state/best/step_25/   weights of a best step; stays while a state above, or the run itself, names it

A state's `state.json` names the best step that its run had by then. So whichever state a run goes on from, after a kill
or by `resume=PATH`, the weights of that best step are there, though a later step was better.
"""

import re
from pathlib import Path
from typing import Any

from recipe_lib import files
from recipe_lib.checkpoint.run_files import (
    MANIFEST,
    STATE_NAME,
    DamagedState,
    Manifest,
    check_presence,
    read_manifest,
    unrecorded_in_state,
)
from recipe_lib.config.local_files import BEST_FOLDER
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import get_logger
from recipe_lib.reading import describe_fault, read_object

STATE = "state.json"
BEST_RECORD = "best"  # in what a run adds to state.json
PREFIX = "step_"


def readable_states(root: Path) -> list[tuple[Path, Manifest]]:
    """Folders whose manifest reads, newest first."""
    found = []
    for path in state_folders(root):
        try:
            found.append((path, read_manifest(path)))
        except DamagedState:
            continue
    return sorted(found, key=lambda item: item[1].sequence, reverse=True)


def state_folders(root: Path) -> list[Path]:
    """Every folder with the name of a state."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if STATE_NAME.fullmatch(path.name) and path.is_dir())


def step_of(path: Path) -> int:
    """Of `step_40` and of `step_40-2`: 40."""
    return int(re.split("[_-]", path.name)[1])


def prune_states(root: Path, keep: int) -> None:
    """Removes states older than the newest `keep`, counting those with all their files, so one is always left."""
    kept = 0
    for path, _ in readable_states(root):
        try:
            if kept >= keep:
                _remove_state(path)
            else:
                check_presence(path)
                kept += 1
        except DamagedState:
            continue


def _remove_state(path: Path) -> None:
    try:
        unrecorded = unrecorded_in_state(path)
        if unrecorded is None:
            files.remove_folder(path)
        else:
            get_logger().warning("warning: %s stays: %s was not written by a run", path, unrecorded)
    except OSError as error:  # the new state is safe; an old one too many is no reason to end a run
        get_logger().warning("warning: %s could not be removed: %s", path, error.strerror)


def prune_best(root: Path, current: str | None) -> None:
    """Removes the weights of best steps that no state in `root` names, except `current`: of the run itself; and what a
    killed run left of others."""
    files.remove_leftovers(root / BEST_FOLDER, f"{PREFIX}*")
    named = {current} | {best_named_in(path) for path, _ in readable_states(root)}
    for path, _ in readable_states(root / BEST_FOLDER):
        if path.name not in named:
            _remove_state(path)


def read_state_json(state: Path) -> dict[str, Any]:
    """Return what a state's `state.json` holds. Raises CheckpointError."""
    try:
        return read_object(state / STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{state / STATE}: cannot be read: {describe_fault(error)}") from error


def best_named_in(state: Path) -> str | None:
    """The folder, in `best`, of the best step that a state's run had by then; None: it kept none, or is damaged."""
    try:
        record = read_state_json(state)["extra"].get(BEST_RECORD) or {}
        name = record.get("folder")
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None
    return name if isinstance(name, str) and STATE_NAME.fullmatch(name) else None


def bring_best(state: Path, root: Path, name: str) -> str:
    """Sees to it that the weights of the best step that `state` names are in `root/best`: copied where the state is
    another run's. Returns the folder's name there. Raises CheckpointError if they are gone."""
    source, best = state.parent / BEST_FOLDER / name, root / BEST_FOLDER
    try:
        manifest = check_presence(source)
    except DamagedState as damage:
        raise CheckpointError(
            f"{state}: names {source} as the best step of its run: {damage}; resume from another state, or set "
            "checkpoint.keep_best=false"
        ) from damage
    if source.parent.resolve() == best.resolve():
        return name
    target = free_state(best, manifest.step)
    temporary = files.temporary_path(target)
    files.make_folder(temporary)
    for file in (*(record.name for record in manifest.files), MANIFEST):
        files.copy_file(source / file, temporary / file)
    files.publish_folder(temporary, target)
    return target.name


def free_state(root: Path, step: int) -> Path:
    """`root/step_40`, or `step_40-2` and so on where that is taken: a folder is never written over."""
    path, attempt = root / f"{PREFIX}{step}", 1
    while path.exists():
        attempt += 1
        path = root / f"{PREFIX}{step}-{attempt}"
    return path


def best_state(root: Path) -> Path | None:
    """The weights that a run in `root` has as its best: those that its newest state names, or without a state the
    newest; None: it keeps none."""
    states = [path for path, _ in readable_states(root)]
    if states:
        name = best_named_in(states[0])
        return None if name is None else root / BEST_FOLDER / name
    return next((path for path, _ in readable_states(root / BEST_FOLDER)), None)
