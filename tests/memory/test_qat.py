"""Rounded linears against torchao's own on a model of transformers, a formula in float64, and what
they go with.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipe_lib.adapters import add_adapters
from recipe_lib.adapters.layers import AdaptedLinear, AdapterSettings
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.models import build_meta
from recipe_lib.ops.deferred import enable_split_backward
from tests import torchao_oracle
from tests.memory.test_matmul_dtype import CPU, distance, model_of, trained
from tests.parallel.small_models import (
    VOCABULARY,
    build_small_spec,
    make_small_batch,
    read_gradients,
)
from tests.selection import mark_slow_except

GROUP = 16
STEPS_OF = {
    "int4": (7.5, -8, 7),
    "int8": (127.5, -128, 127),
}  # of a group's largest magnitude; least and largest code


def codes_and_scales(matrix: Tensor, kind: str, group_size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return the codes `[o, groups, g]` of a matrix `[o, i]` before they are clipped, and their
    scales, in float64.
    """
    per_scale, _, _ = STEPS_OF[kind]
    groups = (
        matrix.detach()
        .double()
        .unflatten(1, (-1, group_size if kind == "int4" else matrix.shape[1]))
    )
    # The scale is a number of the matrix's own type.
    scales = (groups.abs().amax(-1, keepdim=True).to(matrix.dtype) / per_scale).double()
    return (groups.to(matrix.dtype) * (1.0 / scales.to(matrix.dtype))).double().round(), scales


def rounded(matrix: Tensor, kind: str, group_size: int = GROUP) -> tuple[Tensor, Tensor]:
    """A matrix `[o, i]` on its grid, in float64, and which of it was not clipped."""
    _, least, largest = STEPS_OF[kind]
    codes, scales = codes_and_scales(matrix, kind, group_size)
    inside = (codes >= least) & (codes <= largest)
    return (codes.clamp(least, largest) * scales).flatten(1), inside.flatten(1)


def clamp_hands_on_at_its_bounds() -> bool:
    """Whether torch's clamp has a gradient where a number equals a bound: of 2.13 it has, of 2.15
    not.
    """
    number = torch.ones(1, requires_grad=True)
    torch.clamp(number, 0, 1).sum().backward()
    assert number.grad is not None
    return bool(number.grad)


def linear_of(
    kind: str, dtype: torch.dtype = torch.float32, lora: bool = False
) -> tuple[Any, FakeQuantization]:
    """One linear as it is in a layer, with a bias, and the switch of its model."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].q_proj = nn.Linear(64, 48, device="meta", dtype=dtype)
    if lora:
        settings = AdapterSettings(
            rank=4, scaling=2.0, dropout=0.0, dora=False, dtype=torch.float32
        )
        model.layers[0].q_proj = AdaptedLinear(model.layers[0].q_proj, settings)
        model.layers[0].q_proj.weight.requires_grad_(False)
    scheme = fake_quantize_linears(model, kind, GROUP, 0)
    model.to_empty(device=CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Sixteenths, so that sums of them and of their products are exact: W + s B A has the
            # same bits everywhere.
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 5).round() / 16)
    assert scheme is not None and scheme.linears == 1
    return model.layers[0].q_proj, scheme


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_loss_and_gradients_are_those_of_torchaos_linears_in_transformers(kind: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = build_small_spec(layers=2)
    model = build_meta(spec, torch.float32)
    assert fake_quantize_linears(model, kind, GROUP, 0)
    loss, found = trained(model)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(model.state_dict())
    torchao_oracle.prepare_linears(theirs, kind, GROUP)
    assert sum(type(module).__name__ == "FakeQuantizedLinear" for module in theirs.modules()) == 14
    tokens, labels = make_small_batch()
    logits = theirs(tokens).logits.flatten(0, 1)
    wanted = F.cross_entropy(logits.float(), labels.flatten(), ignore_index=-100)
    wanted.backward()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
    expected = read_gradients(theirs)
    if (
        not clamp_hands_on_at_its_bounds()
    ):  # the codes at the ends of the range were not clipped: ours get theirs
        for name in [name for name in expected if name.endswith("_proj.weight")]:
            codes, _ = codes_and_scales(theirs.get_parameter(name), kind)
            at_ends = ((codes == STEPS_OF[kind][1]) | (codes == STEPS_OF[kind][2])).flatten(1)
            assert not expected[name][at_ends].any() and at_ends.double().mean() < 0.1
            expected[name] = torch.where(at_ends, found[name], expected[name])
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_weight_is_rounded_as_the_formula_says_and_as_the_export_is(
    kind: str, dtype: torch.dtype
):
    layer, _ = linear_of(kind, dtype)
    eye = torch.eye(64, dtype=dtype)
    with torch.no_grad():
        layer.bias.zero_()
        weight = layer(eye).t()
    wanted, _ = rounded(layer.weight, kind)
    off = (weight.double() - wanted).abs() > 2 * torch.finfo(dtype).eps * wanted.abs()
    assert off.double().mean() < 2e-3  # those that lie halfway between two codes
    theirs = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(64, 48, bias=False, dtype=dtype))})
    theirs.load_state_dict({"layers.0.weight": layer.weight})
    torchao_oracle.export_linears(theirs, kind, GROUP)
    assert type(theirs.layers[0].weight) is not nn.Parameter
    assert torch.equal(theirs.layers(eye).t(), weight)


def test_fp8_rounds_weights_as_the_export_and_inputs_by_token():
    layer, _ = linear_of("fp8")
    hidden = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weight = torchao_oracle.compute_fp8_rows(layer.weight.detach())
    inputs = torchao_oracle.compute_fp8_rows(hidden.detach().flatten(0, 1)).view(3, 5, 64)
    assert not torch.equal(weight, layer.weight) and not torch.equal(inputs, hidden)
    out = layer(hidden)
    assert torch.equal(out, F.linear(inputs, weight) + layer.bias)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)) * 1e-4
    out.backward(gradient)
    assert torch.allclose(hidden.grad, gradient @ weight, rtol=1e-5)
    assert torch.allclose(
        layer.weight.grad, gradient.flatten(0, 1).t() @ inputs.flatten(0, 1), rtol=1e-4, atol=1e-8
    )


def test_torchaos_own_fp8_loses_gradients():
    """Why the gradient of FP8 is handed on here, and no operator of torchao's computes it."""
    theirs = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(64, 48))})
    torchao_oracle.prepare_linears(theirs, "fp8")
    (theirs.layers(torch.randn(5, 64)) * 1e-4).sum().backward()
    assert (theirs.layers[0].weight.grad == 0).double().mean() > 0.9


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_gradients_pass_straight_through_but_for_what_was_clipped(kind: str):
    layer, _ = linear_of(kind)
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    out = layer(hidden)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(gradient)
    weight, inside = rounded(layer.weight, kind)
    assert 0 < (~inside).sum() <= 48 * 64 // (GROUP if kind == "int4" else 64)
    straight = gradient.double().t() @ hidden.detach().double()
    wanted = straight * inside
    assert torch.allclose(layer.weight.grad.double(), wanted, rtol=1e-4, atol=1e-5)
    assert (hidden.grad.double() - gradient.double() @ weight).norm() < 1e-3 * hidden.grad.norm()
    assert torch.allclose(layer.bias.grad, gradient.sum(0))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_base_and_adapter_are_rounded_as_one(kind: str):
    layer, _ = linear_of(kind, lora=True)
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    first, second = layer.lora_A.weight, layer.lora_B.weight
    merged = layer.weight.double() + 2.0 * second.detach().double() @ first.detach().double()
    weight, inside = rounded(merged.float(), kind)
    out = layer(hidden)
    assert (
        out.double() - hidden.double() @ weight.t() - layer.bias.double()
    ).norm() < 1e-3 * out.norm()
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(gradient)
    of_weight = (gradient.double().t() @ hidden.detach().double()) * inside
    assert torch.allclose(
        first.grad.double(), 2.0 * second.detach().double().t() @ of_weight, rtol=1e-3, atol=1e-3
    )
    assert torch.allclose(
        second.grad.double(), 2.0 * of_weight @ first.detach().double().t(), rtol=1e-3, atol=1e-3
    )
    assert layer.weight.grad is None
    layer.is_off = True
    assert torch.equal(layer(hidden), F.linear(hidden, layer.weight, layer.bias))


@pytest.mark.parametrize("lora", [False, True])
def test_steps_before_the_start_are_not_rounded(lora: bool):
    exact, wanted = trained(model_of(lora=lora))
    model = model_of(lora=lora)
    names = [name for name, _ in model.named_parameters()]
    scheme = fake_quantize_linears(model, "int4", GROUP, 3)
    assert scheme and [name for name, _ in model.named_parameters()] == names
    assert scheme.is_on  # of a plan, which knows no steps
    for step, is_on in ((0, False), (2, False), (3, True), (None, True), (2, False)):
        scheme.begin(step)
        assert scheme.is_on is is_on
    with enable_split_backward():
        loss, found = trained(model)
    assert loss == exact and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (
        scheme.describe()
        == "qat: 14 linears computed in int4, a scale for 16 weights, from step 4 on"
    )


@pytest.mark.parametrize(
    "case",
    mark_slow_except(
        [("int4", True), ("fp8", False), ("int8", True)], [("int4", True), ("fp8", False)]
    ),
    ids=str,
)
def test_checkpointed_and_compiled_layers_find_the_same_numbers(case: tuple[str, bool]):
    kind, lora = case

    def model() -> nn.Module:
        made = model_of(lora=lora)
        fake_quantize_linears(made, kind, GROUP, 0)
        return made

    loss, wanted = trained(model())
    for settings in (("full",), ("selective",), ("none", True)):
        again, found = trained(model(), *settings)
        assert loss == again and distance(found, wanted) < 1e-6, settings


@pytest.mark.slow
def test_compiled_code_rounds_to_the_same_codes():
    """Fused by inductor, every hundredth weight of bf16 would have another code than the export."""
    layer, _ = linear_of("int8", torch.bfloat16, lora=True)
    with torch.no_grad():
        layer.weight.normal_(std=0.02)
        layer.bias.zero_()
    hidden = torch.eye(64, dtype=torch.bfloat16)
    results = []
    for forward in (layer, torch.compile(layer)):
        layer.zero_grad()
        out = forward(hidden)
        out.square().sum().backward()
        results.append((out.detach(), layer.lora_A.weight.grad, layer.lora_B.weight.grad))
    (out, *wanted), (found, *others) = results
    assert torch.equal(out, found)
    assert all(
        (one - other).norm() < 1e-2 * one.norm() for one, other in zip(wanted, others, strict=True)
    )


@pytest.mark.slow
def test_torchao_does_what_is_reported(capsys: pytest.CaptureFixture[str]):
    page = Path(__file__).parents[2] / "docs" / "upstream" / "float8_fake_quantizer.md"
    runpy.run_path(str(page.with_suffix(".py")), run_name="__main__")
    (printed,) = re.findall(
        r"It printed:\n\n```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    version, *found = capsys.readouterr().out.splitlines()
    assert found == printed.splitlines()[1:], (
        f"{version} does otherwise: note it in {page}, and see _RoundedLinear"
    )


def test_no_rounded_weight_is_kept_for_backward():
    """What autograd keeps of a linear is its input and the weight itself."""
    layer, _ = linear_of("int4")
    kept: list[Tensor] = []
    hidden = torch.randn(7, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        layer(hidden)
    assert {tensor.data_ptr() for tensor in kept} <= {hidden.data_ptr(), layer.weight.data_ptr()}


def test_what_cannot_be_is_refused_in_a_line():
    assert fake_quantize_linears(model_of(), None, 32, 0) is None
    with pytest.raises(
        ConfigError,
        match=r"^qat_group_size: found 24 for model.layers.0.self_attn.q_proj, whose rows",
    ):
        fake_quantize_linears(model_of(), "int4", 24, 0)
    with pytest.raises(ConfigError, match="^qat: found int8 for weights that are kept in nf4"):
        fake_quantize_linears(model_of(torch.bfloat16, quantize="nf4"), "int8", 32, 0)
    adapted = build_meta(build_small_spec(layers=1), torch.float32)
    add_adapters(
        adapted, LoraConfig(rank=4, alpha=8.0, target_modules=["embedding"]), torch.float32
    )
    assert fake_quantize_linears(adapted, "int8", 32, 0)
