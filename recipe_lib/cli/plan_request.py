"""What `tune plan`, and the plan of a run, are asked for: command line, device, settings and
recipe.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import (
    SWITCH,
    Options,
    Parser,
    check_output,
    find_low_numbers,
    read_numbers,
)
from recipe_lib.cli.local_gpus import VISIBLE, find_local_device, is_expandable, list_local_gpus
from recipe_lib.cli.recipes import RecipeFile, check_is_known, is_config, load_module, open_config
from recipe_lib.cli.torchrun_flags import (
    check_launch,
    count_ranks_and_machines,
    get_flag_value,
    take_flags,
)
from recipe_lib.config.mesh import count_same_batch_ranks
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError, UserError, find_lines_in, raise_faults
from recipe_lib.plan.hardware import Hardware, find_hardware, parse_fit
from recipe_lib.plan.simulated_world.sequence_choice import check_choice
from recipe_lib.units import GIB

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

DEFAULT_DEVICE = "24GB"
ROOT = Path(__file__).parents[2]
# What a class of a recipe has that a plan can be made of.
METHODS = ("setup_model", "setup_optimizer", "train_step")
# A plan comes from what is on the machine; the packages that could ask a network are set offline.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
DESCRIPTION = """Plans a run: the recipe's own code runs on a simulated device, where tensors have \
sizes and no bytes.
Needs no GPU and no weights. Takes the command line of `tune run`, with the flags for its \
processes anywhere.

  tune plan --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full --device rtx4090
  tune plan llama3/8B_qlora --device 16GB --advice

Exit codes: 0 fits, or fits with little room to spare (risky); 3 does not fit; 2 a mistake to \
correct."""


_DEVICES = (
    "rtx4090, h100, ... or a size as 24GB; default: that of --calibration, else this machine's GPU,"
    " else 24GB"
)
_STREAMS = (
    "find races between streams, waits of the host and collectives that do not meet, in place of a"
    " plan"
)
# Memory outside of torch -> what it is.
OUTSIDE = {"context": "CUDA's context", "nccl": "NCCL's buffers", "reserve": "other programs"}
# Torchrun's are taken out before.
OPTIONS: Options = {
    "words": {
        "nargs": "*",
        "metavar": "CONFIG key=value",
        "help": "as for `tune run`: [RECIPE --config] CONFIG, overrides",
    },
    "--config": {
        "action": "append",
        "metavar": "CONFIG",
        "help": "a name of `tune ls`, or a path; of several the later win",
    },
    "--nproc_per_node --nproc-per-node": {
        "metavar": "N",
        "help": "processes on each machine; default: 1",
    },
    "--nnodes": {"metavar": "M", "help": "machines; default: 1"},
    "--device": {"metavar": "NAME", "help": _DEVICES},
    "--fit": {"metavar": "4x24GB", "help": "processes and device in one word"},
    "--sequence": {
        "metavar": "LENGTH",
        "default": "auto",
        "help": "tokens of a sequence: auto (the data's longest), max, p99, N",
    },
    "--rank": {
        "metavar": "R,...",
        "help": "ranks to plan; default: 0, or the first rank of each place in a pipeline",
    },
    "--full": (
        SWITCH | {"help": "all tables: layers, communication, groups, times, what was assumed"}
    ),
    "--depth": {
        "type": int,
        "metavar": "N",
        "help": "levels of the tree of what is live at the peak; default: 1, with --full 2",
    },
    "--json": {
        "metavar": "FILE",
        "help": "also write the plan as JSON; -: to standard output, in place of the report",
    },
    "--html": {"metavar": "FILE", "help": "also write a page with the memory over time"},
    "--snapshot": {"metavar": "FILE", "help": "also write a snapshot for pytorch.org/memory_viz"},
    "--diff": {
        "metavar": "OTHER",
        "help": "compare with the plan in a .json file, or of another config without overrides",
    },
    "--advice": SWITCH | {"help": "also try levers one by one, and fewer ranks"},
    "--search": SWITCH | {"help": "find the fastest settings that fit, in place of a plan"},
    "--check-streams": SWITCH | {"help": _STREAMS},
    "--receipts": (
        SWITCH | {"help": "list the runs of this machine, planned and measured; makes no plan"}
    ),
    "--calibrate": {
        "metavar": "FILE",
        "help": "first measure this machine's device, write its rates, and use them",
    },
    "--calibration": {"metavar": "FILE", "help": "use the rates that --calibrate wrote"},
    "--plugin": {"metavar": "FILE", "action": "append", "default": [], "help": "as for `tune run`"},
    **{
        f"--{name}-gib": {
            "type": float,
            "metavar": "X",
            "help": f"device memory for {what}, GiB; default: a table's",
        }
        for name, what in OUTSIDE.items()
    },
}


def parser() -> Parser:
    """Return the reader of the options."""
    return Parser("plan", DESCRIPTION, OPTIONS)


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be without torch; `flags` are torchrun's."""
    flags, own = take_flags(words)
    arguments = parser().parse(own)
    arguments.flags, arguments.wait, arguments.notes = flags, None, []
    if arguments.receipts:
        _check_receipts(arguments)
        return arguments
    check_launch(flags, verb="plan")
    arguments.overrides = [word for word in arguments.words if "=" in word or word.startswith("~")]
    names = [word for word in arguments.words if word not in arguments.overrides]
    if names and is_config(names[0]):
        arguments.config = [names.pop(0), *(arguments.config or [])]
    if len(names) > 1:
        raise ConfigError(
            f"tune plan: unexpected argument {show(names[1])}; see `tune plan --help`"
        )
    arguments.recipe = names[0] if names else None
    if arguments.config is None and (names or not arguments.calibrate):
        if names:
            check_is_known(names[0])
        raise ConfigError(
            "tune plan: no config; expected: tune plan [RECIPE --config] CONFIG (see `tune ls`)"
        )
    raise_faults(ConfigError, find_low_numbers(arguments, depth=1))
    for name in OUTSIDE:
        size = getattr(arguments, f"{name}_gib")
        if size is not None and not 0 <= size < 2**20:
            raise ConfigError(f"--{name}-gib: found {size}, expected a number of GiB >= 0")
    if arguments.fit and (
        arguments.device
        or any(get_flag_value(flags, name) for name in ("--nproc-per-node", "--nnodes"))
    ):
        raise ConfigError(
            "--fit: names processes and device; leave --device, --nproc_per_node and --nnodes out"
        )
    _check_no_plan(arguments)
    if arguments.device:
        find_hardware(arguments.device)
    check_choice(arguments.sequence)
    read_ranks(arguments.rank, count_planned_ranks(arguments))
    inputs = [(f"--{name}", getattr(arguments, name)) for name in ("calibration", "diff")]
    inputs += [("--plugin", path) for path in arguments.plugin]
    inputs += [("--config", path) for path in arguments.config or ()]
    for name in ("calibrate", "json", "html", "snapshot"):
        check_output(f"--{name}", getattr(arguments, name), inputs)
        inputs.append((f"--{name}", getattr(arguments, name)))
    return arguments


def _check_no_plan(arguments: argparse.Namespace) -> None:
    """ConfigError for what a plan is asked to do with an option that makes none."""
    unused = [
        name
        for name in ("json", "html", "snapshot", "diff", "advice", "full")
        if getattr(arguments, name)
    ]
    if arguments.search and arguments.check_streams:
        unused.append("search")
    for name, what in (("check_streams", "follows streams"), ("search", "looks for settings")):
        if getattr(arguments, name) and unused:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {what} and makes no plan; leave --{unused[0]} out"
            )


def _check_receipts(arguments: argparse.Namespace) -> None:
    """ConfigError for what --receipts, which lists all runs, makes nothing of."""
    taken, options = ("help", "words", "receipts", "json", "quiet", "verbose"), parser()
    others = [
        action.option_strings[0]
        for action in options._actions
        if action.dest not in taken and getattr(arguments, action.dest) != action.default
    ]
    unused = [*arguments.words, *arguments.flags, *others]
    if unused:
        raise ConfigError(f"--receipts: lists runs and makes no plan; leave {show(unused[0])} out")
    check_output("--json", arguments.json)


def read_config(arguments: argparse.Namespace) -> tuple[RecipeFile, Any]:
    """The recipe, and the config that the command line makes, with the plugins it names."""
    recipe, loaded = open_config(arguments.config, arguments)
    arguments.notes = loaded.idle
    return recipe, loaded.cfg


def build_planning_command(
    module: str, answer: Path, words: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of a separate process that plans: `module ANSWER [torchrun flags]
    RECIPE ...`.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(answer.parent)}
    return [sys.executable, "-P", "-m", module, str(answer), *words], {**os.environ, **own}


def hide_gpus() -> bool:
    """In such a process: no GPU and no network from here on. Whether the machine has GPUs, which
    are asked before.
    """
    gpus = list_local_gpus()
    os.environ[VISIBLE] = ""
    os.environ.update(OFFLINE)
    return bool(gpus)


def count_planned_ranks(arguments: argparse.Namespace) -> int:
    """Ranks of the run, as `choose_planned_device` gives them."""
    if arguments.fit:
        return parse_fit(arguments.fit)[0]
    here, machines = count_ranks_and_machines(arguments.flags)
    return here * machines


def choose_planned_device(arguments: argparse.Namespace) -> tuple[int, Hardware, list[str]]:
    """Return (ranks, device, what was assumed): what is named, else what --calibration is of, else
    this machine's.
    """
    if arguments.fit:
        return *parse_fit(arguments.fit), []
    here, machines = count_ranks_and_machines(arguments.flags)
    assumed = [f"{here} ranks on each of {machines} machines"] if machines > 1 else []
    if arguments.device:
        hardware = find_hardware(arguments.device)
    elif arguments.calibration:
        from recipe_lib.plan.measured.rates_file import read_calibrated_device

        hardware, unknown = read_calibrated_device(arguments.calibration)
        of_file = f"the device is that of --calibration, {hardware.name}"
        assumed.append("; ".join(filter(None, [of_file, unknown, "--device names another"])))
    elif own := find_local_device():
        hardware = own
        assumed.append(f"the device is this machine's, {hardware.name}; --device names another")
    else:
        hardware = find_hardware(DEFAULT_DEVICE)
        assumed.append("there is no GPU here: planned for one of 24 GB; --device names another")
    return here * machines, dataclasses.replace(hardware, ranks_per_node=here), assumed


def build_settings(
    recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace
) -> tuple["PlanSettings", list[str]]:
    """What a plan needs besides recipe and config, and what was assumed for it."""
    from recipe_lib.plan.simulated_world.sequence_lengths import choose_sequence

    ranks, hardware, assumed = choose_planned_device(arguments)
    traced = read_ranks(arguments.rank, ranks)
    from recipe_lib.plan.build_plan import PlanSettings  # torch from here on

    calibration = None
    if arguments.calibration:
        from recipe_lib.plan.measured.rates_file import read_calibration

        calibration = read_calibration(arguments.calibration, hardware)
    different = max(1, ranks // count_same_batch_ranks(cfg.parallel))
    sequence = choose_sequence(cfg, arguments.sequence, ranks=different, wait=arguments.wait)
    settings = PlanSettings(
        hardware=hardware,
        ranks=ranks,
        traced_ranks=traced,
        sequence=sequence,
        recipe=recipe.name,
        config=", ".join(arguments.config),
        overrides=tuple(arguments.overrides),
        steps=sequence.steps,
        calibration=calibration,
        outside=estimate_outside(cfg, arguments, hardware, ranks),
    )
    return settings, assumed


def prepare(
    recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace, *, decides: bool = False
) -> tuple[type, Any, "PlanSettings"]:
    """Return (recipe class, plannable config, settings) of what a command line plans.

    decides: `parallel.strategy: auto` becomes what `tune run` would choose. What concerns this
    machine is added to `arguments.notes`.
    """
    from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

    shaped, said = make_plannable(cfg)
    planned = find_recipe_class(recipe)
    settings, assumed = build_settings(recipe, cfg, arguments)
    if (
        decides and shaped.parallel.strategy == "auto" and settings.ranks > 1
    ):  # one rank shards nothing
        from recipe_lib.plan.search.advice import choose_strategy
        from recipe_lib.plan.search.trials import STRATEGY_KEY, apply_changes

        with explain_errors(recipe, cfg):
            strategy, line = choose_strategy(planned, shaped, settings, expandable=is_expandable())
        shaped, said = apply_changes(shaped, {STRATEGY_KEY: strategy}), [*said, line]
    assumptions = (*assumed, *said, *arguments.notes)
    arguments.notes = [*assumed, *arguments.notes]
    return planned, shaped, dataclasses.replace(settings, assumptions=assumptions)


def read_ranks(text: str | None, ranks: int) -> tuple[int, ...]:
    """Return `0,3` as numbers; none without a text."""
    return (
        read_numbers("--rank", text, range(ranks), f"numbers below {ranks}, commas between them")
        if text
        else ()
    )


def estimate_outside(
    cfg: Any, arguments: argparse.Namespace, hardware: Hardware, ranks: int
) -> Any:
    """Memory outside of torch where the command line says something about it, else None."""
    given = {
        name: int(size * GIB)
        for name in OUTSIDE
        if (size := getattr(arguments, f"{name}_gib")) is not None
    }
    if not given:
        return None
    from recipe_lib.plan.allocation.untraced_memory import estimate_outside_torch
    from recipe_lib.plan.search.trials import list_communicator_sizes

    return dataclasses.replace(
        estimate_outside_torch(hardware, list_communicator_sizes(cfg.parallel, ranks)), **given
    )


def find_recipe_class(recipe: RecipeFile) -> type:
    """The one class of a recipe's file that has the methods a plan calls; ConfigError by name if
    there is not one.
    """
    module = load_module(recipe.path)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    found = [
        value for value in own if all(callable(getattr(value, name, None)) for name in METHODS)
    ]
    if len(found) == 1:
        return found[0]
    place = show(str(recipe.path))
    methods = " and ".join([", ".join(METHODS[:-1]), METHODS[-1]])
    if found:
        names = ", ".join(value.__name__ for value in found)
        raise ConfigError(
            f"{place}: found several classes with {methods} ({names}), expected one; move the"
            " others out"
        )
    raise ConfigError(
        f"{place}: found no class with {methods}; expected one, like the shipped recipes"
    )


@contextmanager
def explain_errors(recipe: RecipeFile, cfg: Any) -> Iterator[None]:
    """What a recipe of the user's own raises on the simulated device becomes a line that says
    where; and what a model's class of another library does, a line that names it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a user's file raises is his to correct
        if recipe.shipped and cfg.model.implementation == "native":
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        if recipe.shipped:
            raise ConfigError(
                f"model.implementation={cfg.model.implementation}: its class raised"
                f" {type(error).__name__} on the simulated device ({show(said, 160)}); a run may"
                f" still work; for a plan try another dtype (found dtype={cfg.dtype})"
            ) from error
        lines = find_lines_in(error, recipe.path)
        place = f"{show(str(recipe.path))}:{lines[-1] if lines else 1}"
        if type(error).__name__.startswith("DataDependentOutput"):
            raise ConfigError(
                f"{place}: reads a number back from the device, which a plan cannot know; keep"
                f" .item(), .tolist() and conditions on tensors out of {', '.join(METHODS)}"
            ) from error
        raise ConfigError(
            f"{place}: raised {type(error).__name__} while it was planned: {show(said, 200)}"
        ) from error
