"""What a wheel holds, and that the pinned versions are inside the allowed ranges."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house.files import ROOT
from tests.house.test_imports import PROJECT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in the wheel."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_wheel_has_the_package(wheel: list[str]):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipe_lib").rglob("*.py")}
    assert expected <= set(wheel)


def test_wheel_has_recipes_configs_and_presets(wheel: list[str]):
    for kind, pattern in (("recipes", "*.py"), ("configs", "*.yaml")):
        ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / kind).rglob(pattern)}
        assert {f"recipe_lib/_{name}" for name in ours if not name.startswith("configs/demo/")} <= set(wheel)
    assert {"recipe_lib/models/presets/llama3/8B.json", "recipe_lib/report/page.html"} <= set(wheel)


def test_wheel_has_nothing_else(wheel: list[str]):
    """Nothing lands at the top of site-packages but the package and its metadata; no tests, caches or run outputs."""
    assert {Path(name).parts[0].split("-")[0] for name in wheel} == {"recipe_lib", "tune_recipes"}
    suffixes = {Path(name).suffix for name in wheel if name.startswith("recipe_lib/")}
    assert suffixes <= {".py", ".yaml", ".json", ".html", ".typed"}, suffixes
    assert not [name for name in wheel if "demo" in name]


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
