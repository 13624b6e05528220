"""A model whose names and shapes give nothing away: a plan has to come from its forward alone."""

import torch
from torch import nn


class Blob(nn.Module):
    """A parallel block: fused grouped QKV with bias, a bare output matrix, a fused gated MLP."""

    def __init__(self, wide: int, groups: int, each: int, deep: int):
        super().__init__()
        self.zeta, self.omega, self.slot = groups, each, wide // (groups * each)
        self.one = nn.LayerNorm(wide)
        # By group: its queries, a key, a value.
        self.alpha = nn.Linear(wide, groups * (each + 2) * self.slot)
        self.beta = nn.Parameter(torch.empty(groups * each, self.slot, wide))
        self.gamma = nn.Parameter(torch.empty(wide, 2 * deep))
        self.delta = nn.Linear(deep, wide)
        self.epsilon = nn.Parameter(torch.empty(groups * each, 1, 1))
        self.pair = nn.Parameter(torch.empty(self.slot))

    def forward(self, stream: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
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
    """A decoder whose embedding is its head, with an odd number of tokens."""

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
        self.many = nn.ModuleList(Blob(wide, groups, each, deep) for _ in range(times))
        self.last = nn.LayerNorm(wide)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        length = numbers.shape[1]
        hidden = torch.full((length, length), float("-inf"), device=numbers.device).triu(1)
        stream = nn.functional.embedding(numbers, self.table)
        for blob in self.many:
            stream = blob(stream, hidden)
        return self.last(stream) @ self.table.t()
