"""Build models that are divided over ranks as recipes divide them, and hash what all ranks have.

A test saves in one of WORLDS, loads in another, and compares `hash_trained`. A stage is the
consecutive layers that a rank of a pipeline runs.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.checkpoint.model_export import gather_whole
from recipe_lib.checkpoint.rank_groups import RankGroup
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.models import Decoder, DecoderSpec, build_meta, build_spec, init_weights
from recipe_lib.models.language_model import get_runs, list_local_parts, restore_file_order
from recipe_lib.models.meta_init import fill_random
from recipe_lib.parallel import (
    World,
    materialize,
    shard_model,
    shard_tensors,
    split_pipeline,
    start_world,
)

# Four layers, one for each of four stages; sizes that two tensor-parallel ranks can divide; a
# vocabulary that four ranks cannot divide evenly.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Name -> (ranks, section `parallel`). A model with other layers than four has another last stage.
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "stages": (2, {"pipeline": 2, "pipeline_layers_per_stage": [3, 1]}),
    "shards": (2, {}),
    "folded": (
        2,
        {"pipeline": 2, "pipeline_layers_per_stage": [1, 1, 1, 1], "pipeline_schedule": "zbv"},
    ),
    "four stages": (4, {"pipeline": 4, "pipeline_layers_per_stage": [1, 1, 1, 1]}),
    "stages of shards": (4, {"pipeline": 2, "pipeline_layers_per_stage": [1, 3]}),
    "stages of tensors": (4, {"pipeline": 2, "pipeline_layers_per_stage": [2, 2], "tensor": 2}),
}


def build_changed_spec(config: dict[str, Any], **changes: Any) -> DecoderSpec:
    """Return the spec of a config.json with changes, with large random weights."""
    return replace(build_spec(config | changes, "staged"), init_std=0.2)


@contextmanager
def build_world(name: str) -> Iterator[tuple[FullFinetuneConfig, World]]:
    """Enter one of WORLDS on the ranks of the process group; yield its config and the world."""
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**WORLDS[name][1]))
    with start_world(cfg) as world:
        yield cfg, world


def build_staged(
    cfg: FullFinetuneConfig,
    world: World,
    spec: DecoderSpec,
    lora: LoraConfig | None = None,
    seed: int | None = 3,
) -> Decoder:
    """Return this rank's part of a model in fp32.

    cfg, world: of `build_world`. lora: None for a model without adapters.
    seed: of the weights; None fills trained ones with NaN, so that a test sees what is not loaded.
    """
    parallel = replace(cfg.parallel)
    memory = MemoryConfig()
    if parallel.pipeline_layers_per_stage is not None:
        *first_stages, _ = parallel.pipeline_layers_per_stage
        last_stage = spec.num_layers - sum(first_stages)
        parallel.pipeline_layers_per_stage = [*first_stages, last_stage]
    model = build_meta(spec, torch.float32)
    if lora is not None:
        add_adapters(model, lora, torch.float32)
    split_pipeline(model, replace(cfg, parallel=parallel), world)
    shard_tensors(model, parallel, memory, world)
    shard_model(model, parallel, memory, world)
    materialize(model, memory, world.device)
    init_weights(model, 3 if seed is None else seed, spec)
    if lora is not None:
        init_adapters(model, 7)
    if seed is None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(float("nan"))
    return model


@contextmanager
def load_staged(
    name: str, spec: DecoderSpec, lora: LoraConfig | None = None
) -> Iterator[tuple[Decoder, World]]:
    """Enter one of WORLDS with a model in it; yield both."""
    with build_world(name) as (cfg, world):
        yield build_staged(cfg, world, spec, lora=lora), world


def build_optimizer(model: Decoder) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters of this rank."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained}]  # a group may be empty, a list of parameters may not
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)


def take_random_step(model: Decoder, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Do an optimizer step with random gradients, the same on any number of ranks.

    The gradients follow from a parameter's name and the step's number alone.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            for part, offset in list_local_parts(model, name, parameter.grad):
                fill_random(part, offset, parameter.shape, f"{number}/{name}", _fill_normal)
    optimizer.step()
    optimizer.zero_grad()


def _fill_normal(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill with normal random numbers."""
    return values.normal_(generator=generator)


def hash_trained(
    model: Decoder, optimizer: torch.optim.Optimizer | None, world: RankGroup
) -> dict[str, str]:
    """Return the SHA-256 of every full trained parameter and state of all ranks, by `STATE/NAME`.

    STATE is empty for the parameter itself. Rows are hashed in the order of the checkpoint's file.
    A collective. Raises AssertionError where two ranks have different values of one tensor.
    """
    hashes: dict[str, str] = {}  # of the parameters of this rank's stages
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in [("", parameter.detach()), *sorted(states.items())]:
            tensor = gather_whole(value)
            if tensor.dim():
                tensor = restore_file_order(tensor, get_runs(model).get(name))
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            description = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            hashes[f"{key}/{name}"] = hashlib.sha256(description + content).hexdigest()
    merged: dict[str, str] = {}
    for rank_hashes in world.gather_json(hashes):
        for name, tensor_hash in rank_hashes.items():
            known_hash = merged.setdefault(name, tensor_hash)
            assert known_hash == tensor_hash, f"{name} is not the same on two ranks"
    return merged


def read_tensors(folder: Path) -> dict[str, bytes]:
    """Return the content of each of a folder's safetensors files, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
