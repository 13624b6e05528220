"""Run a recipe as one rank of `tune run`: `worker.py RECIPE_FILE [arguments of the recipe]`.

torchrun, inside the launcher, starts this file by its path. The file also lets the launcher find
the rank to forward signals, ends with the launcher, and waits for other ranks that still save, as
torchrun would kill them.
"""

import os
import sys

# The folder to import recipe_lib from.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _fix_import_path() -> None:
    # Python puts the script's own folder first. Its modules (`run`, `cat`, ...) must not be
    # imported in place of others of the same name.
    script_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != script_folder]
    # A checkout need not be installed.
    if _ROOT not in sys.path:
        sys.path.insert(0, _ROOT)


def main(recipe: str, argv: list[str]) -> int:
    """Run the recipe; return this rank's exit code. recipe: its file. argv: its arguments."""
    from pathlib import Path

    from recipe_lib.cli.launch import Rank
    from recipe_lib.cli.recipes import run_recipe

    with Rank() as rank:
        # A signal that came before this rank had left its process id was not forwarded to it.
        if rank.stop_requested():
            return rank.STOPPED_EARLY
        try:
            return rank.leave_together(run_recipe(Path(recipe), argv))
        except KeyboardInterrupt:
            return rank.STOPPED_EARLY


if __name__ == "__main__":
    _fix_import_path()
    from recipe_lib.errors import end_process

    end_process(main(sys.argv[1], sys.argv[2:]))
