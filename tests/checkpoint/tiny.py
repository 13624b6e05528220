"""A tiny decoder, its optimizer, and worlds to save it in."""

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
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)
    ),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def build_tiny_spec(**changes: Any) -> DecoderSpec:
    """The spec of CONFIG with changes."""
    return build_spec(CONFIG | changes, "tiny")


@contextmanager
def build_tiny_world(replicate: int = 1) -> Iterator[World]:
    """The world of this process, on the CPU."""
    with start_world(
        FullFinetuneConfig(device="cpu", parallel=ParallelConfig(data_replicate=replicate))
    ) as world:
        yield world


def build_tiny_model(
    world: World,
    seed: int | None = 0,
    dtype: torch.dtype = torch.float32,
    spec: DecoderSpec | None = None,
) -> Decoder:
    """Built on meta, sharded where the world has more than one rank, and filled from the seed
    (None: with NaN).
    """
    spec = spec or build_tiny_spec()
    model = build_meta(spec, dtype)
    if world.size > 1:
        mesh = (
            world.mesh["data_replicate", "data_shard"]
            if world.mesh.size(0) > 1
            else world.mesh["data_shard"]
        )
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
    """Steps on rows that depend on the step's number alone; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        rows = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(rows[:, :-1], labels=rows[:, 1:]) / 16
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if it is sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute_fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the gathered bytes of every parameter, optimizer state and group value.
    Collective.
    """
    model.state_dict()  # reshards
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        states = {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }
        for key, value in [("", parameter), *sorted(states.items())]:
            whole = gather_full(torch.as_tensor(value).detach()).contiguous()
            digest.update(f"{name} {key} {whole.dtype} {tuple(whole.shape)}".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    for group in optimizer.param_groups:
        digest.update(
            repr(sorted((key, value) for key, value in group.items() if key != "params")).encode()
        )
    return digest.hexdigest()


def list_tree(folder: Path) -> dict[str, bytes]:
    """Relative path -> contents of every file under the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
