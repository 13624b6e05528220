"""Every byte that a pipeline's rank holds after every action, against theory; and what is computed
twice.
"""

import pytest

from benchmarks import pp_memory
from benchmarks.pp_traced import (
    TracedStep,
    build_config,
    build_small_spec,
    compute_expected_alive,
    compute_expected_peak,
    run_ours,
)
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
    return run_ours(build_config(schedule, RANKS, COUNT, mode), SPEC, COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("job", QUICK, ids="-".join)
def test_what_is_alive_after_each_action_is_what_theory_says_to_the_byte(traced, job):
    schedule, mode = job
    for rank in range(RANKS):
        wanted = compute_expected_alive(
            build_config(schedule, RANKS, COUNT, mode), SPEC, rank, COUNT
        )
        assert traced[job][rank].alive_after_action == wanted
        assert max(bytes_ for _, bytes_ in wanted) > 4 * min(bytes_ for _, bytes_ in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("job", QUICK, ids="-".join)
def test_nothing_but_parameters_and_gradients_is_alive_after_a_step(traced, job):
    assert [found.alive_after_step for found in traced[job]] == [0] * RANKS


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
            calls |= getattr(found, step)
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
        found.append(run_ours(build_config("1f1b", RANKS, COUNT, "none"), SPEC, COUNT, spoil=spoil))
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
            assert found.alive_after_action != wanted
            assert found.alive_after_step > 0


@pytest.mark.benchmark
def test_a_row_of_the_page_has_theory_ours_and_torchs():
    job = ("1f1b", "none")
    cfg = build_config("1f1b", RANKS, pp_memory.COUNT, "none")
    sizes = {"spec": build_small_spec(pp_memory.LAYERS), "rank": 1, "count": pp_memory.COUNT}
    expected_alive = compute_expected_alive(cfg, **sizes)
    theory = compute_expected_peak(cfg, **sizes)
    forwards = {"0": pp_memory.COUNT}
    ours = TracedStep(
        alive_after_action=expected_alive, peak=theory, forwards=forwards, first_forwards=forwards
    )
    stock = TracedStep(
        alive_after_step=48 * 1024,
        peak=2 * theory,
        forwards={"0": pp_memory.COUNT},
        first_forwards={"0": pp_memory.COUNT + 1},
    )
    cells = pp_memory.build_row(job, rank=1, ours=ours, stock=stock)
    assert dict(zip(pp_memory.HEAD, cells, strict=True)) == {
        "schedule": "`1f1b`",
        "rank": "1",
        "theory, KiB": f"{theory / 1024:.0f}",
        "ours, KiB": f"{theory / 1024:.0f}",
        "torch, KiB": f"{2 * theory / 1024:.0f}",
        "ours / theory": "1.00x",
        "torch / theory": "2.00x",
        "ours between steps, KiB": "0",
        "torch between steps, KiB": "48",
        "forwards, ours": "1 (+0)",
        "forwards, torch": "1 (+1)",
    }
    # A byte more after the last action than theory has: no row.
    name, alive = expected_alive[-1]
    ours.alive_after_action = [*expected_alive[:-1], (name, alive + 1)]
    with pytest.raises(ValueError, match=f"{alive + 1} bytes after {name}, {alive} in theory"):
        pp_memory.build_row(job, rank=1, ours=ours, stock=stock)
