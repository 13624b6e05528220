"""A recipe's loop over the micro-batches of a step, and what a loop is told that is none."""

from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib import training
from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.errors import ConfigError
from recipe_lib.models import build_meta, init_weights
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    materialize,
    parallelize,
    start_world,
)
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import LENGTH, VOCABULARY, build_small_spec

STEPS = StepBatches(
    [Batch(row, row) for row in torch.arange(4 * LENGTH).view(4, 1, LENGTH) % VOCABULARY],
    num_label_tokens=4 * LENGTH,
    total_tokens=4 * LENGTH,
    padded_tokens=4 * LENGTH,
)


def compute_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.tokens, labels=batch.labels) / STEPS.num_label_tokens


def forget(model: nn.Module, parallel: Parallel) -> None:
    for batch in parallel.micro_batches(STEPS):
        compute_loss(model, batch)


def go_twice(model: nn.Module, parallel: Parallel) -> None:
    for batch in parallel.micro_batches(STEPS):
        parallel.backward(compute_loss(model, batch))
        parallel.backward(compute_loss(model, batch))


def leave(model: nn.Module, parallel: Parallel) -> None:
    for batch in parallel.micro_batches(STEPS):
        parallel.backward(compute_loss(model, batch))
        break


def go_outside(model: nn.Module, parallel: Parallel) -> None:
    for batch in parallel.micro_batches(STEPS):
        parallel.backward(compute_loss(model, batch))
    parallel.backward(torch.zeros((), requires_grad=True))


def fail(model: nn.Module, parallel: Parallel) -> None:
    for _ in parallel.micro_batches(STEPS):
        raise ConfigError("mine: found trouble")


def go_rightly(model: nn.Module, parallel: Parallel) -> None:
    for batch in parallel.micro_batches(STEPS):
        parallel.backward(compute_loss(model, batch))


FAULTS: dict[Any, str] = {
    forget: "train_step: found a micro-batch without a backward",
    go_twice: "train_step: found a call of parallel.backward without a micro-batch of its own",
    go_outside: "train_step: found a call of parallel.backward without a micro-batch of its own",
    leave: "train_step: found a loop over parallel.micro_batches that was left before its end",
    fail: "mine: found trouble",
}


def make(world: World, cfg: FullFinetuneConfig) -> tuple[nn.Module, Parallel]:
    spec = build_small_spec(layers=2)
    model = build_meta(spec, torch.float32)
    parallel = parallelize(model, cfg, world)
    materialize(model, cfg.memory, world.device)
    init_weights(model, 3, spec)
    return model, parallel


def run(loop: Any, pipeline: int) -> str:
    """What the loop's rank is told; of a pipeline the one with the last stage."""
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(pipeline=pipeline))
    with start_world(cfg) as world:
        model, parallel = make(world, cfg)
        go_rightly(model, parallel)
        all_reduce_gradients(model, parallel, world)
        if pipeline > 1 and world.pipeline is not None and world.pipeline.rank == 0:
            return ""
        with pytest.raises(ConfigError) as error, world.heartbeat.name_action_in_errors():
            if (
                pipeline > 1
            ):  # no other rank is there to exchange with: what is sent is not waited for
                monkey_patch_alone(parallel)
            loop(model, parallel)
            all_reduce_gradients(model, parallel, world)
        return error.value.faults[0]


def monkey_patch_alone(parallel: Parallel) -> None:
    """Hidden states of the other rank are made up, and nothing is sent to it."""
    from recipe_lib.parallel.pipeline import driver

    class Alone(driver.Transport):
        def __init__(self) -> None:
            pass

        def receive(self, shape: Any, dtype: Any, *_: Any, **__: Any) -> driver.PendingTensor:
            return driver.PendingTensor(torch.ones(shape, dtype=dtype), None)

        def send(self, tensor: torch.Tensor, *_: Any, **__: Any) -> driver.PendingTensor:
            return driver.PendingTensor(tensor, None)

    pipeline = parallel.pipeline
    assert pipeline is not None
    pipeline._transport = Alone()
    pipeline._agree_on_training = lambda: [True] * 3  # type: ignore[method-assign]


@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
def test_a_loop_that_does_not_go_backward_once_is_told(loop: Any) -> None:
    (said,) = run_ranks(run, 1, loop, 1)
    assert said.startswith(FAULTS[loop]) and "\n" not in said


@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
def test_in_a_pipeline_it_is_told_with_its_place(loop: Any) -> None:
    _, said = run_ranks(run, 2, loop, 2)
    assert said.startswith(FAULTS[loop]) and "\n" not in said
    if loop is not go_outside:
        assert said.endswith(" (rank 1, the backward of micro-batch 0 in stage 1)")


@pytest.mark.parametrize("name", ["sum_gradients", "backward_each", "derived_numbers"])
def test_a_recipe_of_an_earlier_version_is_told_what_to_call(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.{name}: found a recipe that was copied"):
        getattr(training, name)
    with pytest.raises(ConfigError):
        exec(f"from recipe_lib.training import {name}")  # noqa: S102
    assert not hasattr(training, "no_such_name")
