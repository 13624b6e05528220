"""Actions of a pipeline's ranks in a trace.

`follow_actions` notes them as they begin. All micro-batches have one shape, so a simulation runs
only as many (`count_micro_batches_to_trace`) as have every state of memory that a whole step has.
`repeat_actions` then counts each traced action for all those that are like it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from recipe_lib.config.mesh import compute_micro_batches, count_stages, list_rank_stages
from recipe_lib.config.schema import ParallelConfig
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
from recipe_lib.plan.simulated_world.patches import Patch
from recipe_lib.plan.tracing.trace import ACTION, ALLOC, FREE, OP, ActionMark, Trace
from recipe_lib.plan.tracing.tracer import Tracer

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
    trace = tracer.trace
    previous_kind = ""

    def note_action(action: Action | None) -> None:
        nonlocal previous_kind
        # Gradients are labeled as soon as they are there: the next action may free them.
        if previous_kind in MAKING_GRADIENTS:
            tracer.between_actions()
        mark = ActionMark()
        if action is not None:
            mark = ActionMark(action.stage, action.kind, action.micro_batch)
        previous_kind = mark.kind
        trace.actions.append(mark)
        trace.events.append((ACTION, len(trace.actions) - 1))

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
            find_stand_ins(parallel, pipeline_rank, fewer, count, training=training) is not None
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
        orders = get_orders(parallel, count, training=training)
        return {action: action for action in orders[pipeline_rank]}
    traced_states = _find_states(_make_key(parallel), pipeline_rank, traced, training)
    states = _find_states(_make_key(parallel), pipeline_rank, count, training)
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
    last_backwards: dict[int, Action] = {}
    if reduces_once(parallel):
        last_backwards = {
            action.stage: action for action in order if action.kind in MAKING_GRADIENTS
        }
    states: dict[_State, list[Action]] = defaultdict(list)
    before: _State = ()
    previous: _State = ()
    trained: set[tuple[int, str]] = set()
    taken = find_taken(times, order, pipeline_rank, parallel)
    for live in compute_live_bytes(order, parallel, sizes, 1, taken=taken):
        action = live.action
        after = (live.kept, live.deferred, live.received, live.handed, live.waiting, live.sent)
        state = (
            action.stage,
            action.kind,
            previous,
            tuple(sorted(trained)),
            before,
            after,
            action == last_backwards.get(action.stage),
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
        stand_ins = find_stand_ins(parallel, pipeline_rank, traced, count, training=training)
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
