"""What a rank holds in theory: the closed forms, and small cases by hand."""

from itertools import product

import pytest

from recipe_lib.config.mesh import (
    SCHEDULES,
    count_stages,
    count_stages_per_rank,
    find_stage_rank,
    list_rank_stages,
)
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline.schedules import (
    COMPUTE,
    UNITS,
    Action,
    compute_forward_orders,
    compute_orders,
    get_receive,
)
from recipe_lib.parallel.pipeline.simulation import (
    StageBytes,
    add_transfers,
    compute_live_bytes,
    count_in_flight,
    find_latest_taken,
    find_taken,
    get_partner,
    simulate,
)
from tests.parallel.pipeline.formulas import compute_in_flight

SCHEDULE_NAMES = pytest.mark.parametrize("schedule", SCHEDULES)


def pipeline(schedule, ranks, stages=2):
    return ParallelConfig(
        pipeline=ranks, pipeline_schedule=schedule, pipeline_stages_per_rank=stages
    )


def lists(parallel, count):
    return add_transfers(compute_orders(parallel, count), parallel)


def held(live):
    """What a rank alone decides about."""
    return live.kept + live.deferred + live.received + live.handed + live.waiting


@SCHEDULE_NAMES
def test_micro_batches_in_flight_are_those_of_the_formula(schedule):
    compared = 0
    for ranks in (2, 3, 4, 8):
        for stages in (2, 3) if SCHEDULES[schedule].stages is None else (2,):
            parallel = pipeline(schedule, ranks, stages)
            for count in (1, 2, ranks, ranks + 1, 2 * ranks, 2 * ranks + 1, 4 * ranks):
                for rank, order in compute_orders(parallel, count).items():
                    wanted = compute_in_flight(
                        schedule, ranks, rank, count, count_stages_per_rank(parallel)
                    )
                    if wanted is not None:
                        compared += 1
                        assert count_in_flight(order)[0] == wanted, (ranks, stages, count, rank)
    assert compared > 40


def test_zbv_keeps_as_much_as_one_forward_one_backward_does_on_its_first_rank():
    for rank in range(4):
        assert compute_in_flight("zbv", 4, rank, 16) == 2 * compute_in_flight(
            "1f1b", 4, 0, 16
        )  # its stages are half as large


@SCHEDULE_NAMES
def test_the_most_kept_is_what_is_in_flight(schedule):
    parallel = pipeline(schedule, 4)
    for rank, order in lists(parallel, 12).items():
        stages = {stage: StageBytes(kept=1000) for stage in list_rank_stages(parallel, rank)}
        found = compute_live_bytes(order, parallel, stages, boundary=0)
        assert max(entry.kept for entry in found) == 1000 * count_in_flight(order)[0]


@SCHEDULE_NAMES
def test_nothing_is_left_when_all_is_done_but_what_the_others_have_yet_to_take(schedule):
    parallel = pipeline(schedule, 3)
    for rank, order in lists(parallel, 8).items():
        stages = {stage: StageBytes(1000, 300) for stage in list_rank_stages(parallel, rank)}
        found = compute_live_bytes(order, parallel, stages, boundary=7)
        assert len(found) == len(order)
        assert held(found[-1]) == 0
        sent = sum(number == len(order) for number in find_latest_taken(order, parallel).values())
        assert found[-1].sent == 7 * sent


def test_bytes_by_hand():
    parallel = pipeline("1f1b", 2)
    found = compute_live_bytes(lists(parallel, 2)[0], parallel, {0: StageBytes(100)}, boundary=8)
    rows = [(str(e.action), e.kept, e.received, e.waiting, e.sent) for e in found]
    assert rows == [
        ("0F0", 100, 0, 8, 0),
        ("0SF0", 100, 0, 0, 8),
        ("0F1", 200, 0, 8, 8),
        ("0SF1", 200, 0, 0, 16),
        ("0RB0", 200, 8, 0, 16),
        ("0RB1", 200, 16, 0, 16),
        ("0B0", 100, 8, 0, 0),  # what comes after both sends in the ranks' order has been used
        ("0B1", 0, 0, 0, 0),
    ]


def test_bytes_between_two_stages_of_a_rank_by_hand():
    parallel = pipeline("zbv", 2)
    order = [action for action in lists(parallel, 3)[1] if action.micro_batch == 0]
    found = compute_live_bytes(
        order, parallel, {1: StageBytes(100, 30), 2: StageBytes(50, 20)}, boundary=8
    )
    rows = [
        (str(e.action), e.kept, e.deferred, e.received, e.handed, e.waiting, e.sent) for e in found
    ]
    assert rows == [
        ("1RF0", 0, 0, 8, 0, 0, 0),
        ("1F0", 100, 0, 0, 8, 0, 0),  # on to stage 2
        ("2F0", 150, 0, 0, 0, 8, 0),
        ("2SF0", 150, 0, 0, 0, 0, 8),
        ("2RB0", 150, 0, 8, 0, 0, 8),
        ("2I0", 100, 20, 0, 8, 0, 0),  # back to stage 1
        ("2W0", 100, 0, 0, 8, 0, 0),
        ("1I0", 0, 30, 0, 0, 8, 0),
        ("1SB0", 0, 30, 0, 0, 0, 8),
        ("1W0", 0, 0, 0, 0, 0, 8),
    ]


@SCHEDULE_NAMES
def test_what_was_sent_is_taken_when_it_is_said_to_be_whatever_the_ranks_speed(schedule):
    parallel = pipeline(schedule, 4)
    orders = lists(parallel, 8)
    for slow in range(4):
        found = simulate(
            orders, parallel, lambda action, slow=slow: 9 if place(parallel, action) == slow else 1
        )
        ended = {way.action: way.end for way in found.transfers}
        begun = {span.action: span.start for span in found.spans}
        known = 0
        for order in orders.values():
            for send, number in find_latest_taken(order, parallel).items():
                if number < len(order):
                    known += 1
                    assert ended[send] <= begun[order[number]]
        assert known >= len(ended) / 2


@SCHEDULE_NAMES
def test_sent_tensors_are_gone_sooner_where_the_ranks_are_simulated(schedule):
    parallel = pipeline(schedule, 4)
    orders = lists(parallel, 8)
    timeline = simulate(orders, parallel, lambda action: UNITS[action.kind])
    for rank, order in orders.items():
        surely, simulated = (
            find_latest_taken(order, parallel),
            find_taken(timeline, order, rank, parallel),
        )
        assert surely.keys() == simulated.keys()
        assert all(simulated[send] <= surely[send] for send in surely)
        stages = {stage: StageBytes(100, 10) for stage in list_rank_stages(parallel, rank)}
        plain = compute_live_bytes(order, parallel, stages, 8)
        for one, other in zip(
            plain, compute_live_bytes(order, parallel, stages, 8, taken=simulated), strict=True
        ):
            assert held(one) == held(other)
            assert other.sent <= one.sent


def place(parallel, action):
    return find_stage_rank(parallel, action.stage)


def test_a_send_and_its_receive_know_each_other():
    for kind, partner in (("SF", Action(4, "RF", 5)), ("SB", Action(2, "RB", 5))):
        assert get_partner(Action(3, kind, 5)) == partner
        assert get_partner(partner) == Action(3, kind, 5)


@SCHEDULE_NAMES
@pytest.mark.parametrize("make", [compute_orders, compute_forward_orders])
def test_ranks_that_wait_until_what_they_sent_is_taken_come_to_an_end(schedule, make):
    """The worst case: a rank does nothing else while it waits, as with gloo."""
    for ranks, count in product((2, 3, 4, 8), (1, 2, 3, 5, 8, 13)):
        parallel = pipeline(schedule, ranks)
        orders = add_transfers(make(parallel, count), parallel)
        timeline = simulate(orders, parallel, lambda action: UNITS[action.kind])
        waits = {
            (rank, number): [send for send, at in taken.items() if at == number]
            for rank, order in orders.items()
            for taken in [find_taken(timeline, order, rank, parallel)]
            for number in range(len(order) + 1)
        }
        at, come_to = dict.fromkeys(orders, 0), set()
        left = sum(map(len, orders.values()))
        while left:
            before = left
            for rank, order in orders.items():
                while at[rank] < len(order):
                    action = order[at[rank]]
                    received = get_receive(action, count_stages(parallel))
                    needs = [get_partner(send) for send in waits[rank, at[rank]]]
                    if action.kind in COMPUTE and received in order:
                        needs.append(get_partner(received))
                    if not all(need in come_to for need in needs):
                        break
                    come_to.add(action)
                    at[rank], left = at[rank] + 1, left - 1
            assert left < before, f"{parallel} x {count} stands still at {at}"
