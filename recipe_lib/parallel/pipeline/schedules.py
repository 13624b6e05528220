"""List the forwards and backwards of each rank of a pipeline, in the order of its schedule.

The driver runs the orders of `compute_orders`, after `simulation.add_transfers` has put the sends
and receives in. A stage is consecutive layers of one rank; a rank may have several. An action is
what a stage does with one micro-batch. Its backward is one action `B`, or two that may lie apart:
`I` for the gradient of its input, `W` for those of its weights.
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

# The orders of the interleaved and zero-bubble schedules (arXiv 2104.04473, 2401.10241) are those
# of torch.distributed.pipelining. GPipe (arXiv 1811.06965) and 1F1B (arXiv 1806.03377) are a few
# lines here.

# Kinds of actions. INPUT and WEIGHT are the two halves of a split backward.
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
MAKING_GRADIENTS = (BACKWARD, INPUT, WEIGHT)  # of parameters: INPUT makes those of norms
# Receives from the stage before or the next one, and sends to it.
RECEIVE_ACTIVATION, SEND_ACTIVATION = "RF", "SF"
RECEIVE_GRADIENT, SEND_GRADIENT = "RB", "SB"
WORDS = {  # by kind, its name in messages
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
# The kinds by the names of torch's enum of computation types. By name, since the names stay from
# version to version, and the values have been numbers and letters.
_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": INPUT,
    "BACKWARD_WEIGHT": WEIGHT,
}


@dataclass(frozen=True, order=True)
class Action:
    """An action of a stage on a micro-batch; as text `2F0`: stage 2, forward, micro-batch 0."""

    stage: int  # index among the stages of all ranks
    kind: str  # one of the constants above: of COMPUTE, or RF, SF, RB, SB for a receive or send
    micro_batch: int  # its index in the step

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Orders = dict[int, list[Action]]  # by a rank's index in its pipeline


def compute_orders(parallel: ParallelConfig, micro_batches: int) -> Orders:
    """Return the forwards and backwards of every rank of a pipeline for a training step.

    micro_batches: number of the step, from 1 on; the config refuses numbers that suit a schedule
    badly. Raise ValueError if a stage does not go forward and backward once with each micro-batch.
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
    # is no multiple of the rounds they leave out backwards, or count on after the last micro-batch,
    # without an error. So the order is made for the next number that is a multiple, and the actions
    # on micro-batches that do not exist are left out. The order stays legal: micro-batches do not
    # wait for each other.
    padded = micro_batches
    while name != "zbv" and padded % max(1, padded // ranks):
        padded += 1
    rounds = max(1, padded // ranks)
    # Passed as `self` to a private method, with the attributes that it reads. An object of torch's
    # classes can be made only with stages that have memory.
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
    """Return how many micro-batches a rank holds after each of its actions, by stage.

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

    Where that many are deferred, the oldest is made before the next input gradient. most: 1 or
    more.
    """
    limited_order: list[Action] = []
    deferred: list[Action] = []  # weight gradients that are not made yet, the oldest first
    for action in order:
        if action.kind == INPUT:
            while len(deferred) >= most:
                limited_order.append(deferred.pop(0))
            deferred.append(Action(action.stage, WEIGHT, action.micro_batch))
        if action.kind != WEIGHT:
            limited_order.append(action)
        elif action in deferred:  # else it was made sooner
            deferred.remove(action)
            limited_order.append(action)
    return limited_order


def _check_complete(orders: Orders, stages: int, micro_batches: int) -> None:
    """Raise ValueError unless each stage goes forward and backward once with each micro-batch.

    The orders come from private methods of torch: were something missing, gradients would be wrong
    unnoticed.
    """
    counts = Counter(action for order in orders.values() for action in order)
    for stage, index in product(range(stages), range(micro_batches)):
        kinds = "".join(kind * counts.pop(Action(stage, kind, index), 0) for kind in COMPUTE)
        if kinds not in ("FB", "FIW"):
            raise ValueError(
                f"stage {stage} does {kinds or 'nothing'} with micro-batch {index}, expected FB"
                " or FIW"
            )
    if counts:  # of stages or micro-batches that do not exist, or of other kinds
        raise ValueError(f"the schedule does {min(counts)}, which there is not")


def compute_forward_orders(parallel: ParallelConfig, micro_batches: int) -> Orders:
    """Return the forwards of every rank, stage by stage, for an evaluation.

    micro_batches: number of the evaluation.
    """
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

    With GPipe all forwards come before the first backward.
    """
    # Forwards before the first pair of a forward and a backward.
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
    """Return the pairs of ranks that exchange tensors, by their indices in the pipeline.

    The lower index is first in a pair. tied: True if the first and the last stage have the same
    embedding, and exchange its gradients.
    """
    edges = [
        (find_stage_rank(parallel, stage), find_stage_rank(parallel, stage + 1))
        for stage in range(count_stages(parallel) - 1)
    ]
    if tied:
        edges.append((0, find_stage_rank(parallel, count_stages(parallel) - 1)))
    return sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]})


def get_exchange(action: Action, stages: int) -> tuple[Action, Action] | None:
    """Return the send that follows an action, and the other stage's receive.

    None for an action whose output no other stage takes. The two are also returned for stages of
    one rank, where nothing is sent. stages: number of stages.
    """
    if action.kind == FORWARD and action.stage < stages - 1:
        send = Action(action.stage, SEND_ACTIVATION, action.micro_batch)
        return send, Action(action.stage + 1, RECEIVE_ACTIVATION, action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and action.stage > 0:
        send = Action(action.stage, SEND_GRADIENT, action.micro_batch)
        return send, Action(action.stage - 1, RECEIVE_GRADIENT, action.micro_batch)
    return None


def get_receive(action: Action, stages: int) -> Action | None:
    """Return the receive of an action's input; None if no other stage makes it.

    The input of a forward is an activation, that of `B` or `I` the gradient of the stage's output.
    """
    if action.kind == FORWARD and action.stage > 0:
        return Action(action.stage, RECEIVE_ACTIVATION, action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and action.stage < stages - 1:
        return Action(action.stage, RECEIVE_GRADIENT, action.micro_batch)
    return None
