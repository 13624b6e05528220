"""Files and functions stay short enough to be read, recipes to be copied, and the library does not
grow by itself.
"""

import ast
from pathlib import Path

from tests.house.files import (
    ROOT,
    format_location,
    list_functions_with_lines,
    list_python_files,
    parse_tree,
)

FILE_LINES = 640
LIBRARY_FILES = 400
LIBRARY_STATEMENTS = 45_787  # what adds a mechanism finds one that it replaces
RECIPE_LINES = 400
FUNCTION_LINES = 80  # the rule, which one function in a hundred may break
FUNCTION_LIMIT = 95  # and none may break this


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_short():
    long = [
        f"{format_location(path)}: {lines(path)} lines"
        for path in list_python_files()
        if lines(path) > FILE_LINES
    ]
    assert not long, f"over {FILE_LINES} lines; split them"


def test_the_library_does_not_grow():
    files = list_python_files("recipe_lib")
    statements = sum(
        isinstance(node, ast.stmt) for path in files for node in ast.walk(parse_tree(path))
    )
    assert len(files) <= LIBRARY_FILES and statements <= LIBRARY_STATEMENTS, (
        len(files),
        statements,
    )


def test_recipes_are_short():
    long = [
        f"{format_location(path)}: {lines(path)} lines"
        for path in list_python_files("recipes")
        if lines(path) > RECIPE_LINES
    ]
    assert not long, f"over {RECIPE_LINES} lines; move mechanism into recipe_lib"


def test_functions_are_short():
    sizes = [
        (size, f"{format_location(path, node)} {node.name}")
        for path in list_python_files()
        for node, size in list_functions_with_lines(path)
    ]
    over = sorted(((size, where) for size, where in sizes if size > FUNCTION_LINES), reverse=True)
    assert not [found for found in over if found[0] > FUNCTION_LIMIT]
    assert len(over) <= len(sizes) / 100, over


def test_configs_are_short():
    """A config holds only what differs from the defaults, after its header."""
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        body = [
            line
            for line in path.read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#")
        ]
        assert len(body) <= 30, f"{format_location(path)}: {len(body)} lines under its header"


def test_tests_are_short():
    long = [
        f"{format_location(path)}: {lines(path)} lines"
        for path in list_python_files("tests")
        if lines(path) > FILE_LINES
    ]
    assert not long
