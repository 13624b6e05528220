"""Compute the output head, and the cross-entropy of its logits, for one chunk of tokens at a time.

The logits of 4096 tokens and a vocabulary of 128256 are 2.1 GB in fp32, and a plain cross-entropy
keeps three such tensors. A model's head calls a loss by `head_losses.run_head_loss`: `CrossEntropy`
or one of `head_losses` and `distillation`. Losses loop over chunks by `walk_chunks`;
`sum_in_chunks` makes their sum differentiable, with gradients computed in forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.config.registry import register
from recipe_lib.ops.fused_kernels import register_fused, register_shaped_work, should_fuse
from recipe_lib.ops.gathered import Group, all_reduce, start_gather, start_scatter, wait

# Shapes: n tokens, m of them in a chunk, d channels, v entries of the vocabulary. On a group of t
# tensor-parallel ranks each has n of N = n t tokens and v / t rows of the weight. All ranks' tokens
# of a chunk are gathered and multiplied with this rank's rows, so that no rank has logits of the
# whole vocabulary; m then counts the gathered tokens.

# What a model does to its logits `[m, v]` before the loss, elementwise, such as a scale.
Finish = Callable[[Tensor], Tensor]
# (slice of this rank's tokens, the chunk's labels `[m]`) -> gradient of the chunk's logits
# `[m, v]`; None: there is none, as in evaluation.
PerChunk = Callable[[slice, Tensor], Tensor | None]


@dataclass(frozen=True)
class OutputAdapter:
    """The projection of a head with an adapter (LoRA), in place of its weight and bias."""

    # `fn(hidden [m, d], *trained, frozen=None) -> logits [m, v]`, each row by itself. Losses
    # overwrite its result, so that the backward of its last operator must not read it. Tensors that
    # it reads besides its arguments get no gradient.
    project: Callable[..., Tensor]
    # The tensors of the adapter that get gradients; None: the adapter has no such tensor.
    trained: tuple[Tensor | None, ...]
    # `fn(hidden [m, d]) -> [m, v]`, the frozen weight's part of the projection. `TokenLogProbs`
    # passes it to `project`, as its backward projects again when FSDP may have freed the weight.
    frozen: Callable[[Tensor], Tensor]


class ChunkedHead:
    """A head that is a weight `[v, d]`, with or without a bias, and its gradients so far.

    For each chunk call `compute_logits`, then `accumulate` if anything is trained.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], trained: Sequence[bool], *, group: Group | None
    ) -> None:
        """Allocate the gradients of a head.

        tensors: hidden states `[..., d]`, weight, bias or None. trained: which of them get a
        gradient. group: the ranks that share the vocabulary; None: this rank has all of it.
        """
        hidden, weight, self.bias = tensors
        assert hidden is not None and weight is not None
        self.hidden = hidden.flatten(0, -2)  # [n, d], this rank's tokens
        self.weight = weight  # [v, d], with a group [v / t, d]
        self.group = group
        self.trains = any(trained)
        # One for each of `tensors`, None where not trained; complete after the last chunk.
        self.gradients: list[Tensor | None] = [
            torch.empty_like(self.hidden) if trained[0] else None,  # each chunk writes its rows
            *(
                torch.zeros_like(tensor) if tensor is not None and trains else None
                for tensor, trains in zip((weight, self.bias), trained[1:], strict=True)
            ),
        ]
        # `tune plan` simulates a step on tensors without values: the loop over a head's chunks once
        # for each set of shapes of these.
        self.parts = (self.hidden, weight, self.bias, *self.gradients, group)
        self.ranks = 1 if group is None else group.size  # how many share the vocabulary
        self.logits_dtype = self.hidden.dtype  # of the last chunk's logits
        # True: one kernel computes a chunk's loss. Not with a group, whose ranks add up each row's
        # sum of exponentials in between.
        self.fuses_loss = group is None and should_fuse_loss(self.hidden)
        self._tokens: Tensor | None = None  # of the last chunk, with a group those of all ranks

    def compute_logits(self, part: slice) -> Tensor:
        """Return the logits `[m, v]` of a chunk, with a group `[m, v / t]` of all ranks' tokens.

        part: the chunk among this rank's tokens. A loss may overwrite the logits.
        """
        tokens = gather_tokens(self.hidden[part], self.group)
        self._tokens = tokens if self.trains else None
        return F.linear(tokens, self.weight, self.bias)

    def accumulate(self, part: slice, logits_grad: Tensor) -> None:
        """Add the last chunk's part to `gradients`.

        part: the chunk, as given to `compute_logits`. logits_grad: the gradient of its logits.
        """
        hidden_grad, weight_grad, bias_grad = self.gradients
        tokens = self._tokens
        self._tokens = None
        assert tokens is not None
        if hidden_grad is not None and self.group is None:
            torch.mm(logits_grad, self.weight, out=hidden_grad[part])
        elif hidden_grad is not None and self.group is not None:
            hidden_grad[part] = wait(start_scatter(logits_grad @ self.weight, self.group))
        if weight_grad is not None:
            weight_grad.addmm_(logits_grad.t(), tokens)
        if bias_grad is not None:
            bias_grad.add_(logits_grad.sum(dim=0))


class ChunkedAdaptedHead:
    """A head with an adapter, used as a `ChunkedHead`; autograd differentiates each chunk."""

    group = None  # tensor-parallel ranks have no such head
    ranks = 1  # how many share the vocabulary

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        trained: Sequence[bool],
        *,
        project: Callable[..., Tensor],
    ) -> None:
        """Allocate the gradients of a head.

        tensors: hidden states `[..., d]`, then `OutputAdapter.trained`. trained: which of them get
        a gradient. project: see `OutputAdapter`.
        """
        hidden, *adapter_tensors = tensors
        assert hidden is not None
        self.hidden = hidden.flatten(0, -2)
        self.project = project
        self.trains = any(trained)
        self._trains_hidden = trained[0]
        # Leaves, so that autograd stops at them: the chunk's graph is not that of the model.
        self._leaves = [
            None if tensor is None else tensor.detach().requires_grad_(trains)
            for tensor, trains in zip(adapter_tensors, trained[1:], strict=True)
        ]
        self.gradients: list[Tensor | None] = [
            torch.zeros_like(tensor) if tensor is not None and trains else None
            for tensor, trains in zip((self.hidden, *adapter_tensors), trained, strict=True)
        ]
        self.parts = (project,)  # as in `ChunkedHead`; no other head counts as the same
        self.fuses_loss = should_fuse_loss(self.hidden)
        self._last_chunk: Any = None  # (tokens, logits) of the last chunk, with its graph

    @property
    def logits_dtype(self) -> torch.dtype:
        """Return the dtype of the last chunk's logits, which the adapter may have widened."""
        return cast(torch.dtype, self._last_chunk[1].dtype)

    def compute_logits(self, part: slice) -> Tensor:
        tokens = self.hidden[part].detach().requires_grad_(self._trains_hidden)
        with torch.set_grad_enabled(self.trains):
            logits = self.project(tokens, *self._leaves)
        self._last_chunk = (tokens, logits) if self.trains else None
        return logits.detach()

    def accumulate(self, part: slice, logits_grad: Tensor) -> None:
        tokens, logits = self._last_chunk
        self._last_chunk = None
        totals = [(index, total) for index, total in enumerate(self.gradients) if total is not None]
        leaves: list[Any] = [tokens, *self._leaves]
        gradients = torch.autograd.grad(logits, [leaves[index] for index, _ in totals], logits_grad)
        for (index, total), gradient in zip(totals, gradients, strict=True):
            # The hidden states' gradient is that of the chunk's rows alone.
            (total[part] if index == 0 else total).add_(gradient)


Head = ChunkedHead | ChunkedAdaptedHead


def walk_chunks(head: Head, labels: Tensor, chunks: int, per_chunk: PerChunk) -> None:
    """Call `per_chunk(part, labels)` for each of `chunks` pieces of the head's tokens.

    labels: `[..]` of all tokens, with a group those of all ranks. chunks: the number of pieces,
    equal to within one token. per_chunk: calls `head.compute_logits(part)` and returns the gradient
    of these logits, which the head accumulates; None: there is none. It is given a slice of this
    rank's tokens and the chunk's labels `[m]`, with a group those of all ranks.
    """
    rank_labels = labels.reshape(head.ranks, -1)
    for part in split_rows(head.hidden.shape[0], chunks):
        gradient = per_chunk(part, rank_labels[:, part].flatten())
        if gradient is not None:
            # Under the same name, so that the wide gradient is freed before the matmuls.
            gradient = gradient.to(head.logits_dtype)
            head.accumulate(part, gradient)
            del gradient  # before the next chunk's logits are computed


def sum_in_chunks(
    sum_loss: Callable[[Head], Tensor],
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group: Group | None = None,
    adapter: OutputAdapter | None = None,
) -> Tensor:
    """Return `sum_loss(head)`, differentiable once, for a head of these tensors.

    sum_loss: walks the head's chunks and returns the loss `[]`; its gradients are then in
    `head.gradients`. So backward needs no logits. It scales and returns what is kept for it: one
    gradient of the hidden states `[n, d]` and one of the weight `[v, d]`.

    hidden: `[..., d]`. weight: `[v, d]`. bias: `[v]`. With a group hidden is this rank's `[n, d]`
    of N tokens, weight its `[v / t, d]`, bias its `[v / t]`. adapter: in place of weight and bias.
    """
    make_head: Callable[..., Head]
    tensors: tuple[Tensor | None, ...]
    if adapter is None:
        tensors = (hidden, weight, bias)
        make_head = partial(ChunkedHead, group=group)
    else:
        tensors = (hidden, *adapter.trained)
        make_head = partial(ChunkedAdaptedHead, project=adapter.project)
    is_trained = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if not (torch.is_grad_enabled() and is_trained):
        return sum_loss(make_head(tensors, [False] * len(tensors)))
    return cast(Tensor, _GradientsInForward.apply(sum_loss, make_head, *tensors))


class _GradientsInForward(torch.autograd.Function):
    """The node of `sum_in_chunks`: forward computes all gradients, and backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        sum_loss: Callable[[Head], Tensor],
        make_head: Callable[..., Head],
        *tensors: Tensor | None,
    ) -> Tensor:
        head = make_head(tensors, ctx.needs_input_grad[2:])
        total = sum_loss(head)
        hidden, hidden_grad = tensors[0], head.gradients[0]
        # The head has flattened the tokens.
        if hidden is not None and hidden_grad is not None:
            head.gradients[0] = hidden_grad.view_as(hidden)
        ctx.gradients = head.gradients
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a chunked loss went backward a second time: its gradients are handed over once"
            )
        # Scaled in place and given away: a second copy of [v, d] would cost as much.
        gradients = ctx.gradients
        ctx.gradients = None
        scaled = (None if grad is None else grad.mul_(total_grad) for grad in gradients)
        return (None, None, *scaled)


def split_rows(rows: int, chunks: int) -> Iterator[slice]:
    """Yield slices that cut rows into `chunks` pieces, equal to within one row.

    There are no more pieces than rows, and at least one.
    """
    num_pieces = max(1, min(chunks, rows))
    for piece in range(num_pieces):
        yield slice(rows * piece // num_pieces, rows * (piece + 1) // num_pieces)


def gather_tokens(tokens: Tensor, group: Group | None) -> Tensor:
    """Return tokens `[m, ...]`, with a group those of all its ranks in the order of ranks."""
    return tokens if group is None else wait(start_gather(tokens, group))


def finish_logits(logits: Tensor, finish: Finish, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the logits as a leaf of autograd, and `finish(leaf)`.

    with_grad: True: the second tensor has a graph to the first.
    """
    with torch.set_grad_enabled(with_grad):
        logits = logits.detach().requires_grad_(with_grad)
        return logits, finish(logits)


def find_label_columns(
    labels: Tensor, ignored: Tensor, width: int, group: Group | None
) -> tuple[Tensor, Tensor | None]:
    """Return the column of each label among this rank's logits `[m, width]`, int64 `[m, 1]`.

    labels: int64 `[m]`. ignored: bool `[m]`, True where a label is -100. The column of a label that
    is ignored, or in another rank's part of the vocabulary, is 0. The second tensor, bool `[m]`, is
    True where a label is in another rank's part, or ignored; None without a group. Any other label
    outside the vocabulary gets a column that no logits have, with a group on its first or last
    rank, so that `gather` raises.
    """
    if group is None:
        return labels.masked_fill(ignored, 0).unsqueeze(1), None
    # `columns`: the entries of the vocabulary of each rank but the last ones; 0: all have `width`.
    part = group.columns or width
    columns = labels - group.rank * part
    # Labels below the vocabulary are the first rank's, those behind it the last one's: as another
    # rank's on all ranks they would be in the loss without a logit.
    owners = labels.div(part, rounding_mode="floor").clamp_(0, group.size - 1)
    elsewhere = ignored | (owners != group.rank)
    return columns.masked_fill_(elsewhere, 0).unsqueeze(1), elsewhere


def compute_row_max(logits: Tensor, group: Group | None) -> Tensor:
    """Return the largest logit of each row, over all ranks' parts of the vocabulary, `[m, 1]`."""
    largest = logits.amax(dim=1, keepdim=True)
    return largest if group is None else all_reduce(largest, "max", group)


# Log-probabilities of the labels, and their gradients, each by one fused kernel (torch.compile).
#
# Where operators run one by one, losses convert a chunk's logits to fp32 and work in place. Fused,
# they read the logits as they are, `[m, v]` in bf16, and write the gradients in that dtype, so that
# a chunk takes 4 bytes a logit in place of 6. With logits in fp32 it would take 8 in place of 4:
# those are not fused.


IGNORED = -100  # the label of tokens that do not count, torch's own
_WIDEST_FUSED = 2  # bytes of a logit; in wider ones the loss is not fused


def should_fuse_loss(hidden: Tensor) -> bool:
    """Return True if the loss of these hidden states is computed by fused kernels."""
    return hidden.dtype.itemsize <= _WIDEST_FUSED and should_fuse(hidden.device)


def fused_cross_entropy(
    logits: Tensor, labels: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of logits `[m, v]` and labels `[m]`, fp32 (fp64 for fp64).

    softcap: as in `CrossEntropy.__call__`. The second tensor is the gradient of the logits, in
    their dtype; None without `with_grad`.
    """
    cap = make_softcap_tensor(logits, softcap)
    log_probs, log_sums = label_log_probs(logits, labels, cap)
    if not with_grad:
        return -log_probs.sum(), None
    slopes = log_probs.new_full((), -1).expand_as(log_probs)
    return -log_probs.sum(), label_log_prob_gradients(logits, labels, log_sums, slopes, cap)


def make_softcap_tensor(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Return a softcap as a tensor `[]` in the dtype of the loss; None for None."""
    if softcap is None:
        return None
    # A tensor: with a number of Python, they would be compiled anew for each value.
    return logits.new_full((), softcap, dtype=widen_dtype(logits.dtype))


def _make_empty_log_probs(
    logits: Tensor, labels: Tensor, cap: Tensor | None
) -> tuple[Tensor, Tensor]:
    log_probs = logits.new_empty(logits.shape[:1], dtype=widen_dtype(logits.dtype))
    return log_probs, torch.empty_like(log_probs)


@register_fused(
    "label_log_probs(Tensor logits, Tensor labels, Tensor? cap) -> (Tensor, Tensor)",
    _make_empty_log_probs,
)
def label_log_probs(logits: Tensor, labels: Tensor, cap: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the labels and log-sum-exps of the logits, each `[m]`.

    Both are fp32, for fp64 logits fp64. logits: `[m, v]`. labels: `[m]`; for -100 the
    log-probability is 0. cap: from `make_softcap_tensor`.
    """
    log_sums = _apply_softcap(logits, cap).logsumexp(dim=1)
    ignored = labels == IGNORED
    # Looked up before the cap: a compiler writes to memory what a gather reads, here all logits.
    label_logits = logits.gather(1, labels.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
    return (_apply_softcap(label_logits, cap) - log_sums).masked_fill(ignored, 0), log_sums


@register_fused(
    "label_log_prob_gradients(Tensor logits, Tensor labels, Tensor log_sums, Tensor slopes, Tensor?"
    " cap) -> Tensor",
    lambda logits, *_: torch.empty_like(logits),
)
def label_log_prob_gradients(
    logits: Tensor, labels: Tensor, log_sums: Tensor, slopes: Tensor, cap: Tensor | None
) -> Tensor:
    """Return the logits' gradient `[m, v]` in their dtype.

    log_sums: from `label_log_probs`. slopes: gradients of the log-probabilities `[m]`.
    """
    wide = _apply_softcap(logits, cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    # d log p(label) / d logits is one-hot minus softmax; no column is label -100.
    grad = (columns == labels.unsqueeze(1)).to(wide.dtype) - (wide - log_sums.unsqueeze(1)).exp()
    if cap is not None:
        grad = grad * (1 - (wide / cap).square())  # d cap*tanh(x/cap) / dx = 1 - tanh^2
    # Filled, not multiplied by 0: that would leave NaN and infinities in a row that is ignored.
    return (
        (grad * slopes.unsqueeze(1))
        .masked_fill((labels == IGNORED).unsqueeze(1), 0)
        .to(logits.dtype)
    )


def _apply_softcap(logits: Tensor, cap: Tensor | None) -> Tensor:
    """Return `cap * tanh(logits / cap)` in the dtype of the loss; cap None: the logits in it."""
    wide = logits.to(widen_dtype(logits.dtype))
    return wide if cap is None else cap * torch.tanh(wide / cap)


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses of logits are computed: fp32, for fp64 logits fp64."""
    return torch.promote_types(dtype, torch.float32)


# Cross-entropy, or a custom loss, over the chunks of a head. Ranks that divide the vocabulary
# reduce each row's largest logit, sum of exponentials and label's logit.


# (logits `[m, v]`, labels `[m]`) -> sum of the token losses `[]`
Loss = Callable[[Tensor, Tensor], Tensor]


# The default of the config's key `loss`.
@register("loss", "cross_entropy")
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of logits `[m, v]` (fp32 or fp64) and labels `[m]` (-100: 0)."""
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy:
    """The sum of token losses, without a tensor of size `[n, v]` in forward or backward.

    Its gradients are computed in forward, so that FSDP need not gather the weight for backward.
    """

    # Number of pieces that the n tokens are cut into, equal to within one token.
    chunks: int = 1
    # A custom loss, which reads no tensor but its arguments; None: cross-entropy.
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
        """Return the sum, fp32 `[]` (fp64 for fp64), differentiable once.

        hidden: `[..., d]`. weight: `[v, d]`. labels: int64 `[...]`; -100 is ignored. softcap:
        logits become `softcap * tanh(logits / softcap)` (Gemma 2). group: hidden is this rank's
        `[n, d]` of the N tokens of a tensor-parallel group, weight its `[v / t, d]`, labels are all
        N; each rank returns the sum over all N tokens. bias: `[v]` (with a group `[v / t]`), added
        to the logits. finish: applied to the logits before the softcap, a function of its argument
        alone; it costs two more tensors of a chunk's logits. adapter: in place of weight and bias.

        Logits are computed in the dtype of `hidden` and converted to fp32 before anything else.
        When every label is ignored the result is 0 and still has a graph with zero gradients, so
        that under FSDP each rank runs the same collectives. Raises ValueError for a custom loss
        with a group.
        """
        loss = None if self.loss is cross_entropy else self.loss
        if loss is not None and group is not None:
            raise ValueError(
                "a custom loss needs the logits of the whole vocabulary, which no rank of a"
                " group has"
            )

        def sum_loss(head: Head) -> Tensor:
            # By position: `register_shaped_work` below needs it.
            settings = (labels, self.chunks, softcap, loss, finish)
            return _sum_over_chunks(head, *settings)

        return sum_in_chunks(sum_loss, hidden, weight, bias=bias, group=group, adapter=adapter)


# `tune plan` simulates this once for each set of parts and settings, and repeats its records of
# allocations and operators for equal ones.
@register_shaped_work(lambda head, *settings: (*head.parts, *settings))
def _sum_over_chunks(
    head: Head,
    labels: Tensor,
    chunks: int,
    softcap: float | None,
    loss: Loss | None,
    finish: Finish | None,
) -> Tensor:
    """Return the summed loss of all chunks, `[]`; its gradients are then in `head.gradients`."""
    wide_dtype = widen_dtype(head.hidden.dtype)
    total = torch.zeros((), dtype=wide_dtype, device=head.hidden.device)
    is_fused = loss is None and finish is None and head.fuses_loss

    def add_chunk(part: slice, chunk_labels: Tensor) -> Tensor | None:
        logits = head.compute_logits(part)
        if is_fused:
            value, gradient = fused_cross_entropy(
                logits, labels=chunk_labels, softcap=softcap, with_grad=head.trains
            )
        else:
            # Under the same name, so that the narrow logits are freed.
            logits = logits.to(wide_dtype)
            value, gradient = compute_chunk_loss(
                logits,
                chunk_labels,
                softcap=softcap,
                loss=loss,
                with_grad=head.trains,
                group=head.group,
                finish=finish,
            )
        total.add_(value)
        return gradient

    walk_chunks(head, labels=labels, chunks=chunks, per_chunk=add_chunk)
    return total


def compute_chunk_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    with_grad: bool,
    softcap: float | None = None,
    loss: Loss | None = None,
    group: Group | None = None,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of one chunk's logits `[m, v]`, and its gradient with respect to them.

    The logits are overwritten. with_grad: False: the gradient is None. Other arguments: see
    `CrossEntropy.__call__`.
    """
    if finish is not None:
        logits, finished = finish_logits(logits, finish, with_grad)
        value, grad = compute_chunk_loss(
            # A copy, as it is overwritten, and the backward of `finish` may read its own result.
            finished.detach().clone(),
            labels,
            with_grad=with_grad,
            softcap=softcap,
            loss=loss,
            group=group,
        )
        return value, None if grad is None else torch.autograd.grad(finished, logits, grad)[0]
    logits, tangents = cap_logits(logits, softcap, with_grad)
    if loss is None:
        value, grad = _compute_cross_entropy(
            logits, labels=labels, with_grad=with_grad, group=group
        )
    else:
        value, grad = _compute_custom_loss(loss, logits=logits, labels=labels, with_grad=with_grad)
    if grad is not None and tangents is not None:
        # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
        grad = grad.mul_(tangents.square_().neg_().add_(1))
    return value, grad


def cap_logits(
    logits: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return soft-capped logits; the logits given are overwritten.

    The second tensor is tanh(logits / softcap), for the gradient; None without `with_grad`, and
    where softcap is None.
    """
    if softcap is None:
        return logits, None
    tangents = logits.div_(softcap).tanh_()
    return tangents * softcap, tangents if with_grad else None


def _compute_cross_entropy(
    logits: Tensor, labels: Tensor, with_grad: bool, group: Group | None
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy `[]`, and its gradient in the storage of the logits.

    The gradient of a row is softmax minus one-hot, 0 where the label is ignored.
    """
    ignored = labels == IGNORED
    columns, elsewhere = find_label_columns(
        labels, ignored=ignored, width=logits.shape[1], group=group
    )
    logits.sub_(compute_row_max(logits, group))
    label_logits = logits.gather(1, columns).squeeze(1)
    logits.exp_()
    sums = logits.sum(dim=1)
    if elsewhere is not None and group is not None:
        # One collective for both: a rank has its part of each sum, and 0 for other ranks' labels.
        sums, label_logits = all_reduce(
            torch.stack([sums, label_logits.masked_fill_(elsewhere, 0)]), "sum", group
        )
    value = (sums.log() - label_logits).masked_fill(ignored, 0).sum()
    if not with_grad:
        return value, None
    logits.div_(sums.unsqueeze(1))
    ones = logits.new_full((), -1).expand_as(columns)  # with their sign: one-hot is subtracted
    logits.scatter_add_(
        1, columns, ones if elsewhere is None else ones.masked_fill(elsewhere.unsqueeze(1), 0)
    )
    return value, logits.masked_fill_(ignored.unsqueeze(1), 0)


def _compute_custom_loss(
    loss: Loss, logits: Tensor, labels: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a custom loss `[]` and its gradient, by autograd over this chunk alone."""
    if not with_grad:
        return loss(logits, labels), None
    with torch.enable_grad():
        logits.requires_grad_()
        value = loss(logits, labels)
    if not value.requires_grad:  # a loss that ignores its logits here, e.g. because no label counts
        return value, torch.zeros_like(logits)
    (grad,) = torch.autograd.grad(value, logits)
    return value.detach(), grad
