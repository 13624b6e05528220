"""The actions of a pipeline's ranks in a trace: noted as they begin, as few as have every state of
memory, counted.
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
    compute_orders,
    forward_orders,
    pairs_of,
)
from recipe_lib.parallel.pipeline.simulation import (
    StageBytes,
    live_bytes,
    simulate,
    taken_in,
    with_transfers,
)
from recipe_lib.plan.simulated_world.patches import Patch
from recipe_lib.plan.tracing.trace import ACTION, ALLOC, FREE, OP, ActionMark, Trace
from recipe_lib.plan.tracing.tracer import Tracer

# Without a pipeline the first micro-batch finds no gradients and the second does; all later ones
# are like the second, but for the last one (`last_is_unlike`).
ALIKE_FROM = 2
# Where so many micro-batches for each stage are not enough to see every state of memory, all of
# them are traced.
_MOST_FOR_A_STAGE = 8

_BASE = 2**32

# What tells one moment of a step from another: the action, and how much of each kind is alive
# before and after it.
_State = tuple[Any, ...]


def follow_actions(tracer: Tracer) -> list[Patch]:
    """The actions of a pipeline's driver are noted in the trace."""
    trace, previous = tracer.trace, ""

    def note(action: Action | None) -> None:
        nonlocal previous
        if previous in MAKING_GRADIENTS:
            tracer.between_actions()
        previous = action.kind if action is not None else ""
        mark = (
            ActionMark()
            if action is None
            else ActionMark(action.stage, action.kind, action.micro_batch)
        )
        trace.actions.append(mark)
        trace.events.append((ACTION, len(trace.actions) - 1))

    return [(driver, "on_action", note)]


def count_micro_batches_to_trace(cfg: Any, place: int = 0) -> int:
    """How many of a step's micro-batches have to be traced to see its peak, and every operator, at
    least once.

    Without a pipeline two, or three where the last is unlike the others. With one: the fewest whose
    actions, at this place in it, can stand for those of all of them, see `stand_ins`. GPipe holds
    all micro-batches at a time, so that all are traced.
    """
    count = compute_micro_batches(cfg)[1]
    if cfg.parallel.pipeline == 1:
        return min(ALIKE_FROM + is_last_different(cfg), count)
    return count_pipeline_micro_batches(cfg.parallel, place, count, evaluates=cfg.runs_reference)


def is_last_different(cfg: Any) -> bool:
    """Return whether the last micro-batch of a step does more than the others: it reduces the
    gradients of all, or sends to the host, behind the gradients, the numbers that are logged
    (`backward_each`).
    """
    return reduces_once(cfg.parallel) or bool(cfg.memory.cpu_offload)


def count_pipeline_micro_batches(
    parallel: ParallelConfig, place: int, count: int, *, evaluates: bool = False
) -> int:
    """See `traced_micro_batches`; place: of a rank in its pipeline. count: of a step. evaluates: a
    step also has forwards alone, of a reference.
    """
    if parallel.pipeline_schedule == "gpipe":
        return count
    kinds = (True, False) if evaluates else (True,)
    for fewer in range(1, min(count, _MOST_FOR_A_STAGE * count_stages(parallel))):
        if all(
            find_stand_ins(parallel, place, fewer, count, training=kind) is not None
            for kind in kinds
        ):
            return fewer
    return count


def find_stand_ins(
    parallel: ParallelConfig, place: int, traced: int, count: int, *, training: bool = True
) -> dict[Action, Action] | None:
    """For each action of a rank in a step of `count` micro-batches one that is like it in a step of
    `traced`.

    Two are alike if stage, kind and the action before agree, and if the rank holds the same before
    and after them: all micro-batches are of one shape, so that this is how many of them each stage
    holds between forward and backward, and between backward and weight gradients, what was received
    or handed over and not used, what was made and not sent or not taken yet, which gradients there
    are, and whether it reduces those of its stage once a step. Every action of the shorter step
    stands for one of the longer at least, so that the most that is held is the same in both. None:
    there is not one for each.
    """
    if traced == count:
        return {action: action for action in get_orders(parallel, count, training=training)[place]}
    waiting = _find_states(_make_key(parallel), place, traced, training)
    found: dict[Action, Action] = {}
    used: dict[_State, int] = defaultdict(int)
    for state, actions in _find_states(_make_key(parallel), place, count, training).items():
        known = waiting.get(state, [])
        if not known or len(known) > len(actions):
            return None
        for action in actions:
            found[action] = known[min(used[state], len(known) - 1)]
            used[state] += 1
    return found if len(used) == len(waiting) else None


def get_orders(parallel: ParallelConfig, count: int, *, training: bool = True) -> Orders:
    """The actions of all ranks, transfers included; not to be changed."""
    return _compute_orders(_make_key(parallel), count, training)


def list_peers(parallel: ParallelConfig, place: int) -> set[int]:
    """The places that one of a pipeline exchanges tensors with; none without a pipeline."""
    return {other for pair in pairs_of(parallel, tied=False) if place in pair for other in pair} - {
        place
    }


_Key = tuple[tuple[str, Any], ...]


def _make_key(parallel: ParallelConfig) -> _Key:
    """What of it an order depends on, by name."""
    names = (
        "pipeline",
        "pipeline_schedule",
        "pipeline_stages_per_rank",
        "pipeline_max_deferred_weight_grads",
    )
    return tuple(
        (name, getattr(parallel, name)) for name in (*names, "reduce_gradients", "strategy")
    )


@cache
def _compute_orders(key: _Key, count: int, training: bool) -> Orders:
    parallel = ParallelConfig(**dict(key))
    return with_transfers(
        (compute_orders if training else forward_orders)(parallel, count), parallel
    )


@cache
def _find_states(key: _Key, place: int, count: int, training: bool) -> dict[_State, list[Action]]:
    """A rank's actions by the states in which it comes to them."""
    parallel = ParallelConfig(**dict(key))
    orders = _compute_orders(key, count, training)
    order = orders[place]
    taken = taken_in(
        simulate(orders, parallel, lambda action: UNITS[action.kind]), order, place, parallel
    )
    # Each stage counts in digits of its own, so that the sums tell how many of each are alive.
    sizes = {
        stage: StageBytes(kept=_BASE**at, deferred=_BASE**at)
        for at, stage in enumerate(list_rank_stages(parallel, place))
    }
    found: dict[_State, list[Action]] = defaultdict(list)
    before: _State = ()
    previous: _State = ()
    trained: set[tuple[int, str]] = set()
    ends = set({one.stage: one for one in order if one.kind in MAKING_GRADIENTS}.values())
    ends = ends if reduces_once(parallel) else set()
    for live in live_bytes(order, parallel, sizes, 1, taken=taken):
        action = live.action
        after = (live.kept, live.deferred, live.received, live.handed, live.waiting, live.sent)
        state = (
            action.stage,
            action.kind,
            previous,
            tuple(sorted(trained)),
            before,
            after,
            action in ends,
        )
        found[state].append(action)
        before, previous = after, (action.stage, action.kind)
        if action.kind in MAKING_GRADIENTS:
            trained.add((action.stage, action.kind))
    return dict(found)


def name_parts(trace: Trace) -> None:
    """Weight gradients that were deferred are a part of backward, and what is exchanged one of what
    it is for.

    What an input gradient leaves behind for them is kept like an activation, and so is a tensor
    that was received.
    """
    made: list[int] = []
    alive: set[int] = set()
    mark = ActionMark()
    for kind, number in trace.events:
        if kind == ACTION:
            if mark.kind == "I":
                for left in filter(alive.__contains__, made):
                    trace.storages[left].kind = "activations"
            mark, made = trace.actions[number], []
            alive.clear()
        elif not mark.kind:
            continue
        elif kind == OP and trace.ops[number].part == "other":
            trace.ops[number].part = "forward" if mark.kind in ("F", "SF", "RF") else "backward"
        elif kind == FREE:
            alive.discard(number)
        elif kind == ALLOC and trace.storages[number].kind == "temporary":
            storage = trace.storages[number]
            if storage.part == "other":
                storage.part = "forward" if mark.kind in ("F", "SF", "RF") else "backward"
            if mark.kind in ("RF", "RB"):
                storage.kind = "activations" if mark.kind == "RF" else "communication"
            made.append(number)
            alive.add(number)


def repeat_actions(
    trace: Trace, parallel: ParallelConfig, place: int, traced: int, count: int
) -> None:
    """Each action of a step counts, with its operators, for as many as it stands for.

    traced, count: micro-batches, those traced and those of a step. A run of fewer (in validation
    there is one) stays.
    """
    if count <= traced:
        return
    for inside in _split_runs(trace):
        marks = [trace.actions[number] for number, _ in inside]
        if len({mark.micro_batch for mark in marks}) != traced:
            continue
        training = any(mark.kind in ("B", "I") for mark in marks)
        stands = find_stand_ins(parallel, place, traced, count, training=training)
        if stands is None:
            continue  # forwards alone in a step of the user's own
        times = Counter(stands.values())
        for mark, (_, ops) in zip(marks, inside, strict=True):
            mark.repeats = times[Action(mark.stage, mark.kind, mark.micro_batch)]
            for op in ops:
                trace.ops[op].repeats *= mark.repeats


def _split_runs(trace: Trace) -> Iterator[list[tuple[int, list[int]]]]:
    """Each run of actions: (number of the action, numbers of the operators in it), in order."""
    inside: list[tuple[int, list[int]]] = []
    for kind, number in trace.events:
        if kind == ACTION and not trace.actions[number].kind:
            yield inside
            inside = []
        elif kind == ACTION:
            inside.append((number, []))
        elif kind == OP and inside:
            inside[-1][1].append(number)
