"""Plans of runs with streamed layers against real runs on a CPU, and their host bytes against what
a run judges.

A real CPU has one memory, so that what is compared is device and host together; torch's rounding of
pinned memory, which a CPU does not have, is left out of the plan here.
"""

from pathlib import Path
from typing import Any

import pytest

from recipe_lib.memory import layer_stream
from recipe_lib.optim import optimizers
from recipe_lib.parallel import start_world
from recipe_lib.plan.tracing import tracer
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, simulate, trace_real_run
from recipe_lib.training.run_description import count_offloaded_bytes
from tests.distributed.collectives import let_collectives_go
from tests.distributed.ranks import run_ranks
from tests.plan.mixtures import MIXTURES, write_mixture
from tests.plan.test_real_runs import TEACHER, TIED, config_of
from tests.recipes.runs import DISTILL, FULL, LORA
from tests.selection import mark_slow_except

WIDTH = 32
STEPPING = (
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    "clip_grad_norm=null",
)
NF4 = "lora.quantize_base=nf4"
RECOMPUTE = "memory.activation_checkpointing=full"
CASES: dict[str, tuple[Any, ...]] = {
    "qlora, checkpointed": (1, LORA, TIED, NF4, RECOMPUTE),
    "teacher": (
        1, DISTILL, TIED, TEACHER, "distill.trainable=adapters", "distill.stream_teacher=true",
        "distill.quantize_teacher=nf4",
    ),
    "full, 8 bits, checkpointed": (1, FULL, TIED, *STEPPING, "dtype=bf16", "optimizer.state_bits=8", RECOMPUTE),
    "two ranks": (2, LORA, TIED, NF4),
    "experts, checkpointed": (1, LORA, "qwen3_moe", NF4, RECOMPUTE, "gradient_accumulation_steps=2"),
}  # fmt: skip
QUICK = ("qlora, checkpointed", "two ranks")


def with_a_host() -> None:
    """For the rest of a process a CPU has host memory besides its own."""
    layer_stream.has_host = optimizers.has_host = lambda device: True  # type: ignore[assignment]


def add_streaming(name: str) -> tuple[Any, ...]:
    """A case that streams its layers, or of a mixture the experts."""
    ranks, recipe, model, *overrides = CASES[name]
    streamed = "experts" if model in MIXTURES else "true"
    return ranks, recipe, model, f"memory.stream_layers={streamed}", "device=auto", *overrides


def planned(folder: Path, name: str) -> dict[str, Any]:
    """Of a plan: peaks of both memories together without rounding; the host's with it, and what a
    run judges.
    """
    with_a_host()
    recipe, cfg, shape = config_of(add_streaming(name), folder)
    judged: list[int] = []

    class Judged(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            judged.append(
                sum(count_offloaded_bytes(self.model, cfg, getattr(self, "teacher", None)).values())
            )
            return super().train_step(batches)

    def run() -> Any:
        return simulate(Judged, cfg, shape, ranks=CASES[name][0], phases=(), like_cpu=True)

    rounded = run().trace
    tracer.round_up_to_pinned = lambda num_bytes: num_bytes  # type: ignore[assignment]
    exact = run()
    for storage in exact.trace.storages:
        storage.device = True
    host = rounded.find_active_peaks(device=False)[STEADY]
    return {
        "peaks": exact.trace.find_active_peaks(),
        "repeats": exact.repeats,
        "host": host,
        "judged": judged[0],
    }


def measured(folder: Path, name: str) -> dict[str, Any]:
    with_a_host()
    recipe, cfg, shape = config_of(add_streaming(name), folder)
    with start_world(cfg) as world, let_collectives_go():
        found = trace_real_run(recipe, cfg, world, shape)
    return {"peaks": found.trace.find_active_peaks(), "repeats": found.repeats}


@pytest.mark.parametrize("name", mark_slow_except(CASES, QUICK))
def test_peaks_are_those_of_the_real_run_and_host_bytes_those_that_it_judges(
    tmp_path: Path, name: str
) -> None:
    if CASES[name][2] in MIXTURES:
        write_mixture(tmp_path, CASES[name][2])
    plan = run_ranks(planned, 1, tmp_path, name, process_group=False)[0]
    real = run_ranks(measured, CASES[name][0], tmp_path, name)[0]
    assert plan["repeats"] and real["repeats"]
    assert {phase: plan["peaks"][phase] for phase in (FIRST, STEADY)} == {
        phase: real["peaks"][phase] for phase in (FIRST, STEADY)
    }
    # The final norm's states are too small to be sent; values of an external model's buffers are
    # kept.
    small = 2 * WIDTH * 4 if CASES[name][1] == FULL else -64 if name == "transformers" else 0
    assert plan["host"] == plan["judged"] - small
