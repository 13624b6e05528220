"""What to say of a key that there is not: the name that it has here, the nearest spelling, or nothing.

Nothing rather than something far: another tool's name leads to ours only where both mean the same, and a spelling only
where each word of it is near.
"""

from collections.abc import Iterable
from difflib import SequenceMatcher

from recipe_lib.config.aliases import GENERIC, KEY_ALIASES, NOTHING_LIKE_IT, SECTION_ALIASES
from recipe_lib.config.keys import Schema, read_schema
from recipe_lib.config.paths import RECIPE_CONFIGS


def hint_for(name: str, section: str, schema: Schema, *, in_file: bool) -> tuple[str, list[str]]:
    """(`; did you mean X?` or another hint, the keys it names). section: that the key stands in, empty if unknown."""
    owner = _owner(name, schema)
    meant = [] if owner else meant_by(name, schema)
    if owner:
        return f"; {owner}", meant
    if meant:
        hint = f"; did you mean {' or '.join(meant)}?"
        if in_file and meant == [name] and "." in name:
            hint = f"; write {name.rpartition('.')[2]}: under {name.rpartition('.')[0]}:"
        return hint, meant
    outer = name.rpartition(".")[0]
    there = section or ("" if "[" in outer else _section_for(outer, schema))
    if there:
        inside = ", ".join(child.removeprefix(f"{there}.") for child in schema.children(there))
        return f"; the keys of {there} are {inside}", []
    return "; `tune cat CONFIG --describe` lists all keys", []


def meant_by(name: str, schema: Schema) -> list[str]:
    """Our names for an unknown one: another tool's word, the right section, or the nearest spelling; mostly one."""
    valid = [name for name in (*schema.keys, *schema.sections) if name]
    if name in valid:
        return [name]
    section, _, word = name.rpartition(".")
    plain = _plain(word)
    if plain in NOTHING_LIKE_IT:
        return []
    if (alias := KEY_ALIASES.get(_plain(name))) in valid:
        return [str(alias)]
    if section.endswith("]"):  # of a list of sections, whose keys are mostly those of the section around it
        alias = KEY_ALIASES.get(f"{section.partition('.')[0]}.{plain}", "")
        if f"{section}.{alias.rpartition('.')[2]}" in valid:
            return [f"{section}.{alias.rpartition('.')[2]}"]
    there = _section_for(section, schema)
    if section and there is not None:
        inside = {key.rpartition(".")[2]: key for key in schema.children(there)}
        close = plain if plain in inside else None if plain in GENERIC else near(plain, inside)
        if close:
            return [inside[close]]
    is_vague = bool(section) and plain in GENERIC
    if not is_vague and (alias := KEY_ALIASES.get(plain)) in valid:
        return [str(alias)]
    elsewhere = [] if is_vague else [key for key in valid if key.rpartition(".")[2] == plain]
    if elsewhere:
        return [key for key in elsewhere if "." not in key] or elsewhere[:3]
    if is_vague:
        return []
    words: dict[str, str] = {}
    for key in sorted(valid, key=lambda key: key.count(".")):
        words.setdefault(key.rpartition(".")[2], key)
    close = near(plain, words)
    return [words[close]] if close else []


def near(found: str, valid: Iterable[str]) -> str | None:
    """The valid name that `found` is a misspelling of: the same letters but for few, or near it word by word."""
    best, nearness = None, 0.0
    for name in valid:
        whole = _likeness(found.replace("_", ""), name.replace("_", ""))
        parts, others = found.split("_"), name.split("_")
        least = min(map(_likeness, parts, others)) if len(parts) == len(others) else 0.0
        if (whole >= 0.88 or (least >= 0.66 and whole >= 0.75)) and whole > nearness:
            best, nearness = name, whole
    return best


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one[:100], other[:100], autojunk=False).ratio()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _section_for(section: str, schema: Schema) -> str | None:
    """Our section for one as written: itself, another tool's (empty: the top level here), or a misspelling of ours."""
    if section in schema.sections:
        return section
    outer = _plain(section.partition(".")[0])
    if outer in schema.sections:
        return outer
    if outer in SECTION_ALIASES:
        ours = SECTION_ALIASES[outer]
        return ours if ours in schema.sections else None
    return near(outer, [name for name in schema.sections if name])


def _owner(name: str, schema: Schema) -> str:
    """`lora.rank is a key of lora_finetune_distributed`, if that, or its alias, is nothing in this schema."""
    alias = KEY_ALIASES.get(_plain(name), name)
    if not alias or alias in schema.keys or alias in schema.sections:
        return ""
    for recipe, config_class in RECIPE_CONFIGS.items():
        view = read_schema(config_class)
        if alias in view.keys or alias in view.sections:
            return f"{alias} is a {'key' if alias in view.keys else 'section'} of the recipe {recipe}"
    return ""
