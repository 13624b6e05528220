"""`tune run [torchrun flags] [RECIPE --config] CONFIG [overrides]`: a recipe on one process or
many.

What stands before RECIPE is torchrun's and is handed on untouched; what stands after it is the
recipe's. Without RECIPE it is the one that the config names.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recipe_lib.cli.arguments import SWITCH, Options, Parser
from recipe_lib.cli.launch import launch
from recipe_lib.cli.local_gpus import is_expandable
from recipe_lib.cli.plan_during_run import plan_beside, take_choice
from recipe_lib.cli.plan_request import hide_gpus, planning_process, prepare, read, read_config
from recipe_lib.cli.recipes import (
    RecipeFile,
    check_arguments,
    check_is_known,
    is_config,
    recipe_for,
    run_recipe,
)
from recipe_lib.cli.start_checks import check_shape, check_start
from recipe_lib.cli.torchrun_flags import (
    WITH_VALUE,
    WITHOUT_VALUE,
    check_launch,
    rank_count,
    ranks_of,
    shows_plan,
    split,
    with_rendezvous,
)
from recipe_lib.config.paths import list_recipes
from recipe_lib.errors import DONE, ConfigError, end_process
from recipe_lib.files import replace_text
from recipe_lib.logs import VERBOSITY, get_logger, is_quiet, set_verbosity
from recipe_lib.reading import read_object
from recipe_lib.report.phases import phase

USAGE = """usage: tune run [torchrun flags] CONFIG [key=value ...] [~key ...]
       tune run [torchrun flags] RECIPE --config CONFIG ... [--plugin FILE ...] [key=value ...] [~key ...]

Runs a config (a name that `tune ls` shows, or a .yaml file) with the recipe that it names, or with another one (a name,
or a .py file of yours). Of several --config the later win, key by key.

  key=value       overrides a key of the config; section.key=value reaches into a section; a value may contain `=`
  ~key            goes back to the key's default
  --plugin FILE   first imports a Python file of yours, which may register formats, losses, optimizers, trackers
  --no-plan       does not show the plan of the run
  --plan          shows it although the environment has TUNE_PLAN=off
  -q, -v          says warnings and errors alone; says more: all ranks, the seconds of each part

Flags before them are torchrun's; without any, the recipe runs in this process:

  tune run demo/full
  tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1
  tune run --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT RECIPE --config CONFIG

SIGTERM or Ctrl-C saves a resumable state at the end of the current step. Exit codes: 0 done, 2 a mistake to correct,
3 stopped and saved, 4 loss or gradients no longer finite, 5 out of memory, 6 the disk refuses a write, 7 a rank is
gone, stopped or hangs."""

OPTIONS: Options = {
    "words": {"nargs": "*", "metavar": "CONFIG", "help": "a config, or a recipe before --config"},
    "--config": {
        "action": "append",
        "metavar": "CONFIG",
        "help": "of several the later win, key by key",
    },
    "--plugin": {
        "action": "append",
        "metavar": "FILE",
        "help": "a Python file of yours, imported first",
    },
    **dict.fromkeys(
        ("--plan", "--no-plan"), SWITCH | {"help": "whether to show the plan of the run"}
    ),
    **dict.fromkeys(sorted(WITH_VALUE - {"-r", "-t"}), {"metavar": "X", "help": "torchrun's"}),
    **dict.fromkeys(sorted(WITHOUT_VALUE), SWITCH | {"help": "torchrun's"}),
    "--nproc_per_node": {"metavar": "N", "help": "processes on each machine"},
}


def parser() -> Parser:
    """Return the options, for a shell's completion; `run` takes them apart itself, as torchrun's
    are handed on.
    """
    return Parser("run", "Runs a recipe.", OPTIONS)


def run(words: list[str]) -> int:
    """Runs the recipe; returns its exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return DONE
    for word in words:
        if word in VERBOSITY:
            set_verbosity(VERBOSITY[word])  # for the ranks too
    words, with_plan = take_choice([word for word in words if word not in VERBOSITY])
    flags, name, rest = split(words)
    check_launch(flags)
    recipe, rest = recipe_and_words(name, rest)
    cfg = check_arguments(recipe, rest)
    if cfg is not None:
        check_start(cfg, ranks=ranks_of(flags), starts=True)
        if flags and recipe.shipped:
            check_shape(cfg)  # once, and not by every rank
    rest = with_strategy(flags, recipe, rest, cfg)
    if not with_plan or is_quiet():
        return start(flags, recipe, rest)
    with plan_beside(flags, recipe, rest) as compare:
        code = start(flags, recipe, rest)
        compare(code)
    return code


def recipe_and_words(name: str, rest: list[str]) -> tuple[RecipeFile, list[str]]:
    """The recipe, and its arguments, with --config where `name` is a config or nothing.
    ConfigError.
    """
    configs = configs_in(rest)
    if name and not is_config(name):
        if not configs:
            check_is_known(name)
        return RecipeFile.find(name), rest
    if not name:  # `--config CONFIG RECIPE`
        values = {at + 1 for at, word in enumerate(rest) if word in ("--config", "--plugin")}
        named = [
            at for at, word in enumerate(rest) if word in list_recipes() or word.endswith(".py")
        ]
        place = next((at for at in named if at not in values), None)
        if place is not None:
            return RecipeFile.find(rest[place]), rest[:place] + rest[place + 1 :]
    rest = ["--config", name, *rest] if name else rest
    configs = [name, *configs] if name else configs
    if not configs:
        raise ConfigError(
            "tune run: no config; expected: tune run [torchrun flags] CONFIG (see `tune ls`)"
        )
    return recipe_for(configs), rest


def configs_in(words: list[str]) -> list[str]:
    """The configs that the words name by --config, first to last."""
    return [word for flag, word in pairwise(words) if flag == "--config"] + [
        word.partition("=")[2] for word in words if word.startswith("--config=")
    ]


def start(flags: list[str], recipe: RecipeFile, rest: list[str]) -> int:
    """The recipe in this process, or on the ranks that torchrun's flags ask for; returns the exit
    code.
    """
    if not flags:
        return run_recipe(recipe.path, rest)
    return launch(with_rendezvous(flags), recipe.path, rest)


# `parallel.strategy: auto` on the command line: both are planned before the ranks start, which get
# the choice.
#
# Planning happens in a separate process, since a simulated device cannot be taken back, and takes
# no GPU. Whatever goes wrong in it, the run goes on with `fsdp`, and says so. Of several machines
# each chooses for itself, from the config and its own device alone, so that machines with equal
# GPUs agree; name the strategy where they are not equal.


STRATEGY_KEY = "parallel.strategy"
TIMEOUT_SECONDS = 180


def with_strategy(
    flags: Sequence[str], recipe: RecipeFile, words: Sequence[str], cfg: Any
) -> list[str]:
    """Return the recipe's arguments, where these ask for `auto` with the strategy that is chosen;
    say which and why.

    flags: torchrun's; for one rank, or for ranks that another launcher started, nothing is chosen.
    cfg: that the words make; None: of a recipe of the user's own that reads them itself.
    """
    if not flags or ranks_of(flags) == 1 or cfg is None or cfg.parallel.strategy != "auto":
        return list(words)
    if shows_plan(flags):
        get_logger().info(
            f"{STRATEGY_KEY}=auto: planning fsdp and ddp for this machine; {STRATEGY_KEY}=fsdp, or"
            " ddp, saves the time"
        )
    with phase("planning fsdp and ddp"):
        chosen, line = _choose_apart(flags, recipe, words)
    if shows_plan(flags):
        get_logger().info(line)
    others = [
        word
        for word in words
        if word != f"~{STRATEGY_KEY}" and word.partition("=")[0] != STRATEGY_KEY
    ]
    return [*others, f"{STRATEGY_KEY}={chosen}"]


def _choose_apart(
    flags: Sequence[str], recipe: RecipeFile, words: Sequence[str]
) -> tuple[str, str]:
    """(strategy, the line that says so), from a separate process."""
    with TemporaryDirectory(prefix="tune-strategy-") as folder:
        answer = Path(folder) / "choice.json"
        command, environment = planning_process(
            "recipe_lib.cli.run", answer, [*flags, str(recipe.path), *words]
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
    """The process that plans: `choose_strategy.py ANSWER [torchrun flags] RECIPE [its
    arguments]`.
    """
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
