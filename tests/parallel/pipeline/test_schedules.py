"""Orders of a pipeline: whole, legal, free of circles, and the same for the two ranks of every
exchange.
"""

from collections import Counter, defaultdict, deque
from dataclasses import replace

import pytest

from recipe_lib.config.mesh import (
    SCHEDULES,
    count_fewest_micro_batches,
    count_stages,
    find_schedule_fault,
    find_stage_rank,
    list_rank_stages,
)
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline import schedules
from recipe_lib.parallel.pipeline.schedules import (
    UNITS,
    Action,
    compute_forward_orders,
    compute_orders,
    get_exchange,
    get_receive,
)
from recipe_lib.parallel.pipeline.simulation import (
    add_transfers,
    count_in_flight,
    get_partner,
    simulate,
)

SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")
KINDS_OF_BACKWARD = {False: {"FB"}, True: {"FIW", "FB"}}


def pipeline(schedule, ranks, stages=2, **keys):
    return ParallelConfig(
        pipeline=ranks, pipeline_schedule=schedule, pipeline_stages_per_rank=stages, **keys
    )


def counts(parallel):
    """Numbers of micro-batches: too few, as few as can be, odd ones, many."""
    fewest = count_fewest_micro_batches(parallel)
    return sorted({1, fewest, fewest + 1, 2 * fewest + 3})


CASES = [
    pipeline(schedule, ranks, stages)
    for schedule, facts in SCHEDULES.items()
    for ranks, stages in ((2, 2), (3, 2), (4, 3), (8, 2))
    if stages == 2 or facts.stages is None
]
CASES_NAMED = pytest.mark.parametrize(
    "parallel",
    CASES,
    ids=lambda case: f"{case.pipeline_schedule}-{case.pipeline}-{case.pipeline_stages_per_rank}",
)


@CASES_NAMED
def test_every_stage_takes_every_micro_batch_forward_and_backward_once(parallel):
    for count in counts(parallel):
        orders = compute_orders(parallel, count)
        assert sorted(orders) == list(range(parallel.pipeline))
        done = defaultdict(str)
        for rank, order in orders.items():
            for action in order:
                assert find_stage_rank(parallel, action.stage) == rank
                done[action.stage, action.micro_batch] += action.kind
        wanted = KINDS_OF_BACKWARD[SCHEDULES[parallel.pipeline_schedule].splits]
        assert set(done) == {
            (stage, number) for stage in range(count_stages(parallel)) for number in range(count)
        }
        assert set(done.values()) <= wanted, (
            count
        )  # written down in the order of the rank, so F before I before W


@CASES_NAMED
def test_what_each_action_needs_is_there_in_time(parallel):
    stages = count_stages(parallel)
    for count in counts(parallel):
        orders = compute_orders(parallel, count)
        ends = {}
        clock = dict.fromkeys(orders, 0)
        spans = simulate(orders, parallel, lambda action: UNITS[action.kind]).spans
        found = sorted((span.start, span.end, span.rank, span.action) for span in spans)
        assert Counter(action for *_, action in found) == Counter(
            a for order in orders.values() for a in order
        )
        for begin, end, rank, action in found:
            assert begin >= clock[rank]
            clock[rank] = end
            ends[action] = end
            received = get_receive(action, stages)
            if received is not None:
                sender = get_partner(received).stage
                makers = [
                    Action(sender, kind, action.micro_batch)
                    for kind in ("F" if action.kind == "F" else "BI")
                ]
                (made,) = (ends[maker] for maker in makers if maker in ends)
                assert begin >= made


@CASES_NAMED
def test_two_ranks_agree_on_what_they_exchange_and_in_which_order(parallel):
    stages = count_stages(parallel)
    for count in counts(parallel):
        orders = compute_orders(parallel, count)
        for forward_only in (False, True):
            orders = compute_forward_orders(parallel, count) if forward_only else orders
            found = add_transfers(orders, parallel)
            assert {
                rank: [a for a in order if len(a.kind) == 1] for rank, order in found.items()
            } == orders
            for one in found:
                for other in range(one):
                    assert exchanges(parallel, found, one, other) == exchanges(
                        parallel, found, other, one
                    )
            wanted = [get_exchange(action, stages) for order in orders.values() for action in order]
            across = Counter(
                part
                for pair in wanted
                if pair
                and find_stage_rank(parallel, pair[0].stage)
                != find_stage_rank(parallel, pair[1].stage)
                for part in pair
            )
            assert across == Counter(
                a for order in found.values() for a in order if len(a.kind) == 2
            )


def other_end(action):
    """(the sending action, the receiving stage), whichever end this is."""
    step = 1 if action.kind in ("SF", "RB") else -1
    if action.kind in SENDS:
        return action, action.stage + step
    return Action(action.stage + step, "S" + action.kind[1], action.micro_batch), action.stage


def exchanges(parallel, orders, rank, peer):
    """What a rank sends to another and receives from it, in its order."""
    found = []
    for action in orders[rank]:
        if len(action.kind) == 2:
            send, stage = other_end(action)
            ends = {find_stage_rank(parallel, send.stage), find_stage_rank(parallel, stage)}
            if ends == {rank, peer}:
                found.append((send, stage))
    return found


def run_in_order(parallel, orders):
    """Runs the lists as NCCL would: the exchanges of two ranks go one after the other, in both
    directions, each when both have reached it; a computation waits for what it receives, nothing
    waits for a send. Actions not reached.
    """
    stages = count_stages(parallel)
    transfers = {action for order in orders.values() for action in order if len(action.kind) == 2}
    at = dict.fromkeys(orders, 0)
    posted = defaultdict(deque)  # by (rank, other rank), the exchanges that wait for the other
    taken = set()
    while True:
        moved = False
        for rank, order in orders.items():
            while at[rank] < len(order):
                action = order[at[rank]]
                if len(action.kind) == 2:
                    send, stage = other_end(action)
                    ends = find_stage_rank(parallel, send.stage), find_stage_rank(parallel, stage)
                    other = ends[0] if ends[1] == rank else ends[1]
                    posted[rank, other].append((send, stage))
                else:
                    received = get_receive(action, stages)
                    if received in transfers and other_end(received) not in taken:
                        break
                at[rank] += 1
                moved = True
        for one, other in [pair for pair in posted if pair[0] < pair[1]]:
            here, there = posted[one, other], posted[other, one]
            while here and there:
                assert here[0] == there[0], "two ranks are about to mistake one tensor for another"
                taken.add(here.popleft())
                there.popleft()
                moved = True
        if not moved:
            left = [str(action) for rank, order in orders.items() for action in order[at[rank] :]]
            return left + [str(entry) for queue in posted.values() for entry in queue]


@CASES_NAMED
def test_exchanges_in_one_order_between_two_ranks_never_deadlock(parallel):
    for count in counts(parallel):
        assert (
            run_in_order(parallel, add_transfers(compute_orders(parallel, count), parallel)) == []
        )
        assert (
            run_in_order(parallel, add_transfers(compute_forward_orders(parallel, count), parallel))
            == []
        )


def test_a_deadlock_would_be_noticed():
    parallel = pipeline("1f1b", 2)
    orders = add_transfers(compute_orders(parallel, 4), parallel)
    late = orders[0].index(Action(0, "RB", 0))
    orders[0].insert(late + 4, orders[0].pop(late))  # behind the backward that takes it
    assert "0B0" in run_in_order(parallel, orders)
    swapped = add_transfers(compute_orders(parallel, 4), parallel)
    first, second = swapped[0].index(Action(0, "SF", 1)), swapped[0].index(Action(0, "RB", 0))
    swapped[0][first], swapped[0][second] = swapped[0][second], swapped[0][first]
    with pytest.raises(AssertionError, match="mistake one tensor for another"):
        run_in_order(parallel, swapped)


@CASES_NAMED
def test_sends_follow_at_once_and_receives_come_one_computation_ahead_where_the_common_order_allows(
    parallel,
):
    stages = count_stages(parallel)
    for count in counts(parallel):
        for order in add_transfers(compute_orders(parallel, count), parallel).values():
            for number, action in enumerate(order):
                if action.kind in SENDS:
                    made = next(entry for entry in reversed(order[:number]) if len(entry.kind) == 1)
                    assert get_exchange(made, stages)[0] == action
                if action.kind in RECEIVES:
                    check_receive(parallel, order, number)


def check_receive(parallel, order, number):
    """It is asked for one computation before its use. Later: the two ranks exchange something
    before it that is not there sooner. Sooner: something after it in their order is.
    """
    stages, action = count_stages(parallel), order[number]
    computes = [at for at, entry in enumerate(order) if len(entry.kind) == 1]
    use = next(at for at in computes if at > number and get_receive(order[at], stages) == action)
    ahead = sum(number < at < use for at in computes)
    same = [
        at
        for at, entry in enumerate(order)
        if len(entry.kind) == 2 and peer(parallel, entry) == peer(parallel, action)
    ]
    if ahead > 1:
        assert order[number + 1 : number + 2] and number + 1 in same
    elif ahead == 0 and (earlier := [at for at in computes if at < number]):
        assert any(earlier[-1] < at < number for at in same)


def peer(parallel, action):
    send, stage = other_end(action)
    return find_stage_rank(parallel, stage if action.kind in SENDS else send.stage)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "count", "fault"),
    [
        ("gpipe", 4, 2, 1, None),
        ("1f1b", 4, 2, 4, None),
        (
            "1f1b",
            4,
            2,
            3,
            ("found 3 micro-batches", "expected 4 or more", "pipeline_microbatches to 4"),
        ),
        ("interleaved_1f1b", 4, 3, 9, None),  # rounds of unequal size
        ("interleaved_zero_bubble", 8, 2, 7, ("found 7", "expected 8", "parallel.pipeline=8")),
        ("zbv", 4, 2, 4, None),
        ("zbv", 4, 2, 2, ("found 2", "expected 4", "zbv")),
        ("1f1b", 1, 2, 1, None),
    ],
)
def test_too_few_micro_batches_are_named_with_how_many_it_takes(
    schedule, ranks, stages, count, fault
):
    found = find_schedule_fault(pipeline(schedule, ranks, stages), count)
    assert (found is None) == (fault is None)
    for part in fault or ():
        assert part in found


def test_zbv_puts_the_last_stage_on_the_first_rank():
    parallel = pipeline("zbv", 4)
    assert [list_rank_stages(parallel, rank) for rank in range(4)] == [
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]
    turn = add_transfers(compute_orders(parallel, 8), parallel)[3]
    assert not [
        a for a in turn if a.kind == "SF" and a.stage == 3 or a.kind == "RF" and a.stage == 4
    ]


def test_one_forward_one_backward_by_hand():
    orders = add_transfers(compute_orders(pipeline("1f1b", 2), 3), pipeline("1f1b", 2))
    assert [
        str(action) for action in orders[0]
    ] == "0F0 0SF0 0F1 0SF1 0RB0 0B0 0F2 0SF2 0RB1 0RB2 0B1 0B2".split()
    assert [
        str(action) for action in orders[1]
    ] == "1RF0 1F0 1RF1 1B0 1SB0 1F1 1RF2 1B1 1SB1 1F2 1B2 1SB2".split()


def test_an_order_with_a_gap_is_an_error_and_not_a_missing_gradient(monkeypatch):
    read = schedules._read_actions
    monkeypatch.setattr(
        schedules, "_read_actions", lambda actions, count: read(actions, count)[:-1]
    )
    with pytest.raises(ValueError, match="stage .* does FI with micro-batch"):
        compute_orders(pipeline("zbv", 2), 4)


def test_a_circle_is_named():
    parallel = pipeline("1f1b", 2)
    orders = compute_orders(parallel, 2)
    assert add_transfers(orders, parallel)
    orders[0].insert(0, orders[0].pop(2))
    assert str(orders[0][0]) == "0B0"
    with pytest.raises(ValueError, match="deadlocks: rank 0: 0B0, rank 1: 1F0"):
        add_transfers(orders, parallel)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_weight_gradients_wait_for_no_more_micro_batches_than_asked_for(schedule):
    for ranks, count, most in ((2, 8, 1), (2, 16, 4), (4, 8, 2), (4, 16, 1), (8, 16, 4)):
        free = ParallelConfig(pipeline=ranks, pipeline_schedule=schedule)
        limited = replace(free, pipeline_max_deferred_weight_grads=most)
        plain = ParallelConfig(pipeline=ranks, pipeline_schedule="1f1b")
        orders = compute_orders(limited, count)
        for rank, order in compute_orders(free, count).items():
            assert sorted(orders[rank]) == sorted(order)
            others = [
                [action for action in one if action.kind != "W"] for one in (order, orders[rank])
            ]
            assert others[0] == others[1]
            assert count_in_flight(orders[rank])[1] == min(most, count_in_flight(order)[1])
        bubbles = [
            simulate(
                add_transfers(compute_orders(one, count), one),
                one,
                lambda action: UNITS[action.kind],
            ).bubble
            for one in (free, limited, plain)
        ]
        assert bubbles[0] <= bubbles[1] < bubbles[2]


def test_what_the_page_says_of_zbv_on_four_ranks_with_sixteen_micro_batches():
    """docs/pipeline.md: its bubble, and how many micro-batches wait for their weight gradients at
    most.
    """
    for most, idle, waiting in ((None, 3, 7), (1, 6, 1)):
        parallel = ParallelConfig(
            pipeline=4, pipeline_schedule="zbv", pipeline_max_deferred_weight_grads=most
        )
        orders = compute_orders(parallel, 16)
        timeline = simulate(
            add_transfers(orders, parallel), parallel, lambda action: UNITS[action.kind]
        )
        assert timeline.bubble == idle / (96 + idle)
        assert max(count_in_flight(order)[1] for order in orders.values()) == waiting
