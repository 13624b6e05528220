"""The replications: commands of `tune plan`, Megatron's imitated stacks by formula, and memory that
FSDP1 marks.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import planner_replications
from benchmarks.megatron_stack import STEP, Gpt, Layout, Stage
from benchmarks.planner_rows import Run
from benchmarks.planner_streams import HOST_WAIT, MarkedTrace, replay_with_marks
from recipe_lib.cli import plan_request
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.config import load_config
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, RECORD, WAIT, Op, Storage, Sync

pytestmark = pytest.mark.benchmark


def test_replications_are_command_lines_of_tune_plan() -> None:
    rows = [entry for group in planner_replications.list_groups() for entry in group.rows]
    assert sum(entry.goal for entry in rows) >= 8
    for run in {entry.run for entry in rows if isinstance(entry.run, Run)}:
        read = plan_request.read_arguments(run.command.split()[2:])
        assert (read.config, tuple(read.overrides), read.sequence) == (
            [run.config],
            run.keys,
            str(run.tokens),
        )
        schema = RecipeFile.find(run.recipe).load_schema()
        assert load_config(run.config, run.keys, schema).max_seq_len == run.tokens


def test_the_model_has_as_many_parameters_as_their_tool_prints() -> None:
    """It leaves out the last norm, and two thirds of the biases of queries, keys and values."""
    one: Any = SimpleNamespace(size=lambda: 1)
    stage = Stage(Gpt(vocabulary=50432), Layout(4, data=1, pipeline=1, tensor=1), 0, one, "meta")
    found = sum(parameter.numel() for parameter in stage.parameters())
    assert found == 6_642_245_632 + 2 * 4096 + 32 * 2 * 4096


@pytest.mark.parametrize(
    ("marked", "waits", "active"), [(False, False, 1), (True, False, 2), (True, True, 1)]
)
def test_marked_memory_is_active_until_its_stream_is_done(
    marked: bool, waits: bool, active: int
) -> None:
    """A block of another stream is freed while the first still works for a second; then one more is
    taken.
    """
    size, hardware = 2**21, find_hardware("a100-80gb")
    trace = MarkedTrace(
        storages=[Storage(size, stream=1), Storage(size, stream=1)],
        ops=[Op("aten::mm", stream=0, bytes=int(hardware.bandwidth))],
        syncs=[Sync(0, 0), Sync(0, 1)],
        phases=[STEP, "after"],
    )
    trace.marks[0] |= {0} if marked else set()
    trace.events = [
        (PHASE, 0),
        (ALLOC, 0),
        (OP, 0),
        (RECORD, 0),
        (FREE, 0),
        (ALLOC, 1),
        (FREE, 1),
        (PHASE, 1),
    ]
    if waits:
        trace.events[5:5] = [(WAIT, 1), (HOST_WAIT, 0)]
    held = replay_with_marks(trace, STEP, hardware)
    assert held.active == active * size
    assert held.seconds > 1
