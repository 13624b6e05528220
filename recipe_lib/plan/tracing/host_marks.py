"""Marks in a trace that the host waits for: events, streams, and copies that it sees done."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipe_lib.plan.trace import HOST, RECORD, WAIT, Sync, Trace
from recipe_lib.plan.tracing.operator_costs import Cost

if TYPE_CHECKING:
    from recipe_lib.plan.tracing.tracer import Tracer


def host_waits(trace: Trace, stream: int) -> None:
    """The host waits for all that was issued on a stream: a mark there, which it waits for."""
    mark = -2 - len(trace.syncs)  # no event of the device's has such a number
    trace.syncs += [Sync(mark, stream), Sync(mark, HOST)]
    count = len(trace.syncs)
    trace.events += [(RECORD, count - 2), (WAIT, count - 1)]


def following_host(tracer: "Tracer") -> Callable[[str, int | None, int | None], None]:
    """What notes that the host waits for an event, for a stream, or for the device, which is the stream that computes;
    a checker of the tracer's hears of it."""

    def synchronized(what: str, stream: int | None, event: int | None) -> None:
        trace = tracer.trace
        if event is None:
            host_waits(trace, stream or 0)
        elif event >= 0:
            trace.syncs.append(Sync(event, HOST))
            trace.events.append((WAIT, len(trace.syncs) - 1))
        if tracer.checker is not None:
            tracer.checker.synchronized(what, stream, event)

    return synchronized


def copy_blocks(cost: Cost, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits for a copy to itself."""
    if cost.transfer != "to_host":
        return False
    position = 2 if cost.name == "aten::copy_" else len(args)
    return not kwargs.get("non_blocking", len(args) > position and args[position])
