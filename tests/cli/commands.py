"""`tune` as a process of its own."""

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
    """This process's environment with recipe_lib importable; None removes a variable."""
    values = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in values.items() if value is not None}


def tune(
    *words: object, cwd: Path = ROOT, timeout: float = 120, **changes: str | None
) -> subprocess.CompletedProcess:
    """Runs `tune`; `changes` are to the environment. returncode, stdout, stderr (text)."""
    return subprocess.run(
        [*TUNE, *map(str, words)],
        cwd=cwd,
        env=build_environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def become_tune(*words: object, cwd: Path = ROOT, **changes: str | None) -> NoReturn:
    """Be `tune` in a fork of the test process, which has imported torch already, and end with its
    exit code.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = getattr(sys, f"__{name}__").errors
        setattr(sys, name, open(number, "w" if number else "r", errors=errors, closefd=False))
    code = 1
    try:
        os.chdir(cwd)
        variables = build_environment(**changes)
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = None  # by TMPDIR, anew
        if "huggingface_hub.constants" in sys.modules:
            importlib.reload(sys.modules["huggingface_hub.constants"])  # as the variables have them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger("tune").handlers.clear()
        code = main([str(word) for word in words])
    except BaseException:  # noqa: BLE001  (told, as Python tells it)
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
    """Start `tune` in a fork with these descriptors; without one for its input it reads nothing."""

    def begin() -> None:
        with open(os.devnull) as nothing:
            for number, descriptor in enumerate(
                (nothing.fileno() if stdin is None else stdin, stdout, stderr)
            ):
                os.dup2(descriptor, number)
        os.closerange(3, 1024)  # the other ends of pipes
        become_tune(*words, cwd=cwd, **changes)

    process = get_context("fork").Process(target=begin)
    process.start()
    return process


def tune_forked(
    *words: object, said: str = "", cwd: Path = ROOT, timeout: float = 120, **changes: str | None
) -> subprocess.CompletedProcess:
    """Run `tune` in a fork, which is soon there; said: on its input. As `tune` but for that."""
    with (
        tempfile.TemporaryFile("w+") as read,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        read.write(said)
        read.seek(0)
        streams = {"stdin": read.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        process = start_forked(*words, **streams, cwd=cwd, **changes)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{words}: not done after {timeout} s")
        written = []
        for file in (out, err):
            file.seek(0)
            written.append(file.read())
    return subprocess.CompletedProcess([str(word) for word in words], process.exitcode, *written)
