"""`record_stream`: memory that another stream uses is no race when it is freed, and is held in the
planner's replay.
"""

from typing import Any

import pytest
import torch

from recipe_lib.plan.allocation import caching_allocator
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.build_plan import make_plan
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.plan.apart import build_settings, call_in_fork

SIZE = 8 * 2**20
COUNT = 5


def uses_a_stream(recipe: type, recorded: bool) -> type:
    """Tensors that another stream works on and that are dropped at once; it has waited for their
    values.
    """

    class Own(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            module = torch.get_device_module(self.device)
            side = module.Stream()
            for _ in range(COUNT):
                one = torch.zeros(SIZE // 4, device=self.device)
                side.wait_stream(module.current_stream())
                with module.stream(side):
                    one.mul_(2.0)
                if recorded:
                    one.record_stream(side)
                del one
            return super().train_step(batches)

    return Own


def found(recorded: bool, queue: int = 0) -> tuple[list[str], int, list[str]]:
    """(faults, most bytes active in a step, what a plan says). queue: kernels that a host can be
    ahead of a stream.
    """
    recipe, cfg, wanted = build_settings(
        "demo/full", 1, "device=auto", "max_seq_len=32", "batch_size=1"
    )
    checker = StreamChecker(NAME)
    own = uses_a_stream(recipe, recorded)
    trace = simulate(own, cfg, wanted.sequence, phases=(), checker=checker).trace
    caching_allocator.LAUNCH_QUEUE = queue or caching_allocator.LAUNCH_QUEUE
    active = replay(trace).phases[STEADY].active
    return checker.list_faults(), active, make_plan(own, cfg, wanted)[0].not_modeled


@pytest.mark.slow
def test_it_is_no_race_and_its_memory_is_held_as_long_as_a_host_can_be_ahead() -> None:
    """Which is to the end of the step, as that other stream's queue never fills; in one of two
    kernels a block is held until the second one after it.
    """
    (races, reused, none), (clean, held, said) = (
        call_in_fork(found, False),
        call_in_fork(found, True),
    )
    assert (
        len(races) == 1 and races[0].startswith("memory that aten::mul_ on stream 1") and not clean
    )
    assert (COUNT - 1) * SIZE <= held - reused <= COUNT * SIZE
    (line,) = set(said) - set(none)
    assert line.startswith("record_stream: ")
    _, short, _ = call_in_fork(found, True, 2)
    assert SIZE <= short - reused <= 2 * SIZE < held - reused
