"""The output projection of a model of another library, called as ours is."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.ops.chunked_heads import Finish
from recipe_lib.ops.head_losses import HeadLoss, run_head_loss


@dataclass
class LogitsAfter:
    """What a forward does to its logits: `softcap` alone, where that is all, else `finish` (None: nothing)."""

    softcap: float | None = None
    finish: Finish | None = None


class LinearHead(nn.Linear):
    """An nn.Linear with the signature of `OutputHead.forward`, so that its FSDP unit is that of a head."""

    @classmethod
    def adopt(cls, linear: nn.Linear) -> None:
        """Makes a plain linear one of these, in place: others may hold it."""
        linear.__class__ = cls

    def forward(
        self,
        hidden: Tensor,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
        after: LogitsAfter | None = None,
    ) -> Tensor:
        """Hidden `[..., d]` to logits, or with labels to what `head_loss` makes of them."""
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        after = after or LogitsAfter()
        return run_head_loss(
            head_loss, hidden, self.weight, labels, softcap=after.softcap, finish=after.finish, bias=self.bias
        )
