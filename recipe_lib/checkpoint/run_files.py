"""What runs have written into an output folder, so that nothing else in it is ever removed.

`written.json` lists the files of each published folder (`model`, `adapter`) with size and a hash. A
file is ours as long as it is what was written; states carry their own manifest. A new model is
written next to the old one, checked, and exchanged with it in one operation: whenever a process
ends, one of the two is there, whole.
"""

import hashlib
import itertools
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from recipe_lib import files
from recipe_lib.checkpoint.safetensors_files import read_header
from recipe_lib.config.local_files import BEST_FOLDER
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError
from recipe_lib.files import FileRecord, compute_sha256, is_plain_name, write_json
from recipe_lib.logs import get_logger
from recipe_lib.reading import describe_fault, open_regular, read_json, read_object
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

# The manifest of a saved state: what belongs to it, and how to know that it is still what was
# written.
#
# `manifest.json` lists every file with size and SHA-256, and carries a SHA-256 of its own contents.
# It is written last, so a folder without one was never finished. A state is used only once
# `check_presence` and `damaged_file` have found nothing.


MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024**2
_SEAL = "manifest_sha256"


class DamagedState(Exception):  # noqa: N818  (what was found, in one phrase; its catcher decides if it is an error)
    """Why a folder is not a state that can be used."""


@dataclass(frozen=True)
class Manifest:
    """One saved state.

    step: optimizer steps done. sequence: counts the saves of a run, so the newest is known without
    a clock. world_size: ranks that saved it. versions: torch and Python, for people.
    """

    step: int
    sequence: int
    world_size: int
    files: tuple[FileRecord, ...]
    versions: dict[str, str]


def write_manifest(
    folder: Path, step: int, sequence: int, world_size: int, files: Sequence[FileRecord]
) -> None:
    """Writes the manifest into a folder whose files are already flushed."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "sequence": sequence,
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "files": [asdict(record) for record in sorted(files, key=lambda record: record.name)],
    }
    write_json(folder / MANIFEST, fields | {_SEAL: _compute_seal(fields)})


def _compute_seal(fields: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest itself, not the files it names. Raises DamagedState."""
    path = folder / MANIFEST
    try:
        fields = read_json(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise DamagedState(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise DamagedState(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedState(f"{MANIFEST} is not JSON") from error
    if not isinstance(fields, dict):
        raise DamagedState(f"{MANIFEST} is not a JSON object")
    version = fields.get("format")
    if type(version) is int and version > FORMAT:
        raise DamagedState(f"{MANIFEST} has format {version}, this release reads up to {FORMAT}")
    if fields.pop(_SEAL, None) != _compute_seal(fields):
        raise DamagedState(f"{MANIFEST} does not match its own checksum")
    return _parse_manifest(fields)


def _parse_manifest(fields: dict[str, Any]) -> Manifest:
    if not isinstance(fields.get("files"), list):
        raise DamagedState(f"{MANIFEST} lists no files")
    try:
        manifest = Manifest(
            step=fields["step"],
            sequence=fields["sequence"],
            world_size=fields["world_size"],
            files=tuple(
                FileRecord(file["name"], file["size"], file["sha256"]) for file in fields["files"]
            ),
            versions=fields["versions"],
        )
    except (KeyError, TypeError) as error:
        raise DamagedState(f"{MANIFEST} lacks a field: {error}") from error
    counts = (
        manifest.step,
        manifest.sequence,
        manifest.world_size,
        *(record.size for record in manifest.files),
    )
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise DamagedState(f"{MANIFEST} holds an invalid count")
    for record in manifest.files:
        if not is_plain_name(record.name):
            raise DamagedState(
                f"{MANIFEST} names {str(record.name)[:80]!r}, which is not a plain file name"
            )
    return manifest


def check_presence(folder: Path) -> Manifest:
    """The manifest, if every file it names is there with its length. Raises DamagedState. Reads no
    file.
    """
    manifest = read_manifest(folder)
    for record in manifest.files:
        path = folder / record.name
        if not os.path.isfile(path):
            raise DamagedState(f"{show(record.name)} is missing")
        if path.stat().st_size != record.size:
            raise DamagedState(
                f"{record.name} has {path.stat().st_size} bytes, its manifest says {record.size}"
            )
    return manifest


def find_damaged_file(folder: Path, manifest: Manifest, part: int, parts: int) -> str | None:
    """Reads this part's share of the files and says which one differs from its hash, or None.

    part, parts: files are dealt out in descending size, so that ranks hash about equally many
    bytes.
    """
    own = sorted(manifest.files, key=lambda record: (-record.size, record.name))[part::parts]
    with phase(f"checking {folder.name}", sum(record.size for record in own), "bytes") as going:
        for record in own:
            try:
                found = compute_sha256(folder / record.name)
            except OSError as error:
                return f"{record.name} cannot be read: {error.strerror}"
            if found != record.sha256:
                return (
                    f"{record.name} has changed since it was written (SHA-256 differs from the"
                    " manifest)"
                )
            going.advance(record.size)
    return None


RECORD = "written.json"
FORMAT = 1
STATE_NAME = re.compile(r"step_\d+(-\d+)?")
_STATE_FILE = re.compile(
    r"shard-\d+-of-\d+\.safetensors|rng-\d+\.safetensors|state\.json|manifest\.json"
)
_MAX_RECORD_BYTES = 64 * MIB
_WHOLE_BYTES, _BLOCKS, _BLOCK_BYTES = 4 * MIB, 64, 2**16

Listing = dict[str, str]  # file name -> "size:hash"


@dataclass
class OutputRecord:
    """What is in an output folder.

    folders: name -> listings of what was published under it, one of which it holds (two only around
    an exchange). earlier: those of them that are of a run which another one replaces. kept: folders
    with that run's states and records. trackers: files that trackers have written, from
    `trackers/`. records: config.yaml, metrics.jsonl and their like as the run left them when it
    ended; empty while one goes on.
    """

    folders: dict[str, list[Listing]] = field(default_factory=dict)
    earlier: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    trackers: list[str] = field(default_factory=list)
    records: Listing = field(default_factory=dict)


def read_record(root: Path) -> OutputRecord | None:
    """The record of an output folder; an empty one if it cannot be used (then nothing is ours),
    None without one.
    """
    path = root / RECORD
    if not path.is_file():
        return None
    try:
        fields = read_object(path, _MAX_RECORD_BYTES)
        fields.setdefault("records", {})  # of a run of an earlier version
        record = OutputRecord(**{name: fields[name] for name in OutputRecord.__dataclass_fields__})
        listings = [listing for listings in record.folders.values() for listing in listings]
        listings.append(record.records)
        names = [
            *record.folders,
            *record.earlier,
            *record.kept,
            *(name for listing in listings for name in listing),
        ]
        if all(isinstance(text, str) for text in (*names, *record.trackers)) and all(
            map(files.is_plain_name, names)
        ):
            return record
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return OutputRecord()


def write_record(root: Path, record: OutputRecord) -> None:
    """Replaces the record. StorageError."""
    text = json.dumps({"format": FORMAT, **asdict(record)}, indent=1, ensure_ascii=False)
    files.replace_text(root / RECORD, text + "\n")


def describe_file(path: Path) -> str:
    """Size and SHA-256 of a file; of one above 4 MiB that of 64 blocks of 64 KiB, spread evenly
    over it.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        if size <= _WHOLE_BYTES:
            return f"{size}:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        hashed = hashlib.sha256()
        for block in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            hashed.update(file.read(_BLOCK_BYTES))
    return f"{size}:{_BLOCKS}x{_BLOCK_BYTES}:{hashed.hexdigest()}"


def find_unlisted_file(folder: Path, listings: list[Listing]) -> Path | None:
    """The first file in a folder that is not as one of the listings has it; the folder itself, if
    it is a link.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder if folder.is_symlink() or folder.exists() else None
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            return path
        if not any(is_as_listed(path, listing) for listing in listings):
            return path
    return None


def is_as_listed(path: Path, listing: Listing) -> bool:
    """Return whether a file is what a listing has under its name; one that cannot be read is
    not.
    """
    try:
        return path.name in listing and describe_file(path) == listing[path.name]
    except OSError:
        return False


def find_unrecorded_file(root: Path, name: str) -> Path | None:
    """The first file of the published folder `root/name` that no run wrote, or that was changed
    since.
    """
    record = read_record(root)
    return find_unlisted_file(root / name, record.folders.get(name, []) if record else [])


def find_unrecorded_in_states(states: Path) -> Path | None:
    """The first file in a folder of states that is none of theirs."""
    if states.is_symlink() or (states.exists() and not states.is_dir()):
        return states
    for path in sorted(states.iterdir()) if states.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            return path
        if files.is_temporary(path, "step_*"):
            continue
        if path.name == BEST_FOLDER:
            found = find_unrecorded_in_states(path)
        else:
            found = find_unrecorded_in_state(path) if STATE_NAME.fullmatch(path.name) else path
        if found is not None:
            return found
    return None


def find_unrecorded_in_state(state: Path) -> Path | None:
    """The first file of a state that its manifest does not name; without one that can be read, by
    the names alone.
    """
    try:
        named = {MANIFEST, *(record.name for record in read_manifest(state).files)}
    except DamagedState:
        named = {path.name for path in state.iterdir() if _STATE_FILE.fullmatch(path.name)}
    for path in sorted(state.iterdir()):
        if path.name not in named or path.is_symlink() or not path.is_file():
            return path
    return None


def publish(temporary: Path, final: Path) -> None:
    """Gives a finished temporary folder its name; what runs have published under it goes
    afterwards.

    Where the name is taken by anything else the new folder gets the next free one. CheckpointError
    then: which one. The output folder's record knows what runs have published; a folder without a
    record knows nothing.
    """
    for path in temporary.glob("*.safetensors"):
        read_header(path)  # what ranks have written elsewhere is seen, whole, from here
    files.flush_folder(temporary)
    root = final.parent
    name = final.name
    new = {path.name: describe_file(path) for path in sorted(temporary.iterdir())}
    files.restore_replaced(root, name)
    files.remove_leftovers(root, RECORD)
    taken = final.exists() or final.is_symlink()
    unrecorded = find_unrecorded_file(root, name) if taken else None
    if unrecorded is not None:
        free = find_free(final)
        files.rename(temporary, free)
        raise CheckpointError(
            f"{unrecorded}: was not written by a run, and stays; what was to replace it is {free}"
        )
    record = read_record(root)
    former = record.folders.get(name, []) if record and taken else []
    if (
        record is not None
    ):  # before the exchange, so that the folder is known as ours on both sides of it
        record.folders[name] = [new, *(listing for listing in former if listing != new)]
        write_record(root, record)
    if taken:
        _remove_replaced(files.exchange_folders(temporary, final), former, final)
    else:
        files.rename(temporary, final)
    if record is not None:
        record.folders[name] = [new]
        record.earlier = [folder for folder in record.earlier if folder != name]
        write_record(root, record)


def _remove_replaced(old: Path, listings: list[Listing], final: Path) -> None:
    """Removes what was exchanged, unless something came into it at the last moment."""
    if find_unlisted_file(old, listings) is None:
        files.remove_temporary(old)
        return
    kept = find_free(final)
    files.rename(old, kept)
    get_logger().warning("warning: %s holds files that no run wrote; it is now %s", final, kept)


def find_free(path: Path) -> Path:
    """Return the path, or `PATH-2`, `PATH-3` and so on where that is taken: a folder is never
    written over.
    """
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not os.path.lexists(free))


# The folders of saved states: which there are, which are removed, and those that hold the weights
# of a best step.
#
#   output_dir/state/step_40/       a state to resume from; the newest `checkpoint.keep_last_n` stay
#              state/best/step_25/  weights of a best step; stays while a state or the run names it
#
# A state's `state.json` names the best step that its run had by then. So whichever state a run goes
# on from, after a kill or by `resume=PATH`, the weights of that best step are there, though a later
# step was better.


STATE = "state.json"
BEST_RECORD = "best"  # in what a run adds to state.json
PREFIX = "step_"


def list_readable_states(root: Path) -> list[tuple[Path, Manifest]]:
    """Folders whose manifest reads, newest first."""
    found = []
    for path in list_state_folders(root):
        try:
            found.append((path, read_manifest(path)))
        except DamagedState:
            continue
    return sorted(found, key=lambda item: item[1].sequence, reverse=True)


def list_state_folders(root: Path) -> list[Path]:
    """Every folder with the name of a state."""
    return sorted(
        path
        for path in root.glob(f"{PREFIX}*")
        if STATE_NAME.fullmatch(path.name) and path.is_dir()
    )


def parse_step(path: Path) -> int:
    """Of `step_40` and of `step_40-2`: 40."""
    return int(re.split("[_-]", path.name)[1])


def prune_states(root: Path, keep: int) -> None:
    """Removes states older than the newest `keep`, counting those with all their files, so one is
    always left.
    """
    kept = 0
    for path, _ in list_readable_states(root):
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
        unrecorded = find_unrecorded_in_state(path)
        if unrecorded is None:
            files.remove_folder(path)
        else:
            get_logger().warning("warning: %s stays: %s was not written by a run", path, unrecorded)
    except OSError as error:  # the new state is safe; an old one too many is no reason to end a run
        get_logger().warning("warning: %s could not be removed: %s", path, error.strerror)


def prune_best(root: Path, current: str | None) -> None:
    """Removes the weights of best steps that no state in `root` names, except `current`: of the run
    itself; and what a killed run left of others.
    """
    files.remove_leftovers(root / BEST_FOLDER, f"{PREFIX}*")
    named = {current} | {read_best_name(path) for path, _ in list_readable_states(root)}
    for path, _ in list_readable_states(root / BEST_FOLDER):
        if path.name not in named:
            _remove_state(path)


def read_state_json(state: Path) -> dict[str, Any]:
    """Return what a state's `state.json` holds. Raises CheckpointError."""
    try:
        return read_object(state / STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{state / STATE}: cannot be read: {describe_fault(error)}"
        ) from error


def read_best_name(state: Path) -> str | None:
    """The folder, in `best`, of the best step that a state's run had by then; None: it kept none,
    or is damaged.
    """
    try:
        record = read_state_json(state)["extra"].get(BEST_RECORD) or {}
        name = record.get("folder")
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None
    return name if isinstance(name, str) and STATE_NAME.fullmatch(name) else None


def copy_best_state(state: Path, root: Path, name: str) -> str:
    """Sees to it that the weights of the best step that `state` names are in `root/best`: copied
    where the state is another run's. Returns the folder's name there. Raises CheckpointError if
    they are gone.
    """
    source, best = state.parent / BEST_FOLDER / name, root / BEST_FOLDER
    try:
        manifest = check_presence(source)
    except DamagedState as damage:
        raise CheckpointError(
            f"{state}: names {source} as the best step of its run: {damage}; resume from another"
            " state, or set checkpoint.keep_best=false"
        ) from damage
    if source.parent.resolve() == best.resolve():
        return name
    target = find_free(best / f"{PREFIX}{manifest.step}")
    temporary = files.make_temporary_path(target)
    files.make_folder(temporary)
    for file in (*(record.name for record in manifest.files), MANIFEST):
        files.copy_file(source / file, temporary / file)
    files.publish_folder(temporary, target)
    return target.name


def find_best_state(root: Path) -> Path | None:
    """The weights that a run in `root` has as its best: those that its newest state names, or
    without a state the newest; None: it keeps none.
    """
    states = [path for path, _ in list_readable_states(root)]
    if states:
        name = read_best_name(states[0])
        return None if name is None else root / BEST_FOLDER / name
    return next((path for path, _ in list_readable_states(root / BEST_FOLDER)), None)
