"""What parallel.tensor declares of our decoder, against the plan that the decoder's own forward
leads to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.config.mesh import MESH_DIMS, compute_mesh_shape
from recipe_lib.config.schema import LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.external.certificate import certify
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.small_models import randomize
from recipe_lib.models import DecoderSpec, build_meta, decoder
from recipe_lib.ops import norm
from recipe_lib.ops.mlp import ACTIVATIONS
from recipe_lib.parallel import World, shard_tensors
from recipe_lib.parallel.world import build_world
from tests.external.tensor_plan.declared import Declaration, list_differences, read_declared
from tests.parallel.small_models import VOCABULARY, build_small_spec

GEMMA = {
    "post_norms": True, "norm_offset": True, "head_norms": True, "embedding_scale": 5.5, "logit_softcap": 9.0,
    "activation": "gelu_tanh", "tied": True,
}  # fmt: skip
CASES = {
    "llama": {},
    "qwen3, tied": {"head_norms": True, "tied": True},
    "gemma3": GEMMA,
    "gemma2": GEMMA | {"head_norms": False, "attention_softcap": 20.0},
    "biases everywhere": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "phi3's file": {"fused_file": True},
}


def spec_of(case: str) -> DecoderSpec:
    changes = {"num_heads": 8, "num_kv_heads": 4, "num_layers": 2, "windows": (None, None)}
    return replace(build_small_spec(layers=2), **changes | CASES[case])


def adapt(model: torch.nn.Module) -> None:
    add_adapters(model, LoraConfig(rank=4), torch.float32)


def real_model(spec: DecoderSpec, adapted: bool = False) -> torch.nn.Module:
    """On the CPU: our decoder asks its device for kernels, which the meta device has not."""
    model = build_meta(spec, torch.float32)
    if adapted:
        adapt(model)
    model = model.to_empty(device="cpu")
    if adapted:
        init_adapters(model, 0)
    randomize(model)
    return model


def tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"tokens": torch.randint(0, VOCABULARY, (2, 8), generator=generator)}


@contextmanager
def one_of(size: int) -> Iterator[World]:
    """The world of rank 0 of a tensor-parallel group, whose collectives nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        shape = tuple(compute_mesh_shape(ParallelConfig(tensor=size), size).values())
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=MESH_DIMS)
        yield build_world(mesh, 0, size, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def declaration(spec: DecoderSpec, size: int, adapted: bool = False) -> dict[str, Declaration]:
    model = build_meta(spec, torch.float32)
    if adapted:
        adapt(model)
    with one_of(size) as world:
        shard_tensors(model, ParallelConfig(tensor=size), MemoryConfig(), world)
        return read_declared(model)


@pytest.fixture
def calls_that_a_mode_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan divides torch's calls; what an autograd.Function of ours calls has a backward that
    does not know of it.
    """
    monkeypatch.setattr(norm, "_differentiate_once", lambda function, *args: function(*args))
    monkeypatch.setattr(
        decoder, "gated_activation", lambda gate, up, name: ACTIVATIONS[name][0](gate) * up
    )


@pytest.mark.usefixtures("calls_that_a_mode_sees")
@pytest.mark.parametrize("case", CASES)
def test_our_declaration_is_what_the_forward_leads_to(case: str):
    spec = spec_of(case)
    model = real_model(spec)
    plan = infer_plan(model, tokens())
    assert plan.legal_sizes == (2, 4)
    assert list_differences(plan, declaration(spec, 4)) == []
    for size in plan.legal_sizes:
        certificate = certify(model, plan, size, tokens())
        assert certificate.checked and not certificate.failures, certificate.failures


@pytest.mark.usefixtures("calls_that_a_mode_sees")
def test_adapters_are_declared_as_the_forward_leads_to():
    spec = spec_of("llama")
    model = real_model(spec, adapted=True)
    plan = infer_plan(model, tokens())
    declared = declaration(spec, 2, adapted=True)
    assert any("lora_A" in name for name in declared)
    assert list_differences(plan, declared) == []
    certificate = certify(model, plan, 2, tokens())
    assert certificate.checked and not certificate.failures, certificate.failures


def test_where_every_rank_has_all_tokens_norms_have_full_gradients_and_head_norms_partial_ones():
    spec = spec_of("qwen3, tied")
    found = list_differences(
        infer_plan(real_model(spec), tokens(), tokens=False), declaration(spec, 2)
    )
    named = {line.partition(":")[0].split(".")[-2] for line in found}
    assert named == {"input_layernorm", "post_attention_layernorm", "norm"}
    assert all(line.endswith("declared a partial gradient, expected full") for line in found)


@pytest.mark.parametrize(
    ("name", "wrong", "line"),
    [
        (
            "self_attn.o_proj.weight",
            Declaration(0, "sharded"),
            "declared cut along dim 0, expected cut along dim 1",
        ),
        (
            "self_attn.q_norm.weight",
            Declaration(-1, "full"),
            "declared a full gradient, expected partial",
        ),
        (
            "self_attn.k_proj.weight",
            Declaration(-1, "partial"),
            "declared whole, expected cut along dim 0",
        ),
        (
            "input_layernorm.weight",
            Declaration(0, "sharded"),
            "declared cut along dim 0, expected whole (dimension 0: ",
        ),
        ("mlp.gate_proj.weight", None, "not declared, expected cut along dim 0"),
    ],
)
def test_a_wrong_declaration_is_told(name: str, wrong: Declaration | None, line: str):
    spec = spec_of("qwen3, tied")
    plan = infer_plan(real_model(spec), tokens())
    declared = declaration(spec, 2)
    full = f"model.layers.1.{name}"
    assert declared.pop(full) != wrong
    if wrong is not None:
        declared[full] = wrong
    found = list_differences(plan, declared)
    assert len(found) == 1 and found[0].startswith(f"{full}: {line}")


class Fused(torch.nn.Module):
    """Gate and up in one matrix, halves apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 8)
        self.both, self.down = (
            torch.nn.Linear(8, 48, bias=False),
            torch.nn.Linear(24, 8, bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(torch.nn.functional.rms_norm(self.table(tokens), (8,))).chunk(
            2, dim=-1
        )
        return self.down(gate.sigmoid() * up).softmax(-1)


def test_an_even_cut_of_a_fused_matrix_and_a_parameter_of_no_model_are_told():
    plan = infer_plan(Fused(), tokens() | {"tokens": torch.zeros(2, 8, dtype=torch.long)})
    declared = {each.name: Declaration(each.dim, each.gradient) for each in plan.parameters}
    declared["nobody"] = Declaration(-1, "partial")
    assert list_differences(plan, declared) == [
        "nobody: declared, but not the model's",
        "both.weight: declared one even cut along dim 0, expected one of each part of 24 + 24",
    ]


def test_a_parameter_without_a_placement_is_told():
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight is not placed on the mesh's dimension tensor"
    ):
        read_declared(build_meta(spec_of("llama"), torch.float32))
