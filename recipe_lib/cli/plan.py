"""Print the memory, communication and time of a run before it is started, for `tune plan`.

main.py calls `run(words)`. plan_request.py reads the command line, recipe_lib.plan makes the plan
by running the recipe's code on a simulated device, so no GPU is needed. A trace is that run's
allocations and operators. A receipt holds the planned and measured peaks of an earlier run.
"""

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import write_json
from recipe_lib.cli.launch import set_environment
from recipe_lib.cli.plan_request import (
    OFFLINE,
    count_planned_ranks,
    explain_errors,
    prepare,
    read_arguments,
    read_config,
)
from recipe_lib.cli.plan_request import PARSER as PARSER  # each verb's module has its PARSER
from recipe_lib.cli.recipes import RecipeFile, find_config_recipe
from recipe_lib.cli.start_checks import check_model, check_start
from recipe_lib.config import load_config
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, ConfigError
from recipe_lib.files import replace_text
from recipe_lib.plan.measured.receipts import (
    VARIABLE,
    Receipt,
    describe_run,
    find_nearest,
    format_receipt,
    get_receipts_file,
    has_disabled_receipts,
    read_receipts,
)
from recipe_lib.plan.plan_schema import DOES_NOT_FIT, Plan, read_plan
from recipe_lib.report.terminal import (
    Table,
    get_terminal_width,
    open_console,
    put,
    put_table,
    read_console,
    wants_color,
)
from recipe_lib.units import format_bytes, pluralize

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.tracing.trace import Trace


NO_ROOM = 3  # exit code: the run does not fit
MISTAKE = 2  # exit code: --check-streams has found something
# New objects after which Python collects cycles: a plan makes a million that stay, and torch's
# import half as many. At Python's default of 700 collecting takes a tenth of the time.
COLLECT_AFTER = 100_000
_IMPORTED = time.monotonic()  # seconds; the plan says how long it took from here on


def run(words: list[str]) -> int:
    """Print the plan, or what is asked for in its place; write the files that are asked for.

    Returns the exit code. Raises ConfigError for a request that cannot be planned.
    """
    arguments = read_arguments(words)
    if arguments.receipts:
        print(list_receipts(arguments), end="")
        return DONE
    output = sys.stdout
    gc.set_threshold(COLLECT_AFTER)
    # What a recipe prints is no part of the plan.
    with set_environment(**OFFLINE), silence_libraries(), redirect_stdout(sys.stderr):
        if arguments.calibrate:
            line = calibrate(Path(arguments.calibrate))
            print(line, file=sys.stderr if arguments.json == "-" else output)
            if arguments.config is None:
                return DONE
            # The plan uses the rates just measured, unless another file is named.
            arguments.calibration = arguments.calibration or arguments.calibrate
        recipe, cfg = read_config(arguments)
        arguments.notes += check_start(cfg, ranks=count_planned_ranks(arguments), plans=True)
        check_model(cfg)
        if arguments.search:
            text, fits = search(recipe, cfg, arguments)
            print(text, file=output)
            return DONE if fits else NO_ROOM
        if arguments.check_streams:
            text, is_clean = run_stream_check(recipe, cfg, arguments)
            print(text, end="", file=output)
            return DONE if is_clean else MISTAKE
        compared = None if arguments.diff is None else make_compared_plan(recipe, arguments)
        plan, trace = make_plan_and_trace(recipe, cfg, arguments)
    plan.seconds = time.monotonic() - _IMPORTED
    write_files(plan, trace, arguments)
    if arguments.json != "-":
        print(format_plan(plan, compared, arguments), end="")
    return NO_ROOM if plan.verdict == DOES_NOT_FIT else DONE


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Disable loggers of torch's that warn of its own code where an external model is traced."""
    loggers = [
        logging.getLogger(name) for name in ("torch.utils._pytree", "torch._subclasses.fake_tensor")
    ]
    for logger in loggers:
        # Not by its level, which is set anew when the compiler is imported.
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


def format_plan(plan: Plan, compared: Plan | None, arguments: argparse.Namespace) -> str:
    """Return the report of a plan. compared: report how `plan` differs from it; None: the plan."""
    from recipe_lib.plan.views.report import render, render_diff

    if compared is not None:
        return render_diff(compared, plan)
    return render(plan, full=arguments.full, depth=arguments.depth, color=wants_color(sys.stdout))


def make_plan_and_trace(
    recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace
) -> tuple[Plan, "Trace"]:
    """Return the plan of a recipe with a config, and the trace that it rests on."""
    planned, shaped, settings = prepare(recipe, cfg, arguments, decides=True)
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.search.advice import (
        add_alone,
        add_fewest_ranks,
        advise,
        find_smallest_cards,
        name_next_lever,
        try_levers,
    )

    with explain_errors(recipe, cfg):
        if arguments.advice:
            # A lever is a key that trades memory for time or precision. They are tried first, in
            # forks on all cores: once this process has simulated anything, it cannot be forked.
            trials = try_levers(planned, shaped, settings)
        plan, trace = make_plan(planned, shaped, settings)
        if arguments.advice:
            plan.advice = advise(plan, *trials)
            add_fewest_ranks(plan, recipe_class=planned, cfg=shaped, settings=settings)
        if arguments.full and arguments.diff is None:
            add_alone(plan, recipe_class=planned, cfg=shaped, settings=settings)
    plan.smallest_cards = find_smallest_cards(plan, shaped)
    plan.notes = list(dict.fromkeys([*plan.notes, *arguments.notes]))
    plan.next_lever = name_next_lever(plan, shaped, settings)
    plan.receipt = quote_receipt(cfg, shaped, settings)
    return plan, trace


def make_compared_plan(recipe: RecipeFile, arguments: argparse.Namespace) -> Plan:
    """Return the plan of --diff: a file's, or another config's for the same device and ranks."""
    if arguments.diff.endswith(".json"):
        return read_plan(Path(arguments.diff))
    # The overrides are for the first config; its tables and advice are not compared.
    changes = {"config": arguments.diff, "overrides": [], "advice": False, "full": False}
    # No config can name a recipe of the user's own: it plans both.
    diff_recipe = find_config_recipe(arguments.diff) if recipe.shipped else recipe
    cfg = load_config(arguments.diff, (), diff_recipe.load_schema())
    return make_plan_and_trace(diff_recipe, cfg, argparse.Namespace(**vars(arguments) | changes))[0]


def run_stream_check(
    recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace
) -> tuple[str, bool]:
    """Return the report on streams, waits and collectives, and True if nothing is to correct."""
    planned, shaped, settings = prepare(recipe, cfg, arguments, decides=True)
    from recipe_lib.plan.streams.check_recipe import check_streams, render_check

    with explain_errors(recipe, cfg):
        check = check_streams(planned, shaped, settings)
    return render_check(check), check.is_clean


def search(recipe: RecipeFile, cfg: Any, arguments: argparse.Namespace) -> tuple[str, bool]:
    """Return a table of the fastest settings that fit, and True if there are any."""
    planned, shaped, settings = prepare(recipe, cfg, arguments)
    from recipe_lib.plan.search.fastest_settings import render_search
    from recipe_lib.plan.search.fastest_settings import search as find_settings

    # The keys of the command line stay as they are.
    keys = {word.partition("=")[0].removeprefix("~") for word in arguments.overrides}
    with explain_errors(recipe, cfg):
        result = find_settings(planned, shaped, settings, fixed=keys, splits=not cfg.compile)
    return render_search(result), bool(result.fitting)


def write_files(plan: Plan, trace: "Trace", arguments: argparse.Namespace) -> None:
    """Write the files of --json, --html and --snapshot, each whole or not at all.

    Raises StorageError if one cannot be written.
    """
    if arguments.json:
        write_json(arguments.json, plan.to_json())
    if arguments.html:
        from recipe_lib.plan.views.report import render_html

        replace_text(Path(arguments.html), render_html(plan, trace))
    if arguments.snapshot:
        from recipe_lib.plan.allocation.caching_allocator import AllocatorSettings
        from recipe_lib.plan.allocation.replay import write_snapshot

        write_snapshot(trace, Path(arguments.snapshot), AllocatorSettings())


def calibrate(path: Path) -> str:
    """Measure this machine's device and write its rates; return the line that says so."""
    from recipe_lib.plan.measured.measure_rates import calibrate as measure

    rates = measure()
    replace_text(path, json.dumps(rates, indent=2) + "\n")
    if rates["dry_run"]:
        return (
            f"{path}: rates of this CPU, for `--device cpu` alone; measure on a machine with the"
            " GPU to plan for one"
        )
    return f"{path}: rates of {rates['device']}; `tune plan --calibration {path}` uses the file"


def quote_receipt(cfg: Any, shaped: Any, settings: "PlanSettings") -> str:
    """Return the receipt nearest to a plan as a line; empty if there is none, or receipts are off.

    shaped: the config as it is planned.
    """
    if has_disabled_receipts():
        return ""
    try:
        receipts, _ = read_receipts(get_receipts_file())
    except OSError:  # `tune plan --receipts` says what is wrong
        return ""
    nearest = find_nearest(receipts, describe_run(cfg, shaped, settings))
    return "" if nearest is None else format_receipt(nearest)


def list_receipts(arguments: argparse.Namespace) -> str:
    """Return what `--receipts` prints, and write its JSON.

    Raises ConfigError if the file of receipts cannot be read.
    """
    path = get_receipts_file()
    try:
        receipts, unreadable = read_receipts(path)
    except OSError as error:
        raise ConfigError(
            f"--receipts: {show(str(path))}: {error.strerror}; make it a readable file, or move it"
            " away"
        ) from error
    if arguments.json:
        write_json(
            arguments.json,
            {
                "file": str(path),
                "unreadable": unreadable,
                "receipts": [asdict(receipt) for receipt in receipts],
            },
        )
    return "" if arguments.json == "-" else render_receipts(receipts, unreadable, path)


def render_receipts(
    receipts: list[Receipt], unreadable: int, path: Path, *, width: int | None = None
) -> str:
    """Return a table of the receipts, the newest last, and how far off the plans were.

    unreadable: number of lines of the file that were passed over. width: columns, by default those
    of the terminal.
    """
    skipped = f"; {pluralize(unreadable, 'line')} of it cannot be read" if unreadable else ""
    if not receipts:
        return (
            f"no receipts in {path}: each `tune run` on a GPU that shows its plan adds one at its"
            f" end, unless {VARIABLE}=off is set{skipped}\n"
        )
    rows = []
    for receipt in receipts:
        run = receipt.run
        rate_error = receipt.errors.get("tokens_per_second")  # errors are planned / measured - 1
        row = {  # header -> cell
            "date": receipt.time[:10],
            "card": run.card,
            "ranks": str(run.ranks),
            "config": run.config,
            "recipe": run.recipe,
            "planned": format_bytes(receipt.planned["reserved"]),
            "measured": format_bytes(receipt.measured["reserved"]),
            "error": f"{receipt.errors['reserved']:+.1%}",
            "tokens/s": "" if rate_error is None else f"{rate_error:+.0%}",
        }
        rows.append(list(row.values()))
    console = open_console(width or get_terminal_width())
    put_table(
        console,
        Table(
            "reserved memory of runs",
            list(row),  # the headers
            rows,
            left=("date", "card", "config", "recipe"),
            optional=("recipe", "tokens/s"),  # left out first on a narrow terminal
        ),
    )
    console.print()
    errors = [receipt.errors["reserved"] for receipt in receipts]
    put(
        console,
        f"{pluralize(len(receipts), 'receipt')}; error of reserved memory:"
        f" {fmean(map(abs, errors)):.1%} mean absolute, {max(errors, key=abs):+.1%} worst",
    )
    put(console, f"in {path}, on this machine alone{skipped}")
    return read_console(console)
