"""Quantized weights that a tensor-parallel group shares: a rank's part has the bits of the whole
weight's, losses and gradients are those of one process, and what a rank keeps is its share.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.adapters import add_adapters, get_adapter_parameters, init_adapters
from recipe_lib.adapters.quantized import QuantizedLinear, fake_quantize_weight
from recipe_lib.checkpoint.model_export import gather_whole
from recipe_lib.config.schema import LoraConfig, LoraFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import compile_layers
from recipe_lib.models import DecoderSpec, build_meta, build_spec, init_weights
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    check_tensor,
    materialize,
    shard_model,
    start_world,
)
from recipe_lib.parallel.tensor import shard_tensors
from tests.distributed.ranks import import_compiler, run_ranks
from tests.parallel.small_models import LENGTH, VOCABULARY

# Parts that end within groups of scales, in rows and in columns.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 96,
    "intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
CASES = [
    {"tensor": 2},
    {"tensor": 2, "data_shard": 2},
    {"tensor": 4, "tensor_replicate_kv_heads": True},
]


def spec() -> DecoderSpec:
    return build_spec(CONFIG, "small")


def build(
    kind: str, world: World | None, parallel: ParallelConfig, compiled: bool = False
) -> tuple[Any, Parallel]:
    """The model as the recipe makes it; without a world, plain."""
    model, divided = build_meta(spec(), torch.float32), Parallel()
    add_adapters(
        model,
        LoraConfig(rank=4, quantize_base=kind, target_modules=["q", "v", "o", "down"]),
        torch.float32,
    )
    if world is None:
        model.to_empty(device="cpu")
    else:
        divided = Parallel(tensor_gradients=shard_tensors(model, parallel, MemoryConfig(), world))
        if compiled:
            compile_layers(model, "eager")
        shard_model(model, parallel, MemoryConfig(), world)
        materialize(model, MemoryConfig(), world.device)
    init_weights(model, 3, spec())
    init_adapters(model, 4)
    for name, parameter in get_adapter_parameters(model).items():
        if "lora_B" in name:  # zeros would hide A's gradient
            locate_local_part(parameter)[0].data.fill_(0.01)
    return model, divided


def quantized(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def backward(model: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens, labels=tokens.roll(-1, 1), head_loss=CrossEntropy(2)) / tokens.numel()
    loss.backward()
    return loss.detach()


def differences(kind: str, options: dict[str, Any], compiled: bool = False) -> list[str]:
    """What is not as in one process."""
    parallel, faults = ParallelConfig(**options), []
    cfg = LoraFinetuneConfig(device="cpu", parallel=parallel)
    with start_world(cfg) as world:
        (plain, _), (model, divided) = (
            build(kind, None, parallel),
            build(kind, world, parallel, compiled),
        )
        tokens = torch.randint(
            0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5)
        )
        expected = backward(plain, tokens)
        rows = tokens.chunk(world.data_ranks)[world.data_rank]
        loss = world.all_reduce_sum(backward(model, rows) / world.data_ranks)
        all_reduce_gradients(model, divided, world)
        if abs(float(loss - expected)) > 1e-5:
            faults.append(f"loss {float(loss)} for {float(expected)}")
        wanted = get_adapter_parameters(plain)
        model.state_dict()  # FSDP frees what is gathered
        for name, parameter in get_adapter_parameters(model).items():
            found = gather_whole(parameter.grad) / world.data_ranks
            if not torch.allclose(found, wanted[name].grad, rtol=1e-3, atol=1e-6):
                faults.append(f"gradient of {name}")
        stored = sum(
            locate_local_part(module.weight_codes)[0].numel()
            for module in quantized(model).values()
        )
        bytes_of_all = sum(module.weight_codes.numel() for module in quantized(plain).values())
        if stored != bytes_of_all // world.size and not parallel.tensor_replicate_kv_heads:
            faults.append(f"{stored} bytes of codes, of {bytes_of_all}")
        faults += parts_that_differ(quantized(plain), model)
    return faults


def parts_that_differ(plain: dict[str, QuantizedLinear], model: nn.Module) -> list[str]:
    faults = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for name, module in quantized(model).items():
        expected = plain[name].dequantize_weight()[slice(*module.rows), slice(*module.columns)]
        if not torch.equal(module.product(torch.eye(expected.shape[1])).t(), expected):
            faults.append(f"part of {name}")
        if expected.numel() == plain[name].dequantize_weight().numel():
            faults.append(f"{name} is not shared")
    return faults


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_parts_losses_and_gradients_are_those_of_one_process(kind: str) -> None:
    fake_quantize_weight(
        torch.zeros(64, 64), "nf4"
    )  # imports torchao here, which each rank would have to
    for ranks, cases in ((2, CASES[:1]), (4, CASES[1:])):

        def compare(cases: list[dict[str, Any]] = cases) -> list[str]:
            return [f"{case}: {fault}" for case in cases for fault in differences(kind, case)]

        assert run_ranks(compare, ranks) == [[]] * ranks


@pytest.mark.slow
def test_compiled_layers_have_the_same_parts() -> None:
    fake_quantize_weight(torch.zeros(64, 64), "nf4")
    import_compiler()
    assert run_ranks(lambda: differences("nf4", CASES[0], compiled=True), 2) == [[], []]


def test_blocks_that_would_be_cut_are_refused_with_the_sizes_that_fit() -> None:
    shape = replace(
        spec(), mlp_width=640, num_kv_heads=4
    )  # 10 blocks in a row of the down projection
    check_tensor(shape, ParallelConfig(tensor=2), "nf4")
    check_tensor(shape, ParallelConfig(tensor=4), "int8")
    refused = "does not cut down_proj, whose blocks .* stay whole; sizes that fit: 1, 2; or set"
    with pytest.raises(ConfigError, match=refused):
        check_tensor(shape, ParallelConfig(tensor=4), "nf4")
