"""The log-probability of every label, computed in chunks of rows so that the logits of all rows never exist.

A loss over whole answers, as in preference optimization, needs the log-probability of each token before it knows their
gradients, so that these cannot be made in the forward pass as `recipe_lib.ops.cross_entropy` does. Here the backward
pass makes the logits of a chunk a second time: one matmul more, and what is kept in between is the hidden states, one
number for each row, and nothing of size `[n, v]`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_lib.ops.cross_entropy import Finish, finished_logits, largest_of, own_columns
from recipe_lib.ops.fused_loss import (
    IGNORED,
    cap_of,
    fuses_loss,
    label_log_prob_gradients,
    label_log_probs,
    widen_dtype,
)
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, start_scatter, wait


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    group: Group | None = None,
    bias: Tensor | None = None,
    finish: Finish | None = None,
) -> Tensor:
    """Log-probabilities that `hidden @ weight.T` gives the labels; 0 where a label is -100.

    hidden: `[..., d]`. weight: `[v, d]`. labels: int64 `[...]`. chunks: pieces the rows are cut into, even to within
    one row. softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2). group: as in `linear_cross_entropy`:
    hidden is this rank's `[n, d]`, weight its `[v / t, d]`, labels and the result are those of all N tokens.
    bias, finish: as there, too.

    Returns the shape of labels, fp32 (fp64 for fp64). Logits are made in the dtype of `hidden` and turned to fp32
    before anything else. A frozen weight gets no gradient and costs no memory for one; differentiable once.
    """
    return _TokenLogProbs.apply(hidden, weight, labels, chunks, softcap, group, bias, finish)


def projected_token_log_probs(
    project: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, *, chunks: int, softcap: float | None = None
) -> Tensor:
    """`token_log_probs` for a projection with parts of its own, such as an adapter next to a frozen weight.

    project: `fn(hidden [m, d]) -> logits [m, v]`, row by row alike; called once for each chunk in forward, and again
    in backward with the same random numbers. Whatever it computes with gets its gradient. The rest: see there.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    sizes = [part.stop - part.start for part in row_pieces(rows.shape[0], chunks)]
    parts = [
        checkpoint(_label_log_probs, project, piece, target, softcap, use_reentrant=False)
        for piece, target in zip(rows.split(sizes), targets.split(sizes), strict=True)
    ]
    return torch.cat(parts).reshape(labels.shape).clone()  # a module of FSDP should return no view


def _label_log_probs(
    project: Callable[[Tensor], Tensor], rows: Tensor, labels: Tensor, softcap: float | None
) -> Tensor:
    """Of one chunk: rows `[m, d]`, labels `[m]`, to `[m]`."""
    logits = project(rows).to(widen_dtype(rows.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class _TokenLogProbs(torch.autograd.Function):
    """Keeps hidden states and the log of each row's sum of exponentials; makes the logits in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunks: int,
        softcap: float | None,
        group: Group | None,
        bias: Tensor | None,
        finish: Finish | None,
    ) -> Tensor:
        rows, targets = hidden.flatten(0, -2), labels_by_rank(labels, group)
        picked = torch.empty(labels.shape, dtype=widen_dtype(hidden.dtype), device=hidden.device)
        log_sums = torch.empty(targets.shape, dtype=picked.dtype, device=hidden.device)
        ignored, one_kernel = targets == IGNORED, _in_one_kernel(hidden, group, finish)
        for part in row_pieces(rows.shape[0], chunks):
            logits = head_logits(rows[part], weight, bias, group)
            if one_kernel:
                found = label_log_probs(logits, targets[0, part], cap_of(logits, softcap))
                picked.view(targets.shape)[0, part], log_sums[0, part] = found
                del logits, found
                continue
            logits = logits.to(picked.dtype)
            if finish is not None:
                logits = finish(logits).clone()  # it is overwritten, and might be a view of something else
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            unwanted = ignored[:, part].flatten()
            columns, elsewhere = own_columns(targets[:, part].flatten(), unwanted, logits.shape[1], group)
            chosen = logits.gather(1, columns).squeeze(1)
            largest = largest_of(logits, group)
            sums = logits.sub_(largest).exp_().sum(dim=1)
            if elsewhere is not None and group is not None:
                sums, chosen = all_reduce(torch.stack([sums, chosen.masked_fill_(elsewhere, 0)]), "sum", group)
            log_sum = sums.log_().add_(largest.squeeze(1))
            log_sums[:, part] = log_sum.view(len(targets), -1)
            chosen = chosen.sub_(log_sum).masked_fill_(unwanted, 0)
            picked.view(targets.shape)[:, part] = chosen.view(len(targets), -1)
            del logits
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.chunks, ctx.softcap, ctx.group, ctx.finish = chunks, softcap, group, finish
        return picked

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        group = ctx.group
        rows, targets = hidden.flatten(0, -2), labels_by_rank(labels, group)
        hidden_grad = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias) if ctx.needs_input_grad[6] else None
        slopes = gradients[0].reshape(targets.shape)
        one_kernel = _in_one_kernel(hidden, group, ctx.finish)
        for part in row_pieces(rows.shape[0], ctx.chunks):
            tokens = rows[part] if group is None else wait(start_gather(rows[part], group))
            if one_kernel:
                logits, of_rows = head_logits(tokens, weight, bias, None), (targets[0, part], log_sums[0, part])
                cap = cap_of(logits, ctx.softcap)
                narrow = label_log_prob_gradients(logits, *of_rows, slopes[0, part], cap)
                del logits
            else:  # the function alone holds the logits
                rows_of = targets[:, part].flatten(), log_sums[:, part].flatten(), slopes[:, part].flatten()
                wide = partial(_gradients, softcap=ctx.softcap, group=group, finish=ctx.finish)
                narrow = wide(head_logits(tokens, weight, bias, None).to(log_sums.dtype), *rows_of).to(hidden.dtype)
            if hidden_grad is not None and group is None:
                torch.mm(narrow, weight, out=hidden_grad[part])
            elif hidden_grad is not None and group is not None:
                hidden_grad[part] = wait(start_scatter(narrow @ weight, group))
            if weight_grad is not None:
                weight_grad.addmm_(narrow.t(), tokens)
            if bias_grad is not None:
                bias_grad.add_(narrow.sum(dim=0))
            del narrow, tokens
        hidden_grad = None if hidden_grad is None else hidden_grad.view_as(hidden)
        return hidden_grad, weight_grad, None, None, None, None, bias_grad, None


def _in_one_kernel(hidden: Tensor, group: Group | None, finish: Finish | None) -> bool:
    """Not where ranks agree on each row's sum in between."""
    return group is None and finish is None and fuses_loss(hidden)


def _gradients(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    slopes: Tensor,
    softcap: float | None,
    group: Group | None,
    finish: Finish | None,
) -> Tensor:
    """The gradients of logits `[m, v]`, which it overwrites; labels, log_sums and slopes: `[m]`."""
    leaf, squash = logits, None
    if finish is not None:
        leaf, finished = finished_logits(logits, finish, True)
        logits = finished.detach().clone()
    if softcap is not None:
        squash = logits.div_(softcap).tanh_()
        logits = squash * softcap
    # d log p(label) / d logits is one-hot minus softmax.
    grad = logits.sub_(log_sums.unsqueeze(1)).exp_().neg_()
    columns, elsewhere = own_columns(labels, labels == IGNORED, grad.shape[1], group)
    one = grad.new_ones(()).expand_as(columns)
    grad.scatter_add_(1, columns, one if elsewhere is None else one.masked_fill(elsewhere.unsqueeze(1), 0))
    grad.mul_(slopes.unsqueeze(1))
    if squash is not None:
        grad.mul_(squash.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
    grad.masked_fill_((labels == IGNORED).unsqueeze(1), 0)  # what is not finite in such a row, too
    return grad if finish is None else torch.autograd.grad(finished, leaf, grad)[0]


def labels_by_rank(labels: Tensor, group: Group | None) -> Tensor:
    """The labels of the tokens that each rank of the group has, a row each; without one, one row."""
    return labels.reshape(1 if group is None else group.size, -1)


def head_logits(rows: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """Rows `[m, d]`, gathered over the group, to logits `[m, v]` in storage of their own."""
    tokens = rows if group is None else wait(start_gather(rows, group))
    return F.linear(tokens, weight, bias)


def row_pieces(rows: int, chunks: int) -> Iterator[slice]:
    """The rows in `chunks` pieces, even to within one of them."""
    pieces = max(1, min(chunks, rows))
    for piece in range(pieces):
        yield slice(rows * piece // pieces, rows * (piece + 1) // pieces)
