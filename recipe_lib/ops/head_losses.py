"""What an output head makes of hidden states and labels: one callable, `head_loss(hidden, weight, labels)`.

The head owns the output projection, and hands it on: `CrossEntropy`, `TokenLogProbs`, `TokenScores` and `Distillation`
go through the tokens in chunks, so that logits of all of them never exist; a function of one's own (a contrastive loss)
takes hidden states `[b, s, d]`, the weight `[v, d]` and labels `[b, s]`, and returns what the model is to return.

A head that is more than a weight says so by keywords, and only then: `softcap`, `bias` and `finish` (what is done to
logits), `group` (ranks that share vocabulary and tokens), `adapter`. A function that does not take one of them is
refused for such a head, rather than computing with a part of it. `CrossEntropy(loss=fn)` makes of a loss of logits,
`fn(logits [m, v], labels [m]) -> sum`, one that runs for every head but a group's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from recipe_lib.errors import SetupError
from recipe_lib.ops.cross_entropy import (
    Finish,
    Loss,
    linear_cross_entropy,
    projected_cross_entropy,
)
from recipe_lib.ops.distillation import Distillation
from recipe_lib.ops.gathered import Group
from recipe_lib.ops.token_log_probs import projected_token_log_probs, token_log_probs
from recipe_lib.ops.token_scores import token_scores


class HeadLoss(Protocol):
    """hidden `[b, s, d]`, weight `[v, d]`, labels `[b, s]` (-100: none) to what the model returns."""

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, /) -> Tensor:
        """A sum of token losses, log-probabilities, or anything else with a gradient."""


@dataclass(frozen=True)
class OutputAdapter:
    """The adapter next to a head's weight. project: `fn(hidden, *trained) -> logits`; frozen: the weight's part of it,
    for a backward that projects again when the weight may no longer be there."""

    project: Callable[..., Tensor]
    trained: tuple[Tensor | None, ...]
    frozen: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """The sum of token losses, in `chunks` pieces (see `linear_cross_entropy`); its gradients are made in forward, so
    that FSDP need not gather the weight for backward.

    loss: of a chunk's logits, in place of cross-entropy.
    """

    chunks: int = 1
    loss: Loss | None = None

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        softcap: float | None = None,
        adapter: OutputAdapter | None = None,
        **head: Any,
    ) -> Tensor:
        """A scalar in fp32 (fp64). head: `group`, `bias`, `finish` as in `linear_cross_entropy`."""
        flat, targets = hidden.flatten(0, -2), labels.flatten()
        shared: dict[str, Any] = {"chunks": self.chunks, "softcap": softcap, "loss": self.loss}
        if adapter is not None:
            return projected_cross_entropy(adapter.project, flat, adapter.trained, targets, **shared)
        return linear_cross_entropy(flat, weight, targets, **shared, **head)


@dataclass(frozen=True)
class TokenLogProbs:
    """The log-probability of each label `[b, s]`, 0 where there is none, in `chunks` pieces (see `token_log_probs`)."""

    chunks: int = 1

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        adapter: OutputAdapter | None = None,
        softcap: float | None = None,
        **head: Any,
    ) -> Tensor:
        """In fp32 (fp64). head: `group`, `bias`, `finish` as in `token_log_probs`."""
        if adapter is None:
            return token_log_probs(hidden, weight, labels, chunks=self.chunks, softcap=softcap, **head)

        project = partial(_with_adapter, adapter)
        return projected_token_log_probs(project, hidden, labels, chunks=self.chunks, softcap=softcap)


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of each label and of the likeliest token `[b, s, 2]`, in `chunks` pieces, without gradients
    (see `token_scores`)."""

    chunks: int = 1

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, adapter: OutputAdapter | None = None, **head: Any
    ) -> Tensor:
        """In fp32 (fp64). head: `softcap`, `group`, `bias`, `finish` as in `token_scores`."""
        if adapter is not None:
            head["project"] = partial(_with_adapter, adapter)
        return token_scores(hidden, weight, labels, chunks=self.chunks, **head)


def _with_adapter(adapter: OutputAdapter, tokens: Tensor) -> Tensor:
    return adapter.project(tokens, *adapter.trained, frozen=adapter.frozen)


def makes_gradients_in_forward(head_loss: HeadLoss | None) -> bool:
    """Whether backward no longer reads the head's weight (None: the default); not known of a user's function."""
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
    if needs and not isinstance(head_loss, (CrossEntropy, TokenLogProbs, TokenScores)):
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
            f"head_loss: found {name}(hidden, weight, labels) for an output head that also has {', '.join(missing)}, "
            f"expected it to take {'that keyword' if len(missing) == 1 else 'those keywords'} too; a loss of logits, "
            "fn(logits, labels), runs as CrossEntropy(loss=fn)"
        )
