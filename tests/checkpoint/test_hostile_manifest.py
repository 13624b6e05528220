"""A manifest that somebody else has written, with a seal that fits: it names plain files and
counts, or is damaged.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.checkpoint import run_files
from recipe_lib.checkpoint.run_files import DamagedState, check_presence, write_manifest
from recipe_lib.config.local_files import STATE_MANIFEST
from recipe_lib.files import FileRecord, compute_sha256


def state(folder: Path, **changes: Any) -> Path:
    """A state of one file whose manifest is changed and sealed again."""
    (folder / "shard-0").write_text("x")
    write_manifest(folder, 3, 1, 1, [FileRecord("shard-0", 1, compute_sha256(folder / "shard-0"))])
    fields = json.loads((folder / STATE_MANIFEST).read_text()) | changes
    fields.pop("manifest_sha256")
    (folder / STATE_MANIFEST).write_text(
        json.dumps(fields | {"manifest_sha256": run_files._compute_seal(fields)})
    )
    return folder


def test_a_whole_state(tmp_path: Path):
    assert check_presence(state(tmp_path)).step == 3


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "..", ".", "", "a/b", "a\0b", 5, None, ["x"]]
)
def test_names_that_are_not_plain(name: Any, tmp_path: Path):
    with pytest.raises(DamagedState, match="which is not a plain file name"):
        check_presence(state(tmp_path, files=[{"name": name, "size": 1, "sha256": "0" * 64}]))


def test_a_name_that_no_file_can_have(tmp_path: Path):
    with pytest.raises(DamagedState, match="is missing") as caught:
        check_presence(state(tmp_path, files=[{"name": "a" * 5000, "size": 1, "sha256": "0" * 64}]))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("field", ["step", "sequence", "world_size"])
@pytest.mark.parametrize("count", [-1, 2**63, 1.5, "3", None, True])
def test_counts_that_are_none(field: str, count: Any, tmp_path: Path):
    with pytest.raises(DamagedState, match=f"{STATE_MANIFEST} holds an invalid count"):
        check_presence(state(tmp_path, **{field: count}))


@pytest.mark.parametrize("files", [None, {}, [5], [{"name": "shard-0"}], "x", [None]])
def test_files_that_are_no_list_of_records(files: Any, tmp_path: Path):
    with pytest.raises(DamagedState):
        check_presence(state(tmp_path, files=files))
