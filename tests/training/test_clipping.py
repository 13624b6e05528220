"""The gradient norm and clipping: against float64, over meshes, and without one operation that waits for the device."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipe_lib.training.clipping import clip_grad_norm

WORLD = SimpleNamespace(device=torch.device("cpu"), size=1, rank=0)
SHAPES = ((7, 5), (11,), (33, 3))


def parameters(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = []
    for shape in SHAPES:
        params.append(nn.Parameter(torch.zeros(*shape, dtype=dtype)))
        grad = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        params[-1].grad = grad.to(dtype)
    return params


def exact_norm(params: list[nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_the_norm_is_exact_and_never_rounded_to_bf16(dtype: torch.dtype, tolerance: float) -> None:
    params = parameters(dtype)
    norm = clip_grad_norm(params, None, WORLD)
    assert norm.shape == () and norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(exact_norm(params), rel=tolerance)


def test_the_norm_of_a_large_tensor_is_as_exact() -> None:
    big = nn.Parameter(torch.zeros(4000, 1000))
    big.grad = torch.randn(1000, 4000, generator=torch.Generator().manual_seed(0)).t()
    assert float(clip_grad_norm([big], None, WORLD)) == pytest.approx(exact_norm([big]), rel=1e-6)


def test_clipping_scales_all_gradients_to_the_largest_norm() -> None:
    params, before = parameters(torch.float64), parameters(torch.float64)
    norm = clip_grad_norm(params, 0.5, WORLD)
    assert float(norm) == pytest.approx(exact_norm(before))
    assert exact_norm(params) == pytest.approx(0.5, rel=1e-6)
    for ours, was in zip(params, before, strict=True):
        torch.testing.assert_close(ours.grad, was.grad * (0.5 / (float(norm) + 1e-6)), rtol=1e-12, atol=0)


def test_it_agrees_with_torch() -> None:
    params, theirs = parameters(), parameters()
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    assert float(clip_grad_norm(params, 1.0, WORLD)) == pytest.approx(float(expected), rel=1e-6)
    for our, their in zip(params, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-6, atol=1e-7)


def test_gradients_within_the_limit_and_without_a_limit_stay_bitwise() -> None:
    for limit in (None, 1e6):
        params, before = parameters(), parameters()
        clip_grad_norm(params, limit, WORLD)
        assert all(torch.equal(ours.grad, was.grad) for ours, was in zip(params, before, strict=True))


def test_missing_gradients_and_frozen_parameters_are_left_out() -> None:
    params = parameters()
    params[0].grad = None
    params.append(nn.Parameter(torch.ones(2), requires_grad=False))
    norm = clip_grad_norm(params, 1e-3, WORLD)
    assert float(norm) > 1 and params[0].grad is None
    assert exact_norm(params) == pytest.approx(1e-3, rel=1e-3)


def test_no_gradient_at_all_has_a_norm_of_zero() -> None:
    for params in ([], [nn.Parameter(torch.ones(3))]):
        assert float(clip_grad_norm(params, 1.0, WORLD)) == 0


def test_gradients_of_zero_stay_zero() -> None:
    params = parameters(scale=0.0)
    assert float(clip_grad_norm(params, 1.0, WORLD)) == 0
    assert all(not p.grad.any() for p in params)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_returned_as_such(bad: float) -> None:
    params = parameters()
    params[1].grad[0] = bad
    assert not clip_grad_norm(params, 1.0, WORLD).isfinite()


def test_float64_anywhere_makes_the_norm_float64() -> None:
    params = [*parameters(), *parameters(torch.float64)]
    norm = clip_grad_norm(params, 1.0, WORLD)
    assert norm.dtype == torch.float64
    assert [p.grad.dtype for p in params] == [torch.float32] * 3 + [torch.float64] * 3


def test_nothing_is_read_back_to_the_host() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    called = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Calls():
        clip_grad_norm(parameters(), 1.0, WORLD)
    assert "_foreach_norm" in called and "_foreach_mul_" in called
    assert not called & {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero"}
