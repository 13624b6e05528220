"""A user's own Python file, named on the command line by `--plugin`, that registers components."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from recipe_lib.config.places import expand
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError, UserError

_loaded: set[Path] = set()


def load_plugin(path: str | Path) -> None:
    """Imports a .py file, once a process. Only ever called with a path from the command line, never from a config.

    Raises ConfigError with the file's line if it cannot be found or raises while it is imported.
    """
    shown = show(str(path))
    file = expand(path)
    if file.suffix != ".py" or not os.path.isfile(file):
        raise ConfigError(f"--plugin {quote(str(path))}: expected the path of an existing .py file")
    file = file.resolve()
    if file in _loaded:
        return
    name = f"tune_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {shown}: cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError as error:
        del sys.modules[name]
        raise ConfigError(*(f"{shown}: {fault}" for fault in error.faults)) from error
    except Exception as error:  # whatever a user's file raises is his to correct
        del sys.modules[name]
        place = f"{shown}:{_line_in(error, file)}"
        raise ConfigError(f"{place}: raised {type(error).__name__}: {show(str(error))}") from error
    _loaded.add(file)


def loaded_plugins() -> list[Path]:
    """The files that were imported, links followed."""
    return sorted(_loaded)


def _line_in(error: Exception, file: Path) -> int:
    """The line of the file at which it failed."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 1
    line, trace = 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
