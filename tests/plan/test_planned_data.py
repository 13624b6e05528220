"""What a recipe finds as its data in a plan."""

from types import SimpleNamespace

import pytest
import torch

from recipe_lib.config.schema import DataConfig, FullFinetuneConfig, SourceConfig
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from recipe_lib.plan.simulated_world.planned_data import PlannedData
from recipe_lib.plan.tracing.simulated_micro_batches import MicroBatchMarks, repeat_last_micro_batch
from recipe_lib.plan.tracing.trace import OP, PHASE, Op, Trace

WORLD = SimpleNamespace(device=torch.device("cpu"), data_ranks=2)
SHAPE = SimpleNamespace(tokens=8, documents=1)
PAIRS = [SourceConfig(source="x.jsonl", format="preference")]


@pytest.mark.parametrize(
    ("schema", "data", "rows"),
    [
        (FullFinetuneConfig, DataConfig(source="x.jsonl"), 3),
        (DpoFinetuneConfig, DataConfig(source="x.jsonl"), 6),
        (DpoFinetuneConfig, DataConfig(source="x.jsonl", format="preference"), 6),
        (DpoFinetuneConfig, DataConfig(sources=PAIRS), 6),
    ],
)
def test_pairs_have_two_rows(schema: type[FullFinetuneConfig], data: DataConfig, rows: int):
    step = next(PlannedData(schema(data=data, batch_size=3), WORLD, SHAPE).batches())
    (batch,) = step.micro_batches
    assert batch.tokens.shape == (rows, 8)
    assert (batch.sequence_ids is not None) == (rows == 6)
    assert (step.num_items, step.total_tokens) == (6, 2 * rows * 8)


def test_what_no_data_was_read_for_is_none():
    """As docs/plan.md says to authors of recipes."""
    data = PlannedData(FullFinetuneConfig(data=DataConfig(source="x.jsonl")), WORLD, SHAPE)
    assert data.tokenizer is data.chat_template is data.tokenizer_path is data.plan is None
    assert (data.total_steps, data.report(), data.identity()) == (1, [], {})


@pytest.mark.parametrize(
    ("marks", "unlike", "repeats"),
    [
        ([0, 2, 4], 0, [1, 1, 3, 3, 1]),  # two of four micro-batches were gone through
        ([0, 2], 0, [1, 1, 1, 1, 1]),  # nobody asked for an end
        ([0, 1, 3, 4], 1, [1, 2, 2, 1, 1]),  # the last of three reduces the gradients
    ],
)
def test_the_last_micro_batch_stands_for_all_later_ones(
    marks: list[int], unlike: int, repeats: list[int]
):
    trace = Trace(ops=[Op("aten::mm") for _ in range(5)], phases=["step"])
    trace.events = [(PHASE, 0), *((OP, number) for number in range(5))]
    passes = MicroBatchMarks(lambda: (0, 0), [[(1 + mark, 0) for mark in marks]])
    repeat_last_micro_batch(trace, passes, 4, 2 + unlike, unlike)
    assert [op.repeats for op in trace.ops] == repeats
