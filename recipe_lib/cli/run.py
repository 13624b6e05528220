"""Run a recipe on one process or many: `tune run [torchrun flags] [RECIPE --config] CONFIG ...`.

main.py calls `run(words)`. The words before RECIPE are torchrun's and are handed on untouched,
those after it are the recipe's. Without RECIPE it is the one that the config names. A recipe is a
file with a training step. `main` is a separate process, which chooses parallel.strategy.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recipe_lib.cli.arguments import SWITCH, Parser
from recipe_lib.cli.launch import (
    FLAGS_WITH_VALUE,
    FLAGS_WITHOUT_VALUE,
    add_rendezvous,
    check_launch,
    count_ranks_and_machines,
    count_requested_ranks,
    is_expandable,
    launch,
    should_show_plan,
    split_words,
)
from recipe_lib.cli.plan_during_run import plan_beside, take_choice
from recipe_lib.cli.plan_request import (
    build_planning_command,
    hide_gpus,
    prepare,
    read_arguments,
    read_config,
)
from recipe_lib.cli.recipes import (
    RecipeFile,
    check_arguments,
    check_is_known,
    find_config_recipe,
    is_config,
    run_recipe,
)
from recipe_lib.cli.start_checks import check_model, check_start
from recipe_lib.config.paths import list_recipes
from recipe_lib.errors import DONE, ConfigError, end_process
from recipe_lib.files import replace_text
from recipe_lib.logs import VERBOSITY, get_logger, is_quiet, set_verbosity
from recipe_lib.reading import read_object
from recipe_lib.report.phases import phase

USAGE = """usage: tune run [torchrun flags] CONFIG [key=value ...] [~key ...]
       tune run [torchrun flags] RECIPE --config CONFIG ... [--plugin FILE ...] [key=value ...] \
[~key ...]

Runs a config (a name that `tune ls` shows, or a .yaml file) with the recipe that it names, or \
with another one (a name,
or a .py file of yours). Of several --config the later win, key by key.

  key=value       overrides a key of the config; section.key=value reaches into a section; a value \
may contain `=`
  ~key            goes back to the key's default
  --plugin FILE   first imports a Python file of yours, which may register formats, losses, \
optimizers, trackers
  --no-plan       does not show the plan of the run
  --plan          shows it although the environment has TUNE_PLAN=off
  -q, -v          says warnings and errors alone; says more: all ranks, the seconds of each part

Flags before them are torchrun's; without any, the recipe runs in this process:

  tune run demo/full
  tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1
  tune run --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT RECIPE \
--config CONFIG

SIGTERM or Ctrl-C saves a resumable state at the end of the current step. Exit codes: 0 done, 2 a \
mistake to correct,
3 stopped and saved, 4 loss or gradients no longer finite, 5 out of memory, 6 the disk refuses a \
write, 7 a rank is
gone, stopped or hangs."""

# `run` separates the words itself, as torchrun's flags are handed on as they are.
PARSER = Parser(
    "run",
    "Runs a recipe.",
    {
        "words": {
            "nargs": "*",
            "metavar": "CONFIG",
            "help": "a config, or a recipe before --config",
        },
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
        **dict.fromkeys(
            sorted(FLAGS_WITH_VALUE - {"-r", "-t"}), {"metavar": "X", "help": "torchrun's"}
        ),
        **dict.fromkeys(sorted(FLAGS_WITHOUT_VALUE), SWITCH | {"help": "torchrun's"}),
        "--nproc_per_node": {"metavar": "N", "help": "processes on each machine"},
    },
)


def run(words: list[str]) -> int:
    """Run the recipe; return its exit code. Raises ConfigError for words that cannot be used."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return DONE
    for word in words:
        if word in VERBOSITY:
            set_verbosity(VERBOSITY[word])  # for the ranks too
    # Before the flags are split: --plan and --no-plan may stand among torchrun's.
    words, with_plan = take_choice([word for word in words if word not in VERBOSITY])
    flags, name, recipe_words = split_words(words)
    check_launch(flags)
    recipe, recipe_words = find_recipe_and_words(name, recipe_words)
    cfg = check_arguments(recipe, recipe_words)
    if cfg is not None:
        check_start(cfg, ranks=count_requested_ranks(flags), starts=True)
        if recipe.shipped:
            # Here once: otherwise every rank would print the same error.
            check_model(cfg, starts=True)
    recipe_words = add_chosen_strategy(flags, recipe=recipe, words=recipe_words, cfg=cfg)
    if not with_plan or is_quiet():
        return start(flags, recipe, recipe_words)
    with plan_beside(flags, recipe, recipe_words) as compare:
        code = start(flags, recipe, recipe_words)
        compare(code)
    return code


def find_recipe_and_words(name: str, words: list[str]) -> tuple[RecipeFile, list[str]]:
    """Return the recipe, and its arguments with the config as --config.

    name: the first word that is no flag of torchrun's: a recipe or a config; empty: --config came
    first. words: those after it. Raises ConfigError for an unknown name, or without a config.
    """
    configs = list_named_configs(words)
    if name and not is_config(name):
        # Without --config it may be a misspelled config too.
        if not configs:
            check_is_known(name)
        return RecipeFile.find(name), words
    if not name:
        # `--config CONFIG RECIPE`: a recipe that is not the value of an option.
        values = {index + 1 for index, word in enumerate(words) if word in ("--config", "--plugin")}
        for index, word in enumerate(words):
            if index not in values and (word in list_recipes() or word.endswith(".py")):
                return RecipeFile.find(word), words[:index] + words[index + 1 :]
    words = ["--config", name, *words] if name else words
    configs = [name, *configs] if name else configs
    if not configs:
        raise ConfigError(
            "tune run: no config; expected: tune run [torchrun flags] CONFIG (see `tune ls`)"
        )
    return find_config_recipe(configs), words


def list_named_configs(words: list[str]) -> list[str]:
    """Return the configs that the words name by --config, first to last."""
    return [word for flag, word in pairwise(words) if flag == "--config"] + [
        word.partition("=")[2] for word in words if word.startswith("--config=")
    ]


def start(flags: list[str], recipe: RecipeFile, words: list[str]) -> int:
    """Run the recipe in this process, or on the ranks that torchrun's flags ask for.

    words: the recipe's arguments. Returns the exit code.
    """
    if not flags:
        return run_recipe(recipe.path, words)
    return launch(add_rendezvous(flags), recipe.path, words)


# `parallel.strategy: auto` on the command line: fsdp and ddp are both planned before the ranks
# start, which get the choice as an override. Whatever goes wrong, the run goes on with `fsdp`.
# Of several machines each chooses for itself, from the config and its own device alone, so that
# machines with equal GPUs agree; name the strategy where they are not equal.
STRATEGY_KEY = "parallel.strategy"
PLANNING_SECONDS = 180  # for planning fsdp and ddp


def add_chosen_strategy(
    flags: Sequence[str], recipe: RecipeFile, words: Sequence[str], cfg: Any
) -> list[str]:
    """Return the recipe's arguments, with the chosen strategy in place of `auto`; log the reason.

    flags: torchrun's. words: the recipe's arguments. cfg: the config that the words make; None for
    a recipe of the user's own that reads them itself.
    """
    # One rank shards nothing. Without flags another launcher may have started the ranks.
    if (
        not flags
        or count_requested_ranks(flags) == 1
        or cfg is None
        or cfg.parallel.strategy != "auto"
    ):
        return list(words)
    if should_show_plan(flags):
        get_logger().info(
            f"{STRATEGY_KEY}=auto: planning fsdp and ddp for this machine; {STRATEGY_KEY}=fsdp, or"
            " ddp, saves the time"
        )
    with phase("planning fsdp and ddp"):
        chosen, line = _choose_in_subprocess(flags, recipe, words)
    if should_show_plan(flags):
        get_logger().info(line)
    # A key may be given once: the word that asked for `auto` goes.
    remaining = [
        word
        for word in words
        if word != f"~{STRATEGY_KEY}" and word.partition("=")[0] != STRATEGY_KEY
    ]
    return [*remaining, f"{STRATEGY_KEY}={chosen}"]


def _choose_in_subprocess(
    flags: Sequence[str], recipe: RecipeFile, words: Sequence[str]
) -> tuple[str, str]:
    """Return (strategy, a line with the reason), from a separate process without a GPU.

    The strategy is fsdp if that process fails or takes too long.
    """
    # A simulated device cannot be taken back: in this process the run would be simulated too.
    with TemporaryDirectory(prefix="tune-strategy-") as folder:
        answer = Path(folder) / "choice.json"
        command, environment = build_planning_command(
            "recipe_lib.cli.run", answer, [*flags, str(recipe.path), *words]
        )
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=PLANNING_SECONDS,
                check=False,
            )
            choice = read_object(answer)
            return str(choice["strategy"]), str(choice["line"])
        except subprocess.TimeoutExpired:
            reason = f"planning both took more than {PLANNING_SECONDS} s"
        except (OSError, ValueError, KeyError):  # the process has failed and left no answer
            reason = "both could not be planned; `tune plan` with the same arguments says why"
    return "fsdp", f"{STRATEGY_KEY}=auto: fsdp; {reason}"


def main(argv: list[str]) -> int:
    """Choose the strategy, as the separate process: ANSWER [torchrun flags] RECIPE [arguments].

    ANSWER: the file to write the choice to, JSON with `strategy` and `line`.
    """
    has_gpus = hide_gpus()
    arguments = read_arguments(argv[1:])
    recipe, cfg = read_config(arguments)
    if count_ranks_and_machines(arguments.flags)[1] > 1:
        arguments.sequence = "max"  # each machine may have other data files
    planned, shaped, settings = prepare(recipe, cfg, arguments)
    from recipe_lib.plan.search.advice import choose_strategy

    strategy, line = choose_strategy(planned, shaped, settings, expandable=is_expandable())
    line += "" if has_gpus else " (planned for that device, as there is no GPU here)"
    replace_text(Path(argv[0]), json.dumps({"strategy": strategy, "line": line}))
    return DONE


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
