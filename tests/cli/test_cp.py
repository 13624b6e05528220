"""`tune cp`."""

import os
import stat
from pathlib import Path

import pytest

from recipe_lib import files
from recipe_lib.cli.main import main
from recipe_lib.config.paths import find_config, find_recipe
from recipe_lib.config.suggest import show

CONFIG = "llama3/8B_full"
RECIPE = "full_finetune_distributed"


@pytest.mark.parametrize(
    ("source", "destination", "written"),
    [
        (RECIPE, "mine", "mine.py"),
        (RECIPE, "mine.py", "mine.py"),
        (RECIPE, "mine.v2", "mine.v2.py"),
        (RECIPE, ".", f"{RECIPE}.py"),
        (CONFIG, "mine", "mine.yaml"),
        (CONFIG, "mine.yml", "mine.yml"),
        (CONFIG, ".", "8B_full.yaml"),
    ],
)
def test_copies(source: str, destination: str, written: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["cp", source, destination]) == 0
    assert capsys.readouterr().out == f"{written}\n"
    original = find_recipe(source) if source == RECIPE else find_config(source)
    assert (tmp_path / written).read_bytes() == original.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [written]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / written).stat().st_mode) == 0o666 & ~umask


def test_a_file_of_the_users_can_be_copied(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("seed: 1\n")
    assert main(["cp", str(tmp_path / "a.yaml"), str(tmp_path / "b")]) == 0
    assert (tmp_path / "b.yaml").read_text() == "seed: 1\n"


def test_what_is_there_stays_without_force(tmp_path: Path, capsys: pytest.CaptureFixture):
    target = tmp_path / "mine.py"
    target.write_text("kept")
    assert main(["cp", RECIPE, str(target)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {show(str(target))}: exists already; --force replaces it\n"
    )
    assert target.read_text() == "kept"
    assert main(["cp", RECIPE, str(target), "--force"]) == 0
    assert target.read_bytes() == find_recipe(RECIPE).read_bytes()


def test_missing_folders(tmp_path: Path, capsys: pytest.CaptureFixture):
    target = tmp_path / "a" / "b" / "mine.yaml"
    assert main(["cp", CONFIG, str(target)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {show(str(target.parent))}: no such folder; --make-parents creates it\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert main(["cp", CONFIG, str(target), "--make-parents"]) == 0
    assert target.read_bytes() == find_config(CONFIG).read_bytes()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "mine.yaml").mkdir()
    own = tmp_path / "own.yaml"
    own.write_text("seed: 1\n")
    for words, line in [
        (
            ["llama3/8B_fll", "x"],
            "llama3/8B_fll: no such recipe or config; did you mean llama3/8B_full?",
        ),
        (["zzz", "x"], "zzz: no such recipe or config; `tune ls` lists both"),
        (
            [CONFIG, str(tmp_path / "x.py")],
            f"{tmp_path}/x.py: the copy of a config ends in .yaml or .yml",
        ),
        (
            [RECIPE, str(tmp_path / "x.yaml")],
            f"{tmp_path}/x.yaml: the copy of a recipe ends in .py",
        ),
        (
            [CONFIG, str(tmp_path / "mine")],
            f"{tmp_path}/mine.yaml: is a folder, expected a regular file; choose another name",
        ),
        ([str(own), str(own), "--force"], f"{own}: is the file to copy; give another name"),
    ]:
        assert main(["cp", *words]) == 2
        assert capsys.readouterr().err == f"error: {line}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "own.yaml"]


def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture
):
    target = tmp_path / "mine.py"
    target.write_text("kept")

    def full(operation: str, path: Path) -> None:
        if operation == "rename":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "before_operation", full)
    assert main(["cp", RECIPE, str(target), "--force"]) == 6
    assert (
        capsys.readouterr().err
        == f"error: {show(str(target))}: cannot be written: No space left on device\n"
    )
    assert target.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
