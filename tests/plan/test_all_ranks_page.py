"""The page of a plan of 16 ranks is what its command prints."""

import contextlib
import io
from pathlib import Path

import pytest

from tests.plan.apart import apart

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "all_ranks.md"


def measure() -> str:
    from benchmarks.all_ranks import page, report

    with contextlib.redirect_stderr(io.StringIO()):
        return page(report())


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == apart(measure), "run the command that the page names"
