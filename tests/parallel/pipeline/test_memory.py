"""Every byte that a pipeline's rank holds after every action, against theory; and what is computed twice."""

from functools import cache

import pytest

from benchmarks.pp_traced import config, expected_held, run_ours, small_spec
from recipe_lib.config.pipeline import SCHEDULES
from tests.distributed.ranks import run_ranks

RANKS, COUNT = 2, 4
SPEC = small_spec(layers=4)
MODES = ("none", "full")
JOBS = [(schedule, mode) for schedule in SCHEDULES for mode in MODES]


@cache
def traced():
    """By schedule and checkpointing, what each rank held."""
    found = run_ranks(_run_all, RANKS, timeout=240)
    return {job: [found[rank][number] for rank in range(RANKS)] for number, job in enumerate(JOBS)}


def _run_all():
    return [run_ours(config(schedule, RANKS, COUNT, mode), SPEC, COUNT).as_dict() for schedule, mode in JOBS]


@pytest.mark.parametrize(("schedule", "mode"), JOBS)
def test_what_is_alive_after_each_action_is_what_theory_says_to_the_byte(schedule, mode):
    for rank in range(RANKS):
        wanted = expected_held(config(schedule, RANKS, COUNT, mode), SPEC, rank, COUNT)
        assert traced()[schedule, mode][rank]["held"] == wanted
        assert max(bytes_ for _, bytes_ in wanted) > 4 * min(bytes_ for _, bytes_ in wanted)


@pytest.mark.parametrize(("schedule", "mode"), JOBS)
def test_nothing_but_parameters_and_gradients_is_alive_after_a_step(schedule, mode):
    assert [found["left"] for found in traced()[schedule, mode]] == [0] * RANKS


@pytest.mark.parametrize(("schedule", "mode"), JOBS)
def test_a_checkpointed_layer_runs_forward_twice_for_each_micro_batch_in_every_schedule(schedule, mode):
    wanted = {str(layer): COUNT * (2 if mode == "full" else 1) for layer in range(SPEC.num_layers)}
    for step in ("first", "forwards"):  # nor does the first step run anything to learn shapes
        calls = {}
        for found in traced()[schedule, mode]:
            calls |= found[step]
        assert calls == wanted


def _run_spoilt():
    """As by a driver that holds its outputs, and one that holds what it sent."""
    kept = []

    def hold_outputs(model):
        forward = model.forward

        def run(*args, **more):
            output = forward(*args, **more)
            kept.append(output)
            return output

        model.forward = run

    def hold_sent(model):
        transport = model.pipeline._use_transport()
        send = transport.send

        def keep(tensor, *rest, **more):
            kept.append(tensor)
            return send(tensor, *rest, **more)

        transport.send = keep

    found = []
    for spoil in (hold_outputs, hold_sent):
        found.append(run_ours(config("1f1b", RANKS, COUNT, "none"), SPEC, COUNT, spoil=spoil).as_dict())
        kept.clear()
    return found


def test_a_driver_that_held_its_outputs_or_what_it_sent_would_be_noticed():
    spoilt = run_ranks(_run_spoilt, RANKS)
    for number in range(2):
        for rank in range(RANKS):
            wanted = expected_held(config("1f1b", RANKS, COUNT, "none"), SPEC, rank, COUNT)
            found = spoilt[rank][number]
            assert found["held"] != wanted
            assert found["left"] > 0
