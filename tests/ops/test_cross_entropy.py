"""The chunked loss against plain cross-entropy on full logits, in value, gradient and memory."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe_lib.ops.chunked_heads import CrossEntropy, Loss, cross_entropy, find_label_columns
from recipe_lib.ops.gathered import Group

N = 37
D = 24
V = 101


def inputs(
    dtype: torch.dtype = torch.float64, seed: int = 0, n: int = N
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (n,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    loss: Loss | None = None,
) -> Tensor:
    return CrossEntropy(chunks, loss)(hidden, weight, labels, softcap=softcap)


def full_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None
) -> Tensor:
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def relative(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.detach().double(), reference.detach().double()
    return float((ours - reference).norm() / reference.norm())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunks", [1, 4, N, 1000])
def test_value_and_gradients_equal_full_logits_in_float64(
    chunks: int, softcap: float | None
) -> None:
    hidden, weight, labels = inputs()
    ours = linear_cross_entropy(hidden, weight, labels, chunks=chunks, softcap=softcap)
    ours_grads = torch.autograd.grad(ours * 0.37, (hidden, weight))
    reference = full_loss(hidden, weight, labels, softcap)
    reference_grads = torch.autograd.grad(reference * 0.37, (hidden, weight))
    assert ours.dtype == torch.float64 and ours.shape == ()
    assert relative(ours, reference) < 1e-12
    for our_grad, reference_grad in zip(ours_grads, reference_grads, strict=True):
        assert relative(our_grad, reference_grad) < 1e-12


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_equal_finite_differences(softcap: float | None) -> None:
    hidden, weight, labels = inputs(n=7)
    hidden_grad, weight_grad = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, chunks=3, softcap=softcap), (hidden, weight)
    )
    torch.manual_seed(1)  # a way along which the slope is not near 0 by chance
    hidden_way, weight_way = torch.randn_like(hidden), torch.randn_like(weight)
    slope = (hidden_grad * hidden_way).sum() + (weight_grad * weight_way).sum()
    step = 1e-5
    with torch.no_grad():
        ahead, behind = (
            linear_cross_entropy(
                hidden + s * hidden_way, weight + s * weight_way, labels, chunks=3, softcap=softcap
            )
            for s in (step, -step)
        )
    assert float(slope) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-7)


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = inputs(torch.float32)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    ours = linear_cross_entropy(hidden, weight, labels, chunks=3)
    ours.backward()
    assert relative(ours, full_loss(hidden, weight, labels)) < 1e-5
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_lower_precision_is_near_float64(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = inputs(dtype)
    ours = linear_cross_entropy(hidden, weight, labels, chunks=5)
    assert ours.dtype == torch.float32
    ours_grads = torch.autograd.grad(ours, (hidden, weight))
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    reference = full_loss(*exact, labels)
    assert relative(ours, reference) < tolerance
    for our_grad, reference_grad in zip(
        ours_grads, torch.autograd.grad(reference, exact), strict=True
    ):
        assert our_grad.dtype == dtype
        assert relative(our_grad, reference_grad) < tolerance


def test_bf16_gradients_are_no_worse_than_one_backward_over_full_fp32_logits() -> None:
    hidden, weight, labels = inputs(torch.bfloat16, n=512)
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    reference = torch.autograd.grad(full_loss(*exact, labels), exact)
    plain = F.cross_entropy(
        (hidden @ weight.t()).float(), labels, ignore_index=-100, reduction="sum"
    )
    plain_grads = torch.autograd.grad(plain, (hidden, weight))
    ours_grads = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, chunks=16), (hidden, weight)
    )
    for ours, plain, exact_grad in zip(ours_grads, plain_grads, reference, strict=True):
        assert relative(ours, exact_grad) < 1.5 * relative(plain, exact_grad)


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)
def test_agrees_with_the_function_torch_has() -> None:
    hidden, weight, labels = inputs(torch.float32)
    ours = linear_cross_entropy(hidden, weight, labels, chunks=4)
    theirs = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", ignore_index=-100)
    assert relative(ours, theirs) < 1e-6
    grads = zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(theirs, (hidden, weight)),
        strict=True,
    )
    for our_grad, their_grad in grads:
        assert relative(our_grad, their_grad) < 1e-5


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_made(trained: str) -> None:
    hidden, weight, labels = inputs()
    full_loss(hidden, weight, labels).backward()
    wanted = {"hidden": hidden.grad.clone(), "weight": weight.grad.clone()}
    ours = {"hidden": hidden.detach(), "weight": weight.detach()}
    ours[trained].requires_grad_()
    with LiveBytes() as live:
        linear_cross_entropy(ours["hidden"], ours["weight"], labels, chunks=4).backward()
    assert relative(ours[trained].grad, wanted[trained]) < 1e-12
    frozen = "weight" if trained == "hidden" else "hidden"
    assert ours[frozen].grad is None
    assert not any(shape == tuple(ours[frozen].shape) for shape in live.shapes)


def test_all_ignored_is_zero_with_a_graph_and_zero_gradients() -> None:
    hidden, weight, labels = inputs()
    labels.fill_(-100)
    for loss in (None, cross_entropy, lambda logits, labels: logits.sum() * 0):
        hidden.grad = weight.grad = None
        ours = linear_cross_entropy(hidden, weight, labels, chunks=4, loss=loss)
        assert ours.item() == 0 and ours.requires_grad
        ours.backward()
        assert hidden.grad.shape == hidden.shape and not hidden.grad.any()
        assert weight.grad.shape == weight.shape and not weight.grad.any()


def test_no_rows_is_zero_with_a_graph() -> None:
    hidden, weight, labels = inputs(n=1)
    hidden = hidden.detach()[:0].requires_grad_()
    ours = linear_cross_entropy(hidden, weight, labels[:0], chunks=4)
    ours.backward()
    assert ours.item() == 0 and not weight.grad.any() and hidden.grad.shape == (0, D)


def test_without_gradients_the_value_is_the_same_and_has_no_graph() -> None:
    hidden, weight, labels = inputs()
    wanted = full_loss(hidden, weight, labels, 3.0)
    with torch.no_grad():
        ours = linear_cross_entropy(hidden, weight, labels, chunks=4, softcap=3.0)
    frozen = linear_cross_entropy(hidden.detach(), weight.detach(), labels, chunks=4, softcap=3.0)
    for value in (ours, frozen):
        assert not value.requires_grad
        assert relative(value, wanted) < 1e-12


def test_inputs_are_left_as_they_were() -> None:
    hidden, weight, labels = inputs()
    before = hidden.detach().clone(), weight.detach().clone(), labels.clone()
    linear_cross_entropy(hidden, weight, labels, chunks=4, softcap=3.0).backward()
    assert all(
        torch.equal(now, was) for now, was in zip((hidden, weight, labels), before, strict=True)
    )


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels = inputs()
    ours = linear_cross_entropy(hidden, weight, labels, chunks=4)
    ours.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        ours.backward()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_custom_loss_equals_the_same_loss_on_full_logits(softcap: float | None) -> None:
    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum", label_smoothing=0.1
        )

    hidden, weight, labels = inputs()
    ours = linear_cross_entropy(hidden, weight, labels, chunks=4, softcap=softcap, loss=smoothed)
    ours_grads = torch.autograd.grad(ours * 0.37, (hidden, weight))
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    reference = smoothed(logits, labels)
    assert relative(ours, reference) < 1e-12
    for our_grad, grad in zip(
        ours_grads, torch.autograd.grad(reference * 0.37, (hidden, weight)), strict=True
    ):
        assert relative(our_grad, grad) < 1e-12
    with torch.no_grad():
        value = linear_cross_entropy(
            hidden, weight, labels, chunks=4, softcap=softcap, loss=smoothed
        )
    assert relative(value, reference) < 1e-12


def test_the_registered_loss_is_the_built_in_one() -> None:
    from recipe_lib.config.registry import get_registered

    assert get_registered("loss", "cross_entropy") is cross_entropy
    hidden, weight, labels = inputs()
    given = linear_cross_entropy(hidden, weight, labels, chunks=4, loss=cross_entropy)
    assert torch.equal(given, linear_cross_entropy(hidden, weight, labels, chunks=4))
    custom = linear_cross_entropy(
        hidden, weight, labels, chunks=4, loss=lambda *both: cross_entropy(*both)
    )
    assert relative(given, custom) < 1e-12


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations make while it is active: now, at most, and every shape
    seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.shapes.add(tuple(leaf.shape))
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


@pytest.mark.parametrize("softcap, copies", [(None, 2.1), (30.0, 3.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes_are_those_of_one_chunk(
    dtype: torch.dtype, softcap: float | None, copies: float
) -> None:
    n, d, v, chunks = 512, 16, 4096, 8
    hidden = torch.randn(n, d).to(dtype).requires_grad_()
    weight = torch.randn(v, d).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,))
    grads = (n * d + v * d) * hidden.element_size()
    chunk = n // chunks * v * 4
    with LiveBytes() as live:
        loss = linear_cross_entropy(hidden, weight, labels, chunks=chunks, softcap=softcap)
        kept = live.now
        loss.backward()
    assert chunk < live.peak < grads + copies * chunk < n * v * 4
    assert kept < grads + 1024
    assert (n, v) not in live.shapes
    with LiveBytes() as plain:
        F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum").backward()
    assert plain.peak > 2 * n * v * 4 > 4 * live.peak


def test_validation_keeps_nothing() -> None:
    n, d, v, chunks = 512, 16, 4096, 8
    hidden, weight, labels = (
        torch.randn(n, d),
        torch.randn(v, d, requires_grad=True),
        torch.randint(0, v, (n,)),
    )
    with torch.no_grad(), LiveBytes() as live:
        loss = linear_cross_entropy(hidden, weight, labels, chunks=chunks)
        assert live.now < 64
    assert loss.isfinite()
    assert live.peak < 1.1 * n // chunks * v * 4


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 2)], ids=["even", "uneven"])
def test_a_label_outside_the_vocabulary_raises_on_one_rank_that_shares_it(
    sizes: tuple[int, ...],
) -> None:
    """Else each rank takes it for another one's, and the loss is that of no label."""

    def look_up(label: int) -> list[str]:
        found = []
        for rank, width in enumerate(sizes):
            labels = torch.tensor([label, -100])
            group = Group("", len(sizes), rank, columns=4)
            columns, elsewhere = find_label_columns(labels, labels == -100, width, group)
            try:
                torch.zeros(2, width).gather(1, columns)
            except (IndexError, RuntimeError):
                found.append("out of range")
                continue
            found.append("elsewhere" if elsewhere is not None and elsewhere[0] else "here")
            assert elsewhere is None or bool(elsewhere[1])
        return found

    for label in range(sum(sizes)):
        assert look_up(label) == [
            "here" if rank == label // 4 else "elsewhere" for rank in range(3)
        ]
    for label in (sum(sizes), sum(sizes) + 5):
        assert look_up(label) == ["elsewhere", "elsewhere", "out of range"]
    for label in (-1, -5, -101):
        assert look_up(label) == ["out of range", "elsewhere", "elsewhere"]
