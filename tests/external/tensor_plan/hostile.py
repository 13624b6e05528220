"""Define a decoder whose names give nothing away, for tests of tensor plans.

A plan, how ranks divide each tensor, has to come from the forward alone. So modules and parameters
have names without meaning; the comments say what they are.
"""

import torch
from torch import nn


class Blob(nn.Module):
    """A parallel block: fused grouped QKV with bias, a bare output matrix, a fused gated MLP."""

    def __init__(self, wide: int, groups: int, each: int, deep: int):
        """Build the block: hidden width, key heads, query heads of each, width of the MLP."""
        super().__init__()
        self.zeta = groups  # key heads
        self.omega = each  # query heads of each
        self.slot = wide // (groups * each)  # channels of a head
        self.one = nn.LayerNorm(wide)
        # By group: its queries, a key, a value.
        self.alpha = nn.Linear(wide, groups * (each + 2) * self.slot)
        self.beta = nn.Parameter(torch.empty(groups * each, self.slot, wide))  # output matrix
        self.gamma = nn.Parameter(torch.empty(wide, 2 * deep))  # MLP: gate and up
        self.delta = nn.Linear(deep, wide)  # MLP: down
        self.epsilon = nn.Parameter(torch.empty(groups * each, 1, 1))  # scale of a head's scores
        self.pair = nn.Parameter(torch.empty(self.slot))  # scale of the queries' channels

    def forward(self, stream: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states `[b, s, d]`. hidden: causal mask, added to the scores, `[s, s]`."""
        batch, length, _ = stream.shape
        x = self.one(stream)
        mixed = self.alpha(x).view(batch, length, self.zeta, self.omega + 2, self.slot)
        q, k, v = mixed.split([self.omega, 1, 1], dim=3)
        q = q.reshape(batch, length, self.zeta * self.omega, self.slot).transpose(1, 2) * self.pair
        k, v = (t.expand(-1, -1, -1, self.omega, -1).flatten(2, 3).transpose(1, 2) for t in (k, v))
        weights = (q @ k.mT * self.epsilon + hidden).softmax(-1)
        out = torch.einsum("bhqk,bkhd,hdw->bqw", weights, v.transpose(1, 2), self.beta)
        left, right = (x @ self.gamma).chunk(2, -1)
        return stream + out + self.delta(torch.sigmoid(left) * right)


class Thing(nn.Module):
    """A decoder whose embedding is its head, with a vocabulary that ranks cannot divide evenly."""

    def __init__(
        self,
        tokens: int = 101,
        wide: int = 48,
        groups: int = 4,
        each: int = 3,
        deep: int = 40,
        times: int = 2,
    ):
        super().__init__()
        self.table = nn.Parameter(torch.empty(tokens, wide))
        self.many = nn.ModuleList(
            Blob(wide=wide, groups=groups, each=each, deep=deep) for _ in range(times)
        )
        self.last = nn.LayerNorm(wide)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return logits `[b, s, v]` of token ids `[b, s]`."""
        length = numbers.shape[1]
        hidden = torch.full((length, length), float("-inf"), device=numbers.device).triu(1)
        stream = nn.functional.embedding(numbers, self.table)
        for blob in self.many:
            stream = blob(stream, hidden)
        return self.last(stream) @ self.table.t()
