"""The derived numbers of a run, told at its start: the batch, steps and bytes that follow from the
config on these devices with this data.

A recipe's `describe` begins with `list_derived_numbers`.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.config.mesh import add_context_dim, compute_micro_batches, count_stages
from recipe_lib.config.precision import describe_stalled_means
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import DataPlan, Dataset
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import find_stored_weights
from recipe_lib.optim.optimizers import (
    count_local_bytes,
    count_optimizer_state_bytes,
    count_warmup_steps,
)
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.training.best_step import describe_best
from recipe_lib.training.resolve_model import describe_extra
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import format_bytes, format_count, pluralize


def list_derived_numbers(
    cfg: FullFinetuneConfig,
    world: World,
    model: nn.Module,
    parallel: Parallel,
    data: TrainingData,
) -> list[str]:
    """Return lines for the log, each number with its unit and how it comes about. Collective in a
    pipeline.
    """
    levers = parallel.levers
    return [
        _describe_devices(cfg, world),
        *_describe_batch(cfg, world=world, dataset=data.dataset, plan=data.plan),
        *_describe_pipeline(cfg, parallel),
        _describe_steps(cfg, data.dataset, data.plan),
        _describe_learning_rate(cfg, data.plan.total_steps(cfg.epochs, cfg.max_steps)),
        *_describe_model(cfg, model, parallel),
        *describe_extra(model, world),
        *_describe_other_parts(model),
        *([levers.kernels] if levers.kernels else []),
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
    unit = "sequences" if dataset.group == 1 else "pairs"
    step_tokens = dataset.report.tokens / max(1, dataset.items) * global_batch_size
    if cfg.data.packing:
        unit = "packed sequences"
        step_tokens = dataset.report.tokens / plan.steps(0)
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
    """Return how the sequences go through a pipeline, and the layers that this rank has of it."""
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
        f"pipeline: {num_micro_batches} micro-batches of {pluralize(batch_size, 'sequence')} through"
        f" {count_stages(cfg.parallel)} stages, {cfg.parallel.pipeline_schedule}; here"
        f" {local_stages}"
    ]


def _describe_steps(cfg: FullFinetuneConfig, dataset: Dataset, plan: DataPlan) -> str:
    steps = plan.total_steps(cfg.epochs, cfg.max_steps)
    uncut_steps = plan.total_steps(cfg.epochs, None)
    cut = "" if steps == uncut_steps else f", cut by max_steps from {uncut_steps}"
    if cfg.max_steps is not None and cfg.max_steps > uncut_steps:
        cut = f"; max_steps {cfg.max_steps} needs more epochs"
    unit = "sequences" if dataset.group == 1 else "pairs"
    packed = " in packs" if cfg.data.packing else ""
    return (
        f"steps: {steps} ({plan.steps(0)} per epoch of {dataset.items} {unit}{packed} x"
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
    stored = find_stored_weights(model)  # quantized: fewer, packed numbers stand for the weights
    count = sum(weight.in_features * weight.out_features for weight in stored.values()) + sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.rpartition("_")[0] not in stored
    )
    streamed = parallel.levers.layers.num_bytes() if parallel.levers.layers is not None else 0
    resident = count_local_bytes(model.parameters()) - streamed
    parameters = format_bytes(resident)
    if streamed:
        parameters += f" and {format_bytes(streamed)} in host memory"
    num_gradient_bytes = count_local_bytes(trained)
    gradients = format_bytes(num_gradient_bytes)
    if cfg.memory.optimizer_in_backward:  # one group is stepped before the next has gradients
        groups = _group_reduced_parameters(model)
        num_gradient_bytes = max(map(count_local_bytes, groups), default=0)
        gradients = f"{format_bytes(num_gradient_bytes)} at a time"
    num_state_bytes = count_optimizer_state_bytes(cfg.optimizer, model.named_parameters())
    states = (
        format_bytes(num_state_bytes)
        if num_state_bytes is not None
        else "not known before the first step"
    )
    if cfg.memory.optimizer_offload:
        states += " in host memory"
        num_state_bytes = 0
    where = "host memory" if cfg.memory.cpu_offload else "memory"
    scope = " of this rank" if parallel.pipeline is not None else ""
    return [
        (
            f"parameters{scope}: {format_count(count)}, trainable {format_count(num_trained)} "
            f"({num_trained / max(1, count):.2%}), {cfg.dtype}"
        ),
        (
            f"{where} per rank: parameters {parameters}, gradients {gradients}, optimizer state"
            f" {states}; together"
            f" {format_bytes(resident + num_gradient_bytes + (num_state_bytes or 0))} before"
            " activations"
        ),
    ]


def _describe_other_parts(model: nn.Module) -> list[str]:
    """Return a line on the parts of a multimodal model that text does not run through."""
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


def _group_reduced_parameters(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the trained parameters in groups whose gradients are there at the same time: those of
    an FSDP unit, else each alone.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        return [[parameter] for parameter in model.parameters() if parameter.requires_grad]
    grouped: set[nn.Parameter] = set()
    groups = []
    # Inner units first: an outer one has what is left.
    for unit in reversed(units):
        group = [
            parameter
            for parameter in unit.parameters()
            if parameter.requires_grad and parameter not in grouped
        ]
        grouped.update(group)
        groups.append(group)
    return groups
