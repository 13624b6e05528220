"""Import layers, what each import costs, and that only declared packages are imported."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_lib.cli.main import VERBS, get_module_name
from tests.house.files import ROOT, format_location, list_python_files, parse_tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMES_WITH = {
    "numpy": "safetensors",
    "yaml": "omegaconf",
    "markupsafe": "jinja2",
    "networkx": "torch",
}  # extra or requirement of a direct dependency


def test_import_layers_are_kept():
    """import-linter: lower layers only, siblings not each other, every folder has a layer, config
    free of torch.
    """
    tool = Path(sys.executable).parent / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed beside this Python")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_verb_imports_another():
    """What two verbs need stands in a file of its own, so that each verb is read by itself."""
    verbs = {get_module_name(verb) for verb in VERBS}
    for path in list_python_files("recipe_lib/cli"):
        for node, module in imports(parse_tree(path)):
            named = {alias.name for alias in node.names} if module == "recipe_lib.cli" else set()
            found = ({module} | {f"recipe_lib.cli.{name}" for name in named}) & verbs
            assert not found, f"{format_location(path, node)}: imports the verb {found}"


@pytest.mark.slow
def test_recipes_are_not_imported():
    """recipe_lib loads a recipe by its path; nothing imports one by name, and no recipe imports
    another.
    """
    names = {path.stem for path in list_python_files("recipes")} | {"recipes"}
    for path in list_python_files():
        for node, module in imports(parse_tree(path)):
            assert module.split(".")[0] not in names, (
                f"{format_location(path, node)}: imports the recipe {module}"
            )


def test_imports_are_declared():
    """At the top of a file: direct dependencies. Packages of an extra: inside the function that
    needs them.
    """
    own = {"recipe_lib", "recipes", "tests", "benchmarks", "examples"}
    direct = {distribution(line) for line in PROJECT["project"]["dependencies"]}
    extra = {
        distribution(line)
        for lines in PROJECT["project"]["optional-dependencies"].values()
        for line in lines
    }
    for path in list_python_files("recipe_lib", "recipes"):
        top = {id(node) for node in parse_tree(path).body}
        for node, module in imports(parse_tree(path)):
            name = module.split(".")[0]
            if name in own or name in sys.stdlib_module_names:
                continue
            package = COMES_WITH.get(name, name.replace("-", "_").lower())
            allowed = direct if id(node) in top else direct | extra
            assert package in allowed, (
                f"{format_location(path, node)}: {name} is not declared in pyproject.toml for this use"
            )


# (file, package) of imports inside functions that are no package of an extra -> why they wait.
LATE = {
    ("recipe_lib/__main__.py", "recipe_lib"): "Ctrl-C during the import is answered, too",
    (
        "recipe_lib/config/references.py",
        "omegaconf",
    ): "0.1 s of CPU in every verb; few configs name other keys",
    (
        "recipe_lib/plan/simulated_world/compiled_code.py",
        "torch",
    ): "inductor: 1 s, which plans of compiled layers alone need",
    (
        "recipe_lib/external/compiled_layers.py",
        "torch",
    ): "torch's partitioner: 0.2 s, 366 modules; few compile",
    ("recipe_lib/ops/kept_tensors.py", "networkx"): "0.2 s; a step that frees tensors needs it",
    ("recipe_lib/report/page.py", "jinja2"): "30 ms of `tune plan` on a terminal, with the next",
    (
        "recipe_lib/tokenizers/template_process.py",
        "jinja2",
    ): "its own process renders chat templates",
    ("recipe_lib/memory/qat.py", "torchao"): "1.3 s, which only runs with qat need",
    (
        "recipe_lib/training/run_log.py",
        "torch",
    ): "torch.utils.tensorboard needs the extra tensorboard",
    (
        "recipe_lib/parallel/pipeline/schedules.py",
        "torch",
    ): "1 s, 834 modules; few runs have such a schedule",
}


def test_imports_stand_at_the_top():
    """Those inside functions are packages of an extra, or measured to be slow and seldom needed.
    The CLI may wait: no verb pays for another, and none for torch before it needs it.
    """
    extra = {
        distribution(line)
        for lines in PROJECT["project"]["optional-dependencies"].values()
        for line in lines
    }
    found = set()
    for path in list_python_files("recipe_lib", "recipes"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("recipe_lib/cli/"):
            continue
        for function in ast.walk(parse_tree(path)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            for node, module in imports(function):
                package = module.split(".")[0]
                if package.replace("-", "_").lower() not in extra:
                    assert (
                        name,
                        package,
                    ) in LATE, f"{format_location(path, node)}: imports {module} inside a function"
                    found.add((name, package))
    assert found == set(LATE)


def test_ten_dependencies():
    names = sorted(distribution(line) for line in PROJECT["project"]["dependencies"])
    assert names == sorted(
        "torch torchao omegaconf sentencepiece tiktoken huggingface_hub safetensors tokenizers"
        " jinja2 rich".split()
    )


def test_torchao_is_named_in_one_module_for_each_use():
    """Its modules move: NF4's quantizing, rounded linears, what `tune doctor` looks at, what tests
    and benchmarks compare with.
    """
    named = re.compile(
        r"^\s*(?:from torchao[\w.]* import|import torchao[\w.]*$)|[\"']torchao\.\w", re.MULTILINE
    )
    paths = [
        path
        for path in (*list_python_files(), *list_python_files("tests"))
        if path != Path(__file__)
    ]
    found = {path.relative_to(ROOT).as_posix() for path in paths if named.search(path.read_text())}
    expected = {
        "recipe_lib/adapters/nf4.py",
        "recipe_lib/cli/doctor.py",
        "recipe_lib/memory/qat.py",
    }
    expected |= {"tests/torchao_oracle.py"}
    assert found == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["ls"],
        ["cat", "llama3/8B_full"],
        ["validate", "demo/full"],
        ["run", "--help"],
        ["cp", "--help"],
    ],
    ids=" ".join,
)
def test_no_torch_before_it_is_needed(words: list[str], tmp_path: Path):
    words = [*words, f"output_dir={tmp_path}/out"] if words[0] == "validate" else words
    code = (
        f"import sys, json\nfrom recipe_lib.cli.main import main\ncode = main({words!r})\nheavy ="
        " {'torch', 'torchao', 'numpy', 'transformers', 'huggingface_hub'} &"
        " set(sys.modules)\nprint(json.dumps([code, sorted(heavy)]), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stderr.splitlines()[-1]) == [0, []], done.stderr


def test_ls_is_quick():
    """0.3 s of CPU is the aim; the limit here leaves room for a busy machine."""
    before = os.times()
    seconds = []
    for _ in range(3):
        subprocess.run(
            [sys.executable, "-m", "recipe_lib.cli.main", "ls"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        after = os.times()
        seconds.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        before = after
    assert min(seconds) < 0.6, seconds


def imports(module: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Each import of a file or function, wherever it stands, and the module that it names."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node, node.module


def distribution(line: str) -> str:
    """`safetensors[numpy]>=0.5,<1` -> `safetensors`."""
    name = line
    for mark in "[<>=!~; ":
        name = name.split(mark)[0]
    return name.replace("-", "_").lower()
