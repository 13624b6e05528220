"""A user's recipe by its text: which of our config classes it takes, before its file is imported, and torch with it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from recipe_lib.config.paths import RECIPE_CONFIGS
from recipe_lib.reading import read_bytes

MAX_BYTES = 2**22
_CONFIGS = {config.__name__: config for config in RECIPE_CONFIGS.values()}


def shipped_config_of(path: Path) -> type | None:
    """The class of ours that a recipe's config is, or that it adds keys to; None for a recipe of another kind.

    The recipe has to begin as ours do, with `run_recipe(..., parse_arguments(argv, Config))` in `main(argv)`, so that
    what its command line, its model and its data have to be is known.
    """
    try:
        module = ast.parse(read_bytes(path, MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # importing says it
        return None
    mains = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == "main"]
    name = _parsed_with(mains[0]) if len(mains) == 1 else None
    return None if name is None else _resolved(module, name, 0)


def _parsed_with(main: ast.FunctionDef) -> str | None:
    """The name of the class that `main` reads its words with, as they are."""
    if len(main.args.args) != 1:
        return None
    words = main.args.args[0].arg
    if any(isinstance(one, ast.Name) and one.id == words and isinstance(one.ctx, ast.Store) for one in ast.walk(main)):
        return None
    for call in _calls(main, "run_recipe"):
        match call.args:
            case [_, ast.Call(func=ast.Name("parse_arguments"), args=[ast.Name(given), ast.Name(config)], keywords=[])]:
                return config if given == words else None
    return None


def _calls(main: ast.FunctionDef, function: str) -> Iterator[ast.Call]:
    """Calls of a function, by its name or as `training.NAME`."""
    for call in ast.walk(main):
        if isinstance(call, ast.Call):
            called = call.func
            if function in (getattr(called, "id", None), getattr(called, "attr", None)):
                yield call


def _resolved(module: ast.Module, name: str, depth: int) -> type | None:
    """What a name at the top of a file stands for, if it is said once."""
    said: list[type | None] = []
    for line in module.body:
        match line:
            case ast.ImportFrom(module=str(source), names=names, level=0):
                found = [one.name for one in names if (one.asname or one.name) == name]
                said += [_CONFIGS.get(one) if source.startswith("recipe_lib.config") else None for one in found]
            case ast.Assign(targets=targets, value=value):
                if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                    said.append(_of_other(module, value, name, depth))
            case ast.ClassDef(name=own, bases=[base], keywords=[]) if own == name:
                parent = _of_other(module, base, name, depth)
                said.append(parent if parent and _adds_only(line, parent) else None)
            case ast.ClassDef(name=own) | ast.FunctionDef(name=own) if own == name:
                said.append(None)
    return said[0] if len(said) == 1 else None


def _of_other(module: ast.Module, value: ast.expr, name: str, depth: int) -> type | None:
    """What another name stands for, through a few at most."""
    if not isinstance(value, ast.Name) or value.id == name or depth == 8:
        return None
    return _resolved(module, value.id, depth + 1)


def _adds_only(body: ast.ClassDef, parent: type) -> bool:
    """Whether a class changes nothing of its parent: keys are added, and the recipe's name may be another."""
    for line in body.body:
        match line:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case ast.AnnAssign(target=ast.Name(name)) if name == "recipe" or not hasattr(parent, name):
                if name not in getattr(parent, "__dataclass_fields__", {}) or name == "recipe":
                    continue
        return False
    return True
