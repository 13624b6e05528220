"""All heads of some tokens for all tokens of some heads, against slices of the whole tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_lib.ops import sequence_shards
from recipe_lib.ops.gathered import Group
from recipe_lib.ops.sequence_shards import (
    exchange_for_heads,
    exchange_for_tokens,
    gather_tokens,
    shard_tokens,
    sum_over_ranks,
)
from tests.distributed.ranks import run_ranks

ROWS = 2
LENGTH = 24
WIDTH = 3


def group_here() -> Group:
    return Group(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())  # type: ignore[union-attr]


def whole(heads: int, seed: int) -> Tensor:
    return torch.randn(
        ROWS,
        heads,
        LENGTH,
        WIDTH,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )


def tokens_of(tensor: Tensor, group: Group) -> Tensor:
    """This rank's tokens of `[b, h, s, e]`."""
    return tensor.chunk(group.size, dim=2)[group.rank]


def heads_of(tensor: Tensor, heads: int, group: Group) -> Tensor:
    """Those that this rank's queries of `heads` need of `[b, k, s, e]`, each once."""
    queries = torch.arange(heads).chunk(group.size)[group.rank]
    return tensor[:, torch.unique(queries * tensor.shape[1] // heads)]


def exchanged(heads: int, kv_heads: int) -> None:
    group = group_here()
    tensors = [whole(heads, 1), whole(kv_heads, 2), whole(kv_heads, 3)]
    mine = [tokens_of(tensor, group).clone().requires_grad_() for tensor in tensors]
    sinks = torch.arange(heads, dtype=torch.float64)
    *found, own_sinks = exchange_for_heads(*mine, sinks, group=group)
    for tensor, one in zip(tensors, found, strict=True):
        assert torch.equal(one, heads_of(tensor, heads, group))
    assert (
        own_sinks is not None and own_sinks.tolist() == sinks.chunk(group.size)[group.rank].tolist()
    )
    back = exchange_for_tokens(found[0], group=group)
    assert torch.equal(back, mine[0])
    weights = [
        whole(heads, 4),
        whole(kv_heads, 5),
        whole(kv_heads, 6),
    ]  # the gradient of every element, on all ranks
    loss = sum(
        (one * heads_of(weight, heads, group)).sum()
        for one, weight in zip(found, weights, strict=True)
    )
    assert isinstance(loss, Tensor)
    (loss + (back * tokens_of(weights[0], group)).sum()).backward()
    uses = max(1, group.size // kv_heads)  # ranks that need the same kv head
    for one, weight, times in zip(mine, weights, (2, uses, uses), strict=True):
        torch.testing.assert_close(one.grad, times * tokens_of(weight, group))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(2, 4, 4), (2, 6, 2), (4, 8, 2), (3, 6, 1), (4, 4, 4)]
)
def test_heads_are_slices_of_the_whole_and_come_back(ranks: int, heads: int, kv_heads: int) -> None:
    run_ranks(exchanged, ranks, heads, kv_heads)


def summed() -> list[Any]:
    group = group_here()
    part = torch.tensor(float(group.rank + 1), requires_grad=True)
    total = sum_over_ranks(part, group)
    (3 * total).backward()
    tokens = torch.arange(ROWS * LENGTH, dtype=torch.float64).view(ROWS, LENGTH)
    own = shard_tokens(tokens, group).clone().requires_grad_()
    every = gather_tokens(own, group)
    (every * tokens).sum().backward()
    return [
        total.item(),
        part.grad,
        torch.equal(every, tokens),
        own.grad,
        shard_tokens(tokens, group),
    ]


def test_sums_and_gathered_numbers_are_the_same_on_all_ranks_and_their_gradients_those_of_one_loss() -> (
    None
):
    for total, gradient, same, own_gradient, expected in run_ranks(summed, 2):
        assert (total, float(gradient), same) == (3.0, 3.0, True) and torch.equal(
            own_gradient, expected
        )


def test_rows_that_cannot_be_divided_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 5 tokens cannot be shared evenly among 2 ranks"):
        shard_tokens(torch.zeros(1, 5), Group("none", 2, 0))


@pytest.mark.slow
def test_tensors_of_more_than_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of heads and tokens are at their places beyond what 32 bits count, in both
    directions.
    """
    group = Group("none", 2, 0)
    tokens = 2**18 + 2
    heads = 2
    width = 4096  # long pieces are copied fast
    received = []

    def exchange(blocks: Tensor, _: Group) -> Tensor:
        received.append(blocks)
        return blocks

    monkeypatch.setattr(sequence_shards, "_send_blocks", exchange)
    part = torch.zeros(1, tokens, heads, width, dtype=torch.int8).transpose(
        1, 2
    )  # as projections give them
    assert part.numel() > 2**31
    for head in range(heads):
        part[0, head, -1, -1], part[0, head, 0, 0] = head + 5, head + 7
    (found,) = sequence_shards._send_heads(part, group)
    (blocks,) = received
    assert blocks[:, 0, -1, 0, -1].tolist() == [5, 6] and blocks[:, 0, 0, 0, 0].tolist() == [7, 8]
    assert found.shape == (1, 1, 2 * tokens, width) and int(torch.count_nonzero(found)) == 4
    assert found[0, 0, [0, tokens - 1, tokens, -1], [0, -1, 0, -1]].tolist() == [7, 5, 8, 6]
    (back,) = sequence_shards._send_tokens(found, group)
    assert torch.equal(back[0, :, -1, -1], part[0, :, -1, -1]) and torch.equal(
        back[0, :, 0, 0], part[0, :, 0, 0]
    )
