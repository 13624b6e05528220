"""Register components under the names that configs choose them by: formats, optimizers, losses, ...

A config holds a registered name and never an import path, so that nothing in a config runs. The
names that ship are declared here, with the module that registers them; that module is imported when
one is first asked for, which keeps torch out of config checks. A plugin, a .py file of the user's
given by `--plugin`, registers its own names:

    from recipe_lib.config import register

    @register("loss", "squared_error")
    def squared_error(logits, labels): ...
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from recipe_lib.config.optimizer_facts import (
    OptimizerFacts,
    read_built_in_optimizers,
    register_facts,
)
from recipe_lib.config.paths import expand_home
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.errors import ConfigError, UserError, find_lines_in
from recipe_lib.reading import TEXT_LIMIT

Component = TypeVar("Component", bound=Callable[..., Any])

# Kind, mostly the key that holds such a name -> (module whose import registers the names that ship,
# these names).
BUILT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "data.format": (
        "recipe_lib.data.formats",
        (
            "alpaca",
            "sharegpt",
            "messages",
            "prompt_completion",
            "text",
            "preference",
            "kto",
            "classification",
        ),
    ),
    "optimizer.name": ("recipe_lib.optim.algorithms", tuple(read_built_in_optimizers())),
    "loss": ("recipe_lib.ops.chunked_heads", ("cross_entropy",)),
    "metric": ("recipe_lib.generation.sample", ("exact_match",)),
    "log.trackers": ("recipe_lib.training.run_log", ("tensorboard", "wandb", "trackio")),
    "model": ("recipe_lib.external.module_spec", ("native", "transformers")),
}

# Kind -> name -> the function or class that was registered, in this process.
_components: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in BUILT_IN}


def register(
    kind: str, name: str, facts: OptimizerFacts | None = None
) -> Callable[[Component], Component]:
    """Return a decorator that makes a function or class selectable as `name` in a config.

    kind: a key of `BUILT_IN`.
    facts: of an optimizer, the keys that it reads and the states that it keeps; without them its
    states' bytes are not known before the first step.
    Raises ConfigError for an unknown kind or a name that is empty or not printable; the decorator
    raises it for a name that is taken.
    """
    _check_kind(kind)
    if not isinstance(name, str) or not name.isprintable() or name != name.strip() or not name:
        raise ConfigError(
            f"register({kind!r}, {name!r}): expected a name of printable letters, not an empty one"
        )

    def add(component: Component) -> Component:
        # Built-in names are taken, but not for this project's own modules, which register them.
        is_ours = getattr(component, "__module__", "").startswith("recipe_lib.")
        is_taken = name in _components[kind] or (name in BUILT_IN[kind][1] and not is_ours)
        # The same object again is no fault.
        if is_taken and _components[kind].get(name) is not component:
            raise ConfigError(
                f"register({kind!r}, {name!r}): the name is taken; register another one"
            )
        _components[kind][name] = component
        if facts is not None:
            register_facts(name, facts)
        return component

    return add


def get_registered(kind: str, name: str) -> Callable[..., Any]:
    """Return the component that was registered as `name`; import the module of a built-in one.

    Raises ConfigError, with the nearest name, for an unknown kind or name.
    """
    _check_kind(kind)
    if name in BUILT_IN[kind][1] and name not in _components[kind]:
        import_owner(kind)
    if name not in _components[kind]:
        known = list_names(kind)
        raise ConfigError(
            f"{kind}: found {name!r}, expected one of"
            f" {', '.join(known)}{did_you_mean(str(name), known)}"
        )
    return _components[kind][name]


def import_owner(kind: str) -> ModuleType:
    """Import and return the module that registers the built-in names of a kind."""
    return importlib.import_module(BUILT_IN[kind][0])


def list_names(kind: str) -> list[str]:
    """Return every name of a kind, the built-in ones first; imports nothing."""
    _check_kind(kind)
    built_in = BUILT_IN[kind][1]
    return [*built_in, *(name for name in _components[kind] if name not in built_in)]


def _check_kind(kind: str) -> None:
    if kind not in BUILT_IN:
        raise ConfigError(
            f"register: found the kind {kind!r}, expected one of {', '.join(BUILT_IN)}"
        )


# Plugins that were imported, absolute paths with links resolved: a second import would register the
# same names again.
_loaded: set[Path] = set()


def load_plugin(path: str | Path) -> None:
    """Import a plugin's .py file, once a process.

    path: from the command line, never from a config, so that no config runs code.
    Raises ConfigError if there is no such file, or, with the file's line, if its import raises.
    """
    shown = show(str(path))
    file = expand_home(path)
    if file.suffix != ".py" or not os.path.isfile(file):
        raise ConfigError(f"--plugin {quote(str(path))}: expected the path of an existing .py file")
    if os.path.getsize(file) > TEXT_LIMIT:
        raise ConfigError(
            f"--plugin {shown}: is larger than {TEXT_LIMIT >> 20} MiB; expected a Python file"
        )
    file = file.resolve()
    if file in _loaded:
        return
    # With a hash of the path: two plugins of one file name are two modules.
    name = f"tune_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {shown}: cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before its code runs, as import does: dataclasses look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError as error:  # raised by this project's functions for a user's mistake
        del sys.modules[name]
        raise ConfigError(*(f"{shown}: {fault}" for fault in error.faults)) from error
    except (Exception, SystemExit) as error:
        # SystemExit too: an exit code of a plugin's would be taken for one of this program.
        del sys.modules[name]
        raise ConfigError(
            f"{shown}:{_find_line(error, file)}: raised {type(error).__name__}: {show(str(error))}"
        ) from error
    _loaded.add(file)


def list_loaded_plugins() -> list[Path]:
    """Return the files of the plugins that were imported, absolute, with links resolved."""
    return sorted(_loaded)


def _find_line(error: BaseException, file: Path) -> int:
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 1
    # The innermost frame of the traceback that is in the file; line 1 if none is.
    return [1, *find_lines_in(error, file)][-1]
