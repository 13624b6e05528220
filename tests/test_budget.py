"""The budget of `make test`: seconds of CPU are added up by file, children's too; a file over it
fails the session.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.house.files import ROOT

BUSY = """
import os, time
def work(seconds):
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass
def test_here():
    work(0.12)
def test_in_a_child():
    child = os.fork()
    if child == 0:
        work(0.12)
        os._exit(0)
    os.waitpid(child, 0)
"""


def run_pytest(folder: Path, budget: float) -> subprocess.CompletedProcess[str]:
    """Run pytest on the folder's files, in a fresh process, with no plugins but the budget and
    xdist.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.budget",
        "-p",
        "xdist",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    command += [
        "--rootdir",
        str(folder),
        "-c",
        "/dev/null",
        "-n",
        "1",
        "--file-budget",
        str(budget),
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_a_file_over_the_budget_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text("def test_nothing():\n    pass\n")
    done = run_pytest(tmp_path, budget=0.2)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert (
        done.returncode == 1
        and line.startswith("error: test_busy.py: found ")
        and "at most 0.2" in line
    ), line
