"""Where adapters go, how they begin, what they keep; numbers of single modules against those of
PEFT.
"""

import math
import weakref
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters import (
    add_adapters,
    describe_adapters,
    disable_adapters,
    get_adapter_parameters,
    init_adapters,
    layers,
)
from recipe_lib.adapters.layers import AdaptedEmbedding, AdaptedLinear, AdapterSettings
from recipe_lib.adapters.lora import build_adapter_settings
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.models.decoder import Decoder, ScaledEmbedding
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.ops.kept_tensors import KeptTensors
from tests.adapters.adapted import EVERYWHERE, LINEARS, move_adapters
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import (
    MLP_WIDTH,
    VOCABULARY,
    WIDTH,
    build_small_spec,
    make_small_batch,
)


def made(
    spec: DecoderSpec, cfg: LoraConfig, dtype: torch.dtype = torch.float64, moved: float = 0.1
) -> Decoder:
    model = build_meta(spec, dtype)
    add_adapters(model, cfg, dtype)
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    init_adapters(model, 7)
    move_adapters(model, moved)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_names_shapes_and_what_is_frozen(tied: bool) -> None:
    spec, rank = build_small_spec(tied=tied, layers=1), 4
    before = {
        name: parameter.shape
        for name, parameter in build_meta(spec, torch.float32).named_parameters()
    }
    model = build_meta(spec, torch.float32)
    assert not get_adapter_parameters(model)
    add_adapters(model, LoraConfig(rank=rank, target_modules=EVERYWHERE, dora=True), torch.float32)
    assert get_adapter_parameters(model)
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    assert {name: parameter.shape for name, parameter in frozen.items()} == before
    outputs_inputs = {
        "model.layers.0.self_attn.q_proj": (WIDTH, WIDTH),
        "model.layers.0.self_attn.k_proj": (WIDTH // 2, WIDTH),
        "model.layers.0.self_attn.v_proj": (WIDTH // 2, WIDTH),
        "model.layers.0.self_attn.o_proj": (WIDTH, WIDTH),
        "model.layers.0.mlp.gate_proj": (MLP_WIDTH, WIDTH),
        "model.layers.0.mlp.up_proj": (MLP_WIDTH, WIDTH),
        "model.layers.0.mlp.down_proj": (WIDTH, MLP_WIDTH),
        "lm_head": (VOCABULARY, WIDTH),
    }
    expected = {
        "model.embed_tokens.lora_embedding_A": (rank, VOCABULARY),
        "model.embed_tokens.lora_embedding_B": (WIDTH, rank),
        "model.embed_tokens.lora_magnitude_vector": (WIDTH,),
    }
    for name, (outputs, inputs) in outputs_inputs.items():
        expected |= {
            f"{name}.lora_A.weight": (rank, inputs),
            f"{name}.lora_B.weight": (outputs, rank),
        }
        expected |= {f"{name}.lora_magnitude_vector": (outputs,)}
    adapters = get_adapter_parameters(model)
    assert {name: tuple(parameter.shape) for name, parameter in adapters.items()} == expected
    assert all(parameter.requires_grad for parameter in adapters.values())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("targets", [["q"], ["k", "down"], ["embedding"], ["head"]])
def test_only_the_targets_are_trained(targets: list[str]) -> None:
    model = made(build_small_spec(layers=2), LoraConfig(rank=2, target_modules=targets))
    tokens, labels = make_small_batch()
    model(tokens, labels=labels, head_loss=CrossEntropy(3)).backward()
    words = {"embedding": "embed_tokens", "head": "lm_head"}
    for name, parameter in model.named_parameters():
        wanted = "lora_" in name and any(
            words.get(target, f"{target}_proj") in name for target in targets
        )
        assert (parameter.grad is not None) == wanted, name
        assert parameter.grad is None or parameter.grad.abs().max() > 0, name


def test_beginnings_are_those_of_peft_and_follow_the_seed() -> None:
    spec = build_small_spec()
    cfg = LoraConfig(rank=16, target_modules=EVERYWHERE)
    model, again, other = (build_meta(spec, torch.float32) for _ in range(3))
    for copy, seed in ((model, 1), (again, 1), (other, 2)):
        add_adapters(copy, cfg, torch.float32)
        copy.to_empty(device="cpu")
        init_weights(copy, 3, spec)
        init_adapters(copy, seed)
    drawn = ("lora_A.weight", "lora_embedding_B")
    seen: list[Tensor] = []
    for name, parameter in get_adapter_parameters(model).items():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (not name.endswith(drawn))
        if not name.endswith(drawn):
            assert parameter.abs().max() == 0
            continue
        assert not any(
            parameter.shape == earlier.shape and torch.equal(parameter, earlier) for earlier in seen
        )
        seen.append(parameter)
        if name.endswith("lora_A.weight"):  # kaiming-uniform with a = sqrt(5)
            theirs = torch.empty(
                4096, parameter.shape[1]
            )  # so many that its extremes do not hang on the draw
            nn.init.kaiming_uniform_(theirs, a=math.sqrt(5))
            assert float(parameter.detach().abs().max()) == pytest.approx(
                float(theirs.abs().max()), rel=0.02
            )
            assert float(parameter.detach().abs().max()) <= 1 / math.sqrt(parameter.shape[1])
            assert float(parameter.detach().std()) == pytest.approx(float(theirs.std()), rel=0.1)
        else:
            assert float(parameter.detach().std()) == pytest.approx(1, rel=0.1)
            assert float(parameter.detach().mean()) == pytest.approx(0, abs=0.1)


def pair_with_peft(
    cfg: LoraConfig, base: torch.dtype, adapter: torch.dtype, bias: bool
) -> tuple[AdaptedLinear, nn.Module]:
    """A linear of ours and one of PEFT with the same numbers."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(48, 40, bias=bias).to(base))
    settings = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=int(cfg.alpha),
        lora_dropout=cfg.dropout,
        use_dora=cfg.dora,
        target_modules=["0"],
    )
    theirs = peft.get_peft_model(plain, settings, autocast_adapter_dtype=adapter == torch.float32)
    with torch.no_grad():
        plain[0].lora_B["default"].weight.normal_(std=0.1)
    bare = nn.Linear(48, 40, bias=bias, device="meta", dtype=base)
    ours = AdaptedLinear(bare, build_adapter_settings(cfg, adapter)).to_empty(device="cpu")
    found = {name.replace(".default", ""): value for name, value in plain[0].state_dict().items()}
    found = {
        name.replace("vector.weight", "vector").replace("base_layer.", ""): value
        for name, value in found.items()
    }
    ours.load_state_dict(found)
    ours.requires_grad_(False)
    for part in (ours.lora_A.weight, ours.lora_B.weight, ours.lora_magnitude_vector):
        if part is not None:
            part.requires_grad_()
    return ours.train(), theirs.train()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("base", "adapter", "tolerance"),
    [
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.float32, 2**-7),
        (torch.bfloat16, torch.bfloat16, 2**-6),
    ],
    ids=["fp32", "fp32 over bf16", "bf16"],
)
def test_a_linear_gives_what_pefts_gives(
    base: torch.dtype,
    adapter: torch.dtype,
    tolerance: float,
    dora: bool,
    dropout: float,
    bias: bool,
) -> None:
    cfg = LoraConfig(rank=6, alpha=9, dora=dora, dropout=dropout, target_modules=["q"])
    ours, theirs = pair_with_peft(cfg, base, adapter, bias)
    assert {parameter.dtype for parameter in get_adapter_parameters(ours).values()} == {adapter}
    found: list[list[Tensor]] = []
    wide = (
        torch.float64 if adapter == torch.bfloat16 else base
    )  # else what theirs rounds is counted against ours
    theirs = theirs.to(wide) if adapter == torch.bfloat16 else theirs
    for module, dtype in ((ours, base), (theirs, wide)):
        hidden = (
            torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(1))
            .to(base)
            .to(dtype)
            .requires_grad_()
        )
        torch.manual_seed(5)  # the same elements dropped
        output = module(hidden)
        output.backward(
            torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
            .to(base)
            .to(output.dtype)
        )
        grads = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
        assert hidden.grad is not None and all(grad is not None for grad in grads)
        found.append(
            [
                output,
                hidden.grad,
                *sorted((grad for grad in grads if grad is not None), key=Tensor.numel),
            ]
        )
        assert module is theirs or (
            output.dtype == base and all(grad.dtype == adapter for grad in found[0][2:])
        )
    for mine, wanted in zip(*found, strict=True):
        assert float((mine - wanted).abs().max() / wanted.abs().max()) < tolerance


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("scale", [None, 5.656854249492381])
def test_an_embedding_equals_the_matrix_with_the_adapter_in_it(
    dora: bool, scale: float | None
) -> None:
    """Also with the factor that Gemma's embeddings have; DoRA's norms are those of columns."""
    torch.manual_seed(0)
    base = nn.Embedding(30, 12) if scale is None else ScaledEmbedding(30, 12, scale)
    base.double()
    settings = AdapterSettings(rank=3, scaling=0.7, dropout=0.5, dora=dora, dtype=torch.float64)
    module = AdaptedEmbedding(base, settings)
    for name in ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        if getattr(module, name) is not None:
            setattr(
                module, name, nn.Parameter(torch.randn_like(getattr(module, name), device="cpu"))
            )
    matrix = base.weight + 0.7 * (module.lora_embedding_B @ module.lora_embedding_A).t()
    if module.lora_magnitude_vector is not None:
        matrix = matrix * module.lora_magnitude_vector / matrix.detach().square().sum(dim=0).sqrt()
    tokens = torch.randint(0, 30, (2, 7))
    wanted = matrix[tokens] * (1.0 if scale is None else scale)
    assert torch.allclose(module(tokens), wanted, rtol=1e-12, atol=1e-12)
    parameters = list(get_adapter_parameters(module).values())
    weight = torch.randn_like(wanted)
    mine = torch.autograd.grad((module(tokens) * weight).sum(), parameters)
    for grad, want in zip(
        mine, torch.autograd.grad((wanted * weight).sum(), parameters), strict=True
    ):
        assert torch.allclose(grad, want, rtol=1e-10, atol=1e-10)


def test_norms_in_pieces_equal_norms_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(build_small_spec(), LoraConfig(rank=3, dora=True, target_modules=EVERYWHERE))
    modules = [module for module in model.modules() if isinstance(module, layers.AdaptedModule)]
    at_once = [module.compute_weight_norms() for module in modules]
    monkeypatch.setattr(layers, "_NORM_ELEMENTS", 5 * WIDTH)
    for module, norms in zip(modules, at_once, strict=True):
        assert torch.allclose(module.compute_weight_norms(), norms, rtol=1e-14)


def kept_for_backward(model: nn.Module, *args: Any) -> Iterator[Tensor]:
    """The tensors that a forward keeps, each storage once, parameters left out."""
    saved: list[weakref.ref[Tensor]] = []
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        stand_in = tensor.detach()
        saved.append(weakref.ref(stand_in))
        return stand_in

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, KeptTensors().layer():
        output = model(*args)
    assert output.requires_grad
    alive = [tensor for reference in saved if (tensor := reference()) is not None]
    kept = {tensor.untyped_storage().data_ptr(): tensor for tensor in alive}
    yield from (tensor for address, tensor in kept.items() if address not in own)


def test_wider_adapters_keep_no_wider_copy_of_their_input() -> None:
    cfg = LoraConfig(rank=2, target_modules=LINEARS, dtype="fp32")
    linear = AdaptedLinear(
        nn.Linear(64, 64, dtype=torch.bfloat16), build_adapter_settings(cfg, torch.bfloat16)
    )
    linear.to_empty(device="cpu")
    hidden = torch.randn(100, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = {(tensor.dtype, tuple(tensor.shape)) for tensor in kept_for_backward(linear, hidden)}
    assert kept == {(torch.bfloat16, (100, 64)), (torch.float32, (100, 2))}


@pytest.mark.parametrize("dora", [False, True])
def test_the_loss_of_an_adapted_head_makes_no_logits_of_all_tokens(
    dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, chunks, rows = 4096, 8, 64
    monkeypatch.setattr(layers, "_NORM_ELEMENTS", rows * WIDTH)
    model = made(
        build_small_spec(vocabulary=vocabulary),
        LoraConfig(rank=2, target_modules=["head"], dora=dora),
        torch.float32,
    )
    tokens, labels = make_small_batch()
    logits = tokens.numel() * vocabulary * 4
    adapter = sum(parameter.nbytes for parameter in get_adapter_parameters(model).values())
    with LiveBytes() as live:
        model(tokens, labels=labels, head_loss=CrossEntropy(chunks)).backward()
    norms = 2 * rows * WIDTH * 4 if dora else 0  # pieces of B A and of W + scaling * B A
    assert logits // chunks < live.peak < 5 * logits // chunks + 3 * adapter + norms < logits


def test_without_adapters_it_is_the_frozen_model_also_after_an_error() -> None:
    spec = build_small_spec(tied=True)
    plain = build_meta(spec, torch.float64).to_empty(device="cpu")
    init_weights(plain, 3, spec)
    model = made(spec, LoraConfig(rank=3, target_modules=EVERYWHERE, dora=True))
    tokens, labels = make_small_batch()
    adapted = model(tokens)
    assert (adapted - plain(tokens)).abs().max() > 0.1
    with pytest.raises(ZeroDivisionError), disable_adapters(model):
        assert torch.equal(model(tokens), plain(tokens))
        assert torch.equal(
            model(tokens, labels=labels, head_loss=CrossEntropy(2)),
            plain(tokens, labels=labels, head_loss=CrossEntropy(2)),
        )
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert torch.equal(model(tokens), adapted) and torch.is_grad_enabled()


def test_evaluation_drops_nothing() -> None:
    spec = build_small_spec()
    dropping = made(spec, LoraConfig(rank=3, target_modules=EVERYWHERE, dropout=0.5))
    sure = made(spec, LoraConfig(rank=3, target_modules=EVERYWHERE))
    tokens, labels = make_small_batch()
    wanted = sure(tokens, labels=labels)
    assert (
        abs(
            float(
                (
                    dropping.train()(tokens, labels=labels, head_loss=CrossEntropy(3)) - wanted
                ).detach()
            )
        )
        > 1
    )
    assert (
        abs(
            float(
                (
                    dropping.eval()(tokens, labels=labels, head_loss=CrossEntropy(3)) - wanted
                ).detach()
            )
        )
        < 1e-9
    )


def test_description() -> None:
    cfg = LoraConfig(rank=2, target_modules=["q", "head"])
    assert (
        describe_adapters(made(build_small_spec(), cfg, torch.float32), cfg)
        == "adapters: LoRA of rank 2 on q, head: 1,472 parameters trained, 5.75 KiB on top of"
        " 236.88 KiB frozen"
    )


def replaced(model: Decoder, layers_of: range) -> Decoder:
    """A model as a copied recipe may change it: some layers' gate is no linear any more."""
    for index in layers_of:
        model.get_submodule(f"model.layers.{index}.mlp").gate_proj = nn.Bilinear(
            2, 2, 2, device="meta"
        )
    return model


def test_a_target_that_some_layers_have_is_counted_and_one_that_none_has_refused() -> None:
    spec, cfg = build_small_spec(layers=3), LoraConfig(rank=2, target_modules=["gate", "q"])
    model = replaced(build_meta(spec, torch.float32), range(1, 3))
    add_adapters(model, cfg, torch.float32)
    assert describe_adapters(model, cfg).startswith(
        "adapters: LoRA of rank 2 on q, gate (in 1 of 3 layers): "
    )
    with pytest.raises(
        ConfigError,
        match=r"lora.target_modules: gate: no layer of the model has a linear mlp.gate_proj",
    ):
        add_adapters(replaced(build_meta(spec, torch.float32), range(3)), cfg, torch.float32)


def test_quantized_linears_are_counted_and_a_base_that_stays_as_it_is_refused() -> None:
    cfg = LoraConfig(rank=2, target_modules=["q"], quantize_base="nf4")
    model = build_meta(build_small_spec(layers=2), torch.bfloat16)
    add_adapters(model, cfg, torch.bfloat16)
    assert describe_adapters(model, cfg).endswith(" frozen; 14 linears of the layers in nf4")
    wide = build_meta(build_small_spec(layers=2), torch.bfloat16)
    for layer in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(
                wide.get_submodule(f"model.layers.{layer}.mlp"),
                name,
                nn.Linear(333, 111, device="meta"),
            )
    with pytest.raises(ConfigError) as caught:
        add_adapters(wide, cfg, torch.bfloat16)
    assert str(caught.value).startswith(
        "lora.quantize_base=nf4: mlp.down_proj, mlp.gate_proj, mlp.up_proj ("
    )
    assert "torch's own linears and experts are quantized, with nf4 those of blocks of 64" in str(
        caught.value
    )
