"""Progress: the plain lines word for word, two rows on a terminal, silence on other ranks."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config.schema import LogConfig
from recipe_lib.logs import get_logger
from recipe_lib.report import phases
from recipe_lib.training import run_log as module
from recipe_lib.training.run_log import Progress
from tests.report.terminal_screen import Terminal, read_lines

MAIN = SimpleNamespace(is_main=True)
OTHER = SimpleNamespace(is_main=False)


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def line(step: int, **changes: Any) -> dict[str, Any]:
    given = {
        "step": step, "loss": 2.34567, "grad_norm": 1.5, "lr": 2e-5, "tokens_per_second_per_device": 1234.0,
        "label_token_fraction": 0.25, "peak_memory_active_gib": 1.234, "memory_kind": "device",
    }  # fmt: skip
    return given | changes


def test_a_plain_line_word_for_word(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    own = ["noise", "cut_tokens"]
    with closing(Progress(LogConfig(progress="plain"), 12, MAIN, done=2)) as progress:
        progress.show_step(line(3))
        progress.show_step(
            line(
                4,
                memory_kind="resident set",
                loss=float("nan"),
                grad_norm=None,
                noise=0.5,
                cut_tokens=1234.0,
            ),
            own,
        )
    assert said == [
        (
            "step 3/12  loss 2.3457  grad norm 1.5000  lr 2.00e-05  1.2 K tokens/s/device  labels"
            " 25%  peak 1.23 GiB  eta 1m30s"
        ),
        (
            "step 4/12  loss not finite  noise 0.5000  cut tokens 1,234  grad norm not finite  lr"
            " 2.00e-05  1.2 K tokens/s/device  labels 25%  resident 1.23 GiB  eta 2m40s"
        ),
    ]


def test_every_few_steps_and_always_the_last(said: list[str]) -> None:
    with closing(Progress(LogConfig(progress="auto", every_n_steps=4), 10, MAIN)) as progress:
        for step in range(1, 11):
            progress.show_step(line(step))
        counts = {"validation_samples": 640, "validation_sequences": 64, "validation_pairs": 6}
        progress.show_validation({"step": 10, "validation_loss": 0.5, **counts})
    assert [text.split("  ")[0] for text in said] == [
        "step 4/10",
        "step 8/10",
        "step 10/10",
        "step 10/10",
    ]
    assert said[-1] == "step 10/10  validation loss 0.5000"


def test_other_ranks_say_nothing(said: list[str]) -> None:
    with closing(Progress(LogConfig(progress="live"), 3, OTHER)) as progress:
        progress.show_step(line(1))
        progress.show_validation({"step": 1, "validation_loss": 0.5})
    assert said == []


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_two_rows_on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(phases, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    with closing(Progress(LogConfig(progress="auto", every_n_steps=2), 1500, MAIN)) as progress:
        waiting = _rows_once(terminal, "step 0/1500")
        assert waiting[0].endswith("eta ?") and waiting[1].startswith("the first step began")
        for step in (1, 2, 3):
            progress.show_step(line(step, noise=0.5), ["noise"])
        bar, numbers = _rows_once(terminal, "step 3/1500")
        assert max(len(bar), len(numbers)) < width
        assert "━━━━" in bar and " eta " in bar and " 0%" in bar
        assert numbers.startswith("loss 2.3457  noise 0.5000")
        kept = [
            name for name in ("labels", "lr ", "grad norm", "tokens/s", "GiB") if name in numbers
        ]
        least = {60: ["GiB"], 80: ["tokens/s", "GiB"]}.get(
            width, ["labels", "lr ", "grad norm", "tokens/s", "GiB"]
        )
        assert set(least) <= set(kept)
        progress.show_validation({"step": 3, "validation_loss": 0.5})
    history = read_lines(terminal.getvalue())
    assert [text.split("  ")[0] for text in history] == ["step 2/1500", "step 3/1500"]
    assert history[1] == "step 3/1500  validation loss 0.5000"
    assert max(map(len, history)) < width
    assert sys.stderr is terminal


def test_a_phase_stands_in_place_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(phases, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(phases, "ROW_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with closing(Progress(LogConfig(progress="auto"), 3, MAIN)) as progress:
        progress.show_step(line(1))
        with phases.phase("validating"):
            rows = _rows_once(terminal, "validating")
            assert rows[0].startswith("step 1/3") and "validating" in rows[1]
        assert _rows_once(terminal, "loss 2.3457  ")


def _rows_once(terminal: Terminal, text: str) -> list[str]:
    """The last two rows of the screen once `text` is in one of them."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        rows = read_lines(terminal.getvalue())[-2:]
        if len(rows) == 2 and "━" in rows[0] and any(text in row for row in rows):
            return rows
        time.sleep(0.01)
    raise AssertionError(read_lines(terminal.getvalue()))
