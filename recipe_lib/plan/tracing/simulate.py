"""A recipe run in the simulated world, phase by phase, as a trace; and the same tracer around a real run."""

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from recipe_lib.adapters import nf4, quantized
from recipe_lib.checkpoint.weights_out import refused_extra, whole
from recipe_lib.config.mesh import micro_batches
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError, lines_in
from recipe_lib.models.extra_parameters import extra_tensors
from recipe_lib.ops import capped_attention, cross_entropy
from recipe_lib.ops.dtensor_shards import local_part
from recipe_lib.parallel import World
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.plan.result import LayerRow
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.trace import ALLOC, FREE, OP, PHASE, Trace
from recipe_lib.plan.tracing.collectives import group_names, mesh_and_place
from recipe_lib.plan.tracing.compiled_kernels import compiling
from recipe_lib.plan.tracing.host_marks import following_host
from recipe_lib.plan.tracing.kept_by import give_to_children
from recipe_lib.plan.tracing.pipeline_actions import (
    ALIKE_FROM,
    following_actions,
    name_parts,
    repeat_actions,
    traced_micro_batches,
)
from recipe_lib.plan.tracing.recipe_models import label_models, label_sums, models_of, module_facts
from recipe_lib.plan.tracing.simulated_micro_batches import (
    FEW_MICRO_BATCHES,
    Likeness,
    Passes,
    affordable,
    estimate_text,
    is_shipped,
    last_stand_for_all,
    likeness,
)
from recipe_lib.plan.tracing.simulated_works import following_works
from recipe_lib.plan.tracing.tracer import KernelMemory, Tracer
from recipe_lib.plan.world.cached_fake_mode import CachedFakeMode
from recipe_lib.plan.world.planned_batches import PlannedData, SequenceShape, batch_tensors
from recipe_lib.plan.world.simulated_device import NAME
from recipe_lib.plan.world.simulated_world import connect_streams, simulated_world, tensors_without_bytes
from recipe_lib.plan.world.transformers_masks import masks_of_a_run

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
FIRST, STEADY = "first step", "step"
MAKING_STATES = "states"  # in place of the first step, all gradients at once, as no run has them
# Functions that issue many operators, whose work follows from shapes: of their arguments (None), or as is said.
_REMEMBERED: tuple[tuple[Any, str, Any], ...] = (
    (quantized, "dequantize", None),
    (cross_entropy, "_sum_over_chunks", lambda head, *numbers: (*head.parts, *numbers)),
    (capped_attention, "_attended", None),
    (capped_attention, "_gradients", None),
)
_MANY_OBJECTS = 2_000_000
_left_objects = 0  # that the collector has not looked at, of this process's simulations
_known_calls: dict[Any, Any] = {}  # of operators, in all simulations of this process


@dataclass
class Simulated:
    """What a simulation leaves. modules: of which none is said to keep anything yet. coordinates: mesh dimension ->
    place of the rank. tokens: of a step, all ranks. repeats: the second step left the memory as the first did, so that
    all later ones are like it. stages: of a rank of a pipeline, their layers."""

    trace: Trace
    modules: list[LayerRow]
    coordinates: dict[str, int]
    mesh: dict[str, int]
    tokens: int
    repeats: bool
    stages: dict[int, range] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    grows: int = 0
    traced: int = 0
    likeness: Likeness = field(default_factory=Likeness)
    estimate: str = ""
    untraced: int = 0


def simulate(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    shape: SequenceShape,
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

    capability: compute capability of the GPU whose kernels are chosen. steps: (STEADY,) for one step alone, before
    which the optimizer is given its states. traced: so many micro-batches of a step run, and stand for themselves
    alone; None: as many as can stand for all of them, which are all of them where a recipe of the user's own, or one
    that treats them differently, leaves time for that. checker: follows all of it; numbers that `train_step` reads are
    then 1, and are read after it as a training loop does.
    The recipe's own `setup_model`, `setup_optimizer` and `train_step` run; `setup_data` does not: `self.data` is a
    PlannedData. Raises UserErrors of the recipe, and ConfigError where a step reads a tensor's value.
    """

    def run(number: int | None) -> Simulated:
        simulated = simulated_world(cfg.parallel, rank, ranks, like_cpu=like_cpu, capability=capability)
        with simulated as world, tensors_without_bytes() as mode:
            tracer = Tracer(NAME, CachedFakeMode(mode, _known_calls), kernel_memory, checker)
            tracer.stream = connect_streams(tracer.record, tracer.wait, tracer.use_on, following_host(tracer))
            with ExitStack() as stack:
                masks = masks_of_a_run(cfg, shape.documents)
                for context in (_quiet_collector(), tracer.running(), following_actions(tracer), masks):
                    stack.enter_context(context)
                stack.enter_context(_scales_without_values())
                code = stack.enter_context(compiling(tracer)) if cfg.compile else None
                stack.enter_context(following_works(tracer))
                if checker is None:  # which wants to see every operator
                    for place, name, decisive in _REMEMBERED:
                        stack.enter_context(tracer.remembering(place, name, decisive))
                    stack.enter_context(tracer.remembering(quantized.QuantizedLinear, "_fill_nf4", _filled))
                found = _run(recipe_class, cfg, world, shape, tracer, phases, steps, number, alone=traced is not None)
                return found if code is None else replace(found, notes=[*found.notes, code.described()])

    if traced is not None:
        return run(traced)
    own, count = not is_shipped(recipe_class), micro_batches(cfg)[1]
    found = run(count if own and count <= FEW_MICRO_BATCHES else None)
    if found.traced == count or (found.likeness.alike and not own):
        return found
    more = affordable(found.likeness, count, found.traced)
    if more > found.traced and (more == count or cfg.parallel.pipeline == 1):
        found = run(more)
    if found.traced < count:
        found.estimate = estimate_text(found.likeness, found.traced, count)
        found.untraced = found.likeness.growth * (count - found.traced)
    return found


def trace_real_run(
    recipe_class: type, cfg: FullFinetuneConfig, world: World, shape: SequenceShape, phases: Sequence[str] = ()
) -> Simulated:
    """The same phases run for real on `world`, a CPU's, with values; what a simulation is compared with."""
    tracer = Tracer(world.device.type)
    with _quiet_collector(), tracer.running():
        return _run(recipe_class, cfg, world, shape, tracer, phases)


def _run(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    world: World,
    shape: SequenceShape,
    tracer: Tracer,
    phases: Sequence[str],
    steps: Sequence[str] = (FIRST, STEADY),
    wanted: int | None = None,
    alone: bool = False,
) -> Simulated:
    """wanted: micro-batches of a step, None: the fewest that can stand for all. alone: they stand for themselves."""
    notes: list[str] = []
    for table in (nf4._pairs, nf4._levels):  # of another simulation, or with values: a run begins without them
        table.cache_clear()
    tracer.groups |= group_names(world)
    tracer.begin_phase("setup")
    recipe = cast(Any, recipe_class(cfg, world))
    recipe.setup_model()
    models = models_of(recipe)
    for name, model in models.items():
        tracer.name_modules(model, name)
        fault = refused_extra(cfg.checkpoint, extra_tensors(model))
        if fault is not None:
            notes.append(f"a run would be refused: {fault}")
    if "load" in phases:
        _try_phase("load", recipe.load_weights, tracer, notes)
    recipe.setup_optimizer()
    if FIRST not in steps:
        tracer.begin_phase(MAKING_STATES)
        _make_states(recipe)
    stage = world.pipeline.rank if world.pipeline else 0
    traced = None if tracer.fast is None else wanted or traced_micro_batches(cfg, stage)

    def now() -> tuple[int, int]:
        label_sums(tracer, recipe, models)
        return len(tracer.trace.events), tracer.alive()

    passes, others = Passes(now), Passes(now)
    tracer.between_actions = lambda: label_sums(tracer, recipe, models)
    recipe.data = PlannedData(cfg, world, shape, traced, passes, others)
    left: list[int] = []
    tokens = 0
    for name in steps:
        tracer.begin_phase(name)
        with tracer.making_batches():
            batches = next(recipe.data.batches())
            tracer.see(batch_tensors(batches))  # memory of numpy's, which no operator made
        tokens = batches.total_tokens
        try:
            with tracer.reading_numbers() if tracer.checker else nullcontext():
                _read_numbers(recipe.train_step(batches), tracer)
        except _NEEDS_VALUES as error:
            raise _reads_values(recipe_class, error) from error
        del batches
        label_models(tracer, models)
        left.append(tracer.alive())
    piped, unlike = world.pipeline is not None, int(reduces_once(cfg.parallel))
    alike = likeness(tracer.trace, passes, traced or 0, len(steps), piped=piped, unlike=unlike)
    if "validation" in phases and cfg.validation.source is not None:
        _try_phase("validation", recipe.validate, tracer, notes)
        for model in models.values():
            model.train()
    if "save" in phases and cfg.checkpoint.save_model:
        _try_phase("save", lambda: [_gather_trained(model) for model in list(models.values())[-1:]], tracer, notes)
    _interpret(tracer.trace, cfg, stage if world.pipeline is not None else None, None if alone else traced)
    last_stand_for_all(tracer.trace, others, micro_batches(cfg)[1], 0 if alone else traced or 0)
    mesh, place = mesh_and_place(world, cfg.parallel)
    modules = [facts for name, model in models.items() for facts in module_facts(name, model)]
    divided = [each.pipeline for each in vars(recipe).values() if isinstance(each, Parallel) and each.pipeline]
    stages = divided[-1].layers if divided else {}
    grows = left[-1] - left[0]
    return Simulated(
        tracer.trace, modules, place, mesh, tokens, grows == 0, stages, notes, max(0, grows), traced or 0, alike
    )


def _interpret(trace: Trace, cfg: FullFinetuneConfig, stage: int | None, traced: int | None) -> None:
    """Says what is what in a whole trace, and what counts how often. stage: place in a pipeline, if there is one.
    traced: micro-batches of a step that stand for all; None: each stands for itself."""
    name_parts(trace)
    classify(trace)
    give_to_children(trace)
    if traced is not None and stage is not None:
        repeat_actions(trace, cfg.parallel, stage, traced, micro_batches(cfg)[1])
    elif traced is not None:
        stand_for_all(trace, cfg.gradient_accumulation_steps, traced, int(reduces_once(cfg.parallel)))


def _try_phase(name: str, run: Callable[[], Any], tracer: Tracer, notes: list[str]) -> None:
    """A phase outside the steps; a number that it reads is 0. Where it asks for more, it is traced up to there."""
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


def _read_numbers(step: Any, tracer: Tracer) -> None:
    """What a training loop reads of a step, for a checker that counts how often that is."""
    if tracer.checker is not None and hasattr(step, "numbers"):
        step.numbers()
    if tracer.checker is not None:
        tracer.checker.counts = False
        tracer.checker.save()


def _reads_values(recipe_class: type, error: Exception) -> ConfigError:
    file = inspect.getfile(recipe_class)
    lines = lines_in(error, file)
    place = f"{file}:{lines[-1]}: " if lines else ""
    return ConfigError(
        f"{place}{recipe_class.__name__}.train_step: reads the value of a tensor ({str(error).splitlines()[0]}), "
        "expected sizes only; keep .item(), .tolist() and `if tensor` out of train_step, and log in train()"
    )


@torch.no_grad()
def _gather_trained(model: nn.Module) -> None:
    """What an export takes: each trained parameter whole, one after the other, then on the host."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            piece = whole(parameter).to("cpu")
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


def classify(trace: Trace) -> None:
    """Storages that forward or recomputation made, and that are there when backward begins, are activations."""
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


def stand_for_all(trace: Trace, count: int, traced: int = ALIKE_FROM, unlike: int = 0) -> None:
    """The operators of one of a step's traced micro-batches count for all that were not traced too, `count` in all.

    It is the last of them but for those at the end that are `unlike` the others.
    """
    if count <= traced:
        return
    for phase in {FIRST, STEADY} & set(trace.phases):
        ops = [trace.ops[number] for kind, number in trace.phase_events(phase) if kind == OP]
        parts = [op.part for op in ops]
        backwards = [index for index, part in enumerate(parts) if part == "backward"]
        if not backwards:
            continue  # a step of the user's own, that has none
        begins = _begins(parts) + [backwards[-1] + 1]
        if len(begins) > 1 + unlike:
            for op in ops[begins[-2 - unlike] : begins[-1 - unlike]]:
                op.repeats *= count - traced + 1


def _begins(parts: list[str]) -> list[int]:
    """Where a micro-batch after the first begins: at a forward after a backward."""
    found, behind = [], False
    for index, part in enumerate(parts):
        if part == "forward" and behind:
            found.append(index)
        behind = part == "backward" or (behind and part != "forward")
    return found


def _filled(module: quantized.QuantizedLinear, *_: Any) -> tuple[Any, ...]:
    """What quantizing a weight to NF4 follows from."""
    parts = (module.weight_codes, module.weight_scales, module.weight_factors)
    shapes = []
    for part in parts:
        here, first = (None, None) if part is None else local_part(part)
        shapes.append(None if here is None else (here.shape, first))
    return (*shapes, module.in_features, module.out_features, module.rows, module.columns, module.dtype)


@contextmanager
def _scales_without_values() -> Iterator[None]:
    """Quantizing to NF4 looks at numbers in two places; in a simulation they have none, and torchao takes seconds."""
    borders, scales = nf4._borders, nf4.quantize_scales

    def sizes_of_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factors = largest.new_empty(nf4.factors_of(len(largest)), dtype=torch.float32)
        return torch.empty_like(largest, dtype=torch.int8), factors

    patched = cast(Any, nf4)
    patched._borders = lambda dtype: torch.empty(len(nf4.LEVELS) - 1, dtype=dtype)
    patched.quantize_scales = sizes_of_scales
    try:
        yield
    finally:
        patched._borders, patched.quantize_scales = borders, scales


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Python's collector of cycles costs a third of the time here, and frees at moments that no other run repeats.

    What simulations leave, millions of objects mostly without a cycle, it passes over until they have become many.
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
