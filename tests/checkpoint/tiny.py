"""Build a tiny decoder, its optimizers and worlds to save it in, for the tests of checkpoints.

with build_tiny_world() as world:
    model = build_tiny_model(world)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, steps=2)
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.models import Decoder, build_meta, build_spec, init_weights
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.parallel.world import World, start_world

# Three kv rows and a vocabulary of 31: neither divides by 2 or 4, so shards are uneven and some are
# empty.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIMIZERS = {  # name -> function of the parameters; those with other states each
    "adamw": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)
    ),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def build_tiny_spec(**changes: Any) -> DecoderSpec:
    """Return the spec (the architecture's sizes) of CONFIG with changes."""
    return build_spec(CONFIG | changes, "tiny")


@contextmanager
def build_tiny_world(replicate: int = 1) -> Iterator[World]:
    """Enter the world (rank, device and mesh) of this process, on the CPU.

    replicate: number of replicas; each is sharded over the other ranks.
    """
    parallel = ParallelConfig(data_replicate=replicate)
    with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
        yield world


def build_tiny_model(
    world: World,
    seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    spec: DecoderSpec | None = None,
) -> Decoder:
    """Build a decoder as a recipe does: on meta, sharded over the ranks, then materialized.

    seed: of its random weights; None fills them with NaN, so that a test sees what is not loaded.
    spec: None for `build_tiny_spec()`.
    """
    spec = spec or build_tiny_spec()
    model = build_meta(spec, dtype)
    if world.size > 1:
        mesh = world.mesh["data_shard"]
        if world.mesh.size(0) > 1:
            mesh = world.mesh["data_replicate", "data_shard"]
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    if seed is None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    else:
        init_weights(model, seed, spec)
    return model


def train(
    model: Decoder, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> list[float]:
    """Train on sequences that depend on the step's number alone; return the loss of each step.

    first: number of the first step, for a run that goes on.
    """
    losses = []
    for step in range(first, first + steps):
        rows = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(rows[:, :-1], labels=rows[:, 1:]) / 16  # the number of labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; a sharded one is gathered (a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute_fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of all full parameters, optimizer states and settings of its groups.

    A collective if the model is sharded.
    """
    model.state_dict()  # FSDP's hook frees gathered parameters
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        states = {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }
        for key, value in [("", parameter), *sorted(states.items())]:
            tensor = gather_full(torch.as_tensor(value).detach()).contiguous()
            digest.update(f"{name} {key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    for group in optimizer.param_groups:
        settings = sorted((key, value) for key, value in group.items() if key != "params")
        digest.update(repr(settings).encode())
    return digest.hexdigest()


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file under the folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
