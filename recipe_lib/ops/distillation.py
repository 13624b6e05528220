"""The divergence between a student's and a teacher's next tokens, in chunks of tokens: neither has
logits of all.

P are the teacher's probabilities, Q the student's, both softmax(logits / T), over the ids that both
vocabularies have: those of one model may be padded. With M = beta P + (1 - beta) Q the divergences
of a token are

    forward_kl       KL(P || Q) = sum P log(P / Q): the student covers all that the teacher finds likely
    reverse_kl       KL(Q || P) = sum Q log(Q / P): the student keeps to what the teacher finds likely
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

SumRows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Divergence:
    """kind: `forward_kl`, `reverse_kl` or `jensen_shannon`, see the module's text. beta: of the
    last, in (0, 1).
    """

    kind: str = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of a micro-batch, and the head that makes logits of them.

    hidden: as the teacher's head takes them. head: called as `head(hidden, labels=...,
    head_loss=...)`; it has its weight on the device while head_loss runs. labels: those of the
    micro-batch `[b, s]`.
    """

    hidden: Tensor
    head: Callable[..., Tensor]
    labels: Tensor


@dataclass(frozen=True)
class Distillation:
    """A head loss: the sum over label tokens of `weight` x divergence + (1 - weight) x
    cross-entropy.

    chunks: pieces that the tokens are cut into. sums: fp64 `[2]`, to which both parts are added,
    without gradients; of ranks that share sequences those of a rank's tokens.
    """

    target: TeacherStates
    divergence: Divergence
    weight: float
    chunks: int = 1
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
        """Return a scalar in fp32 (fp64), differentiable once. The arguments are those of
        `CrossEntropy`.
        """

        def sum_loss(head: Head) -> Tensor:
            found = torch.zeros(2, dtype=widen_dtype(hidden.dtype), device=hidden.device)

            def run(
                hidden: Tensor, weight: Tensor, labels_of_teacher: Tensor, **of_head: Any
            ) -> Tensor:
                target = TeacherHead(self.divergence, hidden=hidden, weight=weight, **of_head)
                _run_chunks(self, head, target, labels, softcap, found)
                return hidden.new_zeros(())  # ranks that share sequences add it up

            # FSDP gathers the teacher's weight once for all chunks: of one chunk alone it would be
            # whole too, so that gathering it chunk by chunk would send more and hold as much.
            with torch.no_grad():
                self.target.head(self.target.hidden, labels=self.target.labels, head_loss=run)
            if self.sums is not None:
                self.sums.add_(found)
            return self.weight * found[0] + (1 - self.weight) * found[1]

        return sum_in_chunks(sum_loss, hidden, weight, bias=bias, group=group, adapter=adapter)


def _run_chunks(
    loss: Distillation,
    student: Head,
    target: "TeacherHead",
    labels: Tensor,
    softcap: float | None,
    found: Tensor,
) -> None:
    """Add divergence and cross-entropy of all tokens to `found`; the student has their
    gradients.
    """
    group, wants, temperature = student.group, student.trains, loss.divergence.temperature

    def compare_chunk(part: slice, rows: Tensor) -> Tensor | None:
        ignored = rows == IGNORED
        logits = student.logits(part)
        logits = logits.to(found.dtype)
        logits, squash = cap_logits(logits, softcap, wants)
        value, grad = compute_chunk_loss(logits.clone(), rows, None, None, wants, group)
        found[1] += value
        width = logits.shape[1]
        first = 0 if group is None else group.rank * (group.columns or width)
        common = logits[:, : max(0, min(width, target.vocabulary - first))]
        if temperature != 1:
            common.div_(temperature)
        values, by_logit = target.compare(
            part, common.sub_(compute_log_sum(common, group)), first, width
        )
        found[0] += values.masked_fill(ignored, 0).sum() * temperature**2
        if grad is None:
            return None
        grad.mul_(1 - loss.weight)
        grad[:, : common.shape[1]].add_(by_logit, alpha=loss.weight * temperature)
        del logits, common, by_logit
        if squash is not None:
            grad.mul_(
                squash.square_().neg_().add_(1)
            )  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
        return grad.masked_fill_(ignored.unsqueeze(1), 0)

    walk_chunks(student, labels, loss.chunks, compare_chunk)


class TeacherHead:
    """The head of a teacher, which the student is compared with a chunk at a time.

    hidden: states `[..., d_t]`, and weight `[v_t, d_t]`, of a group this rank's tokens and rows.
    vocabulary: ids that the teacher has a probability for.
    """

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
        self.divergence, self.hidden = divergence, hidden.flatten(0, -2)
        self.weight, self.softcap, self.group, self.bias = weight, softcap, group, bias
        self.vocabulary = weight.shape[0] * (1 if group is None else group.size)

    def compare(
        self, part: slice, log_probs: Tensor, first: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence of each token `[m]`, and its gradient by the student's logits / T
        `[m, c]`.

        part: of a rank's tokens. log_probs: of the student `[m, c]`, of the ids from `first` on,
        which are this rank's and both have; overwritten. width: of all ids that the student has on
        a rank.
        """
        logits = self.logits(part, first, log_probs.shape[1], width)
        teacher = logits.sub_(compute_log_sum(logits, self.group))
        return compute_divergence(teacher, log_probs, self.divergence, _make_row_sum(self.group))

    def logits(self, part: slice, first: int, count: int, width: int) -> Tensor:
        """Of `count` ids from `first` on, divided by the temperature; where the vocabularies are
        cut at other places, as one is padded, the ranks exchange a chunk's.
        """
        logits = F.linear(gather_tokens(self.hidden[part], self.group), self.weight, self.bias)
        if self.group is not None and self.weight.shape[0] != width:
            logits = wait(start_gather(logits.t(), self.group))[first : first + count].t()
        logits = logits[:, :count].to(widen_dtype(logits.dtype))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return (
            logits if self.divergence.temperature == 1 else logits.div_(self.divergence.temperature)
        )


def compute_divergence(
    teacher: Tensor, student: Tensor, divergence: Divergence, sum_rows: SumRows
) -> tuple[Tensor, Tensor]:
    """The divergence of log-probabilities `[m, c]`, which it overwrites: `[m]`, and its gradient by
    the student's logits / T `[m, c]`. sum_rows: over the columns, of all ranks that share them.
    """
    if divergence.kind == "forward_kl":
        chance = teacher.exp()
        values = sum_rows(teacher.sub_(student).mul_(chance))
        return values, student.exp_().sub_(chance)
    if divergence.kind == "reverse_kl":
        ratio, chance = teacher.neg_().add_(student), student.exp_()
        values = sum_rows(ratio * chance)
        return values, ratio.sub_(values.unsqueeze(1)).mul_(chance)
    beta = divergence.beta
    share, other = math.log(beta), math.log1p(-beta)
    mixture = torch.logaddexp(teacher.add_(share), student.add_(other))
    chance = teacher.exp()  # beta P
    values = sum_rows(teacher.sub_(mixture).sub_(share).mul_(chance))
    del chance
    ratio = mixture.neg_().add_(student).sub_(other)
    chance = student.sub_(other).exp_()
    own = sum_rows(ratio * chance)
    return values + (1 - beta) * own, ratio.sub_(own.unsqueeze(1)).mul_(chance).mul_(1 - beta)


def compute_log_sum(logits: Tensor, group: Group | None) -> Tensor:
    """The log of each row's sum of exponentials, over all ranks' columns `[m, 1]`."""
    if logits.shape[1] == 0:  # a rank that has padding alone
        logits = logits.new_full((logits.shape[0], 1), -math.inf)
    largest = compute_row_max(logits, group)
    sums = (logits - largest).exp_().sum(dim=1, keepdim=True)
    sums = sums if group is None else all_reduce(sums, "sum", group)
    return sums.log_().add_(largest)


def _make_row_sum(group: Group | None) -> SumRows:
    return lambda values: (
        values.sum(1) if group is None else all_reduce(values.sum(1), "sum", group)
    )
