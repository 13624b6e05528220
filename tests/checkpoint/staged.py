"""Models divided as a recipe divides them, with optimizer states, and what all ranks hold of them,
by name.
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

# Four layers for as many ranks, and what a tensor-parallel group of two can share; a vocabulary
# that 4 do not divide.
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
# By a name: how many ranks it takes, and the section `parallel`; further layers would be the last
# stage's.
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


def build_spec_of(config: dict[str, Any], **changes: Any) -> DecoderSpec:
    return replace(build_spec(config | changes, "staged"), init_std=0.2)


@contextmanager
def build_world(name: str) -> Iterator[tuple[FullFinetuneConfig, World]]:
    """One of WORLDS on the ranks that are there, and the config that made it."""
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**WORLDS[name][1]))
    with start_world(cfg) as world:
        yield cfg, world


def build(
    cfg: FullFinetuneConfig,
    world: World,
    spec: DecoderSpec,
    lora: LoraConfig | None = None,
    seed: int | None = 3,
) -> Decoder:
    """This rank's part of a model in fp32 with weights from the seed; None: NaN where it is
    trained.
    """
    parallel, memory = replace(cfg.parallel), MemoryConfig()
    if parallel.pipeline_layers_per_stage is not None:
        *others, _ = parallel.pipeline_layers_per_stage
        parallel.pipeline_layers_per_stage = [*others, spec.num_layers - sum(others)]
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
    """The model in one of WORLDS."""
    with build_world(name) as (cfg, world):
        yield build(cfg, world, spec, lora), world


def build_optimizer(model: Decoder) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained}]  # of a rank that has nothing trained it may be empty
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)


def step(model: Decoder, optimizer: torch.optim.Optimizer, number: int) -> None:
    """An optimizer step with gradients that follow from a parameter's name and the step's number
    alone.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            for part, offset in list_local_parts(model, name, parameter.grad):
                fill_random(part, offset, parameter.shape, f"{number}/{name}", _normalize)
    optimizer.step()
    optimizer.zero_grad()


def _normalize(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return values.normal_(generator=generator)


def hash_trained(
    model: Decoder, optimizer: torch.optim.Optimizer | None, world: RankGroup
) -> dict[str, str]:
    """SHA-256 of every trained parameter and its states of the whole model, by name, in the file's
    order. Collective.

    Where several ranks hold the same, they have to hold it alike.
    """
    own: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in [("", parameter.detach()), *sorted(states.items())]:
            found = gather_whole(value)
            found = restore_file_order(found, get_runs(model).get(name)) if found.dim() else found
            content = found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            own[f"{key}/{name}"] = hashlib.sha256(
                f"{found.dtype} {tuple(found.shape)}".encode() + content
            ).hexdigest()
    merged: dict[str, str] = {}
    for part in world.gather_json(own):
        for name, content in part.items():
            assert merged.setdefault(name, content) == content, (
                f"{name} is not the same on two ranks"
            )
    return merged


def read_tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of a folder's safetensors files, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
