"""The code is written in one hand: CONTRIBUTING.md says it in ten lines, hand.py measures it."""

import ast

from tests.house.files import format_location, list_python_files, parse_tree
from tests.house.hand import begins_with_verb, is_tuple_of_unlike, list_functions, measure

LIBRARY = list(list_python_files("recipe_lib"))
RECIPES = list(list_python_files("recipes"))


def test_functions_begin_with_a_verb():
    others = [
        f"{format_location(path)}: {name}"
        for path in LIBRARY
        for name in list_functions(path)
        if not begins_with_verb(name)
    ]
    assert len(others) <= measure(LIBRARY)["functions"] / 20, others


def test_no_function_is_named_by_what_it_belongs_to():
    """`x_of` says neither what is done nor, often, what is returned."""
    named = [
        f"{format_location(path)}: {name}"
        for path in [*LIBRARY, *RECIPES]
        for name in list_functions(path)
        if name.endswith("_of")
    ]
    assert not named


def test_docstrings_have_a_subject_or_a_verb():
    counts = measure(LIBRARY)
    assert counts["relative docstrings"] <= counts["docstrings"] / 400


def test_one_statement_a_line():
    counts = measure(LIBRARY)
    assert counts["tuples"] <= 0.3 * counts["code"] / 1000
    assert not [
        f"{format_location(path, node)}"
        for path in RECIPES
        for node in ast.walk(parse_tree(path))
        if is_tuple_of_unlike(node)
    ]


def test_calls_name_their_arguments():
    counts = measure([*LIBRARY, *RECIPES])
    assert counts["positional calls"] <= 0.5 * counts["code"] / 1000


def test_reasons_stand_at_the_lines():
    counts = measure(LIBRARY)
    assert counts["comments"] >= 80 * counts["code"] / 1000


def test_the_measure_sees_what_it_counts():
    assert begins_with_verb("build_model") and not begins_with_verb("model_of")
    assert is_tuple_of_unlike(ast.parse("a, b = 1, 2").body[0])
    assert not is_tuple_of_unlike(ast.parse("a, b = f()").body[0])
