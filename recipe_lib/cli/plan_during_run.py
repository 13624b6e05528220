"""The plan that `tune run` shows: made during the run in a separate process, compared with what the
run measured.

The process has 10 seconds of CPU, gives way to the ranks, sees no GPU, and ends with the run. It
prints the figures itself, and leaves them in a file for the end of the run. Whatever goes wrong in
it is one line, and nothing to the run.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from recipe_lib.cli.launch import set_environment as launching
from recipe_lib.cli.local_gpus import is_expandable
from recipe_lib.cli.plan_receipts import append_run_receipt
from recipe_lib.cli.plan_request import (
    build_planning_command,
    explain_errors,
    hide_gpus,
    prepare,
    read_arguments,
    read_config,
)
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.cli.torchrun_flags import should_show_plan
from recipe_lib.errors import DONE, STOPPED_AND_SAVED, UserError, end_process, escape_invisible
from recipe_lib.files import replace_text
from recipe_lib.logs import get_logger, wrap_lines
from recipe_lib.plan.measured.receipts import describe_run
from recipe_lib.reading import read_object
from recipe_lib.report.phases import ERASE
from recipe_lib.report.planned import FIGURES
from recipe_lib.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.plan_schema import Plan, RankPlan

VARIABLE = "TUNE_PLAN"  # `off`: no plan unless --plan asks for one
CPU_SECONDS = 10
COMPILED_CPU_SECONDS = 40  # of a run with compile=true, whose own compiling takes longer
WAIT_SECONDS = 300  # for the run to have tokenized its data
STEP_PHASES = ("first step", "step")  # the phases that a run measures
MEMORY_KINDS = ("active", "allocated", "reserved")
# With more layers, times the micro-batches that a plan goes through, two steps take longer than
# there is time for.
MAX_LAYERS = 36


def take_choice(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without --plan and --no-plan, and whether a plan is to be shown."""
    choices = [word for word in words if word in ("--plan", "--no-plan")]
    wanted = (
        choices[-1] == "--plan"
        if choices
        else os.environ.get(VARIABLE, "").lower() not in ("off", "0", "no")
    )
    return [word for word in words if word not in choices], wanted


@contextmanager
def plan_beside(
    flags: Sequence[str], recipe: RecipeFile, words: Sequence[str]
) -> Iterator[Callable[[int], None]]:
    """Starts the plan of a run; with the run's exit code, what is yielded compares both.

    flags: torchrun's. words: the recipe's arguments.
    """
    if not recipe.has_known_arguments() or not should_show_plan(flags):
        yield lambda code: None
        return
    with tempfile.TemporaryDirectory(prefix="tune-plan-") as folder:
        figures, began = Path(folder) / "figures.json", time.time()
        command, environment = build_planning_command(
            "recipe_lib.cli.plan_during_run", figures, [*flags, str(recipe.path), *words]
        )
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the run
        )
        try:
            with launching(**{FIGURES: str(figures)}):  # where the run's report reads them
                yield lambda code: _compare(figures, began, code)
        finally:
            process.kill()
            process.communicate()


def _compare(figures: Path, began: float, code: int) -> None:
    """Prints planned against measured peaks, and keeps both as a receipt; nothing if the run failed
    or was over before its plan.
    """
    if code not in (DONE, STOPPED_AND_SAVED) or not figures.exists():
        return
    planned = read_object(figures)
    summary = Path(planned["output_dir"]) / "summary.json"
    if not summary.is_file() or summary.stat().st_mtime < began:
        return
    measured = read_object(summary)
    for line in format_comparison(planned, measured):
        get_logger().info(line)
    append_run_receipt(planned, measured)


def format_comparison(planned: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Lines on planned and measured peaks. planned: the figures. summary: of the run's
    summary.json, which rank 0 writes.
    """
    planned = planned | (planned.get("first") or {})
    if summary.get("memory_kind") != "device":
        active = format_bytes(planned["active"])
        return [
            f"planned active {active} on a GPU; the resident set that a CPU run measures is no"
            " comparison for it"
        ]
    parts = []
    for kind in MEMORY_KINDS:
        real = (summary.get(f"peak_memory_{kind}_gib") or 0.0) * GIB
        if real and planned[kind]:
            error = planned[kind] / real - 1
            parts.append(
                f"{kind} {format_bytes(planned[kind])} / {format_bytes(real)} ({error:+.1%})"
            )
    return [f"planned / measured: {', '.join(parts)}"] if parts else []


def collect_figures(plan: "Plan") -> dict[str, Any]:
    """What is shown, bytes and seconds: peaks of the heaviest rank in its steps; and those of rank
    0, to compare.
    """
    first = min(plan.rank_plans, key=lambda rank: rank.rank)
    return _find_peaks(plan.heaviest) | {
        "first": _find_peaks(first),
        "verdict": plan.verdict,
        "estimate": plan.estimate,
        "usable": plan.device.usable,
        "seconds": plan.time.step if plan.time else None,
        "tokens_per_second": plan.time.tokens_per_second if plan.time else None,
    }


def _find_peaks(rank: "RankPlan") -> dict[str, int]:
    peaks = [peak for peak in rank.peaks if peak.phase in STEP_PHASES] or rank.peaks
    return {
        "active": max(peak.active for peak in peaks),
        "allocated": max(peak.allocated for peak in peaks),
        "reserved": max(
            peak.reserved_expandable if is_expandable() else peak.reserved for peak in peaks
        ),
    }


def describe(figures: dict[str, Any], settings: "PlanSettings", own: bool) -> str:
    """The plan as a line. own: the device is one of this machine's."""
    memory = settings.hardware.memory
    where = f"{settings.ranks} x {settings.hardware.name}" + (
        "" if own else ", as there is no GPU here"
    )
    text = (
        f"plan: {figures['verdict']} ({where}): active {format_bytes(figures['active'])},"
        f" {'about ' if figures.get('is_short') else ''}{format_bytes(figures['reserved'])}"
        f" reserved + {format_bytes(memory - figures['usable'])} outside torch, of"
        f" {format_bytes(memory)}; sequences of {settings.sequence.tokens:,} tokens"
    )
    if figures["seconds"] is not None and own:
        text += f"; a step {format_seconds(figures['seconds'])} (uncalibrated)"
    text += f"; an estimate: {figures['estimate']}" if figures["estimate"] else ""
    return f"{text}; `tune plan` with the same arguments says more"


class _TooSlow(BaseException):  # nothing on the way is to catch it
    """The CPU time is used up. came: whether it ever was. allowed: seconds; the kernel raises its
    own number as it goes on.
    """

    came = False
    allowed = 0


def main(argv: list[str]) -> int:
    """The separate process: `plan_during_run.py FIGURES [torchrun flags] RECIPE [its
    arguments]`.
    """
    say = _silence_output()
    _limit_process()
    gpus = hide_gpus()
    try:
        arguments = read_arguments(argv[1:])
        arguments.wait = float(WAIT_SECONDS)
        figures, settings = _plan(arguments)
        figures |= {"device": settings.hardware.name, "ranks": settings.ranks, "own_device": gpus}
        replace_text(Path(argv[0]), json.dumps(figures))
        say(describe(figures, settings, gpus))
    except UserError:
        pass  # the run says it
    except (Exception, _TooSlow) as error:  # noqa: BLE001  (nothing of it is to disturb the run)
        if (
            _TooSlow.came
        ):  # torch makes it a RuntimeError where it comes in the midst of its own code
            say(
                f"plan: takes more than {_TooSlow.allowed} s of CPU; `tune plan` with the same"
                " arguments makes it"
            )
        else:
            say(
                f"plan: none ({type(error).__name__}); `tune plan` with the same arguments says why"
            )
    return DONE


def _plan(arguments: Any) -> tuple[dict[str, Any], "PlanSettings"]:
    """(figures, what they are for). Of a model whose many layers are all simulated, one step alone
    is.
    """
    recipe, cfg = read_config(arguments)
    if cfg.compile:
        _set_cpu_limit(COMPILED_CPU_SECONDS)
    with explain_errors(recipe, cfg):
        planned, shaped, settings = prepare(recipe, cfg, arguments)
    settings = replace(settings, phases=())
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.simulated_world.shape_only_model import count_layers
    from recipe_lib.plan.tracing.simulated_micro_batches import count_micro_batches_to_simulate
    from recipe_lib.plan.tracing.trace_deep_model import choose_depths
    from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, list_short_steps

    with explain_errors(recipe, cfg):
        layers = sum(choose_depths(planned, shaped) or [count_layers(shaped)])
        is_short = layers * count_micro_batches_to_simulate(planned, shaped) > MAX_LAYERS
        steps = list_short_steps(shaped) if is_short else (FIRST, STEADY)
        figures = collect_figures(make_plan(planned, shaped, settings, steps)[0])
    run = asdict(describe_run(cfg, shaped, settings))
    figures |= {"is_short": is_short, "run": run}
    return figures | {"output_dir": os.path.abspath(cfg.output_dir)}, settings


def _silence_output() -> Callable[[str], None]:
    """Sends what libraries print nowhere; gives what prints a line on the run's standard error."""
    terminal, is_terminal = os.dup(2), os.isatty(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def say(line: str) -> None:
        # On a terminal the run may be drawing rows at this moment: ours takes their place, they are
        # drawn again below.
        text = escape_invisible(line)
        if is_terminal:
            text = ERASE + wrap_lines(text, os.get_terminal_size(terminal).columns or 80)
        os.write(terminal, f"{text}\n".encode())

    return say


def _limit_process() -> None:
    """Little CPU time, after everybody else, and none once the run is gone."""

    def too_slow(number: int, frame: FrameType | None) -> NoReturn:
        _TooSlow.came = True
        raise _TooSlow

    signal.signal(signal.SIGXCPU, too_slow)
    _set_cpu_limit(CPU_SECONDS)
    os.nice(10)
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _set_cpu_limit(seconds: int) -> None:
    """CPU time; a few seconds more than any run gets end the process."""
    _TooSlow.allowed = seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, COMPILED_CPU_SECONDS + 2))


def _end_with_the_run() -> None:
    """The run holds the other end of standard input; it closes when that process is gone, however
    it went.
    """
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
