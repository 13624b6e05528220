"""A frozen matrix and its adapter as one node: against the formula, and where it is not used."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recipe_lib.adapters import layers
from recipe_lib.adapters.layers import AdaptedMatrix, AdapterSettings, adapt
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.low_precision import use_low_precision
from recipe_lib.ops.kept_tensors import KeptTensors
from tests.memory.live_bytes import LiveBytes

IN = 128
OUT = 64
RANK = 6
SCALING = 1.5


def build_adapted(
    quantize: str = "none",
    dtype: torch.dtype = torch.float64,
    dora: bool = False,
    dropout: float = 0.0,
    adapter_dtype: torch.dtype | None = None,
) -> Any:
    """Return an adapted linear with a bias, in training mode, and moved adapters."""
    generator = torch.Generator().manual_seed(3)
    settings = AdapterSettings(RANK, SCALING, dropout, dora=dora, dtype=adapter_dtype or dtype)
    linear: Any = adapt(nn.Linear(IN, OUT, device="meta", dtype=dtype), settings, quantize)
    linear.to_empty(device="cpu").requires_grad_(False)
    weight = torch.randn(OUT, IN, generator=generator, dtype=torch.float64).to(dtype)
    if quantize == "none":
        linear.weight.copy_(weight)
    else:
        linear.fill_weight(lambda start, stop, columns: weight[start:stop, columns])
    for name, parameter in linear.named_parameters():
        if name == "bias" or "lora" in name:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values)
            parameter.requires_grad_("lora" in name)
    return linear.train()


def make_hidden(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*shape, IN, generator=generator, dtype=torch.float64).to(dtype)


def is_one_node(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "GradientNodeBackward"


def differentiate(linear: Any, hidden: Tensor, scale: Tensor) -> list[Tensor]:
    """Return the output and the gradients of hidden, A and B, for a loss `(output * scale).sum`."""
    output = linear(hidden)
    trained = (hidden, linear.lora_A.weight, linear.lora_B.weight)
    return [output, *torch.autograd.grad((output * scale).sum(), trained)]


def compute_formula(
    weight: Tensor, linear: AdaptedMatrix, hidden: Tensor, scale: Tensor
) -> list[Tensor]:
    """Return what `differentiate` does, by the formula in fp64."""
    rows = hidden.double().reshape(-1, IN)
    out_rows = scale.double().reshape(-1, OUT)
    lora_a = linear.lora_A.weight.double()
    lora_b = linear.lora_B.weight.double()
    matrix = weight.double() + SCALING * lora_b @ lora_a
    assert linear.bias is not None
    return [
        (rows @ matrix.t() + linear.bias.double()).view(*hidden.shape[:-1], OUT),
        (out_rows @ matrix).view(hidden.shape),
        SCALING * (out_rows @ lora_b).t() @ rows,
        SCALING * out_rows.t() @ (rows @ lora_a.t()),
    ]


@pytest.mark.parametrize("shape", [(7,), (2, 5), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize(
    ("quantize", "dtype", "tolerance"),
    [
        ("none", torch.float64, 1e-13),
        ("nf4", torch.float32, 1e-6),
        ("int8", torch.float32, 1e-6),
        ("none", torch.bfloat16, 2**-6),
        ("nf4", torch.bfloat16, 2**-6),
    ],
)
def test_output_and_gradients_are_those_of_the_formula(
    quantize: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
) -> None:
    linear = build_adapted(quantize, dtype)
    hidden = make_hidden(dtype, *shape).requires_grad_()
    scale = torch.randn(*shape, OUT, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight = linear.weight if quantize == "none" else linear.dequantize_weight()
    assert is_one_node(linear(hidden))
    found = differentiate(linear, hidden, scale)
    for mine, wanted in zip(found, compute_formula(weight, linear, hidden, scale), strict=True):
        assert mine.dtype == dtype and mine.shape == wanted.shape
        assert (mine.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_hidden_states_that_are_no_block_of_memory() -> None:
    linear = build_adapted()
    hidden = make_hidden(torch.float64, 5, 2).transpose(0, 1).requires_grad_()
    scale = torch.ones(1, 1, OUT, dtype=torch.float64).expand(2, 5, OUT)
    found = differentiate(linear, hidden, scale)
    for mine, wanted in zip(
        found, compute_formula(linear.weight, linear, hidden, scale), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-11)


def test_in_bf16_it_rounds_no_more_than_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = build_adapted(dtype=torch.bfloat16)
    hidden = make_hidden(torch.bfloat16, 64).requires_grad_()
    scale = torch.ones(64, OUT, dtype=torch.bfloat16)
    wanted = compute_formula(linear.weight, linear, hidden, scale)
    one = differentiate(linear, hidden, scale)
    monkeypatch.setattr(layers, "can_add_in_place", lambda *_: False)
    several = differentiate(linear, hidden, scale)
    for mine, theirs, exact in zip(one, several, wanted, strict=True):
        error = (mine.double() - exact).square().sum()
        assert error <= (theirs.double() - exact).square().sum()


def test_what_a_graph_needs_twice_stays_as_it_was() -> None:
    linear = build_adapted()
    hidden = make_hidden(torch.float64, 2, 5).requires_grad_()
    output = linear(hidden)
    trained = (hidden, linear.lora_A.weight, linear.lora_B.weight)
    first, second = (
        torch.autograd.grad(output.sum(), trained, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(mine, again) for mine, again in zip(first, second, strict=True))


def test_hidden_states_without_a_gradient() -> None:
    linear = build_adapted()
    hidden = make_hidden(torch.float64, 2, 5)
    output = linear(hidden)
    grads = torch.autograd.grad(output.sum(), (linear.lora_A.weight, linear.lora_B.weight))
    scale = torch.ones_like(output)
    wanted = compute_formula(linear.weight, linear, hidden, scale)[2:]
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


class _CountCalls(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def _train_bias(linear: Any) -> None:
    linear.bias.requires_grad_()


@pytest.mark.parametrize(
    ("settings", "change", "context"),
    [
        ({"dropout": 0.5}, None, nullcontext),
        ({"dora": True}, None, nullcontext),
        ({"adapter_dtype": torch.float64}, None, nullcontext),
        ({}, _train_bias, nullcontext),
        ({}, None, _CountCalls),
        ({}, None, lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
    ids=["dropout", "dora", "fp32 adapter", "trained bias", "function mode", "autocast"],
)
def test_where_something_stands_between_they_are_nodes_of_their_own(
    settings: dict[str, Any],
    change: Callable[[Any], None] | None,
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    linear = build_adapted(dtype=torch.float32, **settings)
    if change is not None:
        change(linear)
    with context():
        output = linear(make_hidden(torch.float32, 2, 5).requires_grad_())
    output.sum().backward()
    assert not is_one_node(output)
    assert linear.bias.requires_grad == (linear.bias.grad is not None)


def test_a_layer_whose_calls_are_noted_has_one_node() -> None:
    """As a layer of transformers has it, which `memory.recompute_cheap` records by a mode."""
    linear = build_adapted(dtype=torch.float32)
    hidden = make_hidden(torch.float32, 2, 5).requires_grad_()
    plain = linear(hidden)
    with KeptTensors().layer(notes_calls=True):
        output = linear(hidden)
    assert is_one_node(output) and torch.equal(output, plain)


def test_a_lever_that_multiplies_otherwise_is_used() -> None:
    linear = build_adapted(dtype=torch.float32)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(linear)])})
    hidden = make_hidden(torch.float32, 2, 5).requires_grad_()
    plain = linear(hidden)
    use_low_precision(model, "int8")
    rounded = linear(hidden)
    assert not is_one_node(rounded) and not torch.equal(plain, rounded)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointed_layers_have_the_same_gradients(mode: str) -> None:
    """Selective checkpointing keeps results of matmuls, into which nothing may be added."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = build_adapted()
            self.back = nn.Linear(OUT, IN, dtype=torch.float64).requires_grad_(False)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.back(torch.tanh(self.up(hidden)))

    torch.manual_seed(0)
    layer = Layer()
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    hidden = make_hidden(torch.float64, 2, 5).requires_grad_()
    trained = (hidden, layer.up.lora_A.weight, layer.up.lora_B.weight)
    wanted = torch.autograd.grad(layer(hidden).sum(), trained)
    apply_activation_checkpointing(model, mode)
    found = torch.autograd.grad(layer(hidden).sum(), trained)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_neither_forward_nor_backward_holds_the_adapters_product() -> None:
    """Nodes of their own have it beside the frozen product, and the sum of both."""
    linear = build_adapted(dtype=torch.float32)
    rows = 512
    hidden = make_hidden(torch.float32, rows).requires_grad_()
    grad = torch.ones(rows, OUT)
    narrow_bytes = rows * RANK * 4
    with LiveBytes() as live:
        output = linear(hidden)
    assert live.peak == rows * OUT * 4 + narrow_bytes
    with LiveBytes() as live:
        output.backward(grad)
    adapter_bytes = (IN + OUT) * RANK * 4
    assert live.peak <= rows * IN * 4 + narrow_bytes + adapter_bytes
