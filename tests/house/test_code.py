"""What no code of ours does: run what a file says, hide a default, leave a part unwritten."""

import ast
import re
from collections import Counter

import pytest

from tests.house.files import ROOT, format_location, list_python_files, parse_tree

BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
# Writes the one format that PyTorch's memory viewer reads; it may write pickles and read none.
# What inductor wrote for a graph of ours, as inductor itself would run it.
RUNS_WRITTEN_CODE = {"recipe_lib/plan/simulated_world/compiled_code.py"}
WRITES_PICKLES = {"recipe_lib/plan/allocation/replay.py"}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


@pytest.mark.slow
def test_nothing_is_executed_or_unpickled():
    for path in list_python_files():
        for node in ast.walk(parse_tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                allowed = (
                    {"exec", "compile"}
                    if str(path.relative_to(ROOT)) in RUNS_WRITTEN_CODE
                    else set()
                )
                assert node.func.id not in BANNED_CALLS - allowed, (
                    f"{format_location(path, node)}: calls {node.func.id}"
                )
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                if str(path.relative_to(ROOT)) in WRITES_PICKLES:
                    names -= {"pickle"}
                assert not names & BANNED_MODULES, (
                    f"{format_location(path, node)}: imports {names & BANNED_MODULES}"
                )
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr == "dumps", f"{format_location(path, node)}: pickle.{node.attr}"
            if isinstance(node, ast.ImportFrom):
                assert node.module not in BANNED_MODULES, (
                    f"{format_location(path, node)}: imports {node.module}"
                )
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "torch.save",
                "yaml.load",
            ):
                raise AssertionError(
                    f"{format_location(path, node)}: {ast.unparse(node.func)} can run or write code"
                )


@pytest.mark.slow
def test_no_remote_code():
    for path in list_python_files():
        for node in ast.walk(parse_tree(path)):
            if isinstance(node, ast.keyword):
                is_false = getattr(node.value, "value", True) is False
                # False is said where transformers would ask the user on the terminal otherwise.
                assert node.arg != "trust_remote_code" or is_false, (
                    f"{format_location(path, node.value)}: trust_remote_code"
                )
                allowed = not (node.arg == "weights_only" and is_false)
                assert allowed, f"{format_location(path, node.value)}: weights_only=False"


def test_no_bare_except():
    for path in list_python_files():
        for node in ast.walk(parse_tree(path)):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), (
                f"{format_location(path, node)}: bare except"
            )


def test_no_hidden_defaults():
    """`cfg.get(key, default)` and `getattr(cfg, key, default)` would be defaults that the schema
    does not show.
    """
    for path in list_python_files("recipes"):
        for node in ast.walk(parse_tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cfg.get", "self.cfg.get"):
                raise AssertionError(
                    f"{format_location(path, node)}: a default that the schema does not show"
                )
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "getattr"
                and len(node.args) == 3
            ):
                assert "cfg" not in ast.unparse(node.args[0]), (
                    f"{format_location(path, node)}: a default outside of the schema"
                )


def test_nothing_is_left_unwritten():
    for path in list_python_files():
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            assert not UNFINISHED.search(line), f"{format_location(path)}:{number}: {line.strip()}"
        for node in ast.walk(parse_tree(path)):
            raised = node.exc if isinstance(node, ast.Raise) else None
            assert raised is None or "NotImplementedError" not in ast.unparse(raised), (
                format_location(path, node)
            )


@pytest.mark.parametrize(
    "folder", ["recipes", "recipe_lib/models", "recipe_lib/ops", "recipe_lib/memory"]
)
def test_device_is_injected(folder: str):
    """Code of a training step runs on whatever device it is given, a simulated one too."""
    for path in list_python_files(folder):
        for node in ast.walk(parse_tree(path)):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                assert not text.startswith("torch.cuda.") and node.attr != "is_cuda", (
                    f"{format_location(path, node)}: {text}"
                )


# Names of files that several packages have -> why.
SHARED_FILES = {
    "__init__.py": "what a package hands on",
    "run.py": "`tune run` has a file by its verb; training/run.py is what a recipe's main calls",
}


def test_names_of_files_and_classes_are_not_shared():
    """A reader who searches for a file or a class finds one. Classes: none is shared, private ones
    included.
    """
    files, classes = Counter[str](), Counter[str]()
    for path in list_python_files("recipe_lib"):
        # Each method has its config and its loss under the same names.
        is_of_method = "recipe_lib/methods/" in path.as_posix()
        files[path.name] += not (is_of_method and path.name in ("config.py", "loss.py"))
        classes.update(
            node.name for node in ast.walk(parse_tree(path)) if isinstance(node, ast.ClassDef)
        )
    assert {name for name, count in files.items() if count > 1} == set(SHARED_FILES)
    assert [name for name, count in classes.items() if count > 1] == []
