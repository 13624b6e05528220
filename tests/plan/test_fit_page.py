"""docs/fit.md is what its lines make, has every line, and the line that matters most still holds."""

import json
from typing import Any

import pytest

from benchmarks.fit import CARDS, METHODS, MODELS, Line, page, planned
from tests.house.files import ROOT
from tests.plan.apart import apart

LINES = [Line(**fields) for _, fields in json.loads((ROOT / "docs" / "fit.json").read_text(encoding="utf-8"))]


def test_the_page_is_made_of_all_lines():
    wanted = {(model, method, cards) for model in MODELS for method in METHODS for cards in CARDS}
    assert {(line.model, line.method, line.cards) for line in LINES} == wanted
    assert (ROOT / "docs" / "fit.md").read_text(encoding="utf-8") == page(LINES)


def bytes_of(line: Line) -> Any:
    """Active and reserved bytes of its settings as they are planned now."""
    found = planned(line.model, line.method, line.cards, tuple(line.settings or ()))
    assert found is not None
    return found[1].heaviest.peak.active, found[1].heaviest.reserved


@pytest.mark.slow
def test_eight_billion_parameters_on_one_card():
    (line,) = [line for line in LINES if (line.model, line.method, line.cards) == ("8B", "full", 1)]
    active, reserved = apart(bytes_of, line)
    assert line.reserved < 17 * 2**30
    assert (active, reserved) == (pytest.approx(line.active, rel=5e-3), pytest.approx(line.reserved, rel=5e-3))
