"""docs/fit.md is what its lines make, has every line with its speed, and the line that matters most still holds."""

import json
import re
from typing import Any

import pytest
import torch

from benchmarks import longest
from benchmarks.fastest_settings import prepared
from benchmarks.fit import CARDS, METHODS, MODELS, Line, page
from recipe_lib.cli.plan import recipe_class
from recipe_lib.cli.recipes import recipe_for
from recipe_lib.plan.build_plan import make_plan
from tests.house.files import ROOT
from tests.plan.apart import apart

FAR = longest.read(ROOT / "docs" / "longest.json")
LINES = [Line(**fields) for _, fields in json.loads((ROOT / "docs" / "fit.json").read_text(encoding="utf-8"))]


def test_the_page_is_made_of_all_lines():
    wanted = {(model, method, cards) for model in MODELS for method in METHODS for cards in CARDS}
    assert {(line.model, line.method, line.cards) for line in LINES} == wanted
    text = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
    made_with = re.search(r"with torch (\S+)\.\n", text)
    assert made_with is not None and text == page(LINES, FAR).replace(torch.__version__, made_with[1])


def test_every_line_that_fits_has_its_speed_and_more_cards_are_faster():
    speeds = {
        (line.model, line.method, line.cards): line.tokens_per_second for line in LINES if line.settings is not None
    }
    assert all(speed > 0 for speed in speeds.values())
    for (model, method, cards), speed in speeds.items():
        assert speed > speeds.get((model, method, cards // 2), 0.0), (model, method, cards)


def test_more_cards_have_room_for_longer_sequences_and_none_is_beyond_what_kernels_count():
    found = {longest.cell_of(line): line for line in FAR}
    for (model, method, cards, size), line in found.items():
        fewer = found.get((model, method, cards // 2, size))
        assert fewer is None or line.tokens > fewer.tokens, (model, method, cards, size)
        assert line.tokens in longest.LENGTHS and f"max_seq_len={line.tokens}" in line.settings
        room = {24: 23.5, 80: 79.2}[size] * 2**30
        assert line.active <= line.reserved < room
    assert found["8B", "full", 8, 24].tokens >= 262_144
    assert found["8B", "lora", 8, 80].tokens >= 1_048_576


def far_bytes(line: longest.Longest) -> Any:
    """Active and reserved bytes of a longest row, and its verdict, as they are planned now."""
    config = f"{longest.MODELS[line.model]}_{line.method}"
    cfg, settings = prepared(config, f"{line.cards}x{line.size}GB", line.settings)
    plan, _ = make_plan(recipe_class(recipe_for(config)), cfg, settings)
    return plan.heaviest.peak.active, plan.heaviest.reserved, plan.verdict


@pytest.mark.slow
def test_a_longest_sequence_is_planned_as_the_page_says():
    (line,) = [line for line in FAR if longest.cell_of(line) == ("8B", "qlora", 4, 24)]
    active, reserved, verdict = apart(far_bytes, line)
    assert (active, reserved) == (pytest.approx(line.active, rel=5e-3), pytest.approx(line.reserved, rel=5e-3))
    assert verdict == "fits"


def bytes_of(line: Line) -> Any:
    """Active and reserved bytes of its settings, and its speed, as they are planned now."""
    config = f"{MODELS[line.model]}_{line.method}"
    cfg, settings = prepared(config, f"{line.cards}x24GB", line.settings or [])
    plan, _ = make_plan(recipe_class(recipe_for(config)), cfg, settings)
    assert plan.time is not None
    return plan.heaviest.peak.active, plan.heaviest.reserved, plan.time.tokens_per_second


@pytest.mark.slow
@pytest.mark.parametrize("cards", [1, 4])
def test_eight_billion_parameters(cards: int):
    """Full fine-tuning on one card, and without optimizer states on the host on four."""
    (line,) = [line for line in LINES if (line.model, line.method, line.cards) == ("8B", "full", cards)]
    active, reserved, speed = apart(bytes_of, line)
    assert (active, reserved) == (pytest.approx(line.active, rel=5e-3), pytest.approx(line.reserved, rel=5e-3))
    assert speed == pytest.approx(line.tokens_per_second, rel=0.02)
    assert cards == 1 or not any("offload" in word for word in line.settings or [])
