"""Build small decoders with adapters as a recipe builds them, for the tests.

Unlike in training's first step the adapters' B is not zero, so that every parameter has an effect
and a gradient.
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

# Values of `lora.target_modules`.
LINEARS = ["q", "k", "v", "o", "gate", "up", "down"]
EVERYWHERE = [*LINEARS, "embedding", "head"]


@dataclass(frozen=True)
class Setting:
    """The sections of a config that decide how a model with adapters is built."""

    lora: LoraConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    dtype: torch.dtype = torch.float64  # of weights and adapters
    compiler: str | None = None  # backend of torch.compile; None: layers are not compiled


@contextmanager
def build_adapted(
    spec: DecoderSpec, setting: Setting, moved: float = 0.1
) -> Iterator[tuple[Decoder, World]]:
    """Enter this rank's world with the model in it; yield both.

    Adapters are initialized as in a run; then normal random numbers times `moved` are added.
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
        shard_model(model, parallel=setting.parallel, memory=setting.memory, world=world)
        materialize(model, setting.memory, world.device)
        init_weights(model, 3, spec)
        init_adapters(model, 7)
        if moved:
            move_adapters(model, moved)
        yield model, world


@torch.no_grad()
def move_adapters(model: Decoder, size: float) -> None:
    """Add normal random numbers times `size` to all adapters, the same on any number of ranks."""
    for name, parameter in get_adapter_parameters(model).items():
        local, offset = locate_local_part(parameter)
        noise = torch.empty_like(local)
        # By position in the full parameter, so that each rank draws its shard of the same numbers.
        fill_random(
            noise,
            offset,
            parameter.shape,
            f"moved/{name}",
            lambda values, rng: values.normal_(generator=rng),
        )
        local.add_(noise, alpha=size)


def compute_mean_loss(model: Decoder, world: World, part: int = 0, parts: int = 1) -> Tensor:
    """Return this rank's part of the small batch's mean loss.

    It is the summed loss of the rank's sequences, divided by the number of all label tokens. With
    `parts` micro-batches it is that of micro-batch `part` (from 0).
    """
    tokens, labels = make_small_batch()
    num_rows = ROWS // (world.size * parts)
    first_row = (world.rank * parts + part) * num_rows
    rows = slice(first_row, first_row + num_rows)
    loss = model(tokens[rows], labels=labels[rows], head_loss=CrossEntropy(3))
    return loss / (labels != -100).sum()
