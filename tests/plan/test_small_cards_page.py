"""docs/small_cards.md: its commands are those that are planned, its figures hold, and what they are to show."""

from typing import Any

import pytest

from benchmarks.small_cards import LINES, PLANS, SmallCard, planned, row
from recipe_lib.units import GIB
from tests.house.files import ROOT
from tests.plan.apart import apart
from tests.selection import slow_except

PAGE = (ROOT / "docs" / "small_cards.md").read_text(encoding="utf-8")
QUICK = LINES[:1]
# What is promised of a line: most bytes that are allocated, and of the host.
MOST = {LINES[0]: (2.3, 8.0), LINES[2]: (8.0, 64.0), LINES[3]: (8.0, 64.0), LINES[5]: (22.0, 256.0)}


def test_the_page_has_every_line() -> None:
    (part,) = PLANS.findall(PAGE)
    commands = part[1].partition("```bash\n")[2].partition("```")[0].splitlines()
    assert commands == [line.command for line in LINES]
    assert part[1].count("| fits |") == len(LINES)


@pytest.mark.parametrize("line", slow_except(LINES, QUICK), ids=lambda line: f"{line.what} {line.card}")
def test_its_figures_are_those_of_a_plan(line: SmallCard) -> None:
    found: dict[str, Any] = apart(planned, line)
    assert f"{row(line, found)}\n" in PAGE
    allocated, host = MOST.get(line, (float("inf"), float("inf")))
    assert found["verdict"] == "fits" and found["allocated"] <= allocated * GIB and found["host"] <= host * GIB
