"""Models of other libraries are a wing that one registry entry names; imports make no circle, hidden ones included."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from tests.house.files import ROOT, place, python_files, tree

WING = "recipe_lib.foreign"
MAY_NAME_IT = ("recipe_lib/foreign/", "recipe_lib/cli/tp_plan")
# Files outside of the command line that import modules of ours inside functions, and how often; the aim is none.
HIDDEN = {
    "recipe_lib/config/load.py": 8,  # what reads YAML, once a config is read at all
    "recipe_lib/plan/search/fastest_settings.py": 1,
    "recipe_lib/plan/search/trials.py": 1,
    "recipe_lib/plan/world/sequence_lengths.py": 11,
}


def test_one_registry_entry_names_the_wing():
    found = []
    for path in python_files("recipe_lib", "recipes"):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if not place(path).startswith(MAY_NAME_IT):
            found += [f"{place(path)}:{number}: {line.strip()}" for number, line in lines if WING in line]
    assert len(found) == 1 and found[0].startswith("recipe_lib/config/registry.py:"), found


def test_no_import_circle():
    """Of modules, imports inside functions counted."""
    needs = {module: {name for name, _, _ in own_imports(path)} - {module} for module, path in modules().items()}
    while needs:
        done = {module for module, names in needs.items() if not names & needs.keys()}
        assert done, f"these import each other, or what does: {sorted(needs)}"
        needs = {module: names for module, names in needs.items() if module not in done}


def test_imports_of_ours_are_at_the_top():
    """The command line imports late, so that it answers at once; other packages do where they are extras."""
    hidden = Counter(
        place(path)
        for path in modules().values()
        for node in {node for _, node, inside in own_imports(path) if inside}
        if not place(path).startswith("recipe_lib/cli/")
    )
    more = {name: count for name, count in hidden.items() if count > HIDDEN.get(name, 0)}
    assert not more, f"imports inside functions: {more}; import at the top, or ask for what is needed as an argument"
    assert hidden.keys() == HIDDEN.keys(), "fewer than the list says: shorten it"


@cache
def modules() -> dict[str, Path]:
    """The library's modules by their names; a package is its `__init__`."""
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in python_files("recipe_lib")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


@cache
def own_imports(path: Path) -> list[tuple[str, ast.stmt, bool]]:
    """Each module of ours that a file imports, the statement, and whether that stands in a function."""
    found: list[tuple[str, ast.stmt, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [whole if whole in modules() else node.module for whole in wholes]
        found.extend((name, node, inside) for name in names if name in modules())
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(tree(path), False)
    return found
