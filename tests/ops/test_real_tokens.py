"""Real tokens, and parts of them, against masks."""

import pytest
import torch

from recipe_lib.ops.attention import RealTokens

LENGTHS = [8, 0, 3, 5]
WIDTH = 8
CPU = torch.device("cpu")
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def test_a_mask_has_the_rows_lengths() -> None:
    real = RealTokens.from_lengths(LENGTHS, WIDTH)
    assert torch.equal(real.make_mask(CPU).view(4, WIDTH), MASK)
    assert (real.total, real.longest, real.count) == (sum(LENGTHS), 8, 32)
    assert RealTokens.from_lengths([0], WIDTH).longest == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_consecutive_tokens_of_each_row(ranks: int) -> None:
    real = RealTokens.from_lengths(LENGTHS, WIDTH)
    for rank, part in enumerate(MASK.chunk(ranks, dim=1)):
        assert torch.equal(real.shard_rows(rank, ranks).make_mask(CPU), part.flatten())


@pytest.mark.parametrize(
    "part", [slice(0, 5), slice(5, 11), slice(11, 16), slice(0, 16), slice(3, 3)], ids=str
)
def test_a_piece_of_what_each_of_two_ranks_has(part: slice) -> None:
    taken = RealTokens.from_lengths(LENGTHS, WIDTH).take(part, 16)
    assert torch.equal(taken.make_mask(CPU), MASK.view(2, 16)[:, part].flatten())
    twice = taken.take(slice(1, 3), part.stop - part.start) if part.stop - part.start > 3 else None
    if twice is not None:
        assert torch.equal(
            twice.make_mask(CPU).view(2, -1)[:, :2], MASK.view(2, 16)[:, part][:, 1:3]
        )
