"""Compressed files hold the samples of the files that were compressed; damaged ones are told."""

import gzip
import json
import os
from pathlib import Path

import pytest

from recipe_lib.config.schema import SourceConfig
from recipe_lib.data import sources
from recipe_lib.data.sources import open_sources
from recipe_lib.errors import DataError
from recipe_lib.files import make_temporary_path

zstandard = pytest.importorskip("zstandard")

ROWS = [{"text": f"{number} ü {'x' * (number % 50)}"} for number in range(3000)]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
HALF = len(CONTENT) // 2


def packed(name: str) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(CONTENT)
    frames = [CONTENT] if name.startswith("one") else [CONTENT[:HALF], b"", CONTENT[HALF:]]
    return b"".join(zstandard.compress(frame) for frame in frames)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_process_left_goes(is_there: bool, tmp_path: Path) -> None:
    """Whatever file it was unpacking, and not what another one may still be writing."""
    path, folder = tmp_path / "rows.jsonl.gz", tmp_path / "cache" / "unpacked"
    path.write_bytes(packed(path.name))
    if is_there:
        open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    folder.mkdir(parents=True, exist_ok=True)
    left = [make_temporary_path(folder / f"{number}.jsonl") for number in range(2)]
    for part in left:
        part.write_bytes(CONTENT[:HALF])
    os.utime(left[0], (0, 0))
    (file,) = open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    assert len(file) == len(ROWS) and [part.exists() for part in left] == [False, True]


@pytest.mark.parametrize("name", ["one.jsonl.gz", "one.jsonl.zst", "several.jsonl.zst"])
def test_samples_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(packed(name))
    (file,) = open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    assert [sample for _, sample in file.read()] == ROWS and file.place == str(path)
    assert [place for place, _ in file.read(2, 4)] == [f"{path}:3", f"{path}:4"]
    assert file.identity["name"] == name
    (made,) = (tmp_path / "cache" / "unpacked").iterdir()
    before = made.stat()
    open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    assert made.stat().st_mtime_ns == before.st_mtime_ns  # found again
    path.write_bytes(packed(name)[:0] + gzip.compress(b'{"text": "new"}\n') if name.endswith(".gz") else
                     zstandard.compress(b'{"text": "new"}\n'))  # fmt: skip
    (file,) = open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    assert [sample for _, sample in file.read()] == [{"text": "new"}]


def test_a_folder_has_both(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    (tmp_path / "c.tar.gz").write_bytes(b"none of ours")
    files = open_sources(SourceConfig(str(tmp_path)), cache=tmp_path / "cache")
    assert [sample["text"] for file in files for _, sample in file.read()] == ["a", "b"]


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["one.jsonl.gz", "one.jsonl.zst", "several.jsonl.zst"])
def test_a_file_that_is_cut_off_is_told(name: str, cut: float, tmp_path: Path) -> None:
    """None of its samples is taken, though the first of them could be read."""
    content = packed(name)
    (tmp_path / name).write_bytes(content[: int(cut * len(content))])
    with pytest.raises(DataError, match=f"{name}: is damaged, or no (gzip|Zstandard) file"):
        open_sources(SourceConfig(str(tmp_path / name)), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "unpacked").iterdir())


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_other_files_are_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"text": "plain"}\n')
    with pytest.raises(DataError, match="is damaged, or no"):
        open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    path.write_bytes(
        gzip.compress(bytes(10**6)) if name.endswith(".gz") else zstandard.compress(bytes(10**6))
    )
    monkeypatch.setattr(sources, "_SMALL", 10**5)
    with pytest.raises(DataError, match="unpacks to more than 200 times its size"):
        open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=name):
        open_sources(SourceConfig(str(path)), cache=tmp_path / "cache")
