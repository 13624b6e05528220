"""Sequences that ranks share: all heads of some tokens for all tokens of some heads, and back (arXiv 2309.14509).

b rows, c ranks; n of the s = n c tokens of each row are this rank's, in their order. Between layers a rank has its n
tokens. Attention wants all of them, but no head wants another: one all-to-all gives each rank the s tokens of 1/c of
the heads, one more gives it all heads of its n tokens again. Backward is the same the other way round. Nothing is kept.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recipe_lib.ops.gathered import Group, all_reduce, start_gather, wait


def own_tokens(values: Tensor, group: Group) -> Tensor:
    """This rank's `[b, n, ...]` of `[b, s, ...]`. ValueError for rows that cannot be divided evenly."""
    if values.shape[1] % group.size:
        raise ValueError(f"rows of {values.shape[1]} tokens cannot be shared evenly among {group.size} ranks")
    count = values.shape[1] // group.size
    return values.narrow(1, group.rank * count, count)


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q `[b, h, n, e]`, k and v `[b, k, n, e]` and sinks `[h]` of all heads: of this rank's heads, `[b, h / c, s, e]`.

    Where ranks are more than kv heads, several have the same one.
    """
    heads = k.shape[1]
    if heads % group.size:
        k, v = (tensor.repeat_interleave(group.size // heads, dim=1) for tensor in (k, v))
    q, k, v = cast(tuple[Tensor, Tensor, Tensor], _ToHeads.apply(group, q, k, v))
    return q, k, v, None if sinks is None else sinks.chunk(group.size)[group.rank]


def to_tokens(attended: Tensor, *, group: Group) -> Tensor:
    """`[b, h / c, s, e]` of this rank's heads: `[b, h, n, e]` of its tokens."""
    return cast(Tensor, _ToTokens.apply(group, attended))


def sum_over_ranks(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `[]`, which all have then. Backward is that of one sum, to which each rank gave its part:
    the gradient as it is, whatever number of ranks goes backward from it."""
    return cast(Tensor, _SumOverRanks.apply(part, group))


def gather_tokens(part: Tensor, group: Group) -> Tensor:
    """`[b, n, ...]` of each rank as `[b, s, ...]` on all; backward gives each rank its part of the gradient."""
    return cast(Tensor, _TokensOfAll.apply(part, group))


def _exchange(blocks: Tensor, group: Group) -> Tensor:
    """Block i of `[c, ...]` to rank i, and what the ranks sent here in their order."""
    splits = [1] * group.size
    return wait(torch.ops._c10d_functional.all_to_all_single(blocks, splits, splits, group.name))


def _gather(part: Tensor, group: Group) -> Tensor:
    """`[c, ...]` of the `[...]` that each rank has."""
    return wait(start_gather(part.unsqueeze(0), group))


def _send_heads(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """`[b, h_i, n, e]` each to `[b, h_i / c, s, e]`, in one exchange."""
    blocks = torch.cat([part.unflatten(1, (group.size, -1)).permute(1, 0, 3, 2, 4) for part in parts], dim=3)
    found = _exchange(blocks, group)  # [c, b, n, the heads of all parts, e]
    del blocks
    split = found.split([part.shape[1] // group.size for part in parts], dim=3)
    return [part.transpose(0, 1).flatten(1, 2).transpose(1, 2) for part in split]


def _send_tokens(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """`[b, h_i / c, s, e]` each to `[b, h_i, n, e]`, in one exchange."""
    blocks = torch.cat([part.unflatten(2, (group.size, -1)).permute(2, 0, 3, 1, 4) for part in parts], dim=3)
    found = _exchange(blocks, group)  # [c, b, n, heads of rank 0 .. c - 1 of all parts, e]
    del blocks
    split = found.split([part.shape[1] for part in parts], dim=3)
    return [part.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for part in split]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(_send_heads(parts, group))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_send_tokens(gradients, ctx.group))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, attended: Tensor) -> Tensor:
        ctx.group = group
        return _send_tokens([attended], group)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _send_heads(gradients, ctx.group)[0]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return all_reduce(part, "sum", group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _TokensOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather(part, group).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return own_tokens(gradients[0], ctx.group).contiguous(), None
