"""Around distillation: the teacher in memory, its hidden states, that its ids mean the same, and
the numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from recipe_lib.adapters import init_adapters, quantize_frozen
from recipe_lib.checkpoint.adapter_loading import load_adapter
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.config.recipes.distill_distributed import DistillConfig, DistillFinetuneConfig
from recipe_lib.config.schema import ModelConfig
from recipe_lib.data import Batch, check_vocabulary, warn_of_positions
from recipe_lib.errors import CheckpointError, ConfigError, DataError
from recipe_lib.models import build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.ops.distillation import TeacherStates
from recipe_lib.optim.optimizers import count_local_bytes
from recipe_lib.parallel import DTYPES, Parallel, materialize, parallelize
from recipe_lib.parallel.context import check_context
from recipe_lib.parallel.fsdp import evaluated_in_parts
from recipe_lib.parallel.tensor_sizes import check_tensor
from recipe_lib.parallel.world import World, derive_seed
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.training.host_memory import check_host_memory
from recipe_lib.training.micro_batches import result_of_each
from recipe_lib.training.resolve_model import ResolvedModel, resolve_model
from recipe_lib.training.training_data import TrainingData
from recipe_lib.training.validation import name_validation, sum_over_validation
from recipe_lib.units import format_bytes


def resolve_teacher(cfg: DistillFinetuneConfig) -> ResolvedModel:
    """Return the teacher that the config names.

    Raises CheckpointError and ConfigError, also where the ranks cannot share it.
    """
    keys = cfg.distill
    key = "distill.teacher" if keys.teacher else "distill.teacher_preset"
    try:
        found = resolve_model(ModelConfig(path=keys.teacher, preset=keys.teacher_preset))
        check_tensor(cast(DecoderSpec, found.spec), cfg.parallel, keys.quantize_teacher)
        check_context(cast(DecoderSpec, found.spec), cfg.parallel)
        if keys.quantize_teacher != "none":
            quantize_frozen(
                build_meta(found.spec, DTYPES[cfg.dtype]), keys.quantize_teacher, DTYPES[cfg.dtype]
            )
    except (CheckpointError, ConfigError) as error:
        named = [
            fault.replace("lora.quantize_base", "distill.quantize_teacher")
            for fault in error.faults
        ]
        raise type(error)(
            *(f"{key}: {fault.removeprefix('model.preset=')}" for fault in named)
        ) from error
    return found


def check_same_ids(source: ResolvedModel, tokenizer: Tokenizer, data: TrainingData) -> None:
    """DataError, one line with the first difference, unless a teacher's tokenizer has the same
    token for every id.
    """
    if source.folder is None:
        return
    theirs = load_tokenizer(source.folder, None, by_key=False)
    difference = first_difference(tokenizer, theirs)
    if difference is not None:
        raise DataError(
            f"distill.teacher: {theirs.place} and {tokenizer.place} differ: {difference}; expected"
            " a teacher with the tokenizer of the model"
        )
    check_vocabulary(tokenizer, source.spec.vocab_size, data.dataset, data.validation_dataset)
    warn_of_positions(source.spec.max_positions, data.dataset, data.validation_dataset)


def first_difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """`the id 17 is 'a' in one and 'b' in the other`; None: all ids are the same tokens."""
    for token in range(max(ours.vocab_size, theirs.vocab_size)):
        mine, other = _text(ours, token), _text(theirs, token)
        if mine != other:
            return f"the id {token} is {other} in the first and {mine} in the second"
    return None


def _text(tokenizer: Tokenizer, token: int) -> str:
    try:
        return repr(tokenizer.get_token_bytes(token).decode("utf-8", errors="backslashreplace"))
    except (DataError, IndexError, KeyError):
        return "no token"


def place_teacher(
    source: ResolvedModel, cfg: DistillFinetuneConfig, world: World
) -> tuple[Decoder, Parallel]:
    """Return a frozen teacher in this rank's memory, divided as the model is but for its own
    storage, without values yet; it computes in dtype.
    """
    dtype = DTYPES[cfg.dtype]
    memory = replace(cfg.memory, stream_layers=cfg.distill.stream_teacher)
    settings = replace(cfg, memory=memory, matmul_dtype=None)
    teacher = build_meta(source.spec, dtype)
    quantize_frozen(teacher, cfg.distill.quantize_teacher, dtype)
    parallel = parallelize(teacher, settings, world, for_training=False)
    check_host_memory(teacher, parallel, settings, world)
    materialize(teacher, settings.memory, world.device)
    return teacher, parallel


def load_student(model: Decoder, source: ResolvedModel, cfg: DistillFinetuneConfig) -> None:
    """The first values of the model that learns, as of any other: a checkpoint's or random ones,
    and adapters'.
    """
    _load(model, source, derive_seed(cfg.seed, "model"))
    if cfg.trained_adapters is not None:
        init_adapters(model, derive_seed(cfg.seed, "adapters"))
        if cfg.lora.adapter_path:
            load_adapter(model, source.spec, Path(cfg.lora.adapter_path))


def load_teacher(teacher: Decoder, source: ResolvedModel, cfg: DistillFinetuneConfig) -> None:
    """Its values: each rank reads, and quantizes, its own part; random ones for a preset."""
    _load(teacher, source, derive_seed(cfg.seed, "teacher"))
    teacher.eval()


def _load(model: Decoder, source: ResolvedModel, seed: int) -> None:
    if source.folder:
        load_weights(model, source.spec, source.folder, seed)
    else:
        init_weights(model, seed, source.spec)


@torch.no_grad()
def teacher_states(teacher: Decoder, batch: Batch) -> TeacherStates:
    """What the teacher's layers make of a micro-batch, and its head: hidden states `[b, s, d]`, no
    logits.
    """
    with evaluated_in_parts(teacher):
        hidden = teacher.hidden_states(batch.tokens, batch.positions, batch.attention)

    def head(hidden: Tensor, **kwargs: object) -> Tensor:
        with evaluated_in_parts(teacher, head=True):
            return cast(Tensor, teacher.lm_head(hidden, **kwargs))

    return TeacherStates(hidden, head, batch.labels)


def distill_means(
    sums: Tensor, tokens: int, keys: DistillConfig, world: World
) -> dict[str, Tensor]:
    """Loss, divergence and cross-entropy, means over label tokens. A collective. sums: `[2]`, those
    of this rank's tokens; tokens: of all ranks.
    """
    divergence, cross_entropy = world.all_reduce_sum(world.sum_over_sequence(sums)) / max(1, tokens)
    loss = keys.weight * divergence + (1 - keys.weight) * cross_entropy
    return {"loss": loss, "divergence": divergence, "cross_entropy": cross_entropy}


def describe_teacher(keys: DistillConfig, teacher: nn.Module, parallel: Parallel) -> str:
    """Return one line for the log: the loss, and what the teacher takes of a rank's memory."""
    loss = f"distillation: {keys.weight:g} x {keys.divergence} at temperature {keys.temperature:g}"
    loss += f" + {1 - keys.weight:g} x cross-entropy"
    streamed = 0 if parallel.levers.layers is None else parallel.levers.layers.num_bytes()
    held = format_bytes(count_local_bytes(teacher.parameters()) - streamed)
    held += f" and {format_bytes(streamed)} in host memory" if streamed else ""
    return f"{loss}; the teacher takes {held} per rank"


def validation_distillation(
    model: nn.Module,
    parallel: Parallel,
    add_sums: Callable[[Batch, Tensor], Tensor],
    data: TrainingData,
    keys: DistillConfig,
    world: World,
) -> dict[str, float]:
    """Means over the label tokens of all validation sequences, each counted once; without dropout.
    Collective.

    add_sums: runs a micro-batch, and adds its divergence and its cross-entropy to a tensor `[2]`.
    """
    sums = torch.zeros(2, device=world.device, dtype=torch.float64)

    def add(batch: Batch) -> None:
        add_sums(batch, sums)

    tokens, _ = sum_over_validation(
        model, parallel, data, partial(result_of_each, parallel, add), sums
    )
    return name_validation(distill_means(sums, tokens, keys, world)) | {"validation_tokens": tokens}
