"""What a wheel holds, and that the pinned versions are inside the allowed ranges."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house.files import ROOT
from tests.house.test_imports import PROJECT


def build_wheel(source: Path, out: Path) -> list[str]:
    """Names of the files in the wheel of a source tree."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in the wheel."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_image_is_built_from_all_that_the_wheel_needs(wheel: list[str], tmp_path: Path):
    """What the Dockerfile copies, .dockerignore lets through, and gives the wheel of the clone."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
        if line[0] == "!"
    ]
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    for *sources, to in copied:
        for source in sources:
            assert any(source == name or source.startswith(f"{name}/") for name in allowed), source
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, tmp_path / to, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / source, tmp_path / to)
    assert sorted(build_wheel(tmp_path, tmp_path / "out")) == sorted(wheel)


@pytest.mark.slow
def test_the_source_distribution_has_all_that_the_wheel_and_the_image_need(tmp_path: Path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        word.partition("/")[0]
        for line in text.splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }
    assert copied <= names
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        "Dockerfile",
        ".dockerignore",
        "tests",
        "docs",
    } <= names


def test_wheel_has_the_package(wheel: list[str]):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipe_lib").rglob("*.py")}
    assert expected <= set(wheel)


def test_wheel_has_recipes_configs_and_presets(wheel: list[str]):
    for kind, pattern in (("recipes", "*.py"), ("configs", "*.yaml")):
        ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / kind).rglob(pattern)}
        assert {f"recipe_lib/_{name}" for name in ours} <= set(wheel)
    assert {"recipe_lib/models/presets/llama3/8B.json", "recipe_lib/report/page.html"} <= set(wheel)


def test_wheel_has_nothing_else(wheel: list[str]):
    """Nothing lands at the top of site-packages but the package and its metadata; no tests, caches
    or run outputs.
    """
    assert {Path(name).parts[0].split("-")[0] for name in wheel} == {"recipe_lib", "tune_recipes"}
    suffixes = {Path(name).suffix for name in wheel if name.startswith("recipe_lib/")}
    assert suffixes <= {".py", ".yaml", ".json", ".jsonl", ".html", ".typed"}, suffixes


@pytest.mark.slow
def test_the_commands_of_all_pages_run_from_the_wheel(tmp_path: Path):
    """Outside of a clone, with what the wheel holds, those of pages that take little time; not of a
    clone's own tools.
    """
    build_wheel(ROOT, tmp_path / "out")
    (built,) = (tmp_path / "out").glob("*.whl")
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    variables = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}",
        "TUNE_TEST_WHEEL": str(tmp_path / "site"),
    }
    commands = ROOT / "tests" / "house" / "test_commands.py"
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=",
        "-m",
        "not slow",
        f"{commands}::test_commands",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path / "empty", env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\b\d passed", done.stdout)


def test_pins_are_in_range():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    pins = {name.replace("-", "_").lower(): version for name, version in pins.items()}
    optional = PROJECT["project"]["optional-dependencies"]
    for line in [*PROJECT["project"]["dependencies"], *optional["dev"], *optional["docs"]]:
        requirement = Requirement(line)
        version = pins[requirement.name.replace("-", "_").lower()]
        assert requirement.specifier.contains(version), f"{line}: constraints.txt has {version}"


def test_entry_point_exists():
    module, function = PROJECT["project"]["scripts"]["tune"].split(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
