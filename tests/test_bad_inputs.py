"""Every mistake kept under tests/bad_inputs ends in exit code 2, the expected lines, and nothing written.

A case is a folder with `command` (`{case}`: the folder, `{tmp}`: an empty folder) and `expected` (standard error).
"""

import hashlib
import re
import shlex
from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config.suggest import show
from tests.selection import mark_slow_but

CASES = Path(__file__).parent / "bad_inputs"
ROOT = CASES.parent.parent


def fingerprint(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file in the folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def name_of(case: Path) -> str:
    return f"{case.parent.name}/{case.name}"


@pytest.mark.parametrize(
    "case",
    mark_slow_but(sorted(path.parent for path in CASES.glob("*/*/command")), 80),
    ids=name_of,
)
def test_one_clean_line(
    case: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    name = str(case.relative_to(ROOT))

    def fill(text: str) -> str:
        return text.replace("{case}", name).replace("{tmp}", str(tmp_path))

    before = fingerprint(case)
    arguments = shlex.split(fill((case / "command").read_text()))
    assert arguments[0] == "tune"
    code = main(arguments[1:])
    written = capfd.readouterr()
    expected = re.sub(
        r"\{tmp\}[\w./-]*\w", lambda place: show(fill(place[0])), (case / "expected").read_text()
    )
    assert written.err == fill(expected)
    assert written.out == ""
    assert code == 2
    assert fingerprint(case) == before
    assert list(tmp_path.iterdir()) == []


def test_there_are_at_least_sixty_cases():
    assert len(list(CASES.glob("*/*/command"))) >= 60
