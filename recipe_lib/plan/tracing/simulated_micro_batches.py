"""How many of a step's micro-batches are simulated, and whether those can stand for all of them.

A recipe that says so (`treats_all_alike`, as the shipped ones do) does the same for every
micro-batch: what is alive after the second is what was alive after the first, which is checked, and
so two are enough without a pipeline; three where the last one does more than the others
(`last_is_unlike`). Another one may do anything at any of them: all are simulated. Where that would
take too long, as many as there is time for, and the plan is called an estimate.
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

# Of a recipe that does not say so, so many are simulated at once; of more, how long one takes is
# looked at before.
FEW_MICRO_BATCHES = 4
# Events of all micro-batches of the simulated steps together: half a minute of CPU time at most.
MAX_EVENTS = 300_000


@dataclass(frozen=True)
class MicroBatchComparison:
    """alike: all micro-batches that were simulated leave the same behind and, from the second on,
    do the same. growth: bytes that the last of them left beyond the one before. events: of one of
    them, in all steps.
    """

    alike: bool = True
    growth: int = 0
    events: int = 0


@dataclass
class MicroBatchMarks:
    """Where the micro-batches of a step begin and end in a trace, each time that a recipe goes
    through them.

    now: gives (events so far, bytes alive on the device).
    """

    now: Callable[[], tuple[int, int]]
    found: list[list[tuple[int, int]]] = field(default_factory=list)

    def follow(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches, with a mark before each and after the last."""
        marks: list[tuple[int, int]] = []
        self.found.append(marks)
        for batch in batches:
            marks.append(self.now())
            yield batch
        marks.append(self.now())


def is_declared_uniform(recipe_class: type) -> bool:
    """Return whether a recipe says that it does the same for every layer and micro-batch, and no
    plugin is in the run.

    Its class has to say so itself: one that inherits from it may have another step.
    """
    return not list_loaded_plugins() and bool(vars(recipe_class).get("treats_all_alike"))


def count_micro_batches_to_simulate(recipe_class: type, cfg: Any) -> int:
    """Micro-batches of a step that a plan goes through at the least."""
    return (
        count_micro_batches_to_trace(cfg)
        if is_declared_uniform(recipe_class)
        else compute_micro_batches(cfg)[1]
    )


def compare_micro_batches(
    trace: Trace,
    passes: MicroBatchMarks,
    traced: int,
    steps: int,
    *,
    piped: bool = False,
    unlike: int = 0,
) -> MicroBatchComparison:
    """Of the micro-batches that were gone through. traced: of a step. steps: that were simulated.
    unlike: so many at the end are known to be unlike the others, and are left out.

    Where a recipe takes them in another way than one after the other, or lists them before, they
    count as unlike; piped: a pipeline does, whose schedule says which of them are alike.
    """
    if piped:
        return MicroBatchComparison(alike=True, events=len(trace.events) // max(1, traced))
    in_turn = has_backward(trace, passes, traced)
    whole = [marks for marks in passes.found if len(marks) == traced + 1]
    # One that makes its result when it is asked for, as a reference's forwards do, is not asked for
    # an end.
    if len(whole) < steps or any(len(marks) < traced for marks in passes.found):
        return MicroBatchComparison(alike=False, events=len(trace.events) // max(1, traced))
    whole = [marks[: len(marks) - unlike] for marks in whole]
    left = [[alive for _, alive in marks[1:]] for marks in whole]
    alike = in_turn and all(len(set(alive)) <= 1 for alive in left)
    for marks in whole:
        done = [
            _list_work(trace, begin[0], end[0])
            for begin, end in zip(marks[1:], marks[2:], strict=False)
        ]
        alike = alike and all(other == done[0] for other in done[1:])
    growth = max((alive[-1] - alive[-2] for alive in left if len(alive) > 1), default=0)
    spans = [
        [end[0] - begin[0] for begin, end in zip(marks, marks[1:], strict=False)]
        for marks in passes.found
    ]
    events = (
        sum(max(span, default=0) for span in spans)
        if in_turn
        else len(trace.events) // max(1, traced)
    )
    return MicroBatchComparison(alike, max(0, growth), events)


def _list_work(trace: Trace, begin: int, end: int) -> list[tuple[Any, ...]]:
    """What is the same for micro-batches alike: sizes in the order in which they come and go, and
    operators.
    """
    found: list[tuple[Any, ...]] = []
    for kind, number in trace.events[begin:end]:
        if kind in (ALLOC, FREE):
            storage = trace.storages[number]
            found.append((kind, storage.bytes, storage.device))
        elif kind == OP:
            found.append((kind, trace.ops[number].name))
    return found


def has_backward(trace: Trace, passes: MicroBatchMarks, traced: int) -> bool:
    """Return whether the marks enclose a backward.

    They do not where a recipe lists, sorts or numbers its micro-batches: those marks are all set
    before the first operator, and say nothing of where a micro-batch begins.
    """
    for marks in passes.found:
        for kind, number in (
            trace.events[marks[0][0] : marks[-1][0]] if len(marks) == traced + 1 else []
        ):
            if kind == OP and trace.ops[number].part == "backward":
                return True
    return False


def repeat_last_micro_batch(
    trace: Trace, passes: MicroBatchMarks, count: int, traced: int, unlike: int = 0
) -> None:
    """The operators of the last micro-batch that was gone through count for all that were not too,
    `count` in all.

    traced: of a step. unlike: so many at the end are unlike the others; the one before them stands
    for those.
    """
    last: set[int] = set()  # two models may go through them side by side
    for marks in passes.found:
        if len(marks) == traced + 1:
            events = trace.events[marks[-2 - unlike][0] : marks[-1 - unlike][0]]
            last |= {number for kind, number in events if kind == OP}
    for number in last:
        trace.ops[number].repeats *= count - traced + 1


def repeat_last_by_parts(trace: Trace, count: int, traced: int, unlike: int = 0) -> None:
    """Do the same by the operators' parts, where marks do not tell: a micro-batch begins with a
    forward after a backward, and the last one ends with the last backward.
    """
    for phase in trace.phases:
        ops = list(trace.iterate_ops(phase))
        begins: list[int] = []
        end = 0
        is_behind = False
        for index, op in enumerate(ops):
            if op.part == "forward" and is_behind:
                begins.append(index)
                is_behind = False
            if op.part == "backward":
                is_behind = True
                end = index + 1
        begins.append(end)
        if len(begins) > 1 + unlike:
            for op in ops[begins[-2 - unlike] : begins[-1 - unlike]]:
                op.repeats *= count - traced + 1


def count_affordable(found: MicroBatchComparison, count: int, fewest: int) -> int:
    """How many of `count` micro-batches there is time for, `fewest` at least."""
    return max(fewest, min(count, MAX_EVENTS // max(1, found.events)))


def describe_estimate(found: MicroBatchComparison, traced: int, count: int) -> str:
    """Why figures that rest on `traced` of a step's `count` micro-batches are an estimate."""
    if found.growth:
        how = (
            f"each left {format_bytes(found.growth)} more than the one before, and so are the"
            " others taken to do"
        )
    elif found.alike:
        how = "the others are taken to be like them"
    else:
        how = "these are not alike, and what the others take is not known"
    return f"{traced} of a step's {count} micro-batches are simulated; {how}"
