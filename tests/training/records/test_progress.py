"""Progress: the plain lines word for word, the live line on a terminal, silence on other ranks."""

import io
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config.schema import LogConfig
from recipe_lib.logs import get_logger
from recipe_lib.training.records import progress as module
from recipe_lib.training.records.progress import Progress

MAIN, OTHER = SimpleNamespace(is_main=True), SimpleNamespace(is_main=False)


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
    with Progress(LogConfig(progress="plain"), 12, MAIN, done=2) as progress:
        progress.step(line(3))
        progress.step(line(4, memory_kind="resident set", loss=float("nan"), grad_norm=None))
    assert said == [
        "step 3/12  loss 2.3457  grad norm 1.5000  lr 2.00e-05  1.2 K tokens/s/device  labels 25%  peak 1.23 GiB  "
        "eta 1m30s",
        "step 4/12  loss not finite  grad norm not finite  lr 2.00e-05  1.2 K tokens/s/device  labels 25%  "
        "resident 1.23 GiB  eta 2m00s",
    ]


def test_every_few_steps_and_always_the_last(said: list[str]) -> None:
    with Progress(LogConfig(progress="auto", every_n_steps=4), 10, MAIN) as progress:
        for step in range(1, 11):
            progress.step(line(step))
        progress.validation({"step": 10, "validation_loss": 0.5})
    assert [text.split("  ")[0] for text in said] == ["step 4/10", "step 8/10", "step 10/10", "step 10/10"]
    assert said[-1] == "step 10/10  validation loss 0.5000"


def test_other_ranks_say_nothing(said: list[str]) -> None:
    with Progress(LogConfig(progress="live"), 3, OTHER) as progress:
        progress.step(line(1))
        progress.validation({"step": 1, "validation_loss": 0.5})
    assert said == []


def test_the_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(get_logger(), "handlers", [handler])
    with Progress(LogConfig(progress="auto"), 3, MAIN) as progress:
        assert handler.stream is not terminal
        for step in (1, 2, 3):
            progress.step(line(step))
        progress.validation({"step": 3, "validation_loss": 0.5})
    shown = terminal.getvalue()
    assert "3/3" in shown and "loss 2.3457" in shown and "grad norm 1.5000" in shown
    assert "validation loss 0.5000" in shown
    assert handler.stream is terminal and sys.stderr is terminal
