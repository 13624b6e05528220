"""Changes of a config: made where the table of combinations allows them, written as overrides, tried in processes."""

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from recipe_lib.config.idle import why_idle
from recipe_lib.config.keys import read_schema
from recipe_lib.config.rules import broken_rules
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.data.workers import forks, in_order, worker_count
from recipe_lib.errors import SetupError, UserError
from recipe_lib.parallel.world import communicators
from recipe_lib.plan.allocation.untraced_memory import outside_torch
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.search.estimate import Estimate, quick
from recipe_lib.plan.tracing.pipeline_actions import peers_of
from recipe_lib.plan.world.simulated_device import NAME
from recipe_lib.report.phases import phase

# Dotted key -> value.
Changes = dict[str, Any]

STREAM_KEY = "memory.stream_layers"
TEACHER_KEYS = QUANTIZE_TEACHER, STREAM_TEACHER = "distill.quantize_teacher", "distill.stream_teacher"

_KILLED = "tune plan: one of the processes that try settings was killed (out of memory?); free some memory"

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def value_of(cfg: Any, key: str) -> Any:
    """The value of a dotted key; None where the config's class has no such key."""
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def teacher_in_memory(cfg: Any) -> Any | None:
    """Return the section `distill`, of a run with a teacher; None of another."""
    return value_of(cfg, "distill")


def changed(cfg: Any, changes: Changes) -> Any | None:
    """A copy of a config with other values; None where its class lacks a key, or the values do not go together."""
    schema: type = type(cfg)
    keys = read_schema(schema).keys
    if any(key not in keys for key in changes):
        return None
    other = copy.deepcopy(cfg)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split(".") if section else [], other), name, value)
    return None if _refused(other) - _refused(cfg) else other


def _refused(cfg: Any) -> set[Any]:
    """The rules that a config breaks, and the keys that it sets in vain."""
    schema: type = type(cfg)
    keys = read_schema(schema).keys
    idle = {name for name, key in keys.items() if value_of(cfg, name) != key.default and why_idle(cfg, key)}
    return idle.union(broken_rules(cfg, list(keys)))


def checkpointing(cfg: Any, kind: str) -> Changes:
    """What sets the kind of checkpointing; a budget belongs to `budget` alone."""
    changes: Changes = {"memory.activation_checkpointing": kind}
    if kind != "budget" and value_of(cfg, "memory.activation_budget_gib") is not None:
        changes["memory.activation_budget_gib"] = None
    return changes


def stepped_in_backward(cfg: Any) -> Changes:
    """What steps parameters in backward: nothing is clipped there, and nothing accumulated."""
    wanted = {"memory.optimizer_in_backward": True, "clip_grad_norm": None, "gradient_accumulation_steps": 1}
    return {key: value for key, value in wanted.items() if value_of(cfg, key) != value}


def streamed(cfg: Any) -> Changes:
    """What streams the model's layers; where they are trained, with what that needs."""
    changes: Changes = {STREAM_KEY: True}
    if cfg.trained_adapters is not None:
        return changes
    states = {} if cfg.memory.optimizer_offload else {"memory.optimizer_offload": True}
    return changes | stepped_in_backward(cfg) | states


def override_text(changes: Changes) -> str:
    """The changes as they are typed: `batch_size=1 gradient_accumulation_steps=16`."""
    return " ".join(f"{key}={_written(value)}" for key, value in changes.items())


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(_written, value))}]" if isinstance(value, list) else str(value)


def usable_bytes(cfg: Any, settings: PlanSettings) -> int:
    """What the allocator may take on the device."""
    outside = settings.outside or outside_torch(settings.hardware, communicator_sizes(cfg.parallel, settings.ranks))
    return settings.hardware.memory - outside.total


def communicator_sizes(parallel: ParallelConfig, ranks: int) -> list[int]:
    """The ranks of each communicator that a rank has, of the ranks of a pipeline the one with the most.

    NCCL gives every two ranks that exchange tensors outside of a batch of such exchanges a communicator of their own.
    """
    pairs = max(len(peers_of(parallel, place)) for place in range(parallel.pipeline))
    return [*communicators(parallel, ranks), *[2] * pairs]


def try_quick(recipe_class: type, cfg: Any, settings: PlanSettings, limit: int | None = None) -> Estimate | None:
    """`quick`, or None for what the recipe or the simulation refuses: one change of many, that is then left out."""
    try:
        return quick(recipe_class, cfg, settings, limit)
    except UserError:
        return None
    except (AssertionError, NotImplementedError, AttributeError, RuntimeError):  # an operator without a simulation
        return None


def with_ranks(settings: PlanSettings, ranks: int) -> PlanSettings:
    """The settings for another number of ranks."""
    return replace(settings, ranks=ranks, traced_ranks=())


def in_processes(
    work: Callable[[Piece], Result],
    pieces: Sequence[Piece],
    what: str = "trying settings",
    tell: Callable[[Result], str] = lambda result: "",
    unit: str = "settings",
) -> list[Result]:
    """`work` of each piece, in order, by forks of this process, one for each core.

    what, tell, unit: for who waits; `tell` is asked for what to say after each result, pieces are counted in `unit`.

    Here, one after the other, where a simulation has already run in this process: its autograd has threads that a fork
    lacks. Pieces stay in the process, results go through pipes.
    """
    workers = 1 if _has_simulated() else worker_count(None)
    places = range(max(2, len(pieces)))  # a single piece would be worked on here, and what comes after it too
    made: Iterable[Any] = map(work, pieces)
    if workers > 1:
        made = in_order(lambda at: work(pieces[at]) if at < len(pieces) else None, places, workers)
    found: list[Result] = []
    try:
        with phase(what, len(pieces), unit, leaves_line=False) as going:
            for result in made:
                found.append(result)
                if len(found) <= len(pieces):
                    going.advance(1)
                    going.say(tell(result))
        return found[: len(pieces)]
    except SetupError as error:
        if "data.num_proc" not in str(error):
            raise
        raise SetupError(_KILLED) from error


@contextmanager
def side_by_side(
    work: Callable[[Piece], Result], processes: int | None = None
) -> Iterator[tuple[Callable[[Piece], Future[Result]], int]]:
    """(what begins `work` of a piece, how many of them go on at a time), by forks of this process, one for each core.

    Here, one after the other, where a simulation has already run in this process; see `in_processes`. SetupError if a
    fork is killed.
    """
    workers = 1 if _has_simulated() else worker_count(processes)
    if workers == 1:
        yield functools.partial(_done, work), 1
        return
    try:
        with forks(work, workers) as submit:
            yield submit, workers
    except BrokenProcessPool as error:
        raise SetupError(_KILLED) from error


def _done(work: Callable[[Piece], Result], piece: Piece) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(work(piece))
    return future


def _has_simulated() -> bool:
    torch = sys.modules["torch"]
    return bool(torch._C._get_privateuse1_backend_name() == NAME)  # type: ignore[attr-defined]
