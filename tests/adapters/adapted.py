"""Small decoders with adapters for the tests, made as a recipe makes them; B is given values, so
that all is in use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recipe_lib.adapters import add_adapters, get_adapter_parameters, init_adapters
from recipe_lib.config.schema import LoraConfig, LoraFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.memory import apply_activation_checkpointing, compile_layers
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.meta_init import fill_random
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import World, materialize, shard_model, start_world
from tests.parallel.small_models import ROWS, make_small_batch

LINEARS = ["q", "k", "v", "o", "gate", "up", "down"]
EVERYWHERE = [*LINEARS, "embedding", "head"]


@dataclass(frozen=True)
class Setting:
    """A run's levers; compiler: backend of torch.compile."""

    lora: LoraConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    dtype: torch.dtype = torch.float64
    compiler: str | None = None


@contextmanager
def build_adapted(
    spec: DecoderSpec, setting: Setting, moved: float = 0.1
) -> Iterator[tuple[Decoder, World]]:
    """The model in this rank's world; adapters are those of init_adapters, moved by random numbers
    of size `moved`.
    """
    cfg = LoraFinetuneConfig(
        device="cpu", lora=setting.lora, parallel=setting.parallel, memory=setting.memory
    )
    with start_world(cfg) as world:
        model = build_meta(spec, setting.dtype)
        add_adapters(model, setting.lora, setting.dtype)
        apply_activation_checkpointing(model, setting.memory.activation_checkpointing)
        if setting.compiler:
            compile_layers(model, setting.compiler)
        shard_model(model, setting.parallel, setting.memory, world)
        materialize(model, setting.memory, world.device)
        init_weights(model, 3, spec)
        init_adapters(model, 7)
        if moved:
            move_adapters(model, moved)
        yield model, world


@torch.no_grad()
def move_adapters(model: Decoder, size: float) -> None:
    """Adds random numbers to all adapters, the same on any number of ranks."""
    for name, parameter in get_adapter_parameters(model).items():
        local, offset = locate_local_part(parameter)
        noise = torch.empty_like(local)
        fill_random(
            noise,
            offset,
            parameter.shape,
            f"moved/{name}",
            lambda values, rng: values.normal_(generator=rng),
        )
        local.add_(noise, alpha=size)


def compute_mean_loss(model: Decoder, world: World, part: int = 0, parts: int = 1) -> Tensor:
    """This rank's share of the small batch, or one of its parts, over the trained tokens of the
    whole batch.
    """
    tokens, labels = make_small_batch()
    rows = ROWS // (world.size * parts)
    first = (world.rank * parts + part) * rows
    mine = slice(first, first + rows)
    return (
        model(tokens[mine], labels=labels[mine], head_loss=CrossEntropy(3)) / (labels != -100).sum()
    )
