"""What to say of a key that there is not: the name that it has here, the nearest spelling, or nothing.

Nothing rather than something far: another tool's name leads to ours only where both mean the same, and a spelling only
where each word of it is near.
"""

from collections.abc import Iterable

from recipe_lib.config.aliases import ANSWERS, GENERIC, KEY_ALIASES, NOTHING_LIKE_IT, OF_PAIRS, SECTION_ALIASES
from recipe_lib.config.keys import Schema, read_schema
from recipe_lib.config.paths import RECIPE_CONFIGS


def hint_for(name: str, section: str, schema: Schema, *, in_file: bool) -> tuple[str, list[str]]:
    """(`; did you mean X?` or another hint, the keys it names). section: that the key stands in, empty if unknown."""
    owner = _owner(name, schema)
    meant = [] if owner else meant_by(name, schema)
    if owner:
        return f"; {owner}", meant
    plain = _plain(name)
    answer = ANSWERS.get(plain) or (None if meant else ANSWERS.get(plain.rpartition(".")[2]))
    if answer:
        return f"; {answer}", []
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
    if (alias := KEY_ALIASES.get(_plain(name))) in valid:
        return [str(alias)]
    if plain in NOTHING_LIKE_IT:
        return []
    if section.endswith("]"):  # of a list of sections, whose keys are mostly those of the section around it
        alias = KEY_ALIASES.get(f"{section.partition('.')[0]}.{plain}", "")
        if f"{section}.{alias.rpartition('.')[2]}" in valid:
            return [f"{section}.{alias.rpartition('.')[2]}"]
    there = _section_for(section, schema)
    if there is None:  # of what that section is nobody knows
        return []
    if section:
        inside = {key.rpartition(".")[2]: key for key in schema.children(there)}
        close = plain if plain in inside else None if plain in GENERIC else near(plain, inside)
        if close:
            return [inside[close]]
        if (alias := KEY_ALIASES.get(f"{there}.{plain}")) in valid:
            return [str(alias)]
        if plain in GENERIC:
            return []
    return _anywhere(plain, valid)


def _anywhere(plain: str, valid: list[str]) -> list[str]:
    """The keys that a last word alone may mean."""
    if (alias := KEY_ALIASES.get(plain)) in valid:
        return [str(alias)]
    words = [key.rpartition(".")[2] for key in valid]
    close = plain if plain in words else None if plain in GENERIC else near(plain, words)
    found = [key for key in valid if key.rpartition(".")[2] == close] if plain not in ("name", "type") else []
    return [key for key in found if "." not in key] or found[:3]


def near(found: str, valid: Iterable[str]) -> str | None:
    """The valid name that `found` is a misspelling of: word by word all letters but one, of long words two."""
    best, least = None, 3
    for name in valid:
        parts, others = found.split("_"), name.split("_")
        if len(parts) == len(others) and found != name:
            distance = sum(map(_distance, parts, others))
            near_all = all(map(_is_slip, parts, others)) and distance <= 2
        else:
            distance = _distance("".join(parts), "".join(others))
            near_all = distance <= (0 if len(name) < 8 else 1 if len(name) < 12 else 2)
        if near_all and distance < least:
            best, least = name, distance
    return best


def _is_slip(found: str, word: str) -> bool:
    if len(word) < 3:
        return found[:1] == word[:1] and len(found) >= len(word) and _distance(found, word) < 2
    return _distance(found, word) <= (1 if len(word) < 7 else 2)


def _distance(one: str, other: str) -> int:
    """Letters to add, take away, change or swap with the next one (optimal string alignment)."""
    one, other = one[:50], other[:50]
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], wanted):
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


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
    plain = _plain(name)
    section, _, word = plain.rpartition(".")
    known = {*schema.keys, *schema.sections}
    alias = KEY_ALIASES.get(plain)
    if alias is None and section in SECTION_ALIASES.keys() | known and word not in GENERIC | OF_PAIRS and len(word) > 1:
        alias = KEY_ALIASES.get(word)  # `model.lora_rank`
    if plain in OF_PAIRS | NOTHING_LIKE_IT or alias in known or plain in known:
        return ""
    for recipe, config_class in RECIPE_CONFIGS.items():
        view = read_schema(config_class)
        own = [key for key in (*view.keys, *view.sections) if key not in known]
        if section in own:
            found = meant_by(name, view)
        else:
            found = [key for key in own if key in (alias, plain) or (not section and key.rpartition(".")[2] == word)]
        if len(found) == 1 and found[0] in own:
            return f"{found[0]} is a {'key' if found[0] in view.keys else 'section'} of the recipe {recipe}"
    return ""
