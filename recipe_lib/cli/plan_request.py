"""Read the command line of `tune plan`, and turn it into recipe class, config and plan settings.

plan.py calls `read_arguments`, `read_config` and `prepare` in turn; so do run.py and
plan_during_run.py, in a process beside the run (`build_planning_command`). A plan is an estimate of
memory and time: the recipe's own code runs on a simulated device, whose tensors have no bytes.
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
    Parser,
    check_output,
    find_low_numbers,
    read_numbers,
)
from recipe_lib.cli.launch import (
    VISIBLE_VARIABLE,
    check_launch,
    count_ranks_and_machines,
    find_local_device,
    get_flag_value,
    is_expandable,
    list_local_gpus,
    take_flags,
)
from recipe_lib.cli.recipes import RecipeFile, check_is_known, is_config, load_module, open_config
from recipe_lib.config.mesh import count_same_batch_ranks
from recipe_lib.config.paths import get_configs_folder
from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError, UserError, find_lines_in, raise_faults
from recipe_lib.plan.hardware import Hardware, find_hardware, parse_fit
from recipe_lib.plan.simulated_world.sequence_choice import check_choice
from recipe_lib.units import GIB

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings

DEFAULT_DEVICE = "24GB"  # a name of --device, for a machine without a GPU
ROOT = Path(__file__).parents[2]  # the folder to import recipe_lib from
# Methods of a recipe's class that a plan calls.
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


# Device memory that torch's allocator does not see, as the option --NAME-gib names it -> in words.
OUTSIDE_PARTS = {"context": "CUDA's context", "nccl": "NCCL's buffers", "reserve": "other programs"}
# torchrun's flags are taken out before; --nproc_per_node and --nnodes stand here for the help.
PARSER = Parser(
    "plan",
    DESCRIPTION,
    {
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
        "--device": {
            "metavar": "NAME",
            "help": (
                "rtx4090, h100, ... or a size as 24GB; default: that of --calibration, else this"
                " machine's GPU, else 24GB"
            ),
        },
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
        "--snapshot": {
            "metavar": "FILE",
            "help": "also write a snapshot for pytorch.org/memory_viz",
        },
        "--diff": {
            "metavar": "OTHER",
            "help": "compare with the plan in a .json file, or of another config without overrides",
        },
        "--advice": SWITCH | {"help": "also try levers one by one, and fewer ranks"},
        "--search": SWITCH | {"help": "find the fastest settings that fit, in place of a plan"},
        "--check-streams": SWITCH
        | {
            "help": (
                "find races between streams, waits of the host and collectives that do not meet, in"
                " place of a plan"
            )
        },
        "--receipts": (
            SWITCH | {"help": "list the runs of this machine, planned and measured; makes no plan"}
        ),
        "--calibrate": {
            "metavar": "FILE",
            "help": "first measure this machine's device, write its rates, and use them",
        },
        "--calibration": {"metavar": "FILE", "help": "use the rates that --calibrate wrote"},
        "--plugin": {
            "metavar": "FILE",
            "action": "append",
            "default": [],
            "help": "as for `tune run`",
        },
        **{
            f"--{name}-gib": {
                "type": float,
                "metavar": "X",
                "help": f"device memory for {what}, GiB; default: a table's",
            }
            for name, what in OUTSIDE_PARTS.items()
        },
    },
)


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line, checked as far as it can be without torch.

    Adds to the parsed options `flags` (torchrun's), `recipe` (name or path; None: the config names
    it), `overrides`, `notes` (lines for the plan), and `wait`, None here: seconds to wait for a run
    to tokenize its data. Raises ConfigError for what cannot be planned as it is written.
    """
    flags, remaining = take_flags(words)
    arguments = PARSER.parse(remaining)
    arguments.flags = flags
    arguments.wait = None
    arguments.notes = []
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
    if arguments.config is None and not names:
        arguments.config = _choose_config(arguments)
    # --calibrate alone measures the device and plans nothing.
    if arguments.config is None and (names or not arguments.calibrate):
        if names:
            check_is_known(names[0])
        raise ConfigError(
            "tune plan: no config; expected: tune plan [RECIPE --config] CONFIG (see `tune ls`)"
        )
    raise_faults(ConfigError, find_low_numbers(arguments, depth=1))
    for name in OUTSIDE_PARTS:
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
    # These are called for the errors that they raise; what they return is asked for again later.
    if arguments.device:
        find_hardware(arguments.device)
    check_choice(arguments.sequence)
    read_ranks(arguments.rank, count_planned_ranks(arguments))
    # No output may be an input, or the file of another output.
    inputs = [(f"--{name}", getattr(arguments, name)) for name in ("calibration", "diff")]
    inputs += [("--plugin", path) for path in arguments.plugin]
    inputs += [("--config", path) for path in arguments.config or ()]
    for name in ("calibrate", "json", "html", "snapshot"):
        check_output(f"--{name}", getattr(arguments, name), inputs)
        inputs.append((f"--{name}", getattr(arguments, name)))
    return arguments


def _choose_config(arguments: argparse.Namespace) -> list[str] | None:
    """Return the shipped LoRA config of the model that the overrides name, and note it; or None."""
    from recipe_lib.plan.simulated_world.shape_only_model import find_sibling, list_shipped_shapes

    values = dict(word.split("=", 1) for word in arguments.overrides if "=" in word)
    shipped = list_shipped_shapes()
    hub_id = find_sibling(values.get("model.path", ""), shipped)
    config = f"{shipped[hub_id]}_lora" if hub_id else ""
    if not (get_configs_folder() / f"{config}.yaml").is_file():
        return None
    arguments.notes.append(f"no config was named: this is a plan of {config}")
    return [config]


def _check_no_plan(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option of a plan next to --search or --check-streams.

    Also for these two together.
    """
    unused = [
        name
        for name in ("json", "html", "snapshot", "diff", "advice", "full")
        if getattr(arguments, name)
    ]
    if arguments.search and arguments.check_streams:
        unused.append("search")
    for name, action in (("check_streams", "follows streams"), ("search", "looks for settings")):
        if getattr(arguments, name) and unused:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {action} and makes no plan; leave --{unused[0]} out"
            )


def _check_receipts(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a word that `tune plan --receipts` has no use for.

    It lists the receipts of all runs: the planned and measured peaks that each has left.
    """
    # Options that --receipts has a use for; words are refused by themselves.
    used = ("help", "words", "receipts", "json", "quiet", "verbose")
    unused = [*arguments.words, *arguments.flags]
    unused += [
        action.option_strings[0]
        for action in PARSER.list_arguments()
        if action.dest not in used and getattr(arguments, action.dest) != action.default
    ]
    if unused:
        raise ConfigError(f"--receipts: lists runs and makes no plan; leave {show(unused[0])} out")
    check_output("--json", arguments.json)


def read_config(arguments: argparse.Namespace) -> tuple[RecipeFile, Any]:
    """Return the recipe and the config that the command line names, plugins imported.

    Adds to `arguments.notes`. Raises ConfigError if there is no such file, or it is not valid.
    """
    recipe, loaded = open_config(arguments.config, arguments)
    arguments.notes += loaded.describe_idle_keys()
    return recipe, loaded.cfg


def build_planning_command(
    module: str, answer: Path, words: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment) of a separate process that plans.

    It runs `module ANSWER [torchrun flags] RECIPE [arguments]`. answer: the file that it writes.
    words: all that follows ANSWER.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Temporary files next to the answer, as the process may be killed and leave them.
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(answer.parent)}
    # -P: no module in the working folder may take the place of an installed one.
    return [sys.executable, "-P", "-m", module, str(answer), *words], os.environ | variables


def hide_gpus() -> bool:
    """Hide GPUs and network from this process; return True if the machine has GPUs."""
    # Before they are hidden. The list is cached: the device of the plan is still found.
    gpus = list_local_gpus()
    os.environ[VISIBLE_VARIABLE] = ""  # CUDA_VISIBLE_DEVICES
    os.environ.update(OFFLINE)
    return bool(gpus)


def count_planned_ranks(arguments: argparse.Namespace) -> int:
    """Count the ranks of the run, as `choose_planned_device` gives them."""
    if arguments.fit:
        return parse_fit(arguments.fit)[0]
    local_ranks, machines = count_ranks_and_machines(arguments.flags)
    return local_ranks * machines


def choose_planned_device(arguments: argparse.Namespace) -> tuple[int, Hardware, list[str]]:
    """Return (ranks, device, lines on what was assumed).

    The device is the one that is named, else that of --calibration, else this machine's, else
    `DEFAULT_DEVICE`. Raises ConfigError for an unknown device, or GPUs that are not here.
    """
    if arguments.fit:
        return *parse_fit(arguments.fit), []  # such as 4x24GB
    local_ranks, machines = count_ranks_and_machines(arguments.flags)
    assumed = [f"{local_ranks} ranks on each of {machines} machines"] if machines > 1 else []
    if arguments.device:
        hardware = find_hardware(arguments.device)
    elif arguments.calibration:
        from recipe_lib.plan.measured.rates_file import read_calibrated_device

        # memory_line: where the memory is taken from if the file lacks it, else empty.
        hardware, memory_line = read_calibrated_device(arguments.calibration)
        device_line = f"the device is that of --calibration, {hardware.name}"
        assumed.append(
            "; ".join(filter(None, [device_line, memory_line, "--device names another"]))
        )
    elif local_device := find_local_device():
        hardware = local_device
        assumed.append(f"the device is this machine's, {hardware.name}; --device names another")
    else:
        hardware = find_hardware(DEFAULT_DEVICE)
        assumed.append("there is no GPU here: planned for one of 24 GB; --device names another")
    return (
        local_ranks * machines,
        dataclasses.replace(hardware, ranks_per_node=local_ranks),
        assumed,
    )


def build_settings(
    recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace
) -> tuple["PlanSettings", list[str]]:
    """Return what a plan needs besides recipe and config, and lines on what was assumed for it.

    May wait `arguments.wait` seconds for a run to tokenize its data. Raises ConfigError for ranks,
    a device or a calibration that cannot be used.
    """
    from recipe_lib.plan.simulated_world.planned_data import choose_sequence

    ranks, hardware, assumed = choose_planned_device(arguments)
    traced_ranks = read_ranks(arguments.rank, ranks)
    # Imports torch, which takes seconds: after the checks.
    from recipe_lib.plan.build_plan import PlanSettings

    calibration = None
    if arguments.calibration:
        from recipe_lib.plan.measured.rates_file import read_calibration

        calibration = read_calibration(arguments.calibration, hardware)
    # Ranks of a tensor, context or pipeline group read the same batch.
    data_ranks = max(1, ranks // count_same_batch_ranks(cfg.parallel))
    sequence = choose_sequence(cfg, arguments.sequence, ranks=data_ranks, wait=arguments.wait)
    settings = PlanSettings(
        hardware=hardware,
        ranks=ranks,
        traced_ranks=traced_ranks,
        sequence=sequence,
        recipe=recipe.name,
        config=", ".join(arguments.config),
        overrides=tuple(arguments.overrides),
        steps=sequence.steps,
        calibration=calibration,
        outside=estimate_outside(cfg, arguments=arguments, hardware=hardware, ranks=ranks),
    )
    return settings, assumed


def prepare(
    recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace, *, decides: bool = False
) -> tuple[type, Any, "PlanSettings"]:
    """Return (recipe class, plannable config, settings) of what a command line plans.

    The config of a plan has random weights of the same shape (model.preset) in place of model.path.
    decides: `parallel.strategy: auto` becomes what `tune run` would choose. Lines on the assumed
    ranks and device are added to `arguments.notes`. Raises ConfigError for what cannot be planned.
    """
    from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

    shaped, lines = make_plannable(cfg)
    cfg.data.packing = shaped.data.packing  # `auto` is settled
    planned = find_recipe_class(recipe)
    settings, assumed = build_settings(recipe, cfg, arguments)
    # One rank shards nothing: there is nothing to choose.
    if decides and shaped.parallel.strategy == "auto" and settings.ranks > 1:
        from recipe_lib.plan.search.advice import choose_strategy
        from recipe_lib.plan.search.trials import STRATEGY_KEY, apply_changes

        with explain_errors(recipe, cfg):
            strategy, line = choose_strategy(planned, shaped, settings, expandable=is_expandable())
        shaped = apply_changes(shaped, {STRATEGY_KEY: strategy})
        lines = [*lines, line]
    assumptions = (*assumed, *lines, *arguments.notes)
    arguments.notes = [*assumed, *arguments.notes]
    return planned, shaped, dataclasses.replace(settings, assumptions=assumptions)


def read_ranks(text: str | None, ranks: int) -> tuple[int, ...]:
    """Return the ranks of a text such as `0,3`, each below `ranks`; none without a text.

    Raises ConfigError for anything else.
    """
    return (
        read_numbers(
            "--rank",
            text=text,
            legal=range(ranks),
            expected=f"numbers below {ranks}, commas between them",
        )
        if text
        else ()
    )


def estimate_outside(
    cfg: Any, arguments: argparse.Namespace, hardware: Hardware, ranks: int
) -> Any:
    """Return the memory outside of torch's allocator, in bytes by part, for --context-gib and such.

    Return None without such an option: the plan then takes it from its tables.
    """
    sizes = {name: getattr(arguments, f"{name}_gib") for name in OUTSIDE_PARTS}
    sizes = {name: int(gib * GIB) for name, gib in sizes.items() if gib is not None}
    if not sizes:
        return None
    from recipe_lib.plan.allocation.untraced_memory import estimate_outside_torch
    from recipe_lib.plan.search.trials import list_communicator_sizes

    # A part that is not given is the table's, as in a plan without these options.
    return dataclasses.replace(
        estimate_outside_torch(hardware, list_communicator_sizes(cfg.parallel, ranks)), **sizes
    )


def find_recipe_class(recipe: RecipeFile) -> type:
    """Import a recipe's file; return the class that has the methods a plan calls (`METHODS`).

    Raises ConfigError if there is none, or more than one.
    """
    module = load_module(recipe.path)
    # A class that the file imports is not its recipe.
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and all(callable(getattr(value, name, None)) for name in METHODS)
    ]
    if len(classes) == 1:
        return classes[0]
    methods = " and ".join([", ".join(METHODS[:-1]), METHODS[-1]])
    if classes:
        names = ", ".join(value.__name__ for value in classes)
        raise ConfigError(
            f"{show(str(recipe.path))}: found several classes with {methods} ({names}), expected"
            " one; move the others out"
        )
    raise ConfigError(
        f"{show(str(recipe.path))}: found no class with {methods}; expected one, like the shipped"
        " recipes"
    )


@contextmanager
def explain_errors(recipe: RecipeFile, cfg: Any) -> Iterator[None]:
    """Turn what code of others raises on the simulated device into a ConfigError of one line.

    The line names the place in a recipe of the user's own, or the model of another library. A
    UserError stays as it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's file may raise anything
        # `native`: the model is this library's too. All of the code is ours, and a fault of it
        # shows its traceback.
        if recipe.shipped and cfg.model.implementation == "native":
            raise
        message = (str(error).strip().splitlines() or [""])[0]
        if recipe.shipped:
            raise ConfigError(
                f"model.implementation={cfg.model.implementation}: its class raised"
                f" {type(error).__name__} on the simulated device ({show(message, 160)}); a run may"
                f" still work; for a plan try another dtype (found dtype={cfg.dtype})"
            ) from error
        lines = find_lines_in(error, recipe.path)
        location = f"{show(str(recipe.path))}:{lines[-1] if lines else 1}"
        # torch's DataDependentOutputException: an operator whose result depends on data.
        if type(error).__name__.startswith("DataDependentOutput"):
            raise ConfigError(
                f"{location}: reads a number back from the device, which a plan cannot know; keep"
                f" .item(), .tolist() and conditions on tensors out of {', '.join(METHODS)}"
            ) from error
        raise ConfigError(
            f"{location}: raised {type(error).__name__} while it was planned: {show(message, 200)}"
        ) from error
