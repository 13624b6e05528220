"""Find a recipe by name, path or config, read the schema of its config, and run it in this process.

A recipe is a file with a model's setup and its training step, and a function `main(argv)`. The
verbs call `find_config_recipe` or `open_config`, and `run_recipe`. A shipped recipe's config class,
its schema, is known without importing the recipe, and so without torch.
"""

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from recipe_lib.cli.launch import FLAGS_WITH_VALUE, FLAGS_WITHOUT_VALUE
from recipe_lib.config import load_config, load_plugin, parse_arguments
from recipe_lib.config.load import LoadedConfig, load_with_origins, refuse_repeated
from recipe_lib.config.paths import (
    CONFIG_SUFFIXES,
    find_config,
    find_recipe,
    get_recipes_folder,
    list_configs,
    list_recipes,
    read_recipe_configs,
    suggest_config,
)
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError, run_for_exit_code
from recipe_lib.reading import TEXT_LIMIT, read_bytes, read_text
from recipe_lib.report.phases import importing

# The line `recipe: NAME` of a config, which is found without reading the file as YAML.
_RECIPE_KEY = re.compile(r"""^recipe[ \t]*:[ \t]*["']?([^\s"'#]+)""", re.MULTILINE)
# Names of torchtune's recipes -> what does the same here, for the error.
_TORCHTUNE_HINTS = {
    "lora_dpo_single_device": "did you mean dpo_distributed? It runs on one device too",
    "reward": "did you mean reward_distributed?",
    "generate": "did you mean `tune generate MODEL`?",
    "quantize": (
        "did you mean `tune export WHAT --quantize int4`? While they are read:"
        " lora.quantize_base=nf4"
    ),
    "eleuther_eval": "did you mean `tune eval OUTPUT_DIR --lm-eval TASKS`?",
    "qat_distributed": "did you mean full_finetune_distributed with qat=int4?",
    "qat_single_device": (
        "did you mean full_finetune_distributed with qat=int4? It runs on one device too"
    ),
    "qat_lora_finetune_distributed": "did you mean lora_finetune_distributed with qat=int4?",
    "knowledge_distillation_single_device": (
        "did you mean distill_distributed? It runs on one device too"
    ),
    "knowledge_distillation_distributed": "did you mean distill_distributed?",
    "ppo_full_finetune_single_device": (
        "there is none for reinforcement learning; dpo_distributed trains on pairs"
    ),
}


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's file."""

    name: str  # of the file, without .py
    path: Path
    shipped: bool  # it comes with this library, so its config class is known without an import

    @classmethod
    def find(cls, name_or_path: str) -> "RecipeFile":
        """Return the recipe of a name or path. Raises ConfigError with the nearest name."""
        if name_or_path in _TORCHTUNE_HINTS:
            raise ConfigError(f"{name_or_path}: no such recipe; {_TORCHTUNE_HINTS[name_or_path]}")
        path = find_recipe(name_or_path)
        return cls(
            name=path.stem,
            path=path,
            shipped=_is_shipped(path) and path.stem in read_recipe_configs(),
        )

    def has_known_arguments(self) -> bool:
        """Return True if the recipe reads its arguments as the shipped ones do.

        A user's file may be any program: it is parsed here, and imported only to be run.
        """
        return self.shipped or _find_parsed_class(self.path) is not None

    def load_schema(self) -> type:
        """Return the dataclass that a config of this recipe is checked against.

        Imports a recipe of the user's own. Raises ConfigError if it has no such class: the one that
        its `main` parses its arguments with, by default `Config`.
        """
        if self.shipped:
            return read_recipe_configs()[self.name]
        name = _find_parsed_class(self.path) or "Config"
        schema = getattr(load_module(self.path), name, None)
        if not isinstance(schema, type):
            raise ConfigError(
                f"{show(str(self.path))}: has no class `{name}`; expected one, like the shipped"
                " recipes"
            )
        return schema


def check_is_known(name: str) -> None:
    """Raise ConfigError for a word that is neither config nor recipe, with the nearest name."""
    known = list_recipes() + [config for group in list_configs().values() for config in group]
    if name not in (*known, *_TORCHTUNE_HINTS) and not name.endswith(".py"):
        hint = suggest_config(name, known) or "; `tune ls` lists them"
        raise ConfigError(f"{show(name)}: no such config and no such recipe{hint}")


def read_recipe_name(config: Path) -> str | None:
    """Return the recipe that a config names by `recipe:`; None if it names none."""
    try:
        match = _RECIPE_KEY.search(read_text(config))
    except (OSError, ValueError):  # loading the config says what is wrong with it
        return None
    return match[1] if match else None


def is_config(name: str) -> bool:
    """Return True if the word is a config's name or a path to one, and no recipe's."""
    return name.endswith(CONFIG_SUFFIXES) or any(name in names for names in list_configs().values())


def find_config_recipe(configs: str | Sequence[str], recipe: str | None = None) -> RecipeFile:
    """Return the recipe to check configs against: `recipe`, or the one that the last config names.

    Configs that name no recipe are checked against the first shipped one. Raises ConfigError for a
    config that names no shipped recipe.
    """
    if recipe is not None:
        return RecipeFile.find(recipe)
    for config in reversed([configs] if isinstance(configs, str) else configs):
        path = find_config(config)
        if name := read_recipe_name(path):
            if name not in read_recipe_configs():
                # A beginning of a recipe's name is too far from it to be a misspelling.
                completions = [
                    known for known in read_recipe_configs() if known.startswith(name)
                ] or [""]
                hint = did_you_mean(name, read_recipe_configs()) or (
                    f"; did you mean {completions[0]}?" if completions[0] else ""
                )
                raise ConfigError(
                    f"{show(str(config))}: recipe: found {quote(name)}, expected"
                    f" {', '.join(read_recipe_configs())}{hint}; one of your own comes before"
                    " --config, and as --recipe FILE for validate and data"
                )
            return RecipeFile.find(name)
    return RecipeFile.find(next(iter(read_recipe_configs())))


def open_config(
    configs: Sequence[str], arguments: argparse.Namespace
) -> tuple[RecipeFile, LoadedConfig]:
    """Return the recipe of a verb's configs, and the config that they and its overrides make.

    arguments: `recipe` (None: the one that a config names), `overrides` and `plugin` (paths of
    Python files). Raises ConfigError for a config, recipe or plugin that cannot be used.
    """
    # First: a plugin registers the names that the config may use.
    for plugin in arguments.plugin:
        load_plugin(plugin)
    recipe = find_config_recipe(configs, arguments.recipe)
    return recipe, load_with_origins(configs, arguments.overrides, recipe.load_schema())


def _find_parsed_class(path: Path) -> str | None:
    """Return the name of the config class that a recipe's `main(argv)` parses its arguments with.

    That is `Config` in a call `run_recipe(..., parse_arguments(argv, Config))`, as in shipped
    recipes. None for any other program. Reads the file without importing it.
    """
    try:
        module = ast.parse(read_bytes(path, TEXT_LIMIT))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # importing the file later says what is wrong with it
    mains = [
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    if len(mains) != 1 or not mains[0].args.args:
        return None
    nodes = list(ast.walk(mains[0]))
    # A name that main itself binds need not be its argument, or the module's class, at the call.
    rebound = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    rebound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    for node in nodes:
        match node:
            case ast.Call(
                func=ast.Name("run_recipe") | ast.Attribute(attr="run_recipe"),
                args=[
                    _,
                    ast.Call(
                        func=ast.Name("parse_arguments"), args=[ast.Name(words), ast.Name(config)]
                    ),
                ],
            ) if words == mains[0].args.args[0].arg and not rebound & {words, config}:
                return config
    return None


def _is_shipped(path: Path) -> bool:
    return path.resolve().parent == get_recipes_folder().resolve()


class _ProgramLoader(SourceFileLoader):
    """A loader that imports a file as a program is run: no bytecode is written next to it."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the file's code.

        Raises SyntaxError for a file that Python cannot even parse, unlike one that fails while it
        is run.
        """
        try:
            code: CodeType = self.source_to_code(read_bytes(Path(self.path), TEXT_LIMIT), self.path)
        except OSError as error:
            raise SyntaxError(str(error.strerror)) from error
        except (ValueError, RecursionError, MemoryError) as error:  # a NUL, or nested too deep
            raise SyntaxError(
                f"cannot be read as Python ({str(error) or type(error).__name__})"
            ) from error
        return code


def load_module(path: Path) -> ModuleType:
    """Import a recipe's file, once; a user's recipe can import the modules next to it.

    Raises ConfigError for a file that is not Python, that imports what this version of the library
    does not have, or that exits. Other errors of the file's code are raised as they are.
    """
    name = f"recipe_{path.stem}"
    loaded = sys.modules.get(name)
    if (
        loaded is not None
        and loaded.__file__
        and Path(loaded.__file__).absolute() == path.absolute()
    ):
        return loaded
    folder = str(path.parent.resolve())
    if not _is_shipped(path) and folder not in sys.path:
        # Last, so that a file there cannot take an installed package's place.
        sys.path.append(folder)
    loader = _ProgramLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ConfigError(f"{show(str(path))}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it is executed, as `dataclass` looks up the module of a class there.
    sys.modules[name] = module
    try:
        # A terminal shows what takes the time: torch, once a process.
        with importing("torch" if "torch" not in sys.modules else path.name):
            loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            location = f"{show(str(error.filename or path))}:{error.lineno or 1}"
            raise ConfigError(f"{location}: {error.msg}") from error
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "recipe_lib":
            # A copy outlives the names that it was copied with.
            raise ConfigError(
                f"{show(str(path))}: {error.msg}; a recipe that was copied from another version is"
                " copied anew with `tune cp`"
            ) from error
        # The file's exit code would be taken for one of ours.
        if isinstance(error, SystemExit):
            raise ConfigError(
                f"{show(str(path))}: raised SystemExit: {show(str(error))}, expected a recipe"
            ) from error
        raise
    return module


def run_recipe(path: Path, argv: list[str]) -> int:
    """Run a recipe's `main(argv)` in this process; report user errors and return the exit code."""
    return run_for_exit_code(lambda: _call_main(path, argv))


def _call_main(path: Path, argv: list[str]) -> int | None:
    main = getattr(load_module(path), "main", None)
    if not callable(main):
        raise ConfigError(
            f"{show(str(path))}: has no function `main(argv)`; expected one, like the shipped"
            " recipes"
        )
    return main(argv)


def check_arguments(recipe: RecipeFile, words: Sequence[str]) -> Any:
    """Read the recipe's command line, before anything starts; return its config.

    None for a recipe of the user's own that reads its arguments itself, and may take others.
    words: what `tune run` gives the recipe. Raises ConfigError for words that it cannot read, and
    for a config that is not valid.
    """
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and flag in FLAGS_WITH_VALUE | FLAGS_WITHOUT_VALUE:
            raise ConfigError(f"tune run: {show(word)}: torchrun's flags come before RECIPE")
    refuse_repeated(words)
    if not recipe.has_known_arguments():
        return None
    if not any(word == "--config" or word.startswith("--config=") for word in words):
        # The first word that explains why --config is missing, before saying that it is.
        for word in words:
            if word.startswith("--"):
                if hint := did_you_mean(word.partition("=")[0], ("--config", "--plugin")):
                    raise ConfigError(f"tune run: unknown option {show(word)}{hint}")
            if is_config(word):
                raise ConfigError(
                    f"tune run: unexpected argument {show(word)}; did you mean --config"
                    f" {show(word)}?"
                )
        name = recipe.name if recipe.shipped else show(str(recipe.path))
        raise ConfigError(
            f"tune run: no config; expected: tune run {name} --config CONFIG (see `tune ls`)"
        )
    return parse_arguments(list(words), recipe.load_schema(), quiet=True)


def load_run_config(path: Path, recipe: str | None) -> Any:
    """Return the config of a run. path: its config.yaml. recipe: None: the one that it names."""
    return load_config(path, [], find_config_recipe(str(path), recipe).load_schema())
