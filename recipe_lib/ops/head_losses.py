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
from typing import Any, Protocol

from torch import Tensor

from recipe_lib.errors import SetupError
from recipe_lib.ops.chunked_heads import Finish, OutputAdapter
from recipe_lib.ops.cross_entropy import CrossEntropy
from recipe_lib.ops.distillation import Distillation
from recipe_lib.ops.gathered import Group
from recipe_lib.ops.token_log_probs import TokenLogProbs, TokenScores

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
    """hidden `[b, s, d]`, weight `[v, d]`, labels `[b, s]` (-100: none) to what the model returns."""

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, /) -> Tensor:
        """A sum of token losses, log-probabilities, or anything else with a gradient."""


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
            f"head_loss: found {name}(hidden, weight, labels) for an output head that also has {', '.join(missing)}, "
            f"expected it to take {'that keyword' if len(missing) == 1 else 'those keywords'} too; a loss of logits, "
            "fn(logits, labels), runs as CrossEntropy(loss=fn)"
        )
