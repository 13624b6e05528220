"""The benchmark of planted faults: its rules of judging, and our own column for faults that a
moment tells.
"""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.peers.planted.faults import FAULTS, SOUND
from benchmarks.peers.planted.ground import make_model
from benchmarks.peers.planted.ours import Ours
from benchmarks.peers.planted.page import format_page
from benchmarks.peers.planted.playing import run_one
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.states import Sound
from benchmarks.peers.planted.verdict import judge
from benchmarks.peers.planted.words import WORDS
from recipe_lib.cli.main import main
from recipe_lib.logs import get_logger

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "examples" / "demo" / "tokenizer"


def result(*lines: str, code: int | None = 0) -> Result:
    return Result(["tool"], code, [(float(at), line) for at, line in enumerate(lines)], seconds=9.0)


@pytest.mark.parametrize(
    "found, steps, outcome, seconds",
    [
        (result("hello", "error: the disk is full", code=2), 0, "rejected", 1),
        (result("hello", "error: the disk is full", code=2), 3, "stopped", 1),
        (result("the disk is full"), 3, "warned", 0),
        (result("hello"), 3, "silent", 9),
        (result("hello", code=1), 0, "ends, unnamed", 9),
        (
            result("Traceback (most recent call last):", "  x.py", "OSError: no disk", code=1),
            0,
            "traceback, named",
            0,
        ),
        (
            result(
                "no disk", "Traceback (most recent call last):", "  disk", "KeyError: 'x'", code=1
            ),
            0,
            "traceback",
            1,
        ),
        (Result(["tool"], None, [(0.0, "the disk")], 300.0, timed_out=True), 0, "hangs", 0),
    ],
)
def test_rules(found, steps, outcome, seconds):
    told = judge(found, "disk", steps)
    assert (told.outcome, told.seconds) == (outcome, seconds)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder of two layers with the demo's tokenizer, complete as the benchmark makes
    it.
    """
    from recipe_lib.models import build_meta, build_spec, init_weights

    folder = tmp_path_factory.mktemp("given")
    config = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text(encoding="utf-8"))
    spec = build_spec(config, "tiny")
    model = build_meta(spec, torch.float32).to_empty(device="cpu")
    init_weights(model, 1, spec)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in TOKENIZER.iterdir():
        shutil.copyfile(path, folder / path.name)
    save_file(
        {name: value.detach().clone() for name, value in model.named_parameters()},
        folder / "model.safetensors",
    )
    made = folder.parent / f"{folder.name}_made"
    make_model(folder, made)
    return made


class Logged(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Here(Ours):
    """Our command line in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def start(self, setup, command, **options):
        self.remember(setup)
        self._capture.readouterr()
        logged = Logged()
        get_logger().addHandler(logged)
        try:
            code = main(list(command[3:]))
        finally:
            get_logger().removeHandler(logged)
        written = self._capture.readouterr()
        text = written.out + written.err
        text += "".join(
            f"{line}\n" for line in logged.lines if line not in text
        )  # where an earlier test has the log
        text = text.replace(f"{setup.folder}/", "")
        return Result(list(command), code, [(0.0, line) for line in text.splitlines()])


EXPECTED = {
    "typo": "rejected", "zero_rate": "rejected", "adapter_target": "rejected", "no_answer": "rejected",
    "broken_line": "rejected", "duplicates": "warned", "overlap": "warned", "no_end": "warned",
    "drops_system": "warned", "unmarked": "handled", "missing_shard": "rejected", "truncated_weights": "rejected",
    "nan_weight": "rejected", "other_tokenizer": "rejected",
    "experts_without_adapters": "rejected",  # and experts in one tensor are quantized
    "earlier_work": "rejected", "beyond_positions": "warned",
}  # fmt: skip


def test_our_column(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    tool, faults = Here(capfd), {fault.name: fault for fault in FAULTS}
    WORDS[SOUND.name] = "."
    try:
        sound = run_one(SOUND, tool, tmp_path, checkpoint, Sound([], []))
    finally:
        del WORDS[SOUND.name]
    assert (sound.outcome, sound.steps) == (
        "warned",
        4,
    ), sound  # every word of it is news to these rules
    lines = (
        (tmp_path / "sound" / "output" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert len(lines) == 4
    found = {
        name: run_one(faults[name], tool, tmp_path, checkpoint, Sound([], [])) for name in EXPECTED
    }
    assert {name: outcome.outcome for name, outcome in found.items()} == EXPECTED
    cells = {name: outcome.to_json() for name, outcome in found.items()}
    told = {"title": "ours", "told": "", "versions": {}, "date": "", "machine": "", "cells": cells}
    text = format_page({"ours": told}, ["ours"])
    assert (
        "| **told or handled, of those that apply** | **17 of 17** |" in text and "not run" in text
    )
