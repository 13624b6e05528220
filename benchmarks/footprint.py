"""Measure packages, MB and CPU seconds of training tools, ours beside others.

Run `python -m benchmarks.footprint --environment TOOL=VENV ... --output FILE` on a machine that
does nothing else. TOOL is a key of HELP, perhaps with a remark: `tune-recipes (no compile)`. VENV
is a virtual environment in which nothing but that tool is installed.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

# Tool -> command that prints its help.
HELP = {
    "tune-recipes": ["tune", "--help"],
    "trl": ["trl", "--help"],
    "torchtune": ["tune", "--help"],
    "litgpt": ["litgpt", "--help"],
    "llamafactory": ["llamafactory-cli", "help"],
    "axolotl": ["axolotl", "--help"],
}
TRAINING = {  # tool -> what a training process imports
    "tune-recipes": (
        "recipe_lib.training, recipe_lib.parallel, recipe_lib.parallel.tensor,"
        " recipe_lib.checkpoint.resumable_state"
    ),
    "trl": "trl; trl.SFTTrainer",
    "torchtune": "torchtune.training, torchtune.models.llama3, torchtune.datasets",
    "litgpt": "litgpt.finetune.full",
    "llamafactory": "llamafactory.train.sft.workflow",
    "axolotl": "axolotl.train",
}
# Run by each environment's Python. Prints [number of packages, bytes of the files that they list,
# bytes without torch's and CUDA's, torch's version].
SIZES = """
import importlib.metadata as metadata, json, os
files, names = {}, []
for one in metadata.distributions():
    name = one.metadata["Name"].lower()
    names.append(name)
    of_torch = name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))
    files.update({str(one.locate_file(path)): of_torch for path in one.files or ()})
sizes = {path: os.path.getsize(path) for path in files if os.path.isfile(path)}
beside = sum(size for path, size in sizes.items() if not files[path])
print(json.dumps([len(set(names)), sum(sizes.values()), beside, metadata.version("torch")]))
"""
TEXT = """# Footprint

`{command}`, each tool in a virtual environment of its own. CPU seconds,
user and system, median of {repeats}; {machine}.

| | packages | MB | MB beside torch | torch | `--help`, CPU s | import of what trains, CPU s |
|---|---:|---:|---:|---|---:|---:|
{lines}

Packages and MB are all that the environment holds, torch (and pip) included; beside torch: \
without torch, Triton and
CUDA's libraries, which a build of torch for CPUs does not bring.
"""


def main() -> None:
    """Measure each environment and write the page."""
    parser = argparse.ArgumentParser(
        description="Measure packages, MB and CPU seconds of training tools, ours beside others.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--environment", action="append", required=True, metavar="TOOL=VENV")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    lines = []
    for word in arguments.environment:
        tool, _, folder = word.partition("=")
        python = Path(folder) / "bin" / "python"
        sizes = subprocess.run([python, "-c", SIZES], capture_output=True, check=True).stdout
        num_packages, size, size_beside_torch, torch_version = json.loads(sizes)
        name = tool.split()[0]  # without the remark
        program, *words = HELP[name]
        help_seconds = measure_seconds(
            [str(Path(folder) / "bin" / program), *words], arguments.repeats
        )
        import_seconds = measure_seconds(
            [str(python), "-c", f"import {TRAINING[name]}"], arguments.repeats
        )
        cells = [
            tool,
            str(num_packages),
            f"{size / 1e6:.0f}",
            f"{size_beside_torch / 1e6:.0f}",
            torch_version,
            f"{help_seconds:.2f}",
            f"{import_seconds:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    arguments.output.write_text(
        TEXT.format(
            command="python -m benchmarks.footprint --environment TOOL=VENV ... --output FILE",
            repeats=arguments.repeats,
            machine=f"{platform.machine()}, Python {platform.python_version()}",
            lines="\n".join(lines),
        )
    )


def measure_seconds(command: list[str], repeats: int) -> float:
    """Return the median CPU seconds (user and system) of a command and its children.

    Exits with the command's errors if it fails.
    """
    seconds = []
    for _ in range(repeats + 1):
        # The usage of all children that have ended, so that the difference is this one's.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            sys.exit(f"{' '.join(command)}: {completed.stderr}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(seconds[1:])  # the first one reads files from the disk


if __name__ == "__main__":
    main()
