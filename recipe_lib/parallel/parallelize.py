"""Divide a model among the ranks and apply the config's memory settings, in place.

A recipe calls `parallelize` once, on the meta model. In each step it loops over
`Parallel.micro_batches`, calls `backward` in the loop's body, and `all_reduce_gradients` after it.
A lever is a setting of the section `memory` that trades device memory for time, such as activation
checkpointing. A unit is the modules whose parameters FSDP gathers together, the root the unit of
the model itself. A stage is consecutive layers that one rank of a pipeline runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
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
from recipe_lib.models import Decoder, ExternalSpec, find_extra_tensors
from recipe_lib.models.language_model import LanguageModel, find_own_forwards
from recipe_lib.models.mixture import BalanceLoss, ExpertLoad, Mixture, Routers
from recipe_lib.ops.deferred import linear
from recipe_lib.parallel.context import refuse_for_context, shard_sequences
from recipe_lib.parallel.ddp import Replicas, find_replicas, sum_replica_gradients
from recipe_lib.parallel.fsdp import Unit, count_parameter_bytes, count_whole_elements, shard_model
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation
from recipe_lib.parallel.pipeline.balance import split_layers
from recipe_lib.parallel.pipeline.driver import Pipeline
from recipe_lib.parallel.tensor import refuse_for_tensor, shard_tensors
from recipe_lib.parallel.world import World
from recipe_lib.units import format_bytes, format_count


@dataclass(frozen=True)
class Parallel:
    """The division of one model on this rank, as `parallelize` has decided and applied it.

    Functions that train, evaluate or save the model take it as an argument.
    """

    # Runs micro-batches through this rank's stages; None without a pipeline.
    pipeline: Pipeline | None = None
    # By parameter name, the kind of its gradient on a rank of a tensor-parallel group: `sharded`,
    # the gradient of this rank's part, or `partial`, this rank's summand of the whole gradient.
    # Empty without tensor parallelism.
    tensor_gradients: dict[str, str] = field(default_factory=dict)
    # The FSDP units, without the root; empty where FSDP does not shard the model.
    units: list[Unit] = field(default_factory=list)
    # How gradients are summed if every data rank has the whole model (`parallel.strategy: ddp`).
    # None for another strategy, and where there is nothing to sum.
    replicas: Replicas | None = None
    # The objects that the section `memory` of the config has set up in the model.
    levers: MemoryLevers = field(default_factory=MemoryLevers)
    # Adds up the gradients of a step's micro-batches; None for a model that is not trained.
    accumulation: GradientAccumulation | None = None
    # The auxiliary load-balancing loss of a mixture's routers; None if the config asks for none.
    balance: BalanceLoss | None = None
    # Number of ranks, or groups of ranks, that have batches of their own.
    data_ranks: int = 1
    # Number of ranks (tensor and context parallel) that divide the tokens of a micro-batch.
    token_ranks: int = 1

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Return the tied embedding if it is a copy that a norm of gradients is to leave out.

        That is so on the last rank of a pipeline, as the first rank counts it. Otherwise None.
        """
        return None if self.pipeline is None else self.pipeline.tied_copy

    def micro_batches(self, batches: StepBatches) -> Iterator[Batch]:
        """Yield this rank's micro-batches of a step, each when its loss is to go backward.

        The loop's body computes the loss of a micro-batch by calling the model, and hands it to
        `backward`, once. In a pipeline this runs the rank's part of the schedule. The rank with the
        last stage gets each micro-batch when its hidden states have arrived, and a call of the
        model there computes the output head alone; on other ranks the body never runs. After the
        loop only the sums of `all_reduce_gradients` are missing. A collective: all ranks call it.

        Raise ConfigError for a body that does not call `backward` exactly once, and ValueError for
        a model that is not trained.
        """
        if self.accumulation is None:
            raise ValueError("this model was made with for_training=False, so it has no backward")
        if self.levers.quantization is not None:  # quantization-aware training may begin later
            self.levers.quantization.begin(batches.step)
        if self.balance is not None:
            # The loss is a mean over all micro-batches of the step.
            self.balance.begin(len(batches.micro_batches) * self.data_ranks)
        if self.pipeline is not None:
            micro_batches = self.pipeline.train(batches.micro_batches, self.accumulation)
        else:
            micro_batches = self.accumulation.take_in_turn(batches.micro_batches)
        yield from self.accumulation.lend(micro_batches)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a micro-batch's loss `[]` and add them to the parameters'.

        In a pipeline only those of the head and of its hidden states; the gradients of the stages
        follow when the loop over `micro_batches` goes on. Raise ConfigError outside of that loop
        and for a second call on a micro-batch, and ValueError for a model that is not trained.
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
    """Divide a meta model among the ranks and apply the section `memory` of the config, in place.

    Called after adapters and a recipe's own modules have been added and parameters frozen, and
    before `materialize`, which allocates the parameters. Parameters keep their names. for_training:
    False for a model that has no backward, such as a frozen reference.

    Raise ConfigError for a model that does not fit the config's sizes and settings, or that a
    recipe has changed in a way that they do not allow.
    """
    # What a recipe has changed is told before modules get forwards of the ranks.
    if world.tensor is not None:
        refuse_for_tensor(model)
    if world.context is not None:
        refuse_for_context(model)
    if for_training:
        model.routers = _find_routers(model, cfg)
    # In this order: each call takes the modules as those before it have left them.
    pipeline = split_pipeline(model, cfg, world)
    tensor_gradients = shard_tensors(model, parallel=cfg.parallel, memory=cfg.memory, world=world)
    shard_sequences(model, cfg.parallel, world)
    levers = apply_memory_levers(
        model,
        cfg=cfg,
        device=world.device,
        pipeline=pipeline,
        for_training=for_training,
        data_ranks=world.copies,
    )
    units = shard_model(
        model,
        parallel=cfg.parallel,
        memory=cfg.memory,
        world=world,
        whole_layers=cfg.compile or cfg.memory.mlp_tiles > 1,
    )
    modules = {name for name, _ in model.named_modules()}
    for name, counter in model.routers.counters.items():
        if name in modules:  # others are on other ranks of a pipeline
            counter.load = ExpertLoad(model.routers.sizes[name], world.device)
    replicas = find_replicas(cfg.parallel, cfg.memory, world)
    accumulation = None
    if for_training:
        # A gradient that is stepped in backward is gone before it could be added up on the host.
        adds_on_host = cfg.memory.cpu_offload and not cfg.memory.optimizer_in_backward
        accumulation = GradientAccumulation(
            model, cfg.parallel, world.device if adds_on_host else None
        )
    return Parallel(
        pipeline=pipeline,
        tensor_gradients=tensor_gradients,
        units=units,
        replicas=replicas,
        levers=levers,
        accumulation=accumulation,
        balance=_add_balance_loss(model.routers, cfg, world) if for_training else None,
        data_ranks=world.data_ranks,
        token_ranks=count_token_ranks(cfg.parallel),
    )


def _find_routers(model: LanguageModel, cfg: FullFinetuneConfig) -> Routers:
    """Find the routers whose choices are counted, before levers and ranks replace forwards.

    Raise ConfigError if `router_aux_loss_coef` is set and their choices cannot be counted.
    """
    spec = model.spec
    if cfg.compile:  # compiled layers do not count
        return Routers()
    if isinstance(spec, ExternalSpec):
        try:
            return spec.record_routers(model)
        except ConfigError:
            if cfg.router_aux_loss_coef:
                raise
            return Routers()
    counters = {
        name: module for name, module in model.named_modules() if isinstance(module, Mixture)
    }
    return Routers(
        {name: module.router.out_features for name, module in counters.items()}, counters
    )


def _add_balance_loss(
    routers: Routers, cfg: FullFinetuneConfig, world: World
) -> BalanceLoss | None:
    """Give each layer's router the auxiliary loss of `router_aux_loss_coef`, and return the loss.

    Return None for a coefficient of 0. Raise ConfigError for a model without routers.
    """
    if not cfg.router_aux_loss_coef:
        return None
    if not routers.sizes:
        raise ConfigError(
            f"router_aux_loss_coef: found {cfg.router_aux_loss_coef:g} for a model without experts,"
            " or whose class does not name its routers, expected 0; remove router_aux_loss_coef"
        )
    balance = BalanceLoss(cfg.router_aux_loss_coef, len(routers.sizes), world.context)
    for counter in routers.counters.values():
        counter.balance = balance
    return balance


def describe_units(model: nn.Module, parallel: Parallel) -> str:
    """Return a line for the log: the FSDP units by size, the root, and the layers kept on the host.

    It may be called before or after the model is sharded.
    """
    # A text on the layers that `memory.stream_layers` keeps in host memory, with its own separator.
    hosted = "" if parallel.levers.layers is None else parallel.levers.layers.describe()
    if parallel.replicas is not None:
        num_trained_elements = sum(
            count_whole_elements(parameter)
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        return (
            f"FSDP: off (ddp): {parallel.replicas.ranks} ranks have the same parameters, and sum"
            f" the gradients of {format_count(num_trained_elements)} of them once a step{hosted}"
        )
    if not parallel.units:
        return f"FSDP: off, each rank holds its parameters at all times{hosted}"
    return f"FSDP units: {_describe_sizes(model, parallel)}{hosted}"


def _describe_sizes(model: nn.Module, parallel: Parallel) -> str:
    """Return the units by size, largest first, and which collectives run once a step only.

    As in "32 x 416 MiB, lm_head 1 GiB; always gathered: 8 KiB; gradients reduced once a step".
    """
    units_by_size: dict[int, list[Unit]] = {}  # by bytes
    for unit in parallel.units:
        units_by_size.setdefault(unit.bytes, []).append(unit)
    size_texts: list[str] = []
    for size, units in sorted(units_by_size.items(), reverse=True):
        if len(units) > 2:
            size_texts.append(f"{len(units)} x {format_bytes(size)}")
        else:
            size_texts += [f"{' + '.join(unit.names)} {format_bytes(size)}" for unit in units]
    root_bytes = count_parameter_bytes(model) - sum(unit.bytes for unit in parallel.units)
    if parallel.levers.layers is not None:  # in no unit, and not in the root either
        root_bytes -= parallel.levers.layers.num_bytes()
    line = f"{', '.join(size_texts)}; always gathered: {format_bytes(root_bytes)}"
    if parallel.accumulation is not None and parallel.accumulation.once:
        line += "; gradients reduced once a step"
        if parallel.accumulation.keeps_weights:
            line += ", weights gathered once a step"
    return line


def all_reduce_gradients(model: nn.Module, parallel: Parallel, world: World) -> None:
    """Sum the gradients of parameters that several ranks hold, over these ranks and in place.

    Called by all ranks once a step, after the last backward and before clipping. Such parameters
    are, where the config has them:

    - in a pipeline, the embedding that is also the output head of the last stage;
    - with `parallel.strategy: ddp`, all trained parameters;
    - in a tensor-parallel group, those that every rank has whole, such as norms.

    FSDP has summed the gradients of all others in backward.
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
    """Sum the gradients marked `partial` over the tensor-parallel group, in place.

    Each rank has the summand of its own tokens or heads. They are summed in fp32 (fp64 ones in
    fp64), all of one dtype and device in one all-reduce. Raise ValueError for a trained parameter
    that was added after `parallelize`.
    """
    # Gradients that one all-reduce sums, by their dtype and device.
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
        packed = torch.cat(
            [
                gradient.reshape(-1).to(torch.promote_types(dtype, torch.float32))
                for gradient in gradients
            ]
        )
        torch.distributed.all_reduce(packed, group=world.mesh.get_group("tensor"))
        for gradient, total in zip(
            gradients, packed.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))


# Cut a model down to what one rank of a pipeline has: the layers of its stages, the embedding with
# the first stage, and final norm and output head with the last.
#
# The model keeps its class, and its parameters their names. A call of it runs one part, which the
# pipeline's driver sets before the call (`Pipeline.run_part`): the layers of a stage, or norm and
# head.


def split_pipeline(model: LanguageModel, cfg: FullFinetuneConfig, world: World) -> Pipeline | None:
    """Remove other ranks' stages from a meta model, in place; return the runner of this rank's.

    Return None without a pipeline. A tied embedding is on the first and on the last stage, which
    sum their gradients (`Pipeline.sum_tied_gradients`). Raise ConfigError for a model with fewer
    layers than stages, for numbers of layers that do not fit it, for an external model that cannot
    be divided, and for a recipe's own tensors that are not on one stage.
    """
    if world.pipeline is None:
        return None
    layers = split_layers(model.spec, cfg, world.mesh["data_shard"].size())
    splits_backward = SCHEDULES[cfg.parallel.pipeline_schedule].splits  # into input and weights
    refuse_for_pipeline(model, layers, replaces_linears=splits_backward)
    stages = list_rank_stages(cfg.parallel, world.pipeline.rank)
    # The model's own dtype, as that of the final norm: adapters and quantized weights have others.
    dtype = next(model.get_submodule(model.find_stage_parts().last[0]).parameters()).dtype
    model.keep_stages(
        set(chain.from_iterable(layers[stage] for stage in stages)),
        first=0 in stages,
        last=count_stages(cfg.parallel) - 1 in stages,
    )
    if splits_backward:
        for module in model.modules():
            # By type: a subclass, such as a linear with adapters, keeps its forward.
            if type(module) is nn.Linear:
                module.forward = MethodType(_run_linear, module)  # type: ignore[method-assign]
    pipeline = Pipeline(
        model, cfg=cfg, world=world, layers={stage: layers[stage] for stage in stages}, dtype=dtype
    )
    model.forward = pipeline.run_part  # type: ignore[method-assign, assignment]
    return pipeline


def refuse_for_pipeline(
    model: LanguageModel, stages: list[range], *, replaces_linears: bool = False
) -> None:
    """Raise ConfigError for what a recipe has added that a pipeline would leave out.

    That is an own forward of what stages do not call, and own tensors that no stage, or more than
    one, would have. Called while the model still has all stages. stages: of each stage, the indices
    of its layers. replaces_linears: plain linears run by another forward.
    """
    # A stage of ours calls the layers themselves, that of an external model the class' own forward.
    replaced = {"", "model"} if isinstance(model, Decoder) else {""}
    if replaces_linears:
        replaced |= {name for name, linear in model.named_modules() if type(linear) is nn.Linear}
    if skipped := [name for name in find_own_forwards(model) if name in replaced]:
        raise ConfigError(
            f"parallel.pipeline: found another forward of {skipped[0] or 'the model'}, which the"
            " recipe added, expected one of a layer, the last norm or the head: stages run these;"
            " change those, or set parallel.pipeline=1"
        )
    extras = find_extra_tensors(model)
    if not extras:
        return
    parts = model.find_stage_parts()
    # The stage of a module, by the name of the module and a dot.
    stage_by_prefix = {f"{name}.": len(stages) - 1 for name in parts.last}
    for stage, layers in enumerate(stages):
        stage_by_prefix |= {f"{parts.layers[layer]}.": stage for layer in layers}
    # A tied embedding is on the first and the last stage, so what is added to it is on two.
    stage_by_prefix |= {
        f"{name}.": 0 for name in parts.first if name != parts.embedding or not model.spec.tied
    }
    stages_of_tensors: dict[int, set[int]] = {}  # by the tensor's id
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        prefix = next((prefix for prefix in stage_by_prefix if name.startswith(prefix)), None)
        if name in extras and prefix is None:
            raise ConfigError(
                f"parallel.pipeline: found {name}, which the recipe added outside of the layers,"
                " expected it on one stage; put it into a layer, the last norm or the head, or set"
                " parallel.pipeline=1"
            )
        if prefix is not None:
            stages_of_tensors.setdefault(id(tensor), set()).add(stage_by_prefix[prefix])
    shared = [name for name, tensor in extras.items() if len(stages_of_tensors[id(tensor)]) > 1]
    if shared:
        raise ConfigError(
            f"parallel.pipeline: found {shared[0]}, which the recipe added to layers of several"
            " stages, expected it on one; give each layer its own, or set parallel.pipeline=1"
        )


def _run_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    """Run a linear by the op whose weight gradient can be deferred."""
    return linear(hidden, module.weight, module.bias)
