"""`record_stream`: memory that another stream uses is no race when it is freed, and is held in the planner's replay."""

from typing import Any

import torch

from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.simulate import STEADY, simulate
from recipe_lib.plan.world.simulated_device import NAME
from tests.plan.apart import apart, settings

SIZE, COUNT = 8 * 2**20, 5


def uses_a_stream(recipe: type, recorded: bool) -> type:
    """Tensors that another stream works on and that are dropped at once; it has waited for their values."""

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


def found(recorded: bool) -> tuple[list[str], int]:
    """(faults, most bytes active in a step)."""
    recipe, cfg, wanted = settings("demo/full", 1, "device=auto", "max_seq_len=32", "batch_size=1")
    checker = StreamChecker(NAME)
    trace = simulate(uses_a_stream(recipe, recorded), cfg, wanted.sequence, phases=(), checker=checker).trace
    return checker.faults(), replay(trace).phases[STEADY].active


def test_it_is_no_race_and_its_memory_is_held_to_the_end_of_the_step() -> None:
    (races, reused), (none, held) = apart(found, False), apart(found, True)
    assert len(races) == 1 and races[0].startswith("memory that aten::mul_ on stream 1") and not none
    assert (COUNT - 1) * SIZE <= held - reused <= COUNT * SIZE
