"""A rank of a pipeline that fails, stands still or is gone ends all ranks, and one line says which and where."""

import os
import re
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.data import Batch
from recipe_lib.errors import DataError, OutOfMemoryError
from recipe_lib.memory import PeakMemory, explain_out_of_memory
from recipe_lib.models import build_meta, init_weights
from recipe_lib.parallel import World, materialize, split_pipeline, start_world
from recipe_lib.parallel.hang_detection import beats, heartbeat
from recipe_lib.parallel.pipeline import watchdog
from recipe_lib.parallel.pipeline.schedules import Action
from recipe_lib.parallel.pipeline.watchdog import BETWEEN, COMPUTES, WAITS, RankGrid, Stand, culprits, words
from recipe_lib.parallel.world import PipelineRank
from tests.distributed.ranks import RankFailure, run_ranks
from tests.parallel.small_models import LENGTH, VOCABULARY, small_spec

Trouble = Callable[[World, str, int], None]


def train(trouble: Trouble, timeout: float, steps: int = 2) -> int:
    """Steps of a pipeline of two ranks; trouble: called with the world, "forward", "loss" or "between" (two steps), and
    how often it was before, or for a loss the micro-batch."""
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(pipeline=2, heartbeat_timeout_seconds=timeout))
    with start_world(cfg) as world:
        spec = small_spec(layers=2)
        model = build_meta(spec, torch.float32)
        pipeline = split_pipeline(model, cfg, world)
        assert pipeline is not None
        materialize(model, cfg.memory, world.device)
        init_weights(model, 3, spec)
        forwards = [0]

        def count(*_: object) -> None:
            trouble(world, "forward", forwards[0])
            forwards[0] += 1

        next(iter(model.model.layers.children())).register_forward_pre_hook(count)
        tokens = torch.randint(0, VOCABULARY, (4, 1, LENGTH), generator=torch.Generator().manual_seed(5))

        def loss_of(number: int, batch: Batch) -> torch.Tensor:
            trouble(world, "loss", number)
            return model(batch.tokens, labels=batch.labels)

        for step in range(steps):
            world.heartbeat.enter(f"step {step + 1}", beats.STEP_SECONDS)
            pipeline.train([Batch(row, row) for row in tokens], loss_of)
            world.heartbeat.enter("between two steps")
            trouble(world, "between", step)
        return forwards[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks, which have these too."""
    for name, seconds in {
        "BEAT_SECONDS": 0.1,
        "PEER_LOST_SECONDS": 1.5,
        "FAILURE_GRACE_SECONDS": 1.0,
        "REPORT_SECONDS": 0.3,
    }.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.02)


def ended(trouble: Trouble, timeout: float = 60.0, process_group: bool = True) -> list[str]:
    """How each of two ranks ended, its output behind; the limit of time is far below gloo's."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(train, 2, trouble, timeout, timeout=30, process_group=process_group)
    assert "time ran out" not in str(caught.value)
    found = str(caught.value).split("--- rank ")[1:]
    assert [text[0] for text in found] == ["0", "1"]
    return [text[3:] for text in found]


END = r"; set parallel.heartbeat_timeout_seconds=\d+ higher if the run is only slow"


def told(found: list[str]) -> list[str]:
    """What the ranks say, together."""
    return [line for text in found for line in text.splitlines() if line.startswith("error: ")]


def test_a_bug_keeps_its_traceback_and_ends_the_other_rank() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if what == "loss" and number == 1:
            raise ZeroDivisionError("by zero")

    found = ended(trouble)
    assert told(found) == ["error: rank 1 (stage 1) failed in step 1: ZeroDivisionError: by zero"]
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    assert "ZeroDivisionError: by zero\nrank 1 (stage 1), the backward of micro-batch 1" in found[1]


def test_a_users_error_says_where_and_gives_all_ranks_its_code() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 0 and what == "forward" and number == 2:
            raise DataError("rows.jsonl:7: found nothing")

    found = ended(trouble)
    assert told(found) == []  # the error itself is told where it is caught
    assert "rows.jsonl:7: found nothing" in found[0]
    assert found[1].startswith("exit code 2") and "Traceback" not in found[1]


def test_who_stands_still_is_named() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 0 and what == "forward" and number == 5:  # micro-batch 1 of the second step
            time.sleep(600)

    found = ended(trouble, timeout=2)
    assert [text.splitlines()[0] for text in found] == ["exit code 7", "exit code 7"]
    (line,) = told(found)
    # Who is first to have stood for long enough tells; of itself if it is the one.
    own = r"(; rank 1 \(stage 1\) has waited for rank 0 for \d+ s, for (the forward of micro-batch 1|sending .*))?"
    still = r"error: rank 0 \(stage 0\) has been blocked for \d+ s in the forward of micro-batch 1"
    assert re.fullmatch(f"{still}{own}{END}", line), line


@pytest.mark.slow
def test_a_stopped_process_is_named() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 1 and what == "loss" and number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    found = ended(trouble, timeout=2)
    assert found[0].startswith("exit code 7")
    (line,) = told(found)
    waits = r"rank 0 \(stage 0\) has waited for rank 1 for \d+ s, for .* of micro-batch \d"
    assert re.fullmatch(rf"error: rank 1 \(stage 1\) is stopped or unreachable for \d+ s; {waits}{END}", line), line


@pytest.mark.slow
def test_a_stopped_process_that_holds_the_store_too() -> None:
    """Started by hand rank 0 holds the store: no other rank can be asked."""

    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 0 and what == "forward" and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

    found = ended(trouble, timeout=1, process_group=False)
    assert found[1].startswith("exit code 7") and "Traceback" not in found[1]
    (line,) = told(found)
    assert re.match(r"error: the store of the run at 127.0.0.1:\d+ \(rank 0 or its launcher\) is stopped or ", line)
    assert "rank 1 (stage 1) has " in line and " of micro-batch " in line


def test_a_killed_process_is_named() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 1 and what == "loss" and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    found = ended(trouble)
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    (line,) = told(found)
    assert line.startswith("error: rank 1 (stage 1) is gone, killed or crashed; rank 0 (stage 0) ")


@pytest.mark.slow
def test_what_is_between_steps_may_take_long() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if what == "between":
            time.sleep(2.5)

    assert run_ranks(train, 2, trouble, 1.0, timeout=60) == [8, 8]


@pytest.mark.slow
def test_who_does_not_answer_between_steps_is_named() -> None:
    """Where the others wait in a collective, and are not at an action themselves."""

    def trouble(world: World, what: str, number: int) -> None:
        if what == "between" and number == 1:
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.barrier()

    found = ended(trouble, timeout=1)
    assert found[0].startswith("exit code 7")
    (line,) = told(found)
    assert re.match(
        r"error: rank 1 \(stage 1\) is stopped or unreachable for \d+ s; rank 0 \(stage 0\) waits ", line
    ), line
    assert " s in between two steps, at " in line


def test_out_of_memory_says_where() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.add_note("rank 1 (stage 1), the forward of micro-batch 3")
    with pytest.raises(OutOfMemoryError, match=r"^training, rank 1 \(stage 1\), the forward of micro-batch 3: out of"):
        with explain_out_of_memory("training", FullFinetuneConfig(), PeakMemory(torch.device("cpu"))):
            raise error


class Event:
    """A mark in a device's queue of work, which has been reached when the test says so."""

    made: list["Event"] = []

    def __init__(self) -> None:
        self.reached = False
        self.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.reached


def test_on_a_device_it_is_the_queued_work_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is through with the step long before."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(watchdog, "holds_values", lambda device: True)
    place, device = PipelineRank(0, 2, (0, 1)), torch.device("cuda")
    world = SimpleNamespace(rank=0, size=2, device=device, pipeline=place, heartbeat=heartbeat.Heartbeat())
    watched = watchdog.watch_over(world, ParallelConfig(pipeline=2))  # type: ignore[arg-type]
    assert watchdog.watch_over(world, ParallelConfig(pipeline=2)) is watched  # type: ignore[arg-type]
    Event.made.clear()

    def stand(done: int) -> tuple[str, str, int]:
        deadline = time.monotonic() + 20
        while watched.stand()["done"] < done and time.monotonic() < deadline:
            time.sleep(0.005)
        found = watched.stand()
        return found["what"], found["kind"], found["other"]

    with watched.step():
        watched.at(Action(0, "F", 1))
        watched.at(Action(0, "SF", 1))
        watched.at(Action(0, "B", 0))
        watched.waits()
        watched.computes()
    found = []
    for number, event in enumerate(Event.made, start=1):
        event.reached = True
        found.append(stand(number))
    computing, waiting = (COMPUTES, "B", -1), (WAITS, "B", 1)
    sending = [(COMPUTES, "SF", -1), (WAITS, "SF", 1)]
    forward = (COMPUTES, "F", -1)
    assert found == [forward, *sending, computing, waiting, computing, (BETWEEN, "", -1)]


PIPELINE = RankGrid(ParallelConfig(pipeline=2), 2)
TWO_PIPELINES = RankGrid(ParallelConfig(pipeline=2), 4)  # ranks 0 and 2, 1 and 3
WAITING, WORKING = Stand(WAITS, 0, "B", 1, 1, 9, 60.0), Stand(COMPUTES, 1, "F", 3, -1, 5, 60.0)


@pytest.mark.parametrize(
    ("stands", "ranks", "expected"),
    [
        ([WAITING, WORKING], PIPELINE, [1]),
        ([WAITING, Stand(COMPUTES, 1, "F", 3, -1, 5, 20.0)], PIPELINE, []),  # it is only slow
        ([WAITING, Stand(BETWEEN, seconds=61.0)], PIPELINE, [1]),
        ([WAITING, Stand(BETWEEN, seconds=3.0)], PIPELINE, []),
        ([WAITING, Stand(WAITS, 1, "SB", 1, 0, 9, 70.0)], PIPELINE, [0, 1]),
        ([WAITING, Stand(WAITS, 1, "F", 1, 0, 9, 5.0)], PIPELINE, []),
        # Rank 2 computes too, in a collective with rank 3, which waits for rank 1.
        ([WAITING, WORKING, Stand(COMPUTES, 1, "W", 2, -1, 8, 60.0), Stand(WAITS, 1, "F", 3, 1, 7, 60.0)],
         TWO_PIPELINES, [1]),
        ([WAITING, WAITING, WORKING, WORKING], TWO_PIPELINES, [2, 3]),  # either may wait for the other
    ],
)  # fmt: skip
def test_whom_the_others_wait_for(stands: list[Stand], ranks: RankGrid, expected: list[int]) -> None:
    assert culprits(dict(enumerate(stands)), ranks, 60.0) == expected


def test_words_name_the_stage_or_all_of_a_rank() -> None:
    ranks = RankGrid(ParallelConfig(pipeline=2, pipeline_schedule="zbv"), 2)
    assert words(ranks, 0, Stand(WAITS, 3, "I", 2, 1, 9, 61.4)) == (
        "rank 0 (stage 3) has waited for rank 1 for 61 s, for the input gradient of micro-batch 2"
    )
    assert words(ranks, 0, Stand()) == "" and ranks.name(1) == "rank 1 (stages 1 and 2)"
