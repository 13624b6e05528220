"""What benchmarks/pp_7b.py says of a pipeline's ranks is what a formula says, ours and through torch's own stages."""

import pytest
from torch.distributed.pipelining import _utils

from benchmarks.pp_7b import BEFORE, OURS, TORCH, peak
from tests.plan.apart import apart

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(not hasattr(_utils, "InferenceMode"), reason="this torch's stages are not those of 2.13"),
]


def peaks(kind: str, schedule: str, mode: str, *ranks: int) -> list[int]:
    return [peak(kind, schedule, mode, rank)[0] for rank in ranks]


@pytest.mark.parametrize("kind", [OURS, TORCH])
def test_a_stage_earlier_holds_one_micro_batch_more(kind: str) -> None:
    """In 1F1B, of eight layers: inputs of norms and linears, q, k, v, attention, gate, up, and two made of them."""
    h, q, k, f, heads, tokens = 4096, 4096, 4096, 11008, 32, 4096
    layer = tokens * (2 * (4 * h + 2 * q + 2 * k + 4 * f) + 4 * (heads + 2))
    second, third = apart(peaks, kind, "1f1b", "none", 1, 2)
    assert (second - third) // (8 * layer) == 1
    # What a micro-batch has once: cosines and sines in fp32, and a random state of attention for each layer.
    assert (second - third) % (8 * layer) <= 8 * 64 + 2 * 4 * tokens * 64


def test_held_graphs_are_seen() -> None:
    """Of the rank with the last stage, whose losses the user holds."""
    assert apart(peaks, BEFORE, "zbv", "none", 0)[0] > 1.2 * apart(peaks, TORCH, "zbv", "none", 0)[0]
