"""The share of a step in communication: arithmetic of spans, which events count, and a step of two
real ranks.
"""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe_lib.training.loop import (
    CommunicationProbe,
    collect_spans,
    compute_shares,
    measure_covered,
)
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import build_arguments, expect_done, read_metrics, run_here

CPU = torch.device("cpu")
FIELDS = {"communication_share", "communication_exposed_share", "scaling_efficiency"}


def test_spans_are_counted_once_however_many_run():
    """Against a picture with a cell for each nanosecond."""
    draw = random.Random(7)
    for _ in range(200):
        lists = [
            [(at, at + draw.randint(0, 12)) for at in draw.choices(range(50), k=draw.randint(0, 6))]
            for _ in "ab"
        ]
        cells = [{cell for begin, end in spans for cell in range(begin, end)} for spans in lists]
        assert [measure_covered(spans) for spans in lists] == [len(part) for part in cells]
        found = compute_shares(*lists, 100e-9)
        assert found["communication_share"] == pytest.approx(len(cells[0]) / 100)
        assert found["communication_exposed_share"] == pytest.approx(len(cells[0] - cells[1]) / 100)
        assert found["scaling_efficiency"] == pytest.approx(1 - len(cells[0] - cells[1]) / 100)


class Event:
    """What kineto tells of an event, as far as it is asked."""

    def __init__(
        self, name: str, begin: int, length: int, index: int = -1, annotation: bool = False
    ) -> None:
        kinds = torch.autograd.DeviceType
        self.name = lambda: name
        self.device_type = lambda: kinds.CPU if index < 0 else kinds.CUDA
        self.device_index = lambda: index
        self.start_ns, self.duration_ns = (lambda: begin), (lambda: length)
        self.is_user_annotation = lambda: annotation


def test_kernels_of_nccl_are_communication_and_other_kernels_of_the_device_computation():
    events = [
        Event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 10, index=1),
        Event("void at::native::vectorized_elementwise_kernel<4>", 5, 2, index=1),
        Event("void cutlass::Kernel2", 9, 4, index=0),  # another device's
        Event("Memcpy HtoD (Pinned -> Device)", 20, 5, index=1),
        Event("Memcpy DtoD (Device -> Device)", 30, 5, index=1),
        Event("FSDP::all_gather", 0, 99, index=1, annotation=True),
        Event("aten::mm", 0, 99),  # the host's
    ]
    assert collect_spans(events, torch.device("cuda", 1)) == ([(0, 10)], [(5, 7), (30, 35)])
    events = [
        Event("gloo:all_reduce", 0, 10),
        Event("c10d::allreduce_", 0, 4),
        Event("aten::mm", 2, 3),
    ]
    assert collect_spans(events, CPU) == ([(0, 10)], [(2, 5)])


def measured(work: Any) -> tuple[dict[str, float], float]:
    """What the probe finds of a call, on rank 0, and its seconds."""
    probe = CommunicationProbe(2, SimpleNamespace(is_main=dist.get_rank() == 0, size=2, device=CPU))  # type: ignore[arg-type]
    dist.barrier()
    probe.begin(1)
    assert probe.end(1.0) == {}
    probe.begin(2)
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    found = probe.end(seconds)
    return found, seconds


def two_ranks(folder: Path) -> dict[str, Any]:
    rank, pause, numbers, matrix = dist.get_rank(), 0.3, torch.ones(10), torch.ones(300, 300)

    def waits() -> None:
        """Rank 0 has nothing to do but to wait for rank 1."""
        time.sleep(pause * rank)
        dist.all_reduce(numbers)

    def works() -> None:
        """Rank 0 computes while it waits."""
        time.sleep(pause * rank)
        sum_of = dist.all_reduce(numbers, async_op=True)
        end = time.perf_counter() + pause
        while rank == 0 and time.perf_counter() < end:
            matrix.mm(matrix)
        sum_of.wait()

    found = {"waits": measured(waits), "works": measured(works), "seconds": pause}
    words = [
        "max_steps=3",
        "checkpoint.save_model=false",
        "batch_size=2",
        "log.communication_step=2",
    ]
    run = expect_done(run_here([*build_arguments(folder / "run"), *words]))
    return found | {"said": [line for line in run.said if "communication" in line]}


@pytest.mark.slow
def test_a_step_of_two_ranks(tmp_path: Path):
    first, second = run_ranks(two_ranks, 2, tmp_path)
    assert second["waits"][0] == second["works"][0] == {} and second["said"] == []
    found, seconds = first["waits"]
    assert set(found) == FIELDS
    assert found["communication_share"] * seconds > first["seconds"] / 2
    assert found["communication_exposed_share"] > 0.9 * found["communication_share"]
    found, seconds = first["works"]
    assert found["communication_share"] * seconds > first["seconds"] / 2
    assert found["communication_exposed_share"] < found["communication_share"] / 2

    lines = read_metrics(tmp_path / "run")
    assert [set(line) & FIELDS for line in lines] == [set(), FIELDS, set()]
    line = lines[1]
    assert 0 < line["communication_exposed_share"] <= line["communication_share"] < 1
    assert line["scaling_efficiency"] == 1 - line["communication_exposed_share"]
    (said,) = first["said"]
    assert said.startswith(
        f"step 2: {line['communication_share']:.1%} of its time in communication, "
    )


def test_one_rank_measures_nothing_and_a_profiler_at_work_is_no_error():
    alone = CommunicationProbe(1, SimpleNamespace(is_main=True, size=1, device=CPU))  # type: ignore[arg-type]
    alone.begin(1)
    assert alone._profiler is None and alone.end(1.0) == {}
    probe = CommunicationProbe(1, SimpleNamespace(is_main=True, size=2, device=CPU))  # type: ignore[arg-type]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        probe.begin(1)
    assert probe.end(1.0) == {}
