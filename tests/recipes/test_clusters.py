"""Nodes, as network namespaces of this machine: two with a command of docs/clusters.md, one with
the file for Slurm.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_lib.cli.main import main as tune
from recipe_lib.training.records import read_metrics
from tests.cli.commands import ROOT, build_environment
from tests.distributed.ranks import run_ranks

ADDRESSES = ("10.213.8.1", "10.213.8.2")
RUN = ["max_steps=3", "checkpoint.save_model=false", "validation.source=null", "batch_size=4"]


def ip(*words: str) -> None:
    """The command `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces, joined by a link whose ends are called as they are."""
    names = f"tc{os.getpid()}", f"td{os.getpid()}"
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs Linux, iproute2 and unshare")
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_node(name: str, address: str) -> list[str]:
    """What a command is started by to run on that node, which is called by its address."""
    script = f'hostname {address}; export GLOO_SOCKET_IFNAME={name}; exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", script, "-"]


def typed(beginning: str) -> list[str]:
    """The words of the line of docs/clusters.md that begins so, for one rank a node that trains the
    demo.
    """
    text = (ROOT / "docs" / "clusters.md").read_text()
    (line,) = re.findall(rf"^{re.escape(beginning)}.*$", text, re.MULTILINE)
    for there, here in (("HOST", ADDRESSES[0]), ("--nproc_per_node 8", "--nproc_per_node 1")):
        assert there in line
        line = line.replace(there, here)
    return line.replace("llama3/70B_full", "demo/full").split()


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment with `tune` and `torchrun` of this interpreter first on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("tune", "recipe_lib"), ("torchrun", "torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    return build_environment(
        PATH=f"{folder}:{os.environ['PATH']}", OMP_NUM_THREADS="1", TUNE_PLAN="off"
    )


def trains(folder: Path, steps: int) -> None:
    """A run has trained so many steps."""
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["loss"] < 10 for line in lines)


@pytest.mark.slow
def test_the_same_command_on_each(nodes: tuple[str, str], programs: dict[str, str], tmp_path: Path):
    """By torchrun; test_outputs has two nodes of `tune run`."""
    words = [*typed("torchrun --nnodes 2"), *RUN, f"output_dir={tmp_path / 'out'}"]
    running = [
        subprocess.Popen(
            [*on_node(*node), *words], cwd=ROOT, env=programs, stderr=subprocess.PIPE, text=True
        )
        for node in zip(nodes, ADDRESSES, strict=True)
    ]
    said = [process.communicate(timeout=180)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert sum("devices: 2 cpu" in text for text in said) == 1
    trains(tmp_path / "out", 3)


@pytest.mark.slow
def test_slurm_stops_with_a_state_queues_again_and_goes_on(
    nodes: tuple[str, str], programs: dict[str, str], tmp_path: Path
) -> None:
    """`srun` starts the command on the node; in the first job the scheduler asks it to stop after
    some steps.
    """
    folder, out = tmp_path / "bin", tmp_path / "out"
    begin = f'{shlex.join(on_node(nodes[0], ADDRESSES[0]))} "$@" & pid=$!'
    begun = f'while [ "$(cat {out}/metrics.jsonl 2>/dev/null | wc -l)" -lt 3 ]; do sleep 0.2; done'
    stop = f"[ -e {out}/state ] || ({begun}; kill -TERM $pid) &"
    record = f'printf "%s\\n" "$@" > {tmp_path}/started'
    (folder / "srun").write_text("\n".join(["#!/bin/bash", record, begin, stop, "wait $pid", ""]))
    (folder / "scontrol").write_text(
        f'#!/bin/bash\nif [ "$1" = requeue ]; then echo $2 > {tmp_path}/queued; else echo'
        f" {ADDRESSES[0]}; fi\n"
    )
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "a1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "7",
    }
    words = [
        "bash",
        "examples/slurm/train.sbatch",
        "demo/full",
        *RUN[1:],
        "max_steps=60",
        f"output_dir={out}",
    ]
    done = subprocess.run(
        words, cwd=ROOT, env=programs | job, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "queued").read_text() == "7\n"
    before = read_metrics(out)
    started = (tmp_path / "started").read_text().splitlines()
    again = [
        "run",
        *started[started.index("demo/full") :],
    ]  # what the next job starts, without a launcher
    assert run_ranks(lambda: tune(again), 1, process_group=False) == [0]
    trains(out, 60)
    assert read_metrics(out)[: len(before)] == before
