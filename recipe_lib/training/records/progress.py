"""The progress of a run: plain lines, which stay, and on a terminal two rows that move: the bar, and the numbers."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.text import Text

from recipe_lib.config.schema import LogConfig
from recipe_lib.logs import get_logger, is_quiet
from recipe_lib.report import screen
from recipe_lib.report.phases import format_clock, is_in_phase
from recipe_lib.report.terminal import SOFT
from recipe_lib.units import format_count, format_seconds

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

SHORTEST_BAR, LONGEST_BAR = 8, 60  # columns
RECENT = 0.9  # weight of the steps before in the mean seconds of a step
_NOT_FINITE = "not finite"
_NOT_SHOWN = ("validation_tokens", "validation_pairs")  # of a validation: the same each time
# Which numbers are left out first where the room is short; the loss never is.
_LEFT_OUT = ("labels", "lr", "grad norm", "tokens/s/device", "GiB")


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
        self._done = done
        self._trained = 0  # steps of this process
        self._seconds = 0.0  # of a step
        self._last = time.monotonic()
        self._line: Mapping[str, Any] = {}
        self._own: Sequence[str] = ()
        self._shown = world.is_main
        self._live = self._shown and not is_quiet() and (
            cfg.progress == "live" or (cfg.progress == "auto" and screen.can_draw())
        )  # fmt: skip
        if self._live:
            screen.show(self._rows)

    def step(self, line: Mapping[str, Any], own: Sequence[str] = ()) -> None:
        """Shows one optimizer step. own: the names of the recipe's own numbers."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._trained += 1
        # The first step is longer than others, so it counts only as long as there is no other.
        self._seconds = seconds if self._trained <= 2 else RECENT * self._seconds + (1 - RECENT) * seconds
        self._done, self._line, self._own = line["step"], line, own
        if self._shown and (self._done % self._cfg.every_n_steps == 0 or self._done == self._total):
            get_logger().info(self._plain(line))

    def validation(self, line: Mapping[str, Any]) -> None:
        """Shows one validation; a line of its own."""
        if self._shown:
            rest = [name for name in line if name.startswith("validation_") and name not in _NOT_SHOWN]
            numbers = [f"{name.removeprefix('validation_').replace('_', ' ')} {_number(line[name])}" for name in rest]
            get_logger().info(f"step {line['step']}/{self._total}  validation {'  '.join(numbers)}")

    def close(self) -> None:
        """Takes the rows away; the lines stay."""
        screen.hide(self._rows)
        self._live = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _plain(self, line: Mapping[str, Any]) -> str:
        """A line; in the width of the terminal if it stands above rows that move, which show the time left."""
        begin, end = f"step {self._done}/{self._total}  ", f"  eta {format_seconds(self._seconds_left())}"
        if not self._live:
            return begin + "  ".join(_numbers(line, self._own)) + end
        room = shutil.get_terminal_size((80, 24)).columns - 1 - len(begin)
        return begin + "  ".join(_fitting(_numbers(line, self._own), room))

    def _seconds_left(self) -> float:
        return self._seconds * (self._total - self._done)

    def _rows(self, width: int) -> list[Text]:
        """The bar, step and time left, which are always there; the numbers, in as much room as there is."""
        left = f"eta {format_clock(self._seconds_left())}" if self._trained else "eta ?"
        share = self._done / self._total if self._total else 1.0
        begin, end = f"step {self._done}/{self._total} ", f" {share:.0%}  {left}"
        room = max(SHORTEST_BAR, min(LONGEST_BAR, width - len(begin) - len(end)))
        full = "━" if screen.has_unicode() else "="
        bar = Text(begin, style="bold")
        bar.append(full * round(room * share), style="green")
        bar.append((full if full == "━" else "-") * (room - round(room * share)), style="bright_black")
        bar.append(end)
        if is_in_phase():
            return [bar]
        if not self._line:
            return [bar, Text(f"the first step began {format_clock(time.monotonic() - self._last)} ago", style=SOFT)]
        return [bar, Text("  ".join(_fitting(_numbers(self._line, self._own), width)))]


def _numbers(line: Mapping[str, Any], own: Sequence[str]) -> list[str]:
    """The numbers of a step line, each named and with its unit; a recipe's own stand after the loss."""
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

    def too_long() -> bool:
        return len(kept) > 1 and len("  ".join(kept)) > room

    for name in _LEFT_OUT:
        if too_long():
            kept = [number for number in kept if not (number.startswith(name) or number.endswith(name))]
    while too_long():
        kept.pop()
    return kept


def _own_number(name: str, value: float | None) -> str:
    """A recipe's own number: what its name says are tokens is counted."""
    text = _number(value)
    return f"{value:,.0f}" if name.endswith("_tokens") and text != _NOT_FINITE else text


def _number(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and math.isfinite(value) else _NOT_FINITE
