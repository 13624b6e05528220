"""`tune plan`: what a run will take, told before it is started and on a machine that need not have a GPU."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import Parser
from recipe_lib.cli.launch import cores, environment
from recipe_lib.cli.outputs import check_output
from recipe_lib.cli.plan_files import calibrate, write
from recipe_lib.cli.recipes import RecipeFile, load_module, recipe_for
from recipe_lib.cli.run import REFUSED, WITH_VALUE, WITHOUT_VALUE, check_launch, refuse_second, value_of
from recipe_lib.cli.start_checks import check_start
from recipe_lib.config import load_config
from recipe_lib.config.places import list_configs
from recipe_lib.config.plugins import load_plugin
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import DONE, ConfigError, UserError, lines_in
from recipe_lib.units import GIB

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.hardware import Hardware
    from recipe_lib.plan.result import Plan
    from recipe_lib.plan.search.fastest_settings import Search
    from recipe_lib.plan.trace import Trace

NO_ROOM = 3  # exit code
DEFAULT_DEVICE = "24GB"
# What a class of a recipe has that a plan can be made of.
METHODS = ("setup_model", "setup_optimizer", "train_step")
# A plan comes from what is on the machine; the packages that could ask a network are told so.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
DESCRIPTION = """Plans a run: the recipe's own code runs on a simulated device, where tensors have sizes and no bytes.
Needs no GPU and no weights. Takes the command line of `tune run`, with the flags for its processes anywhere.

  tune plan --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full --device rtx4090
  tune plan --config llama3/8B_qlora --device 16GB --advice

Exit codes: 0 fits, or fits with little room to spare (risky); 3 does not fit; 2 a mistake to correct."""


def run(words: list[str]) -> int:
    """Prints the plan, and writes it where asked to."""
    arguments = read(words)
    output = sys.stdout
    quiet_libraries()
    with environment(**OFFLINE), redirect_stdout(sys.stderr):  # what a recipe prints is no part of the plan
        if arguments.calibrate:
            said = calibrate(Path(arguments.calibrate))
            print(said, file=sys.stderr if arguments.json == "-" else output)
            if arguments.config is None:
                return DONE
        for plugin in arguments.plugin:
            load_plugin(plugin)
        recipe = RecipeFile.find(arguments.recipe) if arguments.recipe else recipe_for(arguments.config)
        cfg = load_config(arguments.config, arguments.overrides, recipe.schema())
        arguments.notes = check_start(cfg, ranks=known_ranks(arguments), plans=True)
        if arguments.search:
            found = search(recipe, cfg, arguments)
            print(str(found).rstrip(), file=output)
            return DONE if found else NO_ROOM
        other = None if arguments.diff is None else other_plan(recipe, arguments)
        plan, trace = make(recipe, cfg, arguments)
    write(plan, trace, arguments)
    if arguments.json != "-":
        print(text_of(plan, other, arguments.depth), end="")
    return exit_code(plan)


def quiet_libraries() -> None:
    """Loggers of torch's that speak of its own code, where a model of another library is simulated."""
    for name in ("torch.utils._pytree", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def exit_code(plan: "Plan") -> int:
    """Of the verdict."""
    from recipe_lib.plan.result import DOES_NOT_FIT

    return NO_ROOM if plan.verdict == DOES_NOT_FIT else DONE


def text_of(plan: "Plan", other: "Plan | None", depth: int) -> str:
    """The report; with another plan, what is different here."""
    from recipe_lib.plan.report import render, wants_color

    if other is not None:
        from recipe_lib.plan.diff import render_diff

        return render_diff(other, plan)
    return render(plan, depth=depth, color=wants_color(sys.stdout))


def parser() -> Parser:
    """The options; torchrun's others are taken out before."""
    parser = Parser("plan", DESCRIPTION)
    add = parser.add_argument
    add("words", nargs="*", metavar="[RECIPE] key=value", help="as for `tune run`; RECIPE: the one the config names")
    add("--config", metavar="CONFIG", help="a name that `tune ls` shows, or a path")
    add("--nproc_per_node", "--nproc-per-node", metavar="N", help="processes on each machine; default: 1")
    add("--nnodes", metavar="M", help="machines; default: 1")
    add("--device", metavar="NAME", help="rtx4090, h100, ... or a size as 24GB; default: this machine's GPU, else 24GB")
    add("--fit", metavar="4x24GB", help="processes and device in one word")
    add("--sequence", metavar="LENGTH", default="auto", help="tokens of a row: auto (the data's longest), max, p99, N")
    add("--rank", metavar="R,...", help="ranks to plan; default: 0, or the first rank of each place in a pipeline")
    add("--depth", type=int, default=2, metavar="N", help="levels of the tree of what is alive at the peak; default: 2")
    add("--json", metavar="FILE", help="also write the plan as JSON; -: to standard output, in place of the report")
    add("--html", metavar="FILE", help="also write a page with the memory over time")
    add("--snapshot", metavar="FILE", help="also write a snapshot for pytorch.org/memory_viz")
    add("--diff", metavar="OTHER", help="compare with the plan in a .json file, or of another config without overrides")
    add("--advice", action="store_true", help="also try levers one by one, and say what each gains and costs")
    add("--search", action="store_true", help="find the fastest settings that fit, in place of a plan")
    add("--calibrate", metavar="FILE", help="first measure this machine's device, and write its rates")
    add("--calibration", metavar="FILE", help="use the rates that --calibrate wrote")
    for name, what in (("context", "CUDA's context"), ("nccl", "NCCL's buffers"), ("reserve", "other programs")):
        add(f"--{name}-gib", type=float, metavar="X", help=f"device memory for {what}, GiB; default: a table's")
    add("--plugin", metavar="FILE", action="append", default=[], help="as for `tune run`")
    return parser


def read(words: Sequence[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be without torch; `flags` are torchrun's."""
    flags, own = take_flags(words)
    arguments = parser().parse(own)
    arguments.flags, arguments.wait, arguments.notes = flags, None, []
    check_launch(flags, verb="plan")
    arguments.overrides = [word for word in arguments.words if "=" in word or word.startswith("~")]
    names = [word for word in arguments.words if word not in arguments.overrides]
    if len(names) > 1:
        raise ConfigError(f"tune plan: unexpected argument {show(names[1])}; see `tune plan --help`")
    arguments.recipe = names[0] if names else None
    if arguments.config is None and (names or not arguments.calibrate):
        known = names and names[0] in {name for configs in list_configs().values() for name in configs}
        hint = f"did you mean --config {names[0]}?" if known else "expected: tune plan [RECIPE] --config CONFIG"
        raise ConfigError(f"tune plan: no config; {hint}")
    if arguments.depth < 1:
        raise ConfigError(f"--depth: found {arguments.depth}, expected a number >= 1")
    for name in ("context", "nccl", "reserve"):
        size = getattr(arguments, f"{name}_gib")
        if size is not None and not 0 <= size < 2**20:
            raise ConfigError(f"--{name}-gib: found {size}, expected a number of GiB >= 0")
    if arguments.fit and (arguments.device or any(value_of(flags, name) for name in ("--nproc-per-node", "--nnodes"))):
        raise ConfigError("--fit: names processes and device; leave --device, --nproc_per_node and --nnodes out")
    unused = [name for name in ("json", "html", "snapshot", "diff", "advice") if getattr(arguments, name)]
    if arguments.search and unused:
        raise ConfigError(f"--search: looks for settings and makes no plan of its own; leave --{unused[0]} out")
    for name in ("calibrate", "json", "html", "snapshot"):
        check_output(f"--{name}", getattr(arguments, name))
    return arguments


def take_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(torchrun's flags, the other words): they may stand anywhere, as `tune plan` starts nothing."""
    flags: list[str] = []
    others: list[str] = []
    given: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        name, equals, _ = word.partition("=")
        flag = name.replace("_", "-") if name.startswith("-") else ""
        if flag in REFUSED:
            raise ConfigError(f"tune plan: {name} cannot be used: RECIPE is the name of a recipe or a .py file")
        taken = 0
        if flag in WITHOUT_VALUE or (word[:2] in ("-r", "-t") and len(word) > 2):
            taken = 1
        elif flag in WITH_VALUE:
            refuse_second(given, words[position : position + 2])
            taken = 1 if equals else 2
        if position + taken > len(words):
            raise ConfigError(f"tune plan: {show(word)}: expected a value")
        (flags if taken else others).extend(words[position : position + max(1, taken)])
        position += max(1, taken)
    return flags, others


def rank_count(flags: Sequence[str]) -> tuple[int, int]:
    """(processes of a machine, machines) that torchrun's flags ask for; of MIN:MAX machines the fewest, which have the
    most to hold each."""
    from recipe_lib.cli.local_gpus import own_gpus

    here = value_of(flags, "--nproc-per-node") or "1"
    if here in ("auto", "gpu", "cpu", "xpu"):
        gpus = 0 if here in ("cpu", "xpu") else len(own_gpus())
        if not gpus and here in ("gpu", "xpu"):
            raise ConfigError(f"--nproc_per_node {here}: this machine has none; give a number, and --device")
        here = str(gpus or cores())
    machines = (value_of(flags, "--nnodes") or "1").partition(":")[0]
    return int(here), int(machines)


def known_ranks(arguments: argparse.Namespace) -> int:
    """Ranks of the run, as `device_for` gives them."""
    from recipe_lib.plan.hardware import parse_fit

    if arguments.fit:
        return parse_fit(arguments.fit)[0]
    here, machines = rank_count(arguments.flags)
    return here * machines


def device_for(arguments: argparse.Namespace) -> tuple[int, "Hardware", list[str]]:
    """(ranks, device, what was assumed)."""
    from recipe_lib.cli.local_gpus import own_device
    from recipe_lib.plan.hardware import find_hardware, parse_fit

    if arguments.fit:
        return *parse_fit(arguments.fit), []
    here, machines = rank_count(arguments.flags)
    assumed = [f"{here} ranks on each of {machines} machines"] if machines > 1 else []
    hardware = find_hardware(arguments.device) if arguments.device else own_device()
    if hardware is None:
        hardware = find_hardware(DEFAULT_DEVICE)
        assumed.append("there is no GPU here: planned for one of 24 GB; --device names another")
    elif not arguments.device:
        assumed.append(f"the device is this machine's, {hardware.name}; --device names another")
    return here * machines, dataclasses.replace(hardware, ranks_per_node=here), assumed


def settings_for(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> tuple["PlanSettings", list[str]]:
    """What a plan needs beside recipe and config, and what was assumed for it."""
    from recipe_lib.plan.world.sequence_lengths import check_choice, planned_sequence

    check_choice(arguments.sequence)
    ranks, hardware, assumed = device_for(arguments)
    traced = read_ranks(arguments.rank, ranks) if arguments.rank else ()
    from recipe_lib.plan.build_plan import PlanSettings  # torch from here on

    calibration = None
    if arguments.calibration:
        from recipe_lib.plan.timing.calibrate import read_calibration

        calibration = read_calibration(arguments.calibration, hardware)
    different = max(1, ranks // (cfg.parallel.pipeline * cfg.parallel.tensor))
    sequence = planned_sequence(cfg, arguments.sequence, ranks=different, wait=arguments.wait)
    settings = PlanSettings(
        hardware=hardware,
        ranks=ranks,
        traced_ranks=traced,
        sequence=sequence,
        recipe=recipe.name,
        config=str(arguments.config),
        overrides=tuple(arguments.overrides),
        steps=sequence.steps,
        calibration=calibration,
        outside=outside_for(cfg, arguments, hardware, ranks),
    )
    return settings, assumed


def read_ranks(text: str, ranks: int) -> tuple[int, ...]:
    """`0,3` as numbers."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) < ranks for part in parts):
        raise ConfigError(f"--rank: found {quote(text)}, expected numbers below {ranks}, commas between them")
    return tuple(dict.fromkeys(map(int, parts)))


def outside_for(cfg: Any, arguments: argparse.Namespace, hardware: "Hardware", ranks: int) -> Any:
    """Memory outside of torch where the command line says something about it, else None."""
    given = {
        name: int(size * GIB)
        for name in ("context", "nccl", "reserve")
        if (size := getattr(arguments, f"{name}_gib")) is not None
    }
    if not given:
        return None
    from recipe_lib.plan.allocation.untraced_memory import outside_torch
    from recipe_lib.plan.search.trials import communicator_sizes

    return dataclasses.replace(outside_torch(hardware, communicator_sizes(cfg.parallel, ranks)), **given)


def make(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> tuple["Plan", "Trace"]:
    """The plan of a recipe with a config, and the trace behind it."""
    from recipe_lib.plan.world.shape_only_model import plannable

    shaped, more = plannable(cfg)
    planned = recipe_class(recipe)
    settings, assumed = settings_for(recipe, cfg, arguments)
    from recipe_lib.plan.build_plan import make_plan

    with explained(recipe, cfg):
        if shaped.parallel.strategy == "auto":
            from recipe_lib.cli.choose_strategy import decided

            shaped, said = decided(planned, shaped, settings)
            more = [*more, said]
        settings = dataclasses.replace(settings, assumptions=(*assumed, *more, *arguments.notes))
        if arguments.advice:
            from recipe_lib.plan.search.advice import advice_from, try_levers

            tried = try_levers(planned, shaped, settings)  # before the plan: from here it can use all cores
        plan, trace = make_plan(planned, shaped, settings)
        if arguments.advice:
            plan.advice = advice_from(plan, *tried)
    return plan, trace


def recipe_class(recipe: RecipeFile) -> type:
    """The one class of a recipe's file that has the methods a plan calls; ConfigError by name if there is not one."""
    module = load_module(recipe.path)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    found = [value for value in own if all(callable(getattr(value, name, None)) for name in METHODS)]
    if len(found) == 1:
        return found[0]
    place = show(str(recipe.path))
    methods = " and ".join([", ".join(METHODS[:-1]), METHODS[-1]])
    if found:
        names = ", ".join(value.__name__ for value in found)
        raise ConfigError(f"{place}: found several classes with {methods} ({names}), expected one; move the others out")
    raise ConfigError(f"{place}: found no class with {methods}; expected one, like the shipped recipes")


@contextmanager
def explained(recipe: RecipeFile, cfg: Any) -> Iterator[None]:
    """What a recipe of the user's own raises on the simulated device becomes a line that says where; and what a model's
    class of another library does, a line that names it."""
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
                f"model.implementation={cfg.model.implementation}: its class raised {type(error).__name__} on the "
                "simulated device "
                f"({show(said, 160)}); a run may still work; for a plan try another dtype (found dtype={cfg.dtype})"
            ) from error
        lines = lines_in(error, recipe.path)
        place = f"{show(str(recipe.path))}:{lines[-1] if lines else 1}"
        if type(error).__name__.startswith("DataDependentOutput"):
            raise ConfigError(
                f"{place}: reads a number back from the device, which a plan cannot know; keep .item(), .tolist() and "
                f"conditions on tensors out of {', '.join(METHODS)}"
            ) from error
        raise ConfigError(f"{place}: raised {type(error).__name__} while it was planned: {show(said, 200)}") from error


def other_plan(recipe: RecipeFile, arguments: argparse.Namespace) -> "Plan":
    """The plan to compare with: a file's, or that of another config for the same device and processes."""
    if arguments.diff.endswith(".json"):
        from recipe_lib.plan.result import read_plan

        return read_plan(Path(arguments.diff))
    wanted = argparse.Namespace(**vars(arguments) | {"config": arguments.diff, "overrides": [], "advice": False})
    other = recipe_for(arguments.diff) if recipe.shipped else recipe
    return make(other, load_config(arguments.diff, (), other.schema()), wanted)[0]


def search(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> "Search":
    """The fastest settings that fit; false if none does."""
    from recipe_lib.plan.world.shape_only_model import plannable

    shaped, _ = plannable(cfg)
    settings, _ = settings_for(recipe, cfg, arguments)
    from recipe_lib.plan.search.fastest_settings import search as find_settings

    with explained(recipe, cfg):
        keys = {word.partition("=")[0].removeprefix("~") for word in arguments.overrides}  # what was asked for stays
        return find_settings(recipe_class(recipe), shaped, settings, fixed=keys, splits=not cfg.compile)
