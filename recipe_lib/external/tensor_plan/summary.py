"""What a plan comes to: layers that are alike taken together, what ranks send each other, and what each one holds."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from recipe_lib.external.tensor_plan.sharding_plan import Boundary, ParameterPlan, ShardingPlan, bounds

BYTES = 2  # of a number in bf16
WIDE_BYTES = 4  # of a gradient that is summed over ranks after the backward, and of the loss's sums: fp32
# Numbers a token that a loss sums where each rank has a part of the logits: largest, sum of exponentials, the label's.
LOSS_NUMBERS = 3
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.\s,;)]|$)")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What ranks exchange in one part of the model, in one forward and backward.

    place: a layer's pattern, or empty for what is in no layer. layers: their numbers. counts: collectives of one such
    part by name, forward and backward. widths: numbers a token that they have together. halves: the same, those of an
    all-reduce twice, which sends as much as a reduce-scatter and an all-gather.
    """

    place: str
    layers: tuple[int, ...]
    counts: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
    widths: tuple[int, int]
    halves: tuple[int, int]


def pattern_of(name: str) -> str:
    """A path or a sentence with `*` for each number in a path: `layers.3.mlp` becomes `layers.*.mlp`."""
    return _NUMBER.sub("*", name)


def parameter_groups(plan: ShardingPlan) -> dict[ParameterPlan, list[str]]:
    """The plan's parameters in their order: those that are held alike by a plan with the pattern of their names."""
    groups: dict[ParameterPlan, list[str]] = {}
    for each in plan.parameters:
        alike = dataclasses.replace(each, name=pattern_of(each.name), axis=-1, reason=pattern_of(each.reason))
        groups.setdefault(alike, []).append(each.name)
    return groups


def boundary_counts(plan: ShardingPlan) -> dict[Boundary, int]:
    """The plan's boundaries in the order of the forward: how many are like one, which has patterns for names."""
    patterns = ((each, tuple(dict.fromkeys(map(pattern_of, each.parameters)))) for each in plan.boundaries)
    return Counter(
        dataclasses.replace(each, module=pattern_of(each.module), axes=(), parameters=names, activation=-1)
        for each, names in patterns
    )


def layers_of(names: Iterable[str]) -> tuple[int, ...]:
    """The first number in each of the paths, in order and once each."""
    found = (_NUMBER.search(name) for name in names)
    return tuple(sorted({int(each[0]) for each in found if each}))


def exchanges(plan: ShardingPlan) -> list[Exchange]:
    """What ranks exchange in one forward and backward: layers that exchange alike as one entry, the rest before them.

    An activation that enters, or is gathered, in several places does so once. A boundary counts as one run of its
    module.
    """
    parts: dict[tuple[str, int], tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]] = {}
    seen: set[tuple[str, int]] = set()
    places: dict[tuple[str, int, str], list[Boundary]] = {}
    for each in plan.boundaries:
        places.setdefault((each.module, each.call, each.place), []).append(each)
    for (module, _, _), here in places.items():
        first = next((each for each in here if each.kind in ("gather", "slice")), here[0])
        way = (" ".join(sorted(each.kind for each in here)), first.activation)
        if not any(each.width for each in here) or (first.activation >= 0 and way in seen):
            continue
        seen.add(way)
        number = _NUMBER.search(module)
        place = (f"{module[: number.start()]}*", int(number[0])) if number else ("", -1)
        counts = parts.setdefault(place, (Counter(), Counter()))
        for phase, name in _collectives({each.kind for each in here if each.width}):
            counts[phase][name, first.width or max(each.width for each in here)] += 1
    alike: dict[tuple[Any, ...], list[int]] = {}
    for (pattern, layer), found in sorted(parts.items(), key=lambda item: item[0][1]):
        named = tuple(tuple(sorted(phase.items())) for phase in found)
        alike.setdefault((pattern, named), []).append(layer)
    return [_exchange(pattern, layers, phases) for (pattern, phases), layers in alike.items()]


def _exchange(pattern: str, layers: list[int], phases: Any) -> Exchange:
    counts, widths, halves = [], [], []
    for phase in phases:
        names: Counter[str] = Counter()
        for (name, _), count in phase:
            names[name] += count
        counts.append(tuple(names.items()))
        widths.append(sum(width * count for (_, width), count in phase))
        halves.append(sum(width * count * (1 + (name == "all-reduce")) for (name, width), count in phase))
    numbers = tuple(layer for layer in layers if layer >= 0)
    return Exchange(pattern, numbers, (counts[0], counts[1]), (widths[0], widths[1]), (halves[0], halves[1]))


def _collectives(kinds: set[str]) -> list[tuple[int, str]]:
    """What one place exchanges: 0 forward, 1 backward, where tokens that entered are gathered again."""
    summed, entering = bool(kinds & {"leave", "lookup"}), bool(kinds & {"enter", "cut"})
    if summed:
        found = [(0, "reduce-scatter"), (1, "all-gather")] if "slice" in kinds else [(0, "all-reduce")]
        return found + ([(1, "all-reduce")] if entering else [])
    if "gather" in kinds:
        return [(0, "all-gather"), *([(1, "reduce-scatter"), (1, "all-gather")] if entering else [])]
    return [(1, "all-gather")] if "slice" in kinds else [(1, "all-reduce")]


def sent_bytes(payload: int, size: int) -> int:
    """Bytes that each of `size` ranks sends in a ring's all-reduce of `payload` bytes: 2 (t - 1) / t of them."""
    return 2 * (size - 1) * payload // size


def step_bytes(plan: ShardingPlan, size: int, tokens: int) -> dict[str, int]:
    """Bytes that a rank sends for `tokens` tokens, by what they are for: forward, backward, loss, gradients.

    forward, backward: activations in bf16, without activation checkpointing, and the parts of cut parameters that all
    ranks use, gathered in both and their gradients scattered. loss: its sums, where logits stay cut.
    gradients: of parameters that ranks have whole and use in part, once a step. The last two in fp32.
    """
    found = {"forward": 0, "backward": 0}
    for each in exchanges(plan):
        for phase, halves in zip(found, each.halves, strict=True):
            found[phase] += max(len(each.layers), 1) * sent_bytes(BYTES * tokens * halves, size) // 2
    gathered = sum(whole_elements(each) for each in plan.parameters)
    found["forward"] += sent_bytes(BYTES * gathered, size) // 2
    found["backward"] += sent_bytes(BYTES * gathered, size)
    loss = LOSS_NUMBERS * tokens if any(axis.output for axis in plan.axes) else 0
    partial = sum(prod(each.shape) for each in plan.parameters if each.gradient == "partial")
    return found | {"loss": sent_bytes(WIDE_BYTES * loss, size), "gradients": sent_bytes(WIDE_BYTES * partial, size)}


def whole_elements(parameter: ParameterPlan) -> int:
    """Elements of a cut parameter that every rank computes with."""
    if not parameter.whole:
        return 0
    across = prod(parameter.shape) // parameter.shape[parameter.dim]
    return across * sum(parameter.segments[number] for number in parameter.whole)


def held_elements(plan: ShardingPlan, size: int) -> int:
    """Elements of all parameters that rank 0 of `size` holds; no rank holds more."""
    found = 0
    for each in plan.parameters:
        elements = prod(each.shape)
        if each.dim >= 0:
            part = sum(stop - start for start, stop in bounds(each.segments, 0, size))
            elements = elements // each.shape[each.dim] * part
        found += elements
    return found


def cut_share(plan: ShardingPlan) -> float:
    """Share of the elements of all parameters that are cut."""
    sizes = [(prod(each.shape), each.dim >= 0) for each in plan.parameters]
    return sum(size for size, cut in sizes if cut) / max(sum(size for size, _ in sizes), 1)


def why_not(plan: ShardingPlan, size: int) -> str:
    """Why a plan does not allow `size` ranks, or empty if it does."""
    if size in plan.legal_sizes:
        return ""
    said = [each for each in plan.refused if each.startswith(f"{size} ranks: ")]
    if said:
        return said[0].partition(": ")[2]
    for axis in plan.axes:
        if not axis.vocabulary and axis.size % size:
            return f"{size} ranks do not divide the {axis.size} units of {_some(axis.parameters)}"
    for each in plan.rewrites:
        if (each.value - each.kept) % size:
            return (
                f"{size} does not divide {each.value - each.kept}, of {each.attribute} of {each.module or 'the model'}"
            )
    return "; ".join(plan.refused[:1]) or "no axis but that of the vocabulary can be cut"


def _some(names: Sequence[str], most: int = 4) -> str:
    patterns = list(dict.fromkeys(map(pattern_of, names)))
    return ", ".join(patterns[:most]) + (" ..." if len(patterns) > most else "")


def held_differently(plan: ShardingPlan, other: ShardingPlan) -> list[str]:
    """Parameters that two plans of one kind of model hold differently, by pattern, a line each."""
    ways: list[dict[str, list[str]]] = [{}, {}]
    for held, each_plan in zip(ways, (plan, other), strict=True):
        for each in parameter_groups(each_plan):
            way = f"{each.role} dim {each.dim}, gradient {each.gradient}"
            held[each.name] = sorted({way, *held.get(each.name, ())})
    return [
        f"{name}: the small copy's is {' and '.join(theirs)}, expected the model's {' and '.join(ways[0][name])}"
        for name, theirs in ways[1].items()
        if ways[0].get(name, theirs) != theirs
    ]
