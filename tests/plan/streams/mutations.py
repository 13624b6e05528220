"""Simulate runs that use several streams, with one line's waits taken out.

`check(name, removed)` simulates one of CASES without the waits (for streams, events, collectives)
of a line of code. The stream checker, which looks for memory that two streams use in no certain
order, has to find each wait that is missing. No tensor has any bytes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe_lib.plan.allocation.scratch import make_kernel_memory
from recipe_lib.plan.simulated_world.simulated_device import NAME, Event, Stream
from recipe_lib.plan.streams.code_lines import Line
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.trace_rank import simulate
from tests.plan.apart import build_settings

_SMALL = ("device=auto", "max_seq_len=128")  # overrides of every case
# Files between a wait and the line that asked for it.
_BETWEEN = ("simulated_ranks.py", "transport.py")
# Files whose waits are not counted: the simulated device's, and those of synchronous collectives.
_NO_WAITS = ("simulated_device.py", "distributed_c10d.py")
# A wait in the first file counts for its caller too; a decorator of the second is between the two.
_COPIES = ("host_copies.py", "_contextlib.py")
Waits = dict[Line, int]  # (file, line number) -> how often it waits


@dataclass(frozen=True)
class Case:
    """A run to simulate."""

    config: str  # name of a shipped one
    ranks: int
    overrides: tuple[str, ...]
    recipe: Callable[[type], type] = lambda recipe: recipe  # derives a class from the recipe's


def add_forward_without_backward(recipe: type) -> type:
    """Return a recipe whose step begins with a forward without a backward."""

    class Own(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            self.compute_loss(next(iter(batches.micro_batches)))
            return super().train_step(batches)

    return Own


def end_backward_early(recipe: type) -> type:
    """Return a recipe whose step begins with a backward that ends in the middle of the layers.

    Memory that was copied to the device ahead, for the layers below, is not used then.
    """

    class Own(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            loss = self.compute_loss(next(iter(batches.micro_batches)))
            late_parameters = [
                value
                for name, value in self.model.named_parameters()
                if ".layers.2." in name and value.requires_grad
            ]
            torch.autograd.grad(loss, late_parameters)
            del loss  # with its graph, before the step proper
            return super().train_step(batches)

    return Own


def leave_gradients_out(recipe: type) -> type:
    """Return a recipe in which every second parameter has no gradient after the first step."""

    class Own(recipe):  # type: ignore[misc, valid-type]
        _steps = 0

        def setup_optimizer(self) -> None:
            super().setup_optimizer()
            step = self.optimizer.step
            parameters = list(self.model.parameters())

            def step_some(*args: Any) -> None:
                self._steps += 1
                if self._steps > 1:
                    for parameter in parameters[::2]:
                        parameter.grad = None
                step(*args)

            self.optimizer.step = step_some

    return Own


# Overrides.
OFFLOAD = "memory.activation_offload=true"
STREAM = "memory.stream_layers=true"
IN_BACKWARD = ("memory.optimizer_in_backward=true", "clip_grad_norm=null")
PIPELINE = ("parallel.pipeline=2", "gradient_accumulation_steps=4")
CASES = {  # name -> run
    "activation offload": Case("demo/full", 1, (OFFLOAD,)),
    "activation offload, two layers ahead, checkpointed": Case(
        "demo/full",
        1,
        (
            OFFLOAD,
            "memory.activation_offload_prefetch_layers=2",
            "memory.activation_checkpointing=full",
        ),
    ),
    "activation offload, a graph without a backward": Case(
        "demo/full", ranks=1, overrides=(OFFLOAD,), recipe=add_forward_without_backward
    ),
    "activation offload, half a backward": Case(
        "demo/full", ranks=1, overrides=(OFFLOAD,), recipe=end_backward_early
    ),
    "optimizer offload": Case("demo/full", 1, ("memory.optimizer_offload=true",)),
    "optimizer offload, some without gradients": Case(
        "demo/full",
        ranks=1,
        overrides=("memory.optimizer_offload=true",),
        recipe=leave_gradients_out,
    ),
    "optimizer offload, stepping in backward": Case(
        "demo/full", 1, ("memory.optimizer_offload=true", *IN_BACKWARD)
    ),
    "FSDP": Case("demo/full", 4, ()),
    "FSDP, embedding and output of their own": Case(
        "demo/full",
        4,
        ("parallel.fsdp_wrap_policy=memory_efficient", "gradient_accumulation_steps=2"),
    ),
    "FSDP, reduced once a step": Case(
        "demo/full", 4, ("parallel.reduce_gradients=step", "gradient_accumulation_steps=2")
    ),
    "FSDP, CPU offload": Case("demo/full", 4, ("memory.cpu_offload=true",)),
    "FSDP, CPU offload, two micro-batches": Case(
        "demo/full", 4, ("memory.cpu_offload=true", "gradient_accumulation_steps=2")
    ),
    "FSDP, CPU offload, stepping in backward": Case(
        "demo/full", 4, ("memory.cpu_offload=true", *IN_BACKWARD)
    ),
    "FSDP, stepping in backward": Case("demo/full", 4, IN_BACKWARD),
    "HSDP": Case("demo/full", 4, ("parallel.data_replicate=2", "parallel.reduce_dtype=bf16")),
    "DDP": Case("demo/full", 4, ("parallel.strategy=ddp",)),
    "tensor parallel": Case("demo/full", 4, ("parallel.tensor=2",)),
    **{
        f"pipeline, {schedule}": Case(
            "demo/full", 4, (*PIPELINE, f"parallel.pipeline_schedule={schedule}")
        )
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
    },
    "pipeline, CPU offload": Case("demo/full", 4, (*PIPELINE, "memory.cpu_offload=true")),
    "pipeline, tied embedding": Case(
        "smollm2/135M_full", 2, (*PIPELINE, "data.source=examples/demo/train.jsonl")
    ),
    "layers streamed": Case("demo/lora", 1, (STREAM, "lora.quantize_base=nf4")),
    "layers streamed, on two ranks, checkpointed": Case(
        "demo/lora",
        2,
        (STREAM, "memory.activation_checkpointing=full", "gradient_accumulation_steps=2"),
    ),
    "layers streamed, half a backward": Case(
        "demo/lora", ranks=1, overrides=(STREAM,), recipe=end_backward_early
    ),
    "layers streamed, stepping in backward": Case(
        "demo/full", 1, (STREAM, "memory.optimizer_offload=true", *IN_BACKWARD)
    ),
    "LoRA on NF4": Case("demo/lora", 4, ("lora.quantize_base=nf4",)),
}


@contextmanager
def remove_waits(line: Line | None, seen: Waits) -> Iterator[None]:
    """Let the waits of one line of code do nothing inside; count in `seen` which lines wait.

    line: None removes none. A wait for a copy from or to the host counts for two lines: that of
    host_copies.py, which makes all such copies, and its caller's.
    """
    methods: list[tuple[Any, str]] = [
        (Stream, "wait_event"),
        (Stream, "wait_stream"),
        (Stream, "synchronize"),
        (Event, "wait"),
        (Event, "synchronize"),
        (StreamChecker, "note_work_wait"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in methods]

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)  # of the caller
            while Path(frame.f_code.co_filename).name in _BETWEEN and frame.f_back is not None:
                frame = frame.f_back
            lines = [(frame.f_code.co_filename, frame.f_lineno)]
            if Path(lines[0][0]).name == _COPIES[0]:
                while Path(frame.f_code.co_filename).name in _COPIES and frame.f_back is not None:
                    frame = frame.f_back
                lines.append((frame.f_code.co_filename, frame.f_lineno))
            for caller in lines:
                if Path(caller[0]).name not in _NO_WAITS:
                    seen[caller] = seen.get(caller, 0) + 1
            return None if line in lines else original(*args, **kwargs)

        return run

    for owner, name, original in originals:
        setattr(owner, name, watch(original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def follow(case: Case) -> StreamChecker:
    """Simulate two steps of a run's first rank; return the checker that followed them."""
    recipe, cfg, settings = build_settings(case.config, case.ranks, *case.overrides, *_SMALL)
    checker = StreamChecker(NAME)
    kernels = make_kernel_memory("sm89")  # scratch memory of kernels, as on an RTX 4090
    simulate(
        case.recipe(recipe),
        cfg,
        settings.sequence,
        ranks=case.ranks,
        phases=(),
        kernel_memory=kernels,
        checker=checker,
    )
    return checker


def check(name: str, removed: Line | None = None) -> tuple[StreamChecker, Waits]:
    """Simulate a case without the waits of line `removed`; return the checker and all waits.

    removed: None leaves all in place.
    """
    seen = Waits()
    with remove_waits(removed, seen):
        return follow(CASES[name]), seen
