"""Published training speeds: every row says where it is from and what ran, and has a plan of those
settings.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planned_times import (
    PublishedSpeed,
    RowComparison,
    compare_row,
    compute_statistics,
    read_sources,
)
from recipe_lib.cli import plan_request
from tests.plan.apart import call_in_fork

pytestmark = pytest.mark.benchmark

SOURCES = read_sources()
ROWS = [row for source in SOURCES for row in source.rows]


def test_commands_are_those_of_tune_plan() -> None:
    for row in ROWS:
        words = row.command.split()[2:]
        assert plan_request.read_arguments(
            [word for word in words if word != "model.path=FOLDER"]
        ).config == [row.config]


def test_a_row_is_planned(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.id == "Q6")
    small: dict[str, Any] = row.shape | {"num_hidden_layers": 2, "vocab_size": 512}
    found = call_in_fork(compare_row, PublishedSpeed(**{**vars(row), "shape": small}), tmp_path)
    assert found.planned > 10 * row.published
    assert 0 < found.share < 0.1 and found.error == pytest.approx(found.planned / row.published - 1)


def test_the_summary_is_of_errors_without_their_sign() -> None:
    rows = [
        RowComparison(ROWS[0], ROWS[0].published * ratio, 0.5, "fits") for ratio in (0.9, 1.1, 1.3)
    ]
    assert compute_statistics(rows) == "3 | 16.7% | 26.0% | 1.10 | 2"
