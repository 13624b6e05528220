"""Fills in `${section.key}` in a value: the value of another key of the config.

Names are those of the config's own keys, also relative (`${.lr}`). Resolvers, environment variables
among them, are refused: what a config means is to be read in its files. `NamedValues` holds the
values and fills texts in, once all files and overrides are read; `order_keys` says in which order.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Any

from recipe_lib.config.suggest import quote

_NAME = re.compile(r"\$\{\s*(\.*[\w-]+(?:\.[\w-]+|\[[\w-]+\])*)\s*\}")
_RESOLVER = re.compile(r"\$\{\s*[^${}]*:")

# That all names of a config are filled in with. Ten names of ten names of ten are a thousand.
MOST_CHARACTERS = 2**18
# That a name counts for, even if its value is shorter: each costs time.
_LEAST_CHARACTERS = 256
IN_A_CIRCLE = ": the keys name each other in a circle; write one value itself"


class InterpolationError(Exception):
    """A value cannot be filled in; the text is `found ..; remedy`."""

    line = 0  # of the value, in its file


class NamedValues:
    """The values of a config as OmegaConf's tree, by which texts that name keys are filled in."""

    def __init__(self, values: Mapping[str, Any], explain: Callable[[str], str]) -> None:
        """Hold values by dotted key. explain: gives the remedy for a name that is no key."""
        # Here, as it takes 0.1 s of CPU, in every verb; few configs name other keys.
        import omegaconf

        self.omegaconf = omegaconf
        self.tree = omegaconf.OmegaConf.create()
        self.explain = explain
        self.characters_left = MOST_CHARACTERS
        for key, value in values.items():
            self.put(key, value)

    def put(self, key: str, value: Any) -> None:
        """Take a value; one that names others once it is filled in."""
        self.omegaconf.OmegaConf.update(
            self.tree, key, _to_plain(value), merge=False, force_add=True
        )

    def fill(self, text: str, key: str) -> Any:
        """Return a text of a key with the values of the keys that it names filled in.

        Of a name alone it is the value itself, of its type. Raises InterpolationError.
        """
        _check_form(text)
        try:
            if name_alone := _NAME.fullmatch(text.strip()):
                return self._find(_complete_name(name_alone[1], key))
            return _NAME.sub(
                lambda name: format_word(self._find(_complete_name(name[1], key))), text
            )
        except LookupError as error:
            raise InterpolationError(f"found {quote(text)}{error.args[0]}") from error

    def _find(self, name: str) -> Any:
        """Return the value of a name.

        Raises LookupError with the remedy if there is none, or if it is one name too many.
        """
        conf = self.omegaconf.OmegaConf
        try:
            # This object stands for "no value": None is one.
            value = conf.select(self.tree, name, default=self)
        except self.omegaconf.errors.ConfigTypeError:  # a word as the place in a list
            value = self
        if value is self:
            raise LookupError(self.explain(name))
        self.characters_left -= max(_LEAST_CHARACTERS, len(str(value)))
        if self.characters_left < 0:
            raise LookupError(
                f": the names of the config grow beyond {MOST_CHARACTERS} characters; write it out"
            )
        return conf.to_container(value) if conf.is_config(value) else value


def list_names(texts: Iterable[str], key: str) -> list[str]:
    """Return the names in the texts of a key, complete."""
    names = []
    for text in texts:
        names += [_complete_name(name, key) for name in _NAME.findall(text)]
    # One more than can be filled in is enough for the fault, and for the time that ordering takes.
    return names[: MOST_CHARACTERS // _LEAST_CHARACTERS + 1]


def order_keys(names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the keys, each after those that it names.

    names: by key, those in its value. Raises CycleError, with the keys of a circle.
    """
    graph: dict[str, list[str]] = {}
    for key, named in names.items():
        distinct = set(named)
        graph[key] = [
            other for other in names if any(are_related(name, other) for name in distinct)
        ]
    return list(TopologicalSorter(graph).static_order())


def format_word(value: Any) -> str:
    """Return a value as configs have it within a text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def are_related(name: str, key: str) -> bool:
    """Return True if a name is a key, a section that holds it, or a part of its value."""
    return name == key or key.startswith(f"{name}.") or name.startswith((f"{key}.", f"{key}["))


def _complete_name(name: str, key: str) -> str:
    """Return the name without dots in front: `.lr` at `optimizer.eps` is `optimizer.lr`."""
    num_dots = len(name) - len(name.lstrip("."))
    sections = key.split(".")[:-num_dots] if num_dots else []
    return ".".join([*sections, name.lstrip(".")])


def _check_form(text: str) -> None:
    """Raise InterpolationError for a text whose `${...}` is no name of a key."""
    if _RESOLVER.search(text):
        remedy = "environment variables and resolvers are refused, write the value itself"
        raise InterpolationError(
            f"found {quote(text)}, expected ${{section.key}} of this config; {remedy}"
        )
    if "\\${" in text:
        raise InterpolationError(f"found {quote(text)}, expected no ${{ that is meant as text")
    if "${" in _NAME.sub("", text):
        raise InterpolationError(f"found {quote(text)}, expected ${{section.key}}")


def _to_plain(value: Any) -> Any:
    """Return a value as OmegaConf's tree can hold it."""
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
