"""Log-probabilities of labels against log_softmax over full logits: values, gradients, memory."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.ops.head_losses import OutputAdapter, TokenLogProbs
from tests.ops.test_cross_entropy import LiveBytes, linear_cross_entropy, relative

ROWS = 3
LENGTH = 11
D = 24
V = 101


def inputs(
    dtype: torch.dtype = torch.float64, length: int = LENGTH
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden `[ROWS, length, D]`, weight, labels with some ignored, and a slope for each
    log-probability.
    """
    generator = torch.Generator().manual_seed(length)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden = draw(ROWS, length, D).to(dtype).requires_grad_()
    weight = draw(V, D).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (ROWS, length), generator=generator)
    labels[:, ::4] = -100
    return hidden, weight, labels, draw(ROWS, length)


def full_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None
) -> Tensor:
    """The plain way, in the inputs' dtype."""
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(labels == -100, 0)


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunks: int, softcap: float | None = None
) -> Tensor:
    return TokenLogProbs(chunks)(hidden, weight, labels, softcap=softcap)


def by_projection(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunks: int, softcap: float | None
) -> Tensor:
    def project(rows: Tensor, frozen: Callable[[Tensor], Tensor]) -> Tensor:
        return frozen(rows)

    adapter = OutputAdapter(project, (), lambda rows: rows @ weight.t())
    return TokenLogProbs(chunks)(hidden, weight, labels, softcap=softcap, adapter=adapter)


WAYS = pytest.mark.parametrize("way", [token_log_probs, by_projection])


@WAYS
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunks", [1, 4, ROWS * LENGTH, 1000])
def test_values_and_gradients_equal_full_logits_in_float64(
    way, chunks: int, softcap: float | None
) -> None:
    hidden, weight, labels, slopes = inputs()
    ours = way(hidden, weight, labels, chunks=chunks, softcap=softcap)
    wanted = full_log_probs(hidden, weight, labels, softcap)
    assert ours.shape == labels.shape and ours.dtype == torch.float64 and ours._base is None
    assert relative(ours, wanted) < 1e-13
    assert not ours[labels == -100].any()
    ours_grads = torch.autograd.grad((ours * slopes).sum(), (hidden, weight))
    for our_grad, grad in zip(
        ours_grads, torch.autograd.grad((wanted * slopes).sum(), (hidden, weight)), strict=True
    ):
        assert our_grad.shape == grad.shape and relative(our_grad, grad) < 1e-12


@WAYS
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_equal_finite_differences(way, softcap: float | None) -> None:
    hidden, weight, labels, slopes = inputs(length=3)

    def value(moved_hidden: Tensor, moved_weight: Tensor) -> Tensor:
        return (
            way(moved_hidden, moved_weight, labels, chunks=3, softcap=softcap).sin() * slopes
        ).sum()

    grads = torch.autograd.grad(value(hidden, weight), (hidden, weight))
    torch.manual_seed(1)  # a way along which the slope is not near 0 by chance
    ways = torch.randn_like(hidden), torch.randn_like(weight)
    slope = sum(float((grad * way).sum()) for grad, way in zip(grads, ways, strict=True))
    with torch.no_grad():
        ahead, behind = (value(hidden + s * ways[0], weight + s * ways[1]) for s in (1e-5, -1e-5))
    assert slope == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-7)


def test_the_sum_is_the_loss_of_the_chunked_cross_entropy() -> None:
    hidden, weight, labels, _ = inputs()
    loss = linear_cross_entropy(
        hidden.flatten(0, 1), weight, labels.flatten(), chunks=5, softcap=7.0
    )
    ours = -token_log_probs(hidden, weight, labels, chunks=2, softcap=7.0).sum()
    assert relative(ours, loss) < 1e-13
    ours_grads = torch.autograd.grad(ours, (hidden, weight))
    for our_grad, grad in zip(ours_grads, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        assert relative(our_grad, grad) < 1e-12


@WAYS
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_lower_precision_is_near_float64(way, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels, slopes = inputs(dtype)
    ours = way(hidden, weight, labels, chunks=5, softcap=None)
    assert ours.dtype == torch.float32
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = full_log_probs(*exact, labels)
    assert relative(ours, wanted) < tolerance
    ours_grads = torch.autograd.grad((ours * slopes).sum(), (hidden, weight))
    for our_grad, grad in zip(
        ours_grads, torch.autograd.grad((wanted * slopes).sum(), exact), strict=True
    ):
        assert our_grad.dtype == dtype and relative(our_grad, grad) < tolerance


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    ours = token_log_probs(hidden * 1e4, weight, labels, chunks=3)
    grads = torch.autograd.grad(ours.sum(), (hidden, weight))
    assert relative(ours, full_log_probs(hidden * 1e4, weight, labels)) < 1e-5
    assert all(grad.isfinite().all() for grad in grads)


@WAYS
@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_made(way, trained: str) -> None:
    hidden, weight, labels, slopes = inputs()
    wanted = torch.autograd.grad(
        (full_log_probs(hidden, weight, labels) * slopes).sum(), (hidden, weight)
    )
    ours = {"hidden": hidden.detach().clone(), "weight": weight.detach().clone()}
    ours[trained].requires_grad_()
    with LiveBytes() as live:
        (
            way(ours["hidden"], ours["weight"], labels, chunks=4, softcap=None) * slopes
        ).sum().backward()
    assert relative(ours[trained].grad, wanted[trained == "weight"]) < 1e-12
    frozen = "weight" if trained == "hidden" else "hidden"
    assert ours[frozen].grad is None
    if way is token_log_probs and frozen == "weight":
        assert (V, D) not in live.shapes


@WAYS
def test_all_ignored_is_zero_with_a_graph_and_zero_gradients(way) -> None:
    hidden, weight, labels, _ = inputs()
    labels.fill_(-100)
    ours = way(hidden, weight, labels, chunks=4, softcap=None)
    ours.sum().backward()
    assert not ours.any() and not hidden.grad.any() and not weight.grad.any()


@WAYS
def test_no_rows_have_a_graph(way) -> None:
    hidden, weight, labels, _ = inputs()
    ours = way(hidden[:, :0], weight, labels[:, :0], chunks=4, softcap=None)
    ours.sum().backward()
    assert ours.shape == (ROWS, 0) and not hidden.grad.any() and not weight.grad.any()


@WAYS
def test_without_gradients_nothing_is_kept(way) -> None:
    hidden, weight, labels, _ = inputs()
    with torch.no_grad(), LiveBytes() as live:
        ours = way(hidden, weight, labels, chunks=4, softcap=3.0)
        assert live.now <= 2 * ours.nbytes
    assert not ours.requires_grad
    assert relative(ours, full_log_probs(hidden, weight, labels, 3.0)) < 1e-13


def test_inputs_are_left_as_they_were_and_backward_may_come_twice() -> None:
    hidden, weight, labels, slopes = inputs()
    before = hidden.detach().clone(), weight.detach().clone(), labels.clone()
    loss = (token_log_probs(hidden, weight, labels, chunks=4, softcap=3.0) * slopes).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert all(
        torch.equal(now, was) for now, was in zip((hidden, weight, labels), before, strict=True)
    )


def test_a_projection_draws_the_same_random_numbers_again_in_backward() -> None:
    hidden, weight, labels, slopes = inputs()

    def value(moved: Tensor) -> Tensor:
        torch.manual_seed(1)
        return (by_dropout(moved) * slopes).sum()

    def by_dropout(moved: Tensor) -> Tensor:
        adapter = OutputAdapter(
            lambda rows, frozen: frozen(F.dropout(rows, 0.4)), (), lambda rows: rows @ weight.t()
        )
        return TokenLogProbs(4)(moved, weight, labels, adapter=adapter)

    (grad,) = torch.autograd.grad(value(hidden), hidden)
    step = torch.randn_like(hidden)
    with torch.no_grad():
        rise = float(value(hidden + 1e-6 * step) - value(hidden - 1e-6 * step)) / 2e-6
    assert float((grad * step).sum()) == pytest.approx(rise, rel=1e-7)


@WAYS
@pytest.mark.parametrize("softcap, copies", [(None, 2.1), (30.0, 3.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes_are_those_of_one_chunk(
    way, dtype: torch.dtype, softcap: float | None, copies: float
) -> None:
    n, d, v, chunks = 512, 16, 4096, 8
    hidden = torch.randn(1, n, d).to(dtype).requires_grad_()
    weight = torch.randn(v, d).to(dtype)
    labels = torch.randint(0, v, (1, n))
    chunk = n // chunks * v * 4
    if way is by_projection:
        copies += 3  # autograd's own steps from logits to log-probabilities
    with LiveBytes() as live:
        log_probs = way(hidden, weight, labels, chunks=chunks, softcap=softcap)
        kept = live.now
        log_probs.sum().backward()
    assert kept < 32 * n  # a few numbers for each row, and for each chunk the state of a generator
    assert chunk < live.peak < copies * chunk + 4 * hidden.nbytes < n * v * 4
    assert (n, v) not in live.shapes
