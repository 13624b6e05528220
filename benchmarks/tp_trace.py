"""Memory over a step of a 70B under tensor parallel 8 and pipeline 4, and losses of a small one:
ours and others' ways.

    python -m benchmarks.tp_trace --output docs/measurements/tp_trace.md

The large model is planned: rank 0 of 32 runs on the simulated device, whose tensors have sizes and
no bytes; the small one is trained on four gloo processes. No GPU, and no time is measured. The
folder that REALDATA_DIR names has the stories that are trained on.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the length of sequences is given

import torch

from benchmarks import tp_curve
from benchmarks.line_picture import Line, Picture, write_picture
from benchmarks.tp_memory import RANDOM_STATE
from benchmarks.tp_ways import KEPT, OURS, STYLES, WAYS, Way, keep_sums_standing, use_way
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

RECIPE, CONFIG, PRESET, CARD = "full_finetune_distributed", "llama3/70B_full", "llama3/70B", "h100"
TENSOR, PIPELINE, TOKENS, MICRO_BATCHES = 8, 4, 8192, 4
OVERRIDES = (
    f"max_seq_len={TOKENS}", f"parallel.tensor={TENSOR}", f"parallel.pipeline={PIPELINE}", "batch_size=1",
    f"gradient_accumulation_steps={MICRO_BATCHES}", "memory.activation_checkpointing=none",
    "optimizer.master_weights=true", "optimizer.state_bits=32",
    "fused_kernels=false",
)  # fmt: skip
_LAYER = "model.layers.1"  # any but the first, to which a buffer that stays would be counted
_BUCKETS = 60  # of a picture, for each action
_BF16 = 2
Point = tuple[float, float]


@dataclass
class Traced:
    """The plan of one way.

    step: rank 0's peaks of a steady step; in_fp32: with sums of gradients in fp32 that stay. kept:
    bytes of a layer and micro-batch. points: (place, GiB) over the step; names: (place, name) of
    its actions.
    """

    way: Way
    plan: Plan
    step: PhasePeak
    in_fp32: PhasePeak
    kept: int
    points: list[Point]
    names: list[tuple[float, str]]

    @property
    def sums(self) -> int:
        """Bytes by which the peak is higher with sums of gradients in fp32 that stay."""
        return self.in_fp32.active - self.step.active


def trace(way: Way) -> Traced:
    """Plan the run of a way, with sums of gradients in bf16 and in fp32."""
    plan, found = plan_run(way)
    with keep_sums_standing():
        wider, _ = plan_run(way, "parallel.accumulate_grad_in_fp32=true", ranks=(0,))
    # Of as many micro-batches as 1F1B's first rank has in flight.
    kept, wanted = (
        next(row.kept for row in plan.layers if row.module == _LAYER),
        compute_layer_bytes(way),
    )
    if kept != wanted * MICRO_BATCHES:
        raise ValueError(
            f"{way.name}: a layer keeps {kept} bytes of {MICRO_BATCHES}, expected {wanted} of each"
        )
    step, in_fp32 = (
        next(peak for peak in one.heaviest.peaks if peak.phase == "step") for one in (plan, wider)
    )
    return Traced(way, plan, step, in_fp32, wanted, *draw_timeline(found))


def plan_run(way: Way, *overrides: str, ranks: tuple[int, ...] = ()) -> tuple[Plan, Trace]:
    """Plan ranks of the run, by default one of each place in the pipeline.

    Raises ValueError where rank 0 is not the one that needs most.
    """
    regather = f"parallel.tensor_regather_in_backward={way.regather}"
    cfg, _ = make_plannable(
        load_config(CONFIG, (*OVERRIDES, regather, *overrides), FullFinetuneConfig)
    )
    sequence = choose_sequence(cfg, str(TOKENS))
    settings = PlanSettings(
        find_hardware(CARD), sequence, TENSOR * PIPELINE, traced_ranks=ranks, phases=()
    )
    with use_way(way):
        plan, found = make_plan(
            load_module(RecipeFile.find(RECIPE).path).FullFinetune, cfg, settings
        )
    if plan.heaviest.rank != 0:
        raise ValueError(f"{way.name}: rank {plan.heaviest.rank} is the heaviest, expected rank 0")
    return plan, found


def compute_layer_bytes(way: Way) -> int:
    """What a layer keeps by formula, in bf16; and 4 bytes a token over t for each head and both
    norms.
    """
    spec = build_spec(read_preset_config(PRESET), PRESET)
    q, k = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    elements = way.kept_elements(spec.width, q, k, spec.mlp_width, TENSOR)
    return TOKENS * (_BF16 * elements + 4 * (spec.num_heads + 2)) // TENSOR + RANDOM_STATE


def draw_timeline(found: Trace) -> tuple[list[Point], list[tuple[float, str]]]:
    """GiB that are live over the steady step, each forward and backward as wide as the others; and
    where each is.
    """
    parts: list[tuple[str, list[int]]] = []
    alive, inside = 0, False
    for kind, number in found.events:
        if kind in (ALLOC, FREE) and found.storages[number].device:
            alive += found.storages[number].bytes * (1 if kind == ALLOC else -1)
            if inside:
                parts[-1][1].append(alive)
        elif kind == PHASE:
            inside = found.phases[number] == "step"
            parts += [("", [alive])] if inside else []
        elif kind == ACTION and inside:
            mark = found.actions[number]
            if mark.kind in ("F", "B"):
                parts.append((f"{mark.kind}{mark.micro_batch}", [alive]))
            elif not mark.kind:
                parts.append(("optimizer", [alive]))
    points, names = [], []
    for at, (name, sizes) in enumerate(parts[1:]):
        points += [(at + where, size / GIB) for where, size in _thin_sizes(sizes)]
        names.append((at + 0.5, name))
    return points, names


def _thin_sizes(sizes: list[int]) -> Iterator[Point]:
    """The lowest and the highest of each of so many groups, in their order, over a width of 1."""
    group = max(1, -(-len(sizes) // _BUCKETS))
    for first in range(0, len(sizes), group):
        part = sizes[first : first + group]
        for at in sorted({part.index(min(part)), part.index(max(part))}):
            yield (first + at) / len(sizes), part[at]


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
- **ours, gather kept**: `parallel.tensor_regather_in_backward: false`.
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
    "way", "kept of a token, times t", "kept of a layer and micro-batch, MiB", "active, GiB", "reserved, GiB",
    "fits 80 GB", "active with fp32 sums, GiB", "reserved with fp32 sums, GiB", "fits 80 GB",
]  # fmt: skip
TIME_HEAD = ["way", "step, s", "tokens a second", "to DTensor styles", "to ours, gather kept"]
CURVE_HEAD = ["run", "first loss", "last loss", "largest difference to one process", "check"]
LIMIT = 1e-4  # of the loss, for a curve in fp32


def page(folder: Path, name: str) -> str:
    """The page's text; its pictures are written beside it, with `name` and `name`_loss."""
    curve_rows = _train_curves(folder / f"{name}_loss.svg")
    found = [trace(way) for way in WAYS]
    by_way = {one.way: one for one in found}
    usable, sums = found[0].plan.device.usable, found[0].sums
    _draw(found, folder / f"{name}.svg")
    peaks = [
        [
            one.way.name, f"`{one.way.elements}`", f"{one.kept / MIB:.1f}", f"{one.step.active / GIB:.2f}",
            f"{one.step.reserved / GIB:.2f}", _does_fit(one.step.reserved, usable),
            f"{one.in_fp32.active / GIB:.2f}", f"{one.in_fp32.reserved / GIB:.2f}",
            _does_fit(one.in_fp32.reserved, usable),
        ]
        for one in found
    ]  # fmt: skip
    seconds = {one.way: one.plan.time.step for one in found if one.plan.time is not None}
    rate = {one.way: one.plan.time.tokens_per_second for one in found if one.plan.time is not None}
    times = [
        [
            way.name,
            f"{seconds[way]:.3f}",
            f"{rate[way]:,.0f}",
            *(f"{rate[way] / rate[to]:.3f}x" for to in (STYLES, KEPT)),
        ]
        for way in (STYLES, KEPT, OURS)
    ]
    spec = tp_curve.SPEC
    return PAGE.format(
        torch=torch.__version__, stories=tp_curve.STORIES, tokens=TOKENS, micro=MICRO_BATCHES, card=CARD,
        usable=usable / GIB, sums=sums / GIB, memory=by_way[OURS].plan.device.memory / GIB,
        peaks=format_table(PEAK_HEAD, peaks), times=format_table(TIME_HEAD, times),
        again=seconds[OURS] / seconds[KEPT] - 1, styles=seconds[OURS] / seconds[STYLES] - 1,
        curves=format_table(CURVE_HEAD, curve_rows), limit=LIMIT,
        options=format_table(["nanotron", "here"], OPTIONS), layers=spec.num_layers, width=spec.width,
        heads=spec.num_heads, length=tp_curve.LENGTH, rows=tp_curve.ROWS,
    )  # fmt: skip


def _does_fit(reserved: int, usable: int) -> str:
    return "yes" if reserved <= usable else "**no**"


def _draw(found: list[Traced], path: Path) -> None:
    lines = []
    for one in found:
        top = max(one.points, key=lambda point: point[1])
        lines.append(
            Line(
                one.way.name,
                one.points,
                f"peak {top[1]:.2f} GiB, kept {one.way.elements}",
                (top, f"{top[1]:.1f}"),
            )
        )
    limit = (
        (found[0].plan.device.usable - found[0].sums) / GIB,
        "80 GB card, less fp32 sums of gradients",
    )
    names = [(at, name) for at, name in found[0].names if name]
    write_picture(
        Picture(
            "live GiB of rank 0 over a step",
            "rank 0's actions, in their order",
            "live, GiB",
            lines,
            names,
            limit,
            0.0,
        ),
        path,
    )


def _train_curves(path: Path) -> list[list[str]]:
    """Trains, draws the losses, gives the table's rows. ValueError where a right one is off or the
    wrong one is not.
    """
    rows, steps, ranks = tp_curve.read_stories(), tp_curve.STEPS, tp_curve.RANKS
    runs = {
        f"{ranks} ranks, gathered again": tp_curve.Run(),
        f"{ranks} ranks, gather kept": tp_curve.Run("false"),
        f"{ranks} ranks, one buffer, gather kept": tp_curve.WRONG,
        f"{ranks} ranks, one buffer, gathered again": tp_curve.Run(one_buffer=True),
    }
    found = {"one process": tp_curve.train_losses(rows, steps, 1)[0]}
    found |= dict(
        zip(runs, tp_curve.train_losses(rows, steps, ranks, list(runs.values())), strict=True)
    )
    alone, told = found["one process"], []
    for name, curve in found.items():
        off = tp_curve.find_difference(curve, alone)
        if (off <= LIMIT) == name.endswith("one buffer, gather kept"):
            raise ValueError(
                f"{name}: {off:.1e} of the loss from one process, with a limit of {LIMIT}"
            )
        check = "" if name == "one process" else "equal" if off <= LIMIT else "**caught**"
        told.append(
            [
                name,
                f"{curve[0]:.6f}",
                f"{curve[-1]:.6f}",
                f"{off:.1e} of the loss" if check else "",
                check,
            ]
        )
    lines = [
        Line(name, list(enumerate(curve, 1)), f"last {curve[-1]:.4f}")
        for name, curve in found.items()
        if not name.endswith("buffer, gathered again")
    ]
    lines = [lines[3], *lines[:3]]
    write_picture(Picture("loss over the steps", "step", "loss", lines, height=320), path)
    return told


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def main() -> None:
    """Writes the page and its two pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the page")
    output = parser.parse_args().output
    output.write_text(page(output.parent, output.stem), encoding="utf-8")


if __name__ == "__main__":
    main()
