"""`${section.key}` in a value: the value of another key, filled in by OmegaConf once all files and
overrides are read.

Names are those of the config's own keys, also relative (`${.lr}`). Resolvers, environment variables
among them, are refused: what a config means is to be read in its files.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Any

from recipe_lib.config.suggest import quote

_NAME = re.compile(r"\$\{\s*(\.*[\w-]+(?:\.[\w-]+|\[[\w-]+\])*)\s*\}")
_RESOLVER = re.compile(r"\$\{\s*[^${}]*:")

MOST_CHARACTERS = 2**18  # that all names of a config are filled in with
_LEAST = 256  # that a name counts for, even if its value is shorter: each costs time
IN_A_CIRCLE = ": the keys name each other in a circle; write one value itself"


class InterpolationError(Exception):
    """A value cannot be filled in; the text is `found ..; remedy`."""

    line = 0  # of the value, in its file


class NamedValues:
    """The values of a config as OmegaConf's tree, by which texts that name keys are filled in."""

    def __init__(self, values: Mapping[str, Any], explain: Callable[[str], str]) -> None:
        """values: by dotted key. explain: the remedy for a name that is no key."""
        import omegaconf  # 0.1 s of CPU in every verb; few configs name other keys

        self.omegaconf = omegaconf
        self.tree = omegaconf.OmegaConf.create()
        self.explain = explain
        self.left = MOST_CHARACTERS
        for key, value in values.items():
            self.put(key, value)

    def put(self, key: str, value: Any) -> None:
        """Take a value; one that names others once it is filled in."""
        self.omegaconf.OmegaConf.update(
            self.tree, key, _to_plain(value), merge=False, force_add=True
        )

    def fill(self, text: str, key: str) -> Any:
        """Return a text of a key with the values of the keys that it names; of a name alone, the
        value itself.

        Raises InterpolationError.
        """
        _check_form(text)
        try:
            if alone := _NAME.fullmatch(text.strip()):
                return self._find(_complete_name(alone[1], key))
            return _NAME.sub(
                lambda name: format_word(self._find(_complete_name(name[1], key))), text
            )
        except LookupError as error:
            raise InterpolationError(f"found {quote(text)}{error.args[0]}") from error

    def _find(self, name: str) -> Any:
        """Return the value of a name. Raises LookupError with the remedy for none, and where it is
        one too many.
        """
        conf = self.omegaconf.OmegaConf
        try:
            value = conf.select(self.tree, name, default=self)
        except self.omegaconf.errors.ConfigTypeError:  # a word as the place in a list
            value = self
        if value is self:
            raise LookupError(self.explain(name))
        # Ten names of ten names of ten are a thousand.
        self.left -= max(_LEAST, len(str(value)))
        if self.left < 0:
            raise LookupError(
                f": the names of the config grow beyond {MOST_CHARACTERS} characters; write it out"
            )
        return conf.to_container(value) if conf.is_config(value) else value


def list_names(texts: Iterable[str], key: str) -> list[str]:
    """Return the names in the texts of a key, complete; of more than can be filled in the first
    ones.
    """
    most = MOST_CHARACTERS // _LEAST + 1
    return [_complete_name(name, key) for text in texts for name in _NAME.findall(text)][:most]


def order_keys(names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the keys, each after those that it names. Raises CycleError, with the keys of a
    circle.

    names: those in the value of each key.
    """
    graph = {key: [other for other in names for name in set(named) if are_related(name, other)]
             for key, named in names.items()}  # fmt: skip
    return list(TopologicalSorter(graph).static_order())


def format_word(value: Any) -> str:
    """Return a value as configs have it within a text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def are_related(name: str, key: str) -> bool:
    """Return whether a name is a key, a section that holds it, or a part of its value."""
    return name == key or key.startswith(f"{name}.") or name.startswith((f"{key}.", f"{key}["))


def _complete_name(name: str, key: str) -> str:
    """Return the name without dots in front: `${.lr}` in the value of `optimizer.eps` is
    `optimizer.lr`.
    """
    dots = len(name) - len(name.lstrip("."))
    sections = key.split(".")[:-dots] if dots else []
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
    """Return a value as the tree holds it."""
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
