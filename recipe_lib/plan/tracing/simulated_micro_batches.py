"""The micro-batches of a step that are simulated, and whether they can stand for all of them.

A recipe that declares it (`treats_all_alike`, as the shipped ones do) does the same for every
micro-batch. Two are then enough without a pipeline, three where the last one does more than the
others (`is_last_different`); that they are alike is checked. Another recipe may do anything at any
of them: all are simulated, or as many as there is time for, and the plan is called an estimate.

In a pipeline `follow_actions` notes the actions of a rank as they begin. A simulation runs only as
many micro-batches (`count_micro_batches_to_trace`) as have every state of memory that a whole step
has. `repeat_actions` then counts each traced action for all those that are like it.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from recipe_lib.config import ParallelConfig, list_loaded_plugins
from recipe_lib.config.mesh import compute_micro_batches, count_stages, list_rank_stages
from recipe_lib.data import Batch
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.pipeline import driver
from recipe_lib.parallel.pipeline.schedules import (
    MAKING_GRADIENTS,
    UNITS,
    Action,
    Orders,
    compute_forward_orders,
    compute_orders,
    list_pairs,
)
from recipe_lib.parallel.pipeline.simulation import (
    StageBytes,
    add_transfers,
    compute_live_bytes,
    find_taken,
    simulate,
)
from recipe_lib.plan.simulated_world.simulated_ranks import Patch
from recipe_lib.plan.tracing.trace import ACTION, ALLOC, FREE, OP, ActionMark, Trace
from recipe_lib.plan.tracing.tracer import Tracer
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
            for (begin, _), (end, _) in itertools.pairwise(compared[1:])
        ]
        alike = alike and len(set(bytes_left)) <= 1 and all(items == work[0] for items in work[1:])
        if len(bytes_left) > 1:
            growth = max(growth, bytes_left[-1] - bytes_left[-2])
    events = sum(map(_count_longest, marks.passes)) if is_one_by_one else average_events
    return MicroBatchComparison(alike, growth, events)


def _count_longest(positions: list[tuple[int, int]]) -> int:
    """Return the events of the longest micro-batch of a pass."""
    begins = [event for event, _ in positions]
    return max((end - begin for begin, end in itertools.pairwise(begins)), default=0)


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
        events = trace.events[positions[0][0] : positions[-1][0]]
        if any(kind == OP and trace.ops[number].part == "backward" for kind, number in events):
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
        parts = [
            (index, op.part) for index, op in enumerate(ops) if op.part in ("forward", "backward")
        ]
        begins = [
            index
            for (_, before), (index, part) in itertools.pairwise(parts)
            if (before, part) == ("backward", "forward")
        ]
        begins.append(max((index + 1 for index, part in parts if part == "backward"), default=0))
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


# Without a pipeline the first micro-batch meets no gradients and the second does; all later ones
# are like the second, but for the last one (`is_last_different`).
ALIKE_FROM = 2
# Where so many micro-batches a stage do not show every state of memory, all of them are traced.
_MOST_FOR_A_STAGE = 8

_BASE = 2**32  # more than the micro-batches that a stage can hold

# What tells one moment of a step from another: the action, and how much of each kind is alive
# before and after it.
_State = tuple[Any, ...]


def follow_actions(tracer: Tracer) -> list[Patch]:
    """Return the patch that notes the actions of a pipeline's driver in the trace."""
    previous_kind = ""

    def note_action(action: Action | None) -> None:
        nonlocal previous_kind
        # Gradients are labeled as soon as they are there: the next action may free them.
        if previous_kind in MAKING_GRADIENTS:
            tracer.between_actions()
        mark = ActionMark(action.stage, action.kind, action.micro_batch) if action else ActionMark()
        previous_kind = mark.kind
        tracer.trace.add(ACTION, mark)

    return [(driver, "on_action", note_action)]


def count_micro_batches_to_trace(cfg: Any, pipeline_rank: int = 0) -> int:
    """Return how many of a step's micro-batches show its peak, and every operator at least once.

    Without a pipeline two, or three where the last one is unlike the others. With one, the fewest
    whose actions on this rank of it can stand for those of all (`find_stand_ins`).
    """
    count = compute_micro_batches(cfg)[1]
    if cfg.parallel.pipeline == 1:
        return min(ALIKE_FROM + is_last_different(cfg), count)
    return count_pipeline_micro_batches(
        cfg.parallel, pipeline_rank, count, evaluates=cfg.runs_reference
    )


def is_last_different(cfg: Any) -> bool:
    """Return True if the last micro-batch of a step also reduces the gradients of all."""
    return reduces_once(cfg.parallel)


def count_pipeline_micro_batches(
    parallel: ParallelConfig, pipeline_rank: int, count: int, *, evaluates: bool = False
) -> int:
    """Return how many of a step's `count` micro-batches a rank of a pipeline has to trace.

    evaluates: a step also has forwards without backward, those of a reference model.
    """
    # GPipe holds all micro-batches at a time, so none can stand for another.
    if parallel.pipeline_schedule == "gpipe":
        return count
    kinds = (True, False) if evaluates else (True,)
    for fewer in range(1, min(count, _MOST_FOR_A_STAGE * count_stages(parallel))):
        if all(
            find_stand_ins(
                parallel, pipeline_rank=pipeline_rank, traced=fewer, count=count, training=training
            )
            is not None
            for training in kinds
        ):
            return fewer
    return count


def find_stand_ins(
    parallel: ParallelConfig, pipeline_rank: int, traced: int, count: int, *, training: bool = True
) -> dict[Action, Action] | None:
    """Return for each action of a step of `count` micro-batches one like it in a step of `traced`.

    Two actions of a rank are alike if they meet and leave the same state (`_find_states`). None if
    an action has none that is like it.
    """
    if traced == count:
        actions = get_orders(parallel, count, training=training)[pipeline_rank]
        return dict(zip(actions, actions, strict=True))
    traced_states = _find_states(
        _make_key(parallel), pipeline_rank=pipeline_rank, count=traced, training=training
    )
    states = _find_states(
        _make_key(parallel), pipeline_rank=pipeline_rank, count=count, training=training
    )
    stand_ins: dict[Action, Action] = {}
    used: dict[_State, int] = defaultdict(int)
    for state, actions in states.items():
        candidates = traced_states.get(state, [])
        if not candidates or len(candidates) > len(actions):
            return None
        for action in actions:
            stand_ins[action] = candidates[min(used[state], len(candidates) - 1)]
            used[state] += 1
    # Every traced action has to stand for one at least: else the shorter step might hold more than
    # the longer one ever does.
    return stand_ins if len(used) == len(traced_states) else None


def get_orders(parallel: ParallelConfig, count: int, *, training: bool = True) -> Orders:
    """Return the actions of all ranks, transfers included. They are cached: do not change them."""
    return _compute_orders(_make_key(parallel), count, training)


def list_peers(parallel: ParallelConfig, pipeline_rank: int) -> set[int]:
    """Return the pipeline ranks that one exchanges tensors with; none without a pipeline."""
    pairs = [pair for pair in list_pairs(parallel, tied=False) if pipeline_rank in pair]
    return set().union(*pairs) - {pipeline_rank}


_Key = tuple[tuple[str, Any], ...]


def _make_key(parallel: ParallelConfig) -> _Key:
    """Return the settings that an order depends on, by name: a key for the caches below."""
    names = (
        "pipeline",
        "pipeline_schedule",
        "pipeline_stages_per_rank",
        "pipeline_max_deferred_weight_grads",
        "reduce_gradients",
        "strategy",
    )
    return tuple((name, getattr(parallel, name)) for name in names)


@cache
def _compute_orders(key: _Key, count: int, training: bool) -> Orders:
    parallel = ParallelConfig(**dict(key))
    order_actions = compute_orders if training else compute_forward_orders
    return add_transfers(order_actions(parallel, count), parallel)


@cache
def _find_states(
    key: _Key, pipeline_rank: int, count: int, training: bool
) -> dict[_State, list[Action]]:
    """Return a rank's actions by the states in which it comes to them.

    Micro-batches have one shape, so it is enough to count them: how many each stage holds between
    forward and backward, and between backward and weight gradients; what was received or handed
    over and not used, made and not sent or not taken yet. The state also has the action before,
    which gradients there are, and whether the action reduces those of its stage once a step.
    """
    parallel = ParallelConfig(**dict(key))
    orders = _compute_orders(key, count, training)
    order = orders[pipeline_rank]
    times = simulate(orders, parallel, lambda action: UNITS[action.kind])
    # Each stage counts in digits of its own, so that the sums tell how many of each are alive.
    sizes = {
        stage: StageBytes(kept=_BASE**index, deferred=_BASE**index)
        for index, stage in enumerate(list_rank_stages(parallel, pipeline_rank))
    }
    # Of each stage the last action whose gradients are then reduced, if they are once a step.
    reducing = {
        action.stage: action
        for action in order
        if action.kind in MAKING_GRADIENTS and reduces_once(parallel)
    }
    states: dict[_State, list[Action]] = defaultdict(list)
    before: _State = ()
    previous: _State = ()
    trained: set[tuple[int, str]] = set()
    taken = find_taken(times, order=order, rank=pipeline_rank, parallel=parallel)
    for live in compute_live_bytes(order, parallel=parallel, stages=sizes, boundary=1, taken=taken):
        action = live.action
        after = (live.kept, live.deferred, live.received, live.handed, live.waiting, live.sent)
        state = (
            action.stage,
            action.kind,
            previous,
            tuple(sorted(trained)),
            before,
            after,
            action == reducing.get(action.stage),
        )
        states[state].append(action)
        before = after
        previous = (action.stage, action.kind)
        if action.kind in MAKING_GRADIENTS:
            trained.add(previous)
    return dict(states)


def name_parts(trace: Trace) -> None:
    """Name the part of a step that a pipeline's operators and storages belong to.

    Deferred weight gradients are a part of backward; an exchange is one of what it is for. What an
    input gradient leaves behind for them is an activation, and so is a tensor that was received.
    """
    # Storages that the running action made and that are alive, in the order of their making.
    alive: dict[int, None] = {}
    mark = ActionMark()
    for kind, number in trace.events:
        part = "forward" if mark.kind in ("F", "SF", "RF") else "backward"
        if kind == ACTION:
            if mark.kind == "I":
                for left in alive:
                    trace.storages[left].kind = "activations"
            mark = trace.actions[number]
            alive.clear()
        elif not mark.kind:
            continue
        elif kind == OP and trace.ops[number].part == "other":
            trace.ops[number].part = part
        elif kind == FREE:
            alive.pop(number, None)
        elif kind == ALLOC and trace.storages[number].kind == "temporary":
            storage = trace.storages[number]
            if storage.part == "other":
                storage.part = part
            if mark.kind in ("RF", "RB"):
                storage.kind = "activations" if mark.kind == "RF" else "communication"
            alive[number] = None


def repeat_actions(
    trace: Trace, parallel: ParallelConfig, *, pipeline_rank: int, traced: int, count: int
) -> None:
    """Count each action of a step, with its operators, for as many as it stands for.

    traced: micro-batches that were traced. count: micro-batches of a step. A run of fewer actions
    stays as it is, such as validation, which has one micro-batch.
    """
    if count <= traced:
        return
    for actions in _split_runs(trace):
        marks = [trace.actions[number] for number, _ in actions]
        if len({mark.micro_batch for mark in marks}) != traced:
            continue
        training = any(mark.kind in ("B", "I") for mark in marks)
        stand_ins = find_stand_ins(
            parallel, pipeline_rank=pipeline_rank, traced=traced, count=count, training=training
        )
        if stand_ins is None:
            continue  # forwards alone in a step of the user's own
        times = Counter(stand_ins.values())
        for mark, (_, ops) in zip(marks, actions, strict=True):
            mark.repeats = times[Action(mark.stage, mark.kind, mark.micro_batch)]
            for op in ops:
                trace.ops[op].repeats *= mark.repeats


def _split_runs(trace: Trace) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield each run of actions: (number of the action, numbers of its operators), in order."""
    actions: list[tuple[int, list[int]]] = []
    for kind, number in trace.events:
        if kind == ACTION and not trace.actions[number].kind:
            yield actions
            actions = []
        elif kind == ACTION:
            actions.append((number, []))
        elif kind == OP and actions:
            actions[-1][1].append(number)
