"""`tune run [torchrun flags] RECIPE --config CONFIG [overrides]`: a recipe on one process or many.

What stands before RECIPE is torchrun's and is handed on untouched; what stands after it is the recipe's.
"""

import os
from collections.abc import Sequence
from typing import Any

from recipe_lib.cli.choose_strategy import with_strategy
from recipe_lib.cli.plan_during_run import plan_beside, take_choice
from recipe_lib.cli.recipes import RecipeFile, run_recipe
from recipe_lib.cli.start_checks import check_shape, check_start, ranks_of
from recipe_lib.config.once import refuse_repeated
from recipe_lib.config.suggest import did_you_mean, nearest, show
from recipe_lib.errors import DONE, ConfigError

USAGE = """usage: tune run [torchrun flags] RECIPE --config CONFIG [--plugin FILE ...] [key=value ...] [~key ...]

Runs a recipe (a name that `tune ls` shows, or a .py file) with a config (a name, or a .yaml file).

  key=value       overrides a key of the config; section.key=value reaches into a section; a value may contain `=`
  ~key            goes back to the key's default
  --plugin FILE   first imports a Python file of yours, which may register formats, losses, optimizers, trackers
  --no-plan       does not show the plan of the run (TUNE_PLAN=off in the environment: never, unless --plan is there)

Flags before RECIPE are torchrun's; without any, the recipe runs in this process:

  tune run full_finetune_distributed --config demo/full
  tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1
  tune run --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT RECIPE --config CONFIG

SIGTERM or Ctrl-C saves a resumable state at the end of the current step. Exit codes: 0 done, 2 a mistake to correct,
3 stopped and saved, 4 loss or gradients no longer finite, 5 out of memory, 6 the disk refuses a write, 7 a rank is
gone, stopped or stands still."""

# torchrun's flags, spelled with hyphens, so that most command lines are understood without importing torch.
WITH_VALUE = {
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts",
    "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "--redirects", "--tee",
    "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--node-rank", "--master-addr",
    "--master-port", "--local-addr", "--logs-specs", "--numa-binding", "--signals-to-handle", "--shutdown-timeout",
    "-r", "-t",
}  # fmt: skip
WITHOUT_VALUE = {"--standalone", "--virtual-local-rank"}
REFUSED = {"-m", "--module", "--no-python", "--run-path"}
RENDEZVOUS = ("--nnodes", "--rdzv-", "--node-rank", "--master-", "--standalone")
RENDEZVOUS_VARIABLES = ("PET_NNODES", "PET_RDZV", "PET_NODE_RANK", "PET_MASTER", "PET_STANDALONE")


def run(words: list[str]) -> int:
    """Runs the recipe; returns its exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return DONE
    words, with_plan = take_choice(words)
    flags, name, rest = split(words)
    check_launch(flags)
    recipe = RecipeFile.find(name)
    cfg = check_arguments(recipe, rest)
    if cfg is not None:
        check_start(cfg, ranks=ranks_of(flags), starts=True)
        if flags:
            check_shape(cfg)  # once, and not by every rank
    rest = with_strategy(flags, recipe, rest)
    if not with_plan:
        return start(flags, recipe, rest)
    with plan_beside(flags, recipe, rest) as compare:
        code = start(flags, recipe, rest)
        compare(code)
    return code


def start(flags: list[str], recipe: RecipeFile, rest: list[str]) -> int:
    """The recipe in this process, or on the ranks that torchrun's flags ask for; returns the exit code."""
    if not flags:
        return run_recipe(recipe.path, rest)
    from recipe_lib.cli.launch import launch

    return launch(with_rendezvous(flags), recipe.path, rest)


def split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """(torchrun's flags, RECIPE, its arguments). RECIPE is the first word that is no flag and no flag's value."""
    position = 0
    given: dict[str, str] = {}
    while position < len(words):
        word = words[position]
        refuse_second(given, words[position : position + 2])
        if not word.startswith("-"):
            if "=" in word or word.startswith("~"):
                raise ConfigError(f"tune run: {show(word)}: overrides come after RECIPE")
            return list(words[:position]), word, list(words[position + 1 :])
        position += 1 + takes_next(word)
        if position > len(words):
            raise ConfigError(f"tune run: {show(word)}: expected a value")
    raise ConfigError("tune run: no recipe; expected: tune run [torchrun flags] RECIPE --config CONFIG")


def refuse_second(given: dict[str, str], words: Sequence[str]) -> None:
    """Notes a flag of torchrun's with its value in `given`; ConfigError if it is there already."""
    name, equals, value = words[0].partition("=")
    flag = name.replace("_", "-")
    if flag not in WITH_VALUE:
        return
    value = value if equals else "".join(words[1:2])
    if flag in given:
        raise ConfigError(
            f"command line: {name}: given twice, as {show(given[flag])} and {show(value)}; remove one of the two"
        )
    given[flag] = value


def takes_next(word: str) -> bool:
    """True if the word after this torchrun flag is the flag's value."""
    name, equals, _ = word.partition("=")
    flag = name.replace("_", "-")
    if flag in ("--config", "--plugin"):
        raise ConfigError(f"tune run: {flag} comes after RECIPE: tune run [torchrun flags] RECIPE --config CONFIG")
    if flag in REFUSED:
        raise ConfigError(f"tune run: {name} cannot be used: RECIPE is the name of a recipe or a .py file")
    if flag in WITHOUT_VALUE:
        return False
    if flag in WITH_VALUE:
        return not equals
    if len(word) > 2 and word[:2] in ("-r", "-t"):  # `-t3`
        return False
    known = sorted(WITH_VALUE | WITHOUT_VALUE)
    begun = [full for full in known if len(flag) > 3 and full.startswith(flag)]
    close = begun[0] if begun else nearest(flag, known, cutoff=0.75)
    if close:
        hint = f"; did you mean {close}?"
        raise ConfigError(f"tune run: unknown torchrun flag {show(name)}{hint}")
    return _ask_torchrun(name) and not equals


def _ask_torchrun(name: str) -> bool:
    # A flag newer than our table: torchrun's own parser knows.
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        if name in action.option_strings:
            return action.nargs != 0
    raise ConfigError(f"tune run: unknown torchrun flag {show(name)}; see `torchrun --help`")


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The value of a torchrun flag (spelled with hyphens), the last one given; None if it is not there."""
    found = None
    for position, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else flags[position + 1]
    return found


def check_launch(flags: Sequence[str], verb: str = "run") -> None:
    """Refuses process counts that torchrun would answer with a traceback. verb: of ours, for the line."""
    ranks = value_of(flags, "--nproc-per-node")
    if ranks is not None and ranks not in ("auto", "cpu", "gpu", "xpu") and not _is_count(ranks):
        raise ConfigError(
            f"tune {verb}: --nproc_per_node {show(ranks)}: expected a number from 1 to 99999, or auto, cpu, gpu, xpu"
        )
    nodes = value_of(flags, "--nnodes")
    if nodes is not None:
        low, colon, high = nodes.partition(":")
        if not _is_count(low) or (colon and (not _is_count(high) or int(low) > int(high))):
            raise ConfigError(f"tune {verb}: --nnodes {show(nodes)}: expected N or MIN:MAX, numbers from 1 to 99999")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1


def with_rendezvous(flags: list[str]) -> list[str]:
    """The flags, with --standalone unless they or torchrun's environment variables say how the nodes meet."""
    told = any(flag.replace("_", "-").startswith(RENDEZVOUS) for flag in flags)
    told_by_environment = any(name.startswith(RENDEZVOUS_VARIABLES) for name in os.environ)
    return flags if told or told_by_environment else ["--standalone", *flags]


def check_arguments(recipe: RecipeFile, words: Sequence[str]) -> Any:
    """Reads the recipe's command line now, before anything starts, where its config class is known without torch.

    Its config; None for a recipe of the user's own, which reads its arguments itself, and may take others than ours.
    """
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and flag in WITH_VALUE | WITHOUT_VALUE:
            raise ConfigError(f"tune run: {show(word)}: torchrun's flags come before RECIPE")
    refuse_repeated(words)
    if not recipe.shipped:
        return None
    if not any(word == "--config" or word.startswith("--config=") for word in words):
        for word in words:
            if word.startswith("--"):
                hint = did_you_mean(word.partition("=")[0], ("--config", "--plugin"))
                if hint:
                    raise ConfigError(f"tune run: unknown option {show(word)}{hint}")
        raise ConfigError(f"tune run: no config; expected: tune run {recipe.name} --config CONFIG (see `tune ls`)")
    from recipe_lib.config import parse_arguments

    return parse_arguments(list(words), recipe.schema())
