"""The manifest of a saved state: what belongs to it, and how to know that it is still what was written.

`manifest.json` lists every file with size and SHA-256, and carries a SHA-256 of its own contents. It is written
last, so a folder without one was never finished. A state is used only after `damage` has found nothing.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from recipe_lib.config.suggest import show
from recipe_lib.files import FileRecord, is_plain_name, sha256_of, write_json
from recipe_lib.reading import read_json
from recipe_lib.report.phases import phase

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024**2
_SEAL = "manifest_sha256"


class DamagedState(Exception):  # noqa: N818  (what was found, in one phrase; its catcher decides if it is an error)
    """Why a folder is not a state that can be used."""


@dataclass(frozen=True)
class Manifest:
    """One saved state.

    step: optimizer steps done. sequence: counts the saves of a run, so the newest is known without a clock.
    world_size: ranks that saved it. versions: torch and Python, for people.
    """

    step: int
    sequence: int
    world_size: int
    files: tuple[FileRecord, ...]
    versions: dict[str, str]


def write_manifest(folder: Path, step: int, sequence: int, world_size: int, files: Sequence[FileRecord]) -> None:
    """Writes the manifest into a folder whose files are already flushed."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "sequence": sequence,
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "files": [asdict(record) for record in sorted(files, key=lambda record: record.name)],
    }
    write_json(folder / MANIFEST, fields | {_SEAL: _seal(fields)})


def _seal(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
    if fields.pop(_SEAL, None) != _seal(fields):
        raise DamagedState(f"{MANIFEST} does not match its own checksum")
    return _from_fields(fields)


def _from_fields(fields: dict[str, Any]) -> Manifest:
    if not isinstance(fields.get("files"), list):
        raise DamagedState(f"{MANIFEST} lists no files")
    try:
        manifest = Manifest(
            step=fields["step"],
            sequence=fields["sequence"],
            world_size=fields["world_size"],
            files=tuple(FileRecord(file["name"], file["size"], file["sha256"]) for file in fields["files"]),
            versions=fields["versions"],
        )
    except (KeyError, TypeError) as error:
        raise DamagedState(f"{MANIFEST} lacks a field: {error}") from error
    counts = (manifest.step, manifest.sequence, manifest.world_size, *(record.size for record in manifest.files))
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise DamagedState(f"{MANIFEST} holds an invalid count")
    for record in manifest.files:
        if not is_plain_name(record.name):
            raise DamagedState(f"{MANIFEST} names {str(record.name)[:80]!r}, which is not a plain file name")
    return manifest


def check_presence(folder: Path) -> Manifest:
    """The manifest, if every file it names is there with its length. Raises DamagedState. Reads no file."""
    manifest = read_manifest(folder)
    for record in manifest.files:
        path = folder / record.name
        if not os.path.isfile(path):
            raise DamagedState(f"{show(record.name)} is missing")
        if path.stat().st_size != record.size:
            raise DamagedState(f"{record.name} has {path.stat().st_size} bytes, its manifest says {record.size}")
    return manifest


def damaged_file(folder: Path, manifest: Manifest, part: int, parts: int) -> str | None:
    """Reads this part's share of the files and says which one differs from its hash, or None.

    part, parts: files are dealt out in descending size, so that ranks hash about equally many bytes.
    """
    own = sorted(manifest.files, key=lambda record: (-record.size, record.name))[part::parts]
    with phase(f"checking {folder.name}", sum(record.size for record in own), "bytes") as going:
        for record in own:
            try:
                found = sha256_of(folder / record.name)
            except OSError as error:
                return f"{record.name} cannot be read: {error.strerror}"
            if found != record.sha256:
                return f"{record.name} has changed since it was written (SHA-256 differs from the manifest)"
            going.advance(record.size)
    return None
