"""Record what runs have written into an output folder, so that nothing else in it is ever removed.

`publish` gives an export's folder (`model`, `adapter`) its name and lists its files, with size and
hash, in the folder's record `written.json`. A file is ours as long as it is as listed. A state is a
folder to resume from, `state/step_40`, or with the weights of a best step, `state/best/step_25`;
its `manifest.json` lists its files. Runs call this through `training.output` and `resumable_state`.
"""

import hashlib
import itertools
import json
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from recipe_lib import files
from recipe_lib.checkpoint.safetensors_files import read_header
from recipe_lib.config.local_files import BEST_FOLDER, STATE_MANIFEST
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import get_logger
from recipe_lib.reading import describe_fault, open_regular, read_json, read_object
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

FORMAT = 1  # version of the format of manifests and of the record
MAX_MANIFEST_BYTES = 16 * 1024**2  # the largest that is read
_SEAL = "manifest_sha256"  # key of a SHA-256 of the manifest's own contents


# Not named ...Error: the caller decides if it is one.
class DamagedState(Exception):  # noqa: N818
    """A folder is not a state that can be used; the text says why, in one phrase."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a state's manifest.json."""

    # Optimizer steps done.
    step: int
    # Counts the saves of a run, so that the newest is known without a clock.
    sequence: int
    # Number of ranks that saved it.
    world_size: int
    # Name, size and SHA-256 of each other file of the state.
    files: tuple[files.FileRecord, ...]
    # Package -> version, of torch and Python, for people.
    versions: dict[str, str]


def write_manifest(
    folder: Path, step: int, sequence: int, world_size: int, records: Sequence[files.FileRecord]
) -> None:
    """Write the manifest into a folder whose files are already flushed.

    step, sequence, world_size: as of `Manifest`. records: of the folder's files.
    """
    fields: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "sequence": sequence,
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "files": [asdict(record) for record in sorted(records, key=lambda record: record.name)],
    }
    files.write_json(folder / STATE_MANIFEST, fields | {_SEAL: _compute_seal(fields)})


def _compute_seal(fields: dict[str, Any]) -> str:
    # Sorted, so that the seal depends on the contents and not on the order of keys in the file.
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest itself, not the files it names.

    Raises DamagedState if it is missing, cannot be read, or is not what `write_manifest` wrote.
    """
    path = folder / STATE_MANIFEST
    try:
        fields = read_json(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise DamagedState(f"{STATE_MANIFEST} is missing") from error
    except OSError as error:
        raise DamagedState(f"{STATE_MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedState(f"{STATE_MANIFEST} is not JSON") from error
    if not isinstance(fields, dict):
        raise DamagedState(f"{STATE_MANIFEST} is not a JSON object")
    version = fields.get("format")
    # Before the seal, which a later format may compute in another way.
    if type(version) is int and version > FORMAT:
        raise DamagedState(
            f"{STATE_MANIFEST} has format {version}, this release reads up to {FORMAT}"
        )
    if fields.pop(_SEAL, None) != _compute_seal(fields):
        raise DamagedState(f"{STATE_MANIFEST} does not match its own checksum")
    return _parse_manifest(fields)


def _parse_manifest(fields: dict[str, Any]) -> Manifest:
    if not isinstance(fields.get("files"), list):
        raise DamagedState(f"{STATE_MANIFEST} lists no files")
    try:
        manifest = Manifest(
            step=fields["step"],
            sequence=fields["sequence"],
            world_size=fields["world_size"],
            files=tuple(
                files.FileRecord(file["name"], file["size"], file["sha256"])
                for file in fields["files"]
            ),
            versions=fields["versions"],
        )
    except (KeyError, TypeError) as error:
        raise DamagedState(f"{STATE_MANIFEST} lacks a field: {error}") from error
    counts = [manifest.step, manifest.sequence, manifest.world_size]
    counts += [record.size for record in manifest.files]
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise DamagedState(f"{STATE_MANIFEST} holds an invalid count")
    for record in manifest.files:
        # A state may come from elsewhere: no name in it may lead out of its folder.
        if not files.is_plain_name(record.name):
            raise DamagedState(
                f"{STATE_MANIFEST} names {str(record.name)[:80]!r}, which is not a plain file name"
            )
    return manifest


def check_presence(folder: Path) -> Manifest:
    """Return the manifest, if every file it names is there with its size.

    No file but the manifest is read. Raises DamagedState if one is missing, or of another size.
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
    """Return what is wrong with one of a share of a state's files; None: they have their hashes.

    part, parts: index of the share, and number of shares.
    """
    # Dealt out in descending size, so that ranks hash about equally many bytes.
    records = sorted(manifest.files, key=lambda record: (-record.size, record.name))[part::parts]
    num_bytes = sum(record.size for record in records)
    with phase(f"checking {folder.name}", num_bytes, "bytes") as progress:
        for record in records:
            try:
                sha256 = files.compute_sha256(folder / record.name)
            except OSError as error:
                return f"{record.name} cannot be read: {error.strerror}"
            if sha256 != record.sha256:
                return (
                    f"{record.name} has changed since it was written (SHA-256 differs from the"
                    " manifest)"
                )
            progress.advance(record.size)
    return None


RECORD = "written.json"
STATE_NAME = re.compile(r"step_\d+(-\d+)?")  # a state's folder
_STATE_FILE = re.compile(  # a file of a state
    r"shard-\d+-of-\d+\.safetensors|rng-\d+\.safetensors|state\.json|manifest\.json"
)
_MAX_RECORD_BYTES = 64 * MIB  # the largest that is read
# A file of more bytes is hashed by blocks: a model of 100 GB is not read whole at each publication.
_WHOLE_BYTES = 4 * MIB
_BLOCKS = 64  # number of blocks that are hashed
_BLOCK_BYTES = 2**16

Listing = dict[str, str]  # file name -> "size:hash", see `describe_file`


@dataclass
class OutputRecord:
    """The record of an output folder. The fields are the keys of `written.json`."""

    # Name of a folder -> listings of what was published under it. There are two only while
    # `publish` exchanges the folder: that of the new one, then that of the old one.
    folders: dict[str, list[Listing]] = field(default_factory=dict)
    # While a new run replaces an earlier one: names of the folders that the earlier one published.
    earlier: list[str] = field(default_factory=list)
    # Names of the folders to which the earlier run's states and records were moved.
    kept: list[str] = field(default_factory=list)
    # Files that trackers have written, by their paths in `trackers/`.
    trackers: list[str] = field(default_factory=list)
    # config.yaml, metrics.jsonl and their like as the run left them; empty while one goes on.
    records: Listing = field(default_factory=dict)


def read_record(root: Path) -> OutputRecord | None:
    """Return the record of the output folder `root`; None without one.

    For a record that cannot be used, return an empty one: then nothing in the folder is ours.
    """
    path = root / RECORD
    if not path.is_file():
        return None
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        fields = read_object(path, _MAX_RECORD_BYTES)
        fields.setdefault("records", {})  # of a run of an earlier version
        record = OutputRecord(**{name: fields[name] for name in OutputRecord.__dataclass_fields__})
        listings = [*itertools.chain.from_iterable(record.folders.values()), record.records]
        names = [*record.folders, *record.earlier, *record.kept, *itertools.chain(*listings)]
        are_texts = all(isinstance(text, str) for text in (*names, *record.trackers))
        # No name may lead out of the folder: what is listed may be removed.
        if are_texts and all(map(files.is_plain_name, names)):
            return record
    return OutputRecord()


def write_record(root: Path, record: OutputRecord) -> None:
    """Replace the record. Raises StorageError if the disk refuses."""
    text = json.dumps({"format": FORMAT, **asdict(record)}, indent=1, ensure_ascii=False)
    files.replace_text(root / RECORD, text + "\n")


def describe_file(path: Path) -> str:
    """Return size and SHA-256 of a file as text, `size:hash`.

    For a file above 4 MiB it is `size:64x65536:hash`, with the hash of 64 blocks of 64 KiB that are
    spread evenly over it.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        if size <= _WHOLE_BYTES:
            return f"{size}:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        for block in range(_BLOCKS):
            # The first block begins with the file, the last one ends with it.
            file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return f"{size}:{_BLOCKS}x{_BLOCK_BYTES}:{digest.hexdigest()}"


def find_unlisted_file(folder: Path, listings: list[Listing]) -> Path | None:
    """Return the first file in a folder that is not as one of the listings has it, or None.

    Return the folder itself if it is a link or a file.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder if folder.is_symlink() or folder.exists() else None
    for path in sorted(folder.iterdir()):
        is_plain = path.is_file() and not path.is_symlink()
        if not (is_plain and any(is_as_listed(path, listing) for listing in listings)):
            return path
    return None


def is_as_listed(path: Path, listing: Listing) -> bool:
    """Return True if a file can be read and is what a listing has under its name."""
    try:
        return path.name in listing and describe_file(path) == listing[path.name]
    except OSError:
        return False


def find_unrecorded_file(root: Path, name: str) -> Path | None:
    """Return the first file of the published folder `root/name` that no run wrote, or None.

    A file that was changed since counts as such.
    """
    record = read_record(root)
    return find_unlisted_file(root / name, record.folders.get(name, []) if record else [])


def find_unrecorded_in_states(states: Path) -> Path | None:
    """Return the first file in a folder of states that no run wrote as part of a state, or None.

    What a killed run has left under temporary names does not count.
    """
    if states.is_symlink() or (states.exists() and not states.is_dir()):
        return states
    for path in sorted(states.iterdir()) if states.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            return path
        if files.is_temporary(path, f"{PREFIX}*"):  # what a killed run has left
            continue
        unrecorded: Path | None = path
        if path.name == BEST_FOLDER:
            unrecorded = find_unrecorded_in_states(path)
        elif STATE_NAME.fullmatch(path.name):
            unrecorded = find_unrecorded_in_state(path)
        if unrecorded is not None:
            return unrecorded
    return None


def find_unrecorded_in_state(state: Path) -> Path | None:
    """Return the first file in a state's folder that its manifest does not name, or None.

    Without a readable manifest, return the first whose name no file of a state has.
    """
    try:
        names = {record.name for record in read_manifest(state).files} | {STATE_MANIFEST}
    except DamagedState:
        names = {path.name for path in state.iterdir() if _STATE_FILE.fullmatch(path.name)}
    unrecorded = (
        path
        for path in sorted(state.iterdir())
        if path.name not in names or path.is_symlink() or not path.is_file()
    )
    return next(unrecorded, None)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished temporary folder its name, and remove what runs have published under it.

    An old folder and the new one are exchanged in one operation: whenever a process ends, one of
    the two is there, whole. The output folder's record says what runs have published; without a
    record every file counts as foreign. Raises CheckpointError if the name is taken by foreign
    files: they stay, and the new folder gets the next free name, which the error tells.

    temporary: beside `final`. final: `output_dir/model` or the like.
    """
    for path in temporary.glob("*.safetensors"):
        # Other ranks may have written it: this process must see it, and see it whole.
        read_header(path)
    files.flush_folder(temporary)
    root = final.parent
    name = final.name
    new_listing = {path.name: describe_file(path) for path in sorted(temporary.iterdir())}
    files.restore_replaced(root, name)
    files.remove_leftovers(root, RECORD)
    is_taken = final.exists() or final.is_symlink()
    unrecorded = find_unrecorded_file(root, name) if is_taken else None
    if unrecorded is not None:
        free = find_free(final)
        files.rename(temporary, free)
        raise CheckpointError(
            f"{unrecorded}: was not written by a run, and stays; what was to replace it is {free}"
        )
    record = read_record(root)
    former_listings = record.folders.get(name, []) if record and is_taken else []
    if record is not None:
        # Before the exchange: if the process is killed, the folder is known as ours, be it the old
        # one or the new one.
        older_listings = [listing for listing in former_listings if listing != new_listing]
        record.folders[name] = [new_listing, *older_listings]
        write_record(root, record)
    if is_taken:
        _remove_replaced(files.exchange_folders(temporary, final), former_listings, final)
    else:
        files.rename(temporary, final)
    if record is not None:
        record.folders[name] = [new_listing]
        record.earlier = [folder for folder in record.earlier if folder != name]
        write_record(root, record)


def _remove_replaced(old: Path, listings: list[Listing], final: Path) -> None:
    """Remove the replaced folder, unless something came into it at the last moment.

    old: its temporary path. listings: of its files. final: its former path.
    """
    if find_unlisted_file(old, listings) is None:
        files.remove_temporary(old)
        return
    new_path = find_free(final)
    files.rename(old, new_path)
    get_logger().warning("warning: %s holds files that no run wrote; it is now %s", final, new_path)


def find_free(path: Path) -> Path:
    """Return the path, or `PATH-2`, `PATH-3` and so on if it is taken.

    So no folder is ever written over.
    """
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not os.path.lexists(free))


# Contents of a state that are no tensors. It names the best step that its run had by then.
# Whichever state a run goes on from, after a kill or by `resume=PATH`, the weights of that best
# step are there, though a later step was better.
STATE = "state.json"
BEST_RECORD = "best"  # key of the best step, in the values that a run adds to state.json
PREFIX = "step_"  # of the names of states


def list_readable_states(root: Path) -> list[tuple[Path, Manifest]]:
    """Return the folders of states with a readable manifest, newest first, and the manifests."""
    states = []
    for path in list_state_folders(root):
        with suppress(DamagedState):
            states.append((path, read_manifest(path)))
    return sorted(states, key=lambda item: item[1].sequence, reverse=True)


def list_state_folders(root: Path) -> list[Path]:
    """Return every folder with the name of a state, sorted by name."""
    return sorted(
        path
        for path in root.glob(f"{PREFIX}*")
        if STATE_NAME.fullmatch(path.name) and path.is_dir()
    )


def parse_step(path: Path) -> int:
    """Return the step in a folder's name: 40 of `step_40` and of `step_40-2`."""
    return int(re.split("[_-]", path.name)[1])


def prune_states(root: Path, keep: int) -> None:
    """Remove the states older than the newest `keep` that have all their files."""
    num_whole = 0
    for path, _ in list_readable_states(root):
        if num_whole >= keep:
            _remove_state(path)
            continue
        # A state that lacks a file does not count, so that one to resume from is left.
        with suppress(DamagedState):
            check_presence(path)
            num_whole += 1


# Remove a state's folder; warn, and leave it, if it has files of others or the disk refuses.
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
    """Remove the weights of best steps that neither a state in `root` nor the run names.

    current: name of the folder with the run's best step so far; None: it has none.
    """
    files.remove_leftovers(root / BEST_FOLDER, f"{PREFIX}*")  # of a run that was killed
    used_names = {read_best_name(path) for path, _ in list_readable_states(root)}
    for path, _ in list_readable_states(root / BEST_FOLDER):
        if path.name != current and path.name not in used_names:
            _remove_state(path)


def read_state_json(state: Path) -> dict[str, Any]:
    """Return the contents of a state's state.json. Raises CheckpointError if it cannot be read."""
    try:
        return read_object(state / STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{state / STATE}: cannot be read: {describe_fault(error)}"
        ) from error


def read_best_name(state: Path) -> str | None:
    """Return the name of the folder in `best` with its run's best step when a state was saved.

    None if the run kept none, or the state is damaged.
    """
    try:
        name = (read_state_json(state)["extra"].get(BEST_RECORD) or {}).get("folder")
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None
    return name if isinstance(name, str) and STATE_NAME.fullmatch(name) else None


def copy_best_state(state: Path, root: Path, name: str) -> str:
    """Make sure that the best step that `state` names is in `root/best`; return its name there.

    Its weights are copied if the state is another run's. Raises CheckpointError if they are gone.

    root: the run's folder of states. name: of the best step beside `state`.
    """
    source = state.parent / BEST_FOLDER / name
    best = root / BEST_FOLDER
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
    for record in manifest.files:
        files.copy_file(source / record.name, temporary / record.name)
    files.copy_file(source / STATE_MANIFEST, temporary / STATE_MANIFEST)  # last, as it is written
    files.publish_folder(temporary, target)
    return target.name


def find_best_state(root: Path) -> Path | None:
    """Return the folder with the weights of a run's best step, or None.

    It is the one that the newest state names; without a state, the newest.

    root: the run's folder of states.
    """
    states = [path for path, _ in list_readable_states(root)]
    if states:
        name = read_best_name(states[0])
        return None if name is None else root / BEST_FOLDER / name
    return next((path for path, _ in list_readable_states(root / BEST_FOLDER)), None)
