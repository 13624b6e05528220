"""Plan the runs of which other programs have published memory figures, and write both as a page.

    python benchmarks/planner_replications.py --output docs/measurements/planner.md

A row is one published run. With a `theirs` stack the other program is planned, as
`planner_stacks.py` imitates it, which checks the planner; with `ours`, what our recipe would take.
Four minutes of a CPU; no GPU, no weights.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for imports of `benchmarks` and `tests`, run as a file

from benchmarks import planner_865, planner_megatron  # noqa: E402
from benchmarks.planner_rows import OURS, Group, Row, Run, compute_error, format_table  # noqa: E402
from benchmarks.planner_stacks import FSDP2, PIECES, RECIPE, Stack  # noqa: E402

GOAL = 0.01  # largest error, relative to the published figure, of a `theirs` row with a goal


def run_3b(
    *more: str, chunks: int = 8, config: str = "llama3_2/3B_full", recipe: str = RECIPE
) -> Run:
    """Return a run of Llama 3.2 3B on one GPU, two packed sequences a step.

    more: further overrides. chunks: of the tokens, whose logits the loss makes one after another.
    """
    settings = (
        "max_seq_len=4096 batch_size=2 gradient_accumulation_steps=1 clip_grad_norm=null"
        f" data.packing=true memory.loss_chunks={chunks}"
    )
    return Run(
        config,
        ranks=1,
        device="a100-80gb",
        tokens=4096,
        overrides=(*settings.split(), *more),
        recipe=recipe,
    )


def run_titan(ranks: int) -> Run:
    """Return torchtitan's run of Llama 3.1 8B, two sequences of 8192 tokens a rank."""
    settings = (
        "max_seq_len=8192 batch_size=2 gradient_accumulation_steps=1 memory.loss_chunks=1 "
        "memory.activation_checkpointing=selective parallel.fsdp_wrap_policy=layers"
    )
    return Run(
        "llama3_1/8B_full",
        ranks=ranks,
        device="h100",
        tokens=8192,
        overrides=tuple(settings.split()),
    )


# The imitated stacks, see `Stack`: torchtune's with its loss whole and in pieces, torchtitan's.
TUNE_3B = Stack(logits="until backward", norms=True, expanded_keys=True)
TUNE_3B_CHUNKED = replace(TUNE_3B, logits=PIECES)
TITAN = Stack(
    sharding=FSDP2,
    logits="bf16 until backward",
    norms=True,
    expanded_keys=True,
    saved_matmuls=True,
    mixed=True,
    last_layer_kept=True,
)


def build_ladder_3b() -> Iterator[Row]:
    """Yield the lines of torchtune's table of optimizations, in their stack and in ours."""
    # Overrides; each tuple adds to the one before.
    plain = "memory.activation_checkpointing=none"
    full = ("memory.activation_checkpointing=full", "compile=true")
    backward = (*full, "memory.optimizer_in_backward=true")
    offloaded = (*backward, "memory.activation_offload=true")
    adapters = (
        *full,
        "memory.activation_offload=true",
        "lora.rank=64",
        "lora.target_modules=[q,v,o,gate,up,down]",
    )
    lora = "lora_finetune_distributed"
    # (line of the table, most active GiB, run).
    for name, published, run in (
        ("packed", 60.0, run_3b(plain, chunks=1)),
        ("+ compile", 51.0, run_3b(plain, "compile=true", chunks=1)),
        ("+ chunked cross-entropy", 42.9, run_3b(plain, "compile=true")),
        ("+ activation checkpointing", 24.9, run_3b(*full)),
        ("+ optimizer in backward", 23.1, run_3b(*backward)),
        ("+ activation offloading", 21.8, run_3b(*offloaded)),
        ("+ 8-bit AdamW", 17.6, run_3b(*offloaded, "optimizer.state_bits=8")),
        ("LoRA", 8.5, run_3b(*adapters, config="llama3_2/3B_lora", recipe=lora)),
        ("QLoRA", 4.6, run_3b(*adapters, config="llama3_2/3B_qlora", recipe=lora)),
    ):
        # From chunked cross-entropy on, their loss works in pieces.
        theirs = TUNE_3B if name in ("packed", "+ compile") else TUNE_3B_CHUNKED
        yield Row(
            name, whose="theirs", run=run, stack=theirs, published={"active": published}, goal=True
        )
        yield Row(name, whose="ours", run=run, stack=OURS, published={"active": published})


def list_groups() -> Iterator[Group]:
    """Yield the sources whose figures are replicated, each with its rows and the text around it."""
    yield planner_865.build_group()
    yield planner_megatron.build_group()
    yield Group(
        "torchtune: Llama 3.2 3B, full, on one A100",
        source="README of torchtune, the table of optimizations: bf16, AdamW, 2 packed rows of 4096"
        " tokens; every row keeps what the rows above it have switched on, but for LoRA and QLoRA,"
        " which step after backward with states in bf16; the most active bytes",
        unit="GiB",
        rows=list(build_ladder_3b()),
        differs=[
            (
                "Theirs: norms written out, which uncompiled keeps an fp32 copy of each input; keys"
                " and values copied for each query head; fp32 logits of all tokens and plain"
                " cross-entropy, later bf16 logits in eight pieces, all kept until backward. Ours"
                " has kernels for norms and loss, and logits of one piece at a time."
            ),
            (
                "Of their loss only the one in pieces is compiled: the recipes of that time drop"
                " what `compile_loss` returns, and it is in place for that one alone."
            ),
            (
                "Attention is flex attention there, the varlen flash kernel here; neither keeps"
                " scores. The versions of torch whose compilers these were differ from the one"
                " planned with."
            ),
            (
                "+ 8-bit AdamW: bitsandbytes' or torchao's there (not stated), ours here, whose"
                " steps run on slices."
            ),
            "LoRA: rank 64 on all linear layers but k, as its config of the time has it.",
        ],
    )
    titan = []
    for ranks, reserved in ((8, 82.4), (128, 67.0)):  # published GiB
        figures = {"reserved": reserved, "reserved_expandable": reserved}
        titan.append(
            Row(
                f"{ranks} GPUs",
                whose="theirs",
                run=run_titan(ranks),
                stack=TITAN,
                published=figures,
            )
        )
        titan.append(
            Row(f"{ranks} GPUs", whose="ours", run=run_titan(ranks), stack=OURS, published=figures)
        )
    yield Group(
        "torchtitan: Llama 3.1 8B, pre-training, on 8 and 128 H100",
        source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: local batch 2 of"
        " 8192 tokens, selective checkpointing of single operators, not compiled; the most"
        " reserved, over ranks",
        unit="GiB",
        rows=titan,
        differs=[
            (
                "Theirs: parameters and AdamW's states in fp32, gathered as bf16, gradients summed"
                " in fp32; logits of all tokens in bf16 with an fp32 copy inside the loss; the"
                " first of every two matmuls is kept. Ours: all in bf16, fp32 logits within the"
                " loss alone, every second matmul kept."
            ),
            (
                "Which allocator setting the runs had is not stated, so both are planned against"
                " the one figure."
            ),
        ],
    )
    plain_fsdp2 = Stack(sharding=FSDP2, logits="until backward")
    yield Group(
        "Another simulation: Llama 3 8B with FSDP2 on 4 ranks",
        source="a trace of plain FSDP2 by another implementation, made while this planner was designed: a"
        " prediction too, not a measurement; it counted no workspaces of matmuls",
        unit="GB",
        rows=[
            Row(
                wrapping,
                whose="FSDP2 as it comes",
                run=planner_865.run_865(wrapping),
                stack=plain_fsdp2,
                published={"active": active},
            )
            for wrapping, active in (("layers", 20.28), ("memory_efficient", 18.34))
        ],
        differs=["What agrees here was derived twice; it says nothing about a GPU."],
    )


# (published figures, why they are not planned).
NOT_REPLICATED = [
    (
        "torchtune's 3B table: baseline 25.5 GiB",
        "rows are not packed, and their lengths are not stated",
    ),
    (
        "torchtune's table of models (18.9 GiB for 8B on an RTX 4090, ...)",
        "checkpointing, offloading and targets of adapters are not stated, and memory that is"
        " paged is not counted",
    ),
    ("torchtitan: + compile, + float8, 70B, 405B", "compiled; tensor and pipeline parallelism"),
    ("torchtitan PR #382, 69.04 and 68.09 GiB", "its settings are not all stated"),
]


def format_page() -> str:
    """Return the text of docs/measurements/planner.md."""
    groups = list(list_groups())
    lines = [
        "# The planner against published figures",
        "",
        (
            "`python benchmarks/planner_replications.py` writes this file. Nothing in here was"
            " measured by us: published figures stand beside what `tune plan` says of the same"
            " run. `theirs` rows plan the other program's stack, imitated in"
            " `benchmarks/planner_stacks.py` and `megatron_stack.py` where it differs from ours;"
            " they check the planner. `ours` rows plan what the recipes here would take, so that"
            " their last column is how far the programs differ. Error: planned over published,"
            " less one. GB is 10^9, GiB 2^30 bytes. Peaks of a steady step on rank 0, or the"
            f" heaviest stage; torch {torch.__version__.partition('+')[0]} on a simulated device."
        ),
        "",
        *summarize(groups),
    ]
    for group in groups:
        lines += [
            "",
            f"## {group.title}",
            "",
            f"Source: {group.source}.",
            "",
            *format_table(group),
            "",
        ]
        lines += [f"- {line}" for line in group.differs]
        lines += group.more()
    lines += ["", "## Not replicated", "", "| what | why |", "| --- | --- |"]
    lines += [f"| {figures} | {reason} |" for figures, reason in NOT_REPLICATED]
    runs = []
    for group in groups:
        for row in group.rows:
            if row.stack == OURS and isinstance(row.run, Run):
                runs.append(row.run)
    runs += planner_865.list_further_runs()
    lines += [
        "",
        "## The runs",
        "",
        "The `ours` rows are these commands, but for the phases beside the steps:",
        "",
    ]
    # `dict.fromkeys`: each command once, in the order of the rows.
    lines += ["```bash", *dict.fromkeys(run.command for run in runs), "```"]
    return "\n".join(lines) + "\n"


def summarize(groups: list[Group]) -> list[str]:
    """Return a paragraph that says the goal and which figures meet it.

    Reserved memory has no goal, since publishers do not state the allocator's settings.
    """
    errors: list[tuple[str, float]] = []  # (name of a figure, its error)
    for group in groups:
        for row in group.rows:
            for metric in row.published:
                if row.goal and metric in ("active", "allocated"):
                    name = f"{group.title}, {row.name}, {metric}"
                    errors.append((name, compute_error(row, metric, group.unit)))
    worst_name, worst_error = max(errors, key=lambda pair: abs(pair[1]))
    num_met = sum(abs(error) <= GOAL for _, error in errors)
    missed = sorted({name for name, error in errors if abs(error) > GOAL})
    theirs, ours = planner_megatron.compute_mean_errors()
    return [
        f"Goal: allocated and active memory within {GOAL:.0%} wherever the stack is theirs:"
        f" {num_met} of {len(errors)} figures meet it, the worst is {worst_error:+.1%}"
        f" ({worst_name}). Missed:"
        f" {'; '.join(missed) or 'none'}. Of Megatron's four runs the mean error is {ours:.2%},"
        f" that of the tool that was published with them {theirs:.2%}. Reserved memory has no goal"
        " here: publishers do not state the allocator's settings."
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the report, or write it."""
    parser = argparse.ArgumentParser(
        description="Plan the runs of which other programs have published memory figures."
    )
    parser.add_argument("--output", type=Path, help="file to write; default: standard output")
    options = parser.parse_args(argv)
    text = format_page()
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
