"""What `make test` leaves out stands in CONTRIBUTING, and every goal keeps a test there."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.house.files import ROOT, list_functions_with_lines, list_python_files

HEADING = "## What `make test` leaves out"
MARKS = ("pytest.mark.slow", "pytest.mark.benchmark", "mark_slow_")


def is_left_out(node: ast.AST) -> bool:
    return any(
        ast.unparse(decorator).startswith(MARKS[:2])
        for decorator in getattr(node, "decorator_list", [])
    )


def files_left_out() -> dict[str, list[str]]:
    """Names of the files with a mark, by folder."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in list_python_files("tests"):
        text = (
            path.read_text(encoding="utf-8")
            if path.name.startswith("test_") and path != Path(__file__)
            else ""
        )
        if any(mark in text for mark in MARKS):
            found[path.parent.relative_to(ROOT).as_posix()].append(path.stem.removeprefix("test_"))
    return dict(found)


def table() -> str:
    """The lines that CONTRIBUTING has of them."""
    return "\n".join(
        f"- `{folder}`: {', '.join(names)}" for folder, names in files_left_out().items()
    )


def section() -> str:
    return (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition(HEADING)[2]
        .partition("\n## ")[0]
    )


def test_the_page_names_every_file_with_slow_tests():
    assert section().rpartition("\n\n- ")[2].strip() == table().removeprefix("- "), (
        f"expected:\n{table()}"
    )


def test_every_goal_keeps_a_test():
    """The tests that the section names exist, and are not slow but for some of their values."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section())
    assert len(named) >= 10
    for file, name in named:
        found = [node for node, _ in list_functions_with_lines(ROOT / file) if node.name == name]
        assert found and not is_left_out(found[0]), f"{file}::{name}"
        assert "pytestmark" not in (ROOT / file).read_text(encoding="utf-8"), file
