"""Compare planned peaks of runs with `compile=true` with those that torch's profiler counts.

Run `python -m benchmarks.compiled_plans --output docs/measurements/compiled_plans.md`. The runs are
those of tests/plan/test_compiled_runs.py, on a CPU: each of CASES is a recipe with overrides, on
one rank or two, of a model of two layers.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from tests.plan.test_compiled_runs import CASES, compared

PAGE = """# Planned and measured memory of compiled layers

Made by `python -m benchmarks.compiled_plans --output docs/measurements/compiled_plans.md` on a \
CPU, torch {torch}.

Peak of a step after the first on rank 0, in bytes, of a Llama of two layers of width 32, 2 \
sequences of 64 tokens a
micro-batch, fp32 where nothing else is said. Planned: the module that inductor writes, run on the \
simulated device with
kernels that do nothing. Measured: the run itself, every allocation and release of torch's CPU \
allocator as its
profiler counts them, but for what gloo takes for itself. Planned is a little more, since a device \
gets its batches by a
copy, or a little less, where a CPU's state of random numbers is kept, 5,056 bytes. No run with \
`parallel.tensor` is
among them: its collectives' tensors are released by threads of gloo that the profiler does not \
follow.

| run | ranks | overrides | planned | measured | error |
|---|--:|---|--:|--:|--:|
{rows}

{summary}
"""


def main(argv: list[str] | None = None) -> int:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(
        description="Compare planned peaks of compiled runs with those that torch counts."
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="RUN"
    )
    arguments = parser.parse_args(argv)
    rows = []
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            planned, measured = compared(name, Path(folder))  # bytes
            errors.append(planned / measured - 1)
            ranks, _, *overrides = CASES[name]
            settings = f"`{' '.join(overrides)}`" if overrides else ""
            rows.append(
                f"| {name} | {ranks} | {settings} | {planned:,} | {measured:,} |"
                f" {errors[-1]:+.2%} |"
            )
            print(rows[-1], flush=True)
    worst_error = max(errors, key=abs)
    mean_error = sum(map(abs, errors)) / len(errors)
    summary = (
        f"{len(errors)} runs: mean of the errors' amounts {mean_error:.2%}, the worst"
        f" {worst_error:+.2%}."
    )
    page = PAGE.format(torch=torch.__version__, rows="\n".join(rows), summary=summary)
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    else:
        print(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
