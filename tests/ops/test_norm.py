"""Norms against transformers' modules and a formula in fp64."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from recipe_lib.ops.norm import offset_rms_norm, rms_norm


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 7, 48, generator=generator) * 5, torch.randn(
        48, generator=generator
    ) * 0.1


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_those_of_the_formula(
    inputs: tuple[torch.Tensor, torch.Tensor], offset: int, dtype: torch.dtype
) -> None:
    """On a CPU the norm has a backward of its own; here autograd differentiates the formula."""
    hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in inputs)
    wide_hidden, wide_weight = (
        tensor.detach().double().requires_grad_() for tensor in (hidden, weight)
    )
    gradient = torch.cos(torch.arange(hidden.numel())).view(hidden.shape)
    norm = offset_rms_norm if offset else rms_norm
    norm(hidden, weight, 1e-6).backward(gradient.to(dtype))
    scale = (wide_hidden.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = wide_hidden * scale * (wide_weight + offset)
    expected.backward(gradient.to(dtype).double())
    tolerance = 1e-12 if dtype is torch.float64 else 2**-8
    for ours, formula in ((hidden, wide_hidden), (weight, wide_weight)):
        largest = float(formula.grad.abs().max())
        torch.testing.assert_close(
            ours.grad.double(), formula.grad, rtol=0, atol=tolerance * largest
        )


@pytest.mark.parametrize("offset", [0, 1])
def test_fp64_stays_fp64(inputs: tuple[torch.Tensor, torch.Tensor], offset: int) -> None:
    hidden, weight = (tensor.double() for tensor in inputs)
    expected = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + offset)
    actual = (offset_rms_norm if offset else rms_norm)(hidden, weight, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def test_gemma_in_bf16_equals_transformers(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, weight = (tensor.bfloat16() for tensor in inputs)
    theirs = Gemma3RMSNorm(48, eps=1e-6).bfloat16()
    theirs.weight.data.copy_(weight)
    actual = offset_rms_norm(hidden, weight, 1e-6)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, theirs(hidden), rtol=2**-8, atol=0)
    assert (actual == theirs(hidden)).float().mean() > 0.99


def test_bf16_is_within_a_rounding_of_transformers(
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight = (tensor.bfloat16() for tensor in inputs)
    theirs = LlamaRMSNorm(48, eps=1e-5).bfloat16()
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-5), theirs(hidden), rtol=2**-7, atol=0)
