"""Define a tool, a training program, that faults are planted under, and run its commands.

Each tool has a subclass of `Tool` (`ours.py`, `trl.py`, ...), which spells a `Setup`, a run in no
tool's words, as the tool's config and command. `playing.py` and `states.py` run them.
"""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.planted.ground import Setup
from benchmarks.peers.planted.running import Result, run

# Variables of all commands. No network. One thread: runs of a small model are no faster on more.
# Wide plain lines: messages are searched line by line.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "400",
    "WANDB_MODE": "disabled",
    "NO_COLOR": "1",
    "TERM": "dumb",
}


class Tool(ABC):
    """A training program in a virtual environment of its own."""

    name = ""  # of the environment's folder
    title = ""  # of its column on the page
    packages: Sequence[Sequence[str]] = ()  # groups of pip's arguments, installed in order
    shown: Sequence[str] = ()  # packages whose versions the page has
    metric = r"$^"  # regular expression of its lines of metrics; this one matches no text
    told = ""  # what the tool was given, in a sentence for the page
    unable: dict[str, str] = {}  # by fault's name, why it cannot be planted under this tool

    def __init__(self, environments: Path):
        """environments: folder of virtual environments, one for each tool."""
        self.environment = environments / self.name

    @property
    def python(self) -> str:
        """Return the interpreter of its environment."""
        return str(self.environment / "bin" / "python")

    @property
    def installed(self) -> bool:
        """Return True if the environment is there."""
        return Path(self.python).exists()

    def install(self) -> None:
        """Make the environment. Raises CalledProcessError if venv or pip fails."""
        make_environment(self.environment, self.packages)

    def read_versions(self) -> dict[str, str]:
        """Return the versions of `shown` and of Python, as the tool's interpreter finds them.

        {} if one is not installed.
        """
        code = (
            "import importlib.metadata as m, json, sys; "
            f"found = {{name: m.version(name) for name in {list(self.shown)!r}}}; "
            "print(json.dumps(found | {'python': sys.version.split()[0]}))"
        )
        result = run([self.python, "-c", code], Path.cwd(), ENVIRONMENT)
        return dict(json.loads(result.lines[-1][1])) if result.code == 0 else {}

    @abstractmethod
    def prepare(self, setup: Setup) -> list[str]:
        """Write the tool's config files into setup.folder, and return their texts.

        A tool may print them; such lines do not count as messages on a fault.
        """

    @abstractmethod
    def build_command(self, setup: Setup) -> list[str]:
        """Return the documented command of the run."""

    @abstractmethod
    def read_losses(self, setup: Setup, result: Result) -> list[float]:
        """Return the loss of every optimizer step that the command did, in order.

        result: of the command that ran last, see `remember`.
        """

    def build_check_command(self, setup: Setup) -> list[str] | None:
        """Return the tool's command that checks config or data without training, None without."""
        return None

    def read_label_texts(self, setup: Setup) -> list[list[str]] | None:
        """Return the texts of the label tokens of each of the first rows, token by token.

        None: the tool has no way to ask, or the config fails.
        """
        return None

    def list_states(self, setup: Setup) -> list[Path]:
        """List the files and folders of states to resume from, finished or not, oldest first."""
        return []

    def build_environment(self, setup: Setup) -> dict[str, str]:
        """Return the environment variables that are set over this process's.

        The caches lie in the setup's folder.
        """
        cache = str(setup.folder / "cache")
        return ENVIRONMENT | {"HF_HOME": cache, "XDG_CACHE_HOME": cache}

    def remember(self, setup: Setup) -> None:
        """Note what the output folder holds before a command, for `read_losses` to leave out."""
        return

    def start(self, setup: Setup, command: Sequence[str], **options: Any) -> Result:
        """Run a command of the tool in the setup's folder. options: of `running.run`.

        Both folders' paths are taken out of the output: that of a setup has the fault's name, which
        must not be found as the tool's word for it.
        """
        self.remember(setup)
        result = run(
            ["nice", "-n", "15", *command], setup.folder, self.build_environment(setup), **options
        )
        for path in (f"{setup.folder}/", str(setup.folder), f"{self.environment}/"):
            result.lines = [(at, line.replace(path, "")) for at, line in result.lines]
        return result


def make_environment(folder: Path, packages: Sequence[Sequence[str]]) -> None:
    """Make a virtual environment with the given packages, installed group by group.

    Raises CalledProcessError if venv or pip fails.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for group in packages:
        subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *group], check=True
        )


def run_json_script(tool: Tool, setup: Setup, script: Path, *arguments: str) -> Any:
    """Run a script of ours by the tool's interpreter; return its last line, read as JSON.

    None if it fails.
    """
    result = tool.start(setup, [tool.python, str(script), *arguments])
    if result.code != 0:
        return None
    return json.loads(result.lines[-1][1])


def find_newest(paths: Sequence[Path]) -> Path | None:
    """Return the path that was changed last; None for no paths."""
    return max(paths, key=lambda path: (os.path.getmtime(path), path.name), default=None)
