"""Plan what reducing gradients once a step saves and takes: traffic, step and peak.

Run `python -m benchmarks.gradient_reduction --output docs/measurements/gradient_reduction.md`. A
case is a command of `tune plan`; a variant is a set of overrides, and a row of the page. Nothing is
measured.
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
ONCE = "parallel.reduce_gradients=step"
KEPT = "parallel.reshard_after_forward=false"
# Name on the page -> overrides.
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
    """Hold a run that is planned with the overrides of every variant."""

    title: str
    command: tuple[str, ...]  # of `tune plan`, without what the variants add
    variants: dict[str, tuple[str, ...]]  # name -> overrides


CASES = (
    Case(
        "Llama 3.2 1B, 8 cards without peer access, 8 micro-batches of 2,048 tokens",
        (
            "--nproc_per_node",
            "8",
            "full_finetune_distributed",
            "--config",
            "llama3_2/1B_full",
            "--device",
            "rtx4090",
            "batch_size=1",
            "gradient_accumulation_steps=8",
        ),
        VARIANTS | DDP,
    ),
    Case(
        "Llama 3.2 3B, the same",
        (
            "--nproc_per_node",
            "8",
            "full_finetune_distributed",
            "--config",
            "llama3_2/3B_full",
            "--device",
            "rtx4090",
            "batch_size=1",
            "gradient_accumulation_steps=8",
        ),
        VARIANTS | DDP,
    ),
    Case(
        "Llama 2 7B on 16 H100 of two machines: pipeline 2, tensor 2, data 4, 32 micro-batches of"
        " 4 x 2,048 tokens",
        (
            "--nnodes",
            "2",
            "--nproc_per_node",
            "8",
            "full_finetune_distributed",
            "--config",
            "llama2/7B_full",
            "--device",
            "h100",
            "parallel.pipeline=2",
            "parallel.tensor=2",
            "batch_size=4",
            "max_seq_len=2048",
            "gradient_accumulation_steps=32",
        ),
        VARIANTS,
    ),
)


def main() -> None:
    """Plan every variant of every case and write the page."""
    parser = argparse.ArgumentParser(
        description="Plan what reducing gradients once a step saves and takes."
    )
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    tables = [(case, build_rows(case)) for case in CASES]
    replace_text(output, build_page(tables))


def build_rows(case: Case) -> list[list[str]]:
    """Plan a case's variants and return the cells of its table, a list for each."""
    rows = []
    first_step: float | None = None  # seconds, of the first variant
    for name, overrides in case.variants.items():
        plan = plan_case(case, overrides)
        rank_peaks = [max(peak["active"] for peak in rank["peaks"]) for rank in plan["rank_plans"]]
        # Those over ranks that share or copy weights; tensor and pipeline ranks are left out.
        data_collectives = [
            collective
            for collective in plan["communication"]
            if collective["dim"].startswith("data_")
        ]
        calls = sum(collective["count"] for collective in data_collectives)
        sent = sum(
            collective["count"] * collective["wire_bytes"] for collective in data_collectives
        )
        step = plan["time"]["step"]
        first_step = first_step or step
        row = [
            name,
            f"{convert_to_gib(max(rank_peaks)):.2f}",
            plan["verdict"],
            f"{calls:,}",
            f"{convert_to_gib(sent):.2f}",
            f"{step:.2f}",
            f"{first_step / step:.2f}",
        ]
        rows.append(row)
    return rows


def plan_case(case: Case, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the plan of a case with overrides, as `tune plan --json` prints it.

    Raises SystemExit if the command fails.
    """
    command = [sys.executable, "-m", "recipe_lib", "plan", *case.command, *overrides]
    command += ["--json", "-", "--quiet"]
    completed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if completed.returncode not in (0, 3):  # 3: it does not fit
        raise SystemExit(f"{' '.join(command)}: {completed.stderr}")
    plan: dict[str, Any] = json.loads(completed.stdout)
    return plan


def build_page(tables: list[tuple[Case, list[list[str]]]]) -> str:
    """Return the page as Markdown. tables: each case with the cells of `build_rows`."""
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
    settings = []
    for name, overrides in (VARIANTS | DDP).items():
        if overrides:
            settings.append(f"{name}: `{' '.join(overrides)}`")
    lines += ["", f"What the rows add: {', '.join(settings)}."]
    for case, rows in tables:
        lines += ["", f"## {case.title}", ""]
        lines += ["```bash", f"tune plan {' '.join(case.command)}", "```", ""]
        lines += [
            "| way | peak, GiB | verdict | collectives | sent, GiB | step, s | times faster |"
        ]
        lines += ["| --- | --: | --- | --: | --: | --: | --: |"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
