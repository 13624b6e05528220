"""Record and show a run while it trains: metrics.jsonl, progress lines, trackers and the summary.

`TrainingLoop` opens a `RunLog`, which opens the output folder, and calls `record_step`,
`record_validation` and `close`. `Progress` shows steps on the terminal. A tracker is tensorboard,
wandb, trackio or a plugin's; its package is imported only if `log.trackers` names it.
"""

import dataclasses
import importlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

from rich.text import Text

from recipe_lib.config import FullFinetuneConfig, LogConfig, get_registered, register
from recipe_lib.config.describe import format_value
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.local_files import describe_missing_tracker
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.files import report_storage_faults
from recipe_lib.logs import get_logger, is_quiet
from recipe_lib.parallel.world import World
from recipe_lib.redaction import redact_values
from recipe_lib.report.phases import can_draw, has_unicode, hide_rows, is_in_phase, show_rows
from recipe_lib.report.planned import read_planned_figures
from recipe_lib.report.terminal import SOFT
from recipe_lib.training.output import (
    drop_earlier,
    lock_output,
    log_kept_run,
    open_output,
    record_written_files,
    unlock_output,
)
from recipe_lib.training.records import MetricsFile, write_report, write_summary
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import format_clock, format_count, format_seconds

# Status in summary.json of a run that validation.patience has ended; it is complete, as "done" is
STOPPED_EARLY = "stopped early"
SHORTEST_BAR = 8  # columns of the terminal
LONGEST_BAR = 60  # columns of the terminal
PAST_WEIGHT = 0.9  # weight of earlier steps in the moving average of seconds of a step
# Numbers of a validation that are not shown, because they are the same each time
_NOT_SHOWN = (
    "validation_tokens",
    "validation_pairs",
    "validation_samples",
    "validation_sequences",
)
# Beginnings or ends of the texts of numbers, in the order in which a narrow line leaves them out
_LEFT_OUT = ("labels", "lr", "grad norm", "tokens/s/device", "GiB")


class RunLog:
    """The records of a run in its output folder; only the main rank (rank 0) writes them."""

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: World,
        total_steps: int,
        *,
        done: int,
        data: Mapping[str, Any] | None = None,
    ):
        """Open the output folder. Collective.

        total_steps: of the whole run. done: number of steps that earlier processes have trained;
        lines of later steps are cut from metrics.jsonl. data: counts of samples, from `count_data`;
        None: not counted. Raise ConfigError if the folder or a tracker cannot be used.
        """
        self._cfg = cfg
        self._world = world
        self._total_steps = total_steps
        self._data = data
        self._folder = Path(cfg.output_dir)
        self._began = time.monotonic()  # seconds, on a clock without a date
        # Descriptor that locks the output folder; None: this rank has no lock
        self._lock: int | None = None
        self._closed = False  # True once the summary is written, or is being written
        with world.raise_together():
            if world.is_main:
                self._lock = lock_output(cfg)
                open_output(cfg)
            self._metrics = MetricsFile(self._folder) if world.is_main else None
            if self._metrics:
                self._metrics.truncate(done)
            self._trackers = open_trackers(cfg) if world.is_main else []
        self._progress = Progress(cfg.log, total_steps, world, done=done)

    def record_step(self, line: Mapping[str, Any], recipe_metrics: Sequence[str] = ()) -> None:
        """Record and show one optimizer step.

        line: the numbers of `build_step_metrics`, and those that the recipe adds. recipe_metrics:
        names of the latter.
        """
        self._record(line)
        self._progress.show_step(line, recipe_metrics)

    def record_validation(self, line: Mapping[str, Any]) -> None:
        """Record and show one validation. line: `step`, and its numbers by name."""
        self._record(line)
        self._progress.show_validation(line)

    def _record(self, line: Mapping[str, Any]) -> None:
        if self._metrics:
            self._metrics.append(line)
        # Trackers take numbers only: text, null and the step itself are left out.
        numbers = {
            name: float(value)
            for name, value in line.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for tracker in self._trackers:
            tracker.log(numbers, line["step"])

    def close(self, status: str, facts: Mapping[str, Any] | None = None) -> None:
        """End the progress line and the trackers, and write summary.json and report.html.

        status: how the run ended, see `write_summary`. facts: further keys of the summary.
        """
        self._closed = True
        self._progress.close()
        for tracker in self._trackers:
            tracker.close()
        if self._metrics:
            self._metrics.close()
            write_summary(
                self._folder,
                status,
                dataclasses.asdict(self._cfg),
                wall_seconds=time.monotonic() - self._began,
                total_steps=self._total_steps,
                world_size=self._world.size,
                facts={
                    **(facts or {}),
                    "data": self._data,
                    "planned": read_planned_figures(self._folder),
                    "changed_settings": list_changed_settings(self._cfg),
                },
            )
            report = write_report(self._folder)
            if status != "failed":  # then the error is the line that a user should read
                get_logger().info("report: %s", report)
            with report_storage_faults():
                record_written_files(self._folder)
                # A complete run replaces the earlier one of `overwrite_output_dir`.
                if status in ("done", STOPPED_EARLY):
                    drop_earlier(self._folder)
                else:
                    log_kept_run(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._progress.close()
        if isinstance(error, Exception) and not self._closed:
            with suppress(Exception):  # an error of closing must not replace the run's
                self.close("failed")
        unlock_output(self._lock)
        self._lock = None


class Progress:
    """The steps of a run on the terminal; ranks other than the main one show nothing.

    progress = Progress(cfg.log, total_steps, world, done=step)
    progress.show_step(line)        # a plain line each cfg.every_n_steps, and for the last step
    progress.show_validation(line)
    progress.close()
    """

    def __init__(self, cfg: LogConfig, total_steps: int, world: World, *, done: int = 0) -> None:
        """Show a moving bar and the last numbers, if `log.progress` and the terminal allow it.

        done: number of steps that an earlier process has trained.
        """
        self._every_n_steps = cfg.every_n_steps
        self._total_steps = total_steps
        self._done = done  # steps, those of an earlier process included
        self._trained = 0  # steps of this process
        self._step_seconds = 0.0  # moving average of a step's seconds
        self._last_time = time.monotonic()  # when the last step ended, seconds
        # The line of the last step, and the names of the numbers in it that the recipe adds
        self._line: Mapping[str, Any] = {}
        self._recipe_metrics: Sequence[str] = ()
        self._is_shown = world.is_main  # True: this rank prints lines
        is_wanted = cfg.progress == "live" or (cfg.progress == "auto" and can_draw())
        self._is_live = self._is_shown and not is_quiet() and is_wanted
        if self._is_live:
            show_rows(self._draw_rows)

    def show_step(self, line: Mapping[str, Any], recipe_metrics: Sequence[str] = ()) -> None:
        now = time.monotonic()
        seconds = now - self._last_time
        self._last_time = now
        self._trained += 1
        # The first step takes longer than others, so it counts only until there is a second.
        if self._trained > 2:
            seconds = PAST_WEIGHT * self._step_seconds + (1 - PAST_WEIGHT) * seconds
        self._step_seconds = seconds
        self._done = line["step"]
        self._line = line
        self._recipe_metrics = recipe_metrics
        is_due = self._done % self._every_n_steps == 0 or self._done == self._total_steps
        if self._is_shown and is_due:
            get_logger().info(self._format_plain_line())

    def show_validation(self, line: Mapping[str, Any]) -> None:
        if self._is_shown:
            numbers = [
                f"{name.removeprefix('validation_').replace('_', ' ')} {_format_number(line[name])}"
                for name in line
                if name.startswith("validation_") and name not in _NOT_SHOWN
            ]
            get_logger().info(
                f"step {line['step']}/{self._total_steps}  validation {'  '.join(numbers)}"
            )

    def close(self) -> None:
        """Remove the moving rows; printed lines stay."""
        hide_rows(self._draw_rows)
        self._is_live = False

    def _format_plain_line(self) -> str:
        begin = f"step {self._done}/{self._total_steps}  "
        numbers = _format_numbers(self._line, self._recipe_metrics)
        if not self._is_live:
            seconds_left = format_seconds(self._estimate_seconds_left())
            return f"{begin}{'  '.join(numbers)}  eta {seconds_left}"
        # The moving rows below show the time left. They are drawn over, which goes wrong where a
        # line wraps: it is cut to the terminal's width.
        columns = shutil.get_terminal_size((80, 24)).columns - 1 - len(begin)
        return begin + "  ".join(_select_fitting(numbers, columns))

    def _estimate_seconds_left(self) -> float:
        return self._step_seconds * (self._total_steps - self._done)

    def _draw_rows(self, width: int) -> list[Text]:
        """Return the moving rows: bar with step and time left, and the numbers that fit.

        width: columns of the terminal.
        """
        eta = format_clock(self._estimate_seconds_left()) if self._trained else "?"
        share = self._done / self._total_steps if self._total_steps else 1.0
        begin = f"step {self._done}/{self._total_steps} "
        end = f" {share:.0%}  eta {eta}"
        columns = max(SHORTEST_BAR, min(LONGEST_BAR, width - len(begin) - len(end)))
        num_full = round(columns * share)
        full, empty = ("━", "━") if has_unicode() else ("=", "-")
        bar = Text.assemble(
            (begin, "bold"),
            (full * num_full, "green"),
            (empty * (columns - num_full), "bright_black"),
            end,
        )
        if is_in_phase():  # a phase (saving, say) shows a row of its own
            return [bar]
        if not self._line:
            waited = format_clock(time.monotonic() - self._last_time)
            return [bar, Text(f"the first step began {waited} ago", style=SOFT)]
        numbers = _format_numbers(self._line, self._recipe_metrics)
        return [bar, Text("  ".join(_select_fitting(numbers, width)))]


def _format_numbers(line: Mapping[str, Any], recipe_metrics: Sequence[str]) -> list[str]:
    """Return the numbers of a step as texts with name and unit, in the order of the line.

    line, recipe_metrics: see `RunLog.record_step`.
    """
    memory = line["peak_memory_active_gib"]
    kind = "resident" if line["memory_kind"] != "device" else "peak"
    return [
        f"loss {_format_number(line['loss'])}",
        *(
            f"{name.replace('_', ' ')}"
            f" {_format_number(line[name], is_count=name.endswith('_tokens'))}"
            for name in recipe_metrics
        ),
        f"grad norm {_format_number(line['grad_norm'])}",
        f"lr {line['lr']:.2e}",
        f"{format_count(line['tokens_per_second_per_device'])} tokens/s/device",
        f"labels {line['label_token_fraction']:.0%}",
        f"{kind} {f'{memory:.2f}' if memory is not None else '?'} GiB",
    ]


def _select_fitting(numbers: list[str], columns: int) -> list[str]:
    """Return the numbers that fit into a width; the first one, the loss, always stays.

    columns: the width, in characters.
    """
    shown = list(numbers)
    for name in _LEFT_OUT:
        if len("  ".join(shown)) > columns:
            shown = [
                number for number in shown if not (number.startswith(name) or number.endswith(name))
            ]
    while len(shown) > 1 and len("  ".join(shown)) > columns:
        shown.pop()
    return shown


def _format_number(value: float | None, *, is_count: bool = False) -> str:
    """Return a number as text. value: None: it was not finite, and was recorded as null."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if is_count else f"{value:.4f}"


def count_data(data: TrainingData) -> dict[str, Any]:
    """Return counts of samples, sequences and tokens, under `training` and `validation`."""
    counts = {"training": _count_dataset(data.dataset.report)}
    packed_share = data.plan.compute_packed_share()  # share of tokens in packs; the rest is padding
    if packed_share is not None:
        # `packs`: number of packs in the first epoch
        counts["training"] |= {"packs": data.plan.count_slots(), "packed_share": packed_share}
    if data.validation_dataset is not None:
        counts["validation"] = _count_dataset(data.validation_dataset.report)
    return counts


def _count_dataset(report: DataReport) -> dict[str, Any]:
    """Return name -> count or text, of a dataset. `tokens` counts the targets of all sequences."""
    return {
        "source": report.source,
        "format": report.format,
        "template": report.template,
        "max_seq_len": report.max_seq_len,
        "samples": report.samples_read,
        "sequences": report.sequences,
        "pairs": report.pairs,
        "tokens": report.tokens,
        "label_tokens": report.trained_tokens,
        "label_token_fraction": report.label_token_fraction,
        "truncated": report.truncated_sequences,
        "left_out": report.skipped_long_sequences + report.emptied_sequences,
        "bad": sum(report.bad_samples.values()),
        "duplicates": report.duplicate_sequences,
    }


def list_changed_settings(cfg: Any) -> dict[str, list[str]]:
    """Return key -> [value, default], as YAML text, of settings that are not at their default."""
    config_class: type = type(cfg)
    changed = {}
    for name, key in read_schema(config_class).keys.items():
        value = attrgetter(name)(cfg)
        if key.required or value != key.default:
            default = "required" if key.required else format_value(key.default)
            changed[name] = [format_value(value), default]
    return changed


class Tracker(Protocol):
    """A receiver of metrics besides metrics.jsonl."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers by name. step: number of optimizer steps done."""

    def close(self) -> None:
        """Send what is not yet sent, and end the run at the tracker."""


def open_trackers(cfg: FullFinetuneConfig) -> list[Tracker]:
    """Open the trackers of `log.trackers`; those that write files do so in `output_dir/trackers`.

    Raise ConfigError, with the pip command, if a package is missing, and SetupError if wandb
    refuses to start.
    """
    folder = Path(cfg.output_dir)
    run_name = cfg.log.run_name if cfg.log.run_name is not None else folder.name
    settings = redact_values(dataclasses.asdict(cfg))
    # All are looked up before the first starts a run at its tracker.
    builders = [get_registered("log.trackers", name) for name in cfg.log.trackers]
    return [build(cfg.log.project, run_name, folder / "trackers", settings) for build in builders]


@register("log.trackers", "tensorboard")
class TensorBoard:
    """Event files in `output_dir/trackers/tensorboard`, written by torch's own SummaryWriter."""

    def __init__(
        self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        _import_tracker("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._writer.add_text(
            "settings", "\n".join(f"    {key}: {value}" for key, value in settings.items())
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@register("log.trackers", "trackio")
class Trackio:
    """A run in trackio's local database (TRACKIO_DIR, by default in the Hugging Face cache)."""

    def __init__(
        self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        self._run: Any = _import_tracker("trackio")
        self._run.init(project=project, name=run_name, config=dict(settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@register("log.trackers", "wandb")
class WandB(Trackio):  # `log` and `finish` of trackio are those of wandb, by name and arguments
    """A run at Weights & Biases; its local files are in `output_dir/trackers`."""

    def __init__(
        self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        wandb = _import_tracker("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project, name=run_name, dir=str(folder), config=dict(settings)
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise SetupError(
                f"log.trackers: wandb refused to start ({reason}); run `wandb login`, or set"
                " WANDB_MODE=offline"
            ) from error


def _import_tracker(package: str) -> ModuleType:
    """Return the imported package; raise ConfigError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(describe_missing_tracker(package, str(error))) from error
