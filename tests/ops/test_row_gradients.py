"""Gradients of an embedding and of an output projection, made some rows at a time, against autograd's whole ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe_lib.ops.cross_entropy import cross_entropy, cross_entropy_by_rows
from recipe_lib.ops.row_gradients import RowGradients, embedding_by_rows

N, D, V = 23, 24, 101
PIECES = [slice(0, 40), slice(40, 41), slice(41, V)]


class Taken(RowGradients):
    """Pieces as they were given, put together."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.whole = torch.zeros(V, D, dtype=torch.float64)
        super().__init__(PIECES, self.add)

    def add(self, number: int, gradient: Tensor) -> None:
        self.order.append(number)
        self.whole[PIECES[number]] += gradient


def inputs(n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, V, (n,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def full_loss(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def test_an_embeddings_gradient_comes_by_rows() -> None:
    _, weight, _ = inputs()
    tokens = torch.tensor([[0, 39, 40, 41, 100, 7], [7, 7, 40, 99, 0, 41]])  # at the ends of pieces, and repeated
    slope = torch.randn(2, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    taken = Taken()
    found = embedding_by_rows(tokens, weight, taken)
    assert torch.equal(found, F.embedding(tokens, weight))
    found.backward(slope)
    assert weight.grad is None and taken.order == [0, 1, 2]
    (expected,) = torch.autograd.grad(F.embedding(tokens, weight), weight, slope)
    assert torch.equal(taken.whole, expected)


@pytest.mark.parametrize("loss", [None, cross_entropy, lambda logits, labels: full_loss_of(logits, labels)])
@pytest.mark.parametrize(("chunks", "softcap"), [(1, None), (4, 3.0), (N, None)])
def test_a_heads_gradient_comes_by_rows(chunks: int, softcap: float | None, loss: Any) -> None:
    hidden, weight, labels = inputs()
    taken = Taken()
    found = cross_entropy_by_rows(hidden, weight, labels, chunks=chunks, rows=taken, softcap=softcap, loss=loss)
    expected = full_loss(hidden, weight, labels, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    (found * 0.37).backward()
    assert weight.grad is None and taken.order == [0, 1, 2]
    wanted = torch.autograd.grad(expected * 0.37, (hidden, weight))
    torch.testing.assert_close(hidden.grad, wanted[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(taken.whole, wanted[1], rtol=1e-11, atol=1e-12)


def full_loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


class Most(TorchDispatchMode):
    """The most elements of memory that anything has beside the weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.elements, self.weight = 0, weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() != self.weight:
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return result


def test_no_whole_gradient_is_ever_made() -> None:
    """Of the head there are the gradients of 7 tokens' logits; of the embedding a piece, and a row for the others."""
    hidden, weight, labels = inputs(7)
    largest = max(rows.stop - rows.start for rows in PIECES)
    with Most(weight) as most:
        cross_entropy_by_rows(hidden, weight, labels, chunks=2, rows=RowGradients(PIECES, lambda *_: None)).backward()
    assert most.elements == max(7 * V, largest * D) < V * D
    with Most(weight) as most:
        embedding_by_rows(torch.arange(7), weight, RowGradients(PIECES, lambda *_: None)).sum().backward()
    assert most.elements == (largest + 1) * D < V * D


def test_with_more_tokens_than_channels_the_heads_gradient_is_whole() -> None:
    hidden, weight, labels = inputs(D + 1)
    taken = Taken()
    cross_entropy_by_rows(hidden, weight, labels, chunks=3, rows=taken).backward()
    wanted = torch.autograd.grad(full_loss(hidden, weight, labels), weight)
    assert not taken.order
    torch.testing.assert_close(weight.grad, wanted[0], rtol=1e-11, atol=1e-12)


def test_gradients_of_several_uses_are_summed_before_anyone_has_them() -> None:
    """Each use alone would be a step of its own. A use whose graph is gone is none."""
    hidden, weight, labels = inputs()
    tokens = torch.tensor([3, 3, 50])
    taken, head = Taken(), Taken()
    embedding_by_rows(tokens, weight, taken)
    uses = embedding_by_rows(tokens, weight, taken).sum() + 2 * embedding_by_rows(tokens + 1, weight, taken).sum()
    losses = [cross_entropy_by_rows(hidden, weight, labels, chunks=2, rows=head) for _ in range(2)]
    (uses + sum(losses)).backward()
    assert not taken.order and not head.order
    plain = F.embedding(tokens, weight).sum() + 2 * F.embedding(tokens + 1, weight).sum()
    (wanted,) = torch.autograd.grad(plain + 2 * full_loss(hidden, weight, labels), weight)
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-11, atol=1e-12)
    embedding_by_rows(tokens, weight, taken).sum().backward()
    assert taken.order == [0, 1, 2]


def test_without_gradients_nothing_is_taken() -> None:
    hidden, weight, labels = inputs()
    taken = Taken()
    with torch.no_grad():
        embedding_by_rows(torch.tensor([1]), weight, taken)
        found = cross_entropy_by_rows(hidden, weight, labels, chunks=2, rows=taken)
    torch.testing.assert_close(found, full_loss(hidden, weight, labels), rtol=1e-12, atol=0)
    assert not taken.order and not taken._uses
