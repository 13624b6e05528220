"""Layers of transformers with `memory.recompute_cheap`: they keep less, and losses and gradients are
bitwise those without it. `tests/ops/test_noted_calls` has the calls that are not made again.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig
from recipe_lib.external.module_spec import read_spec
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.ops.attention import make_attention_info
from recipe_lib.ops.kept_tensors import KeptTensors
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.ops.recorded_models import assert_equal, do_nothing, record_freed_tensors
from tests.recipes.external_kinds import COMMON, KINDS, build_settings, import_models
from tests.selection import mark_slow_except

ROWS = 2
LENGTH = 24
DOCUMENTS = [[11, 13], [7, 9, 8]]
# model_type -> settings beside COMMON, of kinds that `external_kinds` lacks.
MORE_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"resid_pdrop": 0.2, "attention_dropout": 0.1, "original_max_position_embeddings": 128},
    "olmo2": {},
    "granite": {"attention_dropout": 0.2, "residual_multiplier": 0.5},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.2},
    # Of each kind of loop: over chunks of tokens, and over tokens.
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mamba": {"state_size": 4},
}
FAMILIES = [
    *("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "gpt2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "llama4_text"),
    *("granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_next", "mamba"),
]
DROPOUT = ("phi3", "granite", "gpt2")
LORA = LoraConfig(rank=4, target_modules=["all-linear"], dropout=0.2)


def build(
    kind: str,
    on: bool,
    *,
    lora: LoraConfig | None = None,
    dtype: torch.dtype = torch.float32,
    after: Callable[[nn.Module], Any] = do_nothing,
    **changes: Any,
) -> Any:
    """Return a tiny model on the CPU with random weights, the same with and without the lever.

    after: changes the meta model after the lever is applied. changes: of its config.
    """
    settings = build_settings(kind) if kind in KINDS else COMMON | MORE_KINDS[kind]
    config = transformers.AutoConfig.for_model(kind, **settings | changes)
    spec = read_spec(json.loads(config.to_json_string(use_diff=False)), kind)
    model: Any = spec.build(dtype)
    if lora is not None:
        add_adapters(model, lora, dtype)
    memory = MemoryConfig(recompute_cheap=on)
    recompute_cheap_tensors(model, FullFinetuneConfig(memory=memory))
    after(model)
    model.to_empty(device="cpu")
    for name, values in model.computed_buffers.items():
        model.get_buffer(name).copy_(values)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return model.train()


def compute_loss(model: Any, packs: bool = False) -> Tensor:
    """Return the loss of the same tokens and random numbers in each call."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 500, (ROWS, LENGTH), generator=generator)
    torch.manual_seed(3)
    if not packs:
        return model(tokens, labels=tokens)
    rows = [torch.cat([torch.arange(length) for length in lengths]) for lengths in DOCUMENTS]
    attention = make_attention_info(DOCUMENTS, LENGTH)
    return model(tokens, torch.stack(rows), attention, labels=tokens)


def train(model: Any, packs: bool = False) -> list[Tensor]:
    """Return the loss, and the gradients of a backward."""
    loss = compute_loss(model, packs)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)
    return [loss.detach(), *gradients]


@pytest.fixture
def count_freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return record_freed_tensors(monkeypatch)


@pytest.mark.parametrize("packs", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "kind", mark_slow_except(FAMILIES, ["gemma2", "phi3", "qwen2_moe", "qwen3_next"])
)
def test_losses_and_gradients_are_the_same_bits(
    kind: str, lora: LoraConfig | None, packs: bool, count_freed: list[int]
) -> None:
    if lora is not None and kind == "gpt2":
        pytest.skip("no linears: its matrices are transposed")
    actual, expected = (train(build(kind, on, lora=lora), packs) for on in (True, False))
    assert_equal(actual, expected)
    # Llama 4 adds the experts' results in place to what an adapter has made.
    assert min(count_freed) > 0 or (kind, lora) == ("llama4_text", LORA), count_freed
    if kind in DROPOUT:
        model = build(kind, True, lora=lora).eval()
        assert compute_loss(model, packs) != expected[0]  # dropout was active


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_checkpointed_layer_is_left_as_it_is(mode: str, count_freed: list[int]) -> None:
    def change(model: nn.Module) -> None:
        apply_activation_checkpointing(model, mode)

    actual, expected = (train(build("gemma2", on, after=change)) for on in (True, False))
    assert_equal(actual, expected)
    assert not count_freed
    assert_equal(actual, train(build("gemma2", True)))


def measure_layer_bytes(kind: str, on: bool) -> int:
    """Return what a layer in bf16 keeps: the difference of a model of 3 and one of 2 layers."""
    kept = []
    for layers in (3, 2):
        changes: dict[str, Any] = {"num_hidden_layers": layers}
        if "layer_types" in MORE_KINDS.get(kind, {}):
            changes["layer_types"] = ["sliding_attention"] * (layers - 1) + ["full_attention"]
        model = build(kind, on, dtype=torch.bfloat16, **changes)
        with LiveBytes() as live:
            loss = compute_loss(model)
            kept.append(live.count_bytes())
        del loss
    return kept[0] - kept[1]


# Width 32, 4 heads and 2 of keys, of 8 channels each, an MLP of 48.
QUERIES_AND_RESULT = 2 * 32
KEYS_AND_VALUES = 2 * 16
LOG_SUM_EXP = 4 * 4  # bytes in fp32
# kind -> bytes of a token. Of Llama docs/memory.md's 2 d + 2 h e + 2 k e + 2 f.
KEPT = {
    "llama": 2 * (2 * 32 + QUERIES_AND_RESULT + KEYS_AND_VALUES + 2 * 48) + LOG_SUM_EXP,
    "qwen3": 2 * (2 * 32 + QUERIES_AND_RESULT + KEYS_AND_VALUES + 2 * 48) + LOG_SUM_EXP,
    "olmo2": 2 * (3 * 32 + QUERIES_AND_RESULT + KEYS_AND_VALUES + 2 * 48) + LOG_SUM_EXP,
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_layer_keeps_what_our_own_keeps(kind: str) -> None:
    assert measure_layer_bytes(kind, True) == KEPT[kind] * ROWS * LENGTH
    assert measure_layer_bytes(kind, False) > 1.5 * KEPT[kind] * ROWS * LENGTH


def train_sharded(kind: str, wrapped: str, frees: bool) -> None:
    """On each rank: weights are freed after the forward of what FSDP wraps, and gathered again.

    wrapped: a part of the names of modules in the layers that FSDP wraps besides the layers.
    """
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    results = []
    for on in (True, False):
        model = build(kind, on)
        for layer in model.model.layers:
            for name, module in layer.named_children():
                if wrapped and wrapped in name:
                    fully_shard(module, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.MonkeyPatch.context() as patch:
            freed = record_freed_tensors(patch)
            loss = compute_loss(model)
        assert all(count > 0 for count in freed) == (frees or not on), freed
        loss.backward()
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        results.append([loss.detach(), *gradients])
    assert_equal(*results)


@pytest.mark.parametrize(
    ("kind", "wrapped", "frees"),
    [("gemma2", "", True), ("gemma2", "norm", False), ("llama", "mlp", True)],
)
def test_sharded_weights(kind: str, wrapped: str, frees: bool) -> None:
    """A layer whose norms are wrapped by themselves keeps all: their weights are gone."""
    import_models(kind)
    run_ranks(train_sharded, 2, kind, wrapped, frees)


def test_a_loop_over_tokens_is_noted_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one that would be recomputed from its beginning."""
    sizes = []
    choose = KeptTensors._choose

    def choose_and_count(self: KeptTensors) -> None:
        sizes.append(len(self._nodes))
        choose(self)

    monkeypatch.setattr(KeptTensors, "_choose", choose_and_count)
    results = []
    for on in (True, False):
        model = build("mamba", on, num_hidden_layers=1)
        tokens = torch.arange(400)[None]
        loss = model(tokens, labels=tokens)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_equal(*results)
    assert len(sizes) == 1 and 500 < sizes[0] < 520
    assert math.isfinite(results[0][0])
