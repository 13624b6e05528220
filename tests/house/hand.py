"""Count what breaks "The hand" of CONTRIBUTING.md: `python -m tests.house.hand [FOLDER ...]`.

Counts are printed for a thousand lines of code, without docstrings, comments and blank lines. Verbs
are those of `verbs.txt`, as the first word of a function's name. tests/house/test_hand.py has the
limits.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house.files import ROOT, list_python_files, parse_tree

VERBS = frozenset((ROOT / "tests" / "house" / "verbs.txt").read_text(encoding="utf-8").split())
# First words of a docstring that has no subject and no verb.
RELATIVE = frozenset(("What", "Whether", "Where", "How", "Which", "Those", "Of", "As"))
MANY_POSITIONALS = 6  # arguments from which on a call without names is counted
_LAYOUT = (  # tokens that make no line a line of code
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
# Nodes that may have a docstring.
_DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def measure(paths: list[Path]) -> Counter[str]:
    """Return the counts of all files together; `_measure_file` has their names."""
    counts = Counter[str]()
    for path in paths:
        counts += _measure_file(path)
    return counts


def list_functions(path: Path) -> Iterator[str]:
    """Yield the names of a file's top-level functions, without leading underscores."""
    for node in parse_tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name.lstrip("_")


def begins_with_verb(name: str) -> bool:
    """Return True if the first word of a function's name is a verb."""
    return name.split("_")[0] in VERBS


def is_tuple_of_unlike(node: ast.AST) -> bool:
    """Return True for `a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


@cache
def _measure_file(path: Path) -> Counter[str]:
    """Return the counts of one file, by name.

    comments, code: lines. statements, docstrings, functions: numbers of them; functions at the top
    level only. tuples: assignments `a, b = x, y`. positional calls: calls with MANY_POSITIONALS or
    more. relative docstrings: those that begin with a word of RELATIVE. verbs, x_of: functions that
    begin with a verb, or end with `_of`.
    """
    counts = Counter[str]()
    code, num_comments = _count_lines(path)
    counts["comments"] = num_comments
    for node in ast.walk(parse_tree(path)):
        counts["statements"] += isinstance(node, ast.stmt)
        counts["tuples"] += is_tuple_of_unlike(node)
        counts["positional calls"] += (
            isinstance(node, ast.Call) and len(node.args) >= MANY_POSITIONALS
        )
        docstring = ast.get_docstring(node) if isinstance(node, _DESCRIBED) else None
        if docstring:
            counts["docstrings"] += 1
            counts["relative docstrings"] += docstring.split()[0] in RELATIVE
        if isinstance(node, _DESCRIBED) and node.body:
            code -= _list_docstring_lines(node)
    counts["code"] = len(code)
    for name in list_functions(path):
        counts["functions"] += 1
        counts["verbs"] += begins_with_verb(name)
        counts["x_of"] += name.endswith("_of")
    return counts


def _count_lines(path: Path) -> tuple[set[int], int]:
    """Return the lines that have code or docstrings, and the number of lines with a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    readline = io.StringIO(path.read_text(encoding="utf-8")).readline
    for token in tokenize.generate_tokens(readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, len(comments)


def _list_docstring_lines(node: ast.AST) -> set[int]:
    """Return the numbers of the lines of a module's, class's or function's docstring."""
    first = node.body[0]  # type: ignore[attr-defined]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return set()
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def main() -> None:
    """Print the counts of each folder that is named, or of recipe_lib's packages."""
    names = sys.argv[1:] or [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "recipe_lib").iterdir())
        if path.is_dir() and not path.name.startswith("_")
    ]
    for name in [*names, "recipe_lib"]:
        counts = measure(list(list_python_files(name)))
        thousand = max(counts["code"], 1) / 1000
        functions = max(counts["functions"], 1)
        print(
            f"{name:28} {counts['statements']:6} statements, {counts['code']:6} lines,"
            f" {counts['verbs'] / functions:5.1%} verbs, {counts['x_of']:3} x_of,"
            f" {counts['relative docstrings'] / max(counts['docstrings'], 1):5.1%} relative;"
            f" in a thousand: {counts['tuples'] / thousand:4.1f} tuples,"
            f" {counts['positional calls'] / thousand:4.2f} positional calls,"
            f" {counts['comments'] / thousand:5.1f} comments"
        )


if __name__ == "__main__":
    main()
