"""Other kernels of the summed loss than ours: torch's chunked `linear_cross_entropy`, and Liger's.

Both make their gradients in forward, as ours does, and know cross-entropy alone. torch's (2.13 has it, 2.11 not) adds
up the loss of bf16 tokens in bf16: the number that is logged is right to about 2^-8 for each chunk, gradients are as
exact as ours. Liger's (arXiv 2410.10989) holds bf16 logits, with gradients in their place, and chooses its pieces so
that they take about as much as the hidden states. Neither has run on a GPU
(docs/measurements/on_a_gpu.md): they are called as they are documented.

A plan sees what these kernels hold by `on_paper`, since on a simulated device no kernel runs.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.cross_entropy import Loss, chunk_loss, cross_entropy, linear_cross_entropy
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.fused_loss import IGNORED


class SummedLoss(Protocol):
    """The sum of the token losses of `hidden [n, d] @ weight.T [d, v]` with labels `[n]`, as `linear_cross_entropy`."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        chunks: int,
        softcap: float | None = None,
        loss: Loss | None = None,
    ) -> Tensor:
        """A scalar in fp32 (fp64 for fp64)."""


def has_torch_kernel() -> bool:
    """Whether this torch has `linear_cross_entropy` with a chunked mode."""
    return hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def has_liger() -> bool:
    """Whether Liger's kernels can be imported."""
    try:
        import liger_kernel.transformers.fused_linear_cross_entropy  # noqa: F401
    except ImportError:
        return False
    return True


def torch_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    loss: Loss | None = None,
) -> Tensor:
    """torch's kernel, in `chunks` pieces; sums are in fp32 for half precision. See `SummedLoss`; no softcap."""
    _refuse(loss)
    if softcap is not None:
        raise ValueError("torch's linear_cross_entropy does not cap logits")
    rows = -(-hidden.shape[0] // max(1, min(chunks, hidden.shape[0])))
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    if not holds_values(hidden.device):
        return on_paper(hidden, weight, labels, rows=rows, wide=half)
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=rows, chunking_method=None, acc_policy="compact", acc_dtype=torch.float32 if half else None
    )
    found = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", ignore_index=IGNORED, options=options)
    return found.to(torch.promote_types(hidden.dtype, torch.float32))


def liger_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    loss: Loss | None = None,
) -> Tensor:
    """Liger's kernel; its pieces are its own. See `SummedLoss`."""
    _refuse(loss)
    if weight.requires_grad and not hidden.requires_grad and torch.is_grad_enabled():
        hidden = hidden.detach().requires_grad_()  # else it would make no gradient at all
    if not holds_values(hidden.device):
        rows = liger_rows(hidden.shape[0], hidden.shape[1], weight.shape[0])
        return on_paper(hidden, weight, labels, rows=rows, softcap=softcap)
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    kernel = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", softcap=softcap)
    found: Tensor = kernel(weight, hidden, labels)
    return found


KERNELS: dict[str, SummedLoss] = {
    "chunked": linear_cross_entropy,
    "torch": torch_cross_entropy,
    "liger": liger_cross_entropy,
}


def liger_rows(rows: int, width: int, vocabulary: int) -> int:
    """Tokens of one of Liger's pieces: a power of two, with logits of about the size of the hidden states."""
    share = -(-rows // -(-vocabulary // width))
    return min(rows, 1 << (share - 1).bit_length())


def on_paper(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, rows: int, wide: bool = False, softcap: float | None = None
) -> Tensor:
    """The same sum by torch's operators, with the tensors that the kernels hold: logits of `rows` tokens in hidden's
    type, if `wide` in fp32 besides, and both gradients."""
    return _OnPaper.apply(hidden, weight, labels, rows, wide, softcap)


class _OnPaper(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, wide: bool, softcap: float | None
    ) -> Tensor:
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with_grad = hidden_grad is not None or weight_grad is not None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            narrow = F.linear(hidden[part], weight)
            logits = narrow.to(total.dtype) if wide else narrow
            value, grad = chunk_loss(logits, labels[part], softcap, None, with_grad)
            total += value
            if grad is not None:
                grad = narrow.copy_(grad) if wide else grad
                if hidden_grad is not None:
                    torch.mm(grad, weight, out=hidden_grad[part])
                if weight_grad is not None:
                    weight_grad.addmm_(grad.t(), hidden[part])
            del narrow, logits, grad
        ctx.grads = (hidden_grad, weight_grad)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, ()
        return (*(None if grad is None else grad.mul_(gradients[0]) for grad in grads), None, None, None, None)


def _refuse(loss: Loss | None) -> None:
    if loss is not None and loss is not cross_entropy:
        raise ValueError("this kernel computes cross-entropy and nothing else")
