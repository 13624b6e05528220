"""Explains a key that the schema does not have: `unknown key; did you mean optimizer.lr?`.

The answer is the name that the key has here, the nearest spelling, or nothing. Nothing rather than
something far: another tool's name leads to ours only where both mean the same, and a spelling only
where each word of it is near. `read_aliases` has the tables of other tools' names.
"""

from collections.abc import Iterable

from recipe_lib.config.aliases import GENERIC, NOTHING_LIKE_IT
from recipe_lib.config.flat_schema import Schema, read_schema
from recipe_lib.config.recipe_configs import read_aliases, read_recipe_configs
from recipe_lib.config.suggest import find_nearest


def find_hint(name: str, schema: Schema, *, in_file: bool = False) -> tuple[str, list[str]]:
    """Return (`; did you mean X?` or another hint, the keys that it names)."""
    meant_keys = find_meant_keys(name, schema)
    section, _, word = name.rpartition(".")
    if meant_keys == [name] and section and in_file:
        # Right but for its form: a file has keys of a section indented under it.
        return f"; write {word}: under {section}:", meant_keys
    answer = read_aliases().answers.get(_normalize(name))
    if not answer and not meant_keys:
        answer = read_aliases().answers.get(_normalize(word)) or _describe_owner(name, schema)
    if answer:
        return f"; {answer}", []
    if meant_keys:
        return f"; did you mean {' or '.join(meant_keys)}?", meant_keys
    ours = _find_section(section, schema)
    if ours:
        words = [child.removeprefix(f"{ours}.") for child in schema.list_children(ours)]
        return f"; the keys of {ours} are {', '.join(words)}", []
    return "; `tune cat CONFIG --describe` lists all keys", []


def find_meant_keys(name: str, schema: Schema) -> list[str]:
    """Return our names for an unknown one, mostly one or none.

    By another tool's name for it, the section that it belongs to, or the nearest spelling.
    """
    valid = [name for name in (*schema.keys, *schema.sections) if name]
    alias = read_aliases().keys.get(_normalize(name), name)
    section, _, word = name.rpartition(".")
    word = _normalize(word)
    ours = _find_section(section, schema)
    if alias in valid:
        return [alias]
    if word in NOTHING_LIKE_IT or ours is None:
        return []
    if section.endswith("]"):
        # Sections of a list, as data.sources[0], have mostly the keys of the one around them.
        alias = read_aliases().keys.get(f"{section.partition('.')[0]}.{word}", "")
        inside = f"{section}.{alias.rpartition('.')[2]}"
        if inside in valid:
            return [inside]
    # First among the keys of its own section, then among all of them.
    scopes = [(f"{ours}.{word}", schema.list_children(ours))] if ours else []
    if not section or word not in GENERIC:
        scopes.append((word, valid))
    for scoped_name, keys in scopes:
        alias = read_aliases().keys.get(scoped_name, "")
        if alias in valid:
            return [alias]
        similar_keys = _find_similar_keys(word, keys, in_section=bool(ours))
        if similar_keys:
            top_level = [key for key in similar_keys if "." not in key]
            return top_level or similar_keys[:3]
    return []


def _find_similar_keys(word: str, keys: list[str], *, in_section: bool) -> list[str]:
    words = [key.rpartition(".")[2] for key in keys]
    is_exact = word in words or word in GENERIC
    similar_word = word if is_exact else find_misspelled_name(word, words)
    if similar_word in ("name", "type") and not in_section:
        return []  # of which section nobody knows
    return [key for key in keys if key.rpartition(".")[2] == similar_word]


def find_misspelled_name(written: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that `written` is a misspelling of.

    It has to be nearer than a choice's: there are many keys, so that something is always near.
    """
    # difflib takes two swapped letters for two mistakes.
    anagrams = [name for name in valid if sorted(name) == sorted(written)]
    if anagrams:
        return anagrams[0]
    return find_nearest(written, valid, cutoff=0.85 if len(written) > 4 else 0.8)


def is_foreign_section(name: str) -> bool:
    """Return True for a section that only other tools have, as torchtitan's `training`."""
    return _normalize(name) in read_aliases().sections


def _normalize(name: str) -> str:
    return name.lower().replace("-", "_")


def _find_section(section: str, schema: Schema) -> str | None:
    """Return our section for one as written; `""` for one whose keys are at the top level here.

    It is ours already, another tool's, or a misspelling of ours.
    """
    outer = _normalize(section.partition(".")[0])
    ours = section if section in schema.sections else read_aliases().sections.get(outer)
    if ours is None:
        ours = find_misspelled_name(outer, [name for name in schema.sections if name])
    return ours if ours in schema.sections else None


def _describe_owner(name: str, schema: Schema) -> str:
    """Return `lora.rank is a key of the recipe lora_finetune_distributed` of another's key."""
    if _normalize(name) in read_aliases().ambiguous or "[" in name:
        return ""
    for recipe, config_class in read_recipe_configs().items():
        view = read_schema(config_class)
        meant_keys = find_meant_keys(name, view)
        if len(meant_keys) != 1:
            continue
        key = meant_keys[0]
        if key not in schema.keys and key not in schema.sections:
            return f"{key} is a {'key' if key in view.keys else 'section'} of the recipe {recipe}"
    return ""
