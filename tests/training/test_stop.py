"""Stop signals: a flag, agreed by all ranks; the second SIGINT ends the process."""

import os
import signal
from types import SimpleNamespace

import pytest

from recipe_lib.training.loop import StopSignal
from tests.distributed.ranks import run_ranks

ALONE = SimpleNamespace(any=lambda flag: flag)


@pytest.mark.parametrize("number, name", [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals, name: str) -> None:
    with StopSignal() as stop:
        assert stop.received is None and not stop.agree(ALONE)
        os.kill(os.getpid(), number)
        assert stop.received == name and stop.agree(ALONE)


def test_several_sigterm_are_one() -> None:
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agree(ALONE)


def test_the_former_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), StopSignal():
        assert signal.getsignal(signal.SIGINT) != before[0]
        raise KeyError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    "signals, code",
    [(["SIGINT", "SIGINT"], -signal.SIGINT), (["SIGINT"], 0), (["SIGTERM", "SIGINT"], 0)],
)
def test_only_a_second_sigint_ends_the_process(signals: list[str], code: int) -> None:
    child = os.fork()
    if child == 0:
        with StopSignal():
            for name in signals:
                os.kill(os.getpid(), getattr(signal, name))
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == code


def test_a_signal_at_one_rank_stops_all_of_them() -> None:
    def work() -> list[bool]:
        import torch.distributed as dist

        from recipe_lib.config.schema import FullFinetuneConfig
        from recipe_lib.parallel.world import start_world

        agreed = []
        with start_world(FullFinetuneConfig(device="cpu")) as world, StopSignal() as stop:
            agreed.append(stop.agree(world))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            agreed.append(stop.agree(world))
        return agreed

    assert run_ranks(work, 2) == [[False, True], [False, True]]
