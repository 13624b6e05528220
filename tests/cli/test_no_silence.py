"""Under a pseudo-terminal every verb that works says so before it has worked for a second, and goes
on saying it.

Time here is the CPU seconds of the process, which a busy machine does not stretch.
"""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, TUNE, become_tune, build_environment

pytestmark = pytest.mark.slow

SILENT = 1.0  # CPU seconds
LONG = 6.0  # seconds after which it has been heard enough
DEMO = ["demo/full", "max_steps=2", "data.max_samples=200", "~validation.source"]


@dataclass
class Heard:
    """code: of the process, 0 for one that was stopped here. gaps: its CPU seconds between two
    outputs, from its start on. text: all that it said.
    """

    code: int
    gaps: list[float]
    text: str


def cpu_seconds(pid: int) -> float | None:
    """Of the process without its children; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def listen(words: list[str]) -> Heard:
    """Runs `tune` at a terminal of 80 columns, and notes when it says something; for some
    seconds.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    variables = build_environment(
        TERM="xterm-256color", CI=None, NO_COLOR=None, TUNE_VERBOSITY=None, COLUMNS=None
    )
    process = subprocess.Popen(
        [*TUNE, *words],
        cwd=ROOT,
        env=variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    used, gaps, parts = 0.0, list[float](), list[bytes]()
    end = time.monotonic() + LONG
    while not (stopped := time.monotonic() > end):
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        now = cpu_seconds(process.pid)
        gaps.append((used if now is None else now) - used)
        used += gaps[-1]
        parts.append(part)
    if stopped:
        os.killpg(process.pid, signal.SIGKILL)
    os.close(ours)
    code = process.wait(60)
    return Heard(0 if stopped else code, gaps, b"".join(parts).decode(errors="replace"))


WORK = {
    "run on two ranks": [
        "run",
        "--nproc_per_node",
        "2",
        *DEMO,
        "batch_size=16",
        "output_dir={tmp}/two",
    ],
    "plan --search": ["plan", "demo/full", "--search", "--fit", "2x24GB"],
    "data check": ["data", "check", "demo/full"],
}


@pytest.mark.parametrize("name", WORK)
def test_a_line_within_a_second_of_work(name: str, tmp_path: Path):
    heard = listen([word.format(tmp=tmp_path) for word in WORK[name]])
    assert heard.code == 0, heard.text
    assert heard.gaps[0] < SILENT, heard.text[:200]
    assert max(heard.gaps) < 2 * SILENT  # an import of torch may hold Python's lock for as long


def test_a_quiet_run_says_its_warnings_alone_and_in_color(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    pair = '{"prompt": "What is 1 + 1?", "completion": "2"}\n'
    rows.write_text(3 * pair + '{"prompt": "What is 1 + 2?"}\n', encoding="utf-8")
    data = [
        f"data.source={rows}",
        "data.on_invalid=skip",
        "batch_size=1",
        "gradient_accumulation_steps=1",
    ]
    words = [
        "run",
        "-q",
        "demo/full",
        "max_steps=1",
        "~validation.source",
        *data,
        f"output_dir={tmp_path}/out",
    ]
    process, ours = pty.fork()
    if process == 0:
        become_tune(
            *words, TERM="xterm-256color", CI=None, NO_COLOR=None, TUNE_VERBOSITY=None, COLUMNS=None
        )
    text = ""
    with suppress(OSError):  # Linux's way to say that the other end is closed
        while part := os.read(ours, 65536):
            text += part.decode()
    os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, text
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    yellow, plain = "\x1b[33m", "\x1b[0m"
    assert text.startswith(f"{yellow}warning: data: 1 of 4 samples is bad and was left out"), text
    said = text.replace("\r\n", "\n").rstrip("\n")
    assert said.endswith(plain) and said.count(yellow) == said.count("warning: "), text
    assert all(part.startswith("warning: ") for part in said.split(yellow)[1:]), text


def test_a_download_says_what_it_waits_for(tmp_path: Path):
    """A hub that does not answer for a while."""
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = threading.Event()

        def answer_late() -> None:
            connection, _ = server.accept()
            done.wait(3)
            connection.close()

        threading.Thread(target=answer_late, daemon=True).start()
        ours, theirs = pty.openpty()
        variables = build_environment(
            TERM="xterm-256color",
            HF_ENDPOINT=address,
            HF_HOME=str(tmp_path),
            HF_HUB_OFFLINE=None,
            no_proxy="127.0.0.1",
        )
        process = subprocess.Popen(
            [*TUNE, "download", "owner/name"],
            env=variables,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        first = os.read(ours, 65536).decode(errors="replace")
        assert "asking the hub" in first
        assert (cpu_seconds(process.pid) or 0) < SILENT
        done.set()
        process.kill()
        process.wait(30)
        os.close(ours)
