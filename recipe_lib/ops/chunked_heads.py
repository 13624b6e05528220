"""An output head that is computed a chunk of tokens at a time, and the cross-entropy made with it.

With n tokens and a vocabulary of v, full logits in fp32 are 4nv bytes, and a plain cross-entropy
keeps about three such tensors alive: 6.3 GB at n = 4096, v = 128256. Here the tokens go through the
output projection one chunk at a time. `walk_chunks` is the loop of every loss; what a loss makes of
a chunk's logits is a function of its own. `sum_in_chunks` is for losses that are sums: it makes
each chunk's gradient at once, while its logits are there.

With a tensor-parallel group of t ranks each has n of N = n t tokens and v / t rows of the weight. A
chunk's tokens are gathered and meet the rank's part of the vocabulary; no rank ever has logits of
the whole vocabulary.
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

Finish = Callable[[Tensor], Tensor]
PerChunk = Callable[[slice, Tensor], Tensor | None]


@dataclass(frozen=True)
class OutputAdapter:
    """The adapter next to a head's weight."""

    # `fn(hidden, *trained) -> logits`, row by row alike. Its last operation is one whose backward
    # does not read its result, which is overwritten. What it computes with besides its arguments
    # gets no gradient from a sum.
    project: Callable[..., Tensor]
    # tensors of the adapter that get gradients
    trained: tuple[Tensor | None, ...]
    # the weight's part of the projection, for a backward that projects again when the weight may no
    # longer be there
    frozen: Callable[[Tensor], Tensor]


class ChunkedHead:
    """A head that is a weight `[v, d]`, with or without a bias."""

    def __init__(
        self, tensors: Sequence[Tensor | None], trained: Sequence[bool], *, group: Group | None
    ) -> None:
        """tensors: hidden states, weight, bias. trained: which of them get a gradient."""
        hidden, weight, self.bias = tensors
        assert hidden is not None and weight is not None
        self.hidden = hidden.flatten(0, -2)
        self.weight = weight
        self.group = group
        self.trains = any(trained)
        self.gradients: list[Tensor | None] = [
            torch.empty_like(self.hidden) if trained[0] else None,  # each chunk writes its rows
            *(
                torch.zeros_like(tensor) if tensor is not None and trains else None
                for tensor, trains in zip((weight, self.bias), trained[1:], strict=True)
            ),
        ]
        # What a chunk's work follows from.
        self.parts = (self.hidden, weight, self.bias, *self.gradients, group)
        self.ranks = 1 if group is None else group.size  # those that share the vocabulary
        self.logits_dtype = self.hidden.dtype  # of the logits that were made last
        # One kernel reads a chunk's logits as they are: not where ranks agree on each row's sum in
        # between.
        self.fuses_loss = group is None and should_fuse_loss(self.hidden)
        self._tokens: Tensor | None = None

    def compute_logits(self, part: slice) -> Tensor:
        """Return the logits of a chunk, with a group of all its ranks' tokens.

        They are in storage of their own, so that a loss may overwrite them.
        """
        tokens = gather_tokens(self.hidden[part], self.group)
        self._tokens = tokens if self.trains else None
        return F.linear(tokens, self.weight, self.bias)

    def accumulate(self, part: slice, logits_grad: Tensor) -> None:
        """Add up what follows from the gradient of the logits that were made last."""
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
    """A head with an adapter.

    Its gradients come from the logits' by autograd, over a chunk alone.
    """

    group = None
    ranks = 1

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        trained: Sequence[bool],
        *,
        project: Callable[..., Tensor],
    ) -> None:
        """tensors: hidden states, then those of the adapter. project: see `OutputAdapter`."""
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
        self.parts = (project,)  # whose work is its own: no other head's follows from the same
        self.fuses_loss = should_fuse_loss(self.hidden)
        self._last_chunk: Any = None  # tokens and logits of the chunk that was made last

    @property
    def logits_dtype(self) -> torch.dtype:
        return cast(torch.dtype, self._last_chunk[1].dtype)

    def compute_logits(self, part: slice) -> Tensor:
        """Return the logits of a chunk, which a loss may overwrite."""
        tokens = self.hidden[part].detach().requires_grad_(self._trains_hidden)
        with torch.set_grad_enabled(self.trains):
            logits = self.project(tokens, *self._leaves)
        self._last_chunk = (tokens, logits) if self.trains else None
        return logits.detach()

    def accumulate(self, part: slice, logits_grad: Tensor) -> None:
        """Add up what follows from the gradient of the logits that were made last."""
        tokens, logits = self._last_chunk
        self._last_chunk = None
        totals = [(index, total) for index, total in enumerate(self.gradients) if total is not None]
        leaves: list[Any] = [tokens, *self._leaves]
        gradients = torch.autograd.grad(logits, [leaves[index] for index, _ in totals], logits_grad)
        for (index, total), gradient in zip(totals, gradients, strict=True):
            (total[part] if index == 0 else total).add_(gradient)


Head = ChunkedHead | ChunkedAdaptedHead


def walk_chunks(head: Head, labels: Tensor, chunks: int, per_chunk: PerChunk) -> None:
    """Call `per_chunk(part, labels)` for each of `chunks` pieces of the head's tokens.

    The pieces are even to within one token. part: of this rank's tokens. labels: the chunk's `[m]`,
    with a group those of all its ranks. per_chunk asks the head for the chunk's logits and returns
    their gradient, which the head takes, or None.
    """
    rank_labels = labels.reshape(head.ranks, -1)
    for part in split_rows(head.hidden.shape[0], chunks):
        gradient = per_chunk(part, rank_labels[:, part].flatten())
        if gradient is not None:
            gradient = gradient.to(head.logits_dtype)  # the wide one is gone
            head.accumulate(part, gradient)
            del gradient


def sum_in_chunks(
    sum_loss: Callable[[Head], Tensor],
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group: Group | None = None,
    adapter: OutputAdapter | None = None,
) -> Tensor:
    """Return `sum_loss(head)`, whose gradients the head has when it has been computed.

    What is kept for the backward pass is one gradient of the hidden states `[n, d]` and one of the
    weight `[v, d]`, which it returns anyway. Differentiable once.

    hidden: `[..., d]`. weight: `[v, d]`. With a group hidden is this rank's `[n, d]` of N tokens,
    weight its `[v / t, d]`, bias its `[v / t]`. adapter: in place of weight and bias.
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
    """A node that makes all gradients, chunk by chunk, in forward; backward scales them."""

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
    """Yield the rows in `chunks` pieces, even to within one of them."""
    pieces = max(1, min(chunks, rows))
    for piece in range(pieces):
        yield slice(rows * piece // pieces, rows * (piece + 1) // pieces)


def gather_tokens(tokens: Tensor, group: Group | None) -> Tensor:
    """Return the tokens `[m, d]` of all ranks of a group, given this rank's."""
    return tokens if group is None else wait(start_gather(tokens, group))


def finish_logits(logits: Tensor, finish: Finish, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the logits `[m, v]` as a leaf, and what `finish` makes of them.

    with_grad: there is a graph between the two.
    """
    with torch.set_grad_enabled(with_grad):
        logits = logits.detach().requires_grad_(with_grad)
        return logits, finish(logits)


def find_label_columns(
    labels: Tensor, ignored: Tensor, width: int, group: Group | None
) -> tuple[Tensor, Tensor | None]:
    """Return the columns of the labels among a rank's `width` logits, `[m, 1]`.

    A column that is not there, or whose label is ignored, is 0. The second tensor, bool `[m]`, says
    where the label is another rank's; None without a group.
    """
    if group is None:
        return labels.masked_fill(ignored, 0).unsqueeze(1), None
    columns = labels - group.rank * (group.columns or width)
    elsewhere = (columns < 0) | (columns >= width)
    return columns.masked_fill_(elsewhere, 0).unsqueeze(1), elsewhere


def compute_row_max(logits: Tensor, group: Group | None) -> Tensor:
    """Return the largest logit of each row, over all ranks' parts of the vocabulary, `[m, 1]`."""
    largest = logits.amax(dim=1, keepdim=True)
    return largest if group is None else all_reduce(largest, "max", group)


# The log-probability of each label, and its gradient, fused, without logits in fp32.
#
# Where operators run one by one, losses turn a chunk's logits to fp32 and work in place. Fused,
# they read the logits as they are, `[m, v]` in bf16, and write the gradients in that type, so that
# a chunk takes 4 bytes a logit in place of 6. Of logits in fp32 it would take 8 in place of 4:
# those are not fused.


IGNORED = -100
_WIDEST_FUSED = 2  # bytes of a logit


def should_fuse_loss(hidden: Tensor) -> bool:
    """Return True if the loss of these hidden states is fused."""
    return hidden.dtype.itemsize <= _WIDEST_FUSED and should_fuse(hidden.device)


def fused_cross_entropy(
    logits: Tensor, labels: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of logits `[m, v]` and labels `[m]`, and the logits' gradient.

    The loss is in fp32 (fp64 for fp64).
    """
    cap = make_softcap_tensor(logits, softcap)
    log_probs, log_sums = label_log_probs(logits, labels, cap)
    if not with_grad:
        return -log_probs.sum(), None
    slopes = log_probs.new_full((), -1).expand_as(log_probs)
    return -log_probs.sum(), label_log_prob_gradients(logits, labels, log_sums, slopes, cap)


def make_softcap_tensor(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Return a softcap as the two fused functions take it."""
    if softcap is None:
        return None
    # A tensor, as code would be compiled anew for each number.
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
    """Return log-probabilities of the labels, and logs of the sums of exponentials, fp32 `[m]`.

    The log-probability is 0 for label -100.
    """
    log_sums = _apply_softcap(logits, cap).logsumexp(dim=1)
    ignored = labels == IGNORED
    # Of the logits as they are: a compiler makes in memory what is looked up.
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
    """Return the logits' gradient `[m, v]` in their type.

    log_sums: of `label_log_probs`. slopes: gradients of the log-probabilities `[m]`.
    """
    wide = _apply_softcap(logits, cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    # d log p(label) / d logits is one-hot minus softmax; no column is label -100.
    grad = (columns == labels.unsqueeze(1)).to(wide.dtype) - (wide - log_sums.unsqueeze(1)).exp()
    if cap is not None:
        grad = grad * (1 - (wide / cap).square())  # d cap*tanh(x/cap) / dx = 1 - tanh^2
    # Last: what is not finite in a row that does not count has to go, too.
    return (
        (grad * slopes.unsqueeze(1))
        .masked_fill((labels == IGNORED).unsqueeze(1), 0)
        .to(logits.dtype)
    )


def _apply_softcap(logits: Tensor, cap: Tensor | None) -> Tensor:
    wide = logits.to(widen_dtype(logits.dtype))
    return wide if cap is None else cap * torch.tanh(wide / cap)


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what logits are turned to: fp32, of fp64 fp64."""
    return torch.promote_types(dtype, torch.float32)


# The sum of the token losses over a vocabulary, computed in chunks of tokens.
#
# Where ranks share the vocabulary, the largest logit, the sum of exponentials and the label's logit
# are agreed on over the group.


Loss = Callable[[Tensor, Tensor], Tensor]


@register("loss", "cross_entropy")
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the token losses of logits `[m, v]` (fp32 or fp64) and labels `[m]`.

    Label -100 counts nothing.
    """
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy:
    """The sum of token losses, without a tensor of size `[n, v]` in forward or backward.

    Its gradients are made in forward, so that FSDP need not gather the weight for backward.
    """

    # pieces that the n tokens are cut into, even to within one of them
    chunks: int = 1
    # in place of cross-entropy, `fn(logits [m, v], labels [m]) -> sum`, a function of its arguments
    # alone
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
        """Return the sum as a scalar in fp32 (fp64 for fp64), differentiable once.

        hidden: `[..., d]`. weight: `[v, d]`. labels: int64 `[...]`; -100 is ignored. softcap:
        logits become `softcap * tanh(logits / softcap)` (Gemma 2). group: hidden is this rank's
        `[n, d]` of the N tokens of a tensor-parallel group, weight its `[v / t, d]`, labels are all
        N; the sum is that of all N tokens, on each rank. Not with a loss of one's own. bias: `[v]`
        (`[v / t]` of a group), added to the logits. finish: `fn(logits [m, v]) -> logits [m, v]`,
        what else is done to each logit by itself, a function of its argument alone; it costs two
        more tensors of a chunk's logits. adapter: in place of weight and bias.

        Logits are made in the dtype of `hidden` and turned to fp32 before anything else. When every
        label is ignored the result is 0 and still has a graph with zero gradients, so that under
        FSDP each rank runs the same collectives.
        """
        loss = None if self.loss is cross_entropy else self.loss
        if loss is not None and group is not None:
            raise ValueError(
                "a custom loss needs the logits of the whole vocabulary, which no rank of a"
                " group has"
            )

        def sum_loss(head: Head) -> Tensor:
            # By position, as a plan repeats functions that are registered as shaped work.
            settings = (labels, self.chunks, softcap, loss, finish)
            return _sum_over_chunks(head, *settings)

        return sum_in_chunks(sum_loss, hidden, weight, bias=bias, group=group, adapter=adapter)


@register_shaped_work(lambda head, *numbers: (*head.parts, *numbers))
def _sum_over_chunks(
    head: Head,
    labels: Tensor,
    chunks: int,
    softcap: float | None,
    loss: Loss | None,
    finish: Finish | None,
) -> Tensor:
    """Return the loss `[]`; the head has the gradients."""
    wide = widen_dtype(head.hidden.dtype)
    total = torch.zeros((), dtype=wide, device=head.hidden.device)
    one_kernel = loss is None and finish is None and head.fuses_loss

    def add_chunk(part: slice, targets: Tensor) -> Tensor | None:
        logits = head.compute_logits(part)
        if one_kernel:
            value, gradient = fused_cross_entropy(
                logits, labels=targets, softcap=softcap, with_grad=head.trains
            )
        else:
            # Under the same name, so that the narrow logits are freed.
            logits = logits.to(wide)
            value, gradient = compute_chunk_loss(
                logits,
                targets,
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

    It overwrites the logits.
    """
    if finish is not None:
        logits, finished = finish_logits(logits, finish, with_grad)
        value, grad = compute_chunk_loss(
            # A copy: it is overwritten, and the graph of `finish` may need its own result.
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
    """Return capped logits, of logits that are overwritten.

    The second tensor is their tanh, which a gradient needs; None where none is wanted.
    """
    if softcap is None:
        return logits, None
    tangents = logits.div_(softcap).tanh_()
    return tangents * softcap, tangents if with_grad else None


def _compute_cross_entropy(
    logits: Tensor, labels: Tensor, with_grad: bool, group: Group | None
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy, and softmax minus one-hot in the storage of the logits."""
    ignored = labels == IGNORED
    columns, elsewhere = find_label_columns(
        labels, ignored=ignored, width=logits.shape[1], group=group
    )
    logits.sub_(compute_row_max(logits, group))
    label_logits = logits.gather(1, columns).squeeze(1)
    logits.exp_()
    sums = logits.sum(dim=1)
    if elsewhere is not None and group is not None:
        # One collective for both: each rank has a part of the sum, and 0 for others' labels.
        sums, label_logits = all_reduce(
            torch.stack([sums, label_logits.masked_fill_(elsewhere, 0)]), "sum", group
        )
    value = (sums.log() - label_logits).masked_fill(ignored, 0).sum()
    if not with_grad:
        return value, None
    logits.div_(sums.unsqueeze(1))
    ones = logits.new_full((), -1).expand_as(columns)
    logits.scatter_add_(
        1, columns, ones if elsewhere is None else ones.masked_fill(elsewhere.unsqueeze(1), 0)
    )
    return value, logits.masked_fill_(ignored.unsqueeze(1), 0)


def _compute_custom_loss(
    loss: Loss, logits: Tensor, labels: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a registered loss and its gradient, by autograd over this chunk alone."""
    if not with_grad:
        return loss(logits, labels), None
    with torch.enable_grad():
        logits.requires_grad_()
        value = loss(logits, labels)
    if not value.requires_grad:  # a loss that ignores its logits here, e.g. because no label counts
        return value, torch.zeros_like(logits)
    (grad,) = torch.autograd.grad(value, logits)
    return value.detach(), grad
