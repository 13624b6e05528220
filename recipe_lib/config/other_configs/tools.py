"""The tools whose configs are known here, and which of them a file is from."""

from types import ModuleType

from recipe_lib.config.other_configs import axolotl, llama_factory, torchtune
from recipe_lib.config.other_configs.their_file import TheirFile
from recipe_lib.errors import ConfigError

TOOLS: dict[str, ModuleType] = {module.NAME: module for module in (torchtune, axolotl, llama_factory)}


def tool_of(theirs: TheirFile, named: str | None = None) -> ModuleType:
    """The tool that is named, or that the file's keys say. Raises ConfigError if none is sure."""
    if named is not None:
        return TOOLS[named]
    found = [module for module in TOOLS.values() if module.is_theirs(theirs)]
    if len(found) == 1:
        return found[0]
    if "recipe" in theirs.values:
        raise ConfigError(f"{theirs.shown}: has a key recipe, as configs of ours have: `tune validate` checks it")
    names = ", ".join(TOOLS)
    raise ConfigError(f"{theirs.shown}: its keys are not those of one of {names}; --from says which it is from")
