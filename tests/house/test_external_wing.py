"""Models of other libraries are a wing that one registry entry names; imports make no circle,
hidden ones included.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.house.files import ROOT, format_location, list_python_files, parse_tree

WING = "recipe_lib.external"
MAY_NAME_IT = ("recipe_lib/external/", "recipe_lib/cli/tp_plan")


def test_one_registry_entry_names_the_wing():
    found = []
    for path in list_python_files("recipe_lib", "recipes"):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if not format_location(path).startswith(MAY_NAME_IT):
            found += [
                f"{format_location(path)}:{number}: {line.strip()}"
                for number, line in lines
                if WING in line
            ]
    assert len(found) == 1 and found[0].startswith("recipe_lib/config/registry.py:"), found


@pytest.mark.slow
def test_no_import_circle():
    """Of modules, imports inside functions counted."""
    needs = {module: own_imports(path) - {module} for module, path in modules().items()}
    while needs:
        done = {module for module, names in needs.items() if not names & needs.keys()}
        assert done, f"these import each other, or what does: {sorted(needs)}"
        needs = {module: names for module, names in needs.items() if module not in done}


@cache
def modules() -> dict[str, Path]:
    """The library's modules by their names; a package is its `__init__`."""
    names = {
        path: path.relative_to(ROOT).with_suffix("").parts
        for path in list_python_files("recipe_lib")
    }
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


@cache
def own_imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, but for those that only a type checker reads."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [whole if whole in modules() else node.module for whole in wholes]
        found.update(name for name in names if name in modules())
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child)

    visit(parse_tree(path))
    return found
