"""Run a recipe phase by phase under a tracer, and return the trace of one rank.

`build_plan` calls `simulate`, which runs `setup_model`, `setup_optimizer` and `train_step` of a
recipe as one rank of many, on a device whose tensors have sizes and no bytes. `trace_real_run` does
it on a CPU for real; tests compare the two. A trace lists allocations, releases and operators in
the order in which the host issues them. A plan computes memory and time from it.
"""

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from recipe_lib.adapters import nf4
from recipe_lib.checkpoint.model_export import find_extra_fault, gather_whole
from recipe_lib.config.mesh import add_context_dim, compute_micro_batches, split_context_coordinate
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError, find_lines_in
from recipe_lib.models.meta_init import find_extra_tensors
from recipe_lib.parallel import Parallel, World
from recipe_lib.parallel.gradient_accumulation import reduces_once
from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.plan.simulated_world.cached_fake_mode import CachedFakeMode
from recipe_lib.plan.simulated_world.compiled_code import trace_compiled_code
from recipe_lib.plan.simulated_world.planned_data import (
    PlannedData,
    PlannedSequence,
    list_batch_tensors,
)
from recipe_lib.plan.simulated_world.simulated_device import NAME
from recipe_lib.plan.simulated_world.simulated_ranks import (
    apply_patches,
    connect_streams,
    enter_simulated_world,
    follow_works,
    patch_document_search,
    use_fake_tensors,
)
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.activations import classify_activations, give_to_children
from recipe_lib.plan.tracing.recipe_models import (
    label_models,
    label_sums,
    list_models,
    list_module_rows,
)
from recipe_lib.plan.tracing.repeated_calls import repeat_shaped_work
from recipe_lib.plan.tracing.simulated_micro_batches import (
    FEW_MICRO_BATCHES,
    MicroBatchComparison,
    MicroBatchMarks,
    compare_micro_batches,
    count_affordable,
    count_micro_batches_to_trace,
    describe_estimate,
    follow_actions,
    has_backward,
    is_declared_uniform,
    name_parts,
    repeat_actions,
    repeat_last_by_parts,
    repeat_last_micro_batch,
)
from recipe_lib.plan.tracing.trace import Trace
from recipe_lib.plan.tracing.tracer import KernelMemory, Tracer

# Names of phases.
FIRST = "first step"  # in it the optimizer makes its states
STEADY = "step"  # any later step
# Replaces the first step: the optimizer's states are made in it with all gradients alive at once,
# so that its peak is not that of any run.
MAKING_STATES = "states"
# Raised by fake tensors where an operator's result depends on a tensor's values.
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# Objects that simulations may leave before Python's garbage collector runs between two of them.
_MANY_OBJECTS = 2_000_000
# Cached results of operators by shapes. All simulations of this process share them, so that a
# search's later trials find them.
_known_calls: dict[Any, Any] = {}


def list_short_steps(cfg: FullFinetuneConfig) -> tuple[str, ...]:
    """Return the fewest `steps` for `simulate` that show a steady one."""
    # With `optimizer_in_backward` states are made in the first backward, one parameter after the
    # other: `_make_states` cannot make them.
    return (FIRST, STEADY) if cfg.memory.optimizer_in_backward else (STEADY,)


@dataclass
class Simulated:
    """The simulated run of one rank."""

    trace: Trace
    modules: list[LayerRow]  # one row a module; no activations are counted in them yet
    coordinates: dict[str, int]  # mesh dimension -> the rank's index along it
    mesh: dict[str, int]  # mesh dimension -> its size
    tokens: int  # tokens of a step, of all ranks
    # True: the last step left as many bytes alive as the first, so that all later ones are like it.
    repeats: bool
    stages: dict[int, range] = field(default_factory=dict)  # the rank's pipeline stages -> layers
    notes: list[str] = field(default_factory=list)  # sentences for the report
    # Bytes alive after the last step beyond those after the first one, at least 0.
    step_growth: int = 0
    traced: int = 0  # micro-batches of a step that were simulated; 0 for a real run
    # Comparison of the simulated micro-batches with each other: are they alike, does memory grow.
    comparison: MicroBatchComparison = field(default_factory=MicroBatchComparison)
    estimate: str = ""  # why the figures are an estimate; "": they are exact
    untraced_bytes: int = 0  # bytes that micro-batches not simulated are taken to leave alive


def simulate(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    sequence: PlannedSequence,
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
    """Trace set-up, `steps` and the other `phases` of a recipe, as rank `rank` of `ranks`.

    sequence: lengths of the sequences. phases: any of the default's. steps: (STEADY,) for one step,
    before which the optimizer is given its states. like_cpu: kernels are a CPU's; else those of a
    GPU with this compute `capability`. kernel_memory: returns scratch of kernels; None: none is
    counted. traced: so many micro-batches of a step run, and count only for themselves; None: as
    many as can count for all. checker: finds races between streams; numbers that `train_step` reads
    are then 1.

    The recipe's `setup_data` does not run: `self.data` is a PlannedData, whose batches have lengths
    and no text. Raises UserErrors of the recipe, and ConfigError where a step reads the value of a
    tensor.
    """

    # num_micro_batches: as in `_run_phases`.
    def run(num_micro_batches: int | None) -> Simulated:
        simulated_world = enter_simulated_world(
            cfg.parallel, rank, ranks, like_cpu=like_cpu, capability=capability
        )
        with simulated_world as world, use_fake_tensors() as mode:
            tracer = Tracer(
                NAME,
                CachedFakeMode(mode, _known_calls),
                kernel_memory=kernel_memory,
                checker=checker,
            )
            connect_streams(tracer)
            patches = follow_actions(tracer) + follow_works(tracer)
            patches += patch_document_search(cfg, sequence.documents)
            # Without `make_tables_anew`, NF4's cached tables would be tensors of an earlier
            # simulation's fake mode.
            with (
                nf4.make_tables_anew(has_values=False),
                pause_collector(),
                tracer.activate(),
                trace_compiled_code(tracer) if cfg.compile else nullcontext() as code,
                apply_patches(patches),
                # A checker has to see every operator, also those that are like earlier ones.
                repeat_shaped_work(tracer) if checker is None else nullcontext(),
            ):
                simulated = _run_phases(
                    recipe_class,
                    cfg,
                    world,
                    sequence=sequence,
                    tracer=tracer,
                    phases=phases,
                    steps=steps,
                    num_micro_batches=num_micro_batches,
                    stands_alone=traced is not None,
                )
            if code is not None:
                simulated.notes.append(code.describe())
            return simulated

    if traced is not None:
        return run(traced)
    # The recipe class promises that it treats all micro-batches alike.
    is_uniform = is_declared_uniform(recipe_class)
    count = compute_micro_batches(cfg)[1]  # micro-batches of a step
    simulated = run(count if not is_uniform and count <= FEW_MICRO_BATCHES else None)
    if simulated.traced == count or (simulated.comparison.alike and is_uniform):
        return simulated
    # A recipe that may treat micro-batches differently: as many run as there is time for. In a
    # pipeline not every number of them can count for all.
    affordable = count_affordable(simulated.comparison, count, simulated.traced)
    if affordable > simulated.traced and (affordable == count or cfg.parallel.pipeline == 1):
        simulated = run(affordable)
    if simulated.traced < count:
        simulated.estimate = describe_estimate(simulated.comparison, simulated.traced, count)
        simulated.untraced_bytes = simulated.comparison.growth * (count - simulated.traced)
    return simulated


def trace_real_run(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    world: World,
    sequence: PlannedSequence,
) -> Simulated:
    """Trace set-up and two steps that run for real on a CPU, to compare a simulation with.

    world: rank, device and mesh of this process, which is in a process group.
    """
    tracer = Tracer(world.device.type)
    with nf4.make_tables_anew(), pause_collector(), tracer.activate():
        return _run_phases(
            recipe_class,
            cfg,
            world,
            sequence=sequence,
            tracer=tracer,
            phases=(),
            steps=(FIRST, STEADY),
        )


def _run_phases(
    recipe_class: type,
    cfg: FullFinetuneConfig,
    world: World,
    *,
    sequence: PlannedSequence,
    tracer: Tracer,
    phases: Sequence[str],
    steps: Sequence[str],
    num_micro_batches: int | None = None,
    stands_alone: bool = False,
) -> Simulated:
    """Run a recipe's phases under a tracer that is active.

    phases, steps: as in `simulate`. num_micro_batches: how many of a step run in a simulation;
    None: the fewest that can count for all. stands_alone: True if they count only for themselves.
    """
    notes: list[str] = []
    tracer.groups = _map_groups_to_dims(world)
    tracer.begin_phase("setup")
    recipe = cast(Any, recipe_class(cfg, world))
    models = _set_up(recipe, cfg, tracer=tracer, phases=phases, steps=steps, notes=notes)
    pipeline_rank = world.pipeline.rank if world.pipeline else 0
    traced = 0  # a real run has all of them
    if tracer.cached_mode is not None:
        traced = num_micro_batches or count_micro_batches_to_trace(cfg, pipeline_rank)

    # Called between two micro-batches, when sums of gradients can be found.
    def label_sums_and_read_position() -> tuple[int, int]:
        label_sums(tracer, recipe, models)
        return len(tracer.trace.events), tracer.count_alive_bytes()

    marks = MicroBatchMarks(label_sums_and_read_position)
    # Of the mismatched answers for KTO's KL estimate, which are a second loop of a step.
    mismatched_marks = MicroBatchMarks(label_sums_and_read_position)
    tracer.between_actions = lambda: label_sums(tracer, recipe, models)
    recipe.data = PlannedData(
        cfg,
        world,
        sequence,
        traced_micro_batches=traced or None,
        marks=marks,
        mismatched_marks=mismatched_marks,
    )
    tokens, step_growth = _run_steps(recipe, tracer=tracer, models=models, steps=steps)
    comparison = compare_micro_batches(
        tracer.trace,
        marks,
        traced=traced,
        steps=len(steps),
        is_pipeline=world.pipeline is not None,
        num_different=int(reduces_once(cfg.parallel)),
    )
    _run_other_phases(recipe, cfg, tracer=tracer, models=models, phases=phases, notes=notes)
    name_parts(tracer.trace)
    classify_activations(tracer.trace)
    give_to_children(tracer.trace)
    if traced and not stands_alone:
        _repeat_micro_batches(
            tracer.trace, cfg=cfg, pipeline_rank=pipeline_rank, traced=traced, marks=marks
        )
        repeat_last_micro_batch(
            tracer.trace, mismatched_marks, count=compute_micro_batches(cfg)[1], traced=traced
        )
    dims = world.mesh.mesh_dim_names or ()
    coordinates = dict(zip(dims, world.mesh.get_coordinate() or (), strict=True))
    modules = list(chain.from_iterable(starmap(list_module_rows, models.items())))
    return Simulated(
        trace=tracer.trace,
        modules=modules,
        coordinates=split_context_coordinate(cfg.parallel, coordinates),
        mesh=add_context_dim(cfg.parallel, dict(zip(dims, world.mesh.shape, strict=True))),
        tokens=tokens,
        repeats=step_growth == 0,
        stages=_find_stage_layers(recipe),
        notes=notes,
        step_growth=max(0, step_growth),
        traced=traced,
        comparison=comparison,
    )


def _map_groups_to_dims(world: World) -> dict[str, str]:
    dims = world.mesh.mesh_dim_names or ()
    groups = {world.mesh.get_group(dim).group_name: dim for dim in dims}
    # Context parallelism is no dimension of torch's mesh: its ranks are a part of a data
    # dimension.
    if world.context is not None:
        groups[world.context.name] = "context"
    return groups


def _find_stage_layers(recipe: Any) -> dict[int, range]:
    parallels = [value for value in vars(recipe).values() if isinstance(value, Parallel)]
    # Recipes set up a reference model or a teacher first: the last one is the trained model's.
    pipelines = [parallel.pipeline for parallel in parallels if parallel.pipeline]
    return pipelines[-1].layers if pipelines else {}


def _run_other_phases(
    recipe: Any,
    cfg: FullFinetuneConfig,
    *,
    tracer: Tracer,
    models: dict[str, nn.Module],
    phases: Sequence[str],
    notes: list[str],
) -> None:
    if "validation" in phases and cfg.validation.source is not None:
        _try_phase("validation", run=recipe.validate, tracer=tracer, notes=notes)
        # A validation that was not run to its end leaves models in evaluation mode.
        for model in models.values():
            model.train()
    if "save" in phases and cfg.checkpoint.save_model:
        last_models = list(models.values())[-1:]  # the trained model, as `list_models` orders them
        _try_phase(
            "save", run=lambda: list(map(_gather_trained, last_models)), tracer=tracer, notes=notes
        )


def _repeat_micro_batches(
    trace: Trace, cfg: Any, pipeline_rank: int, traced: int, marks: MicroBatchMarks
) -> None:
    """Let the `traced` micro-batches of each step count for all micro-batches of a step.

    The marks say where micro-batches begin, if backward ran between them; else it is guessed from
    the parts of the step.
    """
    _, count = compute_micro_batches(cfg)
    num_different = int(reduces_once(cfg.parallel))
    if cfg.parallel.pipeline > 1:
        repeat_actions(trace, cfg.parallel, pipeline_rank=pipeline_rank, traced=traced, count=count)
    elif has_backward(trace, marks, traced):
        repeat_last_micro_batch(
            trace, marks, count=count, traced=traced, num_different=num_different
        )
    else:
        repeat_last_by_parts(trace, count=count, traced=traced, num_different=num_different)


def _set_up(
    recipe: Any,
    cfg: FullFinetuneConfig,
    *,
    tracer: Tracer,
    phases: Sequence[str],
    steps: Sequence[str],
    notes: list[str],
) -> dict[str, nn.Module]:
    """Make the recipe's models and optimizer, and return the models by the prefix of their names.

    The optimizer is given its states here where `steps` has no first step that makes them. notes:
    gets a sentence if a run would be refused.
    """
    recipe.setup_model()
    models = list_models(recipe)
    for name, model in models.items():
        tracer.name_modules(model, name)
        fault = find_extra_fault(cfg.checkpoint, find_extra_tensors(model))
        if fault is not None:
            notes.append(f"a run would be refused: {fault}")
    if "load" in phases:
        _try_phase("load", run=recipe.load_weights, tracer=tracer, notes=notes)
    recipe.setup_optimizer()
    if FIRST not in steps:
        tracer.begin_phase(MAKING_STATES)
        _make_states(recipe)
    return models


def _run_steps(
    recipe: Any, tracer: Tracer, models: dict[str, nn.Module], steps: Sequence[str]
) -> tuple[int, int]:
    """Run the steps. Return (tokens of one, bytes alive after the last minus after the first).

    Raises ConfigError, with the recipe's line, where a step reads the value of a tensor.
    """
    bytes_left: list[int] = []
    for name in steps:
        tracer.begin_phase(name)
        tracer.makes_batches = True
        batches = next(recipe.data.batches())
        # The memory of batches is numpy's: no operator made it, so the tracer has not seen it.
        tracer.note_memory(list_batch_tensors(batches))
        tracer.makes_batches = False
        tokens = batches.total_tokens
        try:
            _run_step(recipe, batches, tracer.checker)
        except _NEEDS_VALUES as error:
            file = inspect.getfile(type(recipe))
            lines = find_lines_in(error, file)
            location = f"{file}:{lines[-1]}: " if lines else ""
            raise ConfigError(
                f"{location}{type(recipe).__name__}.train_step: reads the value of a tensor"
                f" ({str(error).splitlines()[0]}), expected sizes only; keep .item(), .tolist() and"
                " `if tensor` out of train_step, and log in train()"
            ) from error
        del batches  # else they are alive while the next step's batches are made
        label_models(tracer, models)
        bytes_left.append(tracer.count_alive_bytes())
    return tokens, bytes_left[-1] - bytes_left[0]


def _run_step(recipe: Any, batches: Any, checker: StreamChecker | None) -> None:
    """Run one step; with a checker, also read its numbers as a training loop does."""
    if checker is None:
        recipe.train_step(batches)
        return
    with checker.follow_step():
        step = recipe.train_step(batches)
        if hasattr(step, "read_numbers"):
            step.read_numbers()


def _try_phase(name: str, run: Callable[[], Any], tracer: Tracer, notes: list[str]) -> None:
    """Run a phase outside the steps, up to where its operators need a tensor's values.

    `.item()` returns 0 in it. notes: gets a sentence if the phase does not run to its end.
    """
    tracer.begin_phase(name)
    tracer.values_are_zero = True
    try:
        run()
    except _NEEDS_VALUES:
        notes.append(f"{name}: traced up to where it reads a tensor's value")
    # A user's recipe may read an attribute that only a run's data have.
    except AttributeError as error:
        notes.append(f"{name}: not traced to its end ({error})")
    finally:
        tracer.values_are_zero = False


@torch.no_grad()
def _gather_trained(model: nn.Module) -> None:
    """Gather each trained parameter and move it to the host, one by one, as an export does."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            gather_whole(parameter).to("cpu")


def _make_states(recipe: Any) -> None:
    """Make the optimizers' states as the first step leaves them, by a step on zero gradients."""
    for optimizer in vars(recipe).values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()


class _CollectorPause:
    """A switch for Python's collector of reference cycles, off while a recipe is traced."""

    def __init__(self) -> None:
        # Objects that simulations left behind and that the collector has not looked at.
        self._num_left = 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        # It would take a third of the time, and free memory at moments that differ from run to run.
        # Simulations leave millions of objects, mostly without a cycle: the collector ignores them
        # (`gc.freeze`) until there are _MANY_OBJECTS.
        was_enabled = gc.isenabled()
        if self._num_left > _MANY_OBJECTS:
            gc.unfreeze()
            gc.collect()
            self._num_left = 0
        gc.freeze()  # also sets the count that is read below to 0
        gc.disable()
        try:
            yield
        finally:
            self._num_left += gc.get_count()[0]
            gc.freeze()
            if was_enabled:
                gc.enable()


pause_collector = _CollectorPause().pause
