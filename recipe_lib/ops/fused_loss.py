"""The log-probability of each label, and its gradient, fused, without logits in fp32.

What `recipe_lib.ops.cross_entropy` and `recipe_lib.ops.head_losses` do to a chunk of logits where operators run one
by one, in fp32 and in place. Fused, they read the logits as they are, `[m, v]` in bf16, and write the gradients in that
type, so that a chunk takes 4 bytes a logit in place of 6. Of logits in fp32 it would take 8 in place of 4: those are
not fused.
"""

import torch
from torch import Tensor

from recipe_lib.ops.fused_kernels import fused, fuses

IGNORED = -100
_WIDEST = 2  # bytes of a logit


def fuses_loss(hidden: Tensor) -> bool:
    """Whether the loss of these hidden states is fused."""
    return hidden.dtype.itemsize <= _WIDEST and fuses(hidden.device)


def fused_cross_entropy(
    logits: Tensor, labels: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of logits `[m, v]` with labels `[m]`, fp32 (fp64 for fp64), and the gradient of the logits."""
    cap = cap_of(logits, softcap)
    log_probs, log_sums = label_log_probs(logits, labels, cap)
    if not with_grad:
        return -log_probs.sum(), None
    slopes = log_probs.new_full((), -1).expand_as(log_probs)
    return -log_probs.sum(), label_log_prob_gradients(logits, labels, log_sums, slopes, cap)


def cap_of(logits: Tensor, softcap: float | None) -> Tensor | None:
    """A softcap as the two functions take it: a number would be compiled for itself."""
    return None if softcap is None else logits.new_full((), softcap, dtype=widen_dtype(logits.dtype))


def _shapes_of_log_probs(logits: Tensor, labels: Tensor, cap: Tensor | None) -> tuple[Tensor, Tensor]:
    of_rows = logits.new_empty(logits.shape[:1], dtype=widen_dtype(logits.dtype))
    return of_rows, torch.empty_like(of_rows)


@fused("label_log_probs(Tensor logits, Tensor labels, Tensor? cap) -> (Tensor, Tensor)", _shapes_of_log_probs)
def label_log_probs(logits: Tensor, labels: Tensor, cap: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the labels, 0 for label -100; logs of the sums of exponentials), each `[m]`, fp32."""
    log_sums = _capped(logits, cap).logsumexp(dim=1)
    ignored = labels == IGNORED
    # Of the logits as they are: a compiler makes in memory what is looked up.
    chosen = _capped(logits.gather(1, labels.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1), cap)
    return (chosen - log_sums).masked_fill(ignored, 0), log_sums


def _shape_of_gradients(logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, cap: Tensor | None) -> Tensor:
    return torch.empty_like(logits)


@fused(
    "label_log_prob_gradients(Tensor logits, Tensor labels, Tensor log_sums, Tensor slopes, Tensor? cap) -> Tensor",
    _shape_of_gradients,
)
def label_log_prob_gradients(
    logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, cap: Tensor | None
) -> Tensor:
    """The logits' gradient `[m, v]` in their type. slopes: of the log-probabilities `[m]`; log_sums: as given there."""
    wide = _capped(logits, cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    # d log p(label) / d logits is one-hot minus softmax; no column is label -100.
    grad = (columns == labels.unsqueeze(1)).to(wide.dtype) - (wide - log_sums.unsqueeze(1)).exp()
    if cap is not None:
        grad = grad * (1 - (wide / cap).square())  # d cap*tanh(x/cap) / dx = 1 - tanh^2
    # Last: what is not finite in a row that does not count has to go, too.
    return (grad * slopes.unsqueeze(1)).masked_fill((labels == IGNORED).unsqueeze(1), 0).to(logits.dtype)


def _capped(logits: Tensor, cap: Tensor | None) -> Tensor:
    wide = logits.to(widen_dtype(logits.dtype))
    return wide if cap is None else cap * torch.tanh(wide / cap)


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what logits are turned to: fp32, of fp64 fp64."""
    return torch.promote_types(dtype, torch.float32)
