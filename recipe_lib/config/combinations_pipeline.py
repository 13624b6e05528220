"""Combinations with pipeline parallel that are refused."""

from typing import Any

from recipe_lib.config.combination import Incompatible
from recipe_lib.config.pipeline import SCHEDULES, fewest_micro_batches, micro_batches, schedule_fault

# What every example of a pipeline of two needs beside it.
_PIPELINE = ("parallel.pipeline=2", "gradient_accumulation_steps=4")
# Keys that only a pipeline reads, and a value that is not their default.
_IDLE = {
    "pipeline_schedule": "zbv",
    "pipeline_microbatches": "4",
    "pipeline_stages_per_rank": "3",
    "pipeline_max_deferred_weight_grads": "1",
    "pipeline_balance": "memory",
    "pipeline_layers_per_stage": "[1, 1]",
}
_HAVE_WEIGHTS_LATER = ", ".join(name for name, facts in SCHEDULES.items() if facts.splits)


def _does_not_divide(cfg: Any) -> bool:
    count = cfg.parallel.pipeline_microbatches
    return cfg.parallel.pipeline > 1 and bool(count) and _rows(cfg) % count != 0


def _rows(cfg: Any) -> int:
    return cfg.batch_size * cfg.gradient_accumulation_steps


def _uneven(cfg: Any) -> str:
    rows, count = _rows(cfg), cfg.parallel.pipeline_microbatches
    fewest = fewest_micro_batches(cfg.parallel)
    fitting = [number for number in range(fewest, rows + 1) if rows % number == 0]
    choose = f"choose one of {', '.join(map(str, fitting))}" if fitting else "choose a divisor"
    return (
        f"found {count} micro-batches for the {rows} rows of a step (batch_size {cfg.batch_size} x "
        f"gradient_accumulation_steps {cfg.gradient_accumulation_steps}), expected a divisor of them; {choose}"
    )


def _too_few(cfg: Any) -> bool:
    if cfg.parallel.pipeline == 1 or _does_not_divide(cfg):
        return False
    return micro_batches(cfg)[1] < fewest_micro_batches(cfg.parallel)


PIPELINE: tuple[Incompatible, ...] = (
    Incompatible(
        "micro-batches of different sizes",
        _does_not_divide,
        ("parallel.pipeline_microbatches", "batch_size", "gradient_accumulation_steps"),
        "the rows of a step, batch_size x gradient_accumulation_steps, are no multiple of the micro-batches",
        "choose a divisor of them",
        (*_PIPELINE, "parallel.pipeline_microbatches=3"),
        reads=("parallel.pipeline", "parallel.pipeline_schedule", "parallel.pipeline_stages_per_rank"),
        told=_uneven,
    ),
    Incompatible(
        "fewer micro-batches than a schedule needs",
        _too_few,
        ("parallel.pipeline", "parallel.pipeline_schedule", "parallel.pipeline_microbatches"),
        "ranks would wait for each other even in the middle of a step: all schedules but gpipe need as many "
        "micro-batches a step as the pipeline has ranks, dualpipev as it has stages",
        "set parallel.pipeline_microbatches (by default gradient_accumulation_steps) higher",
        ("parallel.pipeline=4",),
        reads=("batch_size", "gradient_accumulation_steps", "parallel.pipeline_stages_per_rank"),
        told=lambda cfg: schedule_fault(cfg.parallel, micro_batches(cfg)[1]) or "",
    ),
    *(
        Incompatible(
            f"parallel.{word} without a pipeline",
            lambda cfg: cfg.parallel.pipeline == 1,
            ("parallel.pipeline", f"parallel.{word}"),
            "with one rank there is no pipeline",
            f"remove parallel.{word}, or set parallel.pipeline",
            (f"parallel.{word}={value}",),
            unread=f"parallel.{word}",
        )
        for word, value in _IDLE.items()
    ),
    Incompatible(
        "stages of a schedule that has its own number",
        lambda cfg: cfg.parallel.pipeline > 1 and SCHEDULES[cfg.parallel.pipeline_schedule].stages is not None,
        ("parallel.pipeline_schedule", "parallel.pipeline_stages_per_rank"),
        "only the interleaved schedules leave open how many stages a rank has",
        "remove parallel.pipeline_stages_per_rank, or choose interleaved_1f1b or interleaved_zero_bubble",
        (*_PIPELINE, "parallel.pipeline_stages_per_rank=4"),
        unread="parallel.pipeline_stages_per_rank",
        reads=("parallel.pipeline",),
    ),
    Incompatible(
        "weight gradients that no schedule defers",
        lambda cfg: cfg.parallel.pipeline > 1 and not SCHEDULES[cfg.parallel.pipeline_schedule].splits,
        ("parallel.pipeline_schedule", "parallel.pipeline_max_deferred_weight_grads"),
        f"only {_HAVE_WEIGHTS_LATER} defer weight gradients",
        "remove parallel.pipeline_max_deferred_weight_grads, or choose one of these",
        (*_PIPELINE, "parallel.pipeline_max_deferred_weight_grads=2"),
        unread="parallel.pipeline_max_deferred_weight_grads",
        reads=("parallel.pipeline",),
    ),
    Incompatible(
        "balance of layers that are listed",
        lambda cfg: cfg.parallel.pipeline > 1 and cfg.parallel.pipeline_layers_per_stage is not None,
        ("parallel.pipeline_balance", "parallel.pipeline_layers_per_stage"),
        "the list says how many layers each stage has",
        "remove one of the two",
        (*_PIPELINE, "parallel.pipeline_layers_per_stage=[1, 1]", "parallel.pipeline_balance=memory"),
        unread="parallel.pipeline_balance",
        reads=("parallel.pipeline",),
    ),
    Incompatible(
        "stages of another model's class",
        lambda cfg: cfg.parallel.pipeline > 1 and cfg.model.implementation != "native",
        ("model.implementation", "parallel.pipeline"),
        "only our own models are cut into stages",
        "remove model.implementation, or set parallel.pipeline=1",
        (*_PIPELINE, "model.implementation=transformers"),
    ),
    Incompatible(
        "compiled layers and deferred weight gradients",
        lambda cfg: cfg.parallel.pipeline > 1 and cfg.compile and SCHEDULES[cfg.parallel.pipeline_schedule].splits,
        ("parallel.pipeline_schedule", "compile"),
        f"the weight gradients of compiled layers cannot be deferred, as {_HAVE_WEIGHTS_LATER} do",
        "set compile=false, or choose gpipe, 1f1b or interleaved_1f1b",
        (*_PIPELINE, "parallel.pipeline_schedule=zbv", "compile=true"),
        reads=("parallel.pipeline",),
    ),
)
