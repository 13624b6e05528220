"""The sum of the token losses over a vocabulary, computed in chunks of tokens (`recipe_lib.ops.chunked_heads`).

Where ranks share the vocabulary, the largest logit, the sum of exponentials and the label's logit are agreed on over
the group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recipe_lib.config.registry import register
from recipe_lib.ops.chunked_heads import (
    IGNORED,
    Finish,
    Head,
    OutputAdapter,
    finish_logits,
    fused_cross_entropy,
    largest_of,
    own_columns,
    sum_in_chunks,
    walk_chunks,
    widen_dtype,
)
from recipe_lib.ops.fused_kernels import follows_from_shapes
from recipe_lib.ops.gathered import Group, all_reduce

Loss = Callable[[Tensor, Tensor], Tensor]


@register("loss", "cross_entropy")
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the token losses of logits `[m, v]` (fp32 or fp64) and labels `[m]`; label -100 counts nothing."""
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy:
    """The sum of token losses, without a tensor of size `[n, v]` in forward or backward.

    Its gradients are made in forward, so that FSDP need not gather the weight for backward. chunks: pieces that the n
    tokens are cut into, even to within one of them. loss: in place of cross-entropy,
    `fn(logits [m, v], labels [m]) -> sum`, a function of its arguments alone.
    """

    chunks: int = 1
    loss: Loss | None = None

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        softcap: float | None = None,
        group: Group | None = None,
        bias: Tensor | None = None,
        finish: Finish | None = None,
        adapter: OutputAdapter | None = None,
    ) -> Tensor:
        """Return a scalar in fp32 (fp64 for fp64), differentiable once.

        hidden: `[..., d]`. weight: `[v, d]`. labels: int64 `[...]`; -100 is ignored. softcap: logits become
        `softcap * tanh(logits / softcap)` (Gemma 2). group: hidden is this rank's `[n, d]` of the N tokens of a
        tensor-parallel group, weight its `[v / t, d]`, labels are all N; the sum is that of all N tokens, on each rank.
        Not with a loss of one's own. bias: `[v]` (`[v / t]` of a group), added to the logits. finish:
        `fn(logits [m, v]) -> logits [m, v]`, what else is done to each logit by itself, a function of its argument
        alone; it costs two more tensors of a chunk's logits. adapter: in place of weight and bias.

        Logits are made in the dtype of `hidden` and turned to fp32 before anything else. When every label is ignored
        the result is 0 and still has a graph with zero gradients, so that under FSDP each rank runs the same
        collectives.
        """
        loss = None if self.loss is cross_entropy else self.loss
        if loss is not None and group is not None:
            raise ValueError("a custom loss needs the logits of the whole vocabulary, which no rank of a group has")

        def sum_loss(head: Head) -> Tensor:
            return _sum_over_chunks(head, labels, self.chunks, softcap, loss, finish)

        return sum_in_chunks(sum_loss, hidden, weight, bias=bias, group=group, adapter=adapter)


@follows_from_shapes(lambda head, *numbers: (*head.parts, *numbers))
def _sum_over_chunks(
    head: Head, labels: Tensor, chunks: int, softcap: float | None, loss: Loss | None, finish: Finish | None
) -> Tensor:
    """The loss `[]`; the head has the gradients."""
    wide = widen_dtype(head.hidden.dtype)
    total = torch.zeros((), dtype=wide, device=head.hidden.device)
    one_kernel = loss is None and finish is None and head.fuses_loss

    def add_chunk(part: slice, targets: Tensor) -> Tensor | None:
        logits = head.logits(part)
        if one_kernel:
            value, gradient = fused_cross_entropy(logits, targets, softcap, head.trains)
        else:
            logits = logits.to(wide)
            value, gradient = chunk_loss(logits, targets, softcap, loss, head.trains, head.group, finish)
        total.add_(value)
        return gradient

    walk_chunks(head, labels, chunks, add_chunk)
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
        logits, finished = finish_logits(logits, finish, with_grad)
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
