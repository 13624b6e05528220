"""docs/small_cards.md: its commands are those that are planned, its figures hold, and what they are to show."""

import re
from typing import Any

import pytest

from benchmarks.small_cards import LINES, PLANS, SmallCard, planned, row
from recipe_lib.units import GIB
from tests.house.files import ROOT
from tests.plan.apart import apart
from tests.selection import slow_except

PAGE = (ROOT / "docs" / "small_cards.md").read_text(encoding="utf-8")
QUICK = LINES[:1]
PLANNED = LINES[:5]  # a full 70B takes minutes a line: by `python -m benchmarks.small_cards` alone
# What is promised of a line: most bytes that are allocated, and of the host.
MOST = {LINES[0]: (2.3, 8.0), LINES[2]: (8.0, 64.0), LINES[3]: (8.0, 64.0), LINES[5]: (22.0, 256.0)}


def test_the_page_has_every_line() -> None:
    (part,) = PLANS.findall(PAGE)
    commands = part[1].partition("```bash\n")[2].partition("```")[0].splitlines()
    assert commands == [line.command for line in LINES]
    assert part[1].count("| fits |") == len(LINES)


def test_what_is_promised_of_a_full_70b_stands_on_the_page() -> None:
    (line,) = [text for text in PAGE.splitlines() if text.startswith(f"| {LINES[5].what} | 24 GB |")]
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", line)]
    assert sizes[0] <= MOST[LINES[5]][0] and sizes[2] <= MOST[LINES[5]][1]


@pytest.mark.parametrize("line", slow_except(PLANNED, QUICK), ids=lambda line: f"{line.what} {line.card}")
def test_its_figures_are_those_of_a_plan(line: SmallCard) -> None:
    found: dict[str, Any] = apart(planned, line)
    assert f"{row(line, found)}\n" in PAGE
    allocated, host = MOST.get(line, (float("inf"), float("inf")))
    assert found["verdict"] == "fits" and found["allocated"] <= allocated * GIB and found["host"] <= host * GIB
