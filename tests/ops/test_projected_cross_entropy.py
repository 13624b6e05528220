"""The chunked loss of a projection with parts of its own, against the loss of full logits in
float64.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.chunked_heads import CrossEntropy, Loss
from recipe_lib.ops.head_losses import OutputAdapter

N = 37
D = 24
V = 101
R = 3
Parts = tuple[Tensor, Tensor, Tensor | None]


def projected_cross_entropy(
    project: Callable[..., Tensor],
    hidden: Tensor,
    parts: Parts,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    loss: Loss | None = None,
) -> Tensor:
    adapter = OutputAdapter(project, parts, project)
    return CrossEntropy(chunks, loss)(hidden, hidden, labels, softcap=softcap, adapter=adapter)


def inputs(lengths: bool) -> tuple[Tensor, Tensor, Parts, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, frozen = draw(N, D).requires_grad_(), draw(V, D)
    parts = (
        draw(R, D).requires_grad_(),
        draw(V, R).requires_grad_(),
        draw(V).requires_grad_() if lengths else None,
    )
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::5] = -100
    return hidden, frozen, parts, labels


def project(
    frozen: Tensor, hidden: Tensor, first: Tensor, second: Tensor, lengths: Tensor | None
) -> Tensor:
    logits = torch.add(hidden @ frozen.t(), hidden @ first.t() @ second.t(), alpha=0.3)
    return logits if lengths is None else lengths * logits


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits[labels != -100].square() / 50).sum()


def full(
    hidden: Tensor,
    frozen: Tensor,
    parts: Parts,
    labels: Tensor,
    softcap: float | None,
    custom: bool,
) -> Tensor:
    logits = project(frozen, hidden, *parts)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (
        squares(logits, labels)
        if custom
        else F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    )


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("chunks", [1, 4, 1000])
def test_value_and_gradients_equal_full_logits(
    chunks: int, lengths: bool, softcap: float | None, custom: bool
) -> None:
    hidden, frozen, parts, labels = inputs(lengths)
    ours = projected_cross_entropy(
        lambda *tensors: project(frozen, *tensors),
        hidden,
        parts,
        labels,
        chunks=chunks,
        softcap=softcap,
        loss=squares if custom else None,
    )
    wanted = full(hidden, frozen, parts, labels, softcap, custom)
    tensors = [tensor for tensor in (hidden, *parts) if tensor is not None]
    assert ours.shape == () and ours.dtype == torch.float64
    assert torch.allclose(ours, wanted, rtol=1e-12)
    ours_grads, wanted_grads = (
        torch.autograd.grad(ours * 0.37, tensors),
        torch.autograd.grad(wanted * 0.37, tensors),
    )
    for mine, reference in zip(ours_grads, wanted_grads, strict=True):
        assert float((mine - reference).norm() / reference.norm()) < 1e-12


def test_only_what_wants_a_gradient_gets_one() -> None:
    hidden, frozen, (first, second, _), labels = inputs(False)
    hidden, first = hidden.detach(), first.detach()
    loss = projected_cross_entropy(
        lambda *t: project(frozen, *t), hidden, (first, second, None), labels, chunks=3
    )
    loss.backward()
    assert second.grad is not None and hidden.grad is None and first.grad is None
    with torch.no_grad():
        again = projected_cross_entropy(
            lambda *t: project(frozen, *t), hidden, (first, second, None), labels, chunks=3
        )
    assert not again.requires_grad and torch.equal(again, loss)


def test_all_labels_ignored_still_has_a_graph_of_zeros() -> None:
    hidden, frozen, parts, labels = inputs(True)
    loss = projected_cross_entropy(
        lambda *t: project(frozen, *t), hidden, parts, torch.full_like(labels, -100), chunks=3
    )
    grads = torch.autograd.grad(loss, [hidden, *(part for part in parts if part is not None)])
    assert float(loss.detach()) == 0 and all(grad.abs().max() == 0 for grad in grads)


def test_a_second_backward_is_refused() -> None:
    hidden, frozen, parts, labels = inputs(False)
    loss = projected_cross_entropy(lambda *t: project(frozen, *t), hidden, parts, labels, chunks=3)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
