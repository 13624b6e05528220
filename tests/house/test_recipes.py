"""Each recipe shows its step: the calls that a reader wants to see, and to change, stand in its own
file.
"""

import ast
from pathlib import Path

import pytest

from tests.house.files import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
# What a step divides by, so that losses are means over all ranks.
COUNTS = {"num_label_tokens", "num_items"}


def find_method(path: Path, name: str) -> ast.FunctionDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (method,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return method


def list_calls(node: ast.AST) -> list[str]:
    """The names that are called, in the order of the text, without what they are attributes of."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))
    return [ast.unparse(call.func).rpartition(".")[2] for call in calls]


def find_loops(method: ast.FunctionDef, over: str) -> list[ast.For]:
    return [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.For) and over in list_calls(node.iter)
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_shows_its_step(path: Path) -> None:
    step = find_method(path, "train_step")
    (loop,) = find_loops(step, "micro_batches")
    divided = [
        attribute.attr
        for node in ast.walk(loop)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        for attribute in ast.walk(node.right)
        if isinstance(attribute, ast.Attribute)
    ]
    assert COUNTS & set(divided), "the loss of a micro-batch is divided in the loop"
    body = [name for statement in loop.body for name in list_calls(statement)]
    assert body.index("compute_loss") < body.index("backward") and body.count("backward") == 1
    after = list_calls(ast.Module([node for node in step.body if node.lineno > loop.lineno], []))
    order = ["all_reduce_gradients", "clip_grad_norm", "step", "zero_grad", "Step"]
    assert [name for name in after if name in order] == order
    assert all(isinstance(node, ast.FunctionDef) is False for node in step.body), "no closures"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_shows_its_learning_rate(path: Path) -> None:
    train = find_method(path, "train")
    (loop,) = find_loops(train, "steps")
    body = [name for statement in loop.body for name in list_calls(statement)]
    assert body.index("schedule") < body.index("set_learning_rate") < body.index("train_step")
    assert "build_lr_schedule" in list_calls(train)


def test_what_recipes_do_alike_they_spell_alike() -> None:
    """These methods are the same text in all of them, but for comments and docstrings."""
    for name in ("resume", "main"):
        bodies = set()
        for path in RECIPES:
            method = find_method(path, name)
            text = ast.unparse(ast.Module(method.body[1:], []))
            bodies.add(text.replace(find_class(path), "Recipe"))
        assert len(bodies) == 1, name


def find_class(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node.name for node in tree.body if isinstance(node, ast.ClassDef))
