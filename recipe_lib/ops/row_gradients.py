"""Gradients of large matrices a few rows at a time, for whoever uses each piece up before the next is made.

The gradient of an embedding or of an output projection `[v, d]` is the largest tensor of a step besides the weights: at
v = 128256, d = 4096 it is 0.98 GiB in bf16. An optimizer that steps rows in backward needs no more than some of them at
a time. So backward makes the gradient of a run of rows, gives it away, and makes that of the next one. For the output
projection see `recipe_lib.ops.cross_entropy.cross_entropy_by_rows`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Take = Callable[[int, Tensor], None]  # the number of a piece, and its gradient, of which nothing is to be kept


class Use:
    """One use of a weight, in forward. shared: backward has met another one that was not over yet."""

    __slots__ = ("__weakref__", "shared")

    def __init__(self) -> None:
        self.shared = False


class RowGradients:
    """A weight's gradient in pieces. pieces: runs of rows, in order, all of them together. take: gets each, in order.

    Where backward goes through several uses of the weight, the gradient is the sum of theirs: it is then made whole,
    and autograd adds it up as always.
    """

    def __init__(self, pieces: Sequence[slice], take: Take) -> None:
        self.pieces, self.take = list(pieces), take
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()

    def begin(self) -> Use:
        """Forward uses the weight; to be held until backward asks, and let go of with the graph."""
        use = Use()
        self._uses.add(use)
        return use

    def note_whole(self, result: Tensor) -> None:
        """A result whose backward makes the weight's gradient whole is a use too, besides which none has pieces."""
        use = self.begin()

        def ended(_: Tensor) -> None:
            self.end(use)

        result.register_hook(ended)

    def end(self, use: Use) -> bool:
        """Whether backward may give this use's gradient away in pieces, as there is no other one. Ask once."""
        others = [other for other in self._uses if other is not use]
        for other in others:
            other.shared = True
        self._uses.discard(use)
        return not others and not use.shared


def embedding_by_rows(tokens: Tensor, weight: Tensor, rows: RowGradients) -> Tensor:
    """`F.embedding(tokens, weight)`; backward gives the weight's gradient to `rows` and returns none for it."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.embedding(tokens, weight)
    found: Tensor = _EmbeddingByRows.apply(tokens, weight, rows)
    return found


class _EmbeddingByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, rows: RowGradients) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.use, ctx.count = rows, rows.begin(), weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        make = torch.ops.aten.embedding_dense_backward
        if not ctx.rows.end(ctx.use):
            return None, make(grad_output, tokens, ctx.count, -1, False), None
        grad_output = grad_output.contiguous()
        for number, rows in enumerate(ctx.rows.pieces):
            count = rows.stop - rows.start
            # Tokens of other pieces have the row after the last, which is passed over as padding is.
            own = tokens - rows.start
            own.masked_fill_((own < 0) | (own >= count), count)
            piece = make(grad_output, own, count + 1, count, False)[:count]
            ctx.rows.take(number, piece)
            del own, piece
        return None, None, None
