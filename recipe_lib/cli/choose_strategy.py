"""`parallel.strategy: auto` on the command line: both are planned before the ranks start, which get the choice.

Planning happens in a separate process, since a simulated device cannot be taken back, and takes no GPU. Whatever goes
wrong in it, the run goes on with `fsdp`, and says so. Of several machines each chooses for itself, from the config and
its own device alone, so that machines with equal GPUs agree; name the strategy where they are not equal.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recipe_lib.cli.local_gpus import is_expandable
from recipe_lib.cli.plan_request import hide_gpus, planning_process, prepare, read, read_config
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.cli.torchrun_flags import rank_count, ranks_of, shows_plan
from recipe_lib.errors import DONE, end_process
from recipe_lib.files import replace_text
from recipe_lib.logs import get_logger
from recipe_lib.reading import read_object
from recipe_lib.report.phases import phase

STRATEGY_KEY = "parallel.strategy"
TIMEOUT_SECONDS = 180


def with_strategy(flags: Sequence[str], recipe: RecipeFile, words: Sequence[str], cfg: Any) -> list[str]:
    """Return the recipe's arguments, where these ask for `auto` with the strategy that is chosen; say which and why.

    flags: torchrun's; for one rank, or for ranks that another launcher started, nothing is chosen. cfg: that the words
    make; None: of a recipe of the user's own that reads them itself.
    """
    if not flags or ranks_of(flags) == 1 or cfg is None or cfg.parallel.strategy != "auto":
        return list(words)
    if shows_plan(flags):
        get_logger().info(
            f"{STRATEGY_KEY}=auto: planning fsdp and ddp for this machine; {STRATEGY_KEY}=fsdp, or ddp, saves the time"
        )
    with phase("planning fsdp and ddp"):
        chosen, line = _choose_apart(flags, recipe, words)
    if shows_plan(flags):
        get_logger().info(line)
    others = [word for word in words if word != f"~{STRATEGY_KEY}" and word.partition("=")[0] != STRATEGY_KEY]
    return [*others, f"{STRATEGY_KEY}={chosen}"]


def _choose_apart(flags: Sequence[str], recipe: RecipeFile, words: Sequence[str]) -> tuple[str, str]:
    """(strategy, the line that says so), from a separate process."""
    with TemporaryDirectory(prefix="tune-strategy-") as folder:
        answer = Path(folder) / "choice.json"
        command, environment = planning_process(
            "recipe_lib.cli.choose_strategy", answer, [*flags, str(recipe.path), *words]
        )
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
            found = read_object(answer)
            return str(found["strategy"]), str(found["line"])
        except subprocess.TimeoutExpired:
            why = f"planning both took more than {TIMEOUT_SECONDS} s"
        except (OSError, ValueError, KeyError):
            why = "both could not be planned; `tune plan` with the same arguments says why"
    return "fsdp", f"{STRATEGY_KEY}=auto: fsdp; {why}"


def main(argv: list[str]) -> int:
    """The process that plans: `choose_strategy.py ANSWER [torchrun flags] RECIPE [its arguments]`."""
    gpus = hide_gpus()
    arguments = read(argv[1:])
    recipe, cfg = read_config(arguments)
    if rank_count(arguments.flags)[1] > 1:
        arguments.sequence = "max"  # each machine may have other data files
    planned, shaped, settings = prepare(recipe, cfg, arguments)
    from recipe_lib.plan.search.advice import choose_strategy

    strategy, line = choose_strategy(planned, shaped, settings, expandable=is_expandable())
    line += "" if gpus else " (planned for that device, as there is no GPU here)"
    replace_text(Path(argv[0]), json.dumps({"strategy": strategy, "line": line}))
    return DONE


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
