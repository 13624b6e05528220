"""docs/small_cards.md: its commands are those that are planned, its figures hold, and what they are
to show.
"""

import re

from benchmarks.small_cards import LINES, PLANS
from tests.house.files import ROOT

PAGE = (ROOT / "docs" / "small_cards.md").read_text(encoding="utf-8")
# What is promised of a line: most bytes that are allocated, and of the host.
MOST = {LINES[0]: (2.3, 8.0), LINES[2]: (8.0, 64.0), LINES[3]: (8.0, 64.0), LINES[5]: (22.0, 256.0)}


def test_the_page_has_every_line() -> None:
    (part,) = PLANS.findall(PAGE)
    commands = part[1].partition("```bash\n")[2].partition("```")[0].splitlines()
    assert commands == [line.command for line in LINES]
    assert part[1].count("| fits |") == len(LINES)


def test_what_is_promised_of_a_full_70b_stands_on_the_page() -> None:
    (line,) = [
        text for text in PAGE.splitlines() if text.startswith(f"| {LINES[5].what} | 24 GB |")
    ]
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", line)]
    assert sizes[0] <= MOST[LINES[5]][0] and sizes[2] <= MOST[LINES[5]][1]
