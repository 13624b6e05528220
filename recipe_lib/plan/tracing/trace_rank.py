"""A recipe run in the simulated world, phase by phase, as a trace; and the same tracer around a
real run.
"""

import gc
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipe_lib.adapters import nf4
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.checkpoint.model_export import find_extra_fault, gather_whole
from recipe_lib.config.mesh import add_context_dim, compute_micro_batches, split_context_coordinate
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError, find_lines_in
from recipe_lib.models.meta_init import find_extra_tensors, find_stored_weights
from recipe_lib.parallel import World
from recipe_lib.parallel.gradient_accumulation import entries_of
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.plan.simulated_world import sequence_lengths
from recipe_lib.plan.simulated_world.cached_fake_mode import CachedFakeMode
from recipe_lib.plan.simulated_world.compiled_code import trace_compiled_code
from recipe_lib.plan.simulated_world.patches import (
    apply_patches,
    follow_works,
    patch_document_search,
)
from recipe_lib.plan.simulated_world.planned_batches import PlannedData, list_batch_tensors
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.simulated_world.simulated_ranks import (
    connect_streams,
    enter_simulated_world,
    use_fake_tensors,
)
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.operator_costs import list_plain_tensors
from recipe_lib.plan.tracing.pipeline_actions import (
    count_micro_batches_to_trace,
    follow_actions,
    is_last_different,
    name_parts,
    repeat_actions,
)
from recipe_lib.plan.tracing.repeated_calls import repeat_shaped_work
from recipe_lib.plan.tracing.simulated_micro_batches import (
    FEW_MICRO_BATCHES,
    MicroBatchComparison,
    MicroBatchMarks,
    compare_micro_batches,
    count_affordable,
    describe_estimate,
    has_backward,
    is_declared_uniform,
    repeat_last_by_parts,
    repeat_last_micro_batch,
)
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, Op, Storage, Trace
from recipe_lib.plan.tracing.tracer import KernelMemory, Tracer

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
FIRST, STEADY = "first step", "step"
MAKING_STATES = "states"  # in place of the first step, all gradients at once, as no run has them
_MANY_OBJECTS = 2_000_000
_left_objects = 0  # that the collector has not looked at, of this process's simulations
_known_calls: dict[Any, Any] = {}  # of operators, in all simulations of this process


def list_short_steps(cfg: FullFinetuneConfig) -> tuple[str, ...]:
    """Return the steps that are enough to see a steady one; states that are stepped in backward
    come with the first.
    """
    return (FIRST, STEADY) if cfg.memory.optimizer_in_backward else (STEADY,)


@dataclass
class Simulated:
    """What a simulation leaves. modules: of which none is said to keep anything yet. coordinates:
    mesh dimension -> place of the rank. tokens: of a step, all ranks. repeats: the second step left
    the memory as the first did, so that all later ones are like it. stages: of a rank of a
    pipeline, their layers.
    """

    trace: Trace
    modules: list[LayerRow]
    coordinates: dict[str, int]
    mesh: dict[str, int]
    tokens: int
    repeats: bool
    stages: dict[int, range] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    step_growth: int = 0
    traced: int = 0
    likeness: MicroBatchComparison = field(default_factory=MicroBatchComparison)
    estimate: str = ""
    untraced_bytes: int = 0


def simulate(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    shape: sequence_lengths.PlannedSequence,
    *,
    rank: int = 0,
    ranks: int = 1,
    phases: Sequence[str] = ("load", "validation", "save"),
    steps: Sequence[str] = (FIRST, STEADY),
    like_cpu: bool = False,
    capability: tuple[int, int] = (8, 0),
    kernel_memory: KernelMemory | None = None,
    traced: int | None = None,
    checker: StreamChecker | None = None,
) -> Simulated:
    """Traces set-up, two steps and the `phases` besides, as rank `rank` of `ranks`.

    capability: compute capability of the GPU whose kernels are chosen. steps: (STEADY,) for one
    step alone, before which the optimizer is given its states. traced: so many micro-batches of a
    step run, and stand for themselves alone; None: as many as can stand for all of them, which are
    all of them where a recipe of the user's own, or one that treats them differently, leaves time
    for that. checker: follows all of it; numbers that `train_step` reads are then 1, and are read
    after it as a training loop does. The recipe's own `setup_model`, `setup_optimizer` and
    `train_step` run; `setup_data` does not: `self.data` is a PlannedData. Raises UserErrors of the
    recipe, and ConfigError where a step reads a tensor's value.
    """

    def run(number: int | None) -> Simulated:
        simulated = enter_simulated_world(
            cfg.parallel, rank, ranks, like_cpu=like_cpu, capability=capability
        )
        with simulated as world, use_fake_tensors() as mode:
            tracer = Tracer(NAME, CachedFakeMode(mode, _known_calls), kernel_memory, checker)
            connect_streams(tracer)
            patches = [
                *follow_actions(tracer),
                *patch_document_search(cfg, shape.documents),
                *follow_works(tracer),
            ]
            with ExitStack() as stack:
                stack.enter_context(nf4.make_tables_anew(has_values=False))
                stack.enter_context(pause_collector())
                stack.enter_context(tracer.running())
                code = stack.enter_context(trace_compiled_code(tracer)) if cfg.compile else None
                stack.enter_context(apply_patches(patches))
                if checker is None:  # which wants to see every operator
                    stack.enter_context(repeat_shaped_work(tracer))
                found = _run_phases(
                    recipe_class,
                    cfg,
                    world,
                    shape,
                    tracer,
                    phases,
                    steps,
                    number,
                    alone=traced is not None,
                )
                return (
                    found if code is None else replace(found, notes=[*found.notes, code.describe()])
                )

    if traced is not None:
        return run(traced)
    own = not is_declared_uniform(recipe_class)
    count = compute_micro_batches(cfg)[1]
    found = run(count if own and count <= FEW_MICRO_BATCHES else None)
    if found.traced == count or (found.likeness.alike and not own):
        return found
    more = count_affordable(found.likeness, count, found.traced)
    if more > found.traced and (more == count or cfg.parallel.pipeline == 1):
        found = run(more)
    if found.traced < count:
        found.estimate = describe_estimate(found.likeness, found.traced, count)
        found.untraced_bytes = found.likeness.growth * (count - found.traced)
    return found


def trace_real_run(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    world: World,
    shape: sequence_lengths.PlannedSequence,
    phases: Sequence[str] = (),
) -> Simulated:
    """The same phases run for real on `world`, a CPU's, with values; what a simulation is compared
    with.
    """
    tracer = Tracer(world.device.type)
    with nf4.make_tables_anew(), pause_collector(), tracer.running():
        return _run_phases(recipe_class, cfg, world, shape, tracer, phases)


def _run_phases(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    world: World,
    shape: sequence_lengths.PlannedSequence,
    tracer: Tracer,
    phases: Sequence[str],
    steps: Sequence[str] = (FIRST, STEADY),
    wanted: int | None = None,
    alone: bool = False,
) -> Simulated:
    """wanted: micro-batches of a step, None: the fewest that can stand for all. alone: they stand
    for themselves.
    """
    notes: list[str] = []
    dims = world.mesh.mesh_dim_names or ()
    tracer.groups = {world.mesh.get_group(dim).group_name: dim for dim in dims}
    if world.context is not None:
        tracer.groups[world.context.name] = "context"
    tracer.begin_phase("setup")
    recipe = cast(Any, recipe_class(cfg, world))
    models = _set_up(recipe, cfg, tracer, phases, steps, notes)
    stage = world.pipeline.rank if world.pipeline else 0
    traced = (
        None if tracer.cached_mode is None else wanted or count_micro_batches_to_trace(cfg, stage)
    )

    def now() -> tuple[int, int]:
        label_sums(tracer, recipe, models)
        return len(tracer.trace.events), tracer.alive()

    passes, others = MicroBatchMarks(now), MicroBatchMarks(now)
    tracer.between_actions = lambda: label_sums(tracer, recipe, models)
    recipe.data = PlannedData(cfg, world, shape, traced, passes, others)
    left: list[int] = []
    tokens = 0
    for name in steps:
        tracer.begin_phase(name)
        tracer.makes_batches = True
        batches = next(recipe.data.batches())
        tracer.see(list_batch_tensors(batches))  # memory of numpy's, which no operator made
        tracer.makes_batches = False
        tokens = batches.total_tokens
        try:
            _run_step(recipe, batches, tracer.checker)
        except _NEEDS_VALUES as error:
            raise _explain_value_read(recipe_class, error) from error
        del batches
        label_models(tracer, models)
        left.append(tracer.alive())
    alike = compare_micro_batches(
        tracer.trace,
        passes,
        traced or 0,
        len(steps),
        piped=world.pipeline is not None,
        unlike=int(is_last_different(cfg)),
    )
    if "validation" in phases and cfg.validation.source is not None:
        _try_phase("validation", recipe.validate, tracer, notes)
        for model in models.values():
            model.train()
    if "save" in phases and cfg.checkpoint.save_model:
        _try_phase(
            "save",
            lambda: [_gather_trained(model) for model in list(models.values())[-1:]],
            tracer,
            notes,
        )
    name_parts(tracer.trace)
    classify_activations(tracer.trace)
    give_to_children(tracer.trace)
    if traced and not alone:
        _repeat_micro_batches(tracer.trace, cfg, stage, traced, passes, others)
    mesh = add_context_dim(cfg.parallel, dict(zip(dims, world.mesh.shape, strict=True)))
    place = split_context_coordinate(
        cfg.parallel, dict(zip(dims, world.mesh.get_coordinate() or (), strict=True))
    )
    modules = [facts for name, model in models.items() for facts in list_module_rows(name, model)]
    divided = [
        each.pipeline
        for each in vars(recipe).values()
        if isinstance(each, Parallel) and each.pipeline
    ]
    stages = divided[-1].layers if divided else {}
    grows = left[-1] - left[0]
    return Simulated(
        tracer.trace,
        modules,
        place,
        mesh,
        tokens,
        grows == 0,
        stages,
        notes,
        max(0, grows),
        traced or 0,
        alike,
    )


def _repeat_micro_batches(
    trace: Trace,
    cfg: Any,
    stage: int,
    traced: int,
    passes: MicroBatchMarks,
    others: MicroBatchMarks,
) -> None:
    """Lets what was traced of a step count as often as a step has it. stage: place in a
    pipeline.
    """
    count = compute_micro_batches(cfg)[1]
    if cfg.parallel.pipeline > 1:
        repeat_actions(trace, cfg.parallel, stage, traced, count)
    elif has_backward(trace, passes, traced):
        repeat_last_micro_batch(trace, passes, count, traced, int(is_last_different(cfg)))
    else:
        repeat_last_by_parts(trace, count, traced, int(is_last_different(cfg)))
    repeat_last_micro_batch(trace, others, count, traced)


def _set_up(
    recipe: Any,
    cfg: FullFinetuneConfig,
    tracer: Tracer,
    phases: Sequence[str],
    steps: Sequence[str],
    notes: list[str],
) -> dict[str, nn.Module]:
    """Make the recipe's models and its optimizer, with states where no first step makes them;
    return the models.
    """
    recipe.setup_model()
    models = list_models(recipe)
    for name, model in models.items():
        tracer.name_modules(model, name)
        fault = find_extra_fault(cfg.checkpoint, find_extra_tensors(model))
        if fault is not None:
            notes.append(f"a run would be refused: {fault}")
    if "load" in phases:
        _try_phase("load", recipe.load_weights, tracer, notes)
    recipe.setup_optimizer()
    if FIRST not in steps:
        tracer.begin_phase(MAKING_STATES)
        _make_states(recipe)
    return models


def _try_phase(name: str, run: Callable[[], Any], tracer: Tracer, notes: list[str]) -> None:
    """A phase outside the steps; a number that it reads is 0. Where it asks for more, it is traced
    up to there.
    """
    tracer.begin_phase(name)
    tracer.values_are_zero = True
    try:
        run()
    except _NEEDS_VALUES:
        notes.append(f"{name}: traced up to where it reads a tensor's value")
    except AttributeError as error:
        notes.append(f"{name}: not traced to its end ({error})")
    finally:
        tracer.values_are_zero = False


def _run_step(recipe: Any, batches: Any, checker: StreamChecker | None) -> None:
    """checker: follows also what a training loop reads of a step, and counts how often that is."""
    if checker is None:
        recipe.train_step(batches)
        return
    checker.begin_step()
    step = recipe.train_step(batches)
    if hasattr(step, "numbers"):
        step.numbers()
    checker.end_step()


def _explain_value_read(recipe_class: type, error: Exception) -> ConfigError:
    file = inspect.getfile(recipe_class)
    lines = find_lines_in(error, file)
    place = f"{file}:{lines[-1]}: " if lines else ""
    return ConfigError(
        f"{place}{recipe_class.__name__}.train_step: reads the value of a tensor"
        f" ({str(error).splitlines()[0]}), expected sizes only; keep .item(), .tolist() and `if"
        " tensor` out of train_step, and log in train()"
    )


@torch.no_grad()
def _gather_trained(model: nn.Module) -> None:
    """What an export takes: each trained parameter whole, one after the other, then on the host."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            piece = gather_whole(parameter).to("cpu")
            del piece


def _make_states(recipe: Any) -> None:
    """The optimizers' states, as the first step leaves them."""
    for optimizer in vars(recipe).values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()


def classify_activations(trace: Trace) -> None:
    """Storages that forward or recomputation made, and that are there when backward begins, are
    activations.
    """
    waiting: dict[int, None] = {}
    for kind, number in trace.events:
        if kind == ALLOC:
            storage = trace.storages[number]
            if storage.kind == "temporary" and storage.part in ("forward", "recompute"):
                waiting[number] = None
        elif kind == FREE:
            waiting.pop(number, None)
        elif kind == OP and trace.ops[number].part == "backward":
            for kept in waiting:
                trace.storages[kept].kind = "activations"
            waiting.clear()
        elif kind == PHASE:
            waiting.clear()


@contextmanager
def pause_collector() -> Iterator[None]:
    """Python's collector of cycles costs a third of the time here, and frees at moments that no
    other run repeats.

    What simulations leave, millions of objects mostly without a cycle, it passes over until they
    have become many.
    """
    global _left_objects
    enabled = gc.isenabled()
    if _left_objects > _MANY_OBJECTS:
        gc.unfreeze()
        gc.collect()
        _left_objects = 0
    gc.freeze()  # which counts anew
    gc.disable()
    try:
        yield
    finally:
        _left_objects += gc.get_count()[0]
        gc.freeze()
        if enabled:
            gc.enable()


# Which module a kept tensor belongs to, where a parent's forward does its children's work. No torch
# in here.
#
# A fused function, or a parent that shards its children's matrices, calls no child: all that is
# kept would be the parent's. So a kept tensor goes to the child whose output it is, or else to the
# one whose input it is. It never leaves the module that made it, so that the sums of parents stay
# what they are.


_WEIGHTS = ("parameters", "gathered")


def give_to_children(trace: Trace) -> None:
    """Changes `module` of activations that forward and recomputation made.

    Output: made from a child's weight, or from what is that child's alone, as queries are turned.
    Input: read by products with one child's weights alone, its adapter's among them. A tensor that
    several children read, such as gathered tokens, stays.
    """
    owners = {_find_owner(storage) for storage in trace.storages} - {""}
    made: dict[int, str] = {}
    readers: dict[int, set[str]] = defaultdict(set)
    for kind, number in trace.events:
        op = trace.ops[number] if kind == OP else None
        if op is None or not op.makes:
            continue
        weights = {_find_owner(trace.storages[read]) for read in op.reads} - {""}
        if op.flops and weights:
            for read in op.reads:
                readers[read] |= weights
        child = _find_child(op, trace.storages, weights, made, owners)
        if child:
            made |= dict.fromkeys(op.makes, child)
    for number, storage in enumerate(trace.storages):
        if storage.kind != "activations" or storage.part not in ("forward", "recompute"):
            continue
        read_by = {_find_child_above(storage.module, reader) for reader in readers[number]}
        found = made.get(number) or (read_by.pop() if len(read_by) == 1 else "")
        if found in owners and _find_child_above(storage.module, found):
            storage.module = found


def _find_owner(storage: Storage) -> str:
    """The module of a parameter; empty for other memory, and for memory that several parameters
    share.
    """
    if storage.kind not in _WEIGHTS or storage.label.endswith("*"):
        return ""
    return storage.label.rpartition(".")[0]


def _find_child(
    op: Op, storages: list[Storage], weights: set[str], made: dict[int, str], owners: set[str]
) -> str:
    """The only child of the running module, with parameters of its own, that an operator's
    arguments come from.

    Without a weight of it, they have to be more than what else is read: a sum with the stream is
    not a norm's. What modules around the running one made for all layers, such as rotations, does
    not count.
    """
    children = {child for weight in weights if (child := _find_child_above(op.module, weight))}
    others = 0
    for read in op.reads:
        if _find_owner(storages[read]):
            continue
        if child := _find_child_above(op.module, made.get(read) or storages[read].module):
            children.add(child)
        elif not _find_child_above(storages[read].module, op.module) and storages[read].module:
            others = max(others, storages[read].bytes)
    only = children.pop() if len(children) == 1 else ""
    if only not in owners or not only:
        return ""
    small = weights or others < max(storages[made_now].bytes for made_now in op.makes)
    return only if small else ""


def _find_child_above(module: str, inside: str) -> str:
    """The child of a module that another one is or lies in."""
    if not module or not inside.startswith(f"{module}."):
        return ""
    return f"{module}.{inside[len(module) + 1 :].partition('.')[0]}"


# The models of a recipe in a trace: which parameter what is alive belongs to, and the sizes of
# their modules.


def list_models(recipe: Any) -> dict[str, nn.Module]:
    """The recipe's modules by the prefix of their names: none for `model`, which comes last, else
    the attribute's.
    """
    found = {name: value for name, value in vars(recipe).items() if isinstance(value, nn.Module)}
    main = "model" if "model" in found else next(reversed(found), "")
    others = {
        f"{name}.": value
        for name, value in found.items()
        if name != main and value is not found[main]
    }
    return others | ({"": found[main]} if main else {})


def label_models(tracer: Tracer, models: dict[str, nn.Module]) -> None:
    """Says of what is alive which parameter it belongs to."""
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            names[id(parameter)] = prefix + name
            tracer.label(parameter, "parameters", prefix + name)
            if parameter.grad is not None:
                tracer.label(parameter.grad, "gradients", prefix + name)
        for name, buffer in model.named_buffers():
            tracer.label(buffer, "parameters", prefix + name)
    for label, held in _list_fsdp_parameters(models):
        for gathered in getattr(held, "all_gather_outputs", ()):
            tracer.label(gathered, "gathered", label)
        tracer.label(held._sharded_param_data, "parameters", label)
    tracer.parameter_names = names
    for optimizer in tracer.optimizers.values():
        tracer.label_optimizer(optimizer)


def _list_fsdp_parameters(models: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of FSDP's units as FSDP keeps them, with their names; private names of
    torch's.
    """
    for prefix, model in models.items():
        for module in model.modules():
            for held in entries_of(module) if isinstance(module, FSDPModule) else ():
                yield prefix + (getattr(held, "_param_fqn", None) or ""), held


def label_sums(tracer: Tracer, recipe: Any, models: dict[str, nn.Module]) -> None:
    """Says of gradients that are added up over a step's micro-batches whose they are: whole ones,
    which FSDP reduces once a step, and sums in fp32; and the same of tensors that stand for
    parameters in host memory.
    """
    for divided in vars(recipe).values():
        if isinstance(divided, Parallel) and divided.accumulation is not None:
            for parameter, total in divided.accumulation.sums.items():
                tracer.label(total, "gradients", tracer.parameter_names.get(id(parameter), ""))
        if isinstance(divided, Parallel) and divided.levers.layers is not None:
            for name, there in divided.levers.layers.on_device().items():
                tracer.label(there, "gathered", name)
    for label, held in _list_fsdp_parameters(models):
        whole = getattr(held, "_unsharded_param", None)
        for gradient in (
            getattr(whole, "grad", None),
            getattr(held, "unsharded_accumulated_grad", None),
        ):
            if gradient is not None:
                tracer.label(gradient, "gradients", label)


def list_module_rows(prefix: str, model: nn.Module) -> list[LayerRow]:
    """The modules that hold parameters and no list of layers, in order; tied parameters count at
    their first owner.
    """
    facts: list[LayerRow] = []
    stored = find_stored_weights(model)
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    for name, module in model.named_modules():
        if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            continue
        inside = f"{name}."
        own = [
            value
            for value in module.parameters()
            if owners[id(value)] == name or owners[id(value)].startswith(inside)
        ]
        if own:
            packed = {key: weight for key, weight in stored.items() if key.startswith(inside)}
            carriers = sum(
                value.numel()
                for key in packed
                for part, value in model.get_submodule(key.rpartition(".")[0]).named_parameters(
                    recurse=False
                )
                if part.startswith("weight_")
            )
            weights = sum(weight.in_features * weight.out_features for weight in packed.values())
            facts.append(
                LayerRow(
                    prefix + name,
                    type(module).__name__.removeprefix("FSDP"),
                    sum(value.numel() for value in own) - carriers + weights,
                    sum(value.numel() for value in own if value.requires_grad),
                    sum(value.numel() * value.element_size() for value in own),
                    sum(part.nbytes for value in own for part in list_plain_tensors(value)),
                    weights=_list_weight_shapes(module),
                )
            )
    return facts


def _list_weight_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Name to shape of a module's own parameters, as this rank computes with them; of a quantized
    linear that of what it dequantizes.
    """
    found = {}
    if quantized := isinstance(module, QuantizedLinear):
        found["weight"] = [last - first for first, last in (module.rows, module.columns)]
    for name, value in module.named_parameters(recurse=False):
        if not (quantized and name.startswith("weight_")):
            found[name] = _compute_local_shape(value)
    return found


def _compute_local_shape(value: torch.Tensor) -> list[int]:
    """Of a parameter, divided where tensor parallel shards it; FSDP gathers it before it is
    used.
    """
    shape = list(value.shape)
    if isinstance(value, DTensor):
        names = value.device_mesh.mesh_dim_names or ()
        for name, size, placement in zip(
            names, value.device_mesh.shape, value.placements, strict=True
        ):
            if name == "tensor" and placement.is_shard():
                shape[placement.dim] //= size
    return shape
