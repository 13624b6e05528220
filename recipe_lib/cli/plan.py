"""`tune plan`: what a run will take, before it is started and on a machine that need not have a GPU."""

import argparse
import dataclasses
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.choose_strategy import decided
from recipe_lib.cli.launch import environment
from recipe_lib.cli.plan_files import calibrate, write
from recipe_lib.cli.plan_receipts import list_receipts, quoted_receipt
from recipe_lib.cli.plan_request import OFFLINE, explained, known_ranks, read, read_config, recipe_class, settings_for
from recipe_lib.cli.plan_request import parser as parser
from recipe_lib.cli.process_clock import process_seconds
from recipe_lib.cli.recipes import RecipeFile, recipe_for
from recipe_lib.cli.start_checks import check_start
from recipe_lib.config import load_config
from recipe_lib.errors import DONE

if TYPE_CHECKING:
    from recipe_lib.plan.result import Plan
    from recipe_lib.plan.search.fastest_settings import Search
    from recipe_lib.plan.trace import Trace

NO_ROOM = 3  # exit codes
MISTAKE = 2
# Objects before Python's collector of cycles looks at them: a plan makes a million that stay, and torch's import half
# as many; at Python's own number of 700 it takes a tenth of the time.
COLLECT_AFTER = 100_000


def run(words: list[str]) -> int:
    """Prints the plan, and writes it where asked to."""
    arguments = read(words)
    if arguments.receipts:
        print(list_receipts(arguments), end="")
        return DONE
    output = sys.stdout
    gc.set_threshold(COLLECT_AFTER)
    # What a recipe prints is no part of the plan.
    with environment(**OFFLINE), quiet_libraries(), redirect_stdout(sys.stderr):
        if arguments.calibrate:
            said = calibrate(Path(arguments.calibrate))
            print(said, file=sys.stderr if arguments.json == "-" else output)
            if arguments.config is None:
                return DONE
            arguments.calibration = arguments.calibration or arguments.calibrate
        recipe, cfg = read_config(arguments)
        arguments.notes += check_start(cfg, ranks=known_ranks(arguments), plans=True)
        if arguments.search:
            found = search(recipe, cfg, arguments)
            print(str(found).rstrip(), file=output)
            return DONE if found else NO_ROOM
        if arguments.check_streams:
            said, is_clean = stream_check(recipe, cfg, arguments)
            print(said, end="", file=output)
            return DONE if is_clean else MISTAKE
        other = None if arguments.diff is None else other_plan(recipe, arguments)
        plan, trace = make(recipe, cfg, arguments)
    plan.seconds = process_seconds()
    write(plan, trace, arguments)
    if arguments.json != "-":
        plan.seconds = process_seconds()
        print(text_of(plan, other, arguments), end="")
    return exit_code(plan)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without loggers of torch's that speak of its own code, where a model of another library is simulated."""
    loggers = [logging.getLogger(name) for name in ("torch.utils._pytree", "torch._subclasses.fake_tensor")]
    for logger in loggers:
        logger.disabled = True  # not its level, which is set anew when the compiler is imported
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


def exit_code(plan: "Plan") -> int:
    """Of the verdict."""
    from recipe_lib.plan.result import DOES_NOT_FIT

    return NO_ROOM if plan.verdict == DOES_NOT_FIT else DONE


def text_of(plan: "Plan", other: "Plan | None", arguments: argparse.Namespace) -> str:
    """The report; with another plan, what is different here."""
    from recipe_lib.plan.report import render
    from recipe_lib.report.terminal import wants_color

    if other is not None:
        from recipe_lib.plan.diff import render_diff

        return render_diff(other, plan)
    return render(plan, full=arguments.full, depth=arguments.depth, color=wants_color(sys.stdout))


def make(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> tuple["Plan", "Trace"]:
    """The plan of a recipe with a config, and the trace that it rests on."""
    from recipe_lib.plan.world.shape_only_model import plannable

    shaped, more = plannable(cfg)
    planned = recipe_class(recipe)
    settings, assumed = settings_for(recipe, cfg, arguments)
    from recipe_lib.plan.build_plan import make_plan

    with explained(recipe, cfg):
        if shaped.parallel.strategy == "auto" and settings.ranks > 1:  # one rank shards nothing
            shaped, said = decided(planned, shaped, settings)
            more = [*more, said]
        settings = dataclasses.replace(settings, assumptions=(*assumed, *more, *arguments.notes))
        if arguments.advice:
            from recipe_lib.plan.search.advice import advice_from, try_levers

            tried = try_levers(planned, shaped, settings)  # before the plan: from here it can use all cores
        plan, trace = make_plan(planned, shaped, settings)
        if arguments.advice:
            plan.advice = advice_from(plan, *tried)
            from recipe_lib.plan.smallest import add_fewest_ranks

            add_fewest_ranks(plan, planned, shaped, settings)
        if arguments.full and arguments.diff is None:
            from recipe_lib.plan.alone import add_alone

            add_alone(plan, planned, shaped, settings)
    from recipe_lib.plan.next_lever import next_lever
    from recipe_lib.plan.smallest import smallest_cards

    plan.smallest_cards = smallest_cards(plan, shaped)
    plan.notes = list(dict.fromkeys([*plan.notes, *assumed, *arguments.notes]))
    plan.next_lever = next_lever(plan, shaped)
    plan.receipt = quoted_receipt(cfg, shaped, settings)
    return plan, trace


def other_plan(recipe: RecipeFile, arguments: argparse.Namespace) -> "Plan":
    """The plan to compare with: a file's, or that of another config for the same device and processes."""
    if arguments.diff.endswith(".json"):
        from recipe_lib.plan.result import read_plan

        return read_plan(Path(arguments.diff))
    wanted = argparse.Namespace(
        **vars(arguments) | {"config": arguments.diff, "overrides": [], "advice": False, "full": False}
    )
    other = recipe_for(arguments.diff) if recipe.shipped else recipe
    return make(other, load_config(arguments.diff, (), other.schema()), wanted)[0]


def stream_check(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> tuple[str, bool]:
    """What the recipe's streams, waits and collectives look like, and whether there is nothing to correct."""
    from recipe_lib.plan.world.shape_only_model import plannable

    shaped, _ = plannable(cfg)
    settings, _ = settings_for(recipe, cfg, arguments)
    from recipe_lib.plan.streams.check_recipe import check_streams, render_check

    planned = recipe_class(recipe)
    with explained(recipe, cfg):
        if shaped.parallel.strategy == "auto" and settings.ranks > 1:  # one rank shards nothing
            shaped, _ = decided(planned, shaped, settings)
        check = check_streams(planned, shaped, settings)
    return render_check(check), check.is_clean


def search(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> "Search":
    """The fastest settings that fit; false if none does."""
    from recipe_lib.plan.world.shape_only_model import plannable

    shaped, _ = plannable(cfg)
    settings, _ = settings_for(recipe, cfg, arguments)
    from recipe_lib.plan.search.fastest_settings import search as find_settings

    with explained(recipe, cfg):
        keys = {word.partition("=")[0].removeprefix("~") for word in arguments.overrides}  # what was asked for stays
        return find_settings(recipe_class(recipe), shaped, settings, fixed=keys, splits=not cfg.compile)
