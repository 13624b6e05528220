"""Plan a run while it runs, in a separate process, and compare the plan with what was measured.

run.py calls `plan_beside`, which starts this file's `main` as that process and ends it with the
run. A plan is an estimate of memory and time. The process prints it as one line, and leaves its
figures in a file. At the end of the run they are kept, with the measured ones, as a receipt.
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

from recipe_lib.cli.launch import is_expandable, set_environment, should_show_plan
from recipe_lib.cli.plan_request import (
    build_planning_command,
    explain_errors,
    hide_gpus,
    prepare,
    read_arguments,
    read_config,
)
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.errors import (
    DONE,
    STOPPED_AND_SAVED,
    ConfigError,
    UserError,
    end_process,
    escape_invisible,
    send_nowhere,
)
from recipe_lib.files import replace_text
from recipe_lib.logs import get_logger, wrap_lines
from recipe_lib.plan.measured import receipts
from recipe_lib.reading import read_object
from recipe_lib.report.phases import ERASE
from recipe_lib.report.planned import FIGURES_VARIABLE, MEMORY_KINDS
from recipe_lib.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from recipe_lib.plan.build_plan import PlanSettings
    from recipe_lib.plan.plan_schema import Plan, RankPlan

PLAN_VARIABLE = "TUNE_PLAN"  # environment variable; `off`: no plan unless --plan asks for one
CPU_SECONDS = 10  # of the planning process: the ranks need the cores
COMPILED_CPU_SECONDS = 40  # for a run with compile=true, whose own compiling takes longer
WAIT_SECONDS = 300  # for the run to have tokenized its data
STEP_PHASES = ("first step", "step")  # phases that a run measures; the first makes optimizer states
# Layers x micro-batches of a step that are simulated. Above it one step is planned in place of two,
# which would take too much CPU time.
MAX_LAYERS = 36


def take_choice(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words without --plan and --no-plan, and True if a plan is to be shown.

    The last of them counts; without any, TUNE_PLAN=off means no.
    """
    choices = [word for word in words if word in ("--plan", "--no-plan")]
    is_off = os.environ.get(PLAN_VARIABLE, "").lower() in ("off", "0", "no")
    should_plan = choices[-1] == "--plan" if choices else not is_off
    return [word for word in words if word not in choices], should_plan


@contextmanager
def plan_beside(
    flags: Sequence[str], recipe: RecipeFile, words: Sequence[str]
) -> Iterator[Callable[[int], None]]:
    """Start the plan of a run; yield a function to call with the run's exit code at its end.

    It logs planned against measured memory and keeps the receipt. flags: torchrun's. words: the
    recipe's arguments.
    """
    # A recipe of the user's own may take arguments of any kind, which cannot be planned.
    if not recipe.has_known_arguments() or not should_show_plan(flags):
        yield lambda code: None
        return
    with tempfile.TemporaryDirectory(prefix="tune-plan-") as folder:
        figures = Path(folder) / "figures.json"
        began = time.time()
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
            # By this variable the run's report finds the file.
            with set_environment(**{FIGURES_VARIABLE: str(figures)}):
                yield lambda code: _compare(figures, began, code)
        finally:
            process.kill()
            process.communicate()  # closes the pipe and reaps the process


def _compare(figures: Path, began: float, code: int) -> None:
    """Log planned against measured peaks, and keep both as a receipt.

    Does nothing if the run failed or was over before its plan. figures: file of `main`. began: time
    of the start of the run. code: exit code of the run.
    """
    if code not in (DONE, STOPPED_AND_SAVED) or not figures.exists():
        return
    planned = read_object(figures)
    summary = Path(planned["output_dir"]) / "summary.json"
    # An older one is of an earlier run into the same folder.
    if not summary.is_file() or summary.stat().st_mtime < began:
        return
    measured = read_object(summary)
    for line in format_comparison(planned, measured):
        get_logger().info(line)
    append_run_receipt(planned, measured)


def append_run_receipt(figures: dict[str, Any], summary: dict[str, Any]) -> None:
    """Add the receipt of a run that has ended, if it ran on the GPU that was planned.

    figures: content of the file of `main`. summary: content of the run's summary.json. A file of
    receipts that cannot be read or written is a warning.
    """
    # `memory_kind`: `device`, or on a CPU the process's resident set.
    if (
        receipts.has_disabled_receipts()
        or summary.get("memory_kind") != "device"
        or not figures.get("own_device")
    ):
        return
    # Imports torch, which the launcher has imported by now.
    from recipe_lib.training.records import read_metrics

    path = receipts.get_receipts_file()
    try:
        receipt = receipts.make_receipt(figures, summary, read_metrics(Path(figures["output_dir"])))
        # Receipts are compared by their error of reserved memory.
        if "reserved" not in receipt.errors:
            return
        is_new = receipts.append_receipt(path, receipt)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        get_logger().warning(
            f"warning: {path}: {error}; the run has no receipt, and with {receipts.VARIABLE}=off"
            " none is tried"
        )
        return
    if is_new:
        get_logger().info(
            f"receipts: what runs were planned to take and took is kept in {path}, on this machine"
            f" alone; `tune plan --receipts` lists it, {receipts.VARIABLE}=off ends it"
        )


def format_comparison(planned: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Return the line on planned and measured peaks; none if nothing was measured.

    planned: of `collect_figures`, bytes. summary: content of the run's summary.json, GiB.
    """
    # Rank 0 writes the summary: its plan is compared, not the heaviest rank's.
    planned = planned | (planned.get("first") or {})
    if summary.get("memory_kind") != "device":
        return [
            f"planned active {format_bytes(planned['active'])} on a GPU; the resident set that a"
            " CPU run measures is no comparison for it"
        ]
    parts = []
    for kind in MEMORY_KINDS:
        measured = (summary.get(f"peak_memory_{kind}_gib") or 0.0) * GIB
        if measured and planned[kind]:
            parts.append(
                f"{kind} {format_bytes(planned[kind])} / {format_bytes(measured)}"
                f" ({planned[kind] / measured - 1:+.1%})"
            )
    return [f"planned / measured: {', '.join(parts)}"] if parts else []


def collect_figures(plan: "Plan") -> dict[str, Any]:
    """Return what is shown and compared of a plan, in bytes and seconds.

    `active`, `allocated`, `reserved`: peaks of the heaviest rank in its steps; `first`: the same of
    the lowest rank. `verdict`: whether it fits. `estimate`: why not all steps and micro-batches
    were simulated, else empty. `usable`: bytes of the device for torch. `seconds`,
    `tokens_per_second`: of a step; None: not planned.
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
    # A run measures its steps, not the loading of weights before.
    peaks = [peak for peak in rank.peaks if peak.phase in STEP_PHASES] or rank.peaks
    return {
        "active": max(peak.active for peak in peaks),
        "allocated": max(peak.allocated for peak in peaks),
        "reserved": max(
            peak.reserved_expandable if is_expandable() else peak.reserved for peak in peaks
        ),
    }


def describe(figures: dict[str, Any], settings: "PlanSettings", is_own_device: bool) -> str:
    """Return the plan as a line. is_own_device: the device is one of this machine's.

    figures: of `collect_figures`; with `is_short` one step was planned in place of two, so that
    reserved memory is less certain.
    """
    memory = settings.hardware.memory
    reason = "" if is_own_device else ", as there is no GPU here"
    device = f"{settings.ranks} x {settings.hardware.name}{reason}"
    text = (
        f"plan: {figures['verdict']} ({device}): active {format_bytes(figures['active'])},"
        f" {'about ' if figures.get('is_short') else ''}{format_bytes(figures['reserved'])}"
        f" reserved + {format_bytes(memory - figures['usable'])} outside torch, of"
        f" {format_bytes(memory)}; sequences of {settings.sequence.tokens:,} tokens"
    )
    if figures["seconds"] is not None and is_own_device:
        text += f"; a step {format_seconds(figures['seconds'])} (uncalibrated)"
    text += f"; an estimate: {figures['estimate']}" if figures["estimate"] else ""
    return f"{text}; `tune plan` with the same arguments says more"


# A BaseException, as code on the way catches Exception.
class _TooSlow(BaseException):
    """The CPU time is used up."""


class _CpuLimit:
    """The limit of this process's CPU time, at which its main thread raises `_TooSlow`."""

    def __init__(self, seconds: int) -> None:
        self.is_reached = False  # `_TooSlow` was raised
        signal.signal(signal.SIGXCPU, self._raise_too_slow)
        self.set(seconds)

    def set(self, seconds: int) -> None:
        self.seconds = seconds  # kept here, as the kernel raises its soft limit with each signal
        # The hard limit kills the process if the exception does not end it. It is the larger one
        # from the start, as an ordinary process cannot raise it again.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, COMPILED_CPU_SECONDS + 2))

    def _raise_too_slow(self, number: int, frame: FrameType | None) -> NoReturn:
        self.is_reached = True
        raise _TooSlow


def main(argv: list[str]) -> int:
    """Plan, as the separate process: FIGURES [torchrun flags] RECIPE [arguments].

    FIGURES: the file to write the figures to. Returns 0 whatever goes wrong, which is a line.
    """
    say = _silence_output()
    limit = _CpuLimit(CPU_SECONDS)
    os.nice(10)  # the run goes first
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    has_gpus = hide_gpus()
    try:
        arguments = read_arguments(argv[1:])
        arguments.wait = float(WAIT_SECONDS)
        figures, settings = _plan(arguments, has_gpus=has_gpus, limit=limit)
        replace_text(Path(argv[0]), json.dumps(figures))
        say(describe(figures, settings, has_gpus))
    except UserError:
        pass  # the run says it
    except (Exception, _TooSlow) as error:  # noqa: BLE001  (nothing of it is to disturb the run)
        # Not by the type of the error: torch makes it a RuntimeError where it is raised inside of
        # torch's own code.
        if limit.is_reached:
            say(
                f"plan: takes more than {limit.seconds} s of CPU; `tune plan` with the same"
                " arguments makes it"
            )
        else:
            say(
                f"plan: none ({type(error).__name__}); `tune plan` with the same arguments says why"
            )
    return DONE


def _plan(
    arguments: Any, *, has_gpus: bool, limit: _CpuLimit
) -> tuple[dict[str, Any], "PlanSettings"]:
    """Return (figures, settings of the plan). A model of many layers is planned for one step.

    arguments: of `read_arguments`. has_gpus: the device is this machine's. limit: raised for a
    compiled model.
    """
    recipe, cfg = read_config(arguments)
    if cfg.compile:
        limit.set(COMPILED_CPU_SECONDS)
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
        figures = collect_figures(make_plan(planned, cfg=shaped, settings=settings, steps=steps)[0])
    figures |= {
        "is_short": is_short,
        "run": asdict(receipts.describe_run(cfg, shaped, settings)),
        "output_dir": os.path.abspath(cfg.output_dir),
        "device": settings.hardware.name,
        "ranks": settings.ranks,
        "own_device": has_gpus,
    }
    return figures, settings


def _silence_output() -> Callable[[str], None]:
    """Send what libraries print nowhere; return what prints a line on the run's standard error."""
    terminal = os.dup(2)
    is_terminal = os.isatty(2)
    send_nowhere(1, 2)  # the descriptors, as libraries in C++ print past sys.stdout

    def say(line: str) -> None:
        # On a terminal the run may be drawing rows at this moment: ours takes their place, they are
        # drawn again below.
        text = escape_invisible(line)
        if is_terminal:
            text = ERASE + wrap_lines(text, os.get_terminal_size(terminal).columns or 80)
        os.write(terminal, f"{text}\n".encode())

    return say


def _end_with_the_run() -> None:
    # The run holds the other end of standard input, which closes however that process ends.
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
