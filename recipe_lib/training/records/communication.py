"""How much of a step goes to communication: one step of a run is profiled on rank 0, the others are left alone.

torch's profiler notes when each kernel of the device runs, NCCL's among them; on a CPU when operators and gloo's
collectives do. From these times, each counted once however many run at a time:

    communication_share          time in which a collective runs / time of the step
    communication_exposed_share  time in which a collective runs and nothing is computed / time of the step
    scaling_efficiency           1 - communication_exposed_share

The last is the share of the step that would be left if all communication were hidden: what a rank does alone, as long
as nothing else about the step changes. A collective runs from when rank 0 enters it, so that waiting for slower ranks
is communication too. Copies between host and device are neither. The step that is profiled is a little slower than
others; what the profiler takes before and after it is outside of the step's seconds. The part for CUDA has
not run on a GPU (docs/measurements/on_a_gpu.md).
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from recipe_lib.config.schema import LogConfig
from recipe_lib.logs import get_logger

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

Spans = list[tuple[int, int]]  # beginning and end, ns

_COMMUNICATION = ("nccl", "gloo:")  # NCCL's kernels and annotations; gloo's collectives on its own threads
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
_SILENT = ("KINETO_LOG_LEVEL", "99")  # kineto prints two lines for each profile otherwise
_OPERATORS = "aten::"  # of a CPU; what surrounds them (autograd's nodes, hooks) also waits


class CommunicationProbe:
    """Measures one step. Ranks other than the main one, a world of one rank and `step` None measure nothing.

    check(last)    once, with the number of the run's last step
    begin(step)   before each step
    end(seconds)  when the step is over, on the device too; the numbers, or none if it was not the step
    close()       when the run ends in whatever way
    """

    def __init__(self, step: int | None, world: "World") -> None:
        self._step = step if world.is_main and world.size > 1 else None
        self._device = world.device
        self._profiler: Any = None

    def check(self, last: int) -> None:
        """Says so if the run's last step is before the one that was asked for; of the default nobody did."""
        if self._step is not None and self._step > last and self._step != LogConfig().communication_step:
            get_logger().warning(
                "warning: log.communication_step: found %d in a run of %d steps, so communication is not measured; set "
                "it to a step of the run, or to null",
                self._step,
                last,
            )

    def begin(self, step: int) -> None:
        """Starts the profiler if this is the step. What goes wrong with it is said, and nothing to the run."""
        if step != self._step:
            return
        if torch.autograd._profiler_enabled():
            _say_none("another profiler is at work")
            return
        os.environ.setdefault(*_SILENT)
        on_cpu = self._device.type == "cpu"
        device = None if on_cpu else self._device.type
        try:
            # What torch.profiler stands on: that would import the compiler first, for seconds.
            profiler = torch.autograd.profiler.profile(use_cpu=on_cpu, use_device=device, use_kineto=True)
            profiler.__enter__()
        except Exception as error:  # noqa: BLE001
            _say_none(_first_line(error))
            return
        self._profiler = profiler

    def end(self, seconds: float) -> dict[str, float]:
        """The shares, see the module's docstring. seconds: wall time of the step."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return {}
        try:
            profiler.__exit__(None, None, None)
            communication, computation = spans_of(profiler.kineto_results.events(), self._device)
        except Exception as error:  # noqa: BLE001
            _say_none(_first_line(error))
            return {}
        if not computation:  # no permission to look at the device, say
            _say_none("the profiler saw nothing run")
            return {}
        return shares(communication, computation, seconds)

    def close(self) -> None:
        """Stops the profiler if the step was not finished."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            try:
                profiler.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001
                _say_none(_first_line(error))


def describe(step: int, found: dict[str, float]) -> str:
    """The numbers as a line."""
    return (
        f"step {step}: {found['communication_share']:.1%} of its time in communication, "
        f"{found['communication_exposed_share']:.1%} not hidden by computation; scaling efficiency "
        f"{found['scaling_efficiency']:.1%} (1 - what is not hidden)"
    )


def spans_of(events: Iterable[Any], device: torch.device) -> tuple[Spans, Spans]:
    """(of collectives, of computation), from kineto's events of a device; in no order."""
    communication: Spans = []
    computation: Spans = []
    on_cpu = device.type == "cpu"
    for event in events:
        name = event.name()
        if not on_cpu and (
            event.device_type() != torch.autograd.DeviceType.CUDA or event.device_index() != device.index
        ):
            continue
        if name.startswith(_COMMUNICATION):
            into = communication
        elif on_cpu:
            if not name.startswith(_OPERATORS):
                continue
            into = computation
        elif name.startswith(_COPIES) or event.is_user_annotation():
            continue
        else:
            into = computation
        into.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return communication, computation


def shares(communication: Spans, computation: Spans, seconds: float) -> dict[str, float]:
    """The numbers of the module's docstring; seconds: of the step."""
    collectives, work = merged(communication), merged(computation)
    total = sum(end - begin for begin, end in collectives)
    exposed = total - overlap(collectives, work)
    whole = max(seconds * 1e9, 1.0)
    found = {
        "communication_share": min(total / whole, 1.0),
        "communication_exposed_share": min(exposed / whole, 1.0),
    }
    return found | {"scaling_efficiency": 1.0 - found["communication_exposed_share"]}


def merged(spans: Spans) -> Spans:
    """The time that any of the spans covers, as spans that do not touch, in order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def overlap(first: Spans, second: Spans) -> int:
    """Nanoseconds that two lists of merged spans have in common."""
    total, at = 0, 0
    for begin, end in first:
        while at < len(second) and second[at][1] <= begin:
            at += 1
        place = at
        while place < len(second) and second[place][0] < end:
            total += min(end, second[place][1]) - max(begin, second[place][0])
            place += 1
    return total


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _say_none(reason: str) -> None:
    get_logger().info(f"communication: not measured ({reason}); log.communication_step=null leaves it out")
