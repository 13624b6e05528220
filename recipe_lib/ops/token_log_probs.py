"""The log-probability of every label, computed in chunks of rows so that the logits of all rows never exist.

A loss over whole answers, as in preference optimisation, needs the log-probability of each token before it knows their
gradients, so that these cannot be made in the forward pass as `recipe_lib.ops.cross_entropy` does. Here the backward
pass makes the logits of a chunk a second time: one matmul more, and what is kept in between is the hidden states, one
number for each row, and nothing of size `[n, v]`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_lib.ops.cross_entropy import IGNORED


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunks: int, softcap: float | None = None
) -> Tensor:
    """Log-probabilities that `hidden @ weight.T` gives the labels; 0 where a label is -100.

    hidden: `[..., d]`. weight: `[v, d]`. labels: int64 `[...]`. chunks: pieces the rows are cut into, even to within
    one row. softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).

    Returns the shape of labels, fp32 (fp64 for fp64). Logits are made in the dtype of `hidden` and turned to fp32
    before anything else. A frozen weight gets no gradient and costs no memory for one; differentiable once.
    """
    return _TokenLogProbs.apply(hidden, weight, labels, chunks, softcap)


def projected_token_log_probs(
    project: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, *, chunks: int, softcap: float | None = None
) -> Tensor:
    """`token_log_probs` for a projection with parts of its own, such as an adapter beside a frozen weight.

    project: `fn(hidden [m, d]) -> logits [m, v]`, row by row alike; called once for each chunk in forward, and again
    in backward with the same random numbers. Whatever it computes with gets its gradient. The rest: see there.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    sizes = [part.stop - part.start for part in _pieces(rows.shape[0], chunks)]
    parts = [
        checkpoint(_label_log_probs, project, piece, target, softcap, use_reentrant=False)
        for piece, target in zip(rows.split(sizes), targets.split(sizes), strict=True)
    ]
    return torch.cat(parts).reshape(labels.shape).clone()  # a module of FSDP should return no view


def _label_log_probs(
    project: Callable[[Tensor], Tensor], rows: Tensor, labels: Tensor, softcap: float | None
) -> Tensor:
    """Of one chunk: rows `[m, d]`, labels `[m]`, to `[m]`."""
    logits = project(rows).to(_wide(rows.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class _TokenLogProbs(torch.autograd.Function):
    """Keeps hidden states and the log of each row's sum of exponentials; makes the logits in both passes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, softcap: float | None) -> Tensor:
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        picked = torch.empty(labels.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        log_sums = torch.empty(targets.shape, dtype=picked.dtype, device=hidden.device)
        ignored = targets == IGNORED
        columns = targets.masked_fill(ignored, 0).unsqueeze(1)
        for part in _pieces(rows.shape[0], chunks):
            logits = _logits(rows[part], weight, picked.dtype)
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            chosen = logits.gather(1, columns[part]).squeeze(1)
            largest = logits.amax(dim=1, keepdim=True)
            log_sums[part] = logits.sub_(largest).exp_().sum(dim=1).log_().add_(largest.squeeze(1))
            picked.view(-1)[part] = chosen.sub_(log_sums[part]).masked_fill_(ignored[part], 0)
            del logits
        ctx.save_for_backward(hidden, weight, labels, log_sums)
        ctx.chunks, ctx.softcap = chunks, softcap
        return picked

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sums = ctx.saved_tensors
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        hidden_grad = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        ignored = targets == IGNORED
        columns = targets.masked_fill(ignored, 0).unsqueeze(1)
        slopes = gradients[0].flatten().masked_fill(ignored, 0).unsqueeze(1)
        for part in _pieces(rows.shape[0], ctx.chunks):
            logits = _logits(rows[part], weight, log_sums.dtype)
            squash = None
            if ctx.softcap is not None:
                squash = logits.div_(ctx.softcap).tanh_()
                logits = squash * ctx.softcap
            # d log p(label) / d logits is one-hot minus softmax.
            grad = logits.sub_(log_sums[part].unsqueeze(1)).exp_().neg_()
            grad.scatter_add_(1, columns[part], grad.new_ones(()).expand_as(columns[part]))
            grad.mul_(slopes[part])
            if squash is not None:
                grad.mul_(squash.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
            del logits, squash
            narrow = grad.to(hidden.dtype)
            del grad
            if hidden_grad is not None:
                torch.mm(narrow, weight, out=hidden_grad[part])
            if weight_grad is not None:
                weight_grad.addmm_(narrow.t(), rows[part])
            del narrow
        return None if hidden_grad is None else hidden_grad.view_as(hidden), weight_grad, None, None, None


def _logits(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `[m, d]` to logits `[m, v]` in storage of their own."""
    return (rows @ weight.t()).to(dtype)


def _pieces(rows: int, chunks: int) -> Iterator[slice]:
    pieces = max(1, min(chunks, rows))
    for piece in range(pieces):
        yield slice(rows * piece // pieces, rows * (piece + 1) // pieces)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
