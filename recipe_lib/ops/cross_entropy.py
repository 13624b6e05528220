"""The loss over a vocabulary, computed in chunks of rows so that the logits of all rows never exist.

With n rows and a vocabulary of v, full logits in fp32 are 4nv bytes, and a plain cross-entropy keeps about three such
tensors alive: 6.3 GB at n = 4096, v = 128256. Here the rows go through the output projection one chunk at a time, and
each chunk's gradient is made at once, while its logits are there. What is kept for the backward pass is one gradient
of the hidden states `[n, d]` and one of the weight `[v, d]`, which the backward pass returns anyway.

With a tensor-parallel group of t ranks each has n of N = n t tokens and v / t rows of the weight. A chunk's tokens are
gathered and meet the rank's part of the vocabulary; the largest logit, the sum of exponentials and the label's logit
are agreed on over the group. No rank ever has logits of the whole vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recipe_lib.config.registry import register
from recipe_lib.ops.fused_loss import IGNORED, fused_cross_entropy, fuses_loss
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, start_scatter, wait

Loss = Callable[[Tensor, Tensor], Tensor]
Finish = Callable[[Tensor], Tensor]


@register("loss", "cross_entropy")
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the token losses of logits `[m, v]` (fp32 or fp64) and labels `[m]`; label -100 counts nothing."""
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    loss: Loss | None = None,
    group: Group | None = None,
    bias: Tensor | None = None,
    finish: Finish | None = None,
) -> Tensor:
    """Sum of the token losses of `hidden @ weight.T`, without a tensor of size `[n, v]` in forward or backward.

    hidden: `[n, d]`. weight: `[v, d]`. labels: `[n]` int64; -100 is ignored. chunks: pieces the n rows are cut into,
    even to within one row. softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    loss: `fn(logits [m, v], labels [m]) -> summed scalar`, a function of its arguments alone; None: cross-entropy.
    group: hidden is this rank's `[n, d]` of the N tokens of a tensor-parallel group, weight its `[v / t, d]`, labels
    are all N; the sum is that of all N tokens, on each rank. Not with a custom loss.
    bias: `[v]` (`[v / t]` of a group), added to the logits. finish: `fn(logits [m, v]) -> logits [m, v]`, what else is
    done to each logit by itself, a function of its argument alone; it costs two more tensors of a chunk's logits.

    Returns a scalar in fp32 (fp64 for fp64). Logits are made in the dtype of `hidden` and turned to fp32 before
    anything else. When every label is ignored the result is 0 and still has a graph with zero gradients, so that under
    FSDP each rank runs the same collectives. The gradients are made in the forward pass: differentiable once.
    """
    if loss is cross_entropy:
        loss = None
    if loss is not None and group is not None:
        raise ValueError("a custom loss needs the logits of the whole vocabulary, which no rank of a group has")
    trained = any(tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    if not (torch.is_grad_enabled() and trained):
        return _sum_over_chunks(hidden, weight, labels, chunks, softcap, loss, None, None, group, bias, None, finish)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunks, softcap, loss, group, bias, finish)


def projected_cross_entropy(
    project: Callable[..., Tensor],
    hidden: Tensor,
    trained: Sequence[Tensor | None],
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    loss: Loss | None = None,
) -> Tensor:
    """`linear_cross_entropy` for a projection with parts of its own, such as an adapter next to a frozen weight.

    project: `fn(hidden [m, d], *trained) -> logits [m, v]`; row by row alike, called once for each chunk, its last
    operation one whose backward does not read its result, which is overwritten. trained: the tensors (or None) that
    project computes with and that may want a gradient; any others that it finds by itself get none. The rest: see
    there.
    """
    if loss is cross_entropy:
        loss = None
    return _ProjectedCrossEntropy.apply(project, labels, chunks, softcap, loss, hidden, *trained)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Like _LinearCrossEntropy; a chunk's gradients come from its logits' by autograd, over this chunk alone."""

    @staticmethod
    def forward(
        ctx: Any,
        project: Callable[..., Tensor],
        labels: Tensor,
        chunks: int,
        softcap: float | None,
        loss: Loss | None,
        hidden: Tensor,
        *trained: Tensor | None,
    ) -> Tensor:
        wanted = [index for index, wants in enumerate(ctx.needs_input_grad[5:]) if wants]
        inputs: list[Any] = [None if tensor is None else tensor.detach() for tensor in (hidden, *trained)]
        grads = {index: torch.zeros_like(inputs[index].requires_grad_()) for index in wanted}
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        rows, pieces = hidden.shape[0], max(1, min(chunks, hidden.shape[0]))
        for piece in range(pieces):
            part = slice(rows * piece // pieces, rows * (piece + 1) // pieces)
            inputs[0] = hidden[part].detach().requires_grad_(0 in wanted)
            with torch.set_grad_enabled(bool(wanted)):
                logits = project(*inputs)
            if loss is None and fuses_loss(hidden):
                value, logits_grad = fused_cross_entropy(logits.detach(), labels[part], softcap, bool(wanted))
            else:
                value, logits_grad = chunk_loss(logits.detach().to(dtype), labels[part], softcap, loss, bool(wanted))
            total += value
            if logits_grad is None:
                continue
            leaves = [inputs[index] for index in wanted]
            found = torch.autograd.grad(logits, leaves, logits_grad.to(logits.dtype))
            del logits, logits_grad
            for index, grad in zip(wanted, found, strict=True):
                (grads[0][part] if index == 0 else grads[index]).add_(grad)
        ctx.grads = tuple(grads.get(index) for index in range(len(inputs)))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("projected_cross_entropy went backward twice: its gradients are handed over once")
        grads, ctx.grads = ctx.grads, None
        return (None, None, None, None, None, *(None if grad is None else grad.mul_(grad_output) for grad in grads))


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes both gradients chunk by chunk in the forward pass; the backward pass scales and returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunks: int,
        softcap: float | None,
        loss: Loss | None,
        group: Group | None,
        bias: Tensor | None,
        finish: Finish | None,
    ) -> Tensor:
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[7] else None
        grads = (hidden_grad, weight_grad, group, bias, bias_grad, finish)
        total = _sum_over_chunks(hidden, weight, labels, chunks, softcap, loss, *grads)
        ctx.grads = (hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy went backward a second time: its gradients are handed over once")
        grads, ctx.grads = ctx.grads, None  # scaled in place and given away: a second copy of [v, d] would cost as much
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_output)
        return (*grads[:2], None, None, None, None, None, grads[2], None)


def _sum_over_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunks: int,
    softcap: float | None,
    loss: Loss | None,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
    group: Group | None,
    bias: Tensor | None,
    bias_grad: Tensor | None,
    finish: Finish | None,
) -> Tensor:
    """The loss `[]`; fills hidden_grad `[n, d]`, adds to weight_grad `[v, d]` and bias_grad `[v]`, where given."""
    rows = hidden.shape[0]
    pieces = max(1, min(chunks, rows))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=dtype, device=hidden.device)
    with_grad = any(grad is not None for grad in (hidden_grad, weight_grad, bias_grad))
    # Not where ranks agree on each row's sum in between.
    one_kernel = loss is None and group is None and finish is None and fuses_loss(hidden)
    for piece in range(pieces):
        part = slice(rows * piece // pieces, rows * (piece + 1) // pieces)
        tokens, targets = hidden[part], labels[part]
        if group is not None:
            tokens, targets = wait(start_gather(tokens, group)), labels.view(group.size, rows)[:, part].flatten()
        logits = torch.nn.functional.linear(tokens, weight, bias)
        if one_kernel:
            value, logits_grad = fused_cross_entropy(logits, targets, softcap, with_grad)
        else:
            logits = logits.to(dtype)
            value, logits_grad = chunk_loss(logits, targets, softcap, loss, with_grad, group, finish)
        del logits
        total += value
        if logits_grad is None:
            continue
        logits_grad = logits_grad.to(hidden.dtype)
        if hidden_grad is not None and group is None:
            torch.mm(logits_grad, weight, out=hidden_grad[part])
        elif hidden_grad is not None and group is not None:
            hidden_grad[part] = wait(start_scatter(logits_grad @ weight, group))
        if weight_grad is not None:
            weight_grad.addmm_(logits_grad.t(), tokens)
        if bias_grad is not None:
            bias_grad.add_(logits_grad.sum(dim=0))
        del logits_grad, tokens
    return total


def chunk_loss(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    loss: Loss | None,
    with_grad: bool,
    group: Group | None = None,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The loss of one chunk's logits `[m, v]`, which it overwrites, and its gradient with respect to them."""
    if finish is not None:
        logits, finished = finished_logits(logits, finish, with_grad)
        value, grad = chunk_loss(finished.detach().clone(), labels, softcap, loss, with_grad, group)
        return value, None if grad is None else torch.autograd.grad(finished, logits, grad)[0]
    squash = None
    if softcap is not None:
        squash = logits.div_(softcap).tanh_()
        logits = squash * softcap
        if not with_grad:
            squash = None
    if loss is None:
        value, grad = _cross_entropy_and_grad(logits, labels, with_grad, group)
    else:
        value, grad = _custom_loss_and_grad(loss, logits, labels, with_grad)
    if grad is not None and squash is not None:
        grad = grad.mul_(squash.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
    return value, grad


def _cross_entropy_and_grad(
    logits: Tensor, labels: Tensor, with_grad: bool, group: Group | None
) -> tuple[Tensor, Tensor | None]:
    """Summed cross-entropy and softmax minus one-hot, both made in the storage of `logits` `[m, v]`."""
    ignored = labels == IGNORED
    columns, elsewhere = own_columns(labels, ignored, logits.shape[1], group)
    logits.sub_(largest_of(logits, group))
    picked = logits.gather(1, columns).squeeze(1)
    logits.exp_()
    sums = logits.sum(dim=1)
    if elsewhere is not None and group is not None:
        sums, picked = all_reduce(torch.stack([sums, picked.masked_fill_(elsewhere, 0)]), "sum", group)
    value = (sums.log() - picked).masked_fill(ignored, 0).sum()
    if not with_grad:
        return value, None
    logits.div_(sums.unsqueeze(1))
    one = logits.new_full((), -1).expand_as(columns)
    logits.scatter_add_(1, columns, one if elsewhere is None else one.masked_fill(elsewhere.unsqueeze(1), 0))
    return value, logits.masked_fill_(ignored.unsqueeze(1), 0)


def finished_logits(logits: Tensor, finish: Finish, with_grad: bool) -> tuple[Tensor, Tensor]:
    """The logits `[m, v]` as a leaf, and what `finish` makes of them, with a graph between the two if wanted."""
    with torch.set_grad_enabled(with_grad):
        logits = logits.detach().requires_grad_(with_grad)
        return logits, finish(logits)


def own_columns(labels: Tensor, ignored: Tensor, width: int, group: Group | None) -> tuple[Tensor, Tensor | None]:
    """(columns `[m, 1]` of the labels among a rank's `width` logits, where the label is another rank's `[m]`).

    A column that is not there, or not wanted, is 0. Without a group no label is another rank's: None.
    """
    if group is None:
        return labels.masked_fill(ignored, 0).unsqueeze(1), None
    columns = labels - group.rank * (group.columns or width)
    elsewhere = (columns < 0) | (columns >= width)
    return columns.masked_fill_(elsewhere, 0).unsqueeze(1), elsewhere


def largest_of(logits: Tensor, group: Group | None) -> Tensor:
    """The largest logit of each row, over all ranks' parts of the vocabulary `[m, 1]`."""
    largest = logits.amax(dim=1, keepdim=True)
    return largest if group is None else all_reduce(largest, "max", group)


def _custom_loss_and_grad(loss: Loss, logits: Tensor, labels: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """A registered loss and its gradient by autograd over this chunk alone."""
    if not with_grad:
        return loss(logits, labels), None
    with torch.enable_grad():
        logits.requires_grad_()
        value = loss(logits, labels)
    if not value.requires_grad:  # a loss that ignores its logits here, e.g. because no label counts
        return value, torch.zeros_like(logits)
    (grad,) = torch.autograd.grad(value, logits)
    return value.detach(), grad
