"""`tune run [torchrun flags] RECIPE --config CONFIG [overrides]`: a recipe on one process or many.

What stands before RECIPE is torchrun's and is handed on untouched; what stands after it is the recipe's.
"""

from recipe_lib.cli.choose_strategy import with_strategy
from recipe_lib.cli.launch import launch
from recipe_lib.cli.plan_during_run import plan_beside, take_choice
from recipe_lib.cli.recipes import RecipeFile, check_arguments, run_recipe
from recipe_lib.cli.start_checks import check_shape, check_start
from recipe_lib.cli.torchrun_flags import check_launch, ranks_of, split, with_rendezvous
from recipe_lib.errors import DONE

USAGE = """usage: tune run [torchrun flags] RECIPE --config CONFIG ... [--plugin FILE ...] [key=value ...] [~key ...]

Runs a recipe (a name that `tune ls` shows, or a .py file) with a config (a name, or a .yaml file). Of several
--config the later win, key by key.

  key=value       overrides a key of the config; section.key=value reaches into a section; a value may contain `=`
  ~key            goes back to the key's default
  --plugin FILE   first imports a Python file of yours, which may register formats, losses, optimizers, trackers
  --no-plan       does not show the plan of the run
  --plan          shows it although the environment has TUNE_PLAN=off

Flags before RECIPE are torchrun's; without any, the recipe runs in this process:

  tune run full_finetune_distributed --config demo/full
  tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1
  tune run --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT RECIPE --config CONFIG

SIGTERM or Ctrl-C saves a resumable state at the end of the current step. Exit codes: 0 done, 2 a mistake to correct,
3 stopped and saved, 4 loss or gradients no longer finite, 5 out of memory, 6 the disk refuses a write, 7 a rank is
gone, stopped or hangs."""


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
    return launch(with_rendezvous(flags), recipe.path, rest)
