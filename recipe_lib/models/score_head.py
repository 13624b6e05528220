"""The head of a reward model, or of a classifier of sequences, in place of the output projection."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.models.spec import SCORE


class ScoreHead(nn.Module):
    """Hidden states `[..., d]` to scores `[..., n]` of each token, in the type of its weight `[n, d]`.

    Called as an output head is; which tokens' scores are meant is for the caller to say.
    """

    def __init__(self, num_labels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, width))

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None, head_loss: object = None) -> Tensor:
        """Labels and head_loss are not read."""
        return F.linear(hidden.to(self.weight.dtype), self.weight)


def score_tensor(model: nn.Module) -> dict[str, Tensor]:
    """The head's weight by name, where this rank has it."""
    return {name: weight for name, weight in model.named_parameters() if name == SCORE}
