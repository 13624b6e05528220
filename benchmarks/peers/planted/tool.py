"""What a tool has to tell so that faults can be planted under it."""

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

# No network, one thread: what is compared is what is said, and runs of a small model are no faster
# on more.
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
    """A tool in its own environment. environments: folder of virtual environments, one a tool."""

    name = ""  # of the environment's folder
    title = ""  # of the column
    packages: Sequence[Sequence[str]] = ()  # what its environment is made of, in order
    shown: Sequence[str] = ()  # packages whose versions are told
    metric = r"$^"  # regular expression of its lines of metrics
    told = ""  # what the tool was given, in a sentence for the page
    unable: dict[str, str] = {}  # by fault, why this tool is out of it

    def __init__(self, environments: Path):
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
        """Make the environment."""
        make_environment(self.environment, self.packages)

    def versions(self) -> dict[str, str]:
        """Read the versions of what is shown, as its own interpreter finds them."""
        code = (
            "import importlib.metadata as m, json, sys; "
            f"found = {{name: m.version(name) for name in {list(self.shown)!r}}}; "
            "print(json.dumps(found | {'python': sys.version.split()[0]}))"
        )
        result = run([self.python, "-c", code], Path.cwd(), ENVIRONMENT)
        return dict(json.loads(result.lines[-1][1])) if result.code == 0 else {}

    @abstractmethod
    def prepare(self, setup: Setup) -> list[str]:
        """Write the tool's config files into setup.folder.

        Returns the texts that the tool may show again.
        """

    @abstractmethod
    def command(self, setup: Setup) -> list[str]:
        """Return the documented command of the run."""

    @abstractmethod
    def losses(self, setup: Setup, result: Result) -> list[float]:
        """Return the loss of every optimizer step that the command did, in order."""

    def check(self, setup: Setup) -> list[str] | None:
        """Return the tool's command that looks at config or data without training.

        None: it has none for such faults.
        """
        return None

    def trained_text(self, setup: Setup) -> list[list[str]] | None:
        """Return the texts that are trained, pieces of each of the first rows.

        None: there is no way to ask.
        """
        return None

    def states(self, setup: Setup) -> list[Path]:
        """List the files and folders that hold states to go on from, finished or not."""
        return []

    def variables(self, setup: Setup) -> dict[str, str]:
        """Return the command's environment variables, over this process's."""
        cache = str(setup.folder / "cache")
        return ENVIRONMENT | {"HF_HOME": cache, "XDG_CACHE_HOME": cache}

    def remember(self, setup: Setup) -> None:
        """Look at the output folder before each command: what it holds is of earlier ones."""
        return

    def start(self, setup: Setup, command: Sequence[str], **options: Any) -> Result:
        """Run a command of the tool in the setup's folder.

        The folder's name (a fault's) is taken out of the output, as is the environment's.
        """
        self.remember(setup)
        result = run(["nice", "-n", "15", *command], setup.folder, self.variables(setup), **options)
        for path in (f"{setup.folder}/", str(setup.folder), f"{self.environment}/"):
            result.lines = [(at, line.replace(path, "")) for at, line in result.lines]
        return result


def make_environment(folder: Path, packages: Sequence[Sequence[str]]) -> None:
    """Make a virtual environment with the given packages, installed group by group.

    Raises CalledProcessError.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for group in packages:
        subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *group], check=True
        )


def run_json_script(tool: Tool, setup: Setup, script: Path, *arguments: str) -> Any:
    """Return what a script of ours prints as its last line, in the tool's environment.

    None if it fails.
    """
    result = tool.start(setup, [tool.python, str(script), *arguments])
    if result.code != 0:
        return None
    return json.loads(result.lines[-1][1])


def find_newest(paths: Sequence[Path]) -> Path | None:
    """Return the path that was made last."""
    return max(paths, key=lambda path: (os.path.getmtime(path), path.name), default=None)
