"""An output head whose logits are made, and whose gradients are added up, a chunk of tokens at a time."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.gathered import Group, start_gather, start_scatter, wait


class ChunkedLogits(Protocol):
    """The student's logits, a chunk at a time. gradients: what theirs come to so far, None where none is wanted."""

    rows: int
    gradients: list[Tensor | None]

    def logits(self, part: slice) -> Tensor:
        """Of a chunk, with a group of all its ranks' tokens."""

    def take(self, part: slice, gradient: Tensor) -> None:
        """The gradient of the logits that were made last."""


class ChunkedHead:
    """A head that is a weight `[v, d]`, with or without a bias. tensors: hidden states, weight, bias."""

    def __init__(self, tensors: Sequence[Tensor | None], wanted: Sequence[bool], *, group: Group | None) -> None:
        hidden, weight, self.bias = tensors
        assert hidden is not None and weight is not None
        self.hidden, self.weight, self.group = hidden.flatten(0, -2), weight, group
        self.rows = self.hidden.shape[0]
        self.gradients = [
            None if tensor is None or not wants else torch.zeros_like(tensor)
            for tensor, wants in zip((self.hidden, weight, self.bias), wanted, strict=True)
        ]
        self.tokens: Tensor | None = None

    def logits(self, part: slice) -> Tensor:
        """See ChunkedLogits."""
        self.tokens = gathered(self.hidden[part], self.group)
        return F.linear(self.tokens, self.weight, self.bias)

    def take(self, part: slice, gradient: Tensor) -> None:
        """See ChunkedLogits."""
        of_hidden, of_weight, of_bias = self.gradients
        tokens, self.tokens = self.tokens, None
        assert tokens is not None
        if of_hidden is not None and self.group is None:
            torch.mm(gradient, self.weight, out=of_hidden[part])
        elif of_hidden is not None and self.group is not None:
            of_hidden[part] = wait(start_scatter(gradient @ self.weight, self.group))
        if of_weight is not None:
            of_weight.addmm_(gradient.t(), tokens)
        if of_bias is not None:
            of_bias.add_(gradient.sum(dim=0))


class ChunkedAdaptedHead:
    """A head with an adapter, whose gradients come from the logits' by autograd, over a chunk alone."""

    def __init__(
        self, tensors: Sequence[Tensor | None], wanted: Sequence[bool], *, project: Callable[..., Tensor]
    ) -> None:
        hidden, *trained = tensors
        assert hidden is not None
        self.hidden, self.wanted, self.project = hidden.flatten(0, -2), wanted, project
        self.rows = self.hidden.shape[0]
        self.trained = [
            None if one is None else one.detach().requires_grad_(wants)
            for one, wants in zip(trained, wanted[1:], strict=True)
        ]
        self.gradients = [
            None if one is None or not wants else torch.zeros_like(one)
            for one, wants in zip((self.hidden, *trained), wanted, strict=True)
        ]
        self.made: tuple[Tensor, Tensor] | None = None

    def logits(self, part: slice) -> Tensor:
        """See ChunkedLogits."""
        tokens = self.hidden[part].detach().requires_grad_(self.wanted[0])
        with torch.set_grad_enabled(any(self.wanted)):
            logits = self.project(tokens, *self.trained)
        self.made = (tokens, logits) if any(self.wanted) else None
        return logits.detach()

    def take(self, part: slice, gradient: Tensor) -> None:
        """See ChunkedLogits."""
        assert self.made is not None
        (tokens, logits), self.made = self.made, None
        places = [number for number, one in enumerate(self.gradients) if one is not None]
        found = torch.autograd.grad(logits, [(tokens, *self.trained)[at] for at in places], gradient)  # type: ignore[misc]
        for at, grad in zip(places, found, strict=True):
            total = self.gradients[at]
            assert total is not None
            (total[part] if at == 0 else total).add_(grad)


def gathered(tokens: Tensor, group: Group | None) -> Tensor:
    """Tokens `[m, d]` of each rank, of all ranks of a group."""
    return tokens if group is None else wait(start_gather(tokens, group))
