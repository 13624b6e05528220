"""What a pipeline's ranks hold: ours against theory, and beside torch's own stages and schedules in
the same run.

    python benchmarks/pp_memory.py --output docs/measurements/pp_memory.md

A small decoder goes through pipelines of gloo processes on the CPU; every storage is followed from
the operator that makes it until it is gone. Parameters and their gradients are not counted. No time
is measured. The section of a 7B is planned, see pp_7b.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch.distributed as dist  # noqa: E402

from benchmarks.pp_7b import format_section  # noqa: E402
from benchmarks.pp_stock import run_stock  # noqa: E402
from benchmarks.pp_traced import (  # noqa: E402
    build_config,
    build_small_spec,
    compute_expected_held,
    compute_expected_most,
    count_boundary_bytes,
    run_ours,
)
from recipe_lib.config.mesh import SCHEDULES  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402

RANKS, LAYERS, COUNT = 2, 8, 8
MODES = ("none", "full")
Job = tuple[str, str]
JOBS: list[Job] = [(schedule, mode) for mode in MODES for schedule in SCHEDULES]

PAGE = """# What the ranks of a pipeline hold

Made by `python benchmarks/pp_memory.py --output docs/measurements/pp_memory.md`: {layers} layers of a small decoder
(b = 2, s = 24, d = 32, fp32) on {ranks} gloo processes, {count} micro-batches, one training step after a first one,
ours and torch {torch}'s `PipelineStage` with its schedule classes in the same run. Parameters and gradients are not
counted. A tensor between two stages has {boundary} bytes.

- **ours, torch**: the most bytes alive at any operator. **theory**: `recipe_lib.parallel.pipeline.simulation`,
  from the sizes of a stage by formula, what one action needs for itself measured on a stage alone, and the schedule's
  list. What is held after each action is compared with theory to the byte by
  `tests/parallel/pipeline/test_memory.py`, and here: a difference writes no page.
- **between steps**: bytes that are still alive after a step.
- **forwards**: for each layer and micro-batch, recomputation included, the most of all layers. Behind it how many more
  there are in the first step, where torch's stages learn shapes by running.

{tables}

torch's last stage computes logits and loss in its forward; ours in its backward, so that nothing of the vocabulary's
size waits. Here both are small. On a GPU the caching allocator rounds sizes and kernels need workspaces: not counted.

{section}"""


def _run_rank() -> list[list[dict[str, Any]]]:
    """Of each job: ours, torch's."""
    spec, found = build_small_spec(LAYERS), []
    for schedule, mode in JOBS:
        cfg = build_config(schedule, RANKS, COUNT, mode)
        ours = run_ours(cfg, spec, COUNT, peaks=True).as_dict()
        found.append([ours, run_stock(cfg, spec, COUNT, dist.get_rank()).as_dict()])
    return found


def _check(job: Job, rank: int, ours: dict[str, Any]) -> int:
    """The peak in theory. ValueError where what is held is not what theory says."""
    schedule, mode = job
    cfg, spec = build_config(schedule, RANKS, COUNT, mode), build_small_spec(LAYERS)
    for (name, held), (wanted, bytes_) in zip(
        ours["held"], compute_expected_held(cfg, spec, rank, COUNT), strict=True
    ):
        if held != bytes_ or name != wanted:
            raise ValueError(
                f"{schedule}, {mode}, rank {rank}: {held} bytes after {name}, {bytes_} in theory"
            )
    return compute_expected_most(cfg, spec, rank, COUNT)


def _build_row(job: Job, rank: int, ours: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    theory = _check(job, rank, ours)
    cells = [
        f"`{job[0]}`",
        str(rank),
        *(f"{size / 1024:.0f}" for size in (theory, ours["most"], stock["most"])),
    ]
    cells += [f"{found['most'] / theory:.2f}x" for found in (ours, stock)]
    cells += [f"{found['left'] / 1024:.0f}" for found in (ours, stock)]
    for found in (ours, stock):
        most, first = (max(found[step].values()) for step in ("forwards", "first"))
        cells.append(f"{most / COUNT:.2g} ({first - most:+d})")
    return cells


HEAD = [
    "schedule",
    "rank",
    "theory, KiB",
    "ours, KiB",
    "torch, KiB",
    "ours / theory",
    "torch / theory",
]
HEAD += ["ours between steps, KiB", "torch between steps, KiB", "forwards, ours", "forwards, torch"]


def page() -> str:
    """The page's text. ValueError where what a rank of ours holds is not what theory says."""
    import torch

    found = run_ranks(_run_rank, RANKS, timeout=1800.0)
    tables = []
    for mode in MODES:
        rows = []
        for number, job in enumerate(JOBS):
            if job[1] == mode:
                for rank in range(RANKS):
                    rows.append(_build_row(job, rank, *found[rank][number]))
                    print(mode, *rows[-1], flush=True)
        tables.append(f"## Activation checkpointing: {mode}\n\n{_format_table(HEAD, rows)}")
    version = torch.__version__.partition("+")[0]
    return PAGE.format(
        layers=LAYERS, ranks=RANKS, count=COUNT, boundary=count_boundary_bytes(), tables="\n\n".join(tables),
        torch=version, section=format_section(version),
    )  # fmt: skip


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Writes the page, or prints its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the page")
    arguments = parser.parse_args()
    text = page()
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
