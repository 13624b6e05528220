"""Measure what a pipeline's ranks hold, against theory and beside torch's own stages.

    python benchmarks/pp_memory.py --output docs/measurements/pp_memory.md

A small decoder goes through pipelines of gloo processes on the CPU, ours (`pp_traced.py`) and
torch's (`pp_stock.py`). Theory is what our ranks should hold, by the schedule and formulas.
Parameters and gradients are not counted. The section of a 7B is planned, by `pp_7b.py`.
"""

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for imports of `benchmarks` and `tests`, run as a file

import torch.distributed as dist  # noqa: E402

from benchmarks.pp_7b import format_section  # noqa: E402
from benchmarks.pp_stock import run_stock  # noqa: E402
from benchmarks.pp_traced import (  # noqa: E402
    TracedStep,
    build_config,
    build_small_spec,
    compute_expected_alive,
    compute_expected_peak,
    count_boundary_bytes,
    run_ours,
)
from benchmarks.tables import format_markdown_table  # noqa: E402
from recipe_lib.config.mesh import SCHEDULES  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402

RANKS = 2  # places in the pipeline
LAYERS = 8
COUNT = 8  # micro-batches of a step
MODES = ("none", "full")  # of activation checkpointing
Job = tuple[str, str]  # schedule, mode
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


def _run_rank() -> list[tuple[TracedStep, TracedStep]]:
    """Measure this rank in every job; return (our step, torch's) for each."""
    spec = build_small_spec(LAYERS)
    steps = []
    for schedule, mode in JOBS:
        cfg = build_config(schedule, ranks=RANKS, count=COUNT, checkpointing=mode)
        ours = run_ours(cfg, spec, COUNT, peaks=True)
        stock = run_stock(cfg, spec=spec, count=COUNT, rank=dist.get_rank())
        steps.append((ours, stock))
    return steps


def _check_against_theory(job: Job, rank: int, ours: TracedStep) -> int:
    """Return the peak in theory, in bytes.

    Raises ValueError if the bytes after an action of our step are not those of theory.
    """
    schedule, mode = job
    cfg = build_config(schedule, ranks=RANKS, count=COUNT, checkpointing=mode)
    spec = build_small_spec(LAYERS)
    expected = compute_expected_alive(cfg, spec=spec, rank=rank, count=COUNT)
    for (name, alive), (expected_name, expected_alive) in zip(
        ours.alive_after_action, expected, strict=True
    ):
        if alive != expected_alive or name != expected_name:
            raise ValueError(
                f"{schedule}, {mode}, rank {rank}: {alive} bytes after {name}, {expected_alive} in"
                " theory"
            )
    return compute_expected_peak(cfg, spec=spec, rank=rank, count=COUNT)


def build_row(job: Job, rank: int, ours: TracedStep, stock: TracedStep) -> list[str]:
    """Return the cells under HEAD, from our step of a rank and torch's.

    Raises ValueError if the bytes after an action of our step are not those of theory.
    """
    theory = _check_against_theory(job, rank, ours)
    cells = [f"`{job[0]}`", str(rank)]
    cells += [f"{size / 1024:.0f}" for size in (theory, ours.peak, stock.peak)]
    cells += [f"{step.peak / theory:.2f}x" for step in (ours, stock)]
    cells += [f"{step.alive_after_step / 1024:.0f}" for step in (ours, stock)]
    for step in (ours, stock):
        most_forwards = max(step.forwards.values())
        most_at_first = max(step.first_forwards.values())
        cells.append(f"{most_forwards / COUNT:.2g} ({most_at_first - most_forwards:+d})")
    return cells


HEAD = [
    "schedule",
    "rank",
    "theory, KiB",
    "ours, KiB",
    "torch, KiB",
    "ours / theory",
    "torch / theory",
    "ours between steps, KiB",
    "torch between steps, KiB",
    "forwards, ours",
    "forwards, torch",
]


def build_page() -> str:
    """Measure everything and return the page.

    Raises ValueError if a rank of ours does not hold what theory says.
    """
    import torch

    steps = run_ranks(_run_rank, RANKS, timeout=1800.0)
    tables = []
    for mode in MODES:
        rows = []
        for number, job in enumerate(JOBS):
            if job[1] != mode:
                continue
            for rank in range(RANKS):
                ours, stock = steps[rank][number]
                rows.append(build_row(job, rank=rank, ours=ours, stock=stock))
                print(mode, *rows[-1], flush=True)
        tables.append(f"## Activation checkpointing: {mode}\n\n{format_markdown_table(HEAD, rows)}")
    version = torch.__version__.partition("+")[0]
    return PAGE.format(
        layers=LAYERS,
        ranks=RANKS,
        count=COUNT,
        boundary=count_boundary_bytes(),
        tables="\n\n".join(tables),
        torch=version,
        section=format_section(version),
    )


def main() -> None:
    """Print the rows, and write the page where `--output` names one."""
    parser = argparse.ArgumentParser(description="Measure what the ranks of a pipeline hold.")
    parser.add_argument("--output", type=Path, help="the page")
    arguments = parser.parse_args()
    text = build_page()
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
