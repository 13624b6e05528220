"""The search for settings that fit."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS
from recipe_lib.plan.search import fastest_settings as search_module
from recipe_lib.plan.search import trials as trials_module
from recipe_lib.plan.search.fastest_settings import SearchResult, render_search, search
from recipe_lib.plan.search.trial_order import (
    SearchState,
    list_micro_batch_sizes,
    make_leanest,
    run_trials,
    yield_fewer_chunks,
    yield_micro_batches,
)
from recipe_lib.plan.search.trials import (
    Candidate,
    Changes,
    Estimate,
    apply_changes,
    make_key,
    make_variant_key,
)
from tests.plan.apart import build_settings, call_in_fork

MIB = 2**20
CONFIG = (
    "batch_size=32",
    "gradient_accumulation_steps=2",
    "device=auto",
    "max_seq_len=64",
    "~validation.source",
)
ROOM = 35 * MIB  # of a card
FEW_ROWS = ("batch_size=2", "gradient_accumulation_steps=4")


def found(memory: int) -> tuple[SearchResult, list[tuple[str, int]]]:
    """What is found, and (verdict, active bytes) of plans made of it from its overrides as
    typed.
    """
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.plan_schema import OutsideTorch
    from recipe_lib.plan.search.fastest_settings import search
    from recipe_lib.plan.search.trials import format_overrides

    def wanted(*overrides: str):
        recipe_class, cfg, plain = build_settings("demo/full", 2, *CONFIG, *FEW_ROWS, *overrides)
        hardware = dataclasses.replace(plain.hardware, memory=memory)
        return (
            recipe_class,
            cfg,
            dataclasses.replace(plain, hardware=hardware, outside=OutsideTorch(0, 0)),
        )

    fixed = ("memory.cpu_offload", "optimizer.state_bits", "parallel.data_replicate", "parallel.pipeline",
             "parallel.reshard_after_forward", "parallel.strategy")  # fmt: skip
    result = search(*wanted(), want=2, fixed=fixed)
    plans = [
        make_plan(*wanted(*format_overrides(one.changes).split()))[0] for one in result.fitting
    ]
    return result, [(plan.verdict, plan.heaviest.peak.active) for plan in plans]


@pytest.mark.slow
def test_what_is_found_is_confirmed_by_its_plan():
    """Also that a step keeps its rows, and that the table says what to type."""
    result, plans = call_in_fork(found, ROOM)
    assert len(result.fitting) == 2
    assert [one.verdict for one in result.fitting] == [verdict for verdict, _ in plans]
    assert [one.estimate.active for one in result.fitting] == pytest.approx(
        [active for _, active in plans], rel=0.005
    )
    assert all(verdict != DOES_NOT_FIT for verdict, _ in plans)
    speeds = [one.speed for one in result.fitting]
    assert speeds == sorted(speeds, reverse=True)
    for one in result.fitting:
        rows = one.changes.get("batch_size", 2) * one.changes.get("gradient_accumulation_steps", 4)
        assert rows * 2 == 16
        assert one.estimate.active <= ROOM
    text = render_search(result)
    assert text.startswith("FOUND  settings that fit 2 x 24GB, 16 sequences a step")
    assert f"batch_size={result.fitting[0].changes['batch_size']} " in text


@pytest.mark.slow
def test_nothing_fits():
    result, _ = call_in_fork(found, 4 * MIB)
    assert not result.fitting
    assert result.closest is not None
    assert result.closest.verdict == DOES_NOT_FIT
    assert result.closest.shortfall > 0
    assert result.closest.changes["batch_size"] == 1
    assert "DOES NOT FIT" in render_search(result)
    assert "batch_size=1" in render_search(result)
    assert "short of" in render_search(result)


def trials_of(*overrides: str, fixed: Collection[str] = ()) -> tuple[SearchState, list[Changes]]:
    """What a search of two ranks has before its first trial, and the list that its trials come in;
    none is made.
    """
    from recipe_lib.report.phases import Phase

    made: list[Changes] = []

    def submit(changes: Changes) -> Future[Any]:
        made.append(changes)
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    _, cfg, wanted = build_settings("demo/full", 2, *CONFIG, *overrides)
    return SearchState(cfg, wanted, fixed, submit, 1, Phase("", None, "")), made


def candidate(
    changes: Changes, active: int, room: int, seconds: float = 1.0, **more: Any
) -> Candidate:
    """Settings with their estimate, of a step of 1000 tokens."""
    quick = Estimate(active, active, active, 0, seconds, 1000, 2**30, 1, 1, "", usable=room, **more)
    return Candidate(changes, quick, active <= room)


@pytest.mark.parametrize(("verdict", "short"), [("", 3), (DOES_NOT_FIT, 2)])
def test_a_whole_plan_lacks_what_it_lacks_in_the_better_way_of_the_allocator(
    verdict: str, short: int
):
    quick = dataclasses.replace(
        candidate({}, active=10, room=8).estimate, reserved=10, reserved_expandable=11
    )
    assert Candidate({}, quick, may_fit=False, verdict=verdict).shortfall == short


@pytest.mark.slow
def test_what_was_typed_stays():
    """Neither the micro-batch nor what is tried outside of the layers replaces a key that is
    fixed.
    """
    fixed = {"batch_size", "parallel.fsdp_wrap_policy", "memory.loss_chunks"}
    trials, made = trials_of(fixed=fixed)
    run_trials(trials, [yield_micro_batches(trials, {})])
    assert len(made) == 3
    assert not any(fixed & set(changes) for changes in [*made, make_leanest(trials, {})])

    seen: list[tuple[int, int, str, int]] = []

    def refuse(recipe_class: type, cfg: Any, settings: Any, limit: int) -> None:
        seen.append(
            (
                cfg.batch_size,
                cfg.gradient_accumulation_steps,
                cfg.parallel.fsdp_wrap_policy,
                cfg.memory.loss_chunks,
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials_module, "try_estimate", refuse)
        trials_module.try_settings(object, trials.cfg, trials.settings, {}, fixed)
    assert set(seen) == {(32, 2, "auto", 1)}


def list_tried_sizes(
    trials: SearchState, base: Changes, compute_seconds: Callable[[int], float]
) -> list[int]:
    """The micro-batches that are tried, of which those up to 16 fit.

    compute_seconds: of a step, by the sequences of a micro-batch.
    """
    looking = yield_micro_batches(trials, base)
    changes = next(looking)
    tried: list[int] = []
    with contextlib.suppress(StopIteration):
        while True:
            size = changes["batch_size"]
            tried.append(size)
            changes = looking.send(
                candidate(changes, 2**30 * size, 20 * 2**30, seconds=compute_seconds(size))
            )
    return tried


def test_the_largest_micro_batch_that_fits_is_looked_for():
    """From the largest on; a kind that recomputes more, with the larger ones only."""
    trials, _ = trials_of(fixed={"memory.activation_checkpointing"})
    assert list_micro_batch_sizes(trials.cfg, {}) == [1, 2, 4, 8, 16, 32, 64]
    assert list_tried_sizes(trials, {}, lambda size: 1 / size) == [64, 32, 16]
    trials, _ = trials_of()
    assert list_tried_sizes(trials, {}, lambda size: 1 / size) == [64, 32, 16, 64, 32, 64, 32]


def test_micro_batches_of_a_pipeline_grow_while_they_are_faster_and_fit():
    trials, _ = trials_of()
    pipeline = {"parallel.pipeline": 2, "parallel.strategy": "fsdp"}
    assert list_tried_sizes(trials, pipeline, lambda size: 1 / size) == [1, 2, 4, 8, 16, 32, 32, 32]
    assert list_tried_sizes(trials, pipeline, lambda size: abs(size - 4) + 1) == [1, 2, 4, 8]


def test_what_cannot_fit_or_cannot_be_faster_is_not_tried(caplog: pytest.LogCaptureFixture):
    """By what was tried: activations that less checkpointing keeps, and operations that more of it
    does.
    """
    room = 23 * 2**30
    trials, made = trials_of()
    one, many = (
        {"batch_size": size, "gradient_accumulation_steps": 64 // size} for size in (1, 64)
    )
    for kind, kept, seconds in (("full", 2**27, 10.0), ("none", 2**33, 4.0)):
        changes = {"memory.activation_checkpointing": kind} | one
        trials.tried[make_key(changes)] = candidate(
            changes, 2**31, room, 12.0, kept=kept, least_seconds=seconds
        )
    changes = {"memory.activation_checkpointing": "none"} | many
    trials.leanest_by_variant[make_variant_key(trials.cfg, changes)] = candidate({}, 2**31, room)
    run_trials(trials, [iter_of(changes)])
    assert made == []
    (said,) = trials.skipped.values()
    assert "at least" in said  # 64 times what one sequence keeps
    faster = {"batch_size": 64, "gradient_accumulation_steps": 1}
    trials.tried["faster"] = candidate(faster, 2**31, room, 9.0)
    run_trials(trials, [iter_of({"memory.activation_checkpointing": "full", "batch_size": 2})])
    assert made == []
    assert "100 tokens/s at most" in list(trials.skipped.values())[-1]
    run_trials(trials, [iter_of({"memory.activation_checkpointing": "selective", "batch_size": 2})])
    assert len(made) == 1


def iter_of(changes: Changes) -> Any:
    """A way of one trial."""
    yield changes


def test_the_trial_that_could_be_the_fastest_comes_first_and_outcomes_are_said(
    caplog: pytest.LogCaptureFixture,
):
    trials, made = trials_of()
    for kind, seconds in (("full", 10.0), ("none", 4.0)):
        changes = {"memory.activation_checkpointing": kind}
        trials.tried[kind] = candidate(changes, 2**40, 2**34, 12.0, least_seconds=seconds)

    def submit(changes: Changes) -> Future[Any]:
        made.append(changes)
        future: Future[Any] = Future()
        future.set_result(candidate(changes, 2**33, 2**34, 11.0 if len(made) == 1 else 11.5))
        return future

    trials.submit = submit
    kinds = [
        {"memory.activation_checkpointing": kind, "batch_size": 2} for kind in ("full", "none")
    ]
    with caplog.at_level("INFO"):
        run_trials(trials, [iter_of(changes) for changes in kinds])
    assert made == kinds[::-1]
    assert [one.changes for one in trials.list_fitting()] == kinds[::-1]


KEPT_BY_KIND = {"none": 4, "selective": 2, "full": 1}  # bytes of a sequence
SHIPPED = {"batch_size": 4, "gradient_accumulation_steps": 8}


def search_formulas(
    patch: pytest.MonkeyPatch, room: int, plan_takes: int, fastest_size: int = 32, want: int = 1
) -> tuple[list[Changes], list[str]]:
    """Search one rank, with formulas in place of simulations: the changes that are found, and the
    settings that were planned in full, as checkpointing and micro-batch.

    plan_takes: times the bytes of an estimate. fastest_size: of a micro-batch; other sizes take
    longer the more they differ.
    """
    planned: list[str] = []

    def count_bytes(cfg: Any) -> int:
        return cfg.batch_size * KEPT_BY_KIND[cfg.memory.activation_checkpointing]

    def try_settings(recipe_class: type, cfg: Any, *, changes: Changes, **more: Any) -> Candidate:
        changed = apply_changes(cfg, changes)
        kept = KEPT_BY_KIND[changed.memory.activation_checkpointing]
        seconds = 10.0 - kept + abs(changed.batch_size - fastest_size) / 100
        return candidate(
            changes, count_bytes(changed), room, seconds, kept=kept, least_seconds=9.5 - kept
        )

    def make_plan(recipe_class: type, cfg: Any, settings: Any) -> tuple[Any, None]:
        active = plan_takes * count_bytes(cfg)
        planned.append(f"{cfg.memory.activation_checkpointing} {cfg.batch_size}")
        rank = SimpleNamespace(
            peak=SimpleNamespace(active=active), reserved=active, reserved_expandable=active, host=0
        )
        verdict = FITS if active <= room else DOES_NOT_FIT
        return SimpleNamespace(
            heaviest=rank, device=SimpleNamespace(usable=room), verdict=verdict
        ), None

    patch.setattr(search_module, "try_settings", try_settings)
    patch.setattr(search_module, "make_plan", make_plan)
    overrides = [f"{key}={value}" for key, value in SHIPPED.items()]
    _, cfg, wanted = build_settings("demo/full", 1, *CONFIG, *overrides)
    result = search(object, cfg, wanted, want=want, processes=1)
    return [one.changes for one in result.fitting], planned


def test_slower_settings_are_tried_where_the_whole_plan_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    """The fastest by its estimate is one micro-batch, after which no smaller one is tried."""
    found, planned = search_formulas(monkeypatch, room=128, plan_takes=2)
    assert planned == ["none 32", "none 16"]
    assert found == [{"batch_size": 16, "gradient_accumulation_steps": 2}]
    found, _ = search_formulas(monkeypatch, room=128, plan_takes=2, want=3)
    assert [changes.get("batch_size", SHIPPED["batch_size"]) for changes in found] == [16, 8, 4]


def test_the_kinds_that_were_too_slow_are_tried_where_no_plan_of_the_faster_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    """All that fit by their estimates are planned, however many, before levers that cost more."""
    found, planned = search_formulas(monkeypatch, room=128, plan_takes=128)
    kinds = [size.partition(" ")[0] for size in planned]
    assert kinds == sorted(kinds, key=list(KEPT_BY_KIND).index)
    assert len(planned) > search_module.MAX_PLANS
    smallest = {"batch_size": 1, "gradient_accumulation_steps": 32}
    assert found == [{"memory.activation_checkpointing": "full"} | smallest]


def test_nothing_slower_than_the_config_as_it_is_is_found(monkeypatch: pytest.MonkeyPatch):
    """Where one micro-batch fits, none of the smaller ones is tried, and these may be faster."""
    found, planned = search_formulas(monkeypatch, room=128, plan_takes=1, fastest_size=4)
    assert planned == ["none 1", "none 4"]  # 1 is the nearest of those that are tried
    assert found == [{}]


def chunked(state: SearchState, seconds: dict[int, float], room: int = 100) -> list[int]:
    """The chunks that are tried for a candidate of 16, by the seconds that each takes."""
    made: list[int] = []
    first = candidate({}, 10, room, seconds[16])
    sequence = yield_fewer_chunks(state, first)
    with contextlib.suppress(StopIteration):
        changes = next(sequence)
        while True:
            chunks = changes["memory.loss_chunks"]
            made.append(chunks)
            changes = sequence.send(candidate(changes, 160 // chunks, room, seconds[chunks]))
    return made


def test_fewer_chunks_of_the_loss_are_tried_while_they_are_faster_and_fit() -> None:
    state, _ = trials_of("memory.loss_chunks=16")
    halves = {16: 4.0, 8: 3.0, 4: 2.0, 2: 1.999, 1: 1.0}
    assert chunked(state, halves) == [8, 4, 2]  # the last gains too little to go on
    assert chunked(state, halves, room=30) == [8, 4]  # 40 bytes do not fit
    own = candidate({"memory.loss_chunks": 64}, 10, 100, 1.0)
    assert not list(yield_fewer_chunks(state, own))
    fixed = dataclasses.replace(state, fixed=("memory.loss_chunks",))
    assert not list(yield_fewer_chunks(fixed, candidate({}, 10, 100, 1.0)))
