"""Measure the bubble of every pipeline schedule: gloo processes train with layers that sleep.

    python benchmarks/pp_bubble.py --output docs/measurements/pp_bubble.md

A layer sleeps in forward, input gradient and weight gradients, each until the next tick of a clock
that all processes share. So many ranks run on few cores, delays of less than half a tick do not add
up, and what is measured is who waits for whom.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for imports of `benchmarks` and `tests`, run as a file

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.pp_traced import build_config, build_small_spec, make_micro_batches  # noqa: E402
from recipe_lib.config.mesh import SCHEDULES, count_stages, count_stages_per_rank  # noqa: E402
from recipe_lib.config.schema import ParallelConfig  # noqa: E402
from recipe_lib.data import Batch  # noqa: E402
from recipe_lib.models import build_meta, init_weights  # noqa: E402
from recipe_lib.ops import deferred  # noqa: E402
from recipe_lib.parallel import split_pipeline, start_world  # noqa: E402
from recipe_lib.parallel.pipeline import driver  # noqa: E402
from recipe_lib.parallel.pipeline.driver import Pipeline  # noqa: E402
from recipe_lib.parallel.pipeline.schedules import UNITS, compute_orders  # noqa: E402
from recipe_lib.parallel.pipeline.simulation import (  # noqa: E402
    add_transfers,
    simulate,
)
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.parallel.pipeline.formulas import compute_theoretical_bubble  # noqa: E402

RANKS = (2, 4)  # places in the pipeline
STEPS = 6  # the first is not counted
ALLOWED = 0.05  # largest difference of a measured bubble to theory, relative to theory
ONE_STAGE = "1f1b"  # the schedule that the others are compared with


def sleep_a_tick(seconds: float) -> None:
    """Sleep until the tick that is nearest to `seconds` from now.

    Ticks are the whole multiples of `seconds` on the machine's monotonic clock, which all processes
    share.
    """
    begin = time.monotonic()
    time.sleep(max(0.0, round(begin / seconds + 1) * seconds - begin))


class _Sleeping(torch.autograd.Function):
    """A layer that sleeps a tick in each of its actions and changes nothing.

    weight: some parameter, whose gradient is deferred where the schedule splits backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float) -> Tensor:
        """Sleep, and return a copy. seconds: of a tick."""
        ctx.weight = weight
        ctx.seconds = seconds
        sleep_a_tick(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sleep for the input gradient, and for the weight gradient now or when it is due."""
        weight = ctx.weight
        seconds = ctx.seconds
        sleep_a_tick(seconds)

        def compute_weight_gradient() -> list[Tensor | None]:
            """Sleep; the gradient is zero, as the model does not learn."""
            sleep_a_tick(seconds)
            return [torch.zeros_like(weight)]

        if deferred.is_deferring():
            deferred.defer_gradients([weight], compute_weight_gradient)
        else:
            compute_weight_gradient()
        return gradients[0].clone(), None, None


def make_sleep(model: nn.Module, seconds: float) -> None:
    """Make every layer sleep instead of computing. seconds: of a tick."""
    for layer in model.model.layers.children():
        weight = layer.input_layernorm.weight
        # `weight=weight` binds this layer's; `rest` is what our layers take beside hidden states.
        layer.forward = lambda hidden, *rest, weight=weight: _Sleeping.apply(
            hidden, weight, seconds
        )


def _run_rank(schedules: Sequence[str], ranks: int, count: int, seconds: float) -> list[list[Any]]:
    """Train on this rank by each schedule; return [begin, end] of each step, by schedule.

    count: micro-batches of a step. seconds: of a tick. Times are of the machine's clock.
    """
    times = []
    for schedule in schedules:
        cfg = build_config(schedule, ranks=ranks, count=count, checkpointing="none")
        stages = count_stages(cfg.parallel)
        cfg.parallel.pipeline_layers_per_stage = [1] * stages  # an action is then one tick
        spec = build_small_spec(stages)
        with start_world(cfg) as world:
            model = build_meta(spec, torch.float32)
            pipeline = split_pipeline(model, cfg, world)
            assert pipeline is not None
            model.to_empty(device="cpu")
            init_weights(model, 1, spec)
            make_sleep(model, seconds)
            times.append(
                [
                    _time_step(
                        pipeline, model=model, batches=make_micro_batches(count), seconds=seconds
                    )
                    for _ in range(STEPS)
                ]
            )
    return times


def _time_step(
    pipeline: Pipeline, model: nn.Module, batches: list[Batch], seconds: float
) -> list[float]:
    """Run a step; return when it began, at a tick, and when this rank's last action ended."""
    # `on_action` is called when an action begins, and once more behind the last: that is the end.
    ends: list[float] = []
    driver.on_action = lambda action: ends.append(time.monotonic())
    begin = _agree_on_begin(seconds)
    try:
        for batch in pipeline.train(batches):
            pipeline.backward(model(batch.tokens, labels=batch.labels) / 100)
    finally:
        driver.on_action = None
    model.zero_grad(set_to_none=True)
    return [begin, ends[-1]]


def _agree_on_begin(seconds: float) -> float:
    """Sleep on all ranks until the same tick, and return it."""
    dist.barrier()
    # Three ticks from now: the broadcast has to have reached all ranks by then.
    begin = torch.tensor(round(time.monotonic() / seconds + 3) * seconds, dtype=torch.float64)
    dist.broadcast(begin, src=0)
    time.sleep(max(0.0, begin.item() - time.monotonic()))
    return begin.item()


def compute_bubble(step: Sequence[Sequence[float]], work: float) -> float:
    """Compute the share of all ranks' time in one step in which they do not compute.

    step: (begin, end) of each rank. work: seconds that each of them computes.
    """
    return 1 - work / (max(end for _, end in step) - min(begin for begin, _ in step))


def measure_bubbles(
    schedules: Sequence[str], ranks: int, count: int, seconds: float
) -> dict[str, float]:
    """Run the ranks, and return the least bubble of each schedule's steps but the first.

    The least, since what else the machine does only adds to a step. count: micro-batches of a step.
    seconds: of a tick.
    """
    times = run_ranks(_run_rank, ranks, schedules, ranks, count, seconds, timeout=1800.0)
    measured = {}
    for number, schedule in enumerate(schedules):
        parallel = ParallelConfig(pipeline=ranks, pipeline_schedule=schedule)
        # Forward, input gradient and weight gradients of each stage and micro-batch.
        work = 3 * count_stages_per_rank(parallel) * count * seconds
        bubbles = []
        for step in range(1, STEPS):
            rank_times = [rank[number][step] for rank in times]  # (begin, end) of each rank
            bubbles.append(compute_bubble(rank_times, work))
        measured[schedule] = min(bubbles)
    return measured


def simulate_bubble(schedule: str, ranks: int, count: int) -> float:
    """Return the bubble of the lists of actions that the ranks run, by simulation.

    Tensors arrive at once, and a whole backward takes as long as two forwards.
    """
    parallel = ParallelConfig(pipeline=ranks, pipeline_schedule=schedule)
    orders = add_transfers(compute_orders(parallel, count), parallel)
    return simulate(orders, parallel, lambda action: UNITS[action.kind]).bubble


PAGE = """# The bubble of each pipeline schedule

Made by `python benchmarks/pp_bubble.py --output docs/measurements/pp_bubble.md`: {ranks} gloo processes run the
driver that trains, with layers that sleep until the next tick, {milliseconds:.0f} ms apart on a clock that the
processes share, in each of forward, input gradient and weight gradients (both in one backward where a schedule does not
split it); {count} micro-batches a step. The bubble is the part of the ranks' time together, from the step's beginning
to the end of its last action, that they do not sleep for a layer. Measured: the shortest of {steps} steps, since a busy
machine only adds. Theory: the formula of `tests/parallel/pipeline/formulas.py`; simulated: the
lists that the ranks run, by `recipe_lib.parallel.pipeline.simulation.simulate`. What the machine adds to an action is
hidden as long as it is less than half a tick: this says who waits for whom, and nothing about kernels, links, or stages
that are not equally long.

{table}

{verdict}
"""


def build_page(count: int, seconds: float) -> tuple[str, bool]:
    """Measure everything; return the page's text, and True if all bubbles are those of theory.

    Those of zero-bubble schedules have to be below 1F1B's, too.
    """
    head = "| ranks | schedule | stages | theory | simulated | measured | measured / theory"
    lines = [f"{head} | to 1F1B |", "| --- " * 8 + "|"]
    good = True
    for ranks in RANKS:
        measured = measure_bubbles(list(SCHEDULES), ranks=ranks, count=count, seconds=seconds)
        for schedule, bubble in measured.items():
            parallel = ParallelConfig(pipeline=ranks, pipeline_schedule=schedule)
            stages_per_rank = count_stages_per_rank(parallel)
            theory = compute_theoretical_bubble(
                schedule, ranks=ranks, micro_batches=count, stages_per_rank=stages_per_rank
            )
            assert theory is not None
            good &= abs(bubble / theory - 1) <= ALLOWED
            good &= bubble < measured[ONE_STAGE] or not SCHEDULES[schedule].splits
            cells = [
                str(ranks),
                f"`{schedule}`",
                str(ranks * stages_per_rank),
                f"{theory:.2%}",
                f"{simulate_bubble(schedule, ranks, count):.2%}",
                f"{bubble:.2%}",
                f"{bubble / theory:.3f}",
                f"{bubble / measured[ONE_STAGE]:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    verdict = (
        f"Every measured bubble is within {ALLOWED:.0%} of theory, and those of zero-bubble"
        " schedules below 1F1B's."
    )
    text = PAGE.format(
        ranks=" and ".join(map(str, RANKS)),
        milliseconds=seconds * 1000,
        count=count,
        steps=STEPS - 1,
        table="\n".join(lines),
        verdict=verdict,
    )
    return text, good


def main() -> int:
    """Print the rows as they are measured, and write the page where `--output` names one.

    Returns 1, and writes no page, if a bubble is not that of theory.
    """
    parser = argparse.ArgumentParser(description="Measure the bubble of every pipeline schedule.")
    parser.add_argument("--output", type=Path, help="the page")
    parser.add_argument("--seconds", type=float, default=0.06, help="of a tick")
    parser.add_argument("--count", type=int, default=8, help="micro-batches a step")
    arguments = parser.parse_args()
    text, good = build_page(arguments.count, arguments.seconds)
    if not good:
        print(
            f"a bubble is not within {ALLOWED:.0%} of theory: sleep longer (--seconds), on a"
            " machine with less to do"
        )
        return 1
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
