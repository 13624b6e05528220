"""Call `tune export` in this process and capture what it writes."""

import pytest

from recipe_lib.cli import main


def call_export(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    """Run `tune export`; return its exit code, standard output and standard error."""
    capsys.readouterr()  # drops what was written before
    code = main.main(["export", *map(str, words)])
    written = capsys.readouterr()
    return code, written.out, written.err


def expect_refusal(capsys: pytest.CaptureFixture, *words: object) -> str:
    """Run `tune export`, which has to be refused in one line; return the reason."""
    code, out, err = call_export(capsys, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    return err.removeprefix("error: ").removesuffix("\n")
