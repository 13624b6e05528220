"""Fill in references: `${section.key}` in a value stands for the value of another key.

`${.key}` is one of the same section. `order_keys` puts the keys in an order in which
`ReferencedValues.fill` can fill in their texts, once all files and overrides are read. OmegaConf's
resolvers, such as environment variables, are refused: a config means the same everywhere.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Any

from recipe_lib.config.suggest import format_word, quote

# A reference; group 1 is its name, with the dots of a relative one.
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w-]+(?:\.[\w-]+|\[[\w-]+\])*)\s*\}")
_RESOLVER = re.compile(r"\$\{\s*[^${}]*:")

# The most characters that the references of a config may be filled in with: texts that refer to
# texts with references grow exponentially.
MOST_CHARACTERS = 2**18
# Characters that each reference counts for, even if its value is shorter: each takes time.
_LEAST_CHARACTERS = 256
# Follows the quoted text in an error.
CIRCLE_REMEDY = ": the keys name each other in a circle; write one value itself"


class BadReferenceError(Exception):
    """A reference cannot be filled in. The text is `found ...; remedy`."""

    line = 0  # of the value in its file, counted from 1; set by who catches it, 0 before


class ReferencedValues:
    """The values of a config, by which references in texts (`${section.key}`) are filled in."""

    def __init__(self, values: Mapping[str, Any], explain: Callable[[str], str]) -> None:
        """Hold values by dotted key.

        explain: called with a name that is no key; returns the rest of the error, which follows the
        quoted text and so begins with `, expected ...` or `: ...`.
        """
        # Imported here: it takes 0.1 s, and few configs have references.
        import omegaconf

        self.omegaconf = omegaconf
        # OmegaConf finds a part of a value too, such as `data.sources[0].weight`.
        self.tree = omegaconf.OmegaConf.create()
        self.explain = explain
        self.characters_left = MOST_CHARACTERS  # for all references of the config together
        for key, value in values.items():
            self.put(key, value)

    def put(self, key: str, value: Any) -> None:
        """Set the value of a key; one with references only after they are filled in."""
        self.omegaconf.OmegaConf.update(
            self.tree, key, _to_plain(value), merge=False, force_add=True
        )

    def fill(self, text: str, key: str) -> Any:
        """Return a text of the key `key` with its references filled in.

        A text that is nothing but one reference becomes the value itself, in its type. Raises
        BadReferenceError for a reference that names no key, a resolver, or too much text.
        """
        _check_form(text)
        try:
            if name_alone := _REFERENCE.fullmatch(text.strip()):
                return self._find(_complete_name(name_alone[1], key))
            return _REFERENCE.sub(
                lambda name: format_word(self._find(_complete_name(name[1], key))), text
            )
        except LookupError as error:
            raise BadReferenceError(f"found {quote(text)}{error.args[0]}") from error

    def _find(self, name: str) -> Any:
        """Return the value that a full name stands for.

        Raises LookupError with the rest of the error, see `explain`, if there is none or if too
        much has been filled in.
        """
        config_tools = self.omegaconf.OmegaConf  # the class with its static functions
        try:
            # default=self stands for "no value", since None is a value.
            value = config_tools.select(self.tree, name, default=self)
        except self.omegaconf.errors.ConfigTypeError:  # a word where a list needs an index
            value = self
        if value is self:
            raise LookupError(self.explain(name))
        self.characters_left -= max(_LEAST_CHARACTERS, len(str(value)))
        if self.characters_left < 0:
            raise LookupError(
                f": the names of the config grow beyond {MOST_CHARACTERS} characters; write it out"
            )
        return config_tools.to_container(value) if config_tools.is_config(value) else value


def list_references(texts: Iterable[str], key: str) -> list[str]:
    """Return the full names that texts of the key `key` refer to, with repetitions."""
    names = []
    for text in texts:
        names += [_complete_name(name, key) for name in _REFERENCE.findall(text)]
    # One more than can be filled in is enough to raise the error, and bounds the time of ordering.
    return names[: MOST_CHARACTERS // _LEAST_CHARACTERS + 1]


def order_keys(names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the keys, each after those that its value refers to.

    names: key -> full names in its value. Raises graphlib.CycleError, whose second argument is the
    list of keys, if values refer to each other in a circle.
    """
    graph: dict[str, list[str]] = {}
    for key, names_in_value in names.items():
        distinct = set(names_in_value)
        graph[key] = [
            other_key
            for other_key in names
            if any(are_related(name, other_key) for name in distinct)
        ]
    return list(TopologicalSorter(graph).static_order())


def are_related(name: str, key: str) -> bool:
    """Return True if a name is a key's, a section's that holds it, or of a part of its value."""
    return name == key or key.startswith(f"{name}.") or name.startswith((f"{key}.", f"{key}["))


def _complete_name(name: str, key: str) -> str:
    """Return the full name of a relative one: `.lr` in `optimizer.eps` is `optimizer.lr`.

    Each dot at the beginning leaves one more level of `key`; a name without one is full already.
    """
    num_dots = len(name) - len(name.lstrip("."))
    sections = key.split(".")[:-num_dots] if num_dots else []
    return ".".join([*sections, name.lstrip(".")])


def _check_form(text: str) -> None:
    """Raise BadReferenceError for a text with a `${...}` that does not name a key."""
    if _RESOLVER.search(text):
        raise BadReferenceError(
            f"found {quote(text)}, expected ${{section.key}} of this config; environment variables"
            " and resolvers are refused, write the value itself"
        )
    if "\\${" in text:
        raise BadReferenceError(f"found {quote(text)}, expected no ${{ that is meant as text")
    if "${" in _REFERENCE.sub("", text):
        raise BadReferenceError(f"found {quote(text)}, expected ${{section.key}}")


def _to_plain(value: Any) -> Any:
    """Return a value in the types that OmegaConf can hold."""
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
