"""`tune export` in this process: its code and what it prints."""

import pytest

from recipe_lib.cli import main


def call(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main.main(["export", *map(str, words)])
    written = capsys.readouterr()
    return code, written.out, written.err


def expect_refusal(capsys: pytest.CaptureFixture, *words: object) -> str:
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    return err.removeprefix("error: ").removesuffix("\n")
