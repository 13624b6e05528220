"""docs/api.md has every name that a recipe or a documented plugin takes from recipe_lib, and no
other.
"""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from tests.house.documents import list_blocks, list_documents
from tests.house.files import ROOT, list_python_files, parse_tree

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)


def test_every_name_that_recipes_use_is_on_the_page():
    used = {name for path in list_python_files("recipes") for name in names_of(parse_tree(path))}
    pages = [
        path for path in list_documents() if path.name != "extending.md"
    ]  # whose code is the library's
    texts = [
        block.text for path in pages for block in list_blocks(path) if block.language == "python"
    ]
    used |= {
        name
        for text in texts
        if text.startswith(("import ", "from "))
        for name in names_of(ast.parse(text))
    }
    used.add("recipe_lib.config.schema.key")  # docs/your_recipe.md has its import in a sentence
    assert set(LISTED) == used
    assert len(LISTED) == len(used)


def test_every_name_on_the_page_exists_and_is_described():
    for name in LISTED:
        module, _, attribute = name.rpartition(".")
        value = getattr(import_module(module), attribute)
        assert not callable(value) or value.__doc__, name


def names_of(module: ast.Module) -> Iterator[str]:
    """Full names of what is imported from recipe_lib; of an imported module the attributes that are
    used.
    """
    modules = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "recipe_lib":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if is_module(full):
                    modules[alias.asname or alias.name] = full
                else:
                    yield full
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            yield f"{modules[node.value.id]}.{node.attr}"


def is_module(name: str) -> bool:
    """Whether a full name is a module's, and not that of something in one."""
    package, _, last = name.rpartition(".")
    inside = getattr(import_module(package), last, None)
    return inside is None or isinstance(inside, ModuleType)
