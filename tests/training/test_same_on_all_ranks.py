"""The ranks that share matrices, or a pipeline, have read the same rows, or the run does not begin;
neither does it when resumed.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.errors import SetupError
from recipe_lib.parallel import start_world
from recipe_lib.training.run import check_same_batches
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import build_arguments, read_losses, run_here

MESSAGE = "data: the 2 ranks {} that have data rank {} found different batches for the same step"
SHARED = "that share matrices"


def step(
    tokens: list[int], labels: list[int], positions: torch.Tensor | None = None
) -> StepBatches:
    batch = Batch(torch.tensor([tokens]), torch.tensor([labels]), positions)
    return StepBatches([batch], len(labels), len(tokens), len(tokens), num_items=1)


def check(steps: list[StepBatches], **parallel: int) -> str:
    """What the check of this rank's rows says."""
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**parallel))
    with start_world(cfg) as world:
        try:
            check_same_batches(steps[world.rank], world)
        except SetupError as error:
            return str(error)
    return ""


def test_rows_may_differ_between_groups_and_not_within_one() -> None:
    def all_cases() -> list[str]:
        first, second = step([1, 2], [2, 3]), step([4, 5], [5, 6])
        other_label, longer = step([4, 5], [5, -100]), step([4, 5, 0], [5, 6, -100])
        starts = step([1, 2], [2, 3], positions=torch.tensor([[0, 0]]))
        cases = [[first, first, second, second], [first, first, second, other_label]]
        cases += [[first, longer, second, second], [starts, first, first, first]]
        found = [check(case, tensor=2) for case in cases]
        # The ranks of a pipeline are not neighbors.
        found += [
            check([first, second, first, second], pipeline=2),
            check([first, second] * 2, pipeline=2, tensor=2),
        ]
        return [*found, check([first, second, first, other_label], pipeline=2)]

    for alike, *refused, alike_too, both, piped in run_ranks(all_cases, 4):
        assert alike == alike_too == ""
        told = zip(refused, (1, 0, 0), strict=True)
        assert all(line.startswith(MESSAGE.format(SHARED, group)) for line, group in told)
        assert both.startswith(
            "data: the 4 ranks of a pipeline and that share matrices that have data rank 0 found"
        )
        assert piped.startswith(MESSAGE.format("of a pipeline", 1))


@pytest.mark.slow
def test_a_run_and_a_resumed_run_are_refused_on_every_rank(tmp_path: Path) -> None:
    def changed(recipe: object) -> None:
        """Rank 1 has read something else."""
        read = recipe.data.batches  # type: ignore[attr-defined]

        def batches(first_step: int):
            for found in read(first_step):
                for batch in found.micro_batches:
                    batch.tokens[0, 0] += recipe.world.rank  # type: ignore[attr-defined]
                yield found

        recipe.data.batches = batches  # type: ignore[attr-defined]

    def run() -> list[list[str]]:
        argv = [
            *build_arguments(tmp_path / "run"),
            "parallel.tensor=2",
            "max_steps=2",
            "checkpoint.save_model=false",
        ]
        said = [run_here(argv, before_training=changed).said]
        dist.barrier()  # a rank that is there first would find the folder in use
        saved = run_here(
            [*argv, "max_steps=1", "checkpoint.save_every_n_steps=1", "overwrite_output_dir=true"]
        )
        assert saved.code == 0, saved.said
        dist.barrier()
        said.append(run_here([*argv, "resume=latest"], before_training=changed).said)
        return [[line for line in lines if line.startswith("error")] for lines in said]

    for told in zip(*run_ranks(run, 2), strict=True):
        (line,) = sum(told, [])  # by one of the ranks
        assert MESSAGE.format(SHARED, 0) in line
    assert len(read_losses(tmp_path / "run")) == 1  # of the run that was not changed
