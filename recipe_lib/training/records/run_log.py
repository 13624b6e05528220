"""Everything a run says while it trains, in one object: metrics.jsonl, the progress line, trackers, the summary."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.files import storage_faults
from recipe_lib.logs import get_logger
from recipe_lib.report.planned import planned_figures
from recipe_lib.training import previous_run
from recipe_lib.training.output import lock_output, open_output, unlock_output
from recipe_lib.training.records.metrics import MetricsFile, write_summary
from recipe_lib.training.records.progress import Progress
from recipe_lib.training.records.run_facts import changed_settings
from recipe_lib.training.records.trackers import Trackers
from recipe_lib.training.report_page import write_report

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

STOPPED_EARLY = "stopped early"  # all that was to be done is, since validation.patience ended the steps


class RunLog:
    """Opens the output folder of a run and records its steps; ranks other than the main one record nothing."""

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: "World",
        total_steps: int,
        *,
        done: int,
        data: Mapping[str, Any] | None = None,
    ):
        """done: steps that an earlier process has trained; lines after it are cut from metrics.jsonl. data: as
        `data_facts` counts them. A collective."""
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
            self._trackers = Trackers(cfg.log, self._folder, dataclasses.asdict(cfg), world)
        self._progress = Progress(cfg.log, total_steps, world, done=done)

    def step(self, line: Mapping[str, Any], own: Sequence[str] = ()) -> None:
        """Records one optimizer step. own: the names of the recipe's own numbers."""
        self._record(line)
        self._progress.step(line, own)

    def validation(self, line: Mapping[str, Any]) -> None:
        """Records one validation."""
        self._record(line)
        self._progress.validation(line)

    def _record(self, line: Mapping[str, Any]) -> None:
        if self._metrics:
            self._metrics.append(line)
        self._trackers.log(line, line["step"])

    def close(self, status: str, facts: Mapping[str, Any] | None = None) -> None:
        """Ends the progress line and the trackers, and writes summary.json and report.html; with all steps done and the
        model written, removes the run that this one replaces. status: how it ended. facts: more for the summary."""
        self._closed = True
        self._progress.close()
        self._trackers.close()
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
                    "planned": planned_figures(self._folder),
                    "changed_settings": changed_settings(self._cfg),
                },
            )
            report = write_report(self._folder)
            if status != "failed":  # there the error is what is to be read
                get_logger().info("report: %s", report)
            with storage_faults():
                previous_run.note_written(self._folder)
                if status in ("done", STOPPED_EARLY):
                    previous_run.drop_earlier(self._folder)
                else:
                    previous_run.say_kept(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._progress.close()
        if isinstance(error, Exception) and not self._closed:
            with suppress(Exception):  # the error itself is what the user reads
                self.close("failed")
        unlock_output(self._lock)
        self._lock = None
