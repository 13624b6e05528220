"""The derived numbers of a run, said at its start: what the config means on these devices with this
data.
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
from recipe_lib.training.added_parameters import describe_extra
from recipe_lib.training.best_step import describe_best
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
    dataset, plan = data.dataset, data.plan
    return [
        _describe_devices(cfg, world),
        *_describe_batch(cfg, world, dataset, plan),
        *_describe_pipeline(cfg, parallel),
        _describe_steps(cfg, dataset, plan),
        _describe_learning_rate(cfg, plan.total_steps(cfg.epochs, cfg.max_steps)),
        *_describe_model(cfg, model, parallel),
        *describe_extra(model, world),
        *_describe_other_parts(model),
        *([parallel.levers.kernels] if parallel.levers.kernels else []),
        *describe_best(cfg),
        *(
            [f"checkpointing: {parallel.levers.checkpointing}"]
            if parallel.levers.checkpointing
            else []
        ),
        *([parallel.levers.quantization.describe()] if parallel.levers.quantization else []),
        *(f"warning: {line}" for line in describe_stalled_means(cfg)),
    ]


def _describe_devices(cfg: FullFinetuneConfig, world: World) -> str:
    if world.size == 1:
        return f"devices: 1 {world.device.type}"
    shape = dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
    sizes = add_context_dim(cfg.parallel, shape).items()
    dims = [f"{name} {size}" for name, size in sizes if size > 1 or name.startswith("data")]
    undecided = cfg.parallel.strategy == "auto" and world.data_ranks * cfg.parallel.context > 1
    auto = (
        "; parallel.strategy=auto is fsdp here, since `tune run` has not planned both"
        if undecided
        else ""
    )
    return f"devices: {world.size} {world.device.type} = {' x '.join(dims)}{auto}"


def _describe_batch(
    cfg: FullFinetuneConfig, world: World, dataset: Dataset, plan: DataPlan
) -> list[str]:
    accumulation = cfg.gradient_accumulation_steps
    global_batch_size = cfg.batch_size * accumulation * world.data_ranks
    share = dataset.report.label_token_fraction
    per_item = dataset.report.tokens / max(1, dataset.items)
    step_tokens = (
        dataset.report.tokens / plan.steps(0) if cfg.data.packing else per_item * global_batch_size
    )
    unit = (
        "packed sequences" if cfg.data.packing else "sequences" if dataset.group == 1 else "pairs"
    )
    longest = cfg.max_seq_len * dataset.group
    return [
        (
            f"global batch: {global_batch_size} {unit} = batch_size {cfg.batch_size} x"
            f" gradient_accumulation_steps {accumulation} x data ranks {world.data_ranks}"
        ),
        (
            f"tokens per step: {format_count(step_tokens)} on average,"
            f" {format_count(step_tokens * share)} label tokens ({share:.1%}); at most"
            f" {format_count(global_batch_size * longest)} ({global_batch_size} {unit} x"
            f" {'2 x ' if longest > cfg.max_seq_len else ''}max_seq_len {cfg.max_seq_len})"
        ),
    ]


def _describe_pipeline(cfg: FullFinetuneConfig, parallel: Parallel) -> list[str]:
    """Return how the sequences go through a pipeline, and which layers this rank has of it."""
    pipeline = parallel.pipeline
    if pipeline is None:
        return []
    batch_size, count = compute_micro_batches(cfg)
    stages = count_stages(cfg.parallel)
    here = " and ".join(
        f"stage {stage}"
        f" (layer{f's {of.start} to {of.stop - 1}' if len(of) > 1 else f' {of.start}'})"
        for stage, of in pipeline.layers.items()
    )
    return [
        f"pipeline: {count} micro-batches of {pluralize(batch_size, 'sequence')} through "
        f"{stages} stages, {cfg.parallel.pipeline_schedule}; here {here}"
    ]


def _describe_steps(cfg: FullFinetuneConfig, dataset: Dataset, plan: DataPlan) -> str:
    steps, full = plan.total_steps(cfg.epochs, cfg.max_steps), plan.total_steps(cfg.epochs, None)
    cut = "" if steps == full else f", cut by max_steps from {full}"
    if cfg.max_steps is not None and cfg.max_steps > full:
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
    if schedule.type == "constant":
        return f"learning rate: {start}{cfg.optimizer.lr:.2e}, constant for {after} steps"
    final = schedule.min_lr_ratio * cfg.optimizer.lr
    return (
        f"learning rate: {start}{cfg.optimizer.lr:.2e}, then {schedule.type} over {after} steps"
        f" towards {final:.2e}"
    )


def _describe_model(cfg: FullFinetuneConfig, model: nn.Module, parallel: Parallel) -> list[str]:
    every = list(model.parameters())
    trained = [parameter for parameter in every if parameter.requires_grad]
    stored = find_stored_weights(model)  # quantized: fewer, packed numbers stand for the weights
    plain = (
        parameter
        for name, parameter in model.named_parameters()
        if name.rpartition("_")[0] not in stored
    )
    count = sum(parameter.numel() for parameter in plain)
    count += sum(weight.in_features * weight.out_features for weight in stored.values())
    trained_count = sum(parameter.numel() for parameter in trained)
    streamed = parallel.levers.layers.num_bytes() if parallel.levers.layers is not None else 0
    parameters, gradients = count_local_bytes(every) - streamed, count_local_bytes(trained)
    held = (
        f"{format_bytes(parameters)} and {format_bytes(streamed)} in host memory"
        if streamed
        else ""
    )
    state = count_optimizer_state_bytes(cfg.optimizer, model.named_parameters())
    where = "host memory" if cfg.memory.cpu_offload else "memory"
    known = "not known before the first step" if state is None else format_bytes(state)
    if cfg.memory.optimizer_offload:
        known, state = f"{known} in host memory", 0
    freed = ""
    if cfg.memory.optimizer_in_backward:
        gradients, freed = (
            max(map(count_local_bytes, _group_reduced_parameters(model)), default=0),
            " at a time",
        )
    total = parameters + gradients + (state or 0)
    here = " of this rank" if parallel.pipeline is not None else ""
    return [
        (
            f"parameters{here}: {format_count(count)}, trainable {format_count(trained_count)} "
            f"({trained_count / max(1, count):.2%}), {cfg.dtype}"
        ),
        (
            f"{where} per rank: parameters {held or format_bytes(parameters)}, gradients"
            f" {format_bytes(gradients)}{freed}, optimizer state {known}; together"
            f" {format_bytes(total)} before activations"
        ),
    ]


def _describe_other_parts(model: nn.Module) -> list[str]:
    """Return what of a multimodal model text does not run through."""
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
    """Return the trained parameters whose gradients are there at the same time: those of an FSDP
    unit, else each alone.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        return [[parameter] for parameter in model.parameters() if parameter.requires_grad]
    taken: set[int] = set()
    found = []
    for unit in reversed(units):  # inner ones first
        own = [one for one in unit.parameters() if one.requires_grad and id(one) not in taken]
        taken |= {id(one) for one in own}
        found.append(own)
    return found
