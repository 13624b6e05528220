"""Every byte that a pipeline's rank holds after every action, against theory; and what is computed
twice.
"""

import pytest

from benchmarks.pp_traced import build_config, build_small_spec, compute_expected_alive, run_ours
from tests.distributed.ranks import run_ranks
from tests.selection import mark_slow_except, select_cases

RANKS = 2
COUNT = 4
SPEC = build_small_spec(layers=4)
JOBS = [
    ("gpipe", "full"), ("1f1b", "none"), ("interleaved_1f1b", "full"), ("interleaved_zero_bubble", "none"),
    ("zbv", "full"),
]  # fmt: skip
QUICK = mark_slow_except(
    JOBS, [("1f1b", "none"), ("zbv", "full"), ("interleaved_zero_bubble", "none")]
)


@pytest.fixture(scope="module")
def traced(request):
    """By schedule and checkpointing, what each rank held."""
    jobs = select_cases(request, "job")
    found = run_ranks(lambda: [_run(*job) for job in jobs], RANKS, timeout=240)
    return {job: [found[rank][number] for rank in range(RANKS)] for number, job in enumerate(jobs)}


def _run(schedule, mode):
    return run_ours(build_config(schedule, RANKS, COUNT, mode), SPEC, COUNT).as_dict()


@pytest.mark.slow
@pytest.mark.parametrize("job", QUICK, ids="-".join)
def test_what_is_alive_after_each_action_is_what_theory_says_to_the_byte(traced, job):
    schedule, mode = job
    for rank in range(RANKS):
        wanted = compute_expected_alive(
            build_config(schedule, RANKS, COUNT, mode), SPEC, rank, COUNT
        )
        assert traced[job][rank]["alive_after_action"] == wanted
        assert max(bytes_ for _, bytes_ in wanted) > 4 * min(bytes_ for _, bytes_ in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("job", QUICK, ids="-".join)
def test_nothing_but_parameters_and_gradients_is_alive_after_a_step(traced, job):
    assert [found["alive_after_step"] for found in traced[job]] == [0] * RANKS


@pytest.mark.parametrize("job", QUICK, ids="-".join)
def test_a_checkpointed_layer_runs_forward_twice_for_each_micro_batch_in_every_schedule(
    traced, job
):
    _, mode = job
    wanted = {str(layer): COUNT * (2 if mode == "full" else 1) for layer in range(SPEC.num_layers)}
    for step in (
        "first_forwards",
        "forwards",
    ):  # nor does the first step run anything to learn shapes
        calls = {}
        for found in traced[job]:
            calls |= found[step]
        assert calls == wanted


def _run_spoilt():
    """As by a driver that holds its outputs, and one that holds what it sent."""
    kept = []

    def hold_outputs(model, pipeline):
        forward = model.forward

        def run(*args, **more):
            output = forward(*args, **more)
            kept.append(output)
            return output

        model.forward = run

    def hold_sent(model, pipeline):
        transport = pipeline._use_transport()
        send = transport.send

        def keep(tensor, *rest, **more):
            kept.append(tensor)
            return send(tensor, *rest, **more)

        transport.send = keep

    found = []
    for spoil in (hold_outputs, hold_sent):
        found.append(
            run_ours(build_config("1f1b", RANKS, COUNT, "none"), SPEC, COUNT, spoil=spoil).as_dict()
        )
        kept.clear()
    return found


@pytest.mark.slow
def test_a_driver_that_held_its_outputs_or_what_it_sent_would_be_noticed():
    spoilt = run_ranks(_run_spoilt, RANKS)
    for number in range(2):
        for rank in range(RANKS):
            wanted = compute_expected_alive(
                build_config("1f1b", RANKS, COUNT, "none"), SPEC, rank, COUNT
            )
            found = spoilt[rank][number]
            assert found["alive_after_action"] != wanted
            assert found["alive_after_step"] > 0
