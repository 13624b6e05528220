"""A stream that writes what another one still reads is a race, though no memory changes hands."""

from typing import Any

import pytest
import torch

from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.trace_rank import simulate
from tests.plan.apart import build_settings, call_in_fork


def writes_over_a_read(recipe: type, waits: bool) -> type:
    """Make a recipe whose step reads a tensor on another stream and then clears it."""

    class Own(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            module = torch.get_device_module(self.device)
            side, one = module.Stream(), torch.ones(1024, device=self.device)
            side.wait_stream(module.current_stream())
            with module.stream(side):
                other = one.exp()
            if waits:
                module.current_stream().wait_stream(side)
            one.zero_()
            module.current_stream().wait_stream(
                side
            )  # before the memory of both is given out again
            del other
            return super().train_step(batches)

    return Own


def find_races(waits: bool) -> list[str]:
    recipe, cfg, wanted = build_settings(
        "demo/full", 1, "device=auto", "max_seq_len=32", "batch_size=1"
    )
    checker = StreamChecker(NAME)
    own = writes_over_a_read(recipe, waits)
    simulate(own, cfg, wanted.sequence, phases=(), checker=checker)
    return checker.list_faults()


@pytest.mark.slow
def test_what_another_stream_still_reads_is_not_written() -> None:
    (race,) = call_in_fork(find_races, False)
    assert " aten::zero_ " in race and " writes what aten::exp on stream 1 " in race
    assert race.endswith(" reads, with no wait between them")
    assert not call_in_fork(find_races, True)
