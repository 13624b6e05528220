"""Plan the eight runs on B200 that SimuMax v1.2, another memory planner, was published with.

`planner_peers.py` calls `build_group` for its page. The training program that ran, Megatron core
with Transformer Engine, is imitated in `transformer_engine_stack.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.megatron_stack import Layout
from benchmarks.planner_rows import plan_run
from benchmarks.transformer_engine_stack import ANEW, OUTPUT_ANEW, Llama
from recipe_lib.units import GIB

# Their models, cut to some layers; their 405B has 16 heads of keys and values, not Meta's 8.
LLAMA_70B = Llama(layers=12, hidden=8192, heads=64, kv_heads=8, feed_forward=28672)
LLAMA_405B = Llama(layers=4, hidden=16384, heads=128, kv_heads=16, feed_forward=53248)
LAYOUTS = (
    Layout(1, data=4, pipeline=2, tensor=1),
    Layout(1, data=4, pipeline=1, tensor=2),
    Layout(1, data=2, pipeline=1, tensor=4),
    Layout(1, data=1, pipeline=1, tensor=8),
)
# (name, model, for each of LAYOUTS in order (measured GiB, GiB that SimuMax said)).
PUBLISHED = (
    (
        "llama3-70b, 12 layers",
        LLAMA_70B,
        ((66.55, 66.44), (60.68, 60.51), (39.07, 38.94), (28.29, 28.17)),
    ),
    (
        "llama3-405b, 4 layers",
        LLAMA_405B,
        ((87.08, 86.88), (81.59, 81.31), (52.89, 52.68), (38.57, 38.38)),
    ),
)
# (choice, changed fields of `Llama`): what versions of their time do either way.
CHOICES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as above", {}),
    ("torch's workspaces of 32 MiB, as from 2.11 on", {"architecture": "sm90"}),
    (
        "the output projection's dummy made anew, as Megatron's linear did before",
        {"dummy_gradients": OUTPUT_ANEW},
    ),
    ("all dummy gradients made anew", {"dummy_gradients": ANEW}),
)


def list_runs() -> Iterator[tuple[str, Llama, Layout, float, float]]:
    """Yield (name, model, layout, measured GiB, GiB that SimuMax said) of each row."""
    for name, llama, figures in PUBLISHED:
        for layout, (measured, predicted) in zip(LAYOUTS, figures, strict=True):
            degrees = f"tp{layout.tensor} pp{layout.pipeline} dp{layout.data}"
            yield f"{name}, {degrees}", llama, layout, measured, predicted


def build_group() -> dict[str, Any]:
    """Return a group as those of `peer_rows.json`, with the planned bytes in its rows' `ours`.

    Its `more` is a table, as lines, that goes after its notes.
    """
    rows = [
        {
            "name": name,
            "measured": {"allocated": measured * GIB},
            "theirs": {"allocated": predicted * GIB},
            "ours": {"allocated": plan_run(layout, llama).peak.allocated},
        }
        for name, llama, layout, measured, predicted in list_runs()
    ]
    return {
        "title": "SimuMax: Llama 3 on 8 B200",
        "tool": "SimuMax v1.2",
        "unit": "GiB",
        "source": (
            "repository MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md; settings from"
            " simu_tools/megatron_scripts"
        ),
        "stack": (
            "Megatron core at 23e00ed0, Transformer Engine 2.11, torch 2.10 (NVIDIA's 26.01); bf16,"
            " micro-batch 1 of 4096 tokens, tokens shared between tensor ranks, distributed"
            " optimizer, fp32 gradients into which products add, fused cross-entropy, nothing"
            " recomputed; the most allocated over ranks"
        ),
        "rows": rows,
        "notes": NOTES,
        "more": format_other_choices(),
    }


NOTES = [
    (
        "Imitated in `benchmarks/transformer_engine_stack.py`, from the public code of Transformer"
        " Engine and Megatron: the versions of these files that could be read are near those of the"
        " runs, not the same commits. Three micro-batches are planned; from the second on all leave"
        " the memory alike."
    ),
    (
        "Kept of a layer: its input, both normed inputs as this rank's part of the tokens, q and k"
        " after rotation, a copy of v, attention's output and row sums, the sum after attention,"
        " gate and up, their product. What a linear gathers is gathered once more in backward."
        " Cross-entropy writes the gradient over the bf16 logits."
    ),
    (
        "Kept for good: Transformer Engine's workspace of 32 MiB; of each shape of weight one empty"
        " bf16 gradient for autograd, since the true one is added to the fp32 buffer (0.4 to 9.9"
        " GiB here); the buffer into which Megatron gathers the output projection's input; torch's"
        " own workspaces of that projection, 8 MiB for forward and 8 for backward."
    ),
    (
        "With two stages, the gradient that a stage has sent back is held by a variable of the"
        " schedule until the next micro-batch's backward is done (128 MiB in the 405B run). The"
        " first stage is the heaviest of the 70B run, the last of the 405B run."
    ),
    (
        "No number is fitted, but the figures were known: that variable was looked for after a"
        " first sum by hand had come out low. As its page notes, SimuMax's figures are from after"
        " changes to its dummy gradients and fused cross-entropy; they may have been known to its"
        " authors, too."
    ),
    (
        "Not known: which attention kernel ran (cuDNN's and flash keep the same bytes of one"
        " sequence; at the peaks neither runs) and the scratch of Transformer Engine's norms, a few"
        " MB that are not planned."
    ),
]


def format_other_choices() -> list[str]:
    """Return a table of the errors with each of CHOICES, and the mean of their sizes."""
    names = " | ".join(
        name.replace("llama3-", "").replace(" layers", "") for name, *_ in list_runs()
    )
    lines = [
        "",
        "Errors with other choices:",
        "",
        f"| choice | mean size | {names} |",
        f"|{' --- |' * 10}",
    ]
    for choice, changes in CHOICES:
        errors = [
            plan_run(layout, replace(llama, **changes)).peak.allocated / GIB / measured - 1
            for _, llama, layout, measured, _ in list_runs()
        ]
        mean = sum(map(abs, errors)) / len(errors)
        lines.append(
            f"| {choice} | {mean:.2%} | {' | '.join(f'{error:+.2%}' for error in errors)} |"
        )
    return lines
