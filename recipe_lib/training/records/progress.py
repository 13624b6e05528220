"""The progress of a run: one live line on a terminal, plain lines elsewhere."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from recipe_lib.config.schema import LogConfig
from recipe_lib.logs import get_logger
from recipe_lib.units import format_count, format_seconds

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


class Progress:
    """Shows the lines that go to metrics.jsonl; ranks other than the main one show nothing.

    with Progress(cfg.log, total_steps, world, done=step) as progress:
        progress.step(line)          # every step; a plain line each cfg.every_n_steps, and for the last step
        progress.validation(line)
    """

    def __init__(self, cfg: LogConfig, total_steps: int, world: "World", *, done: int = 0) -> None:
        """done: steps that an earlier process has already trained."""
        self._cfg = cfg
        self._total = total_steps
        self._done = self._start = done
        self._began = time.monotonic()
        self._shown = world.is_main
        live = cfg.progress == "live" or (cfg.progress == "auto" and sys.stderr.isatty())
        self._live = _LiveLine(total_steps, done) if self._shown and live else None

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows one optimizer step."""
        self._done = line["step"]
        if not self._shown:
            return
        if self._live is not None:
            self._live.update(self._done, _numbers(line))
        elif self._done % self._cfg.every_n_steps == 0 or self._done == self._total:
            text = f"step {self._done}/{self._total}  {_numbers(line)}  eta {format_seconds(self._seconds_left())}"
            get_logger().info(text)

    def validation(self, line: Mapping[str, Any]) -> None:
        """Shows one validation; a line of its own in both styles."""
        if self._shown:
            get_logger().info(f"step {line['step']}/{self._total}  validation loss {_number(line['validation_loss'])}")

    def close(self) -> None:
        """Leaves the live line as it is and goes back to plain lines."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _seconds_left(self) -> float:
        trained = max(1, self._done - self._start)
        return (time.monotonic() - self._began) / trained * (self._total - self._done)


class _LiveLine:
    """A bar, the step, the numbers and the time left, drawn on standard error by rich."""

    def __init__(self, total_steps: int, done: int) -> None:
        self._rich = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=False,
        )
        # Log lines must pass through rich while it draws, or they land in the middle of its line.
        streams = [handler for handler in get_logger().handlers if isinstance(handler, logging.StreamHandler)]
        self._former = [(handler, handler.stream) for handler in streams if handler.stream is sys.stderr]
        self._rich.start()
        self._task = self._rich.add_task("train", total=total_steps, completed=done, numbers="")
        for handler, _ in self._former:
            handler.setStream(sys.stderr)  # which rich has replaced by its own

    def update(self, done: int, numbers: str) -> None:
        self._rich.update(self._task, completed=done, numbers=numbers)

    def close(self) -> None:
        self._rich.stop()
        for handler, stream in self._former:
            handler.setStream(stream)


def _numbers(line: Mapping[str, Any]) -> str:
    """The numbers of a step line, each named and with its unit."""
    memory = line["peak_memory_active_gib"]
    kind = "resident" if line["memory_kind"] != "device" else "peak"
    margin = f"reward margin {_number(line['reward_margin'])}  " if "reward_margin" in line else ""
    return (
        f"loss {_number(line['loss'])}  {margin}grad norm {_number(line['grad_norm'])}  lr {line['lr']:.2e}  "
        f"{format_count(line['tokens_per_second_per_device'])} tokens/s/device  "
        f"labels {line['label_token_fraction']:.0%}  "
        f"{kind} {f'{memory:.2f}' if memory is not None else '?'} GiB"
    )


def _number(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "not finite"
