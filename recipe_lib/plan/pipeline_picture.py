"""A step of a pipeline as SVG: a row for each rank, a box for each forward and backward, gaps where it waits.

No torch in here.
"""

import html
import math
from collections.abc import Iterable

from recipe_lib.plan.result import ActionSpan, PipelinePlan, StagePlan
from recipe_lib.plan.tables import duration

# By kind: what it is, the color.
_KINDS = {
    "F": ("forward", "k0"),
    "B": ("backward", "k5"),
    "I": ("backward: gradient of the input", "k3"),
    "W": ("backward: gradients of the weights", "k2"),
}
_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 150, 12, 22
_ROW, _GAP = 30, 8
_DIGIT = 6.0  # a number is left out where its box is narrower than its digits


def draw_pipeline(plan: PipelinePlan) -> str:
    """The picture with its key; nothing where the times are not known."""
    if not plan.spans or not plan.seconds:
        return ""
    end = plan.seconds
    height = _TOP + len(plan.places) * (_ROW + _GAP)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="what each rank computes over a step">']
    for value in _ticks(end):
        x = _LEFT + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height}"/>')
        parts.append(f'<text x="{x:.1f}" y="12" text-anchor="middle">{duration(value) if value else "0"}</text>')
    rows = {place.place: _TOP + at * (_ROW + _GAP) for at, place in enumerate(plan.places)}
    for place in plan.places:
        parts += _row(place, rows[place.place])
    turns = {stage: turn for place in plan.places for turn, stage in enumerate(place.stages)}
    for span in plan.spans:
        parts.append(_box(span, rows[span.place], scale, turns.get(span.stage, 0)))
    return f'<figure>{"".join(parts)}</svg>{_keys(plan)}<p class="note">{_caption(plan)}</p></figure>'


def _row(place: StagePlan, y: int) -> list[str]:
    """A rank's name, and the whole of its time: what no box covers is waiting."""
    layers = html.escape(layers_text(place))
    return [
        f'<text x="0" y="{y + 13}">rank {place.rank}, idle {place.idle:.1%}</text>',
        f'<text x="0" y="{y + 27}">layers {layers}</text>',
        f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}"/>',
    ]


def _box(span: ActionSpan, y: int, scale: float, turn: int) -> str:
    """A box with the number of its micro-batch; those of a rank's later stages are lower, to tell them apart."""
    what, style = _KINDS.get(span.kind, (span.kind, "k9"))
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    top = y + 4 * min(turn, 3)
    title = f"micro-batch {span.micro_batch}, stage {span.stage}, {what}, {duration(span.end - span.start)}"
    box = (
        f'<rect class="box {style}" x="{x:.2f}" y="{top}" width="{max(width, 0.1):.2f}" height="{_ROW - (top - y)}">'
        f"<title>{html.escape(title)}</title></rect>"
    )
    number = str(span.micro_batch)
    if width < _DIGIT * len(number) + 1:
        return box
    return f'{box}<text class="mark" x="{x + width / 2:.1f}" y="{y + 23}">{number}</text>'


def _keys(plan: PipelinePlan) -> str:
    items = [
        f'<li><svg viewBox="0 0 10 10"><rect class="{style}" width="10" height="10" rx="2"/></svg>{what}</li>'
        for kind, (what, style) in _KINDS.items()
        if any(span.kind == kind for span in plan.spans)
    ]
    items.append('<li><svg viewBox="0 0 10 10"><rect class="idle" width="10" height="10" rx="2"/></svg>waiting</li>')
    return f'<ul class="keys">{"".join(items)}</ul>'


def _caption(plan: PipelinePlan) -> str:
    text = f"{plan.schedule}, {plan.micro_batches} micro-batches, planned times. Numbers: micro-batches."
    if plan.stages_per_rank > 1:
        text += " A rank's later stages have lower boxes."
    return html.escape(f"{text} The optimizer and what else a step does beside the pipeline are not here.")


def layers_text(place: StagePlan) -> str:
    """`0-3, 28-31`: the layers of a place's stages."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in place.layers)


def _ticks(end: float) -> Iterable[float]:
    """Up to 6 round values (1, 2 or 5 times a power of ten apart) from 0."""
    power = 10.0 ** math.floor(math.log10(end / 5))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= end / 5 * (1 - 1e-9))
    return (number * gap for number in range(int(end / gap) + 1))
