"""List and parse the project's own Python files, for the house tests.

House tests, in this folder, check the code's own rules.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE_FOLDERS = ("recipe_lib", "recipes", "benchmarks", "examples")


@cache
def list_python_files(*folders: str) -> list[Path]:
    """Return every Python file of these folders (default: all code that is no test), sorted."""
    paths: list[Path] = []
    for folder in folders or CODE_FOLDERS:
        paths += (ROOT / folder).rglob("*.py")
    assert paths, f"no Python file in {folders}"
    return sorted(paths)


@cache
def parse_tree(path: Path) -> ast.Module:
    """Return the file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def format_location(path: Path, node: ast.AST | None = None) -> str:
    """Return the location of a file, or of a node of it: `recipe_lib/units.py:12`."""
    name = path.relative_to(ROOT).as_posix()
    return f"{name}:{node.lineno}" if node is not None and hasattr(node, "lineno") else name


def list_functions_with_lines(
    path: Path,
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Yield (function, its number of lines) of a file, methods too; decorators do not count."""
    for node in ast.walk(parse_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node, node.end_lineno - node.lineno + 1
