"""Measure how much CPU time plans take, in this checkout and in another commit.

    python -m benchmarks.planning_time --against 8a6cec9 --output docs/measurements/planning_time.md

Both sides run in turn, plan by plan, each in a process of its own. The least of `--repeats` runs
counts, in seconds of user and system time of the process and of those that it starts.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
PLANS = {  # name in the table -> words after `tune plan`
    "8B full, 4 ranks": ("--nproc_per_node", "4", "--config", "llama3/8B_full", "--device", "24GB"),
    "8B LoRA, 1 rank": ("--config", "llama3/8B_lora", "--device", "24GB"),
    "8B QLoRA, 1 rank": ("--config", "llama3/8B_qlora", "--device", "24GB"),
    "8B full compiled, 4 ranks": (
        "--nproc_per_node", "4", "--config", "llama3/8B_full", "--device", "24GB", "compile=true",
    ),
    "8B full, 4-stage pipeline": (
        "--nproc_per_node", "4", "--config", "llama3/8B_full", "--device", "24GB", "parallel.pipeline=4",
        "parallel.pipeline_schedule=zbv", "gradient_accumulation_steps=16",
    ),
    "70B full, 8 ranks": ("--nproc_per_node", "8", "--config", "llama3/70B_full", "--device", "h100"),
    "70B QLoRA, 2 ranks": ("--nproc_per_node", "2", "--config", "llama3/70B_qlora", "--device", "24GB"),
    "Gemma 2 2B full, 8192 tokens": ("--config", "gemma2/2B_full", "--device", "24GB", "max_seq_len=8192"),
}  # fmt: skip

PAGE = """# CPU time of plans

Made by `python -m benchmarks.planning_time {options}`, torch {torch}: seconds of CPU time from the start of the
process to its last line, the least of {repeats}, processes that it starts included. Before is commit `{against}`,
measured in the same run.

| plan | before | after | ratio |
|---|--:|--:|--:|
{rows}
"""


def main(argv: list[str] | None = None) -> int:
    """Measure each plan, print its row, and write the page if asked to."""
    parser = argparse.ArgumentParser(description="Measure how much CPU time plans take.")
    parser.add_argument("--against", default="", metavar="COMMIT")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--only", nargs="*", default=list(PLANS), choices=list(PLANS), metavar="PLAN"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    rows = []
    with check_out(arguments.against) as before:
        for name in arguments.only:
            folders = [before, REPOSITORY] if before else [REPOSITORY]
            least_seconds: dict[Path, float] = {}
            for _ in range(arguments.repeats):
                for folder in folders:
                    seconds = measure_seconds(folder, PLANS[name])
                    least_seconds[folder] = min(seconds, least_seconds.get(folder, seconds))
            after_seconds = least_seconds[REPOSITORY]
            before_cell = ratio_cell = "-"
            if before:
                before_cell = f"{least_seconds[before]:.1f}"
                ratio_cell = f"{after_seconds / least_seconds[before]:.2f}"
            rows.append(f"| {name} | {before_cell} | {after_seconds:.1f} | {ratio_cell} |")
            print(rows[-1], flush=True)
    options = f"--against {arguments.against}" if arguments.against else ""
    page = PAGE.format(
        options=options,
        torch=torch.__version__,
        repeats=arguments.repeats,
        against=arguments.against or "none",
        rows="\n".join(rows),
    )
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    return 0


@contextmanager
def check_out(commit: str) -> Iterator[Path | None]:
    """Yield a folder with the files of a commit, a git worktree that is removed; None for "".

    Raises CalledProcessError if git does not have the commit.
    """
    if not commit:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "before"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run(
            [*git, "add", "--detach", str(checkout), commit], check=True, capture_output=True
        )
        try:
            yield checkout
        finally:
            subprocess.run(
                [*git, "remove", "--force", str(checkout)], check=True, capture_output=True
            )


def measure_seconds(folder: Path, words: tuple[str, ...]) -> float:
    """Return the CPU time of `tune plan` with the code in a folder, in seconds.

    Raises SystemExit with its output's end if the command fails.
    """
    command = [
        sys.executable,
        "-c",
        "import sys; from recipe_lib.cli.main import main; sys.exit(main(sys.argv[1:]))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    # RUSAGE_CHILDREN sums all children that have ended, so the difference is this command's.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "plan", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):  # fits, or does not
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
