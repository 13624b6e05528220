"""Two machines, as network namespaces, and the link between them cut: each ends with a line and
exit code 7.
"""

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.errors import end_process, run_for_exit_code
from recipe_lib.parallel import heartbeat, start_world
from tests.distributed.ranks import find_free_port

TIMEOUT = 2.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    """The command `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces, joined by a link whose ends are called as they are."""
    names = f"ta{os.getpid()}", f"tb{os.getpid()}"
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and iproute2")
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
        for name, address in zip(names, _ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def train(node: int, name: str, port: int, folder: Path) -> None:
    """A rank on a machine of its own, which goes through steps of one collective each."""
    with open(f"/var/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            os._exit(77)
    os.dup2(os.open(folder / f"said{node}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # not the test runner's
    ranks = {
        "RANK": node,
        "GROUP_RANK": node,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 1,
    }
    os.environ.update({key: str(value) for key, value in ranks.items()})
    os.environ.update(MASTER_ADDR=_ADDRESSES[0], MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=name)
    heartbeat.BEAT_SECONDS = 0.1
    torch.set_num_threads(1)

    def main() -> None:
        parallel = ParallelConfig(heartbeat_timeout_seconds=TIMEOUT)
        with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
            for step in range(10_000):
                world.heartbeat.enter(f"step {step}", heartbeat.STEP_TIMEOUTS)
                world.any(False)
                if step == 5:
                    (folder / f"trains{node}").touch()
                time.sleep(0.02)

    end_process(run_for_exit_code(main))


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_machines(machines: tuple[str, str], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    port = find_free_port()
    ranks = [
        context.Process(target=train, args=(node, machines[node], port, tmp_path))
        for node in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("trains*"))) < 2 and time.monotonic() < deadline:
            assert all(rank.is_alive() for rank in ranks), [rank.exitcode for rank in ranks]
            time.sleep(0.02)
        ip("-n", machines[0], "link", "set", machines[0], "down")
        for rank in ranks:
            rank.join(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    said = [
        [
            line
            for line in (tmp_path / f"said{node}").read_text().splitlines()
            if not line.startswith("[W")
        ]
        for node in (0, 1)
    ]
    assert [rank.exitcode for rank in ranks] == [7, 7], said
    (first,), (second,) = said
    waits = r"is stopped or unreachable for \d+ s; rank \d waits for \d+ s in step \d+, at "
    assert re.match(f"error: rank 1 {waits}", first), first
    store = rf"the store of the run at {_ADDRESSES[0]}:{port} \(rank 0 or its launcher\)"
    assert re.match(f"error: {store} {waits}", second), second
