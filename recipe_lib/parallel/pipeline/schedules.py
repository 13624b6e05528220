"""List the forwards and backwards of each rank of a pipeline, in the order of its schedule.

The driver runs the orders that `compute_orders` returns for `parallel.pipeline_schedule`, after
`simulation.add_transfers` has put the sends and receives in. The orders of the interleaved and
zero-bubble schedules (arXiv 2104.04473, 2401.10241) are those of torch.distributed.pipelining;
GPipe (arXiv 1811.06965) and 1F1B (arXiv 1806.03377) are a few lines here. A stage's backward is one
action `B`, or two that may lie apart: `I` for the gradient of its input, `W` for those of its
weights.
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

# Kinds of actions. INPUT and WEIGHT are the two halves of a split backward.
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
MAKING_GRADIENTS = (BACKWARD, INPUT, WEIGHT)
# Receives from the stage before or the next one, and sends to it.
RECEIVE_ACTIVATION, SEND_ACTIVATION = "RF", "SF"
RECEIVE_GRADIENT, SEND_GRADIENT = "RB", "SB"
WORDS = {  # for messages
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "input gradient",
    WEIGHT: "weight gradients",
    RECEIVE_ACTIVATION: "receiving of the activation",
    RECEIVE_GRADIENT: "receiving of the gradient",
    SEND_ACTIVATION: "sending of the activation",
    SEND_GRADIENT: "sending of the gradient",
}
# How long an action takes in the simulation that decides the order of sends, in forwards: each half
# of a backward takes as long as a forward.
UNITS = {FORWARD: 1, INPUT: 1, WEIGHT: 1, BACKWARD: 2}
# By the names of torch's enum, which stay from version to version; its values have been numbers and
# letters.
_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": INPUT,
    "BACKWARD_WEIGHT": WEIGHT,
}


@dataclass(frozen=True, order=True)
class Action:
    """An action of a stage on a micro-batch; as text `2F0`."""

    stage: int  # index among the stages of all ranks
    kind: str  # one of COMPUTE; RF, SF, RB or SB for a receive or send
    micro_batch: int  # index in the step

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Orders = dict[int, list[Action]]  # by the place of a rank in its pipeline


def compute_orders(parallel: ParallelConfig, micro_batches: int) -> Orders:
    """Return the forwards and backwards of every rank of a pipeline for a training step.

    micro_batches: any number from 1 on; the config refuses numbers that suit a schedule badly.
    Raise ValueError for an order that lacks an action, see `_check_complete`.
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
    # Imported here, since it imports 834 modules in a second, and few runs have such a schedule.
    from torch.distributed.pipelining import schedules

    # torch's interleaved classes divide micro-batches into rounds of one size. For a number that
    # is no multiple of the rounds they leave out backwards or count on after the last micro-batch,
    # without an error. So the order is made for the next number that is one, and the actions on
    # micro-batches that there are not are left out. It stays legal: micro-batches do not wait for
    # each other.
    padded = micro_batches
    while name != "zbv" and padded % max(1, padded // ranks):
        padded += 1
    rounds = max(1, padded // ranks)
    # The attributes that the methods read of `self`. An object of the classes can be made only with
    # stages that have memory.
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
    """Return the micro-batches that a rank holds after each action of its list, by stage.

    They are two numbers: of those between F and B (or I), and of those between I and W.
    """
    moments: list[dict[int, tuple[int, int]]] = []
    counts: dict[int, tuple[int, int]] = {}  # after the current action
    for action in order:
        num_ahead, num_deferred = counts.get(action.stage, (0, 0))
        num_ahead += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(action.kind, 0)
        num_deferred += {INPUT: 1, WEIGHT: -1}.get(action.kind, 0)
        counts = counts | {action.stage: (num_ahead, num_deferred)}
        moments.append(counts)
    return moments


def _limit_deferred(order: list[Action], most: int) -> list[Action]:
    """Return the order with weight gradients made sooner, so that at most `most` are deferred.

    Where there are as many, the oldest is made before the next input gradient.
    """
    limited: list[Action] = []
    waiting: list[Action] = []  # deferred weight gradients, the oldest first
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
    for stage, index in product(range(stages), range(micro_batches)):
        kinds = "".join(kind * done.pop(Action(stage, kind, index), 0) for kind in COMPUTE)
        if kinds not in ("FB", "FIW"):
            raise ValueError(
                f"stage {stage} does {kinds or 'nothing'} with micro-batch {index}, expected FB"
                " or FIW"
            )
    if done:  # of stages or micro-batches that there are not, or of other kinds
        raise ValueError(f"the schedule does {min(done)}, which there is not")


def compute_forward_orders(parallel: ParallelConfig, micro_batches: int) -> Orders:
    """Return the forwards alone, stage by stage, for evaluation."""
    return {
        rank: [
            Action(stage, FORWARD, index)
            for stage, index in product(list_rank_stages(parallel, rank), range(micro_batches))
        ]
        for rank in range(parallel.pipeline)
    }


def _order_one_forward_one_backward(
    name: str, rank: int, ranks: int, micro_batches: int
) -> list[Action]:
    """Return the order of a rank, which has one stage; name: "1f1b" or "gpipe".

    With GPipe all forwards are ahead of the first backward.
    """
    num_ahead = min(ranks - 1 - rank, micro_batches) if name == "1f1b" else micro_batches
    order = [Action(rank, FORWARD, index) for index in range(num_ahead)]
    for index in range(micro_batches):
        if index + num_ahead < micro_batches:
            order.append(Action(rank, FORWARD, index + num_ahead))
        order.append(Action(rank, BACKWARD, index))
    return order


def _read_actions(actions: Sequence[Any], micro_batches: int) -> list[Action]:
    """Return torch's actions as ours, without idle slots (None) and padded micro-batches."""
    return [
        Action(action.stage_index, _KINDS[action.computation_type.name], action.microbatch_index)
        for action in actions
        if action is not None and action.microbatch_index < micro_batches
    ]


def list_pairs(parallel: ParallelConfig, *, tied: bool) -> list[tuple[int, int]]:
    """Return the pairs of ranks that exchange tensors, by their places in the pipeline.

    The lower place is first in a pair. tied: the first and the last stage have the same embedding,
    and exchange its gradients.
    """
    edges = [
        (find_stage_rank(parallel, stage), find_stage_rank(parallel, stage + 1))
        for stage in range(count_stages(parallel) - 1)
    ]
    if tied:
        edges.append((0, find_stage_rank(parallel, count_stages(parallel) - 1)))
    return sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]})


def get_exchange(action: Action, stages: int) -> tuple[Action, Action] | None:
    """Return the send that follows an action, and the other stage's receive; None without one.

    stages: number of stages. Also for two stages of one rank, which needs no transfer.
    """
    if action.kind == FORWARD and action.stage < stages - 1:
        sent = Action(action.stage, SEND_ACTIVATION, action.micro_batch)
        return sent, Action(action.stage + 1, RECEIVE_ACTIVATION, action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and action.stage > 0:
        sent = Action(action.stage, SEND_GRADIENT, action.micro_batch)
        return sent, Action(action.stage - 1, RECEIVE_GRADIENT, action.micro_batch)
    return None


def get_receive(action: Action, stages: int) -> Action | None:
    """Return the receive of a forward's or backward's input; None if no other stage makes it."""
    if action.kind == FORWARD and action.stage > 0:
        return Action(action.stage, RECEIVE_ACTIVATION, action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and action.stage < stages - 1:
        return Action(action.stage, RECEIVE_GRADIENT, action.micro_batch)
    return None
