"""Draw a 70B's memory over a step and a small model's losses, ours and others' tensor parallel.

    python -m benchmarks.tp_trace --output docs/measurements/tp_trace.md

The memory is planned: rank 0 of 32 runs on the simulated device, whose tensors have sizes and no
bytes, once for each `Variant` (our recipe with another program's tensor-parallel layers). The
losses are those of `tp_curve.py`, on four gloo processes, of stories in the folder that REALDATA_DIR
names. Neither needs a GPU.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# No dataset is read: the length of sequences is given. Set before the imports that look at it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks import tp_curve
from benchmarks.line_picture import Line, Picture, write_picture
from benchmarks.tables import format_markdown_table
from benchmarks.tp_memory import RANDOM_STATE
from benchmarks.tp_ways import (
    KEPT,
    OURS,
    STYLES,
    VARIANTS,
    Variant,
    keep_sums_standing,
    use_variant,
)
from recipe_lib.cli.recipes import RecipeFile, load_module
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.models import build_spec, read_preset_config
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.plan_schema import PhasePeak, Plan
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from recipe_lib.plan.tracing.trace import ACTION, ALLOC, FREE, PHASE, Trace
from recipe_lib.units import GIB, MIB

RECIPE = "full_finetune_distributed"
CONFIG = "llama3/70B_full"
PRESET = "llama3/70B"  # the model of CONFIG
CARD = "h100"  # as `tune plan --device` takes it
TENSOR = 8  # tensor-parallel ranks
PIPELINE = 4  # stages
TOKENS = 8192  # of a sequence
MICRO_BATCHES = 4  # a step
OVERRIDES = (
    f"max_seq_len={TOKENS}",
    f"parallel.tensor={TENSOR}",
    f"parallel.pipeline={PIPELINE}",
    "batch_size=1",
    f"gradient_accumulation_steps={MICRO_BATCHES}",
    "memory.activation_checkpointing=none",
    "optimizer.master_weights=true",
    "optimizer.state_bits=32",
    "fused_kernels=false",
)
# Any layer but the first: `one_buffer` variants allocate their gather buffer in that one, which
# would be counted as kept by it.
_LAYER = "model.layers.1"
_BUCKETS = 60  # of an action's live bytes; the lowest and the highest of each are drawn
_BF16 = 2  # bytes
Point = tuple[float, float]  # (x, GiB); an action is 1 wide along x


@dataclass
class TracedRun:
    """The plan of one variant."""

    variant: Variant
    plan: Plan
    step: PhasePeak  # rank 0's peaks of a steady step, which is any but the first
    in_fp32: PhasePeak  # the same with fp32 sums of gradients that stay from step to step
    kept: int  # bytes that one layer keeps for the backward of one micro-batch
    points: list[Point]  # live bytes over the steady step
    names: list[tuple[float, str]]  # (x of its middle, name) of each action, such as `F0`

    @property
    def sums(self) -> int:
        """Return the bytes by which sums of gradients in fp32 that stay make the peak higher."""
        return self.in_fp32.active - self.step.active


def trace_run(variant: Variant) -> TracedRun:
    """Plan the run of a variant, with sums of gradients in bf16 and in fp32.

    Raises ValueError if a layer does not keep the bytes of `compute_layer_bytes`: the variant is
    then not what its formula on the page says.
    """
    plan, trace = plan_run(variant)
    with keep_sums_standing():
        plan_in_fp32, _ = plan_run(variant, "parallel.accumulate_grad_in_fp32=true", ranks=(0,))
    # Of all four micro-batches: 1F1B's first of four ranks has four in flight at its peak.
    kept = next(row.kept for row in plan.layers if row.module == _LAYER)
    expected = compute_layer_bytes(variant)
    if kept != expected * MICRO_BATCHES:
        raise ValueError(
            f"{variant.name}: a layer keeps {kept} bytes of {MICRO_BATCHES}, expected {expected} of"
            " each"
        )
    points, names = draw_timeline(trace)
    return TracedRun(
        variant=variant,
        plan=plan,
        step=_find_step_peak(plan),
        in_fp32=_find_step_peak(plan_in_fp32),
        kept=expected,
        points=points,
        names=names,
    )


def _find_step_peak(plan: Plan) -> PhasePeak:
    """Return the peaks of a steady step on the heaviest rank."""
    return next(peak for peak in plan.heaviest.peaks if peak.phase == "step")


def plan_run(variant: Variant, *overrides: str, ranks: tuple[int, ...] = ()) -> tuple[Plan, Trace]:
    """Plan the run; return its plan and the trace of its heaviest rank.

    overrides: `key=value`, after those of all runs. ranks: that are simulated; (): one of each
    place in the pipeline. Raises ValueError if the heaviest is not rank 0, whose trace the page
    draws.
    """
    of_variant = (
        f"parallel.tensor_regather_in_backward={variant.regather}",
        f"memory.recompute_cheap={str(variant.recompute_cheap).lower()}",
    )
    cfg, _ = make_plannable(
        load_config(CONFIG, (*OVERRIDES, *of_variant, *overrides), FullFinetuneConfig)
    )
    sequence = choose_sequence(cfg, str(TOKENS))
    settings = PlanSettings(
        find_hardware(CARD), sequence, TENSOR * PIPELINE, traced_ranks=ranks, phases=()
    )
    with use_variant(variant):
        recipe = load_module(RecipeFile.find(RECIPE).path).FullFinetune
        plan, trace = make_plan(recipe, cfg, settings)
    if plan.heaviest.rank != 0:
        raise ValueError(
            f"{variant.name}: rank {plan.heaviest.rank} is the heaviest, expected rank 0"
        )
    return plan, trace


def compute_layer_bytes(variant: Variant) -> int:
    """Compute the bytes that a layer keeps for the backward of one micro-batch.

    They are the variant's elements in bf16, and divided by the tensor-parallel ranks an fp32 number
    a token for each head (attention's log-sum-exp) and for each of the two norms.
    """
    spec = build_spec(read_preset_config(PRESET), PRESET)
    elements = variant.count_kept_elements(
        h=spec.width,
        q=spec.num_heads * spec.head_width,
        k=spec.num_kv_heads * spec.head_width,
        f=spec.mlp_width,
        t=TENSOR,
    )
    return TOKENS * (_BF16 * elements + 4 * (spec.num_heads + 2)) // TENSOR + RANDOM_STATE


def draw_timeline(trace: Trace) -> tuple[list[Point], list[tuple[float, str]]]:
    """Return the live GiB over the steady step as points, and (x, name) of each action.

    Every action is 1 wide, however long it takes.
    """
    # (name, live bytes after each allocation and free) of each action.
    actions: list[tuple[str, list[int]]] = []
    alive = 0  # bytes; counted from setup on, since storages stay from phase to phase
    is_in_step = False
    for kind, number in trace.events:
        if kind in (ALLOC, FREE) and trace.storages[number].device:
            alive += trace.storages[number].bytes * (1 if kind == ALLOC else -1)
            if is_in_step:
                actions[-1][1].append(alive)
        elif kind == PHASE:
            is_in_step = trace.phases[number] == "step"
            if is_in_step:
                actions.append(("", [alive]))  # before the first forward; dropped below
        elif kind == ACTION and is_in_step:
            action = trace.actions[number]
            if action.kind in ("F", "B"):
                actions.append((f"{action.kind}{action.micro_batch}", [alive]))
            elif not action.kind:  # the mark behind the pipeline's last action
                actions.append(("optimizer", [alive]))
    points = []
    names = []
    for at, (name, sizes) in enumerate(actions[1:]):
        points += [(at + fraction, size / GIB) for fraction, size in _thin_sizes(sizes)]
        names.append((at + 0.5, name))
    return points, names


def _thin_sizes(sizes: list[int]) -> Iterator[Point]:
    """Yield the lowest and highest of each of `_BUCKETS` groups, in order, with x from 0 to 1."""
    group_length = max(1, -(-len(sizes) // _BUCKETS))
    for first in range(0, len(sizes), group_length):
        group = sizes[first : first + group_length]
        # In the order in which they came, so that the line does not go back.
        for at in sorted({group.index(min(group)), group.index(max(group))}):
            yield (first + at) / len(sizes), group[at]


PAGE = """# Memory over a step of a 70B under tensor parallel, and losses with a wrong buffer

Made by `python -m benchmarks.tp_trace --output docs/measurements/tp_trace.md`, on a CPU, with torch {torch};
it needs `REALDATA_DIR`, a folder with `{stories}`.

The run is the one that nanotron's [#203](https://github.com/huggingface/nanotron/pull/203) shows traces of: a 70B,
tensor 8, pipeline 4 (1F1B), data 1, sequences of {tokens} tokens, micro-batch 1, accumulation {micro}, without
checkpointing, rank 0 of 32; its images carry no figures that could be compared with. **Nothing in the first section is
measured on a GPU, and none of the others' programs has run**: all lines are our recipe on the simulated device of
`tune plan`, whose tensors have sizes and no bytes, with the parts exchanged that keep other tensors
(`benchmarks/tp_ways.py`), seen by the same tracer. Embedding, head, loss, pipeline and optimizer are ours in all of
them. A line whose layer does not keep what its formula says, to the byte, writes no page.

- **DTensor styles**: torch's `SequenceParallel`, `ColwiseParallel`, `RowwiseParallel`. They keep the gathered tokens
  and all of a gated MLP: what nanotron kept before #203. Its reduce-scatters wrote to memory of their own, too;
  autograd lets that go when the residual is added, so that it is not kept here.
- **nanotron**: after #203 with its default `tp_recompute_allgather: true`. The shard is kept and gathered again in
  backward, all gathers write to one buffer that stays, the gated MLP is not fused.
- **Megatron**: Megatron-core's dense layer. The same, and the activation of the fused SwiGLU is made again.
- **ours, gather kept**: `parallel.tensor_regather_in_backward: false`. As in the last line, norms' outputs and the
  product are made again in backward (`memory.recompute_cheap`), which is off in the other lines.
- **ours**: `true`, and what `auto` is without checkpointing. No buffer: a gathered tensor lives as long as autograd
  needs it.

## Live bytes of rank 0 over a step

![Live GiB over the actions of a step, one line for each way](tp_trace.svg)

Bytes of tensors. F, B: forward and backward of a micro-batch, each as wide as the others; then clipping and the
optimizer. Dashed: what an {card} ({memory:.2f} GiB) leaves to the allocator, {usable:.2f} GiB, less {sums:.2f} GiB
for sums of gradients in fp32.

## Peaks

{peaks}

h, F: width of the model and of the MLP, q and k: of all query and key heads, t = 8. Weights and gradients are bf16, the
fp32 weights and both of AdamW's moments besides: 16 bytes a parameter, of which gradients are not there at the peak.
nanotron (`accumulate_grad_in_fp32`) and Megatron sum gradients in fp32, in a buffer that stays. The last three columns
are traced with such a buffer, in all five ways. Fits: reserved bytes are below {usable:.2f} GiB. Reserved bytes are
those of torch's allocator replayed with its default settings.

## Time, planned

{times}

From the operators of all four places of the pipeline and the data sheet of an {card}, NVLink within a machine; not
calibrated, and for ranking only: it knows kernels' bytes and FLOPs and overlaps communication as issued, not what a
GPU makes of it. nanotron's authors report gathering again as "on average as fast as the baseline", a reviewer as
faster. Planned, a step that gathers again takes {again:+.2%} against our kept gather: two gathers more in each layer's
backward, most of them behind matmuls; and {styles:+.2%} against DTensor styles, whose operators do more. How far that
is from a GPU is not known. nanotron's and Megatron's programs overlap differently: no time is planned for them.

## Losses, 100 steps

Run on the CPU, in fp32: {layers} layers, width {width}, {heads} heads, tied embedding, bytes of TinyStories in
sequences of {length}, {rows} a micro-batch, two micro-batches a step, AdamW (0.9, 0.95), clipping at 1, cosine after
two steps. That is the check asked for in #203 with smaller numbers: there, the first version, in which autograd was
handed tensors of one global buffer, gave another curve.

{curves}

![Loss over the steps: four lines, of which one is apart](tp_trace_loss.svg)

**one buffer, gather kept** is the planted fault: all gathers write to the same memory, and backward reads what a later
layer has gathered. There is no error and no warning. The same buffer is right where nothing is kept in it (last line).
The limit of the check is {limit:g}; `tests/parallel/test_tensor_curve.py` holds it over some steps, and requires that
the wrong buffer does not pass.

## The options of nanotron's config

{options}
"""

# (option of nanotron's config, what stands for it here): rows of the page's last table.
OPTIONS = [
    [
        "`tp_mode: REDUCE_SCATTER`",
        (
            "what `parallel.tensor` does for this library's decoders: norms and residuals on a"
            " rank's own tokens, gathers before q, k, v and before gate, up, reduce-scatters behind"
            " o and down"
        ),
    ],
    [
        "`tp_mode: ALL_REDUCE`",
        (
            "none for these decoders. The plans inferred for other models"
            " ([tensor_parallel.md](../tensor_parallel.md)) share tokens where their proof holds,"
            " and all-reduce where it does not"
        ),
    ],
    [
        "`tp_recompute_allgather: true` (default)",
        (
            "`parallel.tensor_regather_in_backward: auto` (default): gathered again, except in"
            " checkpointed layers, which have the tokens during their own backward alone"
        ),
    ],
    ["`tp_recompute_allgather: false`", "`parallel.tensor_regather_in_backward: false`"],
    [
        "`tp_linear_async_communication`",
        (
            "no switch. In backward the second gather runs beside the matmuls for the input's"
            " gradient, and the reduce-scatter of that beside those for the weights'. In forward,"
            " gathers and reduce-scatters are waited for: a mode that multiplies a rank's own"
            " tokens meanwhile is not there"
        ),
    ],
    [
        "`accumulate_grad_in_fp32: true`",
        (
            "`parallel.accumulate_grad_in_fp32: true`: micro-batches' gradients are summed in fp32,"
            " and rounded once. `optimizer.master_weights` steps in fp32, `parallel.reduce_dtype`"
            " is of sums over data ranks"
        ),
    ],
]
PEAK_HEAD = [
    "way",
    "kept of a token, times t",
    "kept of a layer and micro-batch, MiB",
    "active, GiB",
    "reserved, GiB",
    "fits 80 GB",
    "active with fp32 sums, GiB",
    "reserved with fp32 sums, GiB",
    "fits 80 GB",
]
TIME_HEAD = ["way", "step, s", "tokens a second", "to DTensor styles", "to ours, gather kept"]
CURVE_HEAD = ["run", "first loss", "last loss", "largest difference to one process", "check"]
LIMIT = 1e-4  # relative difference of two losses that are still called equal, in fp32


def build_page(folder: Path, name: str) -> str:
    """Return the page, and write its pictures, `name`.svg and `name`_loss.svg, into the folder.

    Raises ValueError if a check of `trace_run` or of the losses fails.
    """
    curve_rows = _train_curves(folder / f"{name}_loss.svg")
    runs = [trace_run(variant) for variant in VARIANTS]
    by_variant = {run.variant: run for run in runs}
    ours = by_variant[OURS].plan
    usable = runs[0].plan.device.usable  # bytes that CUDA and NCCL leave to the allocator
    _draw_memory(runs, folder / f"{name}.svg")
    seconds = {}  # of a step, by variant
    rates = {}  # tokens a second, by variant
    for run in runs:
        if run.plan.time is not None:
            seconds[run.variant] = run.plan.time.step
            rates[run.variant] = run.plan.time.tokens_per_second
    time_rows = [
        [
            variant.name,
            f"{seconds[variant]:.3f}",
            f"{rates[variant]:,.0f}",
            f"{rates[variant] / rates[STYLES]:.3f}x",
            f"{rates[variant] / rates[KEPT]:.3f}x",
        ]
        for variant in (STYLES, KEPT, OURS)
    ]
    spec = tp_curve.SPEC
    return PAGE.format(
        torch=torch.__version__,
        stories=tp_curve.STORIES,
        tokens=TOKENS,
        micro=MICRO_BATCHES,
        card=CARD,
        usable=usable / GIB,
        sums=runs[0].sums / GIB,
        memory=ours.device.memory / GIB,
        peaks=format_markdown_table(PEAK_HEAD, [_build_peak_row(run, usable) for run in runs]),
        times=format_markdown_table(TIME_HEAD, time_rows),
        again=seconds[OURS] / seconds[KEPT] - 1,
        styles=seconds[OURS] / seconds[STYLES] - 1,
        curves=format_markdown_table(CURVE_HEAD, curve_rows),
        limit=LIMIT,
        options=format_markdown_table(["nanotron", "here"], OPTIONS),
        layers=spec.num_layers,
        width=spec.width,
        heads=spec.num_heads,
        length=tp_curve.LENGTH,
        rows=tp_curve.ROWS,
    )


def _build_peak_row(run: TracedRun, usable: int) -> list[str]:
    """Return the cells under PEAK_HEAD. usable: bytes of the card for the allocator."""
    cells = [run.variant.name, f"`{run.variant.elements}`", f"{run.kept / MIB:.1f}"]
    for peak in (run.step, run.in_fp32):
        cells.append(f"{peak.active / GIB:.2f}")
        cells.append(f"{peak.reserved / GIB:.2f}")
        cells.append("yes" if peak.reserved <= usable else "**no**")
    return cells


def _draw_memory(runs: list[TracedRun], path: Path) -> None:
    """Write the picture of the live bytes, a line for each variant."""
    lines = []
    for run in runs:
        peak = max(run.points, key=lambda point: point[1])
        line = Line(
            name=run.variant.name,
            points=run.points,
            note=f"peak {peak[1]:.2f} GiB, kept {run.variant.elements}",
            mark=(peak, f"{peak[1]:.1f}"),
        )
        lines.append(line)
    usable = (runs[0].plan.device.usable - runs[0].sums) / GIB
    picture = Picture(
        label="live GiB of rank 0 over a step",
        x="rank 0's actions, in their order",
        y="live, GiB",
        lines=lines,
        marks=[(place, name) for place, name in runs[0].names if name],
        limit=(usable, "80 GB card, less fp32 sums of gradients"),
        low=0.0,
    )
    write_picture(picture, path)


def _train_curves(path: Path) -> list[list[str]]:
    """Train the small model, draw its losses, and return the cells under CURVE_HEAD.

    Raises ValueError if a right curve is off by more than LIMIT, or if the one with the planted
    fault (kept gathers in one buffer) is not: the check would then see nothing.
    """
    rows = tp_curve.read_stories()
    steps = tp_curve.STEPS
    ranks = tp_curve.RANKS
    runs = {
        f"{ranks} ranks, gathered again": tp_curve.Run(),
        f"{ranks} ranks, gather kept": tp_curve.Run("false"),
        f"{ranks} ranks, one buffer, gather kept": tp_curve.WRONG,
        f"{ranks} ranks, one buffer, gathered again": tp_curve.Run(one_buffer=True),
    }
    alone = tp_curve.train_losses(rows, steps, 1)[0]
    curves = {"one process": alone}
    shared = tp_curve.train_losses(rows, steps=steps, ranks=ranks, runs=list(runs.values()))
    curves |= dict(zip(runs, shared, strict=True))
    table = []
    for name, curve in curves.items():
        difference = tp_curve.find_largest_difference(curve, alone)
        is_equal = difference <= LIMIT
        if is_equal == name.endswith("one buffer, gather kept"):
            raise ValueError(
                f"{name}: {difference:.1e} of the loss from one process, with a limit of {LIMIT}"
            )
        cells = [name, f"{curve[0]:.6f}", f"{curve[-1]:.6f}"]
        if name == "one process":
            cells += ["", ""]
        else:
            cells += [f"{difference:.1e} of the loss", "equal" if is_equal else "**caught**"]
        table.append(cells)
    lines = []
    for name, curve in curves.items():
        if not name.endswith("buffer, gathered again"):  # would lie on the right curves
            lines.append(Line(name, list(enumerate(curve, 1)), f"last {curve[-1]:.4f}"))
    lines = [lines[3], *lines[:3]]  # the wrong one first, in the first color
    picture = Picture(label="loss over the steps", x="step", y="loss", lines=lines, height=320)
    write_picture(picture, path)
    return table


def main() -> None:
    """Write the page and its two pictures."""
    parser = argparse.ArgumentParser(
        description="Draw memory and losses of tensor parallel, ours and others'."
    )
    parser.add_argument("--output", type=Path, required=True, help="the page")
    output = parser.parse_args().output
    output.write_text(build_page(output.parent, output.stem), encoding="utf-8")


if __name__ == "__main__":
    main()
