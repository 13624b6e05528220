"""A file of the user that leaves Python, or that Python cannot read, ends in one line and the code
of a mistake.
"""

from pathlib import Path

import pytest

from recipe_lib.cli.main import main
from recipe_lib.errors import STOPPED_AND_SAVED, USER_ERROR, run_for_exit_code

BAD = {
    "raise SystemExit(3)\n": "raised SystemExit: 3",
    "import sys\nsys.exit()\n": "raised SystemExit",
    "a = 'x\0y'\n": "null bytes",
    "a = " + "-" * 100_000 + "1\n": "MemoryError",
    "a = " + "(" * 5000 + "\n": "too many nested parentheses",
}


@pytest.mark.parametrize("text", BAD, ids=BAD.values())
@pytest.mark.parametrize("option", ["--plugin", "--recipe"])
def test_one_line_and_exit_code_2(
    option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert main(["validate", "demo/full", option, str(file)]) == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert str(file) in said and BAD[text] in said


def test_a_copy_with_a_name_of_another_version_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    file = tmp_path / "mine.py"
    file.write_text("from recipe_lib.errors import a_name_of_another_version\n")
    assert main(["validate", "demo/full", "--recipe", str(file)]) == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: cannot import name 'a_name_of_another_version'")
    assert said.endswith("is copied anew with `tune cp`\n") and said.count("\n") == 1


def test_the_code_of_a_saved_run_is_of_a_saved_run(capsys: pytest.CaptureFixture):
    def leave() -> int:
        raise SystemExit(STOPPED_AND_SAVED)

    assert run_for_exit_code(leave) == USER_ERROR
    assert (
        capsys.readouterr().err
        == "error: a part of the run called SystemExit(3), the code of a run that has stopped and"
        " saved\n"
    )
