"""The divergence between a student's and a teacher's next tokens, computed in chunks of tokens.

Neither has logits of all tokens. P are the teacher's probabilities, Q the student's, both
softmax(logits / T), over the ids that both vocabularies have: those of one model may be padded.
With M = beta P + (1 - beta) Q the divergences of a token are

    forward_kl       KL(P || Q) = sum P log(P / Q): the student covers what the teacher finds likely
    reverse_kl       KL(Q || P) = sum Q log(Q / P): it keeps to what the teacher finds likely
    jensen_shannon   beta KL(P || M) + (1 - beta) KL(Q || M), as in GKD (arXiv 2306.13649)

times T^2, which keeps gradients as large as they are at T = 1 (arXiv 1503.02531). The gradients by
the student's logits are closed formulas, made with the divergence while a chunk's logits are there
(`recipe_lib.ops.chunked_heads`): with u = logits / T they are Q - P, Q (log(Q / P) - KL(Q || P))
and (1 - beta) Q (log(Q / M) - KL(Q || M)).

A chunk of m tokens takes 4 tensors `[m, v]` in fp32, with jensen_shannon 5, where the student caps
its logits one more. What is kept for backward is a gradient of the hidden states and one of the
weight, which backward returns anyway.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.chunked_heads import (
    IGNORED,
    Head,
    OutputAdapter,
    cap_logits,
    compute_chunk_loss,
    compute_row_max,
    gather_tokens,
    sum_in_chunks,
    walk_chunks,
    widen_dtype,
)
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, wait


@dataclass(frozen=True)
class Divergence:
    """The comparison of a student with a teacher; the formulas are those of the module's text."""

    kind: str = "forward_kl"  # or `reverse_kl`, `jensen_shannon`
    temperature: float = 1.0  # T, which both models' logits are divided by
    beta: float = 0.5  # share of the teacher in the mixture of `jensen_shannon`, in (0, 1)


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of a micro-batch, and the head that makes logits of them."""

    # [b, s, d_t], or [n, d_t] where ranks share tokens: as the teacher's head takes them
    hidden: Tensor
    # called as `head(hidden, labels=..., head_loss=...)`; it has its weight on the device while
    # head_loss runs
    head: Callable[..., Tensor]
    # those of the micro-batch, int64 [b, s]
    labels: Tensor


@dataclass(frozen=True)
class Distillation:
    """A head loss: the sum over label tokens of a weighted mean of divergence and cross-entropy."""

    target: TeacherStates
    divergence: Divergence
    weight: float  # of the divergence; the cross-entropy has 1 - weight
    chunks: int = 1  # pieces that the tokens are cut into
    # fp64 [2], to which both parts are added, without gradients; of ranks that share sequences
    # those of a rank's tokens
    sums: Tensor | None = None

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        softcap: float | None = None,
        group: Group | None = None,
        bias: Tensor | None = None,
        adapter: OutputAdapter | None = None,
    ) -> Tensor:
        """Return the sum as a scalar in fp32 (fp64 for fp64), differentiable once.

        The arguments are those of `CrossEntropy`.
        """

        def sum_loss(head: Head) -> Tensor:
            # divergence, cross-entropy
            sums = torch.zeros(2, dtype=widen_dtype(hidden.dtype), device=hidden.device)

            def compare_in_chunks(
                hidden: Tensor, weight: Tensor, labels_of_teacher: Tensor, **of_head: Any
            ) -> Tensor:
                _run_chunks(
                    self,
                    head,
                    TeacherHead(self.divergence, hidden=hidden, weight=weight, **of_head),
                    labels=labels,
                    softcap=softcap,
                    sums=sums,
                )
                return hidden.new_zeros(())  # ranks that share sequences add it up

            # FSDP gathers the teacher's weight once for all chunks: of one chunk alone it would be
            # whole too, so that gathering it chunk by chunk would send more and hold as much.
            with torch.no_grad():
                self.target.head(
                    self.target.hidden, labels=self.target.labels, head_loss=compare_in_chunks
                )
            if self.sums is not None:
                self.sums.add_(sums)
            return self.weight * sums[0] + (1 - self.weight) * sums[1]

        return sum_in_chunks(sum_loss, hidden, weight, bias=bias, group=group, adapter=adapter)


def _run_chunks(
    loss: Distillation,
    student: Head,
    target: "TeacherHead",
    *,
    labels: Tensor,
    softcap: float | None,
    sums: Tensor,
) -> None:
    """Add divergence and cross-entropy of all tokens to `sums`; the student has their gradients."""
    group = student.group
    temperature = loss.divergence.temperature

    def compare_chunk(part: slice, targets: Tensor) -> Tensor | None:
        ignored = targets == IGNORED
        logits = student.compute_logits(part)
        logits = logits.to(sums.dtype)
        logits, tangents = cap_logits(logits, softcap, student.trains)
        # A copy: it is overwritten, and the divergence needs the logits too.
        cross_entropy, grad = compute_chunk_loss(
            logits.clone(), targets, with_grad=student.trains, group=group
        )
        sums[1] += cross_entropy
        width = logits.shape[1]
        first = 0 if group is None else group.rank * (group.columns or width)
        common = logits[:, : max(0, min(width, target.vocabulary - first))]
        if temperature != 1:
            common.div_(temperature)
        log_probs = common.sub_(compute_log_sum(common, group))
        divergences, divergence_grad = target.compare(part, log_probs, first=first, width=width)
        sums[0] += divergences.masked_fill(ignored, 0).sum() * temperature**2
        if grad is None:
            return None
        grad.mul_(1 - loss.weight)
        # T^2 of the loss, times 1 / T of logits / T.
        grad[:, : common.shape[1]].add_(divergence_grad, alpha=loss.weight * temperature)
        del logits, common, log_probs, divergence_grad
        if tangents is not None:
            # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
            grad.mul_(tangents.square_().neg_().add_(1))
        return grad.masked_fill_(ignored.unsqueeze(1), 0)

    walk_chunks(student, labels=labels, chunks=loss.chunks, per_chunk=compare_chunk)


class TeacherHead:
    """The head of a teacher, which the student is compared with a chunk at a time."""

    def __init__(
        self,
        divergence: Divergence,
        *,
        hidden: Tensor,
        weight: Tensor,
        softcap: float | None = None,
        group: Group | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """hidden: states `[..., d_t]`, of a group this rank's. weight: `[v_t, d_t]`, likewise."""
        self.divergence = divergence
        self.hidden = hidden.flatten(0, -2)
        self.weight = weight
        self.softcap = softcap
        self.group = group
        self.bias = bias
        # ids that the teacher has a probability for
        self.vocabulary = weight.shape[0] * (1 if group is None else group.size)

    def compare(
        self, part: slice, log_probs: Tensor, *, first: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence of each token `[m]`, and its gradient by logits / T `[m, c]`.

        part: of a rank's tokens. log_probs: of the student `[m, c]`, of the ids from `first` on,
        which are this rank's and both have; overwritten. width: of all ids that the student has on
        a rank. The gradient is by the student's logits.
        """
        logits = self.compute_logits(part, first=first, count=log_probs.shape[1], width=width)
        return compute_divergence(
            logits.sub_(compute_log_sum(logits, self.group)),
            log_probs,
            self.divergence,
            group=self.group,
        )

    def compute_logits(self, part: slice, *, first: int, count: int, width: int) -> Tensor:
        """Return the logits of `count` ids from `first` on, divided by the temperature."""
        logits = F.linear(gather_tokens(self.hidden[part], self.group), self.weight, self.bias)
        if self.group is not None and self.weight.shape[0] != width:
            # The vocabularies are cut at other places, as one is padded: ranks exchange a chunk's.
            logits = wait(start_gather(logits.t(), self.group))[first : first + count].t()
        logits = logits[:, :count].to(widen_dtype(logits.dtype))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.divergence.temperature != 1:
            logits.div_(self.divergence.temperature)
        return logits


def compute_divergence(
    teacher: Tensor, student: Tensor, divergence: Divergence, *, group: Group | None
) -> tuple[Tensor, Tensor]:
    """Return the divergence `[m]` of log-probabilities, and its gradient by logits / T `[m, c]`.

    teacher, student: log-probabilities `[m, c]`, which it overwrites. group: the ranks that
    share the columns. The gradient is by the student's logits.
    """
    if divergence.kind == "forward_kl":
        teacher_probs = teacher.exp()
        values = _sum_rows(teacher.sub_(student).mul_(teacher_probs), group)
        return values, student.exp_().sub_(teacher_probs)
    if divergence.kind == "reverse_kl":
        log_ratio = teacher.neg_().add_(student)
        student_probs = student.exp_()
        values = _sum_rows(log_ratio * student_probs, group)
        return values, log_ratio.sub_(values.unsqueeze(1)).mul_(student_probs)
    beta = divergence.beta
    log_beta = math.log(beta)
    log_rest = math.log1p(-beta)
    mixture = torch.logaddexp(teacher.add_(log_beta), student.add_(log_rest))
    weighted_probs = teacher.exp()  # beta P
    values = _sum_rows(teacher.sub_(mixture).sub_(log_beta).mul_(weighted_probs), group)
    del weighted_probs  # one tensor less while the student's part is made
    log_ratio = mixture.neg_().add_(student).sub_(log_rest)
    student_probs = student.sub_(log_rest).exp_()
    student_kl = _sum_rows(log_ratio * student_probs, group)
    values = values + (1 - beta) * student_kl
    return values, log_ratio.sub_(student_kl.unsqueeze(1)).mul_(student_probs).mul_(1 - beta)


def compute_log_sum(logits: Tensor, group: Group | None) -> Tensor:
    """Return the log of each row's sum of exponentials, over all ranks' columns, `[m, 1]`."""
    if logits.shape[1] == 0:  # a rank that has padding alone
        logits = logits.new_full((logits.shape[0], 1), -math.inf)
    largest = compute_row_max(logits, group)
    return _sum_rows((logits - largest).exp_(), group).unsqueeze(1).log_().add_(largest)


def _sum_rows(values: Tensor, group: Group | None) -> Tensor:
    sums = values.sum(1)
    return sums if group is None else all_reduce(sums, "sum", group)
