"""What stepping in backward, and states on the host, leave on the device: a simulation's bytes
against formulas.
"""

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.plan.test_closed_forms import (
    BF16,
    LAYER,
    VOCABULARY,
    WIDTH,
    Found,
    model,
    part,
    trace,
    write_models,
)
from tests.recipes.runs import FULL

IN_BACKWARD = ("memory.optimizer_in_backward=true", "clip_grad_norm=null")
ON_HOST = ("memory.optimizer_offload=true",)
CASES = {
    "plain": (1, ()),
    "in backward": (1, IN_BACKWARD),
    "on host": (1, ON_HOST),
    "both": (1, (*IN_BACKWARD, *ON_HOST)),
    "in backward, two": (2, (*IN_BACKWARD, "parallel.fsdp_wrap_policy=memory_efficient")),
    "both, two": (2, (*IN_BACKWARD, *ON_HOST, "parallel.fsdp_wrap_policy=memory_efficient")),
    "streamed": (1, (*IN_BACKWARD, *ON_HOST, "memory.stream_layers=true")),
    "muon": (1, (*IN_BACKWARD, *ON_HOST, "optimizer.name=muon")),
}
MATRIX = VOCABULARY * WIDTH * BF16  # embedding, and output projection
MLP = 14336 * WIDTH * BF16
COUNTERS = 4 * len(model())  # a count of steps in fp32 for each parameter
NORM = WIDTH * BF16


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder: Path = tmp_path_factory.mktemp("stepping")
    write_models(folder)

    class Traces(dict[str, Found]):
        """Each case is traced, in a process of its own, when a test asks for it."""

        def __missing__(self, name: str) -> Found:
            ranks, overrides = CASES[name]
            traced = run_ranks(
                lambda: vars(trace((ranks, 0, FULL, *overrides), folder)), 1, process_group=False
            )
            self[name] = Found(**traced[0])
            return self[name]

    return Traces()


@pytest.mark.slow
def test_one_gradient_at_a_time(found: dict[str, Found]) -> None:
    """On one rank a parameter's; on two those that FSDP reduces together, of which a rank keeps
    half.
    """
    assert found["plain"].most["gradients"] == part(model(), 1) * BF16
    assert found["in backward"].most["gradients"] == found["both"].most["gradients"] == MATRIX
    assert found["in backward, two"].most["gradients"] == MATRIX // 2
    assert part(LAYER, 2) * BF16 < MATRIX // 2


@pytest.mark.slow
def test_states_of_three_parameters_at_most(found: dict[str, Found]) -> None:
    """One leaving, one stepped, one arriving: behind the embedding q and k, in backward behind the
    output projection the last norm and the last layer's down. Muon has one state of that one.
    """
    assert found["plain"].most["optimizer"] == part(model(), 1) * BF16 * 2 + COUNTERS
    q, k = 4096 * NORM, 1024 * NORM
    assert found["on host"].most["optimizer"] == 2 * (MATRIX + q + k) + COUNTERS
    assert found["both"].most["optimizer"] == 2 * (MATRIX + NORM + MLP) + COUNTERS
    assert found["muon"].most["optimizer"] == 2 * (MATRIX + NORM) + MLP


@pytest.mark.slow
def test_peaks_are_what_is_left(found: dict[str, Found]) -> None:
    """States on the host: the peak is the optimizer's step. Stepped in backward too: the
    embedding's, while those of the first layer's q leave.
    """
    parameters = part(model(), 1) * BF16
    left = found["on host"].peak - 2 * parameters - found["on host"].most["optimizer"]
    assert 0 <= left < 4096  # the batch, the loss
    left = found["both"].peak - parameters - 3 * MATRIX - 2 * 4096 * NORM - COUNTERS
    assert 0 <= left < MATRIX // 40  # what is kept of 128 tokens
    assert found["both, two"].peak < found["in backward, two"].peak - part(model(), 2) * BF16


def test_streamed_layers_leave_one_matrix_with_its_gradient_and_states(
    found: dict[str, Found],
) -> None:
    """At the output projection's step, with the last layer on its way; the last norm is not
    streamed.
    """
    layer = part(LAYER, 1) * BF16
    left = found["streamed"].peak - 4 * MATRIX - layer - NORM
    assert 0 <= left < MATRIX // 40
