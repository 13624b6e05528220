"""The loss over a vocabulary, computed in chunks of rows so that the logits of all rows never exist.

With n rows and a vocabulary of v, full logits in fp32 are 4nv bytes, and a plain cross-entropy keeps about three such
tensors alive: 6.3 GB at n = 4096, v = 128256. Here the rows go through the output projection one chunk at a time, and
each chunk's gradient is made at once, while its logits are there. What is kept for the backward pass is one gradient
of the hidden states `[n, d]` and one of the weight `[v, d]`, which the backward pass returns anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recipe_lib.config.registry import register

IGNORED = -100

Loss = Callable[[Tensor, Tensor], Tensor]


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
) -> Tensor:
    """Sum of the token losses of `hidden @ weight.T`, without a tensor of size `[n, v]` in forward or backward.

    hidden: `[n, d]`. weight: `[v, d]`. labels: `[n]` int64; -100 is ignored. chunks: pieces the n rows are cut into,
    even to within one row. softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    loss: `fn(logits [m, v], labels [m]) -> summed scalar`, a function of its arguments alone; None: cross-entropy.

    Returns a scalar in fp32 (fp64 for fp64). Logits are made in the dtype of `hidden` and turned to fp32 before
    anything else. When every label is ignored the result is 0 and still has a graph with zero gradients, so that under
    FSDP each rank runs the same collectives. The gradients are made in the forward pass: differentiable once.
    """
    if loss is cross_entropy:
        loss = None
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wants_gradient:
        return _sum_over_chunks(hidden, weight, labels, chunks, softcap, loss, None, None)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunks, softcap, loss)


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
    """`linear_cross_entropy` for a projection with parts of its own, such as an adapter beside a frozen weight.

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
            value, logits_grad = _chunk_loss(logits.detach().to(dtype), labels[part], softcap, loss, bool(wanted))
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
    ) -> Tensor:
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = _sum_over_chunks(hidden, weight, labels, chunks, softcap, loss, hidden_grad, weight_grad)
        ctx.grads = (hidden_grad, weight_grad)
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
        return (*grads, None, None, None, None)


def _sum_over_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunks: int,
    softcap: float | None,
    loss: Loss | None,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> Tensor:
    """The loss `[]`; fills hidden_grad `[n, d]` and adds to weight_grad `[v, d]` where they are given."""
    rows = hidden.shape[0]
    pieces = max(1, min(chunks, rows))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=dtype, device=hidden.device)
    with_grad = hidden_grad is not None or weight_grad is not None
    for piece in range(pieces):
        part = slice(rows * piece // pieces, rows * (piece + 1) // pieces)
        logits = (hidden[part] @ weight.t()).to(dtype)
        value, logits_grad = _chunk_loss(logits, labels[part], softcap, loss, with_grad)
        del logits
        total += value
        if logits_grad is None:
            continue
        logits_grad = logits_grad.to(hidden.dtype)
        if hidden_grad is not None:
            torch.mm(logits_grad, weight, out=hidden_grad[part])
        if weight_grad is not None:
            weight_grad.addmm_(logits_grad.t(), hidden[part])
        del logits_grad
    return total


def _chunk_loss(
    logits: Tensor, labels: Tensor, softcap: float | None, loss: Loss | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of one chunk's logits `[m, v]`, which it overwrites, and its gradient with respect to them."""
    squash = None
    if softcap is not None:
        squash = logits.div_(softcap).tanh_()
        logits = squash * softcap
        if not with_grad:
            squash = None
    if loss is None:
        value, grad = _cross_entropy_and_grad(logits, labels, with_grad)
    else:
        value, grad = _custom_loss_and_grad(loss, logits, labels, with_grad)
    if grad is not None and squash is not None:
        grad = grad.mul_(squash.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
    return value, grad


def _cross_entropy_and_grad(logits: Tensor, labels: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Summed cross-entropy and softmax minus one-hot, both made in the storage of `logits` `[m, v]`."""
    ignored = labels == IGNORED
    columns = labels.masked_fill(ignored, 0).unsqueeze(1)
    logits.sub_(logits.amax(dim=1, keepdim=True))
    picked = logits.gather(1, columns).squeeze(1)
    logits.exp_()
    sums = logits.sum(dim=1)
    value = (sums.log() - picked).masked_fill(ignored, 0).sum()
    if not with_grad:
        return value, None
    logits.div_(sums.unsqueeze(1))
    logits.scatter_add_(1, columns, logits.new_full((), -1).expand_as(columns))
    return value, logits.masked_fill_(ignored.unsqueeze(1), 0)


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
