"""The micro-batches of a step that are simulated, and whether they can stand for all of them.

A recipe that declares it (`treats_all_alike`, as the shipped ones do) does the same for every
micro-batch. Two are then enough without a pipeline, three where the last one does more than the
others (`is_last_different`); that they are alike is checked. Another recipe may do anything at any
of them: all are simulated, or as many as there is time for, and the plan is called an estimate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.mesh import compute_micro_batches
from recipe_lib.config.registry import list_loaded_plugins
from recipe_lib.data import Batch
from recipe_lib.plan.tracing.pipeline_actions import count_micro_batches_to_trace
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, Trace
from recipe_lib.units import format_bytes

# Of a recipe that does not declare itself uniform, so many are simulated at once. Of more, the
# first ones are simulated to see how many events one has.
FEW_MICRO_BATCHES = 4
# Events of all micro-batches of the simulated steps together: half a minute of CPU time at most.
MAX_EVENTS = 300_000


@dataclass(frozen=True)
class MicroBatchComparison:
    """A comparison of the simulated micro-batches of a step with each other."""

    # They leave the same memory behind and, from the second on, do the same.
    alike: bool = True
    # Bytes that the last of them left beyond the one before.
    growth: int = 0
    # Events of one of them, summed over the simulated steps.
    events: int = 0


@dataclass
class MicroBatchMarks:
    """Positions in a trace at which the micro-batches of a step begin and end."""

    # Returns (events so far, bytes alive on the device).
    read_position: Callable[[], tuple[int, int]]
    # For each time that a recipe goes through the micro-batches: a position before each of them,
    # and one after the last.
    passes: list[list[tuple[int, int]]] = field(default_factory=list)

    def follow(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same micro-batches, and mark where each begins and the last one ends."""
        marks: list[tuple[int, int]] = []
        self.passes.append(marks)
        for batch in batches:
            marks.append(self.read_position())
            yield batch
        marks.append(self.read_position())

    def list_complete(self, traced: int) -> list[list[tuple[int, int]]]:
        """Return the passes that reached the end of their `traced` micro-batches."""
        return [marks for marks in self.passes if len(marks) == traced + 1]


def is_declared_uniform(recipe_class: type) -> bool:
    """Return whether a recipe declares that it treats all layers and micro-batches alike."""
    # A plugin's code may treat any of them differently. `vars`, not `getattr`: the class has to say
    # so itself, as one that inherits from it may have another step.
    return not list_loaded_plugins() and bool(vars(recipe_class).get("treats_all_alike"))


def count_micro_batches_to_simulate(recipe_class: type, cfg: Any) -> int:
    """Return the micro-batches of a step that a plan goes through at the least."""
    if is_declared_uniform(recipe_class):
        return count_micro_batches_to_trace(cfg)
    return compute_micro_batches(cfg)[1]


def compare_micro_batches(
    trace: Trace,
    marks: MicroBatchMarks,
    *,
    traced: int,
    steps: int,
    is_pipeline: bool = False,
    num_different: int = 0,
) -> MicroBatchComparison:
    """Compare the micro-batches that were simulated with each other.

    traced: micro-batches of a step. steps: that were simulated. num_different: so many at the end
    are known to differ from the others, and are left out. A recipe that does not take them one
    after the other, or lists them before, is taken to treat them differently.
    """
    average_events = len(trace.events) // max(1, traced)
    if is_pipeline:  # its schedule says which of them are alike
        return MicroBatchComparison(alike=True, events=average_events)
    complete = marks.list_complete(traced)
    # A generator that is never asked for its end, such as a reference model's forwards, lacks the
    # last mark only.
    if len(complete) < steps or any(len(positions) < traced for positions in marks.passes):
        return MicroBatchComparison(alike=False, events=average_events)
    alike = is_one_by_one = has_backward(trace, marks, traced)
    growth = 0
    for positions in complete:
        compared = positions[: len(positions) - num_different]
        bytes_left = [alive for _, alive in compared[1:]]
        # The first one differs from the others: it meets no gradients.
        work = [
            _list_work(trace, begin, end)
            for (begin, _), (end, _) in zip(compared[1:], compared[2:], strict=False)
        ]
        alike = alike and len(set(bytes_left)) <= 1 and all(items == work[0] for items in work[1:])
        if len(bytes_left) > 1:
            growth = max(growth, bytes_left[-1] - bytes_left[-2])
    events = average_events
    if is_one_by_one:
        events = sum(_count_longest(positions) for positions in marks.passes)
    return MicroBatchComparison(alike, growth, events)


def _count_longest(positions: list[tuple[int, int]]) -> int:
    """Return the events of the longest micro-batch of a pass."""
    begins = [event for event, _ in positions]
    return max((end - begin for begin, end in zip(begins, begins[1:], strict=False)), default=0)


def _list_work(trace: Trace, begin: int, end: int) -> list[tuple[Any, ...]]:
    """Return what is the same for micro-batches that are alike, of the events `begin` to `end`.

    It has the sizes in the order in which they come and go, and the operators.
    """
    work: list[tuple[Any, ...]] = []
    for kind, number in trace.events[begin:end]:
        if kind in (ALLOC, FREE):
            storage = trace.storages[number]
            work.append((kind, storage.bytes, storage.device))
        elif kind == OP:
            work.append((kind, trace.ops[number].name))
    return work


def has_backward(trace: Trace, marks: MicroBatchMarks, traced: int) -> bool:
    """Return whether a backward ran between the marks."""
    # A recipe that lists, sorts or numbers its micro-batches sets all marks before the first
    # operator: they do not say where a micro-batch begins.
    for positions in marks.list_complete(traced):
        for kind, number in trace.events[positions[0][0] : positions[-1][0]]:
            if kind == OP and trace.ops[number].part == "backward":
                return True
    return False


def repeat_last_micro_batch(
    trace: Trace, marks: MicroBatchMarks, count: int, traced: int, num_different: int = 0
) -> None:
    """Let the last simulated micro-batch of a step count for those that were not simulated.

    count, traced: micro-batches of a step, and those simulated. num_different: so many at the end
    differ from the others; the one before them is repeated.
    """
    repeated: set[int] = set()  # a set, as two models may go through them side by side
    for positions in marks.list_complete(traced):
        begin = positions[-2 - num_different][0]
        end = positions[-1 - num_different][0]
        repeated |= {number for kind, number in trace.events[begin:end] if kind == OP}
    for number in repeated:
        trace.ops[number].repeats *= count - traced + 1


def repeat_last_by_parts(trace: Trace, *, count: int, traced: int, num_different: int = 0) -> None:
    """Repeat the last micro-batch where marks do not tell where it begins.

    A micro-batch then begins with a forward after a backward, and the last one ends with the last
    backward. Arguments as of `repeat_last_micro_batch`.
    """
    for phase in trace.phases:
        ops = list(trace.iterate_ops(phase))
        begins: list[int] = []
        end = 0
        is_after_backward = False
        for index, op in enumerate(ops):
            if op.part == "forward" and is_after_backward:
                begins.append(index)
                is_after_backward = False
            if op.part == "backward":
                is_after_backward = True
                end = index + 1
        begins.append(end)
        if len(begins) > 1 + num_different:
            for op in ops[begins[-2 - num_different] : begins[-1 - num_different]]:
                op.repeats *= count - traced + 1


def count_affordable(comparison: MicroBatchComparison, count: int, fewest: int) -> int:
    """Return how many of `count` micro-batches there is time for, `fewest` at least."""
    return max(fewest, min(count, MAX_EVENTS // max(1, comparison.events)))


def describe_estimate(comparison: MicroBatchComparison, traced: int, count: int) -> str:
    """Return why figures from `traced` of a step's `count` micro-batches are an estimate."""
    if comparison.growth:
        how = (
            f"each left {format_bytes(comparison.growth)} more than the one before, and so are the"
            " others taken to do"
        )
    elif comparison.alike:
        how = "the others are taken to be like them"
    else:
        how = "these are not alike, and what the others take is not known"
    return f"{traced} of a step's {count} micro-batches are simulated; {how}"
