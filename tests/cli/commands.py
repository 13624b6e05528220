"""Run `tune` in a process of its own: `tune(...)` starts Python, `tune_forked(...)` forks.

A fork has torch imported already and saves seconds; use `tune` where the start of the process
itself is tested.
"""

import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from recipe_lib.cli.main import main

ROOT = Path(__file__).parent.parent.parent
TUNE = [sys.executable, "-m", "recipe_lib.cli.main"]


def build_environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment with recipe_lib importable.

    changes: variables to set, or to remove (None).
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in variables.items() if value is not None}


def tune(
    *words: object, cwd: Path = ROOT, timeout: float = 120, **changes: str | None
) -> subprocess.CompletedProcess:
    """Run `tune` and return its exit code and what it wrote, as text.

    timeout: seconds. changes: variables of the environment to set, or to remove (None).
    """
    return subprocess.run(
        [*TUNE, *map(str, words)],
        cwd=cwd,
        env=build_environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def become_tune(*words: object, cwd: Path = ROOT, **changes: str | None) -> NoReturn:
    """Run `tune` in this process, a fork of the test process, and end with its exit code."""
    # pytest has replaced the streams, the descriptors are those that the fork was given.
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        errors = getattr(sys, f"__{name}__").errors
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(descriptor, mode, errors=errors, closefd=False))
    code = 1
    try:
        os.chdir(cwd)
        variables = build_environment(**changes)
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = None  # so that tempfile reads TMPDIR again
        if "huggingface_hub.constants" in sys.modules:
            importlib.reload(sys.modules["huggingface_hub.constants"])  # which reads variables
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger("tune").handlers.clear()  # one writes to the test process's stream
        code = main([str(word) for word in words])
    except BaseException:  # noqa: BLE001  (its traceback is written, as Python does at an exit)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def start_forked(
    *words: object,
    stdin: int | None = None,
    stdout: int,
    stderr: int,
    cwd: Path = ROOT,
    **changes: str | None,
) -> BaseProcess:
    """Start `tune` in a fork with these file descriptors; without `stdin` it reads nothing."""

    def begin() -> None:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno() if stdin is None else stdin, 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
        os.closerange(3, 1024)  # the test's ends of pipes, which would never be closed
        become_tune(*words, cwd=cwd, **changes)

    process = get_context("fork").Process(target=begin)
    process.start()
    return process


def tune_forked(
    *words: object, said: str = "", cwd: Path = ROOT, timeout: float = 120, **changes: str | None
) -> subprocess.CompletedProcess:
    """Run `tune` in a fork, with `said` as its standard input; otherwise like `tune`.

    Raises AssertionError if it has not ended after `timeout` seconds.
    """
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        stdin.write(said)
        stdin.seek(0)
        process = start_forked(
            *words,
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            cwd=cwd,
            **changes,
        )
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{words}: not done after {timeout} s")
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(
            args=[str(word) for word in words],
            returncode=process.exitcode,
            stdout=stdout.read(),
            stderr=stderr.read(),
        )
