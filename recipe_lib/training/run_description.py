"""Describe what a run will take, and check its host memory, before it begins.

A recipe's `describe` calls `list_derived_numbers`, which returns log lines on the batch, the steps
and the bytes of the run. A recipe calls `check_host_memory` between sharding its model and
allocating it. Data ranks are those that have batches of their own; a stage is the consecutive
layers that a rank of a pipeline runs.
"""

import os
from collections.abc import Iterable

from torch import nn

from recipe_lib.config.mesh import (
    add_context_dim,
    compute_micro_batches,
    count_stages,
    count_token_ranks,
)
from recipe_lib.config.precision import describe_stalled_means
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import DataPlan, Dataset
from recipe_lib.memory.activation_offload import OffloadedActivations
from recipe_lib.memory.layer_stream import list_streamed_parameters
from recipe_lib.memory.peaks import check_host_needs, find_free_host_memory, round_up_to_pinned
from recipe_lib.models import ExternalSpec
from recipe_lib.models.decoder import Decoder, describe_attention
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import find_stored_weights
from recipe_lib.ops.device import holds_values
from recipe_lib.optim.optimizers import (
    count_local_bytes,
    count_optimizer_state_bytes,
    count_warmup_steps,
    list_optimizer_state_sizes,
)
from recipe_lib.parallel import DTYPES, Parallel, World
from recipe_lib.parallel.gradient_accumulation import (
    list_fsdp_modules,
    list_param_entries,
    reduces_once,
)
from recipe_lib.training.best_step import describe_best
from recipe_lib.training.resolve_model import describe_extra_parameters
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import format_bytes, format_count, pluralize


def list_derived_numbers(
    cfg: FullFinetuneConfig,
    world: World,
    model: nn.Module,
    parallel: Parallel,
    data: TrainingData,
) -> list[str]:
    """Return log lines on the run, each number with its unit and how it is computed.

    world: this process's rank, device and mesh. parallel: the model's sharding and levers, which
    are config keys that trade memory for time or precision. Collective in a pipeline.
    """
    levers = parallel.levers
    return [
        _describe_devices(cfg, world),
        *_describe_batch(cfg, world=world, dataset=data.dataset, plan=data.plan),
        *_describe_pipeline(cfg, parallel),
        _describe_steps(cfg, data.dataset, data.plan),
        _describe_learning_rate(cfg, data.plan.count_total_steps(cfg.epochs, cfg.max_steps)),
        *_describe_model(cfg, model, parallel),
        *describe_extra_parameters(model, world),
        *_describe_other_parts(model),
        *(
            [f"attention: {describe_attention(model.spec, DTYPES[cfg.dtype], world.device)}"]
            if isinstance(model, Decoder)
            else []
        ),
        *([levers.kernels] if levers.kernels else []),
        *_describe_scans(model, world.device.type),
        *_describe_balance_loss(cfg, model),
        *describe_best(cfg),
        *([f"checkpointing: {levers.checkpointing}"] if levers.checkpointing else []),
        *([levers.quantization.describe()] if levers.quantization else []),
        *(f"warning: {line}" for line in describe_stalled_means(cfg)),
    ]


def _describe_devices(cfg: FullFinetuneConfig, world: World) -> str:
    if world.size == 1:
        return f"devices: 1 {world.device.type}"
    shape = dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
    sizes = add_context_dim(cfg.parallel, shape).items()
    dims = [f"{name} {size}" for name, size in sizes if size > 1 or name.startswith("data")]
    line = f"devices: {world.size} {world.device.type} = {' x '.join(dims)}"
    if cfg.parallel.strategy == "auto" and world.data_ranks * cfg.parallel.context > 1:
        line += "; parallel.strategy=auto is fsdp here, since `tune run` has not planned both"
    return line


def _describe_batch(
    cfg: FullFinetuneConfig, world: World, dataset: Dataset, plan: DataPlan
) -> list[str]:
    accumulation = cfg.gradient_accumulation_steps
    global_batch_size = cfg.batch_size * accumulation * world.data_ranks
    share = dataset.report.label_token_fraction
    unit = "sequences" if dataset.group == 1 else "pairs"  # group: sequences of an item
    step_tokens = dataset.report.tokens / max(1, dataset.items) * global_batch_size
    if cfg.data.packing:
        unit = "packed sequences"
        step_tokens = dataset.report.tokens / plan.count_steps(0)
    max_tokens = cfg.max_seq_len * dataset.group
    return [
        (
            f"global batch: {global_batch_size} {unit} = batch_size {cfg.batch_size} x"
            f" gradient_accumulation_steps {accumulation} x data ranks {world.data_ranks}"
        ),
        (
            f"tokens per step: {format_count(step_tokens)} on average,"
            f" {format_count(step_tokens * share)} label tokens ({share:.1%}); at most"
            f" {format_count(global_batch_size * max_tokens)} ({global_batch_size} {unit} x"
            f" {'2 x ' if max_tokens > cfg.max_seq_len else ''}max_seq_len {cfg.max_seq_len})"
        ),
    ]


def _describe_pipeline(cfg: FullFinetuneConfig, parallel: Parallel) -> list[str]:
    if parallel.pipeline is None:
        return []
    batch_size, num_micro_batches = compute_micro_batches(cfg)
    local_stages = " and ".join(
        f"stage {stage} (layers {layers.start} to {layers.stop - 1})"
        if len(layers) > 1
        else f"stage {stage} (layer {layers.start})"
        for stage, layers in parallel.pipeline.layers.items()
    )
    return [
        f"pipeline: {num_micro_batches} micro-batches of {pluralize(batch_size, 'sequence')}"
        f" through {count_stages(cfg.parallel)} stages, {cfg.parallel.pipeline_schedule}; here"
        f" {local_stages}"
    ]


def _describe_steps(cfg: FullFinetuneConfig, dataset: Dataset, plan: DataPlan) -> str:
    steps = plan.count_total_steps(cfg.epochs, cfg.max_steps)
    uncut_steps = plan.count_total_steps(cfg.epochs, None)
    cut = "" if steps == uncut_steps else f", cut by max_steps from {uncut_steps}"
    if cfg.max_steps is not None and cfg.max_steps > uncut_steps:
        cut = f"; max_steps {cfg.max_steps} needs more epochs"
    unit = "sequences" if dataset.group == 1 else "pairs"
    packed = " in packs" if cfg.data.packing else ""
    return (
        f"steps: {steps} ({plan.count_steps(0)} per epoch of {dataset.items} {unit}{packed} x"
        f" {cfg.epochs} epochs{cut})"
    )


def _describe_learning_rate(cfg: FullFinetuneConfig, steps: int) -> str:
    schedule = cfg.lr_scheduler
    warmup = count_warmup_steps(schedule, steps)
    start = f"warm-up over {warmup} steps to " if warmup else ""
    after = max(0, steps - warmup)
    line = f"learning rate: {start}{cfg.optimizer.lr:.2e}"
    if schedule.type == "constant":
        return f"{line}, constant for {after} steps"
    final = schedule.min_lr_ratio * cfg.optimizer.lr
    return f"{line}, then {schedule.type} over {after} steps towards {final:.2e}"


def _describe_model(cfg: FullFinetuneConfig, model: nn.Module, parallel: Parallel) -> list[str]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    # Modules whose weight is quantized. Their packed parameters have fewer elements than the
    # weight, which is counted by its shape.
    stored = find_stored_weights(model)
    num_parameters = sum(
        weight.in_features * weight.out_features for weight in stored.values()
    ) + sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.rpartition("_")[0] not in stored
    )
    streamed_bytes = parallel.levers.layers.num_bytes() if parallel.levers.layers is not None else 0
    resident_bytes = count_local_bytes(model.parameters()) - streamed_bytes
    parameters = format_bytes(resident_bytes)
    if streamed_bytes:
        parameters += f" and {format_bytes(streamed_bytes)} in host memory"
    gradient_bytes = count_local_bytes(trained)
    gradients = format_bytes(gradient_bytes)
    if cfg.memory.optimizer_in_backward:  # a group is stepped before the next has gradients
        groups = _group_reduced_parameters(model)
        gradient_bytes = max(map(count_local_bytes, groups), default=0)
        gradients = f"{format_bytes(gradient_bytes)} at a time"
    # None: a plugin's optimizer does not say.
    state_bytes = count_optimizer_state_bytes(cfg.optimizer, model.named_parameters())
    states = (
        format_bytes(state_bytes) if state_bytes is not None else "not known before the first step"
    )
    if cfg.memory.optimizer_offload:
        states += " in host memory"
        state_bytes = 0
    where = "host memory" if cfg.memory.cpu_offload else "memory"
    scope = " of this rank" if parallel.pipeline is not None else ""
    return [
        (
            f"parameters{scope}: {format_count(num_parameters)}, trainable"
            f" {format_count(num_trained)} ({num_trained / max(1, num_parameters):.2%}),"
            f" {cfg.dtype}"
        ),
        (
            f"{where} per rank: parameters {parameters}, gradients {gradients}, optimizer state"
            f" {states}; together"
            f" {format_bytes(resident_bytes + gradient_bytes + (state_bytes or 0))} before"
            " activations"
        ),
    ]


def _describe_scans(model: nn.Module, device_type: str) -> list[str]:
    spec = getattr(model, "spec", None)
    text = spec.describe_scans(device_type) if isinstance(spec, ExternalSpec) else ""
    return [f"scans: {text}"] if text else []


def _describe_other_parts(model: nn.Module) -> list[str]:
    """Return a line on the parts of a multimodal model that text does not run through.

    The list is empty for a model without such parts.
    """
    names = model.other_parts if isinstance(model, LanguageModel) else ()
    if not names:
        return []
    count = sum(
        parameter.numel() for name in names for parameter in model.get_submodule(name).parameters()
    )
    return [
        f"parameters not trained: {format_count(count)} of {', '.join(names)}, which text does not"
        " run through; they are in an exported model as they are"
    ]


def _describe_balance_loss(cfg: FullFinetuneConfig, model: nn.Module) -> list[str]:
    if not cfg.router_aux_loss_coef or not isinstance(model, LanguageModel):
        return []
    return [
        f"balance loss: {cfg.router_aux_loss_coef:g} x E sum_e f_e P_e, the mean over"
        f" {pluralize(len(model.routers.sizes), 'layer')} and the micro-batches (f_e: choices of"
        f" expert e per token; P_e: its mean {model.routers.convention})"
    ]


def _group_reduced_parameters(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the trained parameters in groups whose gradients exist at the same time.

    A group is an FSDP unit, a module that FSDP gathers as one. Without FSDP it is one parameter.
    """
    units = list_fsdp_modules(model)
    if not units:
        return [[parameter] for parameter in model.parameters() if parameter.requires_grad]
    grouped: set[nn.Parameter] = set()
    groups = []
    # Inner units come first: an outer unit gathers only those of its parameters that no inner one
    # has.
    for unit in reversed(units):
        group = [
            parameter
            for parameter in unit.parameters()
            if parameter.requires_grad and parameter not in grouped
        ]
        grouped.update(group)
        groups.append(group)
    return groups


def check_host_memory(
    model: nn.Module,
    parallel: Parallel,
    cfg: FullFinetuneConfig,
    world: World,
    other: nn.Module | None = None,
) -> None:
    """Raise SetupError if offloading needs more host memory than is allowed or free.

    All ranks of this machine count together; `memory.host_memory_limit_gib` is what is allowed.
    Activations are checked later, by a function that is handed to `parallel.levers.offload`. Call
    it when the model is sharded and not yet allocated. other: another model of the run, which is
    allocated already, such as a frozen reference; None: there is none. Collective.
    """
    if world.device.type == "cpu" or not holds_values(world.device):
        return
    needs = count_offloaded_bytes(model, cfg, other)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world.any(False)  # waits until all ranks have allocated the other model
    # Read by all ranks before one allocates the model. The check of activations below compares with
    # it, too: it counts the models again.
    free_bytes, source = world.agree(find_free_host_memory)
    # The needs have the other model, whose memory is taken already: streamed layers are pinned when
    # they are allocated, and FSDP pins what it keeps on the host (see `materialize`).
    free_bytes += ranks * (sum(needs.values()) - sum(count_offloaded_bytes(model, cfg).values()))
    free = (free_bytes, source)
    # Checked now: the bytes of parameters, gradients and optimizer states, which are known.
    check_host_needs(needs, allowed=cfg.memory.host_memory_limit_gib, ranks=ranks, free=free)
    if parallel.levers.offload is not None:
        calls = count_calls_at_once(parallel, cfg, parallel.levers.offload)
        batch_size, _ = compute_micro_batches(cfg)
        max_tokens = (
            batch_size * cfg.sequences_per_item * cfg.max_seq_len // count_token_ranks(cfg.parallel)
        )

        # The bytes of activations are known when the first layer of the first micro-batch has run.
        # They are scaled to all layers that are offloaded, to the longest sequences, and to the
        # micro-batches of a pipeline whose backward is still to come.
        def judge(num_bytes: int, tokens: int) -> None:
            """Raise SetupError if activations do not fit, by those of one layer.

            num_bytes: that the layer sends to the host. tokens: that it was given; 0: unknown.
            """
            expected_bytes = calls * num_bytes
            if 0 < tokens < max_tokens:
                expected_bytes = expected_bytes * max_tokens // tokens
            check_host_needs(
                needs | {"activation_offload": expected_bytes},
                allowed=cfg.memory.host_memory_limit_gib,
                ranks=ranks,
                free=free,
            )

        parallel.levers.offload.judge = judge


def count_offloaded_bytes(
    model: nn.Module, cfg: FullFinetuneConfig, other: nn.Module | None = None
) -> dict[str, int]:
    """Return key of the section `memory` -> host bytes of one rank, without activations.

    Parameters, their gradients and the states of `memory.optimizer_offload` are in pinned memory,
    and are counted in the sizes that torch allocates for it. other: see `check_host_memory`.
    """
    needs = {}
    parameters = list(model.parameters())
    other_parameters = list(other.parameters()) if other is not None else []
    if cfg.memory.cpu_offload:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # A plugin's optimizer may not tell the size of its states; they are not counted then.
        states = count_optimizer_state_bytes(cfg.optimizer, model.named_parameters()) or 0
        needs["cpu_offload"] = (
            _count_pinned_bytes([*parameters, *other_parameters])
            + _count_gradient_bytes(model, trained, cfg)
            + states
        )
    elif cfg.memory.optimizer_offload:
        sizes = list_optimizer_state_sizes(cfg.optimizer, model.named_parameters()) or []
        needs["optimizer_offload"] = sum(map(round_up_to_pinned, sizes))
    streamed = [*list_streamed_parameters(model)]
    if other is not None:
        streamed += list_streamed_parameters(other)
    if streamed:
        needs["stream_layers"] = _count_pinned_bytes(streamed)
    return needs


def _count_pinned_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of this rank's shards, each an allocation of pinned memory by itself."""
    return sum(round_up_to_pinned(count_local_bytes([parameter])) for parameter in parameters)


def _count_gradient_bytes(
    model: nn.Module, trained: list[nn.Parameter], cfg: FullFinetuneConfig
) -> int:
    """Return the most bytes that gradients in host memory take at a time. trained: parameters."""
    # Gradients are pinned, since FSDP does not wait for their copies (`foreach_reduce`). torch 2.13
    # does wait for those that are stepped in backward; they take no more than is counted here.
    if cfg.memory.optimizer_in_backward:
        return max((_count_pinned_bytes([parameter]) for parameter in trained), default=0)
    pinned = _count_pinned_bytes(trained)
    if reduces_once(cfg.parallel) or compute_micro_batches(cfg)[1] == 1:
        return pinned
    # Each micro-batch is reduced by itself. Besides the sums there are the gradients that arrive.
    if cfg.parallel.accumulate_grad_in_fp32:
        return pinned + 2 * count_local_bytes(trained)  # fp32 sums of bf16 parameters
    arriving = [
        _count_pinned_bytes(
            entry.sharded_param
            for entry in list_param_entries(unit)
            if entry.sharded_param.requires_grad
        )
        for unit in list_fsdp_modules(model)
    ]
    return pinned + sum(sorted(arriving)[-2:])  # gradients of two FSDP units arrive at a time


def count_calls_at_once(
    parallel: Parallel, cfg: FullFinetuneConfig, window: OffloadedActivations
) -> int:
    """Return the most forwards of layers whose activations are on the host at a time.

    A layer counts once for each micro-batch. window: what offloads them; its `sent` is the number
    of layers that are offloaded.
    """
    pipeline = parallel.pipeline
    if pipeline is None:
        return max(window.sent, 0)
    # For each moment of the schedule: stage -> micro-batches whose backward is still to come.
    moments = pipeline.list_in_flight(compute_micro_batches(cfg)[1])
    return max(
        sum(count * len(pipeline.layers[stage]) for stage, count in moment.items())
        for moment in moments
    )
