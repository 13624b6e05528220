"""Plan the four runs that Megatron-LM's analysis tool (its pull request 482) was published with.

`planner_replications.py` calls `build_group` for its page: each run in Megatron's stack, imitated
in `megatron_stack.py`, and by our recipe. `planner_peers.py` calls `build_rows` for the former. A
row is one published run with what is planned of it.
"""

from dataclasses import replace

from benchmarks.megatron_stack import Gpt, Layout
from benchmarks.planner_rows import OURS, Group, Row, Run, compute_error, plan_run
from recipe_lib.units import GIB

# (layout, global batch in sequences, measured GiB, GiB that their tool said).
PUBLISHED = (
    (Layout(2, data=8, pipeline=1, tensor=1), 2048, 69.1, 68.8),
    (Layout(4, data=4, pipeline=1, tensor=2), 512, 55.7, 55.5),
    (Layout(2, data=4, pipeline=2, tensor=1), 2048, 49.8, 49.5),
    (Layout(4, data=1, pipeline=1, tensor=8), 128, 28.8, 28.6),
)
# Predictions that the tool prints as examples: (name, layout, GiB of parameters, gradients,
# optimizer, activations, all).
EXAMPLES = (
    (
        "one rank without parallelism",
        Layout(4, data=1, pipeline=1, tensor=1),
        (12.4, 24.7, 74.2, 44.8, 156.2),
    ),
    (
        "data 4, pipeline 2, tensor 2",
        Layout(4, data=4, pipeline=2, tensor=2),
        (3.2, 6.4, 4.8, 25.8, 40.2),
    ),
)
# Kinds of memory that get a column; all others are summed in one.
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits")
GPT = Gpt()  # the model that the tool prints as its example
_LLAMA = replace(
    GPT,
    feed_forward=11008,
    vocabulary=32000,
    biases=False,
    positions=False,
    tied=False,
    dropout=0.0,
)
# (choice, model): what the pull request does not say of its runs, tried in place of what its
# printed example or a default of Megatron's says.
CHOICES = (
    ("as the tool's example prints it, defaults else", GPT),
    ("a bf16 gradient of each weight first", replace(GPT, fused_weight_gradients=False)),
    ("output projection of its own", replace(GPT, tied=False)),
    ("no dropout", replace(GPT, dropout=0.0)),
    ("Llama's vocabulary of 32000", replace(GPT, vocabulary=32000)),
    ("Llama's feed-forward width 11008", replace(GPT, feed_forward=11008)),
    ("no biases, no learned positions", replace(GPT, biases=False, positions=False)),
    ("all of Llama 2, rows of 2048", _LLAMA),
    ("rows of 4096", replace(GPT, sequence=4096)),
    ("all of Llama 2, rows of 4096", replace(_LLAMA, sequence=4096)),
)


def format_name(layout: Layout, batch: int) -> str:
    """Return the name of a run as their table has it. batch: global, in sequences."""
    return f"{layout.micro_batch} / {batch} / {layout.data} / {layout.pipeline} / {layout.tensor}"


def build_rows(gpt: Gpt) -> list[Row]:
    """Return their four runs with a model, in Megatron's stack."""
    return [
        Row(
            format_name(layout, batch),
            whose="theirs",
            run=layout,
            stack=gpt,
            published={"allocated": measured},
            goal=True,
        )
        for layout, batch, measured, _ in PUBLISHED
    ]


def run_ours(layout: Layout, batch: int) -> Run:
    """Return the run of Llama 2 7B by our recipe, with as many sequences and ranks.

    batch: global, in sequences.
    """
    settings = (
        f"max_seq_len=2048 batch_size={layout.micro_batch} clip_grad_norm=null memory.loss_chunks=1"
        f" gradient_accumulation_steps={batch // layout.micro_batch // layout.data}"
        f" memory.activation_checkpointing=none parallel.pipeline={layout.pipeline}"
        f" parallel.tensor={layout.tensor}"
    )
    return Run(
        "llama2/7B_full",
        ranks=layout.ranks,
        device="h100",
        tokens=2048,
        overrides=tuple(settings.split()),
    )


def build_group() -> Group:
    """Return the rows of their four runs, in their stack and by our recipe, and the page's text."""
    ours = [
        Row(
            format_name(layout, batch),
            whose="ours",
            run=run_ours(layout, batch),
            stack=OURS,
            published={"allocated": measured},
        )
        for layout, batch, measured, _ in PUBLISHED
    ]
    return Group(
        "Megatron-LM: Llama 2 7B on 8 H800",
        source="github.com/NVIDIA/Megatron-LM/pull/482 (Analysis Tool): bf16, flash attention, distributed"
        " optimizer, swiglu; torch.cuda.max_memory_allocated after several iterations. Rows are"
        " micro-batch / global batch / data / pipeline / tensor",
        unit="GiB",
        rows=[*build_rows(GPT), *ours],
        differs=[
            (
                "Their GB is 2^30: 6,642,245,632 parameters in bf16 are printed as 12.4GB. Figures"
                " are published to 0.1, so half a unit is 0.07 to 0.17 %."
            ),
            (
                "Theirs is imitated in `benchmarks/megatron_stack.py`: bf16 weights whole on the"
                " rank, one fp32 gradient buffer kept through the step, master weights and AdamW's"
                " states in fp32 divided over data ranks, tensor parallelism without shared tokens,"
                " 1F1B (the first of two stages holds two micro-batches), softmax of all tokens in"
                " fp32."
            ),
            (
                "No number is fitted. The model is the one that the tool prints as its example,"
                " which its author confirmed to be GPT, not Llama; the rest are Megatron's defaults"
                " of the time. The second table below takes other choices, one by one."
            ),
            (
                "Replicated after the fact, as everything here: the figures were known when the"
                " imitation was written."
            ),
            (
                "Ours has parameters, gradients and states in bf16, all three divided over data"
                " ranks (FSDP2), and divides tokens between tensor ranks, too."
            ),
        ],
        more=format_tables,
    )


def format_tables() -> list[str]:
    """Return the lines of all tables after the rows: predictions, other choices, parts."""
    lines = [
        "",
        "Their tool's prediction and ours of the same runs, GiB:",
        "",
        "| run | measured | their tool | error | planned | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (_, _, measured, predicted), row in zip(PUBLISHED, build_rows(GPT), strict=True):
        planned = plan_run(row.run, row.stack).peak.allocated / GIB
        theirs = f"{predicted:.1f} | {predicted / measured - 1:+.2%}"
        ours = f"{planned:.2f} | {planned / measured - 1:+.2%}"
        lines.append(f"| {row.name} | {measured:.1f} | {theirs} | {ours} |")
    their_mean, our_mean = compute_mean_errors()
    lines += [f"| mean of the errors' sizes | | | {their_mean:.2%} | | {our_mean:.2%} |", ""]
    return [*lines, *_format_choices(), "", *_format_parts()]


def compute_mean_errors() -> tuple[float, float]:
    """Return the mean size of the errors over the four runs: (their tool's, ours)."""
    theirs = [abs(predicted / measured - 1) for _, _, measured, predicted in PUBLISHED]
    ours = [abs(compute_error(row, "allocated", "GiB")) for row in build_rows(GPT)]
    return sum(theirs) / len(theirs), sum(ours) / len(ours)


def _format_choices() -> list[str]:
    """Return the table of the errors with each of CHOICES."""
    names = " | ".join(format_name(layout, batch) for layout, batch, _, _ in PUBLISHED)
    lines = [
        "Errors with other choices:",
        "",
        f"| choice | {names} | mean size |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, gpt in CHOICES:
        errors = [compute_error(row, "allocated", "GiB") for row in build_rows(gpt)]
        mean = sum(map(abs, errors)) / len(errors)
        lines.append(f"| {name} | {' | '.join(f'{error:+.2%}' for error in errors)} | {mean:.2%} |")
    return lines


def _format_parts() -> list[str]:
    """Return the table of what is live at the peak of each run and of the tool's examples."""
    lines = [
        (
            "What is live at the peak, GiB, and the same of the examples that the tool prints (in"
            " the second line of each; predictions, not measured; its activations are with logits"
            " where there are any):"
        ),
        "",
        f"| run | {' | '.join(KINDS)} | other | all |",
        f"|{' --- |' * (len(KINDS) + 3)}",
    ]
    runs: list[tuple[str, Layout, tuple[float, ...]]] = [
        (format_name(layout, batch), layout, ()) for layout, batch, _, _ in PUBLISHED
    ]
    for name, layout, printed in [*runs, *EXAMPLES]:
        kinds = plan_run(layout, GPT).kinds
        other_kinds = sum(size for kind, size in kinds.items() if kind not in KINDS)
        # In the order of the heads.
        sizes = [*(kinds.get(kind, 0) for kind in KINDS), other_kinds, sum(kinds.values())]
        lines.append(f"| {name} | {' | '.join(f'{size / GIB:.2f}' for size in sizes)} |")
        if printed:
            *parts, total = (f"{size:.1f}" for size in printed)
            lines.append(f"| the tool's | {' | '.join(parts)} | | | {total} |")
    return lines
