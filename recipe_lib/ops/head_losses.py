"""What an output head makes of hidden states and labels: one callable, `head_loss(hidden, weight,
labels)`.

The head owns the output projection, and hands it on: `CrossEntropy`, `TokenLogProbs`, `TokenScores`
and `Distillation` go through the tokens in chunks, so that logits of all of them never exist; a
function of one's own (a contrastive loss) takes hidden states `[b, s, d]`, the weight `[v, d]` and
labels `[b, s]`, and returns what the model is to return.

A head that is more than a weight says so by keywords, and only then: `softcap`, `bias` and `finish`
(what is done to logits), `group` (ranks that share vocabulary and tokens), `adapter`. A function
that does not take one of them is refused for such a head, rather than computing with a part of it.
`CrossEntropy(loss=fn)` makes of a loss of logits, `fn(logits [m, v], labels [m]) -> sum`, one that
runs for every head but a group's.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

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


class HeadLoss(Protocol):
    """hidden `[b, s, d]`, weight `[v, d]`, labels `[b, s]` (-100: none) to what the model
    returns.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, /) -> Tensor:
        """A sum of token losses, log-probabilities, or anything else with a gradient."""


def makes_gradients_in_forward(head_loss: HeadLoss | None) -> bool:
    """Whether backward no longer reads the head's weight (None: the default); not known of a user's
    function.
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
    """Calls head_loss (None: cross-entropy in one piece) with what the head has besides its weight.

    Raises SetupError for a function that does not take that.
    """
    head_loss = head_loss or CrossEntropy()
    found = {"softcap": softcap, "group": group, "bias": bias, "finish": finish, "adapter": adapter}
    needs: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if needs:
        _check_takes(head_loss, needs)
    return head_loss(hidden, weight, labels, **needs)


def _check_takes(head_loss: HeadLoss, needs: dict[str, Any]) -> None:
    taken = inspect.signature(head_loss).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    missing = [name for name in needs if name not in {parameter.name for parameter in taken}]
    if missing:
        name = getattr(head_loss, "__name__", type(head_loss).__name__)
        raise SetupError(
            f"head_loss: found {name}(hidden, weight, labels) for an output head that also has"
            f" {', '.join(missing)}, expected it to take"
            f" {'that keyword' if len(missing) == 1 else 'those keywords'} too; a loss of logits,"
            " fn(logits, labels), runs as CrossEntropy(loss=fn)"
        )


# The log-probability of every label, computed in chunks of tokens (`recipe_lib.ops.chunked_heads`).
#
# A loss over whole answers, as in preference optimization, needs the log-probability of each token
# before it knows their gradients, so that these cannot be made in the forward pass as those of a
# sum are. Here the backward pass makes the logits of a chunk a second time: one matmul more, and
# what is kept in between is the hidden states, one number for each row, and nothing of size `[n,
# v]`. `TokenScores` needs no gradients.


@dataclass(frozen=True)
class TokenLogProbs:
    """The log-probability of each label, 0 where that is -100, in `chunks` pieces of the tokens."""

    chunks: int = 1

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
        """Return the shape of labels, fp32 (fp64 for fp64). The arguments are those of
        `CrossEntropy`.

        With a group labels and result are those of all N tokens. A frozen weight gets no gradient
        and costs no memory for one; differentiable once. What an adapter computes with gets its
        gradient, whatever it is; it projects again in backward, with the same random numbers.
        """
        if adapter is not None:
            return _compute_checkpointed_log_probs(adapter, hidden, labels, self.chunks, softcap)
        found: Tensor = _TokenLogProbs.apply(
            labels, self.chunks, softcap, group, finish, hidden, weight, bias
        )
        return found


@dataclass(frozen=True)
class TokenScores:
    """How likely a model finds each label, and how likely its likeliest token, in `chunks` pieces
    of the tokens.

    Where the two are equal, greedy decoding gives the label.
    """

    chunks: int = 1

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
        """Return log-probabilities of the labels and of the likeliest tokens `[..., 2]`; both 0
        where a label is -100.

        fp32 (fp64 for fp64), without gradients. The arguments are those of `CrossEntropy`.
        """

        def score(head: Head) -> Tensor:
            wide = widen_dtype(hidden.dtype)
            scores = torch.empty(
                (head.ranks, labels.numel() // head.ranks, 2), dtype=wide, device=hidden.device
            )

            def score_chunk(part: slice, targets: Tensor) -> None:
                logits = finish_and_cap(head.logits(part).to(wide), softcap, finish)
                chosen, largest, log_sums = gather_label_logits(logits, targets, group)
                found = torch.stack([chosen, largest], dim=1).sub_(log_sums.unsqueeze(1))
                found.masked_fill_((targets == IGNORED).unsqueeze(1), 0)
                scores[:, part] = found.unflatten(0, (head.ranks, -1))

            walk_chunks(head, labels, self.chunks, score_chunk)
            return scores.view(*labels.shape, 2)

        return sum_in_chunks(score, hidden, weight, bias=bias, group=group, adapter=adapter)


def _compute_checkpointed_log_probs(
    adapter: OutputAdapter, hidden: Tensor, labels: Tensor, chunks: int, softcap: float | None
) -> Tensor:
    """Those of a projection with parts of its own, whose gradients autograd makes."""
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    sizes = [part.stop - part.start for part in split_rows(rows.shape[0], chunks)]
    parts = [
        checkpoint(_compute_adapted_log_probs, adapter, piece, target, softcap, use_reentrant=False)
        for piece, target in zip(rows.split(sizes), targets.split(sizes), strict=True)
    ]
    return torch.cat(parts).reshape(labels.shape).clone()  # a module of FSDP should return no view


def _compute_adapted_log_probs(
    adapter: OutputAdapter, rows: Tensor, labels: Tensor, softcap: float | None
) -> Tensor:
    """Of one chunk: rows `[m, d]`, labels `[m]`, to `[m]`."""
    logits = adapter.project(rows, *adapter.trained, frozen=adapter.frozen).to(
        widen_dtype(rows.dtype)
    )
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class _TokenLogProbs(torch.autograd.Function):
    """Keeps hidden states and the log of each row's sum of exponentials; makes the logits in both
    passes.
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
        picked = torch.empty(labels.shape, dtype=widen_dtype(hidden.dtype), device=hidden.device)
        log_sums = picked.new_empty(head.ranks, labels.numel() // head.ranks)

        def pick_chunk(part: slice, targets: Tensor) -> None:
            logits = head.logits(part)
            if finish is None and head.fuses_loss:
                chosen, sums = label_log_probs(
                    logits, targets, make_softcap_tensor(logits, softcap)
                )
            else:
                logits = logits.to(picked.dtype)
                logits = finish_and_cap(logits, softcap, finish)
                chosen, _, sums = gather_label_logits(logits, targets, group)
                chosen = chosen.sub_(sums).masked_fill_(targets == IGNORED, 0)
            picked.view(log_sums.shape)[:, part] = chosen.view(head.ranks, -1)
            log_sums[:, part] = sums.view(head.ranks, -1)

        walk_chunks(head, labels, chunks, pick_chunk)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.chunks, ctx.softcap, ctx.group, ctx.finish = chunks, softcap, group, finish
        return picked

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        head = ChunkedHead((hidden, weight, bias), ctx.needs_input_grad[5:], group=ctx.group)
        slopes = gradients[0].reshape(log_sums.shape)

        def differentiate_chunk(part: slice, targets: Tensor) -> Tensor:
            logits = head.logits(part)
            of_rows = log_sums[:, part].flatten(), slopes[:, part].flatten()
            if ctx.finish is None and head.fuses_loss:
                return label_log_prob_gradients(
                    logits, targets, *of_rows, make_softcap_tensor(logits, ctx.softcap)
                )
            logits = logits.to(log_sums.dtype)
            return _compute_logit_gradients(
                logits, targets, *of_rows, softcap=ctx.softcap, group=ctx.group, finish=ctx.finish
            )

        walk_chunks(head, labels, ctx.chunks, differentiate_chunk)
        hidden_grad, *others = head.gradients
        return *[None] * 5, None if hidden_grad is None else hidden_grad.view_as(hidden), *others


def finish_and_cap(logits: Tensor, softcap: float | None, finish: Finish | None) -> Tensor:
    """Return logits, which it overwrites, finished and capped, in storage that may be overwritten
    too.
    """
    if finish is not None:
        logits = finish(logits).clone()  # it might be a view of something else
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def gather_label_logits(
    logits: Tensor, labels: Tensor, group: Group | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the labels' logits, the largest ones, the logs of the sums of exponentials), each `[m]`;
    overwrites logits.
    """
    columns, elsewhere = find_label_columns(labels, labels == IGNORED, logits.shape[1], group)
    chosen = logits.gather(1, columns).squeeze(1)
    largest = compute_row_max(logits, group)
    sums = logits.sub_(largest).exp_().sum(dim=1)
    if elsewhere is not None and group is not None:
        sums, chosen = all_reduce(
            torch.stack([sums, chosen.masked_fill_(elsewhere, 0)]), "sum", group
        )
    largest = largest.squeeze(1)
    return chosen, largest, sums.log_().add_(largest)


def _compute_logit_gradients(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    slopes: Tensor,
    *,
    softcap: float | None,
    group: Group | None,
    finish: Finish | None,
) -> Tensor:
    """The gradients of logits `[m, v]`, which it overwrites; labels, log_sums and slopes: `[m]`."""
    leaf = logits
    if finish is not None:
        leaf, finished = finish_logits(logits, finish, True)
        logits = finished.detach().clone()
    logits, squash = cap_logits(logits, softcap, True)
    # d log p(label) / d logits is one-hot minus softmax.
    grad = logits.sub_(log_sums.unsqueeze(1)).exp_().neg_()
    columns, elsewhere = find_label_columns(labels, labels == IGNORED, grad.shape[1], group)
    one = grad.new_ones(()).expand_as(columns)
    grad.scatter_add_(
        1, columns, one if elsewhere is None else one.masked_fill(elsewhere.unsqueeze(1), 0)
    )
    grad.mul_(slopes.unsqueeze(1))
    if squash is not None:
        grad.mul_(squash.square_().neg_().add_(1))  # d softcap*tanh(x/softcap) / dx = 1 - tanh^2
    grad.masked_fill_((labels == IGNORED).unsqueeze(1), 0)  # what is not finite in such a row, too
    return grad if finish is None else torch.autograd.grad(finished, leaf, grad)[0]
