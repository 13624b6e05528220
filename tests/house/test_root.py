"""What lies at the root of the repository, file by file: nothing that a tool left there is
committed.
"""

import re
import subprocess

import pytest

from tests.house.files import ROOT

FILES = """.dockerignore .gitignore .pre-commit-config.yaml CHANGELOG.md CONTRIBUTING.md Dockerfile LICENSE Makefile
README.md constraints.txt mkdocs.yml pyproject.toml"""
FOLDERS = ".ci benchmarks configs docs examples findings recipe_lib recipes tests"


def list_tracked() -> list[str]:
    """Return the paths that git tracks; skips where this is no checkout, as in a source
    distribution.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.rstrip("\0").split("\0")


def test_the_root_has_these_files_and_folders():
    tracked = list_tracked()
    assert {path for path in tracked if "/" not in path} == set(FILES.split())
    assert {path.partition("/")[0] for path in tracked if "/" in path} == set(FOLDERS.split())


def test_no_built_or_downloaded_package_is_tracked():
    packages = [
        path for path in list_tracked() if re.search(r"\.(whl|egg|tar\.gz|tgz)$|\.egg-info/", path)
    ]
    assert not packages


def test_what_downloads_says_where_to():
    """`pip download` and `pip wheel` write into the current folder unless they are told another."""
    for name in (".ci/run", "Makefile", "Dockerfile"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^.*\bpip\b.* (?:download|wheel) .*$", text, re.MULTILINE):
            assert re.search(r" (--dest|-d|--wheel-dir|-w)[ =]", line), line
