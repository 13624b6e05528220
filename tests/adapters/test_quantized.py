"""Quantized linears on one process: torchao's numbers, what they compute, what they keep, and their
size.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from recipe_lib.adapters import add_adapters, init_adapters, nf4
from recipe_lib.adapters.quantized import QuantizedLinear, can_quantize, fake_quantize_weight
from recipe_lib.config.schema import LoraConfig
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta, init_weights
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import build_small_spec
from tests.torchao_oracle import get_nf4_class

DTYPES = [torch.float32, torch.bfloat16]
# [out, in]: 64 numbers in all; blocks that end within rows; 172 and 1089 blocks, which 256 does not
# divide; 65,536.
SHAPES = [(1, 64), (64, 172), (172, 64), (1089, 64), (256, 512), (8, 96)]


def quantized(weight: Tensor, kind: str, bias: Tensor | None = None) -> QuantizedLinear:
    """The weight in a module of its own."""
    linear = nn.Linear(
        weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype
    )
    module = QuantizedLinear(linear, kind).to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.untyped_storage().fill_(0x5A)  # nothing may be left of it
    module.fill_weight(lambda start, stop, columns: weight[start:stop, columns])
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def random_weight(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand((shape[0], 1), generator=generator) + 0.1
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def assert_same_as_torchao(weight: Tensor) -> None:
    """Every bit that is stored, and every number that comes back."""
    scaler_block = 256
    while (weight.numel() // nf4.BLOCK) % scaler_block:
        scaler_block //= 2
    theirs = get_nf4_class().from_tensor(weight, nf4.BLOCK, scaler_block)
    module = quantized(weight, "nf4")
    assert torch.equal(module.weight_codes.view(torch.uint8).flatten(), theirs.quantized_data)
    assert module.weight_scales is not None
    assert torch.equal(module.weight_scales.view(torch.int8), theirs.quantized_scalers)
    assert torch.equal(module.weight_factors[:-1], theirs.quantization_factor.float())
    assert torch.equal(module.weight_factors[-1], theirs.scaler_mean.float())
    assert torch.equal(module.dequantize_weight(), theirs.get_original_weight())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_weights_are_torchaos_nf4(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if shape == (1, 64):  # one block: its scale is the mean, and torchao divides zero by zero
        whole = fake_quantize_weight(random_weight(shape, dtype), "nf4")
        assert (
            whole.isfinite().all() and whole.abs().max() == random_weight(shape, dtype).abs().max()
        )
        return
    assert_same_as_torchao(random_weight(shape, dtype))


def test_every_bf16_and_the_fp32_around_borders_get_torchaos_level() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.abs() <= 1]
    middles = (torch.tensor(nf4.LEVELS[1:]) + torch.tensor(nf4.LEVELS[:-1])) / 2
    steps = torch.arange(-200, 201, dtype=torch.int32)
    around = (middles.view(torch.int32).unsqueeze(1) + steps).view(torch.float32).flatten()
    for values in (every, around):
        levels = torch.tensor(nf4.LEVELS, dtype=values.dtype)
        expected = get_nf4_class().quantize_tensor_nearest(values, levels)
        pairs = torch.stack(
            [values, torch.ones_like(values)], dim=1
        )  # with a 1 every number is its own share
        blocks = F.pad(pairs, (0, nf4.BLOCK - 2))
        assert torch.equal(nf4.quantize_blocks(blocks)[0][:, 0].long(), expected << 4 | 15)
    assert expected.unique().tolist() == list(range(16))


def test_levels_are_the_formulas_but_for_their_rounding() -> None:
    """Beside the codebook in fp32, which bitsandbytes has; the figures of docs/adapters.md."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    ends = [torch.linspace(0.9677083, 0.5, count, dtype=torch.float64)[:-1] for count in (8, 9)]
    formula = torch.cat(
        [-normal.icdf(ends[0]), torch.zeros(1, dtype=torch.float64), normal.icdf(ends[1])]
    )
    formula = (formula / formula.abs().max()).sort().values.float()
    levels = torch.tensor(nf4.LEVELS, dtype=torch.bfloat16).float()
    assert float((formula - levels).abs().max()) == pytest.approx(0.0016, abs=5e-5)
    assert int((formula != levels).sum()) == 13
    blocks = (
        torch.randn(4096, nf4.BLOCK, generator=torch.Generator().manual_seed(0))
        .to(torch.bfloat16)
        .float()
    )
    scales = blocks.abs().amax(1, keepdim=True)
    shares = (blocks / scales).unsqueeze(-1)
    values = [
        (table[(shares - table).abs().argmin(-1)] * scales).to(torch.bfloat16)
        for table in (formula, levels)
    ]
    assert float((values[0] != values[1]).float().mean()) == pytest.approx(0.21, abs=0.005)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_weights_are_torchaos_nf4(realdata: Path, dtype: torch.dtype) -> None:
    weights = load_file(realdata / "stories260K-hf" / "model.safetensors")
    matrices = {
        name: weight for name, weight in weights.items() if ".layers." in name and weight.dim() == 2
    }
    assert len(matrices) == 35
    for weight in matrices.values():
        assert_same_as_torchao(weight.to(dtype))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("piece", [64, 512])
def test_the_size_of_the_pieces_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str, piece: int
) -> None:
    weight = random_weight((70, 96), torch.bfloat16)
    whole = quantized(weight, kind)
    expected = whole.dequantize_weight()
    monkeypatch.setattr("recipe_lib.adapters.quantized._PIECE_ELEMENTS", piece)
    monkeypatch.setattr("recipe_lib.adapters.nf4._PIECE_BLOCKS", piece // 64)
    assert torch.equal(quantized(weight, kind).dequantize_weight(), expected)
    for start, stop in [(0, 70), (0, 1), (33, 34), (69, 70), (5, 42), (7, 7)]:
        assert torch.equal(whole.dequantize_weight_rows(start, stop), expected[start:stop])


def test_zeros_and_equal_scales_stay_what_they_are() -> None:
    assert torch.equal(fake_quantize_weight(torch.zeros(64, 64), "nf4"), torch.zeros(64, 64))
    assert torch.equal(fake_quantize_weight(torch.ones(64, 64), "nf4"), torch.ones(64, 64))
    weight = random_weight((64, 64), torch.bfloat16)
    weight[3] = 0
    for kind in ("nf4", "int8"):
        back = fake_quantize_weight(weight, kind)
        assert torch.equal(back[3], torch.zeros(64)) and back.isfinite().all()


def test_quantizing_again_is_close() -> None:
    weight = random_weight((128, 256), torch.float32)
    once = fake_quantize_weight(weight, "nf4")
    widest = max(high - low for low, high in zip(nf4.LEVELS[:-1], nf4.LEVELS[1:], strict=True))
    largest = weight.view(-1, 64).abs().amax(dim=1, keepdim=True)
    bound = (
        largest * widest / 2 + (once - weight).new_full((), float(largest.max())) / 128
    )  # codes, then scales
    assert ((once - weight).view(-1, 64).abs() <= bound).all()
    assert (
        (fake_quantize_weight(weight, "int8") - weight).abs()
        <= weight.abs().amax(dim=1, keepdim=True) / 254 * 1.0001
    ).all()


def test_int8_is_the_nearest_step_of_its_row() -> None:
    weight = random_weight((40, 96), torch.float32)
    module = quantized(weight, "int8")
    wide = weight.double()
    factors = wide.abs().amax(dim=1, keepdim=True) / 127
    codes = module.weight_codes.view(torch.int8)
    assert (codes.double() - wide / factors).abs().max() <= 0.5 + 1e-4
    assert codes.abs().amax(dim=1).eq(127).all()
    torch.testing.assert_close(
        module.dequantize_weight().double(), codes.double() * factors, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_are_a_linears(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = random_weight((172, 64), dtype), torch.randn(172, generator=generator).to(dtype)
    module = quantized(weight, kind, bias)
    hidden = torch.randn(2, 5, 64, generator=generator).to(dtype).requires_grad_()
    gradient = torch.randn(2, 5, 172, generator=generator).to(dtype)
    found, expected = module(hidden), F.linear(hidden, module.dequantize_weight(), bias)
    assert torch.equal(found, expected)
    ours = torch.autograd.grad(found, hidden, gradient)[0]
    theirs = torch.autograd.grad(expected, hidden, gradient)[0]
    torch.testing.assert_close(
        ours, theirs, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6
    )


def test_hidden_states_of_another_type_decide_the_products() -> None:
    module = quantized(random_weight((64, 64), torch.bfloat16), "nf4")
    assert module(torch.ones(2, 64)).dtype == torch.float32
    torch.testing.assert_close(module(torch.eye(64)), module.dequantize_weight().float().t())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_backward_keeps_codes_and_nothing_else(kind: str) -> None:
    module = quantized(random_weight((256, 512), torch.bfloat16), kind)
    hidden = torch.randn(4, 512, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        with LiveBytes() as live:
            product = module(hidden)
        assert live.count_bytes() == product.nbytes
    own = {parameter.data_ptr() for parameter in module.parameters()}
    assert kept and {tensor.data_ptr() for tensor in kept} == own
    product.sum().backward()
    assert hidden.grad is not None and all(
        parameter.grad is None for parameter in module.parameters()
    )


def test_dequantizing_takes_the_weight_and_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    module = quantized(random_weight((512, 512), torch.bfloat16), "nf4")
    monkeypatch.setattr("recipe_lib.adapters.nf4._PIECE_BLOCKS", 64)
    with LiveBytes() as live:
        whole = module.dequantize_weight()
        scales = 512 * 512 // 64 * 2
    assert whole.nbytes <= live.peak <= whole.nbytes + 4 * scales + 64 * 64 * 4 + 8192


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_step_holds_one_whole_weight_at_a_time(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    """Two layers of 7 matrices, few tokens: beside what the model is, the largest matrix and little
    else.
    """
    monkeypatch.setattr("recipe_lib.adapters.nf4._PIECE_BLOCKS", 128)
    monkeypatch.setattr("recipe_lib.adapters.quantized._PIECE_ELEMENTS", 8192)
    monkeypatch.setattr("recipe_lib.adapters.quantized._PIECE_ELEMENTS", 8192)
    spec = replace(build_small_spec(layers=2), width=128, mlp_width=1024)
    model = build_meta(spec, torch.float32)
    add_adapters(model, LoraConfig(rank=2, quantize_base=kind), torch.float32)
    apply_activation_checkpointing(model, mode)
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    init_adapters(model, 4)
    tokens = torch.arange(4).view(1, 4)
    with LiveBytes() as live:
        model(tokens, labels=tokens).backward()
    whole = 4 * 128 * 1024
    assert whole < live.peak < 1.6 * whole


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_compiled_is_one_graph_that_keeps_no_weight(kind: str) -> None:
    module = quantized(random_weight((128, 64), torch.float32), kind)
    hidden = torch.randn(3, 64, requires_grad=True)
    torch._dynamo.reset()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.untyped_storage().data_ptr()) or tensor,
        lambda tensor: tensor,
    ):
        found = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")(hidden)
    assert kept and set(kept) <= {
        parameter.untyped_storage().data_ptr() for parameter in module.parameters()
    }
    expected = module(hidden)
    assert torch.equal(found, expected)
    ours, theirs = (
        torch.autograd.grad(product.square().sum(), hidden)[0] for product in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "shape"), [("nf4", (4096, 14336)), ("nf4", (172, 64)), ("int8", (4096, 14336))]
)
def test_bytes_are_those_of_the_formula(kind: str, shape: tuple[int, int]) -> None:
    module = QuantizedLinear(
        nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=torch.bfloat16), kind
    )
    elements = shape[0] * shape[1]
    group = 256 if shape[0] == 4096 else 4  # 172 blocks = 43 x 4
    nf4_bytes = elements // 2 + elements // 64 + 4 * (elements // 64 // group + 1)
    expected = nf4_bytes if kind == "nf4" else elements + 4 * shape[0]
    assert sum(parameter.nbytes for parameter in module.parameters()) == expected
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_weight_without_whole_blocks_is_refused() -> None:
    assert (
        can_quantize(64, 172, "nf4") and can_quantize(96, 2, "nf4") and can_quantize(5, 7, "int8")
    )
    assert not can_quantize(96, 7, "nf4")
    for base, found in [
        (nn.Linear(96, 7, device="meta"), "7 x 96 numbers of type torch.float32"),
        (
            nn.Linear(64, 64, device="meta", dtype=torch.float64),
            "64 x 64 numbers of type torch.float64",
        ),
    ]:
        with pytest.raises(ValueError, match=f"^a weight of {found} cannot be kept as nf4$"):
            QuantizedLinear(base, "nf4")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_random_weights_are_those_that_a_plain_model_draws(kind: str) -> None:
    spec = build_small_spec(layers=2)
    plain, model = (build_meta(spec, torch.float32) for _ in range(2))
    for layer in model.model.layers:
        layer.mlp.down_proj = QuantizedLinear(layer.mlp.down_proj, kind)
    for module in (plain, model):
        module.to_empty(device="cpu")
        init_weights(module, 3, spec)
    for theirs, ours in zip(plain.model.layers, model.model.layers, strict=True):
        assert torch.equal(
            ours.mlp.down_proj.dequantize_weight(),
            fake_quantize_weight(theirs.mlp.down_proj.weight.detach(), kind),
        )
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)


@pytest.mark.slow
def test_importing_torchao_is_late_and_silent() -> None:
    code = (
        "import sys, torch; from recipe_lib.adapters.quantized import fake_quantize_weight; assert 'torchao'"
        " not in sys.modules; fake_quantize_weight(torch.randn(64, 64), 'nf4'); assert 'torchao' in"
        " sys.modules"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
