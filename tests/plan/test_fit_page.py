"""docs/fit.md, its two sister pages and their lines: every line has its speed, and the one that
matters most still holds.
"""

import json
import re

import torch

from benchmarks import longest
from benchmarks.fit import Line, format_pages, list_cells
from tests.house.files import ROOT

FAR = longest.read_longest_sequences(ROOT / "docs" / "longest.json")
LINES = [
    Line(**fields)
    for _, fields in json.loads((ROOT / "docs" / "fit.json").read_text(encoding="utf-8"))
]


def test_the_page_is_made_of_all_lines():
    assert {(line.model, line.method, line.cards) for line in LINES} == set(list_cells())
    for name, text in format_pages(LINES, FAR).items():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        made_with = re.search(r"with torch (\S+)\.\n", page)
        version = made_with[1] if made_with is not None else ""
        assert page == text.replace(torch.__version__, version), name


def test_every_line_that_fits_has_its_speed_and_more_cards_are_faster():
    speeds = {
        (line.model, line.method, line.cards): line.tokens_per_second
        for line in LINES
        if line.settings is not None
    }
    assert all(speed > 0 for speed in speeds.values())
    for (model, method, cards), speed in speeds.items():
        assert speed > speeds.get((model, method, cards // 2), 0.0), (model, method, cards)


def test_more_cards_have_room_for_longer_sequences_and_none_is_beyond_what_kernels_count():
    found = {longest.build_cell(line): line for line in FAR}
    for (model, method, cards, size), line in found.items():
        fewer = found.get((model, method, cards // 2, size))
        assert fewer is None or line.tokens > fewer.tokens, (model, method, cards, size)
        assert line.tokens in longest.LENGTHS and f"max_seq_len={line.tokens}" in line.settings
        room = {24: 23.5, 80: 79.2}[size] * 2**30
        assert line.active <= line.reserved < room
    assert found["8B", "full", 8, 24].tokens >= 262_144
    assert found["8B", "lora", 8, 80].tokens >= 1_048_576
