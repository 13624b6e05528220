"""Run head losses: functions of hidden states, the output head's weight and labels.

A recipe passes one to the model, `model(tokens, labels=labels, head_loss=head_loss)`; the head
calls it by `run_head_loss`, and the model returns its result. `CrossEntropy`, `TokenLogProbs`,
`TokenScores` and `Distillation` compute for one chunk of the tokens at a time, so that logits of
all tokens never exist.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_lib.errors import SetupError
from recipe_lib.ops.chunked_heads import (
    IGNORED,
    ChunkedHead,
    CrossEntropy,
    Finish,
    Head,
    OutputAdapter,
    cap_logits,
    compute_row_max,
    find_label_columns,
    finish_logits,
    label_log_prob_gradients,
    label_log_probs,
    make_softcap_tensor,
    split_rows,
    sum_in_chunks,
    walk_chunks,
    widen_dtype,
)
from recipe_lib.ops.distillation import Distillation
from recipe_lib.ops.gathered import Group, all_reduce

__all__ = [
    "CrossEntropy",
    "HeadLoss",
    "OutputAdapter",
    "TokenLogProbs",
    "TokenScores",
    "makes_gradients_in_forward",
    "run_head_loss",
]


# Shapes: n tokens, m of them in a chunk, d channels, v entries of the vocabulary. On a group of t
# tensor-parallel ranks each has n of N = n t tokens and v / t rows of the weight; a chunk then has
# m tokens of all ranks.


class HeadLoss(Protocol):
    """A function of hidden `[b, s, d]`, weight `[v, d]` and labels `[b, s]` (-100: none).

    A head that has more than a weight passes it by keyword: `softcap`, `bias` and `finish` (a
    function that it applies to logits), `group` (the ranks that divide vocabulary and tokens),
    `adapter`. A function without such a parameter is refused for that head. `CrossEntropy(loss=fn)`
    turns a loss of logits, `fn(logits [m, v], labels [m]) -> sum`, into a head loss for every head
    but those of a group.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, /) -> Tensor:
        """Return the model's result: a sum of token losses `[]`, or a number for each token."""


def makes_gradients_in_forward(head_loss: HeadLoss | None) -> bool:
    """Return True if backward does not read the head's weight, so that FSDP need not gather it.

    head_loss: None: cross-entropy. A user's function is taken to read it.
    """
    return head_loss is None or isinstance(head_loss, CrossEntropy | Distillation)


def run_head_loss(
    head_loss: HeadLoss | None,
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
    """Call head_loss with the head's weight, and by keyword with what else the head has.

    head_loss: None: cross-entropy, all tokens in one chunk. Other arguments: see
    `CrossEntropy.__call__`; None: the head has no such thing. Raises SetupError for a function that
    does not take one of the keywords that the head has.
    """
    head_loss = head_loss or CrossEntropy()
    options: dict[str, Any] = {
        "softcap": softcap,
        "group": group,
        "bias": bias,
        "finish": finish,
        "adapter": adapter,
    }
    # Only those that the head has: a function of three arguments serves a head that is a weight.
    needed = {name: value for name, value in options.items() if value is not None}
    if needed:
        _check_parameters(head_loss, needed)
    return head_loss(hidden, weight, labels, **needed)


def _check_parameters(head_loss: HeadLoss, needed: dict[str, Any]) -> None:
    """Raise SetupError if head_loss lacks a parameter of a name in `needed`."""
    parameters = inspect.signature(head_loss).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    missing = [name for name in needed if name not in parameters]
    if missing:
        name = getattr(head_loss, "__name__", type(head_loss).__name__)
        raise SetupError(
            f"head_loss: found {name}(hidden, weight, labels) for an output head that also has"
            f" {', '.join(missing)}, expected it to take"
            f" {'that keyword' if len(missing) == 1 else 'those keywords'} too; a loss of logits,"
            " fn(logits, labels), runs as CrossEntropy(loss=fn)"
        )


# The log-probability of every label, computed in chunks of tokens.
#
# A loss over whole answers, as in preference optimization, needs the log-probability of each token
# before it knows their gradients. So these cannot be computed in forward, as the gradients of a sum
# are: backward computes the logits of a chunk a second time, which costs one matmul. Saved in
# between are the hidden states and one number for each token, and nothing of size `[n, v]`.


@dataclass(frozen=True)
class TokenLogProbs:
    """A head loss: the log-probability of each label, 0 where the label is -100."""

    chunks: int = 1  # number of pieces that the tokens are cut into

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
        """Return log-probabilities of the shape of labels, fp32 (fp64 for fp64).

        The arguments are those of `CrossEntropy`. With a group labels and result are those of all N
        tokens. A frozen weight gets no gradient and costs no memory for one. Differentiable once.

        adapter: in place of weight and bias; group, bias and finish are then not read, as a head
        with an adapter has none of them. All tensors that it reads get their gradients; its
        projection is computed again in backward, with the same random numbers (dropout).
        """
        if adapter is not None:
            return _compute_checkpointed_log_probs(
                adapter, hidden, labels, chunks=self.chunks, softcap=softcap
            )
        settings = (labels, self.chunks, softcap, group, finish)
        return cast(Tensor, _TokenLogProbs.apply(*settings, hidden, weight, bias))


@dataclass(frozen=True)
class TokenScores:
    """A head loss, without gradients: the log-probability of each label and of the likeliest token.

    Where the two are equal, greedy decoding gives the label.
    """

    chunks: int = 1  # number of pieces that the tokens are cut into

    @torch.no_grad()
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
        """Return log-probabilities of the labels and of the likeliest tokens, `[..., 2]`.

        Both are 0 where a label is -100; fp32 (fp64 for fp64), without gradients. The arguments are
        those of `CrossEntropy`.
        """

        def score(head: Head) -> Tensor:
            wide_dtype = widen_dtype(hidden.dtype)
            # By rank, as a chunk has a slice of each rank's tokens.
            scores = torch.empty(
                (head.ranks, labels.numel() // head.ranks, 2),
                dtype=wide_dtype,
                device=hidden.device,
            )

            def score_chunk(part: slice, chunk_labels: Tensor) -> None:
                logits = finish_and_cap(head.compute_logits(part).to(wide_dtype), softcap, finish)
                label_logits, max_logits, log_sums = gather_label_logits(
                    logits, chunk_labels, group
                )
                log_probs = torch.stack([label_logits, max_logits], dim=1).sub_(
                    log_sums.unsqueeze(1)
                )
                log_probs.masked_fill_((chunk_labels == IGNORED).unsqueeze(1), 0)
                scores[:, part] = log_probs.unflatten(0, (head.ranks, -1))

            walk_chunks(head, labels=labels, chunks=self.chunks, per_chunk=score_chunk)
            return scores.view(*labels.shape, 2)

        return sum_in_chunks(score, hidden, weight, bias=bias, group=group, adapter=adapter)


def _compute_checkpointed_log_probs(
    adapter: OutputAdapter, hidden: Tensor, labels: Tensor, *, chunks: int, softcap: float | None
) -> Tensor:
    rows = hidden.flatten(0, -2)
    flat_labels = labels.flatten()
    sizes = [part.stop - part.start for part in split_rows(rows.shape[0], chunks)]
    # Checkpointed, as autograd would keep the logits of every chunk.
    log_probs = [
        checkpoint(
            _compute_adapted_log_probs,
            adapter,
            chunk_rows,
            chunk_labels,
            softcap,
            use_reentrant=False,
        )
        for chunk_rows, chunk_labels in zip(
            rows.split(sizes), flat_labels.split(sizes), strict=True
        )
    ]
    # A copy, because the head's module returns it: a module wrapped by FSDP should return no view.
    return torch.cat(log_probs).reshape(labels.shape).clone()


def _compute_adapted_log_probs(
    adapter: OutputAdapter, rows: Tensor, labels: Tensor, softcap: float | None
) -> Tensor:
    """Return the log-probabilities `[m]` of one chunk's rows `[m, d]` and labels `[m]`."""
    logits = adapter.project(rows, *adapter.trained, frozen=adapter.frozen).to(
        widen_dtype(rows.dtype)
    )
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class _TokenLogProbs(torch.autograd.Function):
    """The autograd node of `TokenLogProbs`, which computes logits in forward and in backward.

    It saves the hidden states and the log-sum-exp of each token's logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        labels: Tensor,
        chunks: int,
        softcap: float | None,
        group: Group | None,
        finish: Finish | None,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        head = ChunkedHead((hidden, weight, bias), (False, False, False), group=group)
        log_probs = torch.empty(labels.shape, dtype=widen_dtype(hidden.dtype), device=hidden.device)
        log_sums = log_probs.new_empty(head.ranks, labels.numel() // head.ranks)

        def compute_chunk(part: slice, chunk_labels: Tensor) -> None:
            logits = head.compute_logits(part)
            if finish is None and head.fuses_loss:
                cap = make_softcap_tensor(logits, softcap)
                chunk_log_probs, chunk_log_sums = label_log_probs(logits, chunk_labels, cap)
            else:
                # Under the same name, so that the narrow logits are freed.
                logits = logits.to(log_probs.dtype)
                logits = finish_and_cap(logits, softcap, finish)
                label_logits, _, chunk_log_sums = gather_label_logits(logits, chunk_labels, group)
                chunk_log_probs = label_logits.sub_(chunk_log_sums).masked_fill_(
                    chunk_labels == IGNORED, 0
                )
            # By rank, as a chunk has a slice of each rank's tokens.
            log_probs.view(log_sums.shape)[:, part] = chunk_log_probs.view(head.ranks, -1)
            log_sums[:, part] = chunk_log_sums.view(head.ranks, -1)

        walk_chunks(head, labels=labels, chunks=chunks, per_chunk=compute_chunk)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.settings = (chunks, softcap, group, finish)
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, log_prob_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        chunks, softcap, group, finish = ctx.settings
        head = ChunkedHead((hidden, weight, bias), ctx.needs_input_grad[5:], group=group)
        slopes = log_prob_grads.reshape(log_sums.shape)  # gradients of the log-probabilities

        def differentiate_chunk(part: slice, chunk_labels: Tensor) -> Tensor:
            logits = head.compute_logits(part)
            chunk_log_sums = log_sums[:, part].flatten()
            chunk_slopes = slopes[:, part].flatten()
            if finish is None and head.fuses_loss:
                cap = make_softcap_tensor(logits, softcap)
                return label_log_prob_gradients(
                    logits, chunk_labels, chunk_log_sums, chunk_slopes, cap
                )
            # Under the same name, so that the narrow logits are freed.
            logits = logits.to(log_sums.dtype)
            return _compute_logit_gradients(
                logits,
                chunk_labels,
                log_sums=chunk_log_sums,
                slopes=chunk_slopes,
                softcap=softcap,
                group=group,
                finish=finish,
            )

        walk_chunks(head, labels=labels, chunks=chunks, per_chunk=differentiate_chunk)
        hidden_grad, weight_grad, bias_grad = head.gradients
        if hidden_grad is not None:
            hidden_grad = hidden_grad.view_as(hidden)
        return *[None] * 5, hidden_grad, weight_grad, bias_grad


def finish_and_cap(logits: Tensor, softcap: float | None, finish: Finish | None) -> Tensor:
    """Return logits after `finish` and the soft cap; the logits given are overwritten.

    The caller may overwrite the result.
    """
    if finish is not None:
        logits = finish(logits).clone()  # `finish` might return a view of something else
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def gather_label_logits(
    logits: Tensor, labels: Tensor, group: Group | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token (the label's logit, the largest logit, the log-sum-exp), `[m]` each.

    logits: `[m, v]`, with a group `[m, v / t]`; they are overwritten. With a group the results are
    those over the whole vocabulary. labels: `[m]`; where one is -100, its logit means nothing.
    """
    columns, elsewhere = find_label_columns(
        labels, ignored=labels == IGNORED, width=logits.shape[1], group=group
    )
    label_logits = logits.gather(1, columns).squeeze(1)
    largest = compute_row_max(logits, group)
    sums = logits.sub_(largest).exp_().sum(dim=1)
    if elsewhere is not None and group is not None:
        # One collective for both: a rank has its part of each sum, and 0 for other ranks' labels.
        sums, label_logits = all_reduce(
            torch.stack([sums, label_logits.masked_fill_(elsewhere, 0)]), "sum", group
        )
    largest = largest.squeeze(1)
    return label_logits, largest, sums.log_().add_(largest)


def _compute_logit_gradients(
    logits: Tensor,
    labels: Tensor,
    *,
    log_sums: Tensor,
    slopes: Tensor,
    softcap: float | None,
    group: Group | None,
    finish: Finish | None,
) -> Tensor:
    """Return the gradients of logits `[m, v]`, which are overwritten.

    labels: `[m]`. log_sums: log-sum-exps of the logits after finish and cap, `[m]`. slopes:
    gradients of the log-probabilities, `[m]`. Other arguments: see `CrossEntropy.__call__`.
    """
    leaf = logits
    if finish is not None:
        leaf, finished = finish_logits(logits, finish, True)
        # A copy, as it is overwritten, and the backward of `finish` may read its own result.
        logits = finished.detach().clone()
    logits, tangents = cap_logits(logits, softcap, True)
    # d log p(label) / d logits is one-hot minus softmax.
    grad = logits.sub_(log_sums.unsqueeze(1)).exp_().neg_()
    columns, elsewhere = find_label_columns(
        labels, ignored=labels == IGNORED, width=grad.shape[1], group=group
    )
    ones = grad.new_ones(()).expand_as(columns)
    grad.scatter_add_(
        1, columns, ones if elsewhere is None else ones.masked_fill(elsewhere.unsqueeze(1), 0)
    )
    grad.mul_(slopes.unsqueeze(1))
    if tangents is not None:
        grad.mul_(tangents.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
    grad.masked_fill_((labels == IGNORED).unsqueeze(1), 0)  # also NaN and infinities of such rows
    return grad if finish is None else torch.autograd.grad(finished, leaf, grad)[0]
