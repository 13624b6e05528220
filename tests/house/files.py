"""The project's own files, as the house tests see them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE_FOLDERS = ("recipe_lib", "recipes", "benchmarks", "examples")


@cache
def list_python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders (default: all code that is no test), sorted."""
    found = [path for folder in folders or CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert found, f"no Python file in {folders}"
    return sorted(found)


@cache
def parse_tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, node: ast.AST | None = None) -> str:
    """`recipe_lib/units.py:12`, for a failure's message."""
    name = path.relative_to(ROOT).as_posix()
    return f"{name}:{node.lineno}" if node is not None and hasattr(node, "lineno") else name


def list_functions_with_lines(
    path: Path,
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function of a file and its length in lines, decorators not counted."""
    for node in ast.walk(parse_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node, node.end_lineno - node.lineno + 1
