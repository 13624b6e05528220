"""SIGKILL at random moments, and inside saves: every resume works and the losses are bitwise those
of a quiet run.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from recipe_lib.checkpoint import resumable_state as state
from tests.recipes.runs import build_arguments, import_recipe_module

KILLS = 6
SAVE_SECONDS = 0.02  # for which what was written waits to be whole, so that a kill can meet it
STEPS = 12


def losses(output: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every training line of metrics.jsonl."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def is_saving(output: Path) -> bool:
    """A state is being written, or was when its process ended."""
    return any(".tmp" in path.name for path in (output / "state").glob("*"))


def start(argv: list[str], log: Path) -> int:
    """Forks a process that runs the recipe; the parent has imported everything, so that it starts
    at once.
    """
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        write_shard = state._write_shard
        state._write_shard = lambda *args: (write_shard(*args), time.sleep(SAVE_SECONDS))[0]
        code = import_recipe_module().main(argv) or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path):
    import_recipe_module()
    extra = [
        f"max_steps={STEPS}",
        "epochs=4",
        "checkpoint.save_every_n_steps=1",
        "log.every_n_steps=1000",
    ]
    extra += [
        "batch_size=2",
        "gradient_accumulation_steps=2",
    ]  # two epochs of six steps: kills fall within both
    quiet = tmp_path / "quiet"
    began = time.monotonic()
    child = start([*build_arguments(quiet), *extra, "resume=latest"], tmp_path / "quiet.log")
    assert os.waitpid(child, 0)[1] == 0, (tmp_path / "quiet.log").read_text()
    duration = time.monotonic() - began
    expected = losses(quiet)
    assert len(expected) == STEPS

    moments = random.Random(0)
    kills = rounds = in_save = 0
    while kills < KILLS:
        output = tmp_path / f"round{rounds}"
        rounds += 1
        for _ in range(100):
            log = tmp_path / f"{output.name}.log"
            child = start([*build_arguments(output), *extra, "resume=latest"], log)
            # Once there were as many kills as asked for, the run may end.
            deadline = time.monotonic() + (moments.uniform(0.0, duration) if kills < KILLS else 600)
            finished, status = 0, 0
            # Every other kill waits for a save.
            while not finished and (
                time.monotonic() < deadline or (kills % 2 and not is_saving(output))
            ):
                finished, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.005)
            if not finished:
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):
                kills += 1
                in_save += is_saving(output)
                continue
            assert os.waitstatus_to_exitcode(status) == 0, log.read_text()[-3000:]
            break
        assert losses(output) == expected
        assert (output / "model" / "model.safetensors").read_bytes() == (
            quiet / "model" / "model.safetensors"
        ).read_bytes()
    print(f"{kills} kills in {rounds} runs, {in_save} of them inside a save")
    assert in_save > 0
