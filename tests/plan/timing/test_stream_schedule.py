"""Schedules of hand-made traces against overlaps worked out by hand."""

import random
from dataclasses import replace

import pytest

from recipe_lib.plan.hardware import (
    HARDWARE,
    HOST_MEMORY,
    HOST_MEMORY_OF_ONE,
    Hardware,
    find_hardware,
)
from recipe_lib.plan.timing.cost import Calibration
from recipe_lib.plan.timing.stream_schedule import StepTime, schedule
from recipe_lib.plan.tracing.trace import (
    ACTION,
    HOST,
    OP,
    PHASE,
    RECORD,
    WAIT,
    ActionMark,
    Collective,
    Op,
    Sync,
    Trace,
)

# One byte moved takes a second, as does one operation; the host and links add nothing.
UNIT = Calibration("", "", "", {"fp32": (((1, 1, 1), 1.0),)}, 1.0, 1.0, 1e-12, 1e-12, 1.0)
CARD = HARDWARE["h100"]


class Script:
    """A trace, written down operator by operator."""

    def __init__(self) -> None:
        self.trace = Trace(phases=["step"], events=[(PHASE, 0)])
        self.marks = 0

    def compute(self, seconds: int, stream: int = 0, name: str = "aten::add") -> None:
        self._op(Op(name, stream, bytes=seconds))

    def gather(
        self,
        seconds: int,
        stream: int,
        *,
        waits: bool = True,
        stride: int = 1,
        operation: str = "send",
    ) -> None:
        # A message: as many bytes on the wire as it has.
        collective = Collective(operation, "world", (0, stride), seconds, waits=waits)
        self._op(Op(f"c10d::{operation}", stream, collective=collective))

    def _op(self, op: Op) -> None:
        self.trace.ops.append(op)
        self.trace.events.append((OP, len(self.trace.ops) - 1))

    def record(self, stream: int) -> int:
        self.marks += 1
        return self._sync(RECORD, stream, self.marks)

    def wait(self, stream: int, event: int) -> int:
        return self._sync(WAIT, stream, event)

    def _sync(self, kind: int, stream: int, event: int) -> int:
        self.trace.syncs.append(Sync(event, stream))
        self.trace.events.append((kind, len(self.trace.syncs) - 1))
        return event

    def run(self, card: Hardware = CARD) -> StepTime:
        return schedule(self.trace, "step", card, UNIT)


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-3)  # latencies of links are microseconds


def test_one_stream_runs_in_order() -> None:
    script = Script()
    script.compute(2)
    script.compute(3)
    time = script.run()
    assert (time.compute, time.communication, time.exposed, time.step) == (near(5), 0, 0, near(5))
    assert [number for number, _, _ in time.timeline] == [0, 1]
    assert time.timeline[1][1:] == (near(2), near(5))


def test_kernels_side_by_side_take_their_time_once() -> None:
    """So that kernels, and communication that they do not hide, are never more than the step."""
    script = Script()
    script.compute(5)
    script.compute(3, stream=1)
    time = script.run()
    assert (time.compute, time.step) == (near(5), near(5))


def test_a_gather_that_is_needed_at_once_is_exposed() -> None:
    script = Script()
    script.gather(4, stream=1)
    script.wait(0, script.record(1))
    script.compute(3)
    time = script.run()
    assert (time.communication, time.exposed, time.step) == (near(4), near(4), near(7))
    assert time.collectives == {0: near(4)}


def test_a_gather_for_the_next_layer_is_hidden() -> None:
    """FSDP's prefetch: the second gather runs beside the first layer and is over before that is."""
    script = Script()
    script.gather(2, stream=1)
    first = script.record(1)
    script.gather(2, stream=1)
    second = script.record(1)
    script.wait(0, first)
    script.compute(5)
    script.wait(0, second)
    script.compute(5)
    time = script.run()
    assert (time.communication, time.exposed, time.step) == (near(4), near(2), near(12))


def test_a_gather_longer_than_the_layer_is_hidden_in_part() -> None:
    script = Script()
    script.gather(2, stream=1)
    first = script.record(1)
    script.gather(8, stream=1)
    second = script.record(1)
    script.wait(0, first)
    script.compute(5)  # 2 to 7, the second gather 2 to 10
    script.wait(0, second)
    script.compute(1)
    time = script.run()
    assert (time.exposed, time.step) == (near(2 + 3), near(11))


def test_copies_on_the_stream_of_the_gathers_come_before_them() -> None:
    script = Script()
    script.compute(1, stream=1)  # copy-in
    script.gather(2, stream=1)
    script.wait(0, script.record(1))
    script.compute(1)
    time = script.run()
    assert (time.step, time.exposed, time.compute) == (near(4), near(2), near(2))


def test_a_reduce_scatter_waits_for_the_gradient_and_the_optimizer_for_it() -> None:
    script = Script()
    script.compute(3)  # backward of layer 2
    script.wait(2, script.record(0))
    script.gather(4, stream=2)  # 3 to 7
    reduced = script.record(2)
    script.compute(3)  # backward of layer 1, 3 to 6
    script.wait(0, reduced)
    script.compute(1)  # optimizer, 7 to 8
    time = script.run()
    assert (time.exposed, time.step) == (near(1), near(8))


def test_collectives_of_one_link_take_turns_and_those_of_two_do_not() -> None:
    def both(stride: int) -> StepTime:
        script = Script()
        script.gather(4, stream=1)
        script.gather(4, stream=2, stride=stride)
        return schedule(script.trace, "step", CARD, UNIT)

    assert both(1).step == near(8)
    assert both(CARD.ranks_per_node).step == near(4)  # the network beside NVLink
    assert both(1).communication == near(8) and both(CARD.ranks_per_node).communication == near(8)


def test_an_asynchronous_collective_holds_up_nobody_until_it_is_waited_for() -> None:
    script = Script()
    script.gather(4, stream=0, waits=False)
    script.compute(1)
    script.compute(9, name="_c10d_functional::wait_tensor")  # its bytes are none that move
    script.compute(1)
    time = script.run()
    assert (time.compute, time.exposed, time.step) == (near(2), near(3), near(5))


def test_waits_come_in_the_order_of_their_collectives() -> None:
    script = Script()
    script.gather(2, stream=0, waits=False)
    script.gather(3, stream=0, waits=False)  # 2 to 5
    script.compute(0, name="_c10d_functional::wait_tensor")
    script.compute(1)  # 2 to 3
    script.compute(0, name="_c10d_functional::wait_tensor")
    script.compute(1)
    assert script.run().step == near(6)


def test_an_event_after_an_asynchronous_collective_stands_for_its_end() -> None:
    script = Script()
    script.gather(4, stream=0, waits=False)
    done = script.record(0)
    script.compute(1)
    script.wait(0, done)
    script.compute(1)
    assert script.run().step == near(5)


def test_what_is_never_waited_for_ends_the_phase() -> None:
    script = Script()
    script.gather(4, stream=0, waits=False)
    script.compute(1)
    assert script.run().step == near(4)


def test_a_received_message_is_waited_for() -> None:
    script = Script()
    script.gather(4, stream=0, waits=False, operation="recv")
    script.compute(1)
    assert script.run().step == near(5)


def test_the_host_bounds_small_operators() -> None:
    slow = Calibration("", "", "", {"fp32": ((1.0, 1.0),)}, 1.0, 1.0, 0.5, 0.1, 1.0)
    script = Script()
    for _ in range(10):
        script.compute(0, name="aten::empty")
    assert schedule(script.trace, "step", CARD, slow).step == pytest.approx(10 * 0.5)
    script.compute(3)
    time = schedule(script.trace, "step", CARD, slow)
    assert time.launch == pytest.approx(11 * 0.5) and time.step == pytest.approx(11 * 0.5 + 3)


def test_only_the_phase_asked_for_counts() -> None:
    script = Script()
    script.compute(1)
    script.trace.phases.append("validation")
    script.trace.events.append((PHASE, 1))
    script.compute(9)
    assert script.run().step == near(1)
    with pytest.raises(ValueError):
        schedule(script.trace, "save", CARD)
    empty = schedule(Trace(phases=["step"], events=[(PHASE, 0)]), "step", CARD)
    assert (empty.step, empty.exposed, empty.timeline) == (0, 0, [])


def test_bounds_hold_for_any_trace() -> None:
    """A step is no shorter than any stream, link or the host, no longer than all of them one after
    the other.
    """
    random.seed(7)
    for _ in range(50):
        script = Script()
        for _ in range(random.randrange(1, 40)):
            stream = random.randrange(3)
            kind = random.random()
            if kind < 0.5:
                script.compute(random.randrange(1, 9), stream)
            elif kind < 0.75:
                script.gather(random.randrange(1, 9), stream, waits=random.random() < 0.7)
            else:
                script.wait(random.randrange(3), script.record(stream))
        time = script.run()
        assert time.step >= time.communication - 1e-9
        assert time.step <= time.compute + time.communication + time.launch + 1e-9
        assert 0 <= time.exposed <= time.communication + 1e-9
        busy: dict[int, float] = {}
        for number, start, end in time.timeline:
            assert 0 <= start <= end <= time.step
            if number not in time.collectives:
                busy[script.trace.ops[number].stream] = (
                    busy.get(script.trace.ops[number].stream, 0.0) + end - start
                )
        assert all(seconds <= time.step + 1e-9 for seconds in busy.values())


def test_the_host_waits_for_a_mark_and_then_computes_its_optimizer() -> None:
    card = replace(CARD, ranks_here=1)
    script = Script()
    script.compute(4)
    script.wait(HOST, script.record(0))
    script.trace.ops.append(
        Op("aten::_fused_adamw_", bytes=int(3 * card.host_memory_bandwidth), on_host=True)
    )
    script.trace.events.append((OP, 1))
    script.compute(2)
    time = script.run(card)
    # gradients are there after 4 s, the host steps for 3, and only then issues what uses the result
    assert (time.on_host, time.compute, time.step) == (near(3), near(6), near(9))
    assert time.launch == near(0)


def test_host_memory_is_shared_by_the_ranks_of_a_machine() -> None:
    alone, eight = (replace(CARD, ranks_here=ranks) for ranks in (1, 8))
    assert alone.host_memory_bandwidth == HOST_MEMORY_OF_ONE
    assert eight.host_memory_bandwidth == HOST_MEMORY / 8
    a100 = HARDWARE["a100-80gb"]  # two of these cards share a switch's way to the host
    assert replace(a100, ranks_here=4).host_bandwidth == a100.host_bandwidth / 2


def test_copies_and_collectives_share_the_bus_where_cards_have_no_links_of_their_own() -> None:
    def step(name: str) -> StepTime:
        card = HARDWARE[name]
        script = Script()
        script.gather(3, stream=1)
        copied = Op(
            "aten::copy_", 2, bytes=int(4 * card.host_bandwidth), transfer="to_host"
        )  # two seconds
        script.trace.ops.append(copied)
        script.trace.events.append((OP, 1))
        return script.run(card)

    assert step("h100").step == near(3)
    assert step("rtx4090").step == near(5)


def test_a_cpu_issues_and_computes_in_turn() -> None:
    script = Script()
    script.compute(2)
    script.compute(3, stream=1)
    script.trace.actions += [ActionMark(0, "F", 0), ActionMark()]
    script.trace.events.append((ACTION, 0))
    script.compute(4)
    script.trace.events.append((ACTION, 1))
    time = script.run(find_hardware("cpu"))
    assert (time.compute, time.step) == (near(9), near(9))
    assert time.timeline[1][1:] == (near(2), near(5))
    assert [seconds for _, seconds in time.actions][1] == near(
        9
    )  # a place in a pipeline ends its action then
