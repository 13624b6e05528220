"""Rows of other planners: the page has every row of the data, its means are those of its rows, and
the imitated stack issues the operators of the libraries that it stands for.
"""

from pathlib import Path

import pytest

from benchmarks import planner_peers
from benchmarks.planner_peers import DIGITS, METRICS, UNITS

pytestmark = pytest.mark.benchmark

PAGE = Path(__file__).parents[2] / "docs/measurements/planner_peers.md"


def cells(line: str) -> list[str]:
    """Of a line of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def sections() -> dict[str, list[list[str]]]:
    """Lines of the page's tables, by heading."""
    found: dict[str, list[list[str]]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## "):
        title, *lines = part.splitlines()
        found[title.lstrip("# ")] = [cells(line) for line in lines if line.startswith("| ")][2:]
    return found


def test_the_page_has_every_row() -> None:
    page, count = sections(), 0
    for group in planner_peers.read_rows()["groups"]:
        unit, digits = UNITS[group["unit"]], DIGITS[group["unit"]]
        expected = []
        for row in group["rows"]:
            for metric, measured in row["measured"].items():
                theirs = row["theirs"].get(metric)
                said = ["", ""]
                if theirs is not None:
                    said = [f"{theirs / unit:.{digits}f}", f"{theirs / measured - 1:+.2%}"]
                expected.append(
                    [row["name"], METRICS[metric], f"{measured / unit:.{digits}f}", *said]
                )
                count += 1
            assert group["source"] and group["stack"] and group["notes"]
            planner_peers.build_run(group, row)
        assert [line[:5] for line in page[group["title"]]][: len(expected)] == expected
    assert count >= 40


def test_means_are_those_of_the_rows() -> None:
    page = sections()
    summary = page["Rows of other planners"]
    assert len(summary) > 10
    for title, metric, rows, *sides in summary:
        lines = [line for line in page[title] if line[1] == metric]
        assert int(rows) == len(lines)
        for place, (mean, worst) in ((4, sides[:2]), (6, sides[2:])):
            errors = [float(line[place].rstrip("%")) for line in lines if line[place]]
            if errors:
                assert float(mean.rstrip("%")) == pytest.approx(
                    sum(map(abs, errors)) / len(errors), abs=0.0101
                )
                assert float(worst.rstrip("%")) in errors and abs(float(worst.rstrip("%"))) == max(
                    map(abs, errors)
                )
            else:
                assert (mean, worst) == ("", "")
