"""Batches ahead of the steps: the same for any number of workers and from any step on."""

import os
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from recipe_lib.data import DataPlan, make_step, make_training_steps
from recipe_lib.data import batches as batches_module
from tests.data.test_batches import made_dataset

DIVISION = {"data_ranks": 2, "batch_size": 2, "accumulation": 2, "pad_id": 3, "multiple": 4}


@pytest.fixture(scope="module")
def rows():
    return made_dataset(150)


def plan_of(rows, packing: int | None = None) -> DataPlan:
    return DataPlan(rows, seed=2, slots_per_step=8, shuffle=True, packing_capacity=packing)


def flat(steps) -> list:
    """Everything in batches as plain lists."""
    return [
        [step.num_label_tokens, step.total_tokens, step.padded_tokens, step.num_items]
        + [
            [batch.tokens.tolist(), batch.labels.tolist()]
            + [batch.attention.real.spans]
            + (
                [batch.positions.tolist(), batch.attention.documents.tolist()]
                if batch.positions is not None
                else []
            )
            for batch in step.micro_batches
        ]
        for step in steps
    ]


@pytest.mark.parametrize("packing", [None, 40])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_same_batches_for_any_number_of_workers(rows, packing, workers):
    plan = plan_of(rows, packing)
    last = 2 * plan.count_steps(0) + 1  # over the end of two epochs
    for rank in range(2):
        made = make_training_steps(
            rows,
            plan_of(rows, packing),
            first_step=0,
            last_step=last,
            data_rank=rank,
            workers=workers,
            **DIVISION,
        )
        expected = (
            make_step(
                rows,
                slots=plan.list_slots(step),
                data_rank=rank,
                data_ranks=2,
                batch_size=2,
                accumulation=2,
                pad_id=3,
                multiple=4,
                pack_length=plan.get_pack_length(step),
            )
            for step in range(last)
        )
        assert flat(made) == flat(expected)


def sort_by_length(rows, slots):
    """Return the rows of a step's slots of one row, the longest first."""
    numbers = np.concatenate(slots)
    return numbers[np.argsort(-rows.lengths[numbers], kind="stable")]


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_later_replays_nothing(rows, workers):
    asked = []

    class Watched(type(rows)):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    watched = Watched.__new__(Watched)
    watched.__dict__.update(rows.__dict__)
    plan = plan_of(rows)
    settings = {"data_rank": 1, "workers": workers, **DIVISION}
    whole = flat(make_training_steps(rows, plan, first_step=0, last_step=40, **settings))
    assert (
        flat(make_training_steps(watched, plan, first_step=33, last_step=40, **settings))
        == whole[33:]
    )
    own = [
        number
        for step in range(33, 40)
        for number in sort_by_length(rows, plan.list_slots(step)).reshape(2, 2, 2)[:, 1].flat
    ]
    assert asked == ([] if workers else own)  # by workers: in their memory
    assert list(make_training_steps(rows, plan, first_step=40, last_step=40, **settings)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_numbers_are_left_alone(rows, workers):
    """Else dropout would depend on the number of workers."""
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    settings = {"first_step": 0, "last_step": 5, "data_rank": 0, "workers": workers, **DIVISION}
    for _ in make_training_steps(rows, plan_of(rows), **settings):
        pass
    assert torch.equal(torch.rand(4), expected)


def test_workers_make_the_batches_and_end_with_them(rows, monkeypatch):
    pids = set()
    made = batches_module.make_step

    def telling(*arguments, **named):
        step = made(*arguments, **named)
        assert get_worker_info() is not None
        return type(step)(step.micro_batches, os.getpid(), os.getppid(), 0)

    monkeypatch.setattr(batches_module, "make_step", telling)
    settings = {"data_rank": 0, "workers": 2, **DIVISION}
    batches = make_training_steps(rows, plan_of(rows), first_step=0, last_step=30, **settings)
    for _ in range(6):
        step = next(batches)
        assert step.total_tokens == os.getpid()
        pids.add(step.num_label_tokens)
    assert len(pids) == 2
    batches.close()  # a run that stops early
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_signal_to_all_processes_leaves_the_batches_to_come(rows, monkeypatch):
    """The rank decides what a signal means; its workers go on until it ends them."""
    made = batches_module.make_step

    def telling(*arguments, **named):
        step = made(*arguments, **named)
        return type(step)(step.micro_batches, os.getpid(), 0, 0)

    settings = {"first_step": 0, "last_step": 12, "data_rank": 0, "workers": 2, **DIVISION}
    expected = flat(make_training_steps(rows, plan_of(rows), **settings))
    monkeypatch.setattr(batches_module, "make_step", telling)
    batches = make_training_steps(rows, plan_of(rows), **settings)
    first = [next(batches), next(batches)]
    for step in first:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(step.num_label_tokens, number)
    found = flat([*first, *batches])
    assert [step[4:] for step in found] == [step[4:] for step in expected]


def test_a_device_gets_them_through_pinned_memory(rows, monkeypatch):
    """Told without a device: what is moved, and how."""
    calls = []
    monkeypatch.setattr(
        batches_module.StepBatches, "pin_memory", lambda self: calls.append("pinned") or self
    )
    settings = {"first_step": 0, "last_step": 3, "data_rank": 0, **DIVISION}
    steps = list(make_training_steps(rows, plan_of(rows, 40), device="meta", **settings))
    assert calls == ["pinned"] * 3
    for step in steps:
        for batch in step.micro_batches:
            assert batch.tokens.device.type == batch.attention.documents.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu(rows, workers):
    settings = {"first_step": 0, "last_step": 6, "data_rank": 0, "workers": workers, **DIVISION}
    there = list(make_training_steps(rows, plan_of(rows, 40), device="cuda", **settings))
    assert there[0].micro_batches[0].tokens.is_cuda
    assert flat(there) == flat(make_training_steps(rows, plan_of(rows, 40), **settings))
