"""Copies between device and host: their values however late they come; broken rules are noticed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe_lib.ops import host_copies
from recipe_lib.ops.host_copies import Copy, HostCopies, Prefetch
from tests.memory.late_copies import LateCopies, LateStream

CPU = torch.device("cpu")
UNITS = 6
SIZE = 16


class Units:
    """Numbers that wait on the host, and are counted up on the device, unit after unit."""

    def __init__(self, late: LateCopies) -> None:
        self.hosts = [torch.full((SIZE,), float(number)) for number in range(UNITS)]
        self.copies = HostCopies(CPU)
        self.copies._module = late
        self.tensors: dict[int, Tensor] = {}
        self.prefetch = Prefetch(self.copies, self.allocate, self.tensors.pop)
        self.most = 0

    def allocate(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        self.tensors[unit] = torch.empty(SIZE)
        self.most = max(self.most, len(self.tensors))
        return [(self.tensors[unit], self.hosts[unit])]

    def count_up(self, unit: int, following: int | None) -> None:
        """Add one to a unit's numbers on the device, and send them back."""
        self.prefetch.use(unit, following)
        self.tensors[unit].add_(1)
        self.copies.copy_to_host([(self.hosts[unit], self.tensors[unit])], free=lambda: None)
        self.copies.free_sent(keep=1)

    def run(self) -> list[float]:
        """Every unit twice, the second time in reverse; return what is on the host then."""
        for unit in range(UNITS):
            self.count_up(unit, unit + 1 if unit + 1 < UNITS else None)
        for unit in reversed(range(UNITS)):
            self.count_up(unit, unit - 1 if unit else None)
        self.prefetch.drop_all()
        assert not self.tensors
        return [float(host.mean()) for host in self.hosts]


@contextmanager
def made() -> Iterator[tuple[LateCopies, Units]]:
    with LateCopies() as late:
        yield late, Units(late)


EXPECTED = [number + 2.0 for number in range(UNITS)]


def test_units_come_one_ahead_with_their_values_however_late_copies_are() -> None:
    with made() as (late, units):
        assert units.run() == EXPECTED
    assert not late.too_early and not late.too_late
    assert units.most == 2
    # When the order turns the last unit is there still.
    assert late.copied == 4 * SIZE * (2 * UNITS - 1 + 2 * UNITS)


def test_a_unit_that_was_not_expected_comes_too_and_the_expected_one_goes() -> None:
    with made() as (late, units):
        for unit, following in ((0, 1), (3, 4), (1, 2), (2, None)):
            units.count_up(unit, following)
            assert units.prefetch.on_device.keys() == {unit, following} - {None}
        units.prefetch.drop_all()
        assert [float(host[0]) for host in units.hosts] == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]
    assert not late.too_early and not late.too_late


def test_nothing_on_the_host_is_nothing_to_bring() -> None:
    with LateCopies() as late:
        copies = HostCopies(CPU)
        copies._module = late
        prefetch = Prefetch(copies, lambda unit: [], lambda unit: 1 / 0)
        prefetch.use("one", "other")
        prefetch.drop_all()
        assert not prefetch.on_device and late.copied == 0


def test_what_autograd_saved_is_not_taken_for_changed() -> None:
    """A weight whose memory is filled again before backward, with the values that it had."""
    host = torch.arange(4.0)
    with LateCopies() as late:
        copies = HostCopies(CPU)
        copies._module = late
        weight = torch.empty(4)
        copies.copy_to_device([(weight, host)]).wait()
        inputs = torch.ones(4, requires_grad=True)
        product = (inputs * weight).sum()
        copies.copy_to_device([(weight, host)]).wait()
        product.backward()
    assert inputs.grad is not None and torch.equal(inputs.grad, host)


def test_the_host_waits_for_what_it_is_to_compute_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls that it makes, in order."""
    calls: list[str] = []

    class Event:
        def synchronize(self) -> None:
            calls.append("host waits")

    class Stream:
        def wait_event(self, event: Any) -> None:
            calls.append("stream waits")

        def record_event(self) -> Event:
            calls.append("record")
            return Event()

    class Module:
        @staticmethod
        def current_stream() -> Stream:
            return Stream()

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    host_copies.wait_on_host([Copy(Event(), Module), Copy(Event(), Module)], CPU)
    assert calls == ["stream waits", "stream waits", "record", "host waits"]
    Copy(Event(), Module).wait_on_host()
    assert calls[4:] == ["host waits"]


# Rules, broken on purpose


def begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies do not wait for what the computing stream was given."""
    wait_event = LateStream.wait_event

    def waits(stream: LateStream, event: Any) -> None:
        if stream is stream.device.computing:
            wait_event(stream, event)

    monkeypatch.setattr(LateStream, "wait_event", waits)


def is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that computes goes on: it reads early, and gives memory back early."""
    monkeypatch.setattr(Copy, "wait", lambda copy, stream=None: None)


def is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent goes before it is on the host."""

    def free_sent(copies: HostCopies, keep: int = 0) -> None:
        while copies._sent:
            copies._sent.popleft()[1]()

    monkeypatch.setattr(HostCopies, "free_sent", free_sent)


@pytest.mark.parametrize("breaks", [begins_at_once, is_not_awaited, is_freed_at_once])
def test_a_rule_that_is_broken_is_noticed(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with made() as (late, units):
        found = units.run()
    assert found != EXPECTED or late.too_early or late.too_late
