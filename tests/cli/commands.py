"""`tune` as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TUNE = [sys.executable, "-m", "recipe_lib.cli.main"]


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with recipe_lib importable; None removes a variable."""
    values = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in values.items() if value is not None}


def tune(*words: object, cwd: Path = ROOT, timeout: float = 120, **changes: str | None) -> subprocess.CompletedProcess:
    """Runs `tune`; `changes` are to the environment. returncode, stdout, stderr (text)."""
    return subprocess.run(
        [*TUNE, *map(str, words)],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
