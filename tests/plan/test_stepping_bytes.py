"""What stepping in backward, and states on the host, leave on the device: a simulation's bytes against formulas."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.plan.test_closed_forms import BF16, LAYER, VOCABULARY, WIDTH, Found, model, part, trace, write_models
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
    "muon": (1, (*IN_BACKWARD, *ON_HOST, "optimizer.name=muon")),
}
MATRIX = VOCABULARY * WIDTH * BF16  # embedding, and output projection
MLP = 14336 * WIDTH * BF16
COUNTERS = 4 * len(model())  # a count of steps in fp32 for each parameter
PIECE = 64 * 2**20  # of states, at most


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder: Path = tmp_path_factory.mktemp("stepping")

    def work() -> dict[str, dict[str, Any]]:
        write_models(folder)
        return {name: vars(trace((ranks, 0, FULL, *overrides), folder)) for name, (ranks, overrides) in CASES.items()}

    return {name: Found(**fields) for name, fields in run_ranks(work, 1, process_group=False)[0].items()}


def piece_of(matrix: int) -> int:
    """Bytes of a piece of a matrix, of which AdamW's states are twice as much: as many pieces as there have to be."""
    count = -(-2 * matrix // PIECE)
    assert matrix % count == 0
    return matrix // count


def test_one_gradient_at_a_time(found: dict[str, Found]) -> None:
    """On one rank a parameter's, of embedding and output projection a piece's; on two those that FSDP reduces
    together, of which a rank keeps half."""
    assert found["plain"].most["gradients"] == part(model(), 1) * BF16
    assert found["in backward"].most["gradients"] == found["both"].most["gradients"] == MLP
    assert piece_of(MATRIX) < MLP
    assert found["in backward, two"].most["gradients"] == MATRIX // 2
    assert part(LAYER, 2) * BF16 < MATRIX // 2


def test_states_of_three_pieces_at_most(found: dict[str, Found]) -> None:
    """One leaving, one stepped, one arriving. Behind the other in the optimizer: two pieces of the embedding, and q,
    which is one piece; in backward pieces of the output projection. A piece has a count of steps of its own."""
    assert found["plain"].most["optimizer"] == part(model(), 1) * BF16 * 2 + COUNTERS
    q, embedding = 4096 * WIDTH * BF16, piece_of(MATRIX)
    assert piece_of(q) == q
    assert found["on host"].most["optimizer"] == 2 * (2 * embedding + q) + COUNTERS + 4
    assert found["both"].most["optimizer"] == found["both, two"].most["optimizer"] == 6 * embedding + COUNTERS + 4
    assert piece_of(MATRIX // 2) == embedding


def test_muon_has_its_matrices_whole(found: dict[str, Found]) -> None:
    """One state of each: gate, up and down, or behind each other two of these and a piece of AdamW's."""
    assert found["muon"].most["optimizer"] == 3 * MLP


def test_peaks_are_what_is_left(found: dict[str, Found]) -> None:
    """States on the host: the peak is the optimizer's step. Stepped in backward too: an MLP's gradient and states."""
    parameters = part(model(), 1) * BF16
    left = found["on host"].peak - 2 * parameters - found["on host"].most["optimizer"]
    assert 0 <= left < 4096  # the batch, the loss
    mlp = piece_of(MLP)
    left = found["both"].peak - parameters - MLP - 6 * mlp - COUNTERS
    assert 0 <= left < MATRIX // 40  # what a layer and the projection keep of 128 tokens
    assert found["both"].peak - parameters < MATRIX // 3  # where the gradient of either end alone had been MATRIX
    assert found["both, two"].peak < found["in backward, two"].peak - part(model(), 2) * BF16
