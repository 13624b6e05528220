"""Random weights: the same whoever holds them."""

import pickle

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recipe_lib.models import Decoder, DecoderSpec, build_meta, build_spec, init_weights
from recipe_lib.models import meta_init as build
from tests.distributed.ranks import run_ranks

SPEC: DecoderSpec = build_spec(
    {
        "model_type": "qwen2",
        "hidden_size": 24,
        "intermediate_size": 33,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 301,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "here",
)


def whole(spec: DecoderSpec = SPEC, seed: int = 3, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_meta(spec, dtype)
    model.to_empty(device="cpu")
    init_weights(model, seed, spec)
    return model


def test_a_model_can_be_pickled() -> None:
    model = whole()
    copied = pickle.loads(pickle.dumps(model))  # noqa: S301
    ids = torch.arange(7)[None]
    assert torch.equal(copied(ids), model(ids))


def test_nothing_is_allocated_on_meta() -> None:
    model = build_meta(SPEC, torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert not list(model.buffers())


def test_values() -> None:
    parameters = dict(whole().named_parameters())
    assert torch.equal(parameters["model.norm.weight"], torch.ones(24))
    assert torch.equal(parameters["model.layers.1.self_attn.q_proj.bias"], torch.zeros(24))
    table = parameters["model.embed_tokens.weight"]
    assert abs(table.std() - 0.05) < 0.002 and abs(table.mean()) < 0.002
    layers = [parameters[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1)]
    assert not torch.equal(*layers)


def test_norms_that_count_from_one_start_at_zero() -> None:
    gemma = {
        "model_type": "gemma3_text",
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    spec = build_spec(gemma | {"head_dim": 8, "vocab_size": 30}, "here")
    norms = {name: p for name, p in whole(spec).named_parameters() if "norm" in name}
    assert len(norms) == 7 and not any(p.any() for p in norms.values())


def test_the_seed_decides() -> None:
    first, again, other = (
        torch.cat([p.flatten() for p in whole(seed=s).parameters()]) for s in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_bf16_is_the_rounded_fp32() -> None:
    for wide, narrow in zip(
        whole().parameters(), whole(dtype=torch.bfloat16).parameters(), strict=True
    ):
        assert torch.equal(wide.bfloat16(), narrow)


def test_tied_weights_stay_tied() -> None:
    model = whole()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert model.double().lm_head.weight is model.model.embed_tokens.weight


def _sharded_by_fsdp(replicas: int) -> list[bool]:
    build._BLOCK_ELEMENTS = 512  # several blocks per parameter, cut by shard boundaries
    mesh = init_device_mesh(
        "cpu", (replicas, 2 // replicas), mesh_dim_names=("data_replicate", "data_shard")
    )
    model = build_meta(SPEC, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    init_weights(model, 3, SPEC)
    expected = dict(whole().named_parameters())
    return [torch.equal(p.full_tensor(), expected[name]) for name, p in model.named_parameters()]


def test_shards_hold_their_part_of_the_same_values() -> None:
    for results in run_ranks(_sharded_by_fsdp, 2, 1) + run_ranks(_sharded_by_fsdp, 2, 2):
        assert len(results) == 26 and all(results)


def _sharded_by_columns() -> bool:
    build._BLOCK_ELEMENTS = 64
    mesh = init_device_mesh("cpu", (2,))
    module = torch.nn.Linear(10, 7, bias=False)
    module.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(7, 10), mesh, [Shard(1)]))
    assert isinstance(module.weight, DTensor)
    init_weights(module, 3, SPEC)
    alone = torch.nn.Linear(10, 7, bias=False)
    init_weights(alone, 3, SPEC)
    return torch.equal(module.weight.full_tensor(), alone.weight)


def test_columns_too() -> None:
    assert run_ranks(_sharded_by_columns, 2) == [True, True]
