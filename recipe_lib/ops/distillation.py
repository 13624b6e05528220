"""Compute the divergence between a student's and a teacher's next tokens, in chunks of tokens.

A recipe passes a `Distillation` to the student as its head loss, a function of hidden states, the
output head's weight and labels. Logits of all tokens never exist, of neither model; gradients are
computed in forward, as in `ops.chunked_heads`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

# P are the teacher's probabilities, Q the student's, both softmax(logits / T), over the ids that
# both vocabularies have: the output head of one model may have padding rows. With
# M = beta P + (1 - beta) Q the divergences of a token are
#
#     forward_kl       KL(P || Q) = sum P log(P / Q): the student covers the teacher's likely tokens
#     reverse_kl       KL(Q || P) = sum Q log(Q / P): it keeps to the teacher's likely tokens
#     jensen_shannon   beta KL(P || M) + (1 - beta) KL(Q || M), as in GKD (arXiv 2306.13649)
#
# times T^2, which keeps gradients as large as they are at T = 1 (arXiv 1503.02531). Their gradients
# by the student's logits / T, before the factor T^2, are Q - P, Q (log(Q / P) - KL(Q || P)) and
# (1 - beta) Q (log(Q / M) - KL(Q || M)).
#
# A chunk of m tokens takes 4 tensors `[m, v]` in fp32, with jensen_shannon 5, and one more if the
# student soft-caps its logits. Other shapes: d channels of the student, d_t of the teacher; v and
# v_t entries of their vocabularies; c ids that a rank compares. On a group of tensor-parallel ranks
# each has a part of the tokens and of the vocabularies.


@dataclass(frozen=True)
class Divergence:
    """The comparison of a student with a teacher, see the formulas above."""

    kind: str = "forward_kl"  # or `reverse_kl`, `jensen_shannon`
    temperature: float = 1.0  # T, which both models' logits are divided by
    beta: float = 0.5  # share of the teacher in the mixture of `jensen_shannon`, in (0, 1)


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of a micro-batch, and the head that projects them to logits."""

    # [b, s, d_t], on tensor-parallel ranks this rank's n tokens [n, d_t]
    hidden: Tensor
    # The output head, called as `head(hidden, labels=..., head_loss=...)`. Its weight is gathered,
    # and on the device, while head_loss runs.
    head: Callable[..., Tensor]
    # The micro-batch's labels, int64 [b, s].
    labels: Tensor


@dataclass(frozen=True)
class Distillation:
    """A head loss: the sum over label tokens of a weighted mean of divergence and cross-entropy."""

    target: TeacherStates  # of this micro-batch
    divergence: Divergence
    weight: float  # of the divergence; the cross-entropy has 1 - weight
    chunks: int = 1  # number of pieces that the tokens are cut into
    # fp64 [2], for the log: the sums of divergence and cross-entropy are added to it, without
    # gradients. With context parallelism they are those of this rank's tokens. None: no log.
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
        """Return the sum, fp32 `[]` (fp64 for fp64), differentiable once.

        The arguments are those of `CrossEntropy`.
        """

        def sum_loss(head: Head) -> Tensor:
            # [divergence, cross-entropy]
            sums = torch.zeros(2, dtype=widen_dtype(hidden.dtype), device=hidden.device)
            run_chunks = partial(_run_chunks, self, head, labels=labels, softcap=softcap, sums=sums)

            # Its keywords are all that a teacher's head may have: `run_head_loss` refuses others.
            def compare_in_chunks(
                hidden: Tensor,
                weight: Tensor,
                teacher_labels: Tensor,
                *,
                softcap: float | None = None,
                group: Group | None = None,
                bias: Tensor | None = None,
            ) -> Tensor:
                run_chunks(
                    TeacherHead(
                        self.divergence,
                        hidden=hidden,
                        weight=weight,
                        softcap=softcap,
                        group=group,
                        bias=bias,
                    )
                )
                return hidden.new_zeros(())  # a tensor, as context-parallel ranks add it up

            # All chunks run inside one call of the teacher's head, so that FSDP gathers its weight
            # once: a gather for each chunk would send more and hold as much.
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
    """Add divergence and cross-entropy of all tokens to `sums`, gradients to the student's head.

    labels, softcap: of the student, see `CrossEntropy`. sums: `[2]`, in the dtype of the loss.
    """
    group = student.group
    temperature = loss.divergence.temperature

    def compare_chunk(part: slice, chunk_labels: Tensor) -> Tensor | None:
        ignored = chunk_labels == IGNORED
        logits = student.compute_logits(part)
        # Under the same name, so that the narrow logits are freed.
        logits = logits.to(sums.dtype)
        logits, tangents = cap_logits(logits, softcap, student.trains)
        # A copy: it is overwritten, and the divergence needs the logits too.
        cross_entropy, grad = compute_chunk_loss(
            logits.clone(), chunk_labels, with_grad=student.trains, group=group
        )
        sums[1] += cross_entropy
        width = logits.shape[1]
        # The first id of this rank's part of the vocabulary.
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
    """A teacher's head, which gives the probabilities that a student's are compared with."""

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
        """Hold the teacher's hidden states `[..., d_t]` and weight `[v_t, d_t]`, of this rank.

        softcap, group, bias: of the teacher's head, see `CrossEntropy`.
        """
        self.divergence = divergence
        self.hidden = hidden.flatten(0, -2)
        self.weight = weight
        self.softcap = softcap
        self.group = group
        self.bias = bias
        # Number of ids that the teacher has a probability for, on all ranks.
        self.vocabulary = weight.shape[0] * (1 if group is None else group.size)

    def compare(
        self, part: slice, log_probs: Tensor, *, first: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence of each token `[m]`, and its gradient `[m, c]`.

        The gradient is by the student's logits / T. part: slice of this rank's tokens. log_probs:
        the student's, `[m, c]`, overwritten: of the c ids from `first` on, which are this rank's
        and in both vocabularies. width: the number of ids that the student has on this rank.
        """
        logits = self.compute_logits(part, first=first, count=log_probs.shape[1], width=width)
        return compute_divergence(
            logits.sub_(compute_log_sum(logits, self.group)),
            log_probs,
            self.divergence,
            group=self.group,
        )

    def compute_logits(self, part: slice, *, first: int, count: int, width: int) -> Tensor:
        """Return the teacher's logits of `count` ids from `first` on, divided by T, `[m, count]`.

        part, width: see `compare`.
        """
        logits = F.linear(gather_tokens(self.hidden[part], self.group), self.weight, self.bias)
        if self.group is not None and self.weight.shape[0] != width:
            # A rank has other ids of the teacher than of the student, as one vocabulary is padded:
            # the ranks gather the chunk's logits, and each takes the student's ids.
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
    """Return the divergence of each token `[m]`, and its gradient `[m, c]`.

    The gradient is by the student's logits / T. teacher, student: log-probabilities `[m, c]`, both
    overwritten. group: the ranks that divide the vocabulary; None: c is all of it.
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
    """Return the log-sum-exp of each row, over all ranks' columns, `[m, 1]`."""
    if logits.shape[1] == 0:  # a rank that has padding rows alone takes part in the collectives
        logits = logits.new_full((logits.shape[0], 1), -math.inf)
    largest = compute_row_max(logits, group)
    return _sum_rows((logits - largest).exp_(), group).unsqueeze(1).log_().add_(largest)


def _sum_rows(values: Tensor, group: Group | None) -> Tensor:
    """Return the sum of each row over all ranks' columns, `[m]`."""
    sums = values.sum(1)
    return sums if group is None else all_reduce(sums, "sum", group)
