"""Exchange tokens for heads around attention, where ranks divide sequences (arXiv 2309.14509).

`parallel.context` calls these for context parallelism. A head's attention needs all tokens, but no
other head. So before attention one all-to-all (`exchange_for_heads`) gives each rank all tokens of
its heads, and after it another (`exchange_for_tokens`) all heads of its tokens again. The backward
of each is the other; nothing is saved for it.
"""

from typing import Any

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import call_with_gradient
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, wait

# Shapes: b rows, c ranks; a rank has n of the s = n c tokens of each row, in their order. There are
# h heads of queries and k of keys and values, with e channels each.


def shard_tokens(values: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens `[b, n, ...]` of `[b, s, ...]`, a view.

    Raises ValueError if c does not divide s.
    """
    if values.shape[1] % group.size:
        raise ValueError(
            f"rows of {values.shape[1]} tokens cannot be shared evenly among {group.size} ranks"
        )
    num_tokens = values.shape[1] // group.size
    return values.narrow(1, group.rank * num_tokens, num_tokens)


def exchange_for_heads(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exchange all heads of this rank's tokens for all tokens of this rank's heads.

    q: `[b, h, n, e]` to `[b, h / c, s, e]`. k, v: `[b, k, n, e]` to `[b, k / c, s, e]`, or to
    `[b, 1, s, e]` with more ranks than kv heads; one of k and c has to divide the other. sinks, a
    score for each head (gpt-oss): `[h]` to `[h / c]`; None: there are none.
    """
    num_kv_heads = k.shape[1]
    if num_kv_heads % group.size:
        # There are more ranks than kv heads: several ranks have the same one.
        k, v = (tensor.repeat_interleave(group.size // num_kv_heads, dim=1) for tensor in (k, v))
    # kept: the index of the argument that backward is given besides the gradients.
    q, k, v = call_with_gradient(_send_heads, q, k, v, group, differentiate=_send_tokens, kept=(3,))
    return q, k, v, None if sinks is None else sinks.chunk(group.size)[group.rank]


def exchange_for_tokens(attended: Tensor, *, group: Group) -> Tensor:
    """Exchange `[b, h / c, s, e]` of this rank's heads for `[b, h, n, e]` of its tokens."""
    (exchanged,) = call_with_gradient(
        _send_tokens, attended, group, differentiate=_send_heads, kept=(1,)
    )
    return exchanged


def sum_over_ranks(part: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' scalars `[]`, on each rank."""
    # Backward passes the gradient on as it is. Autograd's would add up the gradients of all ranks;
    # but they all go backward from the same loss, which has each rank's part once.
    return call_with_gradient(
        lambda part, group: all_reduce(part, "sum", group),
        part,
        group,
        differentiate=lambda gradient: gradient,
        kept=(),
    )


def gather_tokens(part: Tensor, group: Group) -> Tensor:
    """Gather `[b, n, ...]` of each rank to `[b, s, ...]` on all.

    Its backward gives each rank its part of the gradient.
    """
    return call_with_gradient(
        _gather_rows,
        part,
        group,
        differentiate=lambda gradient, group: shard_tokens(gradient, group).contiguous(),
        kept=(1,),
    )


def _send_blocks(blocks: Tensor, group: Group) -> Tensor:
    """Send block i of `[c, ...]` to rank i; return the blocks `[c, ...]` received, by rank."""
    splits = [1] * group.size
    return wait(torch.ops._c10d_functional.all_to_all_single(blocks, splits, splits, group.name))


def _gather_rows(part: Tensor, group: Group) -> Tensor:
    """Return `[b, s, ...]` of each rank's `[b, n, ...]`."""
    return wait(start_gather(part.unsqueeze(0), group)).transpose(0, 1).flatten(1, 2)


def _send_heads(*parts_and_group: Any) -> tuple[Tensor, ...]:
    """Exchange several `[b, h_i, n, e]` for `[b, h_i / c, s, e]`, in one all-to-all.

    The last argument is the group.
    """
    *parts, group = parts_and_group
    blocks = torch.cat(
        [part.unflatten(1, (group.size, -1)).permute(1, 0, 3, 2, 4) for part in parts], dim=3
    )
    received = _send_blocks(blocks, group)  # [c, b, n, the heads of all parts, e]
    del blocks
    split = received.split([part.shape[1] // group.size for part in parts], dim=3)
    return tuple(part.transpose(0, 1).flatten(1, 2).transpose(1, 2) for part in split)


def _send_tokens(*parts_and_group: Any) -> tuple[Tensor, ...]:
    """Exchange several `[b, h_i / c, s, e]` for `[b, h_i, n, e]`, in one all-to-all.

    The last argument is the group.
    """
    *parts, group = parts_and_group
    blocks = torch.cat(
        [part.unflatten(2, (group.size, -1)).permute(2, 0, 3, 1, 4) for part in parts], dim=3
    )
    received = _send_blocks(blocks, group)  # [c, b, n, heads of rank 0 .. c - 1 of all parts, e]
    del blocks
    split = received.split([part.shape[1] for part in parts], dim=3)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for part in split)
