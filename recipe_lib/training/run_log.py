"""Everything a run says while it trains, in one object: metrics.jsonl, the progress line, trackers,
the summary.
"""

import dataclasses
import importlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

from rich.text import Text

from recipe_lib.config.describe import format_value
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.local_files import describe_missing_tracker
from recipe_lib.config.registry import get_registered, register
from recipe_lib.config.schema import FullFinetuneConfig, LogConfig
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.files import report_storage_faults
from recipe_lib.logs import get_logger, is_quiet
from recipe_lib.parallel.world import World
from recipe_lib.redaction import redact_values
from recipe_lib.report.phases import can_draw, has_unicode, hide_rows, is_in_phase, show_rows
from recipe_lib.report.planned import read_planned_figures
from recipe_lib.report.terminal import SOFT
from recipe_lib.training.metrics import MetricsFile, write_summary
from recipe_lib.training.output import (
    drop_earlier,
    lock_output,
    note_written,
    open_output,
    say_kept,
    unlock_output,
)
from recipe_lib.training.report_page import write_report
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import format_clock, format_count, format_seconds

STOPPED_EARLY = (  # all that was to be done is, since validation.patience ended the steps
    "stopped early"
)
SHORTEST_BAR, LONGEST_BAR = 8, 60  # columns
RECENT = 0.9  # weight of the steps before in the mean seconds of a step
_NOT_FINITE = "not finite"
_NOT_SHOWN = ("validation_tokens", "validation_pairs")  # of a validation: the same each time
# Which numbers are left out first where the room is short; the loss never is.
_LEFT_OUT = ("labels", "lr", "grad norm", "tokens/s/device", "GiB")


class RunLog:
    """Opens the output folder of a run and records its steps; ranks other than the main one record
    nothing.
    """

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: World,
        total_steps: int,
        *,
        done: int,
        data: Mapping[str, Any] | None = None,
    ):
        """done: steps that an earlier process has trained; lines after it are cut from
        metrics.jsonl. data: as `data_facts` counts them. A collective.
        """
        self._cfg, self._world, self._total, self._data = cfg, world, total_steps, data
        self._folder = Path(cfg.output_dir)
        self._began = time.monotonic()
        self._lock: int | None = None
        self._closed = False
        with world.raise_together():
            if world.is_main:
                self._lock = lock_output(cfg)
                open_output(cfg)
            self._metrics = MetricsFile(self._folder) if world.is_main else None
            if self._metrics:
                self._metrics.truncate(done)
            self._trackers = open_trackers(cfg) if world.is_main else []
        self._progress = Progress(cfg.log, total_steps, world, done=done)

    def step(self, line: Mapping[str, Any], own: Sequence[str] = ()) -> None:
        """Record one optimizer step. own: the names of the recipe's own numbers."""
        self._record(line)
        self._progress.step(line, own)

    def validation(self, line: Mapping[str, Any]) -> None:
        """Record one validation."""
        self._record(line)
        self._progress.validation(line)

    def _record(self, line: Mapping[str, Any]) -> None:
        if self._metrics:
            self._metrics.append(line)
        # Text, null and the step itself are left out.
        numbers = {
            name: float(value)
            for name, value in line.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for tracker in self._trackers:
            tracker.log(numbers, line["step"])

    def close(self, status: str, facts: Mapping[str, Any] | None = None) -> None:
        """End the progress line and the trackers, and write summary.json and report.html; with all
        steps done and the model written, removes the run that this one replaces. status: how it
        ended. facts: more for the summary.
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
                total_steps=self._total,
                world_size=self._world.size,
                facts={
                    **(facts or {}),
                    "data": self._data,
                    "planned": read_planned_figures(self._folder),
                    "changed_settings": changed_settings(self._cfg),
                },
            )
            report = write_report(self._folder)
            if status != "failed":  # there the error is what is to be read
                get_logger().info("report: %s", report)
            with report_storage_faults():
                note_written(self._folder)
                if status in ("done", STOPPED_EARLY):
                    drop_earlier(self._folder)
                else:
                    say_kept(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._progress.close()
        if isinstance(error, Exception) and not self._closed:
            with suppress(Exception):  # the error itself is what the user reads
                self.close("failed")
        unlock_output(self._lock)
        self._lock = None


class Progress:
    """Shows the lines that go to metrics.jsonl; ranks other than the main one show nothing.

    progress = Progress(cfg.log, total_steps, world, done=step)
    progress.step(line)          # every step; a plain line each cfg.every_n_steps, and for the last step
    progress.validation(line)
    progress.close()
    """

    def __init__(self, cfg: LogConfig, total_steps: int, world: World, *, done: int = 0) -> None:
        """done: steps that an earlier process has already trained."""
        self._cfg = cfg
        self._total = total_steps
        self._done = done
        self._trained = 0  # steps of this process
        self._seconds = 0.0  # of a step
        self._last = time.monotonic()
        self._line: Mapping[str, Any] = {}
        self._own: Sequence[str] = ()
        self._shown = world.is_main
        self._live = self._shown and not is_quiet() and (
            cfg.progress == "live" or (cfg.progress == "auto" and can_draw())
        )  # fmt: skip
        if self._live:
            show_rows(self._rows)

    def step(self, line: Mapping[str, Any], own: Sequence[str] = ()) -> None:
        """Show one optimizer step. own: the names of the recipe's own numbers."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._trained += 1
        # The first step is longer than others, so it counts only as long as there is no other.
        self._seconds = (
            seconds if self._trained <= 2 else RECENT * self._seconds + (1 - RECENT) * seconds
        )
        self._done, self._line, self._own = line["step"], line, own
        if self._shown and (self._done % self._cfg.every_n_steps == 0 or self._done == self._total):
            get_logger().info(self._plain(line))

    def validation(self, line: Mapping[str, Any]) -> None:
        """Show one validation; a line of its own."""
        if self._shown:
            rest = [
                name for name in line if name.startswith("validation_") and name not in _NOT_SHOWN
            ]
            numbers = [
                f"{name.removeprefix('validation_').replace('_', ' ')} {_number(line[name])}"
                for name in rest
            ]
            get_logger().info(f"step {line['step']}/{self._total}  validation {'  '.join(numbers)}")

    def close(self) -> None:
        """Take the rows away; the lines stay."""
        hide_rows(self._rows)
        self._live = False

    def _plain(self, line: Mapping[str, Any]) -> str:
        """Return a line; in the width of the terminal if it stands above rows that move, which show
        the time left.
        """
        begin, end = (
            f"step {self._done}/{self._total}  ",
            f"  eta {format_seconds(self._seconds_left())}",
        )
        if not self._live:
            return begin + "  ".join(_numbers(line, self._own)) + end
        room = shutil.get_terminal_size((80, 24)).columns - 1 - len(begin)
        return begin + "  ".join(_fitting(_numbers(line, self._own), room))

    def _seconds_left(self) -> float:
        return self._seconds * (self._total - self._done)

    def _rows(self, width: int) -> list[Text]:
        """Return the bar, step and time left, which are always there; the numbers, in as much room
        as there is.
        """
        left = f"eta {format_clock(self._seconds_left())}" if self._trained else "eta ?"
        share = self._done / self._total if self._total else 1.0
        begin, end = f"step {self._done}/{self._total} ", f" {share:.0%}  {left}"
        room = max(SHORTEST_BAR, min(LONGEST_BAR, width - len(begin) - len(end)))
        full = "━" if has_unicode() else "="
        bar = Text(begin, style="bold")
        bar.append(full * round(room * share), style="green")
        bar.append(
            (full if full == "━" else "-") * (room - round(room * share)), style="bright_black"
        )
        bar.append(end)
        if is_in_phase():
            return [bar]
        if not self._line:
            return [
                bar,
                Text(
                    f"the first step began {format_clock(time.monotonic() - self._last)} ago",
                    style=SOFT,
                ),
            ]
        return [bar, Text("  ".join(_fitting(_numbers(self._line, self._own), width)))]


def _numbers(line: Mapping[str, Any], own: Sequence[str]) -> list[str]:
    """Return the numbers of a step line, each named and with its unit; a recipe's own stand after
    the loss.
    """
    memory = line["peak_memory_active_gib"]
    kind = "resident" if line["memory_kind"] != "device" else "peak"
    return [
        f"loss {_number(line['loss'])}",
        *(f"{name.replace('_', ' ')} {_own_number(name, line[name])}" for name in own),
        f"grad norm {_number(line['grad_norm'])}",
        f"lr {line['lr']:.2e}",
        f"{format_count(line['tokens_per_second_per_device'])} tokens/s/device",
        f"labels {line['label_token_fraction']:.0%}",
        f"{kind} {f'{memory:.2f}' if memory is not None else '?'} GiB",
    ]


def _fitting(numbers: list[str], room: int) -> list[str]:
    """Those that fit into so many columns; the loss always."""
    kept = list(numbers)
    for name in _LEFT_OUT:
        if len("  ".join(kept)) > room:
            kept = [
                number for number in kept if not (number.startswith(name) or number.endswith(name))
            ]
    while len(kept) > 1 and len("  ".join(kept)) > room:
        kept.pop()
    return kept


def _own_number(name: str, value: float | None) -> str:
    """Return a recipe's own number: what its name says are tokens is counted."""
    text = _number(value)
    return f"{value:,.0f}" if name.endswith("_tokens") and text != _NOT_FINITE else text


def _number(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and math.isfinite(value) else _NOT_FINITE


def data_facts(data: TrainingData) -> dict[str, Any]:
    """Return counts of the training data and, if there are any, of those for validation, as they
    were made into sequences.

    packs: packed sequences of the first epoch, packed_share: how much of them is tokens, not
    padding; without packing neither is there.
    """
    found = {"training": _counts(data.dataset.report)}
    if (share := data.plan.compute_packed_share()) is not None:
        found["training"] |= {"packs": data.plan.packs(), "packed_share": share}
    if data.validation_dataset is not None:
        found["validation"] = _counts(data.validation_dataset.report)
    return found


def _counts(report: DataReport) -> dict[str, Any]:
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


def changed_settings(cfg: Any) -> dict[str, list[str]]:
    """Key -> [its value, its default] of what is not at its default, as a config writes them."""
    schema: type = type(cfg)
    found = {}
    for name, key in read_schema(schema).keys.items():
        value = reduce(getattr, name.split("."), cfg)
        if key.required or value != key.default:
            found[name] = [
                format_value(value),
                "required" if key.required else format_value(key.default),
            ]
    return found


# Trackers: tensorboard, wandb and trackio with one small protocol; each an extra, imported when
# asked for.


class Tracker(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the numbers of one step."""

    def close(self) -> None:
        """Send what is left and ends the run at the tracker."""


Builder = Callable[[str, str, Path, Mapping[str, Any]], Tracker]


def open_trackers(cfg: FullFinetuneConfig) -> list[Tracker]:
    """Open the trackers of `log.trackers`; those that write files do so in `output_dir/trackers`.

    ConfigError with the pip command when a package is missing.
    """
    folder = Path(cfg.output_dir)
    run_name = cfg.log.run_name if cfg.log.run_name is not None else folder.name
    settings = redact_values(dataclasses.asdict(cfg))
    builders: list[Builder] = [get_registered("log.trackers", name) for name in cfg.log.trackers]
    return [build(cfg.log.project, run_name, folder / "trackers", settings) for build in builders]


@register("log.trackers", "tensorboard")
class TensorBoard:
    """Event files in `output_dir/trackers/tensorboard`, written by torch's own SummaryWriter."""

    def __init__(
        self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        _require("tensorboard")
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
        self._run: Any = _require("trackio")
        self._run.init(project=project, name=run_name, config=dict(settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@register("log.trackers", "wandb")
class WandB(Trackio):  # whose functions are named as wandb's
    """A run at Weights & Biases; its local files are in `output_dir/trackers`."""

    def __init__(
        self, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        wandb = _require("wandb")
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


def _require(package: str) -> ModuleType:
    """Return the imported package, or one line that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(describe_missing_tracker(package, str(error))) from error
