"""List what each rank of a pipeline does, in which order: forwards, backwards, sends, receives.

The orders of the interleaved and zero-bubble schedules are those that torch.distributed.pipelining
makes; GPipe (arXiv 1811.06965) and 1F1B (arXiv 1806.03377) are a few lines here. ZBV and
interleaved zero bubble: arXiv 2401.10241. A stage's backward is one action `B`, or two that may lie
apart: `I` for the gradient of its input, `W` for those of its weights.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

from recipe_lib.config.mesh import (
    count_stages,
    count_stages_per_rank,
    find_stage_rank,
    list_rank_stages,
)
from recipe_lib.config.schema import ParallelConfig

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
MAKING_GRADIENTS = (BACKWARD, INPUT, WEIGHT)
# What a stage takes from the next one or the one before, and what it sends there.
RECEIVE_ACTIVATION, SEND_ACTIVATION = "RF", "SF"
RECEIVE_GRADIENT, SEND_GRADIENT = "RB", "SB"
WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "input gradient",
    WEIGHT: "weight gradients",
    RECEIVE_ACTIVATION: "receiving of the activation",
    RECEIVE_GRADIENT: "receiving of the gradient",
    SEND_ACTIVATION: "sending of the activation",
    SEND_GRADIENT: "sending of the gradient",
}
# How long an action takes in the order that settles when tensors are sent: a forward as long as
# each half of backward.
UNITS = {FORWARD: 1, INPUT: 1, WEIGHT: 1, BACKWARD: 2}
# torch's names of them, which stay from version to version; their values have been numbers and
# letters.
_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": INPUT,
    "BACKWARD_WEIGHT": WEIGHT,
}


@dataclass(frozen=True, order=True)
class Action:
    """An action of a stage on a micro-batch."""

    stage: int
    kind: str  # of COMPUTE, or RF, SF, RB, SB: it receives or sends
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Orders = dict[int, list[Action]]  # by the place of a rank in its pipeline


def compute_orders(parallel: ParallelConfig, micro_batches: int) -> Orders:
    """Return the forwards and backwards of every rank of a pipeline for a training step.

    Any number of micro-batches from 1 on has an order; see config.mesh.schedule_fault for those
    worth having.
    """
    name = parallel.pipeline_schedule
    ranks = parallel.pipeline
    if name in ("gpipe", "1f1b"):
        return {
            rank: _order_one_forward_one_backward(
                name, rank=rank, ranks=ranks, micro_batches=micro_batches
            )
            for rank in range(ranks)
        }
    # Here, since it imports 834 modules in a second, and few runs have such a schedule.
    from torch.distributed.pipelining import schedules

    # For any other number torch's interleaved classes, which have rounds of one size, leave out
    # backwards or count on after the last micro-batch, without a word. What is too many is left out
    # of the larger order, which stays a legal one: micro-batches do not wait for each other.
    padded = micro_batches
    while name != "zbv" and padded % max(1, padded // ranks):
        padded += 1
    rounds = max(1, padded // ranks)
    # What the methods read of themselves; the classes want stages with memory to be made.
    settings = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=count_stages_per_rank(parallel),
        num_stages=count_stages(parallel),
        _n_microbatches=padded,
        number_of_rounds=rounds,
        microbatches_per_round=padded // rounds,
    )
    make_order = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }[name]._calculate_single_rank_operations
    orders = {
        rank: _read_actions(make_order(settings, rank), micro_batches) for rank in range(ranks)
    }
    if parallel.pipeline_max_deferred_weight_grads is not None:
        orders = {
            rank: _limit_deferred(order, parallel.pipeline_max_deferred_weight_grads)
            for rank, order in orders.items()
        }
    _check_complete(orders, count_stages(parallel), micro_batches)
    return orders


def count_moments(order: Sequence[Action]) -> list[dict[int, tuple[int, int]]]:
    """Return what there is after each action of a rank's list, by stage.

    It is the number of micro-batches between F and B or I, and of those between I and W.
    """
    moments: list[dict[int, tuple[int, int]]] = []
    now: dict[int, tuple[int, int]] = {}
    for action in order:
        ahead, deferred = now.get(action.stage, (0, 0))
        ahead += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(action.kind, 0)
        deferred += {INPUT: 1, WEIGHT: -1}.get(action.kind, 0)
        now = now | {action.stage: (ahead, deferred)}
        moments.append(now)
    return moments


def _limit_deferred(order: list[Action], most: int) -> list[Action]:
    """Return the order with weight gradients made sooner where more than `most` would wait.

    They are made before another input gradient.
    """
    limited: list[Action] = []
    waiting: list[Action] = []  # in the order in which they began to
    for action in order:
        if action.kind == INPUT:
            while len(waiting) >= most:
                limited.append(waiting.pop(0))
            waiting.append(Action(action.stage, WEIGHT, action.micro_batch))
        if action.kind != WEIGHT:
            limited.append(action)
        elif action in waiting:
            waiting.remove(action)
            limited.append(action)
    return limited


def _check_complete(orders: Orders, stages: int, micro_batches: int) -> None:
    """Raise ValueError unless each stage goes forward and backward once with each micro-batch.

    The orders come from private methods of torch: were something missing, gradients would be wrong
    unnoticed.
    """
    done = Counter(action for order in orders.values() for action in order)
    for stage, number in product(range(stages), range(micro_batches)):
        kinds = "".join(kind * done.pop(Action(stage, kind, number), 0) for kind in COMPUTE)
        if kinds not in ("FB", "FIW"):
            raise ValueError(
                f"stage {stage} does {kinds or 'nothing'} with micro-batch {number}, expected FB"
                " or FIW"
            )
    if done:
        raise ValueError(f"the schedule does {min(done)}, which there is not")


def compute_forward_orders(parallel: ParallelConfig, micro_batches: int) -> Orders:
    """Return the forwards alone, stage by stage: for a loss that is not trained on."""
    return {
        rank: [
            Action(stage, FORWARD, number)
            for stage, number in product(list_rank_stages(parallel, rank), range(micro_batches))
        ]
        for rank in range(parallel.pipeline)
    }


def _order_one_forward_one_backward(
    name: str, rank: int, ranks: int, micro_batches: int
) -> list[Action]:
    """Return a rank's order; with GPipe all forwards are ahead of the first backward."""
    ahead = min(ranks - 1 - rank, micro_batches) if name == "1f1b" else micro_batches
    order = [Action(rank, FORWARD, number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            order.append(Action(rank, FORWARD, number + ahead))
        order.append(Action(rank, BACKWARD, number))
    return order


def _read_actions(actions: Sequence[Any], micro_batches: int) -> list[Action]:
    """Return torch's actions on so many micro-batches without its gaps."""
    return [
        Action(action.stage_index, _KINDS[action.computation_type.name], action.microbatch_index)
        for action in actions
        if action is not None and action.microbatch_index < micro_batches
    ]


def list_pairs(parallel: ParallelConfig, *, tied: bool) -> list[tuple[int, int]]:
    """Return the places in a pipeline whose ranks exchange tensors, the lower first.

    tied: the first and the last stage have the same embedding, and exchange its gradients.
    """
    edges = [
        (find_stage_rank(parallel, stage), find_stage_rank(parallel, stage + 1))
        for stage in range(count_stages(parallel) - 1)
    ]
    if tied:
        edges.append((0, find_stage_rank(parallel, count_stages(parallel) - 1)))
    return sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]})


def get_exchange(action: Action, stages: int) -> tuple[Action, Action] | None:
    """Return what a stage sends after an action, and the other one's receiving of it."""
    if action.kind == FORWARD and action.stage < stages - 1:
        sent = Action(action.stage, SEND_ACTIVATION, action.micro_batch)
        return sent, Action(action.stage + 1, RECEIVE_ACTIVATION, action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and action.stage > 0:
        sent = Action(action.stage, SEND_GRADIENT, action.micro_batch)
        return sent, Action(action.stage - 1, RECEIVE_GRADIENT, action.micro_batch)
    return None


def get_receive(action: Action, stages: int) -> Action | None:
    """Return the receive of what a forward or backward takes from another stage, if anything."""
    if action.kind == FORWARD and action.stage > 0:
        return Action(action.stage, RECEIVE_ACTIVATION, action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and action.stage < stages - 1:
        return Action(action.stage, RECEIVE_GRADIENT, action.micro_batch)
    return None
