"""What a recipe finds as its data in a plan."""

from types import SimpleNamespace

import pytest
import torch

from recipe_lib.config.recipes.dpo_distributed import DpoFinetuneConfig
from recipe_lib.config.schema import DataConfig, FullFinetuneConfig, SourceConfig
from recipe_lib.plan.trace import OP, PHASE, Op, Trace
from recipe_lib.plan.tracing.simulate import STEADY, stand_for_all
from recipe_lib.plan.world.planned_batches import PlannedData

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
    assert (batch.segments is not None) == (rows == 6)
    assert (step.items, step.total_tokens) == (6, 2 * rows * 8)


def made_step(parts: list[str]) -> Trace:
    trace = Trace(ops=[Op("aten::mm", part=part) for part in parts], phases=["first step", STEADY])
    trace.events = [(PHASE, 0), (PHASE, 1), *((OP, number) for number in range(len(parts)))]
    return trace


@pytest.mark.parametrize(
    ("parts", "repeats"),
    [
        (["forward", "backward", "forward", "backward", "optimizer"], [1, 1, 3, 3, 1]),
        (["forward", "optimizer"], [1, 1]),
        (["forward", "backward", "optimizer"], [1, 1, 1]),
    ],
)
def test_the_last_micro_batch_stands_for_all_later_ones(parts: list[str], repeats: list[int]):
    trace = made_step(parts)
    stand_for_all(trace, 4)
    assert [op.repeats for op in trace.ops] == repeats
