"""The divergence between a student's and a teacher's next tokens, in chunks of tokens: neither has logits of all.

P are the teacher's probabilities, Q the student's, both softmax(logits / T), over the ids that both vocabularies have:
those of one model may be padded. With M = beta P + (1 - beta) Q the divergences of a token are

    forward_kl       KL(P || Q) = sum P log(P / Q): the student covers all that the teacher finds likely
    reverse_kl       KL(Q || P) = sum Q log(Q / P): the student keeps to what the teacher finds likely
    jensen_shannon   beta KL(P || M) + (1 - beta) KL(Q || M), as in GKD (arXiv 2306.13649)

times T^2, which keeps gradients as large as they are at T = 1 (arXiv 1503.02531). The gradients by the student's logits
are closed formulas, made with the divergence while a chunk's logits are there (`recipe_lib.ops.chunked_heads`):
with u = logits / T they are Q - P, Q (log(Q / P) - KL(Q || P)) and (1 - beta) Q (log(Q / M) - KL(Q || M)).

A chunk of m tokens takes 4 tensors `[m, v]` in fp32, with jensen_shannon 5, where the student caps its logits one more.
What is kept for backward is a gradient of the hidden states and one of the weight, which backward returns anyway.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.chunked_heads import (
    Head,
    OutputAdapter,
    gather_tokens,
    largest_of,
    row_pieces,
    sum_in_chunks,
    walk_chunks,
)
from recipe_lib.ops.cross_entropy import chunk_loss
from recipe_lib.ops.fused_loss import IGNORED, widen_dtype
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, wait

SumRows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Divergence:
    """kind: `forward_kl`, `reverse_kl` or `jensen_shannon`, see the module's text. beta: of the last, in (0, 1)."""

    kind: str = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states of a micro-batch, and the head that makes logits of them.

    hidden: as the teacher's head takes them. head: called as `head(hidden, labels=..., head_loss=...)`; it has its
    weight on the device while head_loss runs. labels: those of the micro-batch `[b, s]`.
    """

    hidden: Tensor
    head: Callable[..., Tensor]
    labels: Tensor


@dataclass(frozen=True)
class TopTokens:
    """A teacher's likeliest tokens, in place of its logits: k + 1 outcomes a token, all other ids together being one.

    ids: int `[..., k]`, each once. log_probs: `[..., k]`, at the temperature of the divergence. rest: the log of
    what is left for all other ids `[...]`. vocabulary: ids that they were chosen of. They need not sum to 1 exactly.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    vocabulary: int


@dataclass(frozen=True)
class Distillation:
    """A head loss: the sum over label tokens of `weight` x divergence + (1 - weight) x cross-entropy.

    chunks: pieces that the tokens are cut into. sums: fp64 `[2]`, to which both parts are added, without gradients; of
    ranks that share sequences those of a rank's tokens.
    """

    target: TeacherStates | TopTokens
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
        """Return a scalar in fp32 (fp64), differentiable once. The arguments are those of `CrossEntropy`."""

        def sum_loss(head: Head) -> Tensor:
            found = torch.zeros(2, dtype=widen_dtype(hidden.dtype), device=hidden.device)

            def run(target: ChunkTarget) -> None:
                _run_chunks(self, head, target, labels, softcap, found)

            if isinstance(self.target, TopTokens):
                run(BucketTarget(self.target, self.divergence, group))
            else:
                with_teacher_head(self.target, lambda **of_head: run(HeadTarget(self.divergence, **of_head)))
            if self.sums is not None:
                self.sums.add_(found)
            return self.weight * found[0] + (1 - self.weight) * found[1]

        return sum_in_chunks(sum_loss, hidden, weight, bias=bias, group=group, adapter=adapter)


def with_teacher_head(states: TeacherStates, run: Callable[..., None]) -> None:
    """Calls `run(hidden=, weight=, softcap=, group=, bias=)` while the teacher's head has its weight on the device.

    FSDP gathers the weight once for all chunks: of one chunk alone it would be whole too, so that gathering it chunk by
    chunk would send more and hold as much.
    """

    def inside(hidden: Tensor, weight: Tensor, labels: Tensor, **head: Any) -> Tensor:
        run(hidden=hidden, weight=weight, **head)
        return hidden.new_zeros(())

    with torch.no_grad():
        states.head(states.hidden, labels=states.labels, head_loss=inside)


@torch.no_grad()
def likeliest_tokens(states: TeacherStates, count: int, temperature: float, vocabulary: int, chunks: int) -> TopTokens:
    """The `count` likeliest of the ids below `vocabulary` at each label, in the order of the labels `[n, count]`."""
    labeled = states.labels.flatten() != IGNORED
    found: list[TopTokens] = []

    def run(*, hidden: Tensor, **head: Any) -> None:
        target = HeadTarget(Divergence(temperature=temperature), hidden=hidden.flatten(0, -2)[labeled], **head)
        for part in row_pieces(target.hidden.shape[0], chunks):
            logs = target.logits(part, 0, vocabulary, target.weight.shape[0])
            logs.sub_(log_sum(logs, None))
            top = logs.topk(count)
            rest = logs.scatter_(1, top.indices, -math.inf).logsumexp(1)
            found.append(TopTokens(top.indices.int(), top.values, rest, vocabulary))
            del logs

    with_teacher_head(states, run)
    ids, log_probs, rests = (
        torch.cat(parts) for parts in zip(*((one.ids, one.log_probs, one.rest) for one in found), strict=True)
    )
    return TopTokens(ids, log_probs, rests, vocabulary)


def _run_chunks(
    loss: Distillation, student: Head, target: "ChunkTarget", labels: Tensor, softcap: float | None, found: Tensor
) -> None:
    """Add divergence and cross-entropy of all tokens to `found`; the student has their gradients."""
    group, wants, temperature = student.group, student.trains, loss.divergence.temperature

    def compare_chunk(part: slice, rows: Tensor) -> Tensor | None:
        ignored = rows == IGNORED
        logits = student.logits(part)
        logits = logits.to(found.dtype)
        squash = None
        if softcap is not None:
            squash = logits.div_(softcap).tanh_()
            logits = squash * softcap
            squash = squash if wants else None
        value, grad = chunk_loss(logits.clone(), rows, None, None, wants, group)
        found[1] += value
        width = logits.shape[1]
        first = 0 if group is None else group.rank * (group.columns or width)
        common = logits[:, : max(0, min(width, target.vocabulary - first))]
        if temperature != 1:
            common.div_(temperature)
        values, by_logit = target.compare(part, common.sub_(log_sum(common, group)), first, width)
        found[0] += values.masked_fill(ignored, 0).sum() * temperature**2
        if grad is None:
            return None
        grad.mul_(1 - loss.weight)
        grad[:, : common.shape[1]].add_(by_logit, alpha=loss.weight * temperature)
        del logits, common, by_logit
        if squash is not None:
            grad.mul_(squash.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
        return grad.masked_fill_(ignored.unsqueeze(1), 0)

    walk_chunks(student, labels, loss.chunks, compare_chunk)


class ChunkTarget(Protocol):
    """What the student is compared with, a chunk at a time. vocabulary: ids that it has a probability for."""

    vocabulary: int

    def compare(self, part: slice, log_probs: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """part: of a rank's tokens. log_probs: of the student `[m, c]`, of the ids from `first` on, which are this
        rank's and both have; overwritten. width: of all ids that the student has on a rank.

        Returns the divergence of each token `[m]`, and its gradient by the student's logits / T `[m, c]`."""


class HeadTarget:
    """A teacher's head: hidden states `[..., d_t]`, weight `[v_t, d_t]`, of a group this rank's tokens and rows."""

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

    def compare(self, part: slice, log_probs: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """See ChunkTarget."""
        logits = self.logits(part, first, log_probs.shape[1], width)
        teacher = logits.sub_(log_sum(logits, self.group))
        return diverge(teacher, log_probs, self.divergence, _sum_rows(self.group))

    def logits(self, part: slice, first: int, count: int, width: int) -> Tensor:
        """Of `count` ids from `first` on, divided by the temperature; where the vocabularies are cut at other places,
        as one is padded, the ranks exchange a chunk's."""
        logits = F.linear(gather_tokens(self.hidden[part], self.group), self.weight, self.bias)
        if self.group is not None and self.weight.shape[0] != width:
            logits = wait(start_gather(logits.t(), self.group))[first : first + count].t()
        logits = logits[:, :count].to(widen_dtype(logits.dtype))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.divergence.temperature == 1 else logits.div_(self.divergence.temperature)


class BucketTarget:
    """A teacher's likeliest tokens, and the rest as one outcome."""

    def __init__(self, top: TopTokens, divergence: Divergence, group: Group | None) -> None:
        ranks = 1 if group is None else group.size
        self.vocabulary, self.divergence, self.group = top.vocabulary, divergence, group
        self.ids = top.ids.reshape(ranks, -1, top.ids.shape[-1])
        self.log_probs, self.rest = top.log_probs.reshape(self.ids.shape), top.rest.reshape(self.ids.shape[:2])
        self.has_rest = top.ids.shape[-1] < top.vocabulary

    def compare(self, part: slice, log_probs: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """See ChunkTarget."""
        count = log_probs.shape[1]
        columns = self.ids[:, part].flatten(0, 1).long() - first
        columns.masked_fill_((columns < 0) | (columns >= count), count)
        chances = log_probs.new_zeros(log_probs.shape[0], count + 1)  # the last stands for what other ranks have
        chances[:, :count] = log_probs
        student = chances.gather(1, columns)
        student = student if self.group is None else all_reduce(student, "sum", self.group)
        chances.scatter_(1, columns, -math.inf)[:, count] = -math.inf
        rest = log_sum(chances, self.group) if self.has_rest else None
        student = student if rest is None else torch.cat([student, rest], dim=1)
        values, gradient = diverge(self.teacher(part, student.dtype), student, self.divergence, _sum_rows(None))
        if rest is None:
            chances.zero_()
        else:  # each of the rest has its part of the gradient of their sum
            chances.sub_(rest).exp_().mul_(gradient[:, -1:])
        chances.scatter_(1, columns, gradient[:, : columns.shape[1]])
        return values, chances[:, :count]

    def teacher(self, part: slice, dtype: torch.dtype) -> Tensor:
        """The log-probabilities of a chunk's outcomes `[m, k + 1]`, which sum to 1."""
        found = self.log_probs[:, part].flatten(0, 1).to(dtype)
        if self.has_rest:
            found = torch.cat([found, self.rest[:, part].flatten().to(dtype).unsqueeze(1)], dim=1)
        return (found - found.logsumexp(1, keepdim=True)).clamp_(min=_NEVER)


_NEVER = -1e4  # the log of a probability that counts as 0


def diverge(teacher: Tensor, student: Tensor, divergence: Divergence, sum_rows: SumRows) -> tuple[Tensor, Tensor]:
    """The divergence of log-probabilities `[m, c]`, which it overwrites: `[m]`, and its gradient by the student's
    logits / T `[m, c]`. sum_rows: over the columns, of all ranks that share them."""
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


def log_sum(logits: Tensor, group: Group | None) -> Tensor:
    """The log of each row's sum of exponentials, over all ranks' columns `[m, 1]`."""
    if logits.shape[1] == 0:  # a rank that has padding alone
        logits = logits.new_full((logits.shape[0], 1), -math.inf)
    largest = largest_of(logits, group)
    sums = (logits - largest).exp_().sum(dim=1, keepdim=True)
    sums = sums if group is None else all_reduce(sums, "sum", group)
    return sums.log_().add_(largest)


def _sum_rows(group: Group | None) -> SumRows:
    return lambda values: values.sum(1) if group is None else all_reduce(values.sum(1), "sum", group)
