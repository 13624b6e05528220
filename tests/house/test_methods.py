"""What knows single methods: their folders and recipes. All else asks the config class."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from recipe_lib.config.paths import read_recipe_configs
from tests.house.files import ROOT, list_python_files, parse_tree

FOLDERS = sorted(path.parent.name for path in (ROOT / "recipe_lib/methods").glob("*/config.py"))
NAMES = re.compile(rf"(?<![a-z])({'|'.join([*FOLDERS, 'kto', 'teacher'])})", re.IGNORECASE)
ABOVE = ("methods", "cli", "evaluation", "external")  # floors that are not below the methods

# Files with such a word in their code, and why.
ALLOWED = {
    # `kto` is a value of `data.format`, as `preference` is, and a word that rows have.
    "recipe_lib/config/key_conditions.py": "formats",
    "recipe_lib/config/registry.py": "formats",
    "recipe_lib/config/schema.py": "formats",
    "recipe_lib/config/schema_data.py": "formats",
    "recipe_lib/config/aliases.py": "formats",
    "recipe_lib/data/column_names.py": "formats, and words that rows have",
    "recipe_lib/data/find_format.py": "formats, and the recipe that takes them, in an error",
    "recipe_lib/data/formats.py": "formats",
    "recipe_lib/data/samples.py": "formats, and words that rows have",
    # A line for the user says which recipe there is for what this one cannot do.
    "recipe_lib/config/compatibility/data_rules.py": "remedies, a recipe to show one on",
    "recipe_lib/config/compatibility/rule.py": "a recipe to show a combination on",
    "recipe_lib/data/dataset_report.py": "a remedy",
    "recipe_lib/checkpoint/tensor_matching.py": "a remedy",
    "recipe_lib/models/families.py": "remedies",
    # What torchtune has recipes, losses and keys for.
    "recipe_lib/config/torchtune/import_file.py": "another tool's recipes",
    "recipe_lib/config/torchtune/key_tables.py": "another tool's recipes",
    # Names of models on the hub have such a word.
    "recipe_lib/plan/simulated_world/shape_only_model.py": "models that were distilled",
    # A function of tensors, of which a method's loss is made.
    "recipe_lib/ops/distillation.py": "a head loss",
    "recipe_lib/ops/head_losses.py": "a head loss",
}


def find_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, word) of each name of a method in a file's code: neither comments nor docstrings."""
    docstrings = {  # of fields, too
        id(node.value) for node in ast.walk(parse_tree(path)) if isinstance(node, ast.Expr)
    }
    for node in ast.walk(parse_tree(path)):
        words = [
            getattr(node, "id", None),
            getattr(node, "attr", None),
            getattr(node, "arg", None),
            getattr(node, "name", None),
            getattr(node, "module", None),
        ]
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            words.append(node.value)
        for word in words:
            if isinstance(word, str) and (found := NAMES.search(word.replace("_", " "))):
                yield getattr(node, "lineno", 0), found[0]


def test_no_file_below_the_methods_knows_one_by_name() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in list_python_files("recipe_lib")
        if path.relative_to(ROOT).parts[1] not in ABOVE and any(find_names(path))
    }
    assert found == set(ALLOWED)


def test_each_recipe_of_a_method_has_its_folder() -> None:
    """And its class is found there."""
    for name, config_class in read_recipe_configs().items():
        folder = config_class.__module__.split(".")[2]
        assert (ROOT / "recipes" / f"{name}.py").is_file()
        assert folder in FOLDERS or config_class.__module__ == "recipe_lib.config.schema"
        assert all(rule.recipe == name for rule in vars(config_class).get("rules", ()))
    for folder in FOLDERS:  # which import-linter would pass over without it
        assert (ROOT / "recipe_lib/methods" / folder / "__init__.py").read_bytes() == b""


def test_configs_of_methods_are_read_without_torch() -> None:
    code = (
        "import sys; from recipe_lib.config.paths import read_recipe_configs as read;"
        " read(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
