"""Which linears multiply in 8 bits, and that it goes together with checkpointing, adapters and
compilation.
"""

from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import (
    apply_activation_checkpointing,
    compile_layers,
    low_precision,
    use_low_precision,
)
from recipe_lib.models import build_meta
from recipe_lib.ops.head_losses import CrossEntropy
from tests.ops.test_low_precision import has_fp8_on_a_cpu
from tests.parallel.small_models import build_small_spec, make_small_batch, read_gradients

CPU = torch.device("cpu")


def model_of(
    dtype: torch.dtype = torch.float32, lora: bool = False, quantize: str = "none"
) -> nn.Module:
    model = build_meta(build_small_spec(layers=2), dtype)
    if lora or quantize != "none":
        add_adapters(model, LoraConfig(rank=4, alpha=2.0, quantize_base=quantize), dtype)
    return model


def trained(
    model: nn.Module, checkpointing: str = "none", compiled: bool = False
) -> tuple[float, dict[str, Any]]:
    """Mean loss of the small batch, and gradients."""
    apply_activation_checkpointing(model, checkpointing)
    if compiled:
        compile_layers(model, "eager")
    model.to_empty(device=CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1)
            )
    tokens, labels = make_small_batch()
    loss = model(tokens, labels=labels, head_loss=CrossEntropy(3)) / (labels != -100).sum()
    loss.backward()
    return float(loss.detach()), read_gradients(model)


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of all gradients together, as a share of their length."""
    assert found.keys() == wanted.keys()
    return float(
        torch.cat([(found[name] - wanted[name]).flatten() for name in found]).norm()
        / torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    )


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the second operand of each product in 8 bits."""
    seen: list[tuple[int, int]] = []
    original = low_precision.scaled_mm

    def noted(left: torch.Tensor, right: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        seen.append(tuple(right.shape))
        return original(left, right, *args, **settings)

    monkeypatch.setattr(low_precision, "scaled_mm", noted)
    return seen


def test_the_layers_linears_and_nothing_else(products: list[tuple[int, int]]):
    """Seven linears a layer, three products each; head, embedding and norms are as ever. Losses are
    close.
    """
    exact, wanted = trained(model_of())
    assert not products
    model = model_of()
    names = [name for name, _ in model.named_parameters()]
    use_low_precision(model, "int8", CPU)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(
        type(module) is nn.Linear
        for name, module in model.named_modules()
        if name.endswith("_proj")
    )
    loss, found = trained(model)
    assert len(products) == 2 * 7 * 3
    assert all(512 not in shape for shape in products)  # the vocabulary
    assert 0 < abs(loss - exact) < 0.01 * exact
    assert 0 < distance(found, wanted) < 0.1


def test_frozen_weights_have_two_products_and_adapters_none(products: list[tuple[int, int]]):
    exact, wanted = trained(model_of(lora=True))
    model = model_of(lora=True)
    use_low_precision(model, "int8", CPU)
    loss, found = trained(model)
    # Of a first layer's query, key and value no input needs a gradient: the embedding is frozen.
    assert len(products) == 2 * 7 * 2 - 3
    assert abs(loss - exact) < 0.01 * exact
    assert 0 < distance(found, wanted) < 0.1


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointed_layers_find_the_same_numbers(checkpointing: str):
    loss, wanted = trained(_int8(model_of()))
    again, found = trained(_int8(model_of()), checkpointing)
    assert loss == again and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_compiled_layers_find_the_same_numbers():
    loss, wanted = trained(_int8(model_of()))
    again, found = trained(_int8(model_of()), compiled=True)
    assert again == pytest.approx(loss, rel=1e-5)
    assert distance(found, wanted) < 1e-3


def _int8(model: nn.Module) -> nn.Module:
    use_low_precision(model, "int8", CPU)
    return model


@pytest.mark.skipif(not has_fp8_on_a_cpu(), reason="no FP8 product on a CPU")
def test_fp8_of_a_bf16_model(monkeypatch: pytest.MonkeyPatch):
    """A CPU has the product, slowly, and is refused; here it stands for a GPU."""
    monkeypatch.setattr("recipe_lib.memory.low_precision._check_fp8", lambda device: None)
    exact, _ = trained(model_of(torch.bfloat16))
    model = model_of(torch.bfloat16)
    use_low_precision(model, "fp8", CPU)
    loss, found = trained(model)
    assert abs(loss - exact) < 0.03 * exact
    assert all(
        gradient.dtype == torch.bfloat16 and gradient.isfinite().all()
        for gradient in found.values()
    )


def test_what_cannot_be_is_refused_in_a_line():
    with pytest.raises(
        ConfigError, match="^matmul_dtype: found fp8 on a CPU, expected a GPU of compute capability"
    ):
        use_low_precision(model_of(), "fp8", CPU)
    with pytest.raises(
        ConfigError, match="^matmul_dtype: found int8 for weights that are kept in nf4"
    ):
        use_low_precision(model_of(torch.bfloat16, quantize="nf4"), "int8", CPU)
    model = model_of()
    use_low_precision(model, None, CPU)
    assert all(type(module).forward is nn.Linear.forward and "forward" not in vars(module)
               for module in model.modules() if type(module) is nn.Linear)  # fmt: skip
