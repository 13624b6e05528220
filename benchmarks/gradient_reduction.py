"""What reducing gradients once a step saves and takes, planned: traffic, step and peak of each way
to share a model.

    python -m benchmarks.gradient_reduction --output docs/measurements/gradient_reduction.md

Every row is the plan of one command, which the page has. Nothing is measured.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_lib.files import replace_text
from recipe_lib.units import convert_to_gib

REPOSITORY = Path(__file__).resolve().parents[1]
ONCE, KEPT = "parallel.reduce_gradients=step", "parallel.reshard_after_forward=false"
VARIANTS = {
    "reduced with each micro-batch": (),
    "weights kept from forward to backward": (KEPT,),
    "reduced once a step": (ONCE,),
    "and weights gathered once a step (ZeRO-1)": (ONCE, KEPT),
    "the same, sums in fp32": (ONCE, KEPT, "parallel.accumulate_grad_in_fp32=true"),
}
DDP = {"whole models (`ddp`)": ("parallel.strategy=ddp",)}


@dataclass(frozen=True)
class Case:
    """A run to plan in every way. command: of `tune plan`, without what the ways add."""

    title: str
    command: tuple[str, ...]
    ways: dict[str, tuple[str, ...]]


CASES = (
    Case(
        "Llama 3.2 1B, 8 cards without peer access, 8 micro-batches of 2,048 tokens",
        ("--nproc_per_node", "8", "full_finetune_distributed", "--config", "llama3_2/1B_full", "--device", "rtx4090",
         "batch_size=1", "gradient_accumulation_steps=8"),
        VARIANTS | DDP,
    ),
    Case(
        "Llama 3.2 3B, the same",
        ("--nproc_per_node", "8", "full_finetune_distributed", "--config", "llama3_2/3B_full", "--device", "rtx4090",
         "batch_size=1", "gradient_accumulation_steps=8"),
        VARIANTS | DDP,
    ),
    Case(
        "Llama 2 7B on 16 H100 of two machines: pipeline 2, tensor 2, data 4, 32 micro-batches of 4 x 2,048 tokens",
        ("--nnodes", "2", "--nproc_per_node", "8", "full_finetune_distributed", "--config", "llama2/7B_full",
         "--device", "h100", "parallel.pipeline=2", "parallel.tensor=2", "batch_size=4", "max_seq_len=2048",
         "gradient_accumulation_steps=32"),
        VARIANTS,
    ),
)  # fmt: skip


def main() -> None:
    """Plans every case in every way and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    replace_text(
        parser.parse_args().output, build_page([(case, build_rows(case)) for case in CASES])
    )


def build_rows(case: Case) -> list[list[str]]:
    """Cells of a case's table."""
    found = []
    first: float | None = None
    for name, overrides in case.ways.items():
        plan = plan_case(case, overrides)
        heaviest = max(
            plan["rank_plans"], key=lambda rank: max(peak["active"] for peak in rank["peaks"])
        )
        active = max(peak["active"] for peak in heaviest["peaks"])
        data = [one for one in plan["communication"] if one["dim"].startswith("data_")]
        sent, calls = (
            sum(one["count"] * one["wire_bytes"] for one in data),
            sum(one["count"] for one in data),
        )
        step = plan["time"]["step"]
        first = first or step
        cells = [
            f"{convert_to_gib(active):.2f}",
            plan["verdict"],
            f"{calls:,}",
            f"{convert_to_gib(sent):.2f}",
            f"{step:.2f}",
        ]
        found.append([name, *cells, f"{first / step:.2f}"])
    return found


def plan_case(case: Case, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The plan, as JSON has it."""
    command = [
        sys.executable,
        "-m",
        "recipe_lib",
        "plan",
        *case.command,
        *overrides,
        "--json",
        "-",
        "--quiet",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def build_page(found: list[tuple[Case, list[list[str]]]]) -> str:
    """The document."""
    lines = [
        "# Gradients reduced once a step",
        "",
        (
            "`python -m benchmarks.gradient_reduction --output"
            " docs/measurements/gradient_reduction.md` writes this page: plans, nothing measured."
            " Each row is the command above its table, with what the row adds. Peaks are active GiB"
            " of the heaviest rank. Collectives and GiB sent are of one rank and one step, over the"
            " ranks that share or copy weights. Seconds are from data sheets, for ranking; the last"
            " column is the first row's over this one's."
        ),
    ]
    keys = ", ".join(
        f"{name}: `{' '.join(overrides)}`"
        for name, overrides in (VARIANTS | DDP).items()
        if overrides
    )
    lines += ["", f"What the rows add: {keys}."]
    for case, cells in found:
        lines += [
            "",
            f"## {case.title}",
            "",
            "```bash",
            f"tune plan {' '.join(case.command)}",
            "```",
            "",
        ]
        lines += [
            "| way | peak, GiB | verdict | collectives | sent, GiB | step, s | times faster |"
        ]
        lines += ["| --- | --: | --- | --: | --: | --: | --: |"]
        lines += [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
