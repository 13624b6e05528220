"""Products of operands rounded to 8 bits: against fp64 within what rounding theory says, and
against torchao's.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.memory import low_precision
from recipe_lib.memory.low_precision import KINDS, quantize_rows, scaled_linear, scaled_mm
from recipe_lib.ops import fused_kernels
from recipe_lib.ops.deferred import defer_weight_gradients, enable_split_backward
from tests.torchao_oracle import convert, round_rows

# none a multiple of 16 but one
TOKENS = 37
IN = 80
OUT = 53


def has_fp8_on_a_cpu() -> bool:
    """Whether this release of torch has the product of rows with scales of their own there."""
    one, scales = torch.zeros(32, 16, dtype=torch.float8_e4m3fn), torch.ones(32, 1)
    try:
        torch._scaled_mm(one, one.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


FP8 = pytest.param(
    "fp8", marks=pytest.mark.skipif(not has_fp8_on_a_cpu(), reason="no FP8 product on a CPU")
)
PRODUCTS = ["int8", FP8]


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden `[.., i]`, weight, bias, gradient; with rows and columns of very different size."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        sizes = torch.exp(2 * torch.randn(shape[0], 1, generator=generator))
        return (torch.randn(*shape, generator=generator) * sizes).to(dtype)

    return (
        made(TOKENS, IN).view(1, TOKENS, IN),
        made(OUT, IN),
        made(OUT, 1).flatten(),
        made(TOKENS, OUT),
    )


def step_of(matrix: Tensor, kind: str) -> Tensor:
    """By how much each entry of a matrix may be off when it is rounded row by row, fp64."""
    wide = matrix.double().abs()
    step = wide.amax(dim=1, keepdim=True) / low_precision.LARGEST_CODE[kind]
    if kind == "int8":
        return (step / 2).expand_as(wide)
    return torch.maximum(
        wide / 16, step * 2**-10
    )  # 3 bits of mantissa; below 2^-6 of a step subnormal numbers


@pytest.mark.parametrize("kind", PRODUCTS)
def test_tokens_without_a_gradient_scale_no_gradient_of_the_weight(kind: str):
    """Such as padding, however large: the gradient is that without them, to the bit."""
    dtype = torch.bfloat16 if kind == "fp8" else torch.float32
    hidden, weight, _, gradient = operands(dtype)
    padding = 1e4 * torch.ones(1, 11, IN, dtype=dtype)
    found = []
    for rows, slopes in (
        (hidden, gradient),
        (torch.cat([hidden, padding], dim=1), F.pad(gradient, (0, 0, 0, 11))),
    ):
        parameter = torch.nn.Parameter(weight.clone())
        (scaled_linear(rows, parameter, None, kind)[0] * slopes).sum().backward()
        found.append(parameter.grad)
    assert torch.equal(*found) and found[0].abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_ones_of_their_rows(kind: str):
    matrix = operands()[0][0]
    matrix[3] = 0
    codes, scales = quantize_rows(matrix, kind)
    assert (
        codes.shape == (48, 80)
        and codes.dtype == low_precision._TYPES[kind]
        and scales.dtype == torch.float32
    )
    assert torch.equal(codes[TOKENS:].float(), torch.zeros(48 - TOKENS, IN))
    back = codes[:TOKENS].double() * scales.double().unsqueeze(1)
    assert ((back - matrix).abs() <= step_of(matrix, kind) * (1 + 1e-5)).all()
    assert torch.equal(back[3], torch.zeros(IN, dtype=torch.float64))
    assert (
        codes[:TOKENS].float().abs().amax(dim=1) == low_precision.LARGEST_CODE[kind]
    ).sum() == TOKENS - 1


@pytest.mark.parametrize("kind", PRODUCTS)
def test_errors_are_those_that_rounding_makes(kind: str):
    """Each entry within the sum of all steps; all together as large as independent, uniform errors
    would be.
    """
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.randn(64, 512, generator=generator),
        torch.randn(96, 512, generator=generator),
    )
    exact = left.double() @ right.double().t()
    error = (scaled_mm(left, right, kind).double() - exact).abs()
    one, other = step_of(left, kind), step_of(right, kind)
    most = one @ right.double().abs().t() + left.double().abs() @ other.t() + one @ other.t()
    rounding = 2**-8 * exact.abs() if kind == "fp8" else 1e-5 * most  # of the result: bf16 and fp32
    assert (error <= most + rounding).all()
    if kind == "int8":
        expected = (
            ((one**2) @ right.double().t() ** 2 + left.double() ** 2 @ (other**2).t())
            .div(3)
            .mean()
            .sqrt()
        )
        assert 0.9 < error.square().mean().sqrt() / expected < 1.1
    assert (
        error.square().mean().sqrt() / exact.square().mean().sqrt()
        < {"int8": 0.011, "fp8": 0.045}[kind]
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int8", torch.float32),
        ("int8", torch.bfloat16),
        pytest.param("fp8", torch.bfloat16, marks=FP8.marks),
    ],
)
def test_gradients_are_products_of_the_rounded_operands(kind: str, dtype: torch.dtype):
    """The three products, from fp64 operands that were rounded by hand along the right
    dimension.
    """

    def rounded(matrix: Tensor) -> Tensor:
        codes, scales = quantize_rows(matrix, kind)
        return codes[: matrix.shape[0], : matrix.shape[1]].double() * scales.double().unsqueeze(1)

    hidden, weight, bias, gradient = operands(dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    out = scaled_linear(*leaves, kind)
    out.backward(gradient.unsqueeze(0))
    flat = hidden[0]
    expected = [
        (rounded(flat) @ rounded(weight).t() + bias.double(), out[0]),
        (rounded(gradient) @ rounded(weight.t().contiguous()).t(), leaves[0].grad[0]),
        (rounded(gradient.t().contiguous()) @ rounded(flat.t().contiguous()).t(), leaves[1].grad),
        (gradient.double().sum(dim=0), leaves[2].grad),
    ]
    for exact, found in expected:
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() <= exact.abs().max() * (
            2**-7 if dtype == torch.bfloat16 else 1e-5
        )


@pytest.mark.parametrize(
    ("kind", "dtype"), [("int8", torch.float32), ("fp8", torch.float32), ("fp8", torch.bfloat16)]
)
def test_codes_are_torchaos(kind: str, dtype: torch.dtype):
    """INT8 to the bit; FP8's scales to the last bit, which torchao takes in fp64, and its codes but
    for ties.

    INT8 of bf16 is another matter: there torchao rounds the scales themselves to bf16.
    """
    matrix = torch.cat(
        [
            operands(dtype)[0][0],
            torch.randn(64, IN, generator=torch.Generator().manual_seed(3)).to(dtype),
        ]
    )
    codes, scales = quantize_rows(matrix, kind)
    expected, others = round_rows(matrix, kind)
    differ = (codes[: len(matrix), :IN].float() != expected.float()).double().mean()
    assert differ == 0 if kind == "int8" else differ < 1e-3
    torch.testing.assert_close(scales, others, rtol=0 if kind == "int8" else 2**-22, atol=0)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", torch.float32), pytest.param("fp8", torch.bfloat16, marks=FP8.marks)],
)
def test_torchao_finds_the_same(kind: str, dtype: torch.dtype):
    """Output and the input's gradient of INT8 to the bit; the weight's is scaled in another
    order.
    """
    hidden, weight, _, gradient = operands(dtype)
    options = (
        {"emulate": True} if kind == "fp8" else {}
    )  # a CPU's product takes no rows of other lengths
    theirs, other = converted(weight, kind, **options), hidden.clone().requires_grad_()
    expected = theirs(other)
    expected.backward(gradient.unsqueeze(0))
    mine, own = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = scaled_linear(mine, own, None, kind)
    out.backward(gradient.unsqueeze(0))
    for found, wanted in ((out, expected), (mine.grad, other.grad), (own.grad, theirs.weight.grad)):
        off = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert off <= (1e-6 if dtype == torch.float32 else 2**-8)
    if kind == "int8":
        assert torch.equal(out, expected) and torch.equal(mine.grad, other.grad)


def converted(weight: Tensor, kind: str, **options: Any) -> Any:
    """A linear that torchao has converted."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = torch.nn.Parameter(weight.clone())
    return convert(torch.nn.Sequential(linear), kind, None, **options)[0]


@pytest.mark.parametrize("kind", PRODUCTS)
def test_in_bf16_ours_are_nearer_to_the_product_of_the_codes(kind: str):
    """torchao rounds INT8's scales, and FP8's products before they are scaled, to bf16: one
    rounding more than ours.
    """
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(rows, 512, generator=generator).bfloat16() for rows in (64, 96))
    gradient = torch.randn(64, 96, generator=generator).bfloat16()

    def rounded(matrix: Tensor) -> Tensor:
        codes, scales = quantize_rows(matrix, kind)
        return codes[: matrix.shape[0], : matrix.shape[1]].double() * scales.double().unsqueeze(1)

    exact = rounded(gradient) @ rounded(weight.t().contiguous()).t()
    theirs, other = converted(weight, kind), hidden.clone().requires_grad_()
    theirs(other).backward(gradient)
    mine = hidden.clone().requires_grad_()
    scaled_linear(mine, weight, None, kind).backward(gradient)
    ours, torchaos = (
        (grad.double() - exact).norm() / exact.norm() for grad in (mine.grad, other.grad)
    )
    assert ours < 0.002 < torchaos


@pytest.mark.parametrize("kind", PRODUCTS)
def test_gradients_can_be_deferred_and_frozen_weights_have_none(kind: str):
    hidden, weight, bias, gradient = operands(torch.bfloat16)
    at_once = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    scaled_linear(*at_once, kind).backward(gradient.unsqueeze(0))
    later_on = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    with enable_split_backward():
        out = scaled_linear(*later_on, kind)
        with defer_weight_gradients() as later:
            out.backward(gradient.unsqueeze(0))
        assert later_on[1].grad is None and len(later) == 1
        later.pop().run()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(at_once, later_on, strict=True)
    )
    frozen = hidden.clone().requires_grad_()
    out = scaled_linear(frozen, weight, None, kind)
    assert [tensor is None for tensor in out.grad_fn.saved_tensors] == [
        True,
        False,
    ]  # its input is not kept
    out.backward(gradient.unsqueeze(0))
    assert torch.equal(frozen.grad, at_once[0].grad)


def test_long_sums_do_not_overflow(monkeypatch: pytest.MonkeyPatch):
    ones = torch.ones(1, low_precision._LONGEST_SUM + 32)
    assert scaled_mm(ones, ones, "int8").item() == pytest.approx(ones.shape[1], rel=1e-6)
    hidden, weight = operands()[0][0], operands()[1]
    whole = scaled_mm(hidden, weight, "int8")
    monkeypatch.setattr(low_precision, "_LONGEST_SUM", 32)
    monkeypatch.setattr(low_precision, "_PIECE_ELEMENTS", 200)
    assert torch.allclose(scaled_mm(hidden, weight, "int8"), whole, rtol=1e-6)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(kind: str, value: float):
    hidden, weight = operands(torch.bfloat16)[:2]
    hidden[0, 5, 7] = value
    finite = scaled_linear(hidden, weight, None, kind).isfinite()[0]
    assert not finite[5].any() and finite[:5].all() and finite[6:].all()
    assert F.linear(hidden, weight)[0, 5].isfinite().sum() == 0


def test_one_compilation_serves_all_callers_of_a_device_that_compiles(
    monkeypatch: pytest.MonkeyPatch,
):
    """Weights that are trained, and frozen, in forward and backward, at several lengths: strides
    alone tell apart.
    """
    from torch._dynamo.testing import CompileCounter

    counters = {name: CompileCounter() for name in ("_quantize_unchunked", "_scale_unchunked")}
    made = {
        name: torch.compile(getattr(low_precision, name), dynamic=True, backend=counter)
        for name, counter in counters.items()
    }
    monkeypatch.setattr(low_precision, "can_compile", lambda tensor: True)
    monkeypatch.setattr(fused_kernels, "get_compiled", lambda function: made[function.__name__])
    torch._dynamo.reset()
    hidden, weight, _, _ = operands(torch.bfloat16)
    for trained in (True, False):
        parameter = torch.nn.Parameter(weight.clone(), requires_grad=trained)
        for length in (TOKENS, 2 * TOKENS, 64):
            rows = hidden.flatten(0, -2).repeat(3, 1)[:length].requires_grad_()
            scaled_linear(rows, parameter, None, "int8").sum().backward()
        with torch.no_grad():
            scaled_linear(hidden, parameter, None, "int8")
    assert counters["_quantize_unchunked"].frame_count <= 4
    assert counters["_scale_unchunked"].frame_count <= 5
