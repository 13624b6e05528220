"""The page of the five systems is what its commands and the pages that they write say."""

import json
import re

import pytest

from benchmarks.five_systems import KEPT, output_of, page
from benchmarks.five_systems_rows import SYSTEMS
from tests.house.files import ROOT

QUICK = [
    command
    for command in dict.fromkeys(row.command for system in SYSTEMS for row in system.rows if row.page is None)
    if command.startswith("tune ") and "--full" not in command and "8B_full --device" not in command
]


def kept() -> dict[str, str]:
    outputs: dict[str, str] = json.loads(KEPT.read_text(encoding="utf-8"))
    return outputs


def test_the_page_is_made_from_kept_outputs_and_pages():
    found = (ROOT / "docs" / "five_systems.md").read_text(encoding="utf-8")
    assert found == page(kept()), "run `python -m benchmarks.five_systems --output docs/five_systems.md`"


def test_every_cell_says_something():
    assert len(SYSTEMS) == 5
    for system in SYSTEMS:
        assert len(system.rows) >= 7
        for row in system.rows:
            assert row.command.split()[0] in ("tune", "pytest", "python")


def test_no_row_says_that_tests_failed():
    for command, text in kept().items():
        assert not command.startswith("pytest") or re.fullmatch(
            r"\d+ passed(, \d+ (deselected|warnings?|skipped))*", text
        )


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_commands_print_what_is_kept(command: str):
    assert output_of(command) == kept()[command], f"run it again: --only {command!r}"
