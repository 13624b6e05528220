"""A rank of a pipeline that fails, stands still or is gone ends all ranks, and one line says which
and where.
"""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.data import Batch
from recipe_lib.errors import DataError, OutOfMemoryError
from recipe_lib.memory import PeakMemory, explain_out_of_memory
from recipe_lib.models import build_meta, init_weights
from recipe_lib.parallel import World, heartbeat, materialize, split_pipeline, start_world
from tests.distributed.ranks import RankFailure, run_ranks
from tests.parallel.small_models import LENGTH, VOCABULARY, build_small_spec

Trouble = Callable[[World, str, int], None]


def train(trouble: Trouble, timeout: float, steps: int = 2) -> int:
    """Steps of a pipeline of two ranks; trouble: called with the world, "forward", "loss" or
    "between" (two steps), and how often it was before, or for a loss the micro-batch.
    """
    cfg = FullFinetuneConfig(
        device="cpu", parallel=ParallelConfig(pipeline=2, heartbeat_timeout_seconds=timeout)
    )
    with start_world(cfg) as world:
        spec = build_small_spec(layers=2)
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
        tokens = torch.randint(
            0, VOCABULARY, (4, 1, LENGTH), generator=torch.Generator().manual_seed(5)
        )

        for step in range(steps):
            world.heartbeat.enter(f"step {step + 1}", heartbeat.STEP_TIMEOUTS)
            with world.heartbeat.name_action_in_errors():  # as a run's loop does
                in_turn = pipeline.train([Batch(row, row) for row in tokens])
                for number, batch in enumerate(in_turn):
                    trouble(world, "loss", number)
                    pipeline.backward(model(batch.tokens, labels=batch.labels))
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
    assert told(found) == ["error: rank 1 failed in step 1: ZeroDivisionError: by zero"]
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    assert (
        "ZeroDivisionError: by zero\nrank 1, the backward of micro-batch 1 in stage 1" in found[1]
    )


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_one_rank_ends_the_other_rank(kind: type[BaseException]) -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if what == "loss" and number == 1:
            raise kind("the loss is no number")

    found = ended(trouble)
    assert told(found) == [
        f"error: rank 1 failed in step 1: {kind.__name__}: the loss is no number"
    ]
    assert found[0].startswith("exit code 7") and f"{kind.__name__}: the loss" in found[1]


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
        if (
            world.rank == 0 and what == "forward" and number == 5
        ):  # micro-batch 1 of the second step
            time.sleep(600)

    found = ended(trouble, timeout=2)
    assert [text.splitlines()[0] for text in found] == ["exit code 7", "exit code 7"]
    (line,) = told(found)
    waits = (
        r"(forward of micro-batch 1|sending of the \w+ of micro-batch \d) in stage 1, at \S+"
        r" \(\w+\)"
    )
    own = rf"; rank 1 waits for \d+ s in step 2, the {waits}"
    action = r"step 2, the forward of micro-batch 1 in stage 0, at \S+ \(\w+\)"
    still = rf"error: rank 0 has made no progress for \d+ s in {action}"
    assert re.fullmatch(f"{still}{own}{END}", line), line


@pytest.mark.slow
def test_a_stopped_process_is_named() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 1 and what == "loss" and number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    found = ended(trouble, timeout=1)
    assert found[0].startswith("exit code 7")
    (line,) = told(found)
    waits = r"rank 0 waits for \d+ s in step 1, the .* of micro-batch \d in stage 0, at \S+ \(\w+\)"
    assert re.fullmatch(
        rf"error: rank 1 is stopped or unreachable for \d+ s; {waits}{END}", line
    ), line


@pytest.mark.slow
def test_a_stopped_process_that_holds_the_store_too() -> None:
    """Started by hand rank 0 holds the store: no other rank can be asked."""

    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 0 and what == "forward" and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

    found = ended(trouble, timeout=1, process_group=False)
    assert found[1].startswith("exit code 7") and "Traceback" not in found[1]
    (line,) = told(found)
    assert re.match(
        r"error: the store of the run at 127.0.0.1:\d+ \(rank 0 or its launcher\) is stopped or ",
        line,
    )
    assert "rank 1 waits " in line and " of micro-batch " in line


def test_a_killed_process_is_named() -> None:
    def trouble(world: World, what: str, number: int) -> None:
        if world.rank == 1 and what == "loss" and number == 1:
            time.sleep(0.5)  # its stage is told with its beats
            os.kill(os.getpid(), signal.SIGKILL)

    found = ended(trouble)
    assert found[0].startswith("exit code 7") and "Traceback" not in found[0]
    (line,) = told(found)
    assert line.startswith("error: rank 1 is gone, killed or crashed; rank 0 ")


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
    assert re.match(r"error: rank 1 is stopped or unreachable for \d+ s; rank 0 waits ", line), line
    assert " s in between two steps, at " in line


def test_out_of_memory_says_where() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.add_note("rank 1, the forward of micro-batch 3 in stage 1")
    with pytest.raises(
        OutOfMemoryError,
        match=r"^training, rank 1, the forward of micro-batch 3 in stage 1: out of",
    ):
        with explain_out_of_memory(
            "training", FullFinetuneConfig(), PeakMemory(torch.device("cpu"))
        ):
            raise error
