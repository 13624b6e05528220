"""Choose how many micro-batches of a step are simulated, and let them count for all of it.

`trace_rank.simulate` asks `count_micro_batches_to_trace` how many to run, checks by
`compare_micro_batches` that they are alike, and counts them for the others. In a pipeline it does
so by action: the forward, backward, send or receive of one micro-batch in one stage. A trace is the
list of a simulated run's events: allocations, releases and operators.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

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

# A recipe class with `treats_all_alike = True` promises that micro-batches are alike. For one
# without it, a step of so many micro-batches is simulated with all of them at once. Of more, a few
# are simulated first, to see how many events one has.
FEW_MICRO_BATCHES = 4
# The most events of a trace, of all micro-batches of the simulated steps together: half a minute of
# CPU time at most.
MAX_EVENTS = 300_000


@dataclass(frozen=True)
class MicroBatchComparison:
    """A comparison of the simulated micro-batches of a step with each other."""

    # True: all leave as many bytes alive and, from the second on, run the same operators. In a
    # pipeline always True.
    alike: bool = True
    # Bytes alive on the device after the last micro-batch, beyond those after the one before.
    growth: int = 0
    # Events of the trace for one micro-batch, summed over the simulated steps.
    events: int = 0


@dataclass
class MicroBatchMarks:
    """Positions in a trace at which the micro-batches of a step begin and end."""

    # Returns the position now: (number of events so far, bytes alive on the device).
    read_position: Callable[[], tuple[int, int]]
    # For each loop of a recipe over the micro-batches: the position before each of them, and the
    # one after the last.
    passes: list[list[tuple[int, int]]] = field(default_factory=list)

    def follow(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same micro-batches, and mark where each begins and the last one ends."""
        positions: list[tuple[int, int]] = []
        self.passes.append(positions)
        for batch in batches:
            positions.append(self.read_position())
            yield batch
        positions.append(self.read_position())

    def list_complete(self, traced: int) -> list[list[tuple[int, int]]]:
        """Return the passes that reached the end of their `traced` micro-batches."""
        return [positions for positions in self.passes if len(positions) == traced + 1]


def is_declared_uniform(recipe_class: type) -> bool:
    """Return True if a recipe class declares that it treats all layers and micro-batches alike."""
    # A plugin's code may treat any of them differently. `vars`, not `getattr`: the class has to say
    # so itself, as one that inherits from it may have another step.
    return not list_loaded_plugins() and bool(vars(recipe_class).get("treats_all_alike"))


def count_micro_batches_to_simulate(recipe_class: type, cfg: Any) -> int:
    """Return how many of a step's micro-batches a plan simulates at the least.

    Without a promise of the recipe class that they are alike, it is all of them.
    """
    if is_declared_uniform(recipe_class):
        return count_micro_batches_to_trace(cfg)
    _, count = compute_micro_batches(cfg)
    return count


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

    marks: set by the loops over the micro-batches. traced: micro-batches simulated of a step.
    steps: how many steps were simulated. num_different: so many at the end of a step are known to
    differ from the others, and are left out. A recipe that lists its micro-batches first, or leaves
    the loop early, counts as treating them differently.
    """
    average_events = len(trace.events) // max(1, traced)
    if is_pipeline:  # its schedule says which of them are alike (`find_stand_ins`)
        return MicroBatchComparison(alike=True, events=average_events)
    complete_passes = marks.list_complete(traced)
    # A generator that is never asked for its end, such as a reference model's forwards, lacks the
    # last mark only.
    if len(complete_passes) < steps or any(len(positions) < traced for positions in marks.passes):
        return MicroBatchComparison(alike=False, events=average_events)
    alike = is_one_by_one = has_backward(trace, marks, traced)
    growth = 0
    for positions in complete_passes:
        compared = positions[: len(positions) - num_different]
        bytes_left = [alive_bytes for _, alive_bytes in compared[1:]]
        # The first micro-batch is left out: it makes the gradients, the others add to them.
        work = [
            _list_work(trace, begin, end)
            for (begin, _), (end, _) in itertools.pairwise(compared[1:])
        ]
        alike = alike and len(set(bytes_left)) <= 1 and all(items == work[0] for items in work[1:])
        if len(bytes_left) > 1:
            growth = max(growth, bytes_left[-1] - bytes_left[-2])
    # Without a backward between the marks they do not tell which events a micro-batch has.
    events = sum(map(_count_longest, marks.passes)) if is_one_by_one else average_events
    return MicroBatchComparison(alike, growth, events)


def _count_longest(positions: list[tuple[int, int]]) -> int:
    """Return the number of events of the longest micro-batch.

    positions: an entry of `MicroBatchMarks.passes`.
    """
    begins = [event for event, _ in positions]
    return max((end - begin for begin, end in itertools.pairwise(begins)), default=0)


def _list_work(trace: Trace, begin: int, end: int) -> list[tuple[Any, ...]]:
    """Return the allocations and releases, by size, and the operators of events `begin` to `end`.

    The lists are equal for micro-batches that are alike.
    """
    work: list[tuple[Any, ...]] = []
    for kind, index in trace.events[begin:end]:
        if kind in (ALLOC, FREE):
            storage = trace.storages[index]
            work.append((kind, storage.bytes, storage.device))
        elif kind == OP:
            work.append((kind, trace.ops[index].name))
    return work


def has_backward(trace: Trace, marks: MicroBatchMarks, traced: int) -> bool:
    """Return True if a backward ran between the marks of a step. traced: micro-batches of it."""
    # A recipe that lists or sorts its micro-batches before it uses them sets all marks before the
    # first operator: they do not say where a micro-batch begins.
    steps = [
        trace.events[positions[0][0] : positions[-1][0]]
        for positions in marks.list_complete(traced)
    ]
    events = itertools.chain.from_iterable(steps)
    return any(kind == OP and trace.ops[index].part == "backward" for kind, index in events)


def repeat_last_micro_batch(
    trace: Trace, marks: MicroBatchMarks, count: int, traced: int, num_different: int = 0
) -> None:
    """Let the last simulated micro-batch of a step count for those that were not simulated.

    Its operators' `repeats` are multiplied. count: micro-batches of a step. traced: how many of
    them were simulated. num_different: so many at the end of the step differ from the others; the
    one before them is repeated.
    """
    # Indices of operators. A set, as the loops of two models may run side by side.
    repeated: set[int] = set()
    for positions in marks.list_complete(traced):
        begin = positions[-2 - num_different][0]
        end = positions[-1 - num_different][0]
        repeated |= {index for kind, index in trace.events[begin:end] if kind == OP}
    for index in repeated:
        trace.ops[index].repeats *= count - traced + 1  # for itself, and for those left out


def repeat_last_by_parts(trace: Trace, *, count: int, traced: int, num_different: int = 0) -> None:
    """Let the last simulated micro-batch count for the others, where no marks tell its begin.

    A micro-batch is then taken to begin with a forward after a backward, and the last one to end
    with the last backward. Arguments: as in `repeat_last_micro_batch`.
    """
    for phase in trace.phases:  # a step is one, and set-up, which has no backward, another
        ops = list(trace.iterate_ops(phase))
        parts = [
            (index, op.part) for index, op in enumerate(ops) if op.part in ("forward", "backward")
        ]
        begins = [
            index
            for (_, previous_part), (index, part) in itertools.pairwise(parts)
            if (previous_part, part) == ("backward", "forward")
        ]
        begins.append(max((index + 1 for index, part in parts if part == "backward"), default=0))
        if len(begins) > 1 + num_different:
            for op in ops[begins[-2 - num_different] : begins[-1 - num_different]]:
                op.repeats *= count - traced + 1


def count_affordable(comparison: MicroBatchComparison, count: int, fewest: int) -> int:
    """Return how many of `count` micro-batches MAX_EVENTS allows to simulate, `fewest` at least.

    comparison: of micro-batches that were simulated, for the number of events of one.
    """
    return max(fewest, min(count, MAX_EVENTS // max(1, comparison.events)))


def describe_estimate(comparison: MicroBatchComparison, traced: int, count: int) -> str:
    """Return why figures from `traced` of a step's `count` micro-batches are an estimate."""
    if comparison.growth:
        assumption = (
            f"each left {format_bytes(comparison.growth)} more than the one before, and so are the"
            " others taken to do"
        )
    elif comparison.alike:
        assumption = "the others are taken to be like them"
    else:
        assumption = "these are not alike, and what the others take is not known"
    return f"{traced} of a step's {count} micro-batches are simulated; {assumption}"


# Micro-batches that are enough without a pipeline: the first makes the gradients and the second
# adds to them. All later ones are like the second, but for the last one where it also reduces the
# gradients of all (`reduces_once`).
ALIKE_FROM = 2
# In a pipeline: where so many micro-batches for each stage do not show every state of memory, all
# of them are traced.
_MOST_FOR_A_STAGE = 8

# In `_find_states`, bytes of one micro-batch at stage i of a rank are _BASE**i. It is more than the
# micro-batches that a stage can hold, so that a sum of bytes tells how many each stage has.
_BASE = 2**32


class _State(NamedTuple):
    """The state of a rank's memory at an action, as `_find_states` counts it."""

    stage: int
    kind: str  # of the action, such as `F` for a forward
    previous: tuple[Any, ...]  # (stage, kind) of the action before; (): there is none
    with_gradients: tuple[tuple[int, str], ...]  # (stage, kind) of actions that have made some
    # How many micro-batches of each kind (kept for backward, deferred weight gradients, ...) are
    # alive before and after the action.
    before: tuple[int, ...]
    after: tuple[int, ...]
    reduces: bool  # True: the action reduces the gradients of its stage


def follow_actions(tracer: Tracer) -> list[Patch]:
    """Return the patch that notes the actions of a pipeline's driver in the trace.

    The driver runs a rank's actions in the order of the schedule. A patch is (module, name of an
    attribute, its replacement).
    """
    previous_kind = ""  # of the action that ran last, such as `F` for a forward

    # The driver calls it before each action, and with None after the last one.
    def note_action(action: Action | None) -> None:
        nonlocal previous_kind
        # Gradients are labeled as soon as they are made: the next action may free them.
        if previous_kind in MAKING_GRADIENTS:
            tracer.between_actions()
        mark = ActionMark(action.stage, action.kind, action.micro_batch) if action else ActionMark()
        previous_kind = mark.kind
        tracer.trace.add(ACTION, mark)

    return [(driver, "on_action", note_action)]


def count_micro_batches_to_trace(cfg: Any, pipeline_rank: int = 0) -> int:
    """Return how many of a step's micro-batches show its peak, and every operator at least once.

    Without a pipeline it is two, or three where the last one is unlike the others. In a pipeline it
    is the fewest whose actions on this rank can stand for those of all (`find_stand_ins`).
    pipeline_rank: position of the rank in its pipeline, here and below.
    """
    _, count = compute_micro_batches(cfg)
    if cfg.parallel.pipeline == 1:
        return min(ALIKE_FROM + reduces_once(cfg.parallel), count)
    return count_pipeline_micro_batches(
        cfg.parallel, pipeline_rank, count, evaluates=cfg.runs_reference
    )


def count_pipeline_micro_batches(
    parallel: ParallelConfig, pipeline_rank: int, count: int, *, evaluates: bool = False
) -> int:
    """Return how many of a step's `count` micro-batches a rank of a pipeline has to trace.

    evaluates: True if a step also has forwards without backward, those of a reference model.
    """
    # GPipe holds all micro-batches at a time, so none can stand for another.
    if parallel.pipeline_schedule == "gpipe":
        return count
    training_values = (True, False) if evaluates else (True,)
    for traced in range(1, min(count, _MOST_FOR_A_STAGE * count_stages(parallel))):
        if all(
            find_stand_ins(
                parallel, pipeline_rank=pipeline_rank, traced=traced, count=count, training=training
            )
            is not None
            for training in training_values
        ):
            return traced
    return count


def find_stand_ins(
    parallel: ParallelConfig, pipeline_rank: int, traced: int, count: int, *, training: bool = True
) -> dict[Action, Action] | None:
    """Return for each action of a step of `count` micro-batches one like it in a step of `traced`.

    Two actions of a rank are alike if memory is in the same state before, and in the same after
    them (`_find_states`). Return None if an action has none like it. training: False for forwards
    without backward.
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
    num_given: dict[_State, int] = defaultdict(int)  # by state, actions that have a stand-in
    for state, actions in states.items():
        candidates = traced_states.get(state, [])
        if not candidates or len(candidates) > len(actions):
            return None
        for action in actions:
            # One after the other, so that each candidate is used; the last one for all others.
            stand_ins[action] = candidates[min(num_given[state], len(candidates) - 1)]
            num_given[state] += 1
    # Every traced action has to stand for one at least: else the shorter step might hold more than
    # the longer one ever does.
    return stand_ins if len(num_given) == len(traced_states) else None


def get_orders(parallel: ParallelConfig, count: int, *, training: bool = True) -> Orders:
    """Return each rank's actions of a step, transfers included, by pipeline rank.

    Do not change the result: it is cached.
    """
    return _compute_orders(_make_key(parallel), count, training)


def list_peers(parallel: ParallelConfig, pipeline_rank: int) -> set[int]:
    """Return the pipeline ranks that a rank exchanges activations with; none without a pipeline."""
    pairs = [pair for pair in list_pairs(parallel, tied=False) if pipeline_rank in pair]
    return set().union(*pairs) - {pipeline_rank}


_Key = tuple[tuple[str, Any], ...]  # (name, value) of settings; hashable, as the caches need it


def _make_key(parallel: ParallelConfig) -> _Key:
    """Return the settings that an order of actions depends on: a key for the caches below."""
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
    # Arguments: as of `get_orders`, with the key of its config.
    parallel = ParallelConfig(**dict(key))
    order_actions = compute_orders if training else compute_forward_orders
    return add_transfers(order_actions(parallel, count), parallel)


@cache
def _find_states(
    key: _Key, pipeline_rank: int, count: int, training: bool
) -> dict[_State, list[Action]]:
    """Return a rank's actions by the state of its memory before and after them.

    Micro-batches have one shape, so a state only counts them: how many each stage keeps between
    forward and backward, and between backward and deferred weight gradients. It also counts the
    tensors between stages: received, handed over on this rank, not yet sent, sent and perhaps not
    yet taken. A state also has the action before, which stages have gradients, and whether the
    action reduces those of its stage.
    """
    parallel = ParallelConfig(**dict(key))
    orders = _compute_orders(key, count, training)
    order = orders[pipeline_rank]
    times = simulate(orders, parallel, lambda action: UNITS[action.kind])
    # Each stage counts in digits of its own: a number in base _BASE.
    sizes = {
        stage: StageBytes(kept=_BASE**index, deferred=_BASE**index)
        for index, stage in enumerate(list_rank_stages(parallel, pipeline_rank))
    }
    # Stage -> its last action that makes gradients, after which they are reduced if that is done
    # once a step.
    reducing = {
        action.stage: action
        for action in order
        if action.kind in MAKING_GRADIENTS and reduces_once(parallel)
    }
    states: dict[_State, list[Action]] = defaultdict(list)
    before: tuple[int, ...] = ()  # what is alive before the action
    previous: tuple[Any, ...] = ()  # (stage, kind) of the action before
    made_gradients: set[tuple[int, str]] = set()  # (stage, kind) of actions that have made some
    # Send -> index of the action before which the rank waits until the tensor has been taken.
    taken = find_taken(times, order=order, rank=pipeline_rank, parallel=parallel)
    for live in compute_live_bytes(order, parallel=parallel, stages=sizes, boundary=1, taken=taken):
        action = live.action
        after = (live.kept, live.deferred, live.received, live.handed, live.waiting, live.sent)
        state = _State(
            stage=action.stage,
            kind=action.kind,
            previous=previous,
            with_gradients=tuple(sorted(made_gradients)),
            before=before,
            after=after,
            reduces=action == reducing.get(action.stage),
        )
        states[state].append(action)
        before = after
        previous = (action.stage, action.kind)
        if action.kind in MAKING_GRADIENTS:
            made_gradients.add((action.stage, action.kind))
    return dict(states)


def name_parts(trace: Trace) -> None:
    """Set `part` of a pipeline's operators and storages that run outside of modules.

    Deferred weight gradients (W) are a part of backward. A transfer is a part of forward or
    backward, by the tensor that it carries. Memory that an input gradient (I) leaves for W gets the
    kind `activations`, and so does a received input of a stage.
    """
    # Indices of storages that the running action made and that are alive, as an ordered set.
    alive: dict[int, None] = {}
    mark = ActionMark()  # the running action
    for kind, index in trace.events:
        # Forward, and send and receive of its activations.
        part = "forward" if mark.kind in ("F", "SF", "RF") else "backward"
        if kind == ACTION:
            if mark.kind == "I":
                for storage_index in alive:
                    trace.storages[storage_index].kind = "activations"
            mark = trace.actions[index]
            alive.clear()
        elif not mark.kind:  # after the last action of a step
            continue
        elif kind == OP and trace.ops[index].part == "other":
            trace.ops[index].part = part
        elif kind == FREE:
            alive.pop(index, None)
        elif kind == ALLOC and trace.storages[index].kind == "temporary":
            storage = trace.storages[index]
            if storage.part == "other":
                storage.part = part
            if mark.kind in ("RF", "RB"):  # receives of activations, and of gradients
                storage.kind = "activations" if mark.kind == "RF" else "communication"
            alive[index] = None


def repeat_actions(
    trace: Trace, parallel: ParallelConfig, *, pipeline_rank: int, traced: int, count: int
) -> None:
    """Set `repeats` of each traced action and its operators to how many actions it stands for.

    traced: micro-batches of a step that were traced. count: all micro-batches of a step. Where
    another number of micro-batches ran, as in validation, the actions stay as they are.
    """
    if count <= traced:
        return
    for actions in _split_runs(trace):
        marks = [trace.actions[index] for index, _ in actions]
        if len({mark.micro_batch for mark in marks}) != traced:
            continue
        # B: backward. I: its half for the inputs.
        training = any(mark.kind in ("B", "I") for mark in marks)
        stand_ins = find_stand_ins(
            parallel, pipeline_rank=pipeline_rank, traced=traced, count=count, training=training
        )
        if stand_ins is None:
            continue  # forwards without backward in a step that a user has written
        times = Counter(stand_ins.values())
        for mark, (_, op_indices) in zip(marks, actions, strict=True):
            mark.repeats = times[Action(mark.stage, mark.kind, mark.micro_batch)]
            for op_index in op_indices:
                trace.ops[op_index].repeats *= mark.repeats


def _split_runs(trace: Trace) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield the actions of each call of the driver as (index of action, indices of its operators).

    A call ends with a mark without a kind.
    """
    actions: list[tuple[int, list[int]]] = []
    for kind, index in trace.events:
        if kind == ACTION and not trace.actions[index].kind:
            yield actions
            actions = []
        elif kind == ACTION:
            actions.append((index, []))
        elif kind == OP and actions:
            actions[-1][1].append(index)
