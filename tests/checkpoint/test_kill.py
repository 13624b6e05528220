"""SIGKILL at random moments of a run that saves, prunes and exports all the time: every start goes
on, bitwise.
"""

import gc
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from recipe_lib import files
from recipe_lib.checkpoint.huggingface import check_weights, export_model
from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.checkpoint.run_files import RECORD, OutputRecord, write_record
from tests.checkpoint.tiny import (
    CONFIG,
    OPTIMIZERS,
    build_tiny_model,
    build_tiny_spec,
    build_tiny_world,
    compute_fingerprint,
    train,
)

STEPS = 12
KILLS = 3
DISK_SECONDS = (
    0.002  # that each change of the disk takes: in memory hardly a kill would fall into a save
)


def run(root: Path) -> None:
    """A run: goes on from the latest state; saves after every step, keeps two, exports now and then
    and at the end.
    """
    files.remove_leftovers(root, RECORD)
    if not (root / RECORD).exists():
        write_record(root, OutputRecord())
    with build_tiny_world() as world:
        model = build_tiny_model(world)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        torch.manual_seed(5)
        found = find_state(root / "state", "latest", world)
        done = load_state(found, model, optimizer, world)["step"] if found else 0
        options = {"tokenizer_folder": None, "max_shard_bytes": 1500, "world": world}
        for step in range(done, STEPS):
            [loss] = train(model, optimizer, 1, step)
            with open(root / "log.jsonl", "a") as log:
                log.write(json.dumps([step, loss, float(torch.rand(()))]) + "\n")
            save_state(
                root / "state", step + 1, model, optimizer, {"step": step + 1}, world, keep=2
            )
            if step % 3 == 1:
                export_model(model, build_tiny_spec(), CONFIG, root / "model", **options)
        export_model(model, build_tiny_spec(), CONFIG, root / "model", **options)
        (root / "fingerprint").write_text(compute_fingerprint(model, optimizer))
        (root / "fingerprint").rename(
            root / "done"
        )  # a kill may come between the file and its text


def start(root: Path) -> int:
    """The run in a fork of this process, which has imported everything; its process id."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # what is the parent's must not be collected here
        files.before_operation = lambda operation, path: time.sleep(DISK_SECONDS)
        code = 1
        try:
            run(root)
            code = 0
        finally:
            os._exit(code)
    return child


def lines_of(path: Path) -> list[list]:
    """Whole lines of a log; a kill may cut the last one."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("]\n")
    ]


def test_kills_change_nothing(memory_path: Path) -> None:
    reference = memory_path / "reference"
    reference.mkdir()
    run(reference)  # also imports what the first step imports, so that forks start at once
    begun = time.monotonic()
    expected = {step: rest for step, *rest in lines_of(reference / "log.jsonl")}
    assert len(expected) == STEPS
    (memory_path / "timing").mkdir()
    assert os.waitpid(start(memory_path / "timing"), 0)[1] == 0
    seconds = time.monotonic() - begun
    draw = random.Random(1)
    kills = rounds = saves_cut = 0
    while kills < KILLS:
        root = memory_path / f"run{rounds}"
        root.mkdir()
        while not (root / "done").exists():
            child = start(root)
            time.sleep(draw.uniform(0, seconds * 0.7))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, (
                "a resumed run failed"
            )
            kills += os.WIFSIGNALED(status)
            saves_cut += any((root / "state").glob(".*.tmp"))
            if (root / "model").exists():
                check_weights(build_tiny_spec(), root / "model")
        for step, *rest in lines_of(root / "log.jsonl"):
            assert rest == expected[step], f"step {step} differs after a resume"
        assert {step for step, *_ in lines_of(root / "log.jsonl")} >= set(range(STEPS - 1))
        assert (root / "done").read_text() == (reference / "done").read_text()
        for path in (reference / "model").glob("*.safetensors"):
            for name, value in load_file(path).items():
                assert torch.equal(load_file(root / "model" / path.name)[name], value)
        shutil.rmtree(root)
        rounds += 1
    assert saves_cut, "no kill fell into a save: the test says little"
    print(f"{kills} kills in {rounds} runs, {saves_cut} of them inside a save")
