"""Build and check distillation's teacher, run it, and compute the metrics of steps and validations.

The recipe `distill_distributed` calls `resolve_teacher` and `check_same_ids` before it builds
models, then `build_teacher` and `load_teacher`, and `compute_teacher_states` in a step. With these
states the trained model's output head computes the loss (`ops.distillation.Distillation`), whose
sums `compute_distillation_means` averages.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from recipe_lib.adapters import quantize_frozen
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.config.schema import ModelConfig
from recipe_lib.data import Batch, check_vocabulary, warn_of_positions
from recipe_lib.errors import CheckpointError, ConfigError, DataError
from recipe_lib.methods.distill.config import DistillConfig, DistillFinetuneConfig
from recipe_lib.models import Decoder, DecoderSpec, build_meta, init_weights
from recipe_lib.ops.distillation import TeacherStates
from recipe_lib.optim.optimizers import count_local_bytes
from recipe_lib.parallel import (
    DTYPES,
    Parallel,
    World,
    check_tensor,
    derive_seed,
    materialize,
    parallelize,
)
from recipe_lib.parallel.context import check_context
from recipe_lib.parallel.fsdp import evaluate_in_parts
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.training import (
    ResolvedModel,
    TrainingData,
    add_to_each,
    check_host_memory,
    name_validation,
    resolve_model,
    sum_over_validation,
)
from recipe_lib.units import format_bytes


def resolve_teacher(cfg: DistillFinetuneConfig) -> ResolvedModel:
    """Return the teacher that the config names, checked: its folder, config.json and architecture.

    Raises CheckpointError or ConfigError, with the teacher's key, if it cannot be read, or cannot
    be divided among the ranks or quantized as the config says.
    """
    keys = cfg.distill
    key = "distill.teacher" if keys.teacher else "distill.teacher_preset"  # the one that is set
    try:
        source = resolve_model(ModelConfig(path=keys.teacher, preset=keys.teacher_preset))
        spec = cast(DecoderSpec, source.spec)
        # The teacher is divided among the ranks as the model is.
        check_tensor(spec, cfg.parallel, keys.quantize_teacher)
        check_context(spec, cfg.parallel)
        if keys.quantize_teacher != "none":
            # On a model without memory, only to raise what cannot be quantized.
            dtype = DTYPES[cfg.dtype]
            quantize_frozen(build_meta(spec, dtype), keys.quantize_teacher, dtype)
    except (CheckpointError, ConfigError) as error:
        # The functions above name the keys of the trained model and its adapters in their errors:
        # these are replaced by the keys that the user has set for the teacher.
        faults = [
            fault.replace("lora.quantize_base", "distill.quantize_teacher")
            for fault in error.faults
        ]
        raise type(error)(
            *(f"{key}: {fault.removeprefix('model.preset=')}" for fault in faults)
        ) from error
    return source


def check_same_ids(source: ResolvedModel, tokenizer: Tokenizer, data: TrainingData) -> None:
    """Raise DataError, with the first difference, if an id is another token for the teacher.

    source: the teacher. tokenizer: the trained model's. DataError is also raised for samples with
    ids that the teacher's embedding lacks. Samples longer than its positions are warned of.
    """
    if source.folder is None:  # a preset, which has no tokenizer
        return
    theirs = load_tokenizer(source.folder, None, by_key=False)
    difference = find_first_difference(tokenizer, theirs)
    if difference is not None:
        raise DataError(
            f"distill.teacher: {theirs.place} and {tokenizer.place} differ: {difference}; expected"
            " a teacher with the tokenizer of the model"
        )
    check_vocabulary(tokenizer, source.spec.vocab_size, data.dataset, data.validation_dataset)
    warn_of_positions(source.spec.max_positions, data.dataset, data.validation_dataset)


def find_first_difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Return `the id 17 is 'b' in the first and 'a' in the second`; None: there is no difference.

    The first is the teacher's tokenizer, `theirs`, as the error names it first.
    """
    for token in range(max(ours.vocab_size, theirs.vocab_size)):
        our_text = _format_token(ours, token)
        their_text = _format_token(theirs, token)
        if our_text != their_text:
            return f"the id {token} is {their_text} in the first and {our_text} in the second"
    return None


def _format_token(tokenizer: Tokenizer, token: int) -> str:
    # Bytes that are no UTF-8 are escaped, since a token may be a part of a character.
    try:
        return repr(tokenizer.get_token_bytes(token).decode("utf-8", errors="backslashreplace"))
    except (DataError, IndexError, KeyError):
        return "no token"


def build_teacher(
    source: ResolvedModel, cfg: DistillFinetuneConfig, world: World
) -> tuple[Decoder, Parallel]:
    """Return a frozen teacher in this rank's memory, without values yet, and how it is divided.

    It is divided among the ranks as the model is, and computes in `cfg.dtype`. source: the teacher.
    """
    dtype = DTYPES[cfg.dtype]
    # The teacher has keys of its own for streaming and quantization. It computes in dtype, also
    # where `matmul_dtype` rounds the inputs of the model's matmuls.
    memory = replace(cfg.memory, stream_layers=cfg.distill.stream_teacher)
    settings = replace(cfg, memory=memory, matmul_dtype=None)
    teacher = build_meta(source.spec, dtype)
    quantize_frozen(teacher, cfg.distill.quantize_teacher, dtype)
    parallel = parallelize(teacher, settings, world, for_training=False)
    check_host_memory(teacher, parallel=parallel, cfg=settings, world=world)
    materialize(teacher, settings.memory, world.device)
    return teacher, parallel


def load_teacher(teacher: Decoder, source: ResolvedModel, cfg: DistillFinetuneConfig) -> None:
    """Fill a teacher's parameters: from its checkpoint, or with random values for a preset.

    Each rank reads, and quantizes, its own part.
    """
    seed = derive_seed(cfg.seed, "teacher")
    if source.folder:
        load_weights(teacher, spec=source.spec, folder=source.folder, seed=seed)
    else:
        init_weights(teacher, seed, source.spec)
    teacher.eval()  # no dropout


@torch.no_grad()
def compute_teacher_states(teacher: Decoder, batch: Batch) -> TeacherStates:
    """Return the teacher's last hidden states of a micro-batch, `[b, s, d]`, and its output head.

    Not its logits, which the loss computes for a chunk of the tokens at a time.
    """
    # FSDP frees what it gathered at the end of the root module's forward. Running the layers
    # without the head is no such forward, so that `evaluate_in_parts` frees it.
    with evaluate_in_parts(teacher):
        hidden = teacher.hidden_states(batch.tokens, batch.positions, batch.attention)

    # Called for a chunk of the tokens at a time, so that logits of all of them never exist.
    def head(hidden: Tensor, **kwargs: object) -> Tensor:
        with evaluate_in_parts(teacher, head=True):
            return cast(Tensor, teacher.lm_head(hidden, **kwargs))

    return TeacherStates(hidden, head, batch.labels)


def describe_teacher(keys: DistillConfig, teacher: nn.Module, parallel: Parallel) -> str:
    """Return a line for the log: the loss, and the memory that the teacher takes on a rank."""
    loss = (
        f"distillation: {keys.weight:g} x {keys.divergence} at temperature {keys.temperature:g}"
        f" + {1 - keys.weight:g} x cross-entropy"
    )
    layers = parallel.levers.layers
    streamed_bytes = 0 if layers is None else layers.num_bytes()
    memory = format_bytes(count_local_bytes(teacher.parameters()) - streamed_bytes)
    if streamed_bytes:
        memory += f" and {format_bytes(streamed_bytes)} in host memory"
    return f"{loss}; the teacher takes {memory} per rank"


def compute_distillation_means(
    sums: Tensor, num_label_tokens: int, keys: DistillConfig, world: World
) -> dict[str, Tensor]:
    """Return loss, divergence and cross-entropy, means over the label tokens of all ranks.

    sums: divergence and cross-entropy summed over this rank's label tokens, `[2]`.
    num_label_tokens: of all ranks. A collective.
    """
    sums = world.all_reduce_sum(world.sum_over_sequence(sums))
    divergence, cross_entropy = sums / max(1, num_label_tokens)
    loss = keys.weight * divergence + (1 - keys.weight) * cross_entropy
    return {"loss": loss, "divergence": divergence, "cross_entropy": cross_entropy}


def validate_distillation(
    model: nn.Module,
    parallel: Parallel,
    add_sums: Callable[[Batch, Tensor], Tensor],
    data: TrainingData,
    keys: DistillConfig,
    world: World,
) -> dict[str, float]:
    """Return the metrics of a validation by name: means over label tokens, and their number.

    Each validation sequence counts once; the model runs without dropout. A collective. add_sums:
    runs a micro-batch, and adds its divergence and its cross-entropy to a tensor `[2]`.
    """
    sums = torch.zeros(2, device=world.device, dtype=torch.float64)
    num_label_tokens, _ = sum_over_validation(
        model,
        parallel,
        data,
        compute_sums=add_to_each(parallel, add_sums, sums),
        sums=sums,
    )
    means = compute_distillation_means(
        sums=sums, num_label_tokens=num_label_tokens, keys=keys, world=world
    )
    return name_validation(means) | {"validation_tokens": num_label_tokens}
