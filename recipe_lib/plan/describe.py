"""The reference of `tune plan --json`, made from the dataclasses of `result.py` and their docstrings.

`python -m recipe_lib.plan.describe > docs/plan_json.md` writes the page.
"""

import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from recipe_lib.plan.result import DOES_NOT_FIT, FITS, RISKY, SCHEMA_VERSION, Plan
from recipe_lib.plan.trace import PARTS, STORAGE_KINDS


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


_INTRODUCTION = f"""\
# What `tune plan --json` writes

Generated from `recipe_lib/plan/result.py` by `python -m recipe_lib.plan.describe`; do not edit it by hand.

One object: `schema`, the number {SCHEMA_VERSION}, and the keys of [Plan](#plan). The number is raised when a key
changes its meaning or goes away; new keys may come without it, so pass over those that you do not know.
`Plan.from_json` reads the object back and refuses another number.

Sizes are bytes, times seconds.

| text | is one of |
|---|---|
| a verdict | {_listed((FITS, RISKY, DOES_NOT_FIT))} |
| a kind of memory | {_listed(STORAGE_KINDS)} |
| a part of a step | {_listed(PARTS)} |
"""


def markdown() -> str:
    """The page: a section for each class, in the order in which the plan names them."""
    return "\n".join([_INTRODUCTION, *(_section(found) for found in classes())])


def classes() -> list[type]:
    """`Plan` and every dataclass that it is made of."""
    found: list[type] = [Plan]
    for known in found:  # grows while it is walked
        for declared in get_type_hints(known).values():
            for part in _parts(declared):
                if isinstance(part, type) and is_dataclass(part) and part not in found:
                    found.append(part)
    return found


def descriptions(described: type) -> tuple[str, dict[str, str]]:
    """(what the class is, field -> its description), from a docstring of the form `What. name, name: text. ...`."""
    text = " ".join((described.__doc__ or "").split())
    names = {entry.name for entry in fields(described)}
    about, *pieces = re.split(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ", text)
    texts: dict[str, str] = {}
    last: list[str] = []
    for words, said in zip(pieces[::2], pieces[1::2], strict=True):
        if set(words.split(", ")) <= names:
            last = words.split(", ")
            texts |= dict.fromkeys(last, said)
        else:  # a colon within a description
            about += "" if last else f"{words}: {said}"
            texts |= {name: f"{texts[name]}{words}: {said}" for name in last}
    return about.strip(), {name: text.strip(" ;.") for name, text in texts.items()}


def _parts(declared: Any) -> list[Any]:
    """A type and the types inside it: `list[RankPlan] | None` names RankPlan."""
    return [declared, *(part for inside in get_args(declared) for part in _parts(inside))]


def type_name(declared: Any) -> str:
    """`list[list[int]]` -> `list of list of integer`: a type in words of JSON."""
    if is_dataclass(declared):
        name = declared.__name__ if isinstance(declared, type) else str(declared)
        return f"[{name}](#{name.lower()})"
    plain = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything", type(None): "null"}
    if declared in plain:
        return plain[declared]
    inside = get_args(declared)
    if type(None) in inside:
        return f"{type_name(next(part for part in inside if part is not type(None)))} or null"
    if get_origin(declared) is list:
        return f"list of {type_name(inside[0])}"
    return f"object, name to {type_name(inside[1])}"


def _section(described: type) -> str:
    about, named = descriptions(described)
    declared = get_type_hints(described)
    lines = [f"## {described.__name__}", "", about, "", "| key | type | what it is |", "|---|---|---|"]
    for entry in fields(described):
        if not entry.compare:
            continue
        optional = entry.default is not MISSING or entry.default_factory is not MISSING
        kind = type_name(declared[entry.name]) + (" (may be left out)" if optional else "")
        text = re.sub(r"\bNone\b", "null", named.get(entry.name, "")).replace("|", "\\|")
        lines.append(f"| `{entry.name}` | {kind} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
