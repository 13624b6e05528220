"""How a model is divided among the ranks, and what its layers keep: all of it in one list of calls,
and one result.

    parallel = parallelize(model, cfg, world)
    for micro_batch in parallel.micro_batches(batches):
        parallel.backward(compute_loss(micro_batch))
    all_reduce_gradients(model, parallel, world)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.mesh import SCHEDULES, count_stages, count_token_ranks, list_rank_stages
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.errors import ConfigError
from recipe_lib.memory.apply_levers import MemoryLevers, apply_memory_levers
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.models.mixture import BalanceLoss, ExpertLoad, Mixture
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.ops.deferred import linear
from recipe_lib.parallel.context import shard_sequences
from recipe_lib.parallel.ddp import Replicas, find_replicas, sum_replica_gradients
from recipe_lib.parallel.fsdp import Unit, parameter_bytes, shard_model, whole_elements
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation
from recipe_lib.parallel.pipeline.balance import split_layers
from recipe_lib.parallel.pipeline.driver import Pipeline
from recipe_lib.parallel.tensor import shard_tensors
from recipe_lib.parallel.world import World
from recipe_lib.units import format_bytes, format_count


@dataclass(frozen=True)
class Parallel:
    """What was decided for one model on this rank; what trains, runs or saves the model takes it as
    an argument.
    """

    pipeline: Pipeline | None = None
    """Runs this rank's stages; None without a pipeline."""
    tensor_gradients: dict[str, str] = field(default_factory=dict)
    """By parameter name, what its gradient is on a rank of a tensor-parallel group: `sharded` (that
    of its part) or `partial` (a part of the sum); empty without one."""
    units: list[Unit] = field(default_factory=list)
    """The FSDP units."""
    replicas: Replicas | None = None
    """Of a model that every data rank has whole; None for one that is sharded, or the only one."""
    levers: MemoryLevers = field(default_factory=MemoryLevers)
    """Of the section `memory`."""
    accumulation: GradientAccumulation | None = None
    """How the gradients of a step's micro-batches are added up; None for a model that is not
    trained."""
    balance: BalanceLoss | None = None
    """The auxiliary loss of a mixture's routers."""
    data_ranks: int = 1
    """Ranks that have batches of their own."""
    token_ranks: int = 1
    """Ranks that share the tokens of a sequence, whose number they divide."""

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """A parameter of this rank that another rank of the pipeline has too, and counts in
        norms.
        """
        return None if self.pipeline is None else self.pipeline.tied_copy

    def micro_batches(self, batches: StepBatches) -> Iterator[Batch]:
        """Yield this rank's micro-batches of a step, each when its loss is to go backward.

        The loop's body computes the loss of a micro-batch by calling the model, and hands it to
        `backward`, once. In a pipeline this runs the rank's part of the schedule: the rank with the
        last stage gets each micro-batch when its hidden states have arrived, of which the model
        then computes the head alone; on other ranks the body never runs. After the loop all
        gradients are there, but for what `all_reduce_gradients` sums. A collective.

        Raise ConfigError for a body that does not call `backward` once.
        """
        if self.accumulation is None:
            raise ValueError("this model was made with for_training=False, so it has no backward")
        if self.levers.quantization is not None:
            self.levers.quantization.begin(batches.step)
        if self.balance is not None:
            self.balance.begin(len(batches.micro_batches) * self.data_ranks)
        if self.pipeline is not None:
            in_turn = self.pipeline.train(batches.micro_batches, self.accumulation)
        else:
            in_turn = self.accumulation.take_in_turn(batches.micro_batches)
        yield from self.accumulation.lend(in_turn)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a micro-batch's loss and add them to the parameters'.

        In a pipeline that of the head and of its hidden states; the stages' follow when the loop of
        `micro_batches` goes on. Raise ConfigError outside of that loop, and for a second call.
        """
        if self.accumulation is None:
            raise ValueError("this model was made with for_training=False, so it has no backward")
        self.accumulation.expect_backward()
        if self.pipeline is not None:
            self.pipeline.backward(loss)
        else:
            loss.backward()


def parallelize(
    model: Decoder, cfg: FullFinetuneConfig, world: World, *, for_training: bool = True
) -> Parallel:
    """Divide a meta model among the ranks and apply the levers of the section `memory`, in place,
    in this order.

    Adapters and what a recipe adds are there already, and what is frozen is so; `materialize` gives
    memory afterwards. Parameters keep their names. for_training: False for a model that has no
    backward, such as a frozen reference.

    Raises ConfigError for what model and config cannot have together: `split_pipeline`,
    `shard_tensors`, `shard_sequences`, `apply_memory_levers` and `shard_model` say what.
    """
    pipeline = split_pipeline(model, cfg, world)
    tensor_gradients = shard_tensors(model, cfg.parallel, cfg.memory, world)
    shard_sequences(model, cfg.parallel, world)
    levers = apply_memory_levers(
        model, cfg, world.device, pipeline, for_training=for_training, data_ranks=world.copies
    )
    units = shard_model(
        model, cfg.parallel, cfg.memory, world, whole_layers=cfg.compile or cfg.memory.mlp_tiles > 1
    )
    if for_training and not cfg.compile:  # compiled layers count nothing
        for module in model.modules():
            if isinstance(module, Mixture):
                module.load = ExpertLoad(module.router.out_features, world.device)
    replicas = find_replicas(cfg.parallel, cfg.memory, world)
    accumulation = None
    if for_training:
        # A gradient that is stepped in backward is gone before it could be added up on the host.
        sends = cfg.memory.cpu_offload and not cfg.memory.optimizer_in_backward
        accumulation = GradientAccumulation(model, cfg.parallel, world.device if sends else None)
    return Parallel(
        pipeline=pipeline,
        tensor_gradients=tensor_gradients,
        units=units,
        replicas=replicas,
        levers=levers,
        accumulation=accumulation,
        balance=_add_balance_loss(model, cfg, world) if for_training else None,
        data_ranks=world.data_ranks,
        token_ranks=count_token_ranks(cfg.parallel),
    )


def _add_balance_loss(
    model: nn.Module, cfg: FullFinetuneConfig, world: World
) -> BalanceLoss | None:
    """Give each layer's router the auxiliary loss that the config asks for.

    Raise ConfigError for a model without routers.
    """
    if not cfg.router_aux_loss_coef:
        return None
    spec = getattr(model, "spec", None)
    if not isinstance(spec, DecoderSpec) or spec.mixture is None:
        raise ConfigError(
            f"router_aux_loss_coef: found {cfg.router_aux_loss_coef:g} for a model without experts"
            " of ours, expected 0; remove router_aux_loss_coef"
        )
    balance = BalanceLoss(cfg.router_aux_loss_coef, sum(spec.mixture.layers), world.context)
    for module in model.modules():
        if isinstance(module, Mixture):
            module.balance = balance
    return balance


def describe_units(model: nn.Module, parallel: Parallel) -> str:
    """Return a line for the log: the units by size, what stays gathered in the root, and what lies
    on the host; the model may be sharded.
    """
    hosted = "" if parallel.levers.layers is None else parallel.levers.layers.describe()
    return _describe_sharding(model, parallel) + hosted


def _describe_sharding(model: nn.Module, parallel: Parallel) -> str:
    units, replicas = parallel.units, parallel.replicas
    if replicas is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        count = sum(whole_elements(parameter) for parameter in trained)
        return (
            f"FSDP: off (ddp): {replicas.ranks} ranks have the same parameters, and sum the"
            f" gradients of {format_count(count)} of them once a step"
        )
    if not units:
        return "FSDP: off, each rank holds its parameters at all times"
    sizes: dict[int, list[Unit]] = {}
    for unit in units:
        sizes.setdefault(unit.bytes, []).append(unit)
    parts: list[str] = []
    for size, alike in sorted(sizes.items(), reverse=True):
        named = (f"{' + '.join(unit.names)} {format_bytes(size)}" for unit in alike)
        parts += [f"{len(alike)} x {format_bytes(size)}"] if len(alike) > 2 else named
    hosted = parallel.levers.layers.num_bytes() if parallel.levers.layers is not None else 0
    root = parameter_bytes(model) - sum(unit.bytes for unit in units) - hosted
    accumulation = parallel.accumulation
    once = (
        "; gradients reduced once a step" if accumulation is not None and accumulation.once else ""
    )
    once += (
        ", weights gathered once a step"
        if accumulation is not None and accumulation.keeps_weights
        else ""
    )
    return f"FSDP units: {', '.join(parts)}; always gathered: {format_bytes(root)}{once}"


def all_reduce_gradients(model: nn.Module, parallel: Parallel, world: World) -> None:
    """Sum the gradients of parameters that several ranks have over these, in place. A collective.

    Once a step, after the last backward and before clipping. Those are an embedding that is the
    output head of another stage of a pipeline; all of them where every data rank has the whole
    model; and what every rank of a tensor-parallel group has, such as norms. FSDP has summed the
    others in backward.
    """
    if parallel.accumulation is not None:
        parallel.accumulation.check()
    if parallel.pipeline is not None:
        parallel.pipeline.sum_tied_gradients()
    if parallel.replicas is not None:
        sum_replica_gradients(model, parallel.replicas, world)
    if world.tensor is not None:
        _sum_partial_gradients(model, parallel, world)


@torch.no_grad()
def _sum_partial_gradients(model: nn.Module, parallel: Parallel, world: World) -> None:
    """Sum what each rank of a tensor-parallel group has of a gradient, of its own tokens or heads,
    in fp32 (fp64), all of one type and device at once.

    Raise ValueError for a trained parameter that was added after `parallelize`.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in parallel.tensor_gradients:
            raise ValueError(f"{name} is trained and was added after parallelize(); add it before")
        if parallel.tensor_gradients[name] == "partial" and parameter.grad is not None:
            local = cast(DTensor, parameter.grad).to_local()
            buckets.setdefault((local.dtype, local.device), []).append(local)
    for (dtype, _), gradients in buckets.items():
        wide = torch.cat(
            [
                gradient.reshape(-1).to(torch.promote_types(dtype, torch.float32))
                for gradient in gradients
            ]
        )
        torch.distributed.all_reduce(wide, group=world.mesh.get_group("tensor"))
        for gradient, total in zip(
            gradients, wide.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))


# A model cut down to what one rank of a pipeline has: its stages' layers, and embedding or head
# where they belong.
#
# The model keeps its class, and its parameters their names. What it does when it is called is the
# part of it whose turn it is, as the pipeline's driver says: the layers of a stage, or after the
# last of them final norm and output head.


def split_pipeline(model: LanguageModel, cfg: FullFinetuneConfig, world: World) -> Pipeline | None:
    """Leave a meta model with this rank's stages alone, in place; return what runs them, None
    without a pipeline.

    A tied embedding is on the first and on the last stage; see `sum_tied_gradients`. Raises
    ConfigError: see `split_layers`, `refuse_for_pipeline`, `LanguageModel.stage_parts`.
    """
    if world.pipeline is None:
        return None
    parallel, spec, parts = cfg.parallel, model.spec, model.find_stage_parts()
    layers = split_layers(spec, cfg, world.mesh["data_shard"].size())
    refuse_for_pipeline(model, layers)
    mine = list_rank_stages(parallel, world.pipeline.rank)
    # That the model was built with; adapters and stored weights have others.
    dtype = next(model.get_submodule(parts.last[0]).parameters()).dtype
    kept = {number for stage in mine for number in layers[stage]}
    model.keep_stages(kept, first=0 in mine, last=count_stages(parallel) - 1 in mine)
    if SCHEDULES[parallel.pipeline_schedule].splits:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = MethodType(_run_linear, module)  # type: ignore[method-assign]
    pipeline = Pipeline(model, cfg, world, {stage: layers[stage] for stage in mine}, dtype)
    model.forward = pipeline.run_part  # type: ignore[method-assign, assignment]
    return pipeline


def refuse_for_pipeline(model: LanguageModel, stages: list[range]) -> None:
    """Raise ConfigError for extra parameters that no stage, or more than one, would have; call it
    while the model is still whole.
    """
    extras = find_extra_tensors(model)
    if not extras:
        return
    last, parts = len(stages) - 1, model.find_stage_parts()
    stage_of = {
        f"{parts.layers[layer]}.": stage for stage, layers in enumerate(stages) for layer in layers
    }
    stage_of |= {f"{name}.": last for name in parts.last}
    stage_of |= {
        f"{name}.": 0 for name in parts.first if name != parts.embedding or not model.spec.tied
    }
    places: dict[int, set[int]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        prefix = next((start for start in stage_of if name.startswith(start)), None)
        if name in extras and prefix is None:
            raise ConfigError(
                f"parallel.pipeline: found {name}, which the recipe added outside of the layers,"
                " expected it on one stage; put it into a layer, the last norm or the head, or set"
                " parallel.pipeline=1"
            )
        if prefix is not None:
            places.setdefault(id(tensor), set()).add(stage_of[prefix])
    shared = [name for name, tensor in extras.items() if len(places[id(tensor)]) > 1]
    if shared:
        raise ConfigError(
            f"parallel.pipeline: found {shared[0]}, which the recipe added to layers of several"
            " stages, expected it on one; give each layer its own, or set parallel.pipeline=1"
        )


def _run_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    return linear(hidden, module.weight, module.bias)
